"""What each technique does to the bytes of a step: one table, EFFECTS.

Read a row as a sentence: "ZeRO-1 cuts the optimizer's state to a rank's part; of the update's temporaries nothing is
left". Or "attention in tiles drops scores, cuts the copies of q, k and v to what tiles keep, and puts tiles in place".
"""

from ...common.ledger import ACTIVATIONS, GRADIENTS, INPUTS, OPTIMIZER_STATE, PARAMETERS
from ...memory.tracking.taking import WORKSPACE
from ..kinds import CASTS, COPIES, MASKS, OF_LOSS, OF_SCORES, OTHER, UPDATE
from . import batches, head, recomputed, saved, states, tiles
from .found import or_retained
from .row import Row, cut, dropped, moved, packed, part

AS_THE_BATCH = (*OF_LOSS, *OF_SCORES, MASKS, OTHER, WORKSPACE)  # temporaries that are as large as the batch
BUCKETS = "buckets, and what is whole for a moment, come on top"


def in_parts(n, **said):
    """Cut batches to 1/n: gradients wait for the other parts."""
    return Row([cut(batches.of_rows, to=part(n))], [batches.waiting_gradients], loose=False,
               bound="of what rows made and a step lets go of; the loss has to be a mean over the rows",
               nothing="nothing is made of a batch's rows", **said)


def made_again(calls, **said):
    """Drop what calls keep for backward until it begins."""
    return Row([dropped(calls.kept, when=calls.until_backward)], [calls.once_more], **said)


def in_fewer_bytes(to, bound=saved.blocks_again, nothing="nothing of a wider type that wants a gradient is saved"):
    """Pack what autograd saves, for as long as no operation uses it, and no variable of a module holds it."""
    def away(when):
        return [packed(saved.tensors, to=to, when=when)]

    return Row(away(saved.while_unused), least=away(saved.once_returned), most=away(saved.at_once), bound=bound,
               apart="what a module's variables hold is there beside what is packed, until it returns",
               loose=saved.again, nothing=or_retained(nothing))


EFFECTS = {
    "none": Row([dropped(GRADIENTS, when=states.between_steps)], bound="in backward they come back one after the other",
                loose=False, nothing="gradients are None already while the forward runs"),
    "no_grad": Row([dropped(states.saved_for_no_backward)], bound="what the program itself keeps stays", loose=False,
                   nothing="every forward here has its backward"),
    "autocast": Row([cut(states.in_32_bits, to=states.in_16_bits), dropped(GRADIENTS)],  # else copies are at the peak
                    bound="norms, most losses and what they read stay in 32 bits, and weights are cast",
                    unless=states.has_16_bits, nothing="no activation has 32 bits"),
    "accumulate": in_parts(2, unless=batches.whole(2, "no model was given a batch of so many rows")),
    "rows": in_parts(batches.most_rows, unless=batches.whole(3, "the batch has two rows at most")),
    "recompute": made_again(recomputed.BLOCKS, unless=recomputed.no_blocks,
                            nothing=or_retained("the blocks keep nothing for backward")),
    "masks": in_fewer_bytes(saved.lossless, nothing="no mask is saved"),
    "bf16": in_fewer_bytes(saved.bf16),
    "int8": in_fewer_bytes(saved.int8, bound="what has inf, NaN or logarithms far apart stays whole"),
    "host": Row([moved(saved.of_a_mib, when=saved.while_unused)],
                bound="copies on their way are on the device; on a CPU nothing is saved",
                nothing=or_retained("no saved tensor has 1 MiB")),
    "chunks": Row([cut(ACTIVATIONS), cut(*AS_THE_BATCH), dropped(*OF_SCORES)], unless=states.no_sequence,
                  bound="keys, values and their gradients stay for all chunks"),
    "logits": Row([dropped(head.all_tokens)], [head.some_tokens], unless=head.no_loss,
                  nothing="no rows of logits are in memory"),
    "mlp": made_again(recomputed.MLPS, nothing=or_retained("the MLPs keep nothing for backward"),
                      unless=lambda timeline: "" if recomputed.mlps(timeline) else
                      "no MLP here is a module of its own, that drops out nothing and has no hooks"),
    "attention": Row([dropped(tiles.softmaxes), dropped(*OF_SCORES), cut(tiles.copies, to=tiles.sources)],
                     [tiles.products, tiles.tiles], most=[dropped(tiles.copies_of_shared_heads)], bound=tiles.bound,
                     loose=False, nothing="no scores of tokens × tokens are in memory: attention runs in tiles "
                                          "already, or there is none"),
    "sparse": Row([dropped(MASKS), dropped(*OF_SCORES)], unless=tiles.no_masks,
                  bound="lists of blocks, and tiles in backward, come on top"),
    "data": Row([cut(ACTIVATIONS, INPUTS), cut(*AS_THE_BATCH)],
                unless=lambda timeline: "the batch has one row" if batches.most_rows(timeline) == 1 else "",
                bound="gradients on their way are in buckets"),
    "zero1": Row([cut(OPTIMIZER_STATE), dropped(UPDATE)], bound=BUCKETS),
    "zero2": Row([cut(OPTIMIZER_STATE, GRADIENTS), dropped(UPDATE)], bound=BUCKETS),
    "zero3": Row([cut(OPTIMIZER_STATE, GRADIENTS, PARAMETERS), dropped(UPDATE)], bound=BUCKETS),
    "offload": Row([moved(OPTIMIZER_STATE, GRADIENTS), dropped(UPDATE)],
                   bound="where the device has a memory of its own; a bucket is there in turn"),
    "compression": Row([], nothing="it saves bytes on the wire, none in memory"),
    "tensor": Row([cut(OPTIMIZER_STATE, GRADIENTS, PARAMETERS, ACTIVATIONS), cut(*AS_THE_BATCH, COPIES, CASTS),
                   dropped(UPDATE)], bound="norms, and activations between the layers, stay whole"),
    "context": Row([cut(ACTIVATIONS, INPUTS), cut(*AS_THE_BATCH), dropped(*OF_SCORES)], unless=states.no_sequence,
                   bound="keys and values of others pass by"),
    "pipeline": Row([cut(OPTIMIZER_STATE, GRADIENTS, PARAMETERS, ACTIVATIONS), cut(*AS_THE_BATCH, COPIES, CASTS),
                     dropped(UPDATE)], bound="ranks with the embedding or the head hold more; the first keeps as many "
                                             "micro-batches as there are ranks"),
    "allocator": Row([], [states.fragments], bound="of what is reserved, not of the tensors", loose=False,
                     nothing="a CPU's allocator reserves nothing; on CUDA the difference of reserved and allocated is "
                             "said here"),
}
