"""Ranks by their hosts, in messages and apart; what has to be alike."""

import pytest

from refimpl.comm import FakeCommunicator, RankError
from refimpl.comm.hosts.facts import ALIKE, Hosts

SAME = dict.fromkeys(ALIKE, "1") | {"named": "10.0.0.1", "interface": "eth0"}


def hosts(*names, **more):
    return Hosts([SAME | {"host": name, "address": name} | {key: values[rank] for key, values in more.items()}
                  for rank, name in enumerate(names)])


def test_who_is_where():
    found = hosts("a", "a", "b", "c")
    assert found.several and found.names == ("a", "b", "c") and found.of(2) == "b"
    assert found.groups([1, 2, 3]) == {"a": [1], "b": [2], "c": [3]}
    assert found.format_ranks([0, 1, 2]) == "ranks 0 and 1 (a) and rank 2 (b)"
    assert found.format_ranks([3]) == "rank 3 (c)"
    assert found.format_ranks([0, 2, 3]) == "rank 0 (a), rank 2 (b) and rank 3 (c)"
    one = Hosts.one(3)
    assert not one.several and one.format_ranks([0, 2]) == "ranks 0 and 2"
    assert one.in_text("rank 1 of 3") == "rank 1 of 3"


def test_two_hosts_of_one_name_are_told_apart():
    found = Hosts([SAME | {"host": "ubuntu", "address": f"10.0.0.{i}"} for i in (1, 1, 2)])
    assert found.names == ("ubuntu (10.0.0.1)", "ubuntu (10.0.0.2)")


@pytest.mark.parametrize(("text", "named"), [
    ("rank 3 raised", "rank 3 (c) raised"), ("ranks [1, 2] have", "ranks [1, 2] (a, b) have"),
    ("ranks 0, 1 and 3: x", "ranks 0, 1 and 3 (a, c): x"), ("rank 2, from #3", "rank 2 (b), from #3"),
    ("rank 2 (b) waits", "rank 2 (b) waits"), ("rank 3 (1 of 2 in its group)", "rank 3 on c (1 of 2 in its group)"),
    ("rank 7, 8 ranks", "rank 7, 8 ranks"), ("rank 12 of 3", "rank 12 of 3")])
def test_a_message_gets_hosts(text, named):
    assert hosts("a", "a", "b", "c").in_text(text) == named


@pytest.mark.parametrize("what", ALIKE)
def test_what_differs_is_named(what):
    hosts("a", "b").check()
    words = rf"{what.replace('_', ' ')}: 1 on rank 0 \(a\); 2 on ranks 1 and 2 \(b\)"
    with pytest.raises(RankError, match=words) as told:
        hosts("a", "b", "b", **{what: "122"}).check()
    assert told.value.ranks == (1, 2)


@pytest.mark.parametrize("named", ["127.0.1.1", None])
def test_a_host_that_others_cannot_reach_by_its_name(named, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(RankError, match=rf"rank 1 \(b\): .* stands for {named or 'no address'}"):
        hosts("a", "b", named=["10.0.0.1", named]).check()
    hosts("a", "a", named=["127.0.0.1", named]).check()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    hosts("a", "b", named=["10.0.0.1", named]).check()


def test_a_communicator_knows_its_hosts():
    assert FakeCommunicator(1, 4).split([1, 3]).hosts.groups([1, 3]).values()
