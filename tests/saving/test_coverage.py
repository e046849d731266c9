"""Each element in one file: what a manifest or a file lacks, has twice or elsewhere is named by all ranks."""

from operator import setitem

import pytest
from refused_kit import check_damage, hashed, only, rewritten
from safetensors.torch import load_file, save_file
from saving_kit import BY_ROWS, Holder

from refimpl.comm import launch
from refimpl.saving.coverage import check_coverage


def pieces(content, rank):
    return content["files"][f"rank-0000{rank}.safetensors"]["pieces"]


def without(directory, name):
    """A file without one of its tensors, with its bytes and hash in the manifest."""
    path = only(directory, "rank-00000*")
    tensors = load_file(path)
    tensors.pop(name)
    save_file(tensors, path)
    hashed(path)


def linked(directory, what):
    """A part of the saved state is a link to elsewhere."""
    path = only(directory, "rank-00000*") if what == "file" else only(directory, "rank-00000*").parent
    elsewhere = directory.parent / f"{directory.name} elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def renamed(old, new):
    return rewritten(lambda content: content["files"].update({new: content["files"].pop(old)}))


GAPS = {  # hashes are right, so that only what is in them can tell
    "no second file": (rewritten(lambda c: c["files"].pop("rank-00001.safetensors")),
                       r"files has 1 of rank-00000.safetensors to rank-00001"),
    "no buffer": (rewritten(lambda c: pieces(c, 0).pop("table")), r"table: elements 0 … 5 are in no file"),
    "no frozen piece": (rewritten(lambda c: pieces(c, 1).pop("still.weight")), r"still.weight: elements 6 … 11 are"),
    "no piece": (rewritten(lambda c: pieces(c, 0).pop("up.bias")), r"up.bias: elements 0 … \d+ are in no file"),
    "no last piece": (rewritten(lambda c: pieces(c, 1).pop("up.weight")), r"up.weight: elements 15 … 29 are in no "),
    "a short piece": (rewritten(lambda c: setitem(pieces(c, 1)["up.weight"], 1, 29)),
                      r"up.weight: elements 29 … 29 are in no file"),
    "a piece twice": (rewritten(lambda c: pieces(c, 1).update(scale=[0, 1]) or pieces(c, 0).update(scale=[0, 1])),
                      r"scale: elements 0 … 0 are in rank-00000.safetensors and in rank-00001.safetensors"),
    "a long piece": (rewritten(lambda c: setitem(pieces(c, 1)["up.weight"], 1, 31)),
                     r"pieces.up.weight is \[15, 31\]: expected a part of its 30 elements"),
    "a piece that is shifted": (rewritten(lambda c: (setitem(pieces(c, 0)["up.weight"], 1, 16),
                                                     setitem(pieces(c, 1)["up.weight"], 0, 16))),
                                r"safetensors has parameters/up.weight as F32 \[\d+\]: expected float32 \[\d+\]"),
    "no such parameter": (rewritten(lambda c: pieces(c, 1).update(x=[0, 1])), r"pieces.x is there, and no such param"),
    "no moments": (rewritten(lambda c: c["states"]["up.weight"].pop("exp_avg")),
                   r"has optimizer/exp_avg/up.weight: manifest.json says otherwise"),
    "a tensor for a number": (rewritten(lambda c: c["states"]["none"]["step"].pop("value")),  # without elements
                              r"states.none.step has no 'value': expected one number for the whole tensor"),
    "no tensor": (lambda d: without(d, "optimizer/exp_avg/up.weight"),
                  r"rank-00000.safetensors has no optimizer/exp_avg/up.weight: manifest.json says otherwise"),
    "no generator": (lambda d: without(d, "rng/cpu"), r"rank-00000.safetensors has no rng/cpu"),
    "other moments": (rewritten(lambda c: c["states"]["up.weight"]["exp_avg"].update(dtype="int32")),
                      r"has optimizer/exp_avg/up.weight as F32 \[\d+\]: expected int32"),
    "no lr": (rewritten(lambda c: c["groups"][0]["hyperparameters"].pop("lr")), r"lr of its param group 0 is missing"),
    "a word for lr": (rewritten(lambda c: c["groups"][1]["hyperparameters"].update(lr="high")),
                      r"lr of its param group 1 is 'high': expected a number"),
    "one beta": (rewritten(lambda c: c["groups"][0]["hyperparameters"].update(betas=[0.9])),
                 r"betas of its param group 0 is \[0.9\]: expected \[a number, a number\]"),
    "a function for a dtype": (rewritten(lambda c: c["parameters"]["up.bias"].update(held="load")),
                               r"parameters.up.bias.held is 'load': expected the name of a dtype"),
    "an absolute folder": (rewritten(lambda c: c.update(folder="/tmp")), r"folder is '/tmp': expected the name of a"),
    "a folder above": (rewritten(lambda c: c.update(folder="../x")), r"folder is '../x': expected the name of a"),
    "an absolute file": (renamed("rank-00001.safetensors", "/etc/passwd"), r"files./etc/passwd is there: expected"),
    "a file above": (renamed("rank-00000.safetensors", "../x"), r"files.../x is there: expected rank-00000"),
    "a linked file": (lambda d: linked(d, "file"), r"rank-00000.safetensors is a link to .*, which is not in"),
    "a linked folder": (lambda d: linked(d, "folder"), r"safetensors is a link to .*, which is not in .*: copy it th"),
    "a folder for a file": (lambda d: (path := only(d, "rank-00001*")).unlink() or path.mkdir(),
                            r"rank-00001.safetensors is no file")}


