"""The mesh: arithmetic without a process for up to 1,024 ranks, and Communicators on four."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_pool import on_ranks

from refimpl.comm import FakeCommunicator
from refimpl.comm.hosts.facts import Hosts
from refimpl.mesh import AXES, LEVELS, Mesh

KINDS, LARGE = (*AXES, *LEVELS), Mesh(dp=8, tp=4, pp=32)
PICTURE = """\
Mesh(dp=2, tp=2, pp=2): 8 ranks
            tp 0   tp 1
pp 0 dp 0      0      1
pp 0 dp 1      2      3
pp 1 dp 0      4      5
pp 1 dp 1      6      7"""

size = st.integers(1, 4)
meshes = st.builds(lambda shards, replicas, **sizes: Mesh(dp=shards * replicas, shards=shards, **sizes),
                   shards=size, replicas=size, tp=size, pp=size, cp=size)
some_kinds = st.lists(st.sampled_from(KINDS), min_size=1, unique=True)


def check_groups(mesh, kinds):
    """Disjoint groups of equal size that cover all ranks and differ in `kinds` alone."""
    groups = mesh.groups(*kinds)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
    along = {*kinds, *(LEVELS if "dp" in kinds else ())} - {"dp"}
    assert {len(ranks) for ranks in groups} == {math.prod(mesh.sizes[kind] for kind in along)}
    for ranks in groups:
        assert ranks == tuple(sorted(ranks)) == mesh.ranks(*kinds, rank=ranks[-1])
        apart = {tuple(at for axis, at in mesh.coordinates(rank).items() if axis not in along and axis != "dp")
                 for rank in ranks}
        assert len(apart) == 1
    return groups


@given(mesh=meshes, kinds=some_kinds)
def test_groups_are_disjoint_and_cover_all_ranks(mesh, kinds):
    check_groups(mesh, kinds)


@given(mesh=meshes)
def test_a_rank_is_where_its_coordinates_say(mesh):
    for rank in range(mesh.world_size):
        at = mesh.coordinates(rank)
        assert mesh.rank_at(**{axis: at[axis] for axis in AXES}) == rank
        assert at["dp"] == at["shards"] + mesh.sizes["shards"] * at["replicas"]
        assert rank == at["tp"] + mesh.tp * (at["cp"] + mesh.cp * (at["dp"] + mesh.dp * at["pp"]))


def test_1024_ranks():
    assert LARGE.world_size == 1024
    for count in range(1, 3):
        for kinds in itertools.combinations(KINDS, count):
            check_groups(LARGE, kinds)
    assert LARGE.groups("tp")[:2] == [(0, 1, 2, 3), (4, 5, 6, 7)]  # neighbours
    assert LARGE.groups("dp")[0] == (0, 4, 8, 12, 16, 20, 24, 28) and LARGE.groups("pp")[0] == tuple(range(0, 1024, 32))
    assert LARGE.groups("dp", "tp")[1] == tuple(range(32, 64))
    assert LARGE.coordinates(1023) == {"tp": 3, "cp": 0, "dp": 7, "pp": 31, "replicas": 0, "shards": 7}


def test_shards_are_neighbours_and_replicas_are_apart():
    mesh = Mesh(dp=8, shards=4)
    assert mesh.groups("shards") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert mesh.groups("replicas") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.groups("shards", "replicas") == mesh.groups("dp") == [tuple(range(8))]
    assert Mesh(dp=8).groups("shards") == Mesh(dp=8).groups("dp")  # all of dp, one replica
    assert Mesh(dp=4, shards=2, tp=2, cp=2).groups("shards", "cp")[:2] == [(0, 2, 4, 6), (1, 3, 5, 7)]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_any_product_that_is_the_world_size_is_taken():
    for dp, tp, pp, cp in itertools.product(range(1, 13), repeat=4):
        if dp * tp * pp * cp == 12:
            assert Mesh(dp, tp, pp, cp).connect(FakeCommunicator(5, 12)).world_size == 12


@pytest.mark.parametrize("world_size", [1, 8, 16, 24])
def test_another_product_than_the_world_size_is_refused_with_its_sizes(world_size):
    with pytest.raises(ValueError, match=rf"pp=2 · dp=3 · cp=1 · tp=2 = 12 ranks, and the communicator has "
                                         rf"{world_size}: choose sizes whose product is {world_size}"):
        Mesh(dp=3, tp=2, pp=2).connect(FakeCommunicator(0, world_size))


@pytest.mark.parametrize(("sizes", "error", "match"), [
    ({"tp": 0}, ValueError, r"Mesh\(tp=0\): expected at least 1"),
    ({"dp": -2}, ValueError, r"Mesh\(dp=-2\): expected at least 1"),
    ({"pp": 2.0}, TypeError, r"Mesh\(pp=2.0\): expected an integer"),
    ({"cp": True}, TypeError, r"Mesh\(cp=True\): expected an integer"),
    ({"tp": None}, TypeError, r"Mesh\(tp=None\): expected an integer"),
    ({"dp": 8, "shards": 0}, ValueError, r"Mesh\(shards=0\): expected at least 1"),
    ({"dp": 8, "shards": 3}, ValueError, r"Mesh\(dp=8, shards=3\): the shards have to divide dp"),
    ({"shards": 2}, ValueError, r"Mesh\(dp=1, shards=2\)")])
def test_sizes_that_are_none_are_refused(sizes, error, match):
    with pytest.raises(error, match=match):
        Mesh(**sizes)


def test_what_the_mesh_does_not_have_is_refused():
    mesh = Mesh(dp=2, tp=2)
    for call in (mesh.groups, lambda: mesh.groups("ep"), lambda: mesh.ranks("tp", "sp", rank=0)):
        with pytest.raises(ValueError, match="expected some of tp, cp, dp, pp, shards, replicas"):
            call()
    for rank in (4, -1, 1.0, True):
        with pytest.raises(ValueError, match=rf"rank {rank}: expected one from 0 to 3, of Mesh\(dp=2, tp=2\)"):
            mesh.coordinates(rank)
    with pytest.raises(ValueError, match="tp=2: expected a place from 0 to 1"):
        mesh.rank_at(tp=2)
    with pytest.raises(ValueError, match="no axis ep: expected tp, cp, dp, pp"):
        mesh.rank_at(ep=0)


def test_a_mesh_that_is_not_connected_says_so():
    with pytest.raises(RuntimeError, match=r"Mesh\(tp=2\) is not connected: call mesh = Mesh\(tp=2\).connect\(comm\)"):
        Mesh(tp=2).get_parallel_group("tp")


# --- connected -------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_each_rank_gets_the_communicators_of_its_groups(comm):
    mesh, rank = Mesh(dp=2, tp=2).connect(comm), comm.rank
    tp, dp = (11, 1100)[rank // 2], (101, 1010)[rank % 2]
    for kinds, total in {("tp",): tp, ("dp",): dp, ("pp",): 10 ** rank, ("cp",): 10 ** rank, ("dp", "cp"): dp,
                         ("dp", "tp"): 1111, ("shards",): dp, ("replicas",): 10 ** rank}.items():
        assert mesh.get_parallel_group(*kinds).all_reduce(torch.tensor(10 ** rank)).item() == total
    assert mesh.get_parallel_group("dp") is mesh.get_parallel_group("cp", "dp")
    assert mesh.get_parallel_group("tp", "dp") is comm
    assert mesh.get_parallel_group("tp").ranks == mesh.ranks("tp") == ((0, 1), (2, 3))[rank // 2]
    assert (mesh.here["tp"], mesh.here["dp"]) == (rank % 2, rank // 2)
    levels = Mesh(dp=4, shards=2).connect(comm)
    assert [levels.get_parallel_group(level).ranks for level in LEVELS] == [
        ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]]


@on_ranks(3)
def test_ranks_are_numbers_in_the_communicator_that_was_connected(comm):
    """Ranks of the world (1, 2): the mesh's are 0 and 1 of that communicator."""
    pair = comm.split([1, 2])
    assert (pair is None) == (comm.rank == 0)
    if pair is not None:
        mesh = Mesh(tp=2).connect(pair)
        assert mesh.ranks("tp") == (0, 1) and mesh.get_parallel_group("tp").ranks == (1, 2)


