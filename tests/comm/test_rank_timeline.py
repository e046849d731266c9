"""Over a link, what was waited for and what was hidden behind computation is arithmetic, by collective."""

import torch
from patience import about, against_the_clock
from rank_pool import pooled
from torch import nn

from refimpl.comm import Delay, FakeCommunicator, Link, compute
from refimpl.comm.rank_timeline import timeline

X = torch.ones(300_000)  # 1.2 MB, half of which a rank of two sends in an all_gather of it, or a reduce_scatter
LINK = Link(bytes_per_second=6e6)


def steps(comm, tries=3):
    """An all_gather of 0.2 s under computation of 0.4 s; then a reduce_scatter of 0.1 s under 0.04 s."""
    comm.link, lines = LINK, []
    for _ in range(tries):
        comm.barrier()
        with timeline() as line:
            handle = comm.all_gather(X, async_op=True, label="blocks.0")
            compute(0.4, "forward", "blocks.0")
            handle.wait()
            handle = comm.reduce_scatter(X, async_op=True, label="blocks.0")
            compute(0.04, "backward", "blocks.0")
            handle.wait()
        lines.append(line)
    return lines


@against_the_clock
def test_what_is_waited_for_and_what_is_hidden():
    for lines in pooled(steps, 2):
        for kind, seconds, waited in (("all_gather", 0.2, 0.0), ("reduce_scatter", 0.1, 0.06)):
            about([line.seconds(kind) for line in lines], seconds, 0.01)
            about([line.waited(kind) for line in lines], waited, 0.01)
            about([line.hidden(kind) for line in lines], seconds - waited, 0.01)
        assert [span.name for span in lines[0].of("all_gather")] == ["blocks.0"]
        about([line.seconds("forward") for line in lines], 0.4, 0.01)
        assert lines[0].plot().labels[:3] == ["compute", "gather", "reduce"]


def stages(comm, tries=3):
    """Rank 0 computes and sends two micro-batches; rank 1 receives and computes."""
    comm.link, lines = LINK, []
    x = X[:150_000]  # 0.1 s
    for _ in range(tries):
        comm.barrier()
        with timeline() as line:
            sends = []
            for i in range(2):
                if comm.rank:
                    comm.recv(x, 0, label=f"{i}")
                compute(0.15, "forward", f"{i}")
                if not comm.rank:
                    sends.append(comm.send(x, 1, async_op=True, label=f"{i}"))
            for handle in sends:
                handle.wait()
        lines.append(line)
    return lines


@against_the_clock
def test_messages_between_stages():
    senders, receivers = pooled(stages, 2)
    about([line.seconds("send") for line in senders], 0.2, 0.01)
    about([line.hidden("send") for line in senders], 0.1, 0.01)  # the first is under the second's computation
    about([line.waited("recv") for line in receivers], 0.25, 0.01)  # 0.15 computed, 0.1 sent; the second comes at 0.4
    assert [span.name for span in receivers[0].of("recv")] == ["0", "1"]
    assert {span.lane for span in senders[0].spans} == {"compute", "messages"}


def test_units_and_an_optimizer():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), Delay(0.01, 0.01)) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = [dict(unit._forward_hooks) for unit in model]
    with timeline(dict(model.named_children()), optimizer) as line:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        FakeCommunicator(0, 2).all_reduce(torch.ones(2), label="loss")
    assert [(span.lane, span.kind, span.name) for span in line.spans] == [
        ("compute", "forward", "0"), ("compute", "forward", "1"), ("compute", "backward", "1"),
        ("compute", "backward", "0"), ("compute", "update", ""), ("reduce", "all_reduce", "loss")]
    assert [dict(unit._forward_hooks) for unit in model] == hooks
