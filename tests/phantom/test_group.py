"""Other ranks that are not there: what is refused, and what they say in a store. (On the device: on_device/.)"""

import pytest
import torch.distributed as dist

from benchmarks import engines, record
from refimpl import phantom
from refimpl.model import GPTConfig
from refimpl.phantom import group


@pytest.mark.parametrize(("world_size", "rank"), [(0, 0), (8, 8), (8, -1)])
def test_ranks_that_cannot_be(world_size, rank):
    with pytest.raises(ValueError, match=f"rank={rank} of world_size={world_size}"):
        group.pretend(world_size, rank)


def test_without_the_device_nobody_is_pretended(monkeypatch):
    monkeypatch.delenv(phantom.VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match="call phantom.start first"):
        group.pretend(8)
    assert not phantom.pretending()


def test_what_a_store_says():
    """What this rank said, through torch's own classes, too; of another rank zeros, which are a number as well."""
    store = group.Store()
    inner = dist.PrefixStore("a", dist.PrefixStore("b", store))
    inner.set("mine", "7")
    assert inner.get("mine") == b"7" and int(inner.get("rank 3's")) == 0 and len(inner.get("id")) == 128
    assert [inner.add("count", 2), inner.add("count", 3)] == [2, 5]
    assert store.check(["b/a/mine"]) and not store.check(["b/a/mine", "never said"])
    inner.wait(["never said"])


def test_engines_at_7b_take_no_more_than_their_peers():
    """As recorded, by PyTorch's allocator; nothing is below a rank's share of the states."""
    rows = record.measurement("engines", "phantom")["rows"]
    assert {(each["what"].partition(", ")[2], each["peer"]) for each in rows} == {pair[1:] for pair in engines.PAIRS}
    size = GPTConfig(vocab_size=32000, context_length=512, layers=32, hidden=4096, heads=32).parameter_count()
    for each in rows:
        assert 0.9 * 16 * size / engines.WORLD < each["value"] <= each["peer_value"], each["what"]
        assert each["value"] <= each["ours"]["reserved"], each["what"]