def test_a_mesh_of_1024_ranks_is_connected():
    mesh = LARGE.connect(FakeCommunicator(517, 1024))
    assert {kind: mesh.get_parallel_group(kind).world_size for kind in AXES} == {"tp": 4, "cp": 1, "dp": 8, "pp": 32}
    for kinds in [("tp",), ("dp",), ("pp",), ("dp", "cp"), ("dp", "pp"), ("tp", "pp")]:
        assert mesh.get_parallel_group(*kinds).ranks == mesh.ranks(*kinds) and 517 in mesh.ranks(*kinds)
        assert mesh.ranks(*kinds, rank=0)[0] == 0


def test_the_mesh_as_text():
    assert str(Mesh(dp=2, tp=2, pp=2)) == PICTURE
    assert str(Mesh()).splitlines()[0] == "Mesh(): 1 rank"
    levels = str(Mesh(dp=4, shards=2)).splitlines()
    assert levels[1].split("   ")[-2:] == ["shard 0", "shard 1"] and levels[3].startswith("replica 1")
    assert "…" not in str(Mesh(tp=8)) and str(Mesh(tp=9)).count("…") == 2, "eight columns with their head have room"
    lines = str(Mesh(dp=16, tp=32, pp=2)).splitlines()
    assert "…" in lines and max(map(len, lines)) < 100 and lines[-1].split()[-1] == "1023"


