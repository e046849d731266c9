"""A recipe: its fields, what it refuses, all at once, and its text."""

import dataclasses

import pytest

from refimpl.compression import ALGORITHMS
from refimpl.engine import Recipe
from refimpl.engine.recipe_text import MOST
from refimpl.mesh import Mesh
from refimpl.pipeline.named_schedules import BUILDERS

FULL = {"precision": "bf16", "recompute": 0.5, "zero": 3, "dp": 4, "shards": 2, "look_ahead": 2, "bucket_bytes": 10**6}


def test_every_field_has_a_meaning_a_default_and_values_or_a_unit():
    said = Recipe.describe()
    for each in dataclasses.fields(Recipe):
        assert each.metadata["means"] in said and f"\n{each.name} = " in "\n" + said
        values, unit = each.metadata["values"], each.metadata["unit"]
        assert values is None or each.default in (*values, None)
        assert values is not None or unit is not None or each.name in ("folder", "allocator")
    values = {each.name: each.metadata["values"] for each in dataclasses.fields(Recipe)}
    assert set(values["compression"]) == {"none", *ALGORITHMS} and set(values["schedule"]) == {*BUILDERS}


def test_it_is_frozen_and_equal_to_one_of_the_same_values():
    recipe = Recipe(**FULL)
    assert recipe == Recipe(**FULL) and hash(recipe) == hash(Recipe(**FULL)) and recipe != Recipe()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.zero = 1
    assert recipe.mesh == Mesh(dp=4, shards=2) and recipe.world_size == 4 and Recipe(tp=2, pp=3, cp=5).world_size == 30
    assert recipe.changed() == FULL and Recipe().changed() == {}
    assert eval(repr(recipe), {"Recipe": Recipe}) == recipe


def test_what_two_recipes_differ_in():
    one, other = Recipe(**FULL), Recipe(precision="bf16", dp=4)
    assert other.replace(zero=2).diff(other) == {"zero": (2, 1)} and one.diff(one) == {}
    assert set(one.diff(other)) == {*FULL} - {"precision", "dp"} and one.diff(other)["recompute"] == (0.5, "none")


def test_toml_out_and_in_is_the_same(tmp_path):
    path = tmp_path / "recipe.toml"
    for given in ({}, FULL, {"tp": 2, "sequence": True}, {"store": "disk", "folder": 'a "b" \\ é'}, {"recompute": 2}):
        recipe = Recipe(**given)
        path.write_text(recipe.to_toml(), encoding="utf-8")
        assert Recipe.from_toml(path) == Recipe.from_toml(str(path)) == Recipe.from_toml(recipe.to_toml()) == recipe
    assert "# what data parallel ranks cut" in Recipe(zero=2).to_toml()


@pytest.mark.parametrize(("given", "words"), [
    ({"precision": "bf6"}, "precision='bf6': expected one of fp32, autocast, bf16, fp16; bf16?"),
    ({"zero": True}, "zero=True: expected one of 0, 1, 2, 3"), ({"zero": 1.0}, "zero=1.0: expected one of"),
    ({"sequence": 1, "tp": 2}, "sequence=1: expected one of False, True"),
    ({"dp": 0}, "dp=0: expected a whole number of ranks, 1 or more"), ({"dp": "2"}, "dp='2': expected a whole number"),
    ({"dp": None}, "dp=None: expected a whole number"), ({"shards": 0}, "shards=0: expected a whole number of ranks"),
    ({"bucket_bytes": 1e6}, "bucket_bytes=1000000.0: expected a whole number of bytes, 1 or more"),
    ({"learning_rate": float("nan")}, "learning_rate=nan: expected a number of a step, 0 or more"),
    ({"recompute": 0}, "recompute=0: expected one of none, blocks, attention, attention core, mlp; an integer k"),
    ({"recompute": 1.5}, "recompute=1.5: "), ({"recompute": True}, "recompute=True: "),
    ({"recompute": "block"}, "recompute='block': expected one of none, blocks, .*; blocks?"),
    ({"folder": 3, "store": "disk"}, "folder=3: expected a string"),
    ({"dp": 12, "shards": 5}, "dp=12 with shards=5: .*give 4 or 6"),
    ({"pp": 2, "schedule": "zb-v", "chunks": 3}, "schedule='zb-v' with pp=2: zb-v with chunks=3: a rank has 2"),
    ({"allocator": "max_split:3"}, "allocator='max_split:3': 'max_split' is not simulated"),
    ({"dp": 2, "compression": "topk", "compression_ratio": 0}, "compression_ratio=0: expected a part")])
def test_a_value_that_cannot_be_is_named(given, words):
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        Recipe(**given)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ValueError) as caught:
        Recipe(precision="half", dp=0, mlp="thrifty", zero=4)
    assert [line.partition("=")[0] for line in str(caught.value).splitlines()] == [
        "this recipe has 4 faults:", "precision", "mlp", "zero", "dp"]
    with pytest.raises(ValueError) as caught:
        Recipe(precision="bf16", zero=0, sequence=True, dp=12, shards=5)
    assert len(str(caught.value).splitlines()) == 5 and "precision='bf16' and zero=0: " in str(caught.value)


def test_an_unknown_field_is_named_with_the_nearest():
    for unknown in (lambda: Recipe().replace(precison="bf16"), lambda: Recipe.from_toml('precison = "bf16"')):
        with pytest.raises(ValueError, match=r"a recipe has no 'precison': precision\?"):
            unknown()
    with pytest.raises(ValueError, match="a recipe has no 'xyz': expected one of precision, loss_scale"):
        Recipe.from_toml("xyz = 1")


def test_a_file_that_is_no_recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    with pytest.raises(FileNotFoundError):
        Recipe.from_toml(path)
    for data, words in ((b"zero = ", "is no TOML: "), (b"\xff\xfe", "is no text in UTF-8"),
                        (b"#" * (MOST + 1), "1,048,577 bytes: expected at most 1,048,576"),
                        (b"[zero]\na = 1", "zero={")):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=words):
            Recipe.from_toml(path)
    path.write_text("zero = 2")
    assert Recipe.from_toml(path) == Recipe(zero=2)


def test_global_tokens_are_those_of_a_window():
    assert Recipe(window=16, global_tokens=2).global_tokens == 2
    with pytest.raises(ValueError, match="without a window each token sees all before it"):
        Recipe(global_tokens=2)
