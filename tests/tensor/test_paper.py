"""The idea in one screen beside the unsplit block: the same numbers, the bytes and the traffic of the closed forms.

On a block of our GPT and of transformers' LLaMA, in fp64. `HELD` has all versions that are held to this.
"""

import functools
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from one_screen import check_paper
from rank_pool import pooled
from split_kit import BLOCKS, CONFIGS, ITEM, WORLDS, B, T, X, by_hardened, by_paper, expected, given, tables, together
from torch.nn.functional import linear

from refimpl import memory
from refimpl.comm import ring_traffic
from refimpl.memory import block_terms, korthikanti_bytes, korthikanti_terms
from refimpl.model import GPTConfig
from refimpl.papers import tensor_parallel as paper
from refimpl.tensor.closed_forms import same_batch_traffic

ON_ALL_RANKS = {"norm inputs", "norm statistics", "RMSNorm x/σ", "qkv input", "MLP input", "attention dropout mask",
                "MLP dropout mask"}  # what tensor parallelism does not cut, and sequence parallelism does
ONE_MASK = {"causal mask"}  # of T × T, for all heads of a rank: nothing cuts it


class Alone:
    """A world of one."""

    rank, world_size = 0, 1

    def all_reduce(self, x):
        return x

    all_gather = reduce_scatter = all_reduce


class Whole(paper.Split):
    """The mutant that splits nothing, and computes the whole layer on each rank."""

    def __init__(self, norm, first, second, between, comm, sizes, sequence):
        super().__init__(norm, first, second, between, Alone(), sizes)


class Keeping(paper.Split):
    """The mutant of g that keeps the X it gathered."""

    def forward(self, x):
        y = linear(paper.Total.apply(self.norm(x), *self.f), self.a) + self.a_bias
        return x + (paper.Total.apply(linear(self.between(y), self.b), *self.f_bar) + self.b_bias)


class Unknown(paper.Split):
    """The mutant of g that autograd does not know."""

    def forward(self, x):
        y = linear(self.f[0](self.norm(x)), self.a) + self.a_bias
        return x + (paper.Total.apply(linear(self.between(y), self.b), *self.f_bar) + self.b_bias)


class Unsummed(paper.Split):
    """The mutant in which a rank has its own tokens' gradients of norms and biases."""

    def __init__(self, *args):
        with mock.patch.object(torch.Tensor, "register_hook"):
            super().__init__(*args)


def without_sum(comm, sequence):
    """The mutant of f whose backward is the identity too."""
    return (torch.Tensor.detach, torch.Tensor.detach), (comm.all_reduce, torch.Tensor.detach)


def by_pairs(name, comm, sequence):
    with mock.patch.object(paper, "pairs", without_sum):
        return by_paper(name, comm, sequence)


# Each returns (layer, gradients) as `split_kit.by_paper` does: a layer of (T, B, C), or of (T/N, B, C) if `sequence`,
# and {what: gradient of this rank's part}. A hardened version is one line here, and all tests run on it. (That of
# sequence parallelism cuts a whole model's tokens in another order: tests/tensor/test_tensor.py holds it.)
HELD = {"paper": by_paper, "hardened": by_hardened}
SPLITS = {"whole": Whole, "keeping": Keeping, "unknown": Unknown, "unsummed": Unsummed}
MUTANTS = {name: functools.partial(by_paper, split=split) for name, split in SPLITS.items()} | {"without sum": by_pairs}


def readings(comm, version, name, sequence):
    """One forward and backward: the numbers, what was sent, and what is kept between the two, messages too."""
    layer, gradients = (HELD | MUTANTS)[version](name, comm, sequence)
    x, d_out = (whole.chunk(comm.world_size if sequence else 1)[comm.rank * sequence].clone() for whole in given())
    start = comm.traffic
    out = layer(x.requires_grad_())
    middle = comm.traffic
    out.backward(d_out)
    numbers = {"output": out.detach(), "x": x.grad, **gradients()}
    sent = dict(middle - start), dict(comm.traffic - middle)
    del out
    layer.zero_grad()
    with memory.track(layer, x, *tables()) as t:
        loss = layer(x * 1).sum()
    assert loss.isfinite()
    return {"numbers": numbers, "sent": sent, "saved": t.now["activations"] + t.now["communication"],
            "parameters": sum(p.untyped_storage().nbytes() for p in layer.parameters())}