def test_a_rank_is_described_by_its_places_on_axes_that_are_split():
    assert Mesh(dp=2, tp=2, pp=2).describe(5) == "rank 5 (pp 1, dp 0, tp 1)"
    assert Mesh(dp=4, shards=2).describe(3) == "rank 3 (dp 3)" and Mesh().describe(0) == "rank 0"


def test_the_mesh_as_a_figure():
    figure = Mesh(dp=4, tp=2, shards=2).draw()
    assert repr(figure) == "<memory figure: groups of tp, groups of shards, groups of replicas>"
    assert [text.get_text() for text in figure.axes[0].texts] == list("01234567")
    of_tp, of_shards, _ = ([cell.get_facecolor() for cell in axes.patches] for axes in figure.axes)
    assert len(set(of_tp)) == 4 and of_tp[0] == of_tp[1] != of_tp[2]
    assert len(set(of_shards)) == 4 and of_shards[0] == of_shards[2] != of_shards[1]
    assert Mesh(tp=2)._repr_png_().startswith(b"\x89PNG") and LARGE._repr_png_() is None
    with pytest.raises(ValueError, match="has 1024 ranks: expected at most 256 in a figure"):
        LARGE.draw()


@pytest.mark.parametrize(("names", "axes", "shards"), [
    ("aabb", {"dp": 4}, 2), ("aaaa", {"dp": 4}, 4), ("abbc", {"dp": 4}, 1), ("aabb", {"dp": 2, "tp": 2}, 1),
    ("aaaabbbb", {"dp": 4, "tp": 2}, 2)])
def test_shards_are_as_many_as_share_a_host(names, axes, shards):
    comm = FakeCommunicator(0, len(names))
    comm._hosts = Hosts([{"host": name, "address": name} for name in names])
    mesh = Mesh(**axes, shards="host")
    assert mesh.sizes["replicas"] == 1 and repr(mesh).endswith("shards=host)")
    assert mesh.connect(comm).sizes["shards"] == shards


def test_fast_axes_over_hosts_are_warned_of():
    comm = FakeCommunicator(0, 4)
    comm._hosts = Hosts([{"host": name, "address": name} for name in "abbc"])
    with pytest.warns(UserWarning, match=r"tp: rank 0 \(a\) and rank 1 \(b\) are on several hosts"):
        Mesh(dp=2, tp=2).connect(comm)
    with pytest.warns(UserWarning, match=r"shards: rank 0 \(a\) and rank 1 \(b\) .* shards=\"host\""):
        Mesh(dp=4, shards=2).connect(comm)
