"""Right answers pass, wrong and unanswered ones do not; norms on real ranks."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import three_dimensions as page
from refimpl.comm.traffic import ring_traffic
from refimpl.engine.closed_forms import wire_seconds

# --- first -----------------------------------------------------------------------------------------------------------


def predict(x, parameters, layers, micro_batches, tp, dp):
    over_tp = 4 * 2 * (tp - 1) * x // tp * layers * micro_batches
    over_pp = 2 * x * micro_batches
    over_dp = 2 * (dp - 1) * parameters // dp
    return over_tp, over_pp, over_dp


def by_collectives(x, parameters, layers, micro_batches, tp, dp):
    sums = [ring_traffic("all_reduce", x, tp) for _ in range(micro_batches * layers) for _ in range(4)]
    halves = ring_traffic("reduce_scatter", parameters, dp), ring_traffic("all_gather", parameters, dp)
    return sum(sums), micro_batches * (x + x), sum(halves)


def by_shares(x, parameters, layers, micro_batches, tp, dp):
    def share(n):
        return 2 * (1 - 1 / n)

    return [4 * share(tp) * x * layers * micro_batches, 2 * micro_batches * x, share(dp) * parameters]


def faulty(x, parameters, layers, micro_batches, tp, dp, *, sums=4, ring=lambda n: 2 * (n - 1) / n, neighbours=2,
           of_tp=lambda layers, m: layers * m, of_pp=lambda layers, m: m, of_dp=lambda layers, m: 1):
    return (sums * ring(tp) * x * of_tp(layers, micro_batches), neighbours * x * of_pp(layers, micro_batches),
            ring(dp) * parameters * of_dp(layers, micro_batches))


# --- second ----------------------------------------------------------------------------------------------------------


def global_norm(comm, parameters):
    squares = sum(p.grad.square().sum() for p in parameters
                  if comm.rank == min(p.shard_spec.replicas or (comm.rank,)))
    return comm.all_reduce(squares).sqrt()


def each_a_part(comm, parameters):
    """What n ranks hold counts 1/n on each."""
    squares = [p.grad.norm() ** 2 / max(1, len(p.shard_spec.replicas)) for p in parameters]
    return comm.all_reduce(torch.stack(squares).sum()).item() ** 0.5


def by_the_last_rank(comm, parameters):
    counted = [p.grad for p in parameters if p.shard_spec.replicas[-1:] in ((), (comm.rank,))]
    norm = torch.nn.utils.get_total_norm(counted)
    return comm.all_gather(norm.reshape(1)).norm()


def with_fault(comm, parameters, *, counts=None, total=None, root=True):
    def first(p):
        return comm.rank == min(p.shard_spec.replicas or (comm.rank,))

    squares = sum((p.grad.square().sum() for p in parameters if (counts or first)(p)), torch.tensor(0.0))
    squares = (total or comm.all_reduce)(squares)
    return squares.sqrt() if root else squares


def of_this_rank(comm, parameters):
    return sum(p.grad.square().sum() for p in parameters).sqrt().item()


def copies_count(comm, parameters):
    return with_fault(comm, parameters, counts=lambda p: True)


def only_of_rank_0(comm, parameters):
    """Right for one stage."""
    return with_fault(comm, parameters, counts=lambda p: comm.rank == 0 or not p.shard_spec.replicas)


def copies_do_not_count(comm, parameters):
    return with_fault(comm, parameters, counts=lambda p: not p.shard_spec.replicas)


def vectors_of_even_ranks(comm, parameters):
    """A bias of a cut layer is a vector, and is cut."""
    return with_fault(comm, parameters, counts=lambda p: p.ndim > 1 or comm.rank % 2 == 0)


def norms_are_added(comm, parameters):
    counted = [p.grad for p in parameters if comm.rank == min(p.shard_spec.replicas or (comm.rank,))]
    return comm.all_reduce(torch.nn.utils.get_total_norm(counted))


def squared_in_place(comm, parameters):
    """Right, but gradients are squares afterwards."""
    squares = sum(p.grad.pow_(2).sum() for p in parameters if comm.rank == min(p.shard_spec.replicas or (comm.rank,)))
    return comm.all_reduce(squares).sqrt()


def of_all_gradients(comm, parameters):
    """Right, but each rank gets all gradients."""
    flat = torch.cat([p.grad.flatten() for p in parameters
                      if comm.rank == min(p.shard_spec.replicas or (comm.rank,))])
    most = int(comm.all_reduce(torch.tensor([float(len(flat))]), "max").item())
    return comm.all_gather(torch.nn.functional.pad(flat, (0, most - len(flat)))).norm()


def freed(comm, parameters):
    norm = global_norm(comm, parameters)
    norm.untyped_storage().resize_(0)
    return norm


# --- third -----------------------------------------------------------------------------------------------------------


def seconds(traffic, mesh, per_node, inside, between):
    found = {}
    for axis, nbytes in traffic.items():
        within = max(mesh.ranks(axis, rank=0)) < per_node
        found[axis] = nbytes / (inside if within else between)
    return found


def by_nodes(traffic, mesh, per_node, inside, between):
    nodes = {axis: {rank // per_node for rank in mesh.ranks(axis, rank=0)} for axis in traffic}
    return {axis: nbytes / inside if nodes[axis] == {0} else nbytes / between for axis, nbytes in traffic.items()}


def by_strides(traffic, mesh, per_node, inside, between):
    strides, stride = {}, 1
    for axis in ("tp", "dp", "pp"):
        strides[axis], stride = stride, stride * mesh.sizes[axis]
    speeds = {axis: inside if strides[axis] * (mesh.sizes[axis] - 1) < per_node else between for axis in traffic}
    return {axis: traffic[axis] / speeds[axis] for axis in traffic}


def by_the_library(traffic, mesh, per_node, inside, between):
    return wire_seconds(traffic, mesh, 0, per_node, inside, between)


def misjudged(within, scale=1):
    """Return an answer that judges by `within(mesh, axis, per_node)` whether a group is within a node."""
    def answer(traffic, mesh, per_node, inside, between):
        return {axis: scale * nbytes / (inside if within(mesh, axis, per_node) else between)
                for axis, nbytes in traffic.items()}

    return answer


def rightly(mesh, axis, per_node):
    return max(mesh.ranks(axis, rank=0)) < per_node


def extent(mesh, axis, per_node):
    """Right where a node has a whole number of groups."""
    return {"tp": mesh.tp, "dp": mesh.tp * mesh.dp, "pp": mesh.tp * mesh.dp * mesh.pp}[axis] <= per_node


def by_links(traffic, mesh, per_node, inside, between):
    """A ring is as fast as its slowest link, not as the mean."""
    found = {}
    for axis, nbytes in traffic.items():
        nodes = [rank // per_node for rank in mesh.ranks(axis, rank=0)]
        slow = sum(a != b for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True)) / len(nodes)
        found[axis] = nbytes * (slow / between + (1 - slow) / inside)
    return found


def of_tp_alone(traffic, *given):
    return {"tp": seconds(traffic, *given)["tp"]}


ANSWERS = {
    page.first: Answers(
        right=[predict, by_collectives, by_shares],
        wrong=[
            (partial(faulty, of_dp=lambda layers, m: m), "over dp, a rank sends 25,792; gradients are summed once"),
            (partial(faulty, sums=2), "over tp, a rank sends 65,536; each layer sums x four times"),
            (partial(faulty, neighbours=1), "over pp, a rank sends 32,768; for each micro-batch x goes to the next"),
            (partial(faulty, ring=lambda n: (n - 1) / n), "over tp, a rank sends 65,536"),
            (partial(faulty, ring=lambda n: 1), "tp 4, dp 2, 1 layer, 8 micro-batches of 2,048 bytes, parameters of "
                                                "13,280 bytes: you say 65,536 over tp, a rank sends 98,304"),
            (partial(faulty, of_tp=lambda layers, m: layers), "you say 16,384.0 over tp, a rank sends 65,536"),
            (partial(faulty, of_tp=lambda layers, m: m), "tp 2, dp 4, 2 layers, 4 micro-batches of 4,096 bytes"),
            (partial(faulty, of_pp=lambda layers, m: 1), "you say 8,192 over pp, a rank sends 32,768"),
            (partial(faulty, of_pp=lambda layers, m: layers * m), "you say 65,536 over pp, a rank sends 32,768"),
            (lambda x, parameters, layers, m, tp, dp: predict(x, tp * parameters, layers, m, tp, dp), "over dp"),
            (lambda *case: predict(*case)[::-1], "over tp, a rank sends 65,536"),
            (lambda *case: predict(*case)[:2], "expected 3 values"),
            (lambda *case: sum(predict(*case)), "expected 3 values")],
    ),
    page.second: Answers(
        right=[global_norm, each_a_part, by_the_last_rank],
        wrong=[
            (of_this_rank, "the whole model's norm is 482.252. It is less: the squares of all ranks are summed"),
            (copies_count, "It is more: what several ranks hold counts once"),
            (only_of_rank_0, "rank 0 of 4: you say"),
            (copies_do_not_count, "rank 0 of 2: you say"),
            (vectors_of_even_ranks, "each gradient counts on some rank"),
            (norms_are_added, "It is more: what several ranks hold counts once, and squares are summed, not norms"),
            (partial(with_fault, root=False), ": that is its square"),
            (lambda comm, parameters: with_fault(comm, parameters, total=lambda x: comm.all_reduce(x, "avg")),
             "It is less: the squares of all ranks are summed"),
            (lambda comm, parameters: with_fault(comm, parameters, total=lambda x: comm.all_reduce(x, "max")),
             "It is less: the squares of all ranks are summed"),
            (lambda comm, parameters: global_norm(comm, parameters) * (comm.rank == 0), "rank 1 of 2: you say"),
            (lambda comm, parameters: max(p.grad.abs().max() for p in parameters), "It is less"),
            (lambda comm, parameters: torch.tensor(float("nan")), "rank 0 of 2: you say nan, the whole model's norm"),
            (squared_in_place, "your function changes the gradients"),
            (lambda comm, parameters: torch.stack([p.grad.norm() for p in parameters]), "expected a number"),
            (freed, "the storage of the norm was freed"),
            (lambda *_: "n", "expected a number, or a tensor of one, you return 'n'")],
        saves_nothing=(of_all_gradients, "the norm is right, but rank 0 of 2 sent"),
    ),
    page.third: Answers(
        right=[seconds, by_nodes, by_strides, by_the_library],
        wrong=[
            (misjudged(lambda mesh, axis, per_node: mesh.sizes[axis] <= per_node),
             "Mesh(dp=2, tp=4, pp=2) on nodes of 4: you say 0.0025 s for pp, it takes 0.02; its ranks 0, 8 are on the "
             "nodes 0, 2"),
            (misjudged(lambda mesh, axis, per_node: max(mesh.ranks(axis, rank=0)) <= per_node),
             "for dp, it takes 0.04; its ranks 0, 4 are on the nodes 0, 1"),
            (misjudged(lambda *given: not rightly(*given)), "for tp, it takes 0.015; its ranks 0, 1, 2, 3 are on"),
            (misjudged(lambda mesh, axis, per_node: axis == "tp"), "Mesh(dp=2, tp=8, pp=2) on nodes of 4: you say"),
            (misjudged(lambda *given: True), "for pp, it takes 0.02"),
            (misjudged(lambda *given: False), "for tp, it takes 0.015"),
            (misjudged(extent), "on nodes of 5: you say 0.2 s for dp, it takes 0.125; its ranks 0, 4 are on the nodes "
                                "0, 0"),
            (misjudged(rightly, scale=1e3), "you say 15 s for tp, it takes 0.015"),
            (by_links, "for tp, it takes"),
            (of_tp_alone, "expected {axis: seconds} of tp, pp, dp; you say {'tp': 0.015}"),
            (lambda *given: dict.fromkeys(seconds(*given), "fast"), "the seconds of tp: expected a number, you return "
                                                                    "'fast'"),
            (lambda *given: sum(seconds(*given).values()), "expected a dict"),
            (lambda *_: {}, "expected {axis: seconds} of tp, pp, dp; you say {}")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


def test_gradients_are_those_of_the_whole_model():
    """Each tensor of the whole has one, and as a part has the same numbers."""
    whole = page._gradients(page.GPT(page.CONFIG))
    assert all(torch.isfinite(p.grad).all() and p.grad.norm() > 0 for p in whole.parameters())
