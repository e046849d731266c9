"""Saved states with anything in the place of anything: refused by name, or loaded to the bit as they say."""

import copy
import functools
import json
import shutil

import pytest
import torch
from saving_kit import BY_ROWS, Holder, alone, few

from refimpl.comm import launch
from refimpl.saving import SavedStateError
from refimpl.saving import manifest as manifests
from refimpl.saving.schema import COUNT, POSITIVE, Each, Leaf, is_number, is_plain, mismatch

JUNK = (None, True, -1, 3, 2**62, 2**63, 10**400, 0.5, float("nan"), "", "Tensor", "load", "float64", "../x", "<b>&",
        "\x1b[2J\r\u202e", [], [0, 1], [[]], {}, {"x": None}, {"value": 1, "dtype": "bool"})
FORM = {"name": Leaf("a string", lambda x: isinstance(x, str)), "more?": [Each(Leaf("a number", is_number))]}


@pytest.mark.parametrize(("value", "said"), [
    ({"name": "x"}, None), ({"name": "x", "more": []}, None), ({"name": "x", "more": [{"a": 1}, {}]}, None),
    ({"name": 3}, "at.name is 3: expected a string"), ({}, "at has no 'name'"),
    ([], r"at is []: expected a dict of names"), ({3: ""}, "at is {3: ''}: expected a dict of names"),
    ({"name": "x", "less": 1}, "at.less is there: expected name, more alone"),
    ({"name": "x", "more": {}}, "at.more is {}: expected a list"),
    ({"name": "x", "more": [{}, {"b": True}]}, "at.more[1].b is True: expected a number")])
def test_what_differs_is_named(value, said):
    assert mismatch(value, FORM, "at") == said


def test_what_a_hyper_parameter_can_be():
    assert all(map(is_plain, (None, True, 3, 0.1, "x", [0.9, 0.99], (None, [1]))))
    nested = functools.reduce(lambda inner, _: [inner], range(5), 0)
    assert not any(map(is_plain, ({}, torch.zeros(1), 2**63, 1j, b"", nested)))


def test_what_a_count_can_be():
    counts, junk = (1, 2**62 - 1), (-1, 2**62, 1.0, True, "1", None)
    assert all(map(COUNT.fits, (0, *counts))) and not any(map(COUNT.fits, junk))
    assert all(map(POSITIVE.fits, counts)) and not any(map(POSITIVE.fits, (0, *junk)))


def test_a_manifest_of_no_ranks_is_damaged(tmp_path):
    holder = alone(build=few)
    holder.save(tmp_path / "saved")
    written(tmp_path / "saved", tmp_path / "saved", {**manifests.read(tmp_path / "saved"), "world_size": 0})
    with pytest.raises(SavedStateError, match="is damaged: .*world_size is 0: expected a count above 0"):
        holder.load(tmp_path / "saved")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, manifest) of what two ranks have saved."""
    folder = tmp_path_factory.mktemp("saved")
    launch(lambda comm: Holder(comm, BY_ROWS, tp=2, build=few).train(1).save(folder), 2)
    return folder, manifests.read(folder)


def nodes(tree, path=()):
    """The path to each node below the root."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from nodes(child, (*path, key))


def changed(tree, path, change):
    """A copy in which `change(parent, key)` was called for the node at `path`."""
    tree = copy.deepcopy(tree)
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    change(parent, path[-1])
    return tree


def replaced_by(value):
    def change(parent, key):
        parent[key] = value
    return change


def removed(parent, key):
    del parent[key]


def twice(parent, key):
    if isinstance(parent, dict):
        parent[f"{key}2"] = parent[key]
    else:
        parent.append(parent[key])


CHANGES = {"removed": removed, "twice": twice, **{f"{i}: {value!r:.20}": replaced_by(value)
                                                  for i, value in enumerate(JUNK)}}


def written(folder, target, content):
    """A saved state with another manifest, whose hash is right."""
    if not target.exists():
        shutil.copytree(folder, target)
    (target / manifests.NAME).write_text(json.dumps({**content, "sha256": manifests._digest(content)}))


def exactly(sd):
    """What is in a state_dict, comparable to the bit, NaN as well."""
    def plain(x):
        if not isinstance(x, torch.Tensor):
            return repr(x)
        return str(x.dtype), x.numel() == 1 or x.shape, repr(x.flatten().tolist())
    return {"step": sd["step"], "groups": json.dumps(sd["param_groups"]),
            **{name: plain(x) for name, x in sd["model"].items()},
            **{(name, key): plain(x) for name, state in sd["optimizer"].items() for key, x in state.items()}}


