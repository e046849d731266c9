"""Why a request failed, by what is known of the run: each cause with the line, and the change that takes it away.

A cause is a function of the facts of a failure (`failure.py`), which returns a Cause or None. The order is that in
which they are said: what grows, or is not as it was meant, stands before what is merely large.
"""

from typing import NamedTuple

from ..common.ledger import PARAMETERS, human
from ..explain.kept.names import UNSEEN
from ..explain.no_gradients import CURE as INPUTS_WANT_NO_GRADIENT
from ..explain.phases import EVALUATION, GENERATION, OPTIMIZER, SAVE
from .live import RUNNING
from .longest_batch import rows_and_length

LARGE = 0.1  # share of what is live, or of the device: less is no cause
LET_GO = "let it go as the step ends: keep its `.item()`, or a copy on the host"


class Cause(NamedTuple):
    """One cause. `nbytes`: what its cure saves, 0 if that is not known; `line`: where, as "train.py:31: …"."""

    name: str
    what: str
    line: str
    cure: str
    nbytes: int = 0


def causes(facts):
    """List the Causes of a failure."""
    return [each for find in FINDERS for each in find(facts) if each is not None]


def _grows(facts):
    grows = (facts.traced or {}).get("grows") or []
    rate, since = facts.growth or (0, None)
    for each in grows:
        yield Cause("growth", f"grows by {each['bytes']:,} bytes a step{f' since step {since}' if since else ''}, "
                    f"held by {each['holder']}", " and ".join(each["lines"]), each["cure"] or LET_GO, each["bytes"])
    if not grows and facts.growth:
        yield Cause("growth", f"grows by {rate:,} bytes a step since step {since}", "",
                    "look at what the script keeps, below")


def _recomputation(facts):
    for model in facts.known.models:
        off = [type(module).__name__ for module in model.modules()
               if getattr(module, "gradient_checkpointing", False) is True and not module.training]
        if off:
            yield Cause("recomputation", f"recomputation was asked for, and {len(off)} modules of "
                        f"{type(model).__name__} ({', '.join(sorted(set(off)))}) are in eval(), where they do not "
                        "recompute", facts.line, "call model.train() before the step")
    if facts.recomputed_without:
        yield Cause("recomputation", "recomputation gives no gradients here", facts.line, INPUTS_WANT_NO_GRADIENT)


def _others(facts):
    others = facts.device["by others"]
    if others > LARGE * facts.device["capacity"] and others >= facts.missing:
        yield Cause("others", f"{human(others)} of the device are of others: another process, or this one's libraries",
                    facts.line, "see nvidia-smi, end the other process, or choose another device", others)


def _fragmentation(facts):
    device = facts.device
    if facts.missing <= 0 and device["reserved"] > device["allocated"] and device["free"] > LARGE * device["capacity"]:
        helps = [settings for settings, passes in facts.settings.items() if passes]
        if helps:
            cure = f"PYTORCH_ALLOC_CONF={helps[0]} lets this request pass, by a replay of what the allocator recorded"
        elif facts.settings:
            cure = "none of the allocator's settings that were replayed lets this request pass: see below"
        else:
            cure = "PYTORCH_ALLOC_CONF=expandable_segments:True may keep free memory in one piece: it was not replayed"
        yield Cause("fragmentation", f"{human(device['free'])} are free, the largest piece has "
                    f"{human(device['largest free'])}", facts.line, cure)


def _saving(facts):
    if facts.phase == SAVE:
        yield Cause("save", "it is saving: a copy of the state is made beside it", facts.line,
                    "save from the host: let each tensor go to the CPU by itself, or save a shard a rank")


def _update(facts):
    for each in facts.known.optimizers if facts.phase == OPTIMIZER else ():
        updated = [(group, p) for group in each.param_groups for p in group["params"] if p.grad is not None]
        without = sum(p not in each.state for _, p in updated)
        if without and facts.step == 1:
            yield Cause("state", f"{type(each).__name__} makes its state, of {without} parameters yet, and there is no "
                        "room for it", facts.line, "keep it on the host, or on other ranks: see below")
        elif any(group.get("foreach") or (group.get("foreach") is None and p.is_cuda and not group.get("fused"))
                 for group, p in updated):
            yield Cause("update", f"{type(each).__name__} updates all parameters at once, and its temporaries are as "
                        "large as they are together", facts.line, "foreach=False, or fused=True")


def _longest(facts):
    if facts.batch and facts.before:
        rows, length = rows_and_length(facts.batch)
        if length <= facts.before.longest and rows * length > facts.before.largest > 0:
            yield Cause("largest batch", f"the largest batch so far: {rows:,} rows of {length:,}", facts.line,
                        "take fewer rows, or such a batch in micro-batches")
        elif length > facts.before.longest > 0:
            yield Cause("longest batch", f"the longest batch so far: {rows} rows of {length:,}, and the longest before "
                        f"had {facts.before.longest:,}", facts.line, "cut longer rows, put rows of one length together "
                        "and fewer of long ones, or take such a batch in micro-batches")


def _kept(facts):
    total = sum(facts.live.ledger.values())
    for each in facts.live.holders:
        if each.nbytes < LARGE * total or each.holder in (RUNNING, UNSEEN) or _is_of_this_step(each, facts):
            continue
        many = f"{each.count:,} tensors" if each.count > 1 else "one tensor"
        if facts.phase in (EVALUATION, GENERATION):
            name, cure = "predictions", "take each to the host, `.cpu()`, or add up what is asked for, `.item()`"
        elif each.in_graph:
            name, cure = "kept", each.cure or "keep its `.detach()`, or its `.item()`: its graph keeps the rest"
        else:
            name, cure = "kept", each.cure or "keep it on the host, and move what a step needs"
        yield Cause(name, f"{each.nbytes:,} bytes in {many} are held by {each.holder}", each.line, cure, each.nbytes)


def _is_of_this_step(held, facts):
    """Tell whether a plain variable of the function that asked, or of the script, has the graph: no list of graphs."""
    where = held.holder.rpartition("`")[2]
    return held.in_graph and "[…]" not in held.holder and where in ("", f" of {facts.running}()")


def _second_model(facts):
    sizes = {model: sum(p.numel() * p.element_size() for p in model.parameters()) for model in facts.known.models}
    updated = {id(p) for each in facts.known.optimizers for group in each.param_groups for p in group["params"]}
    for model, nbytes in sizes.items():
        frozen = not any(id(p) in updated for p in model.parameters())
        if frozen and updated and nbytes > LARGE * sum(facts.live.ledger.values()):
            yield Cause("second model", f"{nbytes:,} bytes are a second model, {type(model).__name__}, that nothing "
                        "updates", facts.live.lines_of_models.get(model, ""), "keep it on the host or in 16 bits, or "
                        "compute what it is asked for beforehand", nbytes)


def _too_large(facts):
    states = sum(facts.live.ledger.get(name, 0) for name in (PARAMETERS, "gradients", "optimizer state"))
    yield Cause("size", f"weights, gradients and optimizer states take {human(states)} of "
                f"{human(facts.device['capacity'])}", facts.line, "")


FINDERS = (_grows, _recomputation, _others, _longest, _saving, _update, _fragmentation, _kept, _second_model,
           _too_large)