@functools.cache
def found(version, name, N, sequence):
    return pooled(readings, N, version, name, sequence)


CASES = pytest.mark.parametrize(("version", "name", "N", "sequence"), [
    (version, name, N, sequence) for version in HELD for name in BLOCKS for N in WORLDS[name]
    for sequence in ((False,) if version == "hardened" else (False, True))])


@CASES
def test_the_numbers_of_the_unsplit_block(version, name, N, sequence):
    whole = expected(name)
    split = together(name, [rank["numbers"] for rank in found(version, name, N, sequence)], sequence)
    assert split.keys() == whole.keys()
    for key, value in whole.items():
        assert value.abs().max() > 1e-3, key
        assert (split[key] - value).abs().max() <= 1e-12 * max(1, value.abs().max()), key


def saved_terms(name, N, sequence):
    """What a rank saves of our block: Korthikanti's terms, each cut or not."""
    terms = block_terms(CONFIGS[name], B, T, torch.float64)
    whole = ONE_MASK if sequence else ONE_MASK | ON_ALL_RANKS
    return {term: nbytes if term in whole else nbytes // N for term, nbytes in terms.items()}


@CASES
def test_the_saved_bytes_of_the_closed_form(version, name, N, sequence):
    saved = sum(saved_terms(name, N, sequence).values())
    if (version, name) == ("hardened", "llama"):  # transformers' own attention and MLP, which save more than ours
        whole = found(version, name, 1, sequence)[0]["saved"]
        kept = sum(nbytes for term, nbytes in saved_terms(name, 1, sequence).items() if term in ON_ALL_RANKS)
        saved = kept + (whole - kept) // N
    assert all(rank["saved"] == saved for rank in found(version, name, N, sequence))


@CASES
def test_a_rank_has_its_part_of_the_weights(version, name, N, sequence):
    whole = {key: value.numel() for key, value in expected(name).items() if key not in ("output", "x")}
    cut = sum(count for key, count in whole.items() if key.endswith((" a", " a_bias", " b")))
    for rank in found(version, name, N, sequence):
        assert rank["parameters"] == ITEM * (cut // N + sum(whole.values()) - cut)


@CASES
def test_the_traffic_of_the_closed_form(version, name, N, sequence):
    replicated = [ITEM * value.numel() for key, value in expected(name).items() if "norm" in key or "b_bias" in key]
    for r, rank in enumerate(found(version, name, N, sequence)):
        once = X * (N - 1) // N
        forward = backward = {"all_reduce": 4 * once}
        if sequence:
            small = sum(ring_traffic("all_reduce", nbytes, N, r, ITEM) for nbytes in replicated)
            forward = {"reduce_scatter": 2 * once, "all_gather": 2 * once}
            backward = {"reduce_scatter": 2 * once, "all_gather": 4 * once, "all_reduce": small}
        if version == "hardened":  # which checks that ranks have the same input
            forward = {**forward, "all_gather": same_batch_traffic(N).total}
        assert rank["sent"] == tuple({key: n for key, n in each.items() if n} for each in (forward, backward))


@pytest.mark.parametrize("name", BLOCKS)
def test_without_the_sum_in_backward_gradients_are_wrong(name):
    with pytest.raises(AssertionError):
        test_the_numbers_of_the_unsplit_block("without sum", name, 2, False)
    ours, mutant = (found(version, name, 2, False)[0] for version in ("paper", "without sum"))
    assert torch.equal(ours["numbers"]["output"], mutant["numbers"]["output"])  # forward shows nothing


@pytest.mark.parametrize("name", BLOCKS)
def test_a_version_that_splits_nothing_has_the_same_numbers_and_fails_here(name):
    whole = expected(name)
    for rank in found("whole", name, 2, False):
        assert all(torch.allclose(rank["numbers"][key], value, rtol=0, atol=1e-12) for key, value in whole.items())
        assert rank["saved"] == sum(block_terms(CONFIGS[name], B, T, torch.float64).values())
    for fails in (test_the_saved_bytes_of_the_closed_form, test_a_rank_has_its_part_of_the_weights):
        with pytest.raises(AssertionError):
            fails("whole", name, 2, False)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_gathered_input_that_is_kept_has_the_same_numbers_and_fails_here(name):
    test_the_numbers_of_the_unsplit_block("keeping", name, 2, True)
    with pytest.raises(AssertionError):
        test_the_saved_bytes_of_the_closed_form("keeping", name, 2, True)
    for rank in found("keeping", name, 2, True):  # two X that are whole, in place of this rank's tokens
        assert rank["saved"] == sum(saved_terms(name, 2, True).values()) + 2 * (X - X // 2)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("mutant", ["unknown", "unsummed"])
def test_gradients_that_miss_other_ranks_tokens_are_wrong(mutant, name):
    with pytest.raises(AssertionError):
        test_the_numbers_of_the_unsplit_block(mutant, name, 2, True)


@pytest.mark.parametrize("N", [1, 2, 4, 8])
def test_the_paper_s_figures(N):
    """Korthikanti et al. 2022, table 2: 22B, 175B's sizes in their own terms."""
    config, b, s = GPTConfig.named("gpt3-175b"), 1, 2048
    h, a, terms = config.hidden, config.heads, korthikanti_terms(config, b, s)
    split = sum(nbytes if term in ON_ALL_RANKS else nbytes // N for term, nbytes in terms.items())
    assert split == s * b * h * 10 + s * b * h * 24 // N + 5 * a * b * s * s // N
    assert sum(terms.values()) // N == korthikanti_bytes(config, b, s) // N == s * b * (34 * h + 5 * a * s) // N


PROGRAM = """
import json
import torch
from torch import nn
from refimpl.papers.collectives import launch
from refimpl.papers.tensor_parallel import Split

def halves(ring, sequence):
    torch.manual_seed(0)
    norm, up, down = (m.double() for m in (nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)))
    x = torch.randn(8, 2, 8, dtype=torch.float64)
    whole = x + down(nn.functional.gelu(up(norm(x))))
    whole.sum().backward()
    wanted = norm.weight.grad.clone()
    norm.zero_grad(), down.zero_grad()
    split = Split(norm, up, down, nn.functional.gelu, ring, [16], sequence)
    mine = x.chunk(ring.world_size)[ring.rank] if sequence else x
    out = split(mine.clone().requires_grad_())
    out.sum().backward()
    whole = whole.chunk(ring.world_size)[ring.rank] if sequence else whole
    return (out - whole).abs().max().item(), (norm.weight.grad - wanted).abs().max().item(), ring.sent

print(json.dumps([[N, sequence, launch(halves, N, sequence)] for N in (1, 2, 4) for sequence in (False, True)]))
"""


def test_on_the_ring_of_one_screen():
    root = Path(paper.__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, timeout=120)
    assert run.returncode == 0, run.stderr.decode()
    nbytes, small = 8 * 2 * 8 * 8, 3 * 8 * 8  # of X; of the norm and the second bias
    for N, sequence, ranks in json.loads(run.stdout):
        for output, gradient, sent in ranks:
            assert output <= 1e-12 and gradient <= 1e-12
            assert sent == (5 * nbytes + 2 * small if sequence else 4 * nbytes) * (N - 1) // N


def test_one_screen_that_is_read_first():
    check_paper("tensor", "tensor_parallel")