def as_it_says(sd, manifest):
    """A state_dict with the numbers that a manifest has in the place of those that were saved."""
    optimizer = {name: {key: number(kind) if "value" in kind else sd["optimizer"][name][key] for key, kind in
                        manifest["states"].get(name, {}).items()} for name in sd["optimizer"]}
    return {**sd, "step": manifest["step"], "optimizer": optimizer, "param_groups": [
        {"params": group["parameters"], **group["hyperparameters"]} for group in manifest["groups"]]}


def number(kind):
    return torch.tensor(kind["value"], dtype=getattr(torch, kind["dtype"])) if "dtype" in kind else kind["value"]


def loaded(holder, tree, change, load, least, said=""):
    """Load copies of a tree that are changed at each of its nodes: (path, copy, what is held then) where none was
    refused. At the `least` so many are, which changes nothing."""
    other, refused = holder.state_dict(), 0
    before = exactly(other)
    for path in nodes(tree):
        content = changed(tree, path, change)
        try:
            load(content)
        except SavedStateError as error:
            assert exactly(holder.state_dict()) == before and said in str(error), path
            assert str(error).isprintable() and len(str(error)) <= 2003, path
            refused += 1
        else:
            yield path, content, exactly(holder.state_dict())
            holder.load_state_dict(other)
    assert refused > least


@pytest.mark.parametrize("change", CHANGES)
def test_each_node_of_a_manifest(saved, tmp_path, change):
    folder, manifest = saved
    holder, as_saved = alone(seed=7, build=few).train(2), alone(build=few).load(folder).state_dict()

    def load(content):
        written(folder, tmp_path / "x", content)
        holder.load(tmp_path / "x")

    for path, content, found in loaded(holder, manifest, CHANGES[change], load, 20, str(tmp_path / "x")):
        assert found == exactly(as_it_says(as_saved, content)), path


def test_a_manifest_that_is_deep(saved, tmp_path):
    (folder, manifest), holder = saved, alone(build=few)
    written(folder, tmp_path / "x", manifest)
    for deep in (10, 900, 100_000):
        text = json.dumps({**manifest, "step": "deep"}).replace('"deep"', "[" * deep + "]" * deep)
        (tmp_path / "x" / manifests.NAME).write_text(text)
        with pytest.raises(SavedStateError, match="manifest.json (is damaged|was changed)"):
            holder.load(tmp_path / "x")
        manifests.begin(tmp_path / "x", 1)  # which reads it, too
    nested = functools.reduce(lambda inner, _: [inner], range(300), 0)
    written(folder, tmp_path / "x", {**manifest, "defaults": {"lr": nested}})
    with pytest.raises(SavedStateError, match=r"defaults.lr is \[\[.*: expected a number, a string, or a list of them"):
        holder.load(tmp_path / "x")


@pytest.mark.parametrize("inside", [True, False])
def test_a_manifest_that_is_larger_than_its_files_is_not_read(saved, tmp_path, inside):
    (folder, manifest), holder = saved, alone(build=few)
    written(folder, tmp_path / "x", {**manifest, "optimizer": "x" * 2 * 10**6})
    held = (tmp_path / "x" / manifests.NAME).stat().st_size
    if not inside:
        with (tmp_path / "x" / manifests.NAME).open("a") as file:
            file.truncate(2**33)  # 8 GiB, of which the disk holds the first two million
        held = 2**33
    with pytest.raises(SavedStateError, match=f"is damaged: it has {held:,} bytes, and the files that it names have"):
        holder.load(tmp_path / "x")


TENSORS = {"sparse": lambda x: x.to_sparse(), "meta": lambda x: x.to("meta"), "wider": lambda x: x.double(),
           "complex": lambda x: x.to(torch.complex64), "whole": lambda x: x.long(), "one": lambda x: torch.ones(1),
           "longer": lambda x: torch.cat([x.flatten()] * 3), "none": lambda x: torch.zeros(0)}


def tensors_to(make):
    def change(parent, key):
        parent[key] = make(parent[key]) if isinstance(parent[key], torch.Tensor) else "x"
    return change


@pytest.mark.parametrize("change", {**CHANGES, **TENSORS})
def test_each_node_of_a_state_dict(change):
    holder, saved = (alone(seed=seed, build=few).train(2) for seed in (7, 0))
    change = CHANGES[change] if change in CHANGES else tensors_to(TENSORS[change])
    for path, sd, found in loaded(holder, saved.state_dict(), change, holder.load_state_dict, 5):
        told = exactly(sd)
        assert all(found[key] == told[key] for key in found if key != "tied.weight"), path
    for junk in JUNK:
        with pytest.raises(SavedStateError, match=r"rank 0's state_dict cannot be loaded: .*: expected"):
            holder.load_state_dict(junk)