def test_a_gap_is_named_by_all_ranks_and_nothing_changes(tmp_path):
    launch(lambda comm: Holder(comm).train(2).save(tmp_path / "whole"), 2)
    check_damage(GAPS, tmp_path / "whole", tmp_path)


def manifest_of(spans, shape=(6,)):
    """Of one parameter; `spans` in the files of so many ranks."""
    return {"folder": "step-00000001-0123abcd", "world_size": len(spans), "rest": {}, "states": {},
            "parameters": {"x": {"shape": list(shape)}},
            "files": {f"rank-0000{i}.safetensors": {"pieces": {"x": list(span)} if span else {}}
                      for i, span in enumerate(spans)}}


@pytest.mark.parametrize(("spans", "said"), [
    ([(0, 6)], None), ([(0, 2), (2, 3), (3, 6)], None), ([(3, 6), (0, 3)], None), ([None, (0, 6)], None),
    ([None], "x: elements 0 … 5 are in no file"), ([(0, 2), (4, 6)], "x: elements 2 … 3 are in no file"),
    ([(1, 6)], "x: elements 0 … 0 are in no file"), ([(0, 5)], "x: elements 5 … 5 are in no file"),
    ([(0, 4), (2, 6)], "x: elements 2 … 3 are in rank-00000.safetensors and in rank-00001.safetensors"),
    ([(0, 6), (1, 2)], "x: elements 1 … 1 are in rank-00000.safetensors and in rank-00001.safetensors"),
    ([(0, 7)], "files.rank-00000.safetensors.pieces.x is [0, 7]: expected a part of its 6 elements, of shape [6]"),
    ([(2, 2)], "files.rank-00000.safetensors.pieces.x is [2, 2]: expected a part of its 6 elements, of shape [6]")])
def test_spans(spans, said):
    assert check_coverage(manifest_of(spans)) == said


@pytest.mark.parametrize(("parts", "said"), [
    ({"x": [0, 2], "x..1": [2, 6]}, None), ({"x..1": [2, 6]}, "x: elements 0 … 1 are in no file"),
    ({"x": [0, 4], "x..1": [2, 6]}, "x: elements 2 … 3 are in rank-00000.safetensors and in rank-00000.safetensors"),
    ({"x": [0, 6], "y..1": [0, 6]}, "files.rank-00000.safetensors.pieces.y..1 is there, and no such parameter"),
    ({"x": [0, 6], "x..1": [6, 6]}, "files.rank-00000.safetensors.pieces.x..1 is [6, 6]: expected a part of its 6 "
                                    "elements, of shape [6]")])
def test_parts_in_one_file(parts, said):
    manifest = manifest_of([(0, 6)])
    manifest["files"]["rank-00000.safetensors"]["pieces"] = parts
    assert check_coverage(manifest) == said


def test_a_parameter_without_elements_is_in_no_file():
    assert check_coverage(manifest_of([None], (3, 0))) is None
    assert "expected a part of its 0 elements" in check_coverage(manifest_of([(0, 1)], (3, 0)))


BLOCKS = {  # of up.weight, (6, 5), cut by rows on two ranks
    "no block": (rewritten(lambda c: pieces(c, 1).pop("up.weight")), r"up.weight: 15 of its 30 elements are in"),
    "a block elsewhere": (rewritten(lambda c: setitem(pieces(c, 1)["up.weight"][2], 0, 2)),
                          r"up.weight: its blocks of \(3, 5\) at \(0, 0\), in rank-00000.safetensors, and of \(3, 5\) "
                          r"at \(2, 0\), in rank-00001.safetensors, have elements in common"),
    "a block outside": (rewritten(lambda c: setitem(pieces(c, 1)["up.weight"][2], 0, 4)),
                        r"pieces.up.weight is \[0, 15, \[4, 0\], \[3, 5\]\]: expected a part of its 30 el"),
    "a flat block": (rewritten(lambda c: pieces(c, 1)["up.weight"][3].pop()), r"up.weight is .*: expected a part of"),
    "a short block": (rewritten(lambda c: setitem(pieces(c, 1)["up.weight"], 1, 14)),
                      r"up.weight: elements 14 … 14 of its block of \(3, 5\) at \(3, 0\) are in no file"),
    "a block without lengths": (rewritten(lambda c: pieces(c, 1)["up.weight"].pop()),
                                r"pieces.up.weight is \[.*: expected \[first, end\], or \[first, end, offsets, l"),
    "a block of words": (rewritten(lambda c: setitem(pieces(c, 1)["up.weight"], 2, "ab")), r"up.weight is \[.*:"),
    "a block shared": (rewritten(lambda c: setitem(pieces(c, 1)["up.weight"], slice(2, 4), [[0, 0], [3, 5]])),
                       r"up.weight: elements 0 … 14 of its block of \(3, 5\) at \(0, 0\) are in rank-00000.safetens")}


def test_a_block_that_is_missing_or_elsewhere_is_named_by_all_ranks(tmp_path):
    launch(lambda comm: Holder(comm, BY_ROWS, tp=2).train(2).save(tmp_path / "whole"), 2)
    check_damage(BLOCKS, tmp_path / "whole", tmp_path)
