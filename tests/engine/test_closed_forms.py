"""The closed forms beside dry runs, which say what real ranks read; and beside the models' own counts."""

import functools
from dataclasses import replace

import pytest
import torch
from together_kit import ADAMW, GPTS, ROWS, T

from refimpl.engine import dry_rank
from refimpl.engine.closed_forms import axis_traffic, rank_bytes, stage_contents, stage_parameters, wire_seconds
from refimpl.mesh import Mesh
from refimpl.model import GPT, GPTConfig
from refimpl.pipeline import partition

CHECKS = 3000  # bytes of checks and padding at most


@pytest.mark.parametrize("name", ["gpt2", "gpt3-175b", "llama2-7b", "llama3-405b"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_and_their_parameters(name, stages):
    config = GPTConfig.named(name)
    with torch.device("meta"):
        parts = partition(GPT(config), stages)
    assert [(len(part.blocks), part.is_first, part.is_last) for part in parts] == [
        (each.layers, each.is_first, each.is_last) for each in stage_contents(config, stages)]
    assert [sum(p.numel() for p in part.parameters()) for part in parts] == [
        stage_parameters(config, each) for each in stage_contents(config, stages)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", GPTS)
def test_traffic_and_bytes_of_each_axis(name, recompute):
    mesh, config = Mesh(tp=2, pp=2, dp=2), GPTS[name]
    for pp in range(2):
        rank = mesh.rank_at(pp=pp)
        found = dry_rank(functools.partial(GPT, config), mesh, rank, ROWS, T, optimizer=ADAMW, micro_batches=4,
                         recompute=recompute)
        said = axis_traffic(config, mesh, pp, ROWS, 4, recompute=recompute)
        assert said["tp"] == found.traffic["tp"]["all_reduce"]
        assert 0 <= found.traffic["pp"].total - said["pp"] <= 100
        assert 0 <= found.traffic["dp"].total - said["dp"] <= CHECKS
        ledger = rank_bytes(config, mesh, pp, ROWS, 4, recompute=recompute)
        assert found.peak["parameters"] == pytest.approx(ledger["parameters"], abs=CHECKS)
        largest = config.vocab_size * config.hidden * 4 // mesh.tp  # one is on its way into its bucket
        assert 0.5 * ledger["gradients"] < found.peak["gradients"] <= ledger["gradients"] + largest + CHECKS
        assert found.peak["optimizer state"] == pytest.approx(ledger["optimizer state"], abs=CHECKS)
        assert ledger["activations"] <= found.peak["activations"] + found.peak["communication"]


def test_layers_keep_more_than_their_inputs_unless_they_are_recomputed():
    arguments = next(iter(GPTS.values())), Mesh(pp=2), 0, ROWS, 4
    kept, recomputed = rank_bytes(*arguments), rank_bytes(*arguments, recompute=True)
    assert kept["activations"] > 5 * recomputed["activations"] and kept["parameters"] == recomputed["parameters"]


def test_a_tied_weight_adds_its_gradient_on_the_first_and_the_last_stage():
    """An all_reduce over two ranks sends as many bytes as there are of it: those that a rank of tp has."""
    mesh, tied = Mesh(tp=2, pp=3, dp=2), GPTConfig(vocab_size=250, context_length=T, layers=3, hidden=24, heads=4)
    for dtype in (torch.float32, torch.bfloat16):
        with_it, without = ([axis_traffic(config, mesh, pp, ROWS, 4, dtype=dtype)["pp"] for pp in range(3)]
                            for config in (tied, replace(tied, tied=False)))
        weight = 125 * 24 * dtype.itemsize
        assert with_it == [without[0] + weight, without[1], without[2] + weight]
    assert axis_traffic(tied, Mesh(tp=2), 0, ROWS, 4)["pp"] == 0, "one stage has both"


def test_a_group_over_two_nodes_is_as_fast_as_the_link_between_them():
    mesh, sent = Mesh(tp=8, pp=2, dp=2), {"tp": 800, "pp": 100, "dp": 200}
    assert wire_seconds(sent, mesh, 3, 8, 100, 10) == {"tp": 8.0, "pp": 10.0, "dp": 20.0}
    assert wire_seconds(sent, mesh, 3, 4, 100, 10)["tp"] == 80.0
