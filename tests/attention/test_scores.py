"""Hooks on scores, sinks, and values of another width: one idea in the reference, in tiles and in the kernels."""

import functools
import math

import attention_kit as kit
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from refimpl import memory
from refimpl.attention import flash_attention, flash_attention_bytes, reference_attention
from refimpl.attention.kernels import configs
from refimpl.attention.kernels.configs import Config
from refimpl.attention.scores import Alibi, Documents, PrefixLM, ScoreHook, Softcap, alibi_slopes, hook_of
from refimpl.attention.tiled import tiled_attention, tiled_attention_bytes

needs_interpreter, pytestmark = kit.in_the_interpreter()
SMALL = functools.partial(tiled_attention, query_tile=4, key_tile=3)
near = functools.partial(kit.assert_close, tolerance=2e-5)
INTS = torch.zeros(1, 6, dtype=torch.int64)


def a_hook(names, B, H, S, causal, seed=0):
    """A list of hooks for keys in `names`; and causal, which a prefix LM must not be."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 3, (B, S), generator=generator)
    made = {"softcap": Softcap(1.5), "alibi": Alibi(alibi_slopes(H)), "documents": Documents(ids),
            "prefix": PrefixLM(torch.randint(0, S + 1, (B,), generator=generator))}
    return {"score": [made[name] for name in made if name in names], "causal": causal and "prefix" not in names}


def test_hooks_are_their_definitions():
    """Each beside PyTorch's own attention with a bias or a mask of the whole matrix, or a key more."""
    q, k, v, gradient = kit.inputs(2, 4, 4, 6, 6, 8, torch.float64, V=5)
    sdpa, near = F.scaled_dot_product_attention, functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    away, slopes = torch.arange(6)[:, None] - torch.arange(6), torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])
    assert torch.equal(alibi_slopes(4), slopes)  # the paper's, for a power of two, and between two
    assert torch.allclose(alibi_slopes(6), torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]))
    bias = -slopes[:, None, None].double() * away.abs()
    near(reference_attention(q, k, v, score=Alibi(slopes)), sdpa(q, k, v, attn_mask=bias))
    weights = (7 * torch.tanh(q @ k.mT * 8**-0.5 / 7)).masked_fill(away < 0, -math.inf).softmax(-1)
    near(reference_attention(q, k, v, causal=True, score=Softcap(7)), weights @ v)
    ids = torch.tensor([[0, 0, 1, 1, 1, 2], [4, 3, 4, 3, 3, 4]])
    found = reference_attention(q, k, v, score=Documents(ids))
    near(found, sdpa(q, k, v, attn_mask=(ids[:, :, None] == ids[:, None])[:, None]))
    near(found[:1], reference_attention(q[:1], k[:1], v[:1], cu_seqlens=[0, 2, 5, 6]))
    prefix = (away >= 0) | (torch.arange(6) < torch.tensor([0, 4])[:, None, None, None])
    near(reference_attention(q, k, v, score=PrefixLM(torch.tensor([0, 4]))), sdpa(q, k, v, attn_mask=prefix))
    sinks = torch.randn(4, dtype=torch.float64)
    more = [F.pad(x, (0, 0, 0, 1)) for x in (k, v)]  # a key and a value of 0, whose score is the sink
    expected = sdpa(q, *more, attn_mask=F.pad(bias * 0, (0, 1)) + F.pad(sinks[:, None, None], (6, 0)))
    near(reference_attention(q, k, v, sinks=sinks), expected)


CASES = {"T": st.integers(1, 21), "more": st.integers(-5, 9), "D": st.integers(1, 20), "V": st.integers(1, 20),
         "names": st.sets(st.sampled_from(["softcap", "alibi", "documents", "prefix"])), "causal": st.booleans(),
         "sinks": st.booleans(), "window": st.none() | st.integers(0, 12), "heads": st.sampled_from([(4, 2), (1, 1)]),
         "dropout_p": st.sampled_from([0.0, 0.3])}
NOTHING_BUT_A_SINK = {"T": 9, "more": -5, "D": 4, "V": 3, "names": set(), "causal": True, "sinks": True, "window": None,
                      "heads": (4, 2), "dropout_p": 0.0}  # the first queries see no key


def beside_the_reference(attention, dtype, tolerance, T, more, D, V, names, causal, sinks, window, heads, dropout_p):
    """Output, logsumexp and all gradients, of q, k, v and the sinks."""
    S, found = max(1, T + more), []
    q, k, v, gradient = kit.inputs(2, *heads, T, S, D, dtype, V=V)
    options = a_hook(names, 2, heads[0], S, causal) | {"window": window, "dropout_p": dropout_p, "seed": 3}
    sinks = torch.linspace(-1, 2, heads[0], dtype=dtype, requires_grad=True) if sinks else None
    for function in (attention, reference_attention):
        out, lse = function(q, k, v, return_logsumexp=True, sinks=sinks, **options)
        loss = (out * gradient).sum() + lse[lse.isfinite()].sin().sum()
        given = (q, k, v) if sinks is None else (q, k, v, sinks)
        found.append([out, lse.nan_to_num(neginf=-9.0), *torch.autograd.grad(loss, given)])
    kit.assert_close(*found, tolerance)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(**CASES)
@example(**NOTHING_BUT_A_SINK)
def test_in_tiles_it_is_the_reference(**case):
    beside_the_reference(SMALL, torch.float64, 1e-11, **case)


@needs_interpreter
@settings(max_examples=12, deadline=None, derandomize=True)
@given(**CASES)
@example(**NOTHING_BUT_A_SINK)
def test_in_kernels_it_is_the_reference(**case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configs, "INTERPRETED", Config(16, 16, 4, 1))
        beside_the_reference(flash_attention, torch.float32, 2e-5, **case)


def the_case(name, dtype):
    """(shape, V, options) of a model's own attention."""
    sinks, ids = torch.linspace(-2, 3, 4, dtype=dtype).requires_grad_(), torch.arange(40)[None] // 9 % 3
    return {"Gemma 2": ((1, 2, 1, 40, 40, 32), 32, {"score": Softcap(50.0), "causal": True, "window": 20}),
            "ALiBi": ((1, 3, 3, 33, 40, 16), 16, {"score": Alibi(alibi_slopes(3)), "causal": True}),
            "documents": ((1, 2, 1, 40, 40, 16), 16, {"score": Documents(ids), "causal": True}),
            "prefix": ((1, 2, 1, 40, 40, 16), 16, {"score": PrefixLM(torch.tensor([13]))}),
            "gpt-oss": ((1, 4, 1, 40, 40, 16), 16, {"causal": True, "window": 16, "sinks": sinks}),
            "MLA": ((1, 2, 2, 24, 24, 192), 128, {"causal": True})}[name]


@pytest.mark.parametrize("name", ["Gemma 2", "ALiBi", "documents", "prefix", "gpt-oss", "MLA"])
@pytest.mark.parametrize(("attention", "dtype"), [(flash_attention, torch.float16), (flash_attention, torch.float32), (
    tiled_attention, torch.bfloat16)], ids=["flash, fp16", "flash, fp32", "tiled, bf16"])
def test_as_exact_as_plain_attention(name, attention, dtype):
    shape, V, options = the_case(name, dtype)
    kit.assert_as_exact_as_plain(attention, reference_attention, *kit.inputs(*shape, dtype, V=V), **options)


def test_packed_sequences_have_a_prefix_each():
    given, alibi = kit.inputs(1, 2, 1, 23, 23, 16), Alibi(alibi_slopes(2))
    options = {"cu_seqlens": [0, 9, 9, 23], "score": [alibi, PrefixLM(torch.tensor([4, 0, 6]))],
               "sinks": torch.zeros(2, requires_grad=True)}
    for attention in (SMALL, flash_attention):
        kit.assert_as_reference(attention, near, given, **options)
    alone = reference_attention(*(x[:, :, 9:] for x in given[:3]), sinks=options["sinks"],
                                score=[alibi, PrefixLM(torch.tensor([6]))])
    torch.testing.assert_close(reference_attention(*given[:3], **options)[:, :, 9:], alone)


@pytest.mark.parametrize("causal", [False, True])
def test_queries_before_the_first_token_are_in_no_document(causal):
    given, score = kit.inputs(1, 2, 1, 24, 5, 16), Documents(torch.zeros(1, 5, dtype=torch.int64))
    for attention in (reference_attention, SMALL, flash_attention):
        out, dq, *_ = kit.gradients(attention, *given, score=score, causal=causal)
        assert (out[:, :, :19] == 0).all() and (dq[:, :, :19] == 0).all() and (out[:, :, 19:] != 0).all(), attention


@needs_interpreter
@pytest.mark.parametrize("more", [-1, 0, 1, 2])
def test_a_prefix_at_the_edge_of_a_tile(more, monkeypatch):
    """A key that the last query of a tile alone sees may be the first of a tile."""
    monkeypatch.setattr(configs, "INTERPRETED", Config(16, 16, 4, 1))
    given = kit.inputs(1, 2, 1, 33, 33 + more, 16)
    kit.assert_as_reference(flash_attention, near, given, score=PrefixLM(torch.tensor([3])))


@needs_interpreter
@pytest.mark.parametrize("lengths", [[1, 35], [35, 1]])
def test_which_tiles_are_seen_is_each_sequence_s_own(lengths, monkeypatch):
    """By the first sequence's prefix, the other one would leave out tiles that it sees."""
    monkeypatch.setattr(configs, "INTERPRETED", Config(16, 16, 4, 1))
    given = kit.inputs(2, 2, 1, 40, 40, 16)
    kit.assert_as_reference(flash_attention, near, given, score=PrefixLM(torch.tensor(lengths)))


class Squared(ScoreHook):
    """A user's own: S² / 4, for the second head."""
    def forward(self, scores, b, h, q_idx, k_idx):
        return torch.where(h == 1, scores.square() / 4, scores)

    def derivative(self, scores, b, h, q_idx, k_idx):
        return torch.where(h == 1, scores / 2, 1.0)


def test_a_hook_of_the_users_own_runs_in_tiles():
    given = kit.inputs(1, 2, 1, 9, 9, 4)
    for attention in (SMALL, flash_attention):
        kit.assert_as_reference(attention, kit.assert_close, given, score=[Squared(), Softcap(2.0)], causal=True)
    with pytest.raises(ValueError, match="kernel='triton' .*Squared.* of refimpl.attention.scores, a softcap first"):
        flash_attention(*given[:3], score=Squared(), kernel="triton")


@pytest.mark.parametrize("hooks", [[Alibi(alibi_slopes(2)), Softcap(1.5)], [Softcap(3.0), Softcap(1.5)]])
def test_an_order_that_the_kernels_do_not_compute_runs_in_tiles(hooks):
    """They cap first, and once: for them [Alibi, Softcap] would be [Softcap, Alibi]."""
    q, k, v, gradient = kit.inputs(1, 2, 1, 9, 9, 4)
    ours, other = (reference_attention(q, k, v, score=score, causal=True) for score in (hooks, hooks[::-1]))
    assert (other - ours).abs().max() > 1e-3
    kit.assert_as_reference(flash_attention, kit.assert_close, (q, k, v, gradient), score=hooks, causal=True)
    with pytest.raises(ValueError, match="kernel='triton' .* a softcap first"):
        flash_attention(q, k, v, score=hooks, kernel="triton")


@pytest.mark.parametrize("name", ["softcap", "alibi", "documents", "prefix", "Squared"])
def test_compiled_it_is_the_same(name):
    """In graphs a write to a view is a new tensor: once −∞ − (−∞), NaN in all outputs and gradients."""
    options = {"score": Squared(), "causal": True} if name == "Squared" else a_hook({name}, 1, 4, 10, causal=True)
    in_tiles = functools.partial(tiled_attention, query_tile=10, key_tile=5, **options)
    torch.compiler.reset()
    compiled, given = torch.compile(lambda *x: in_tiles(*x), backend="aot_eager"), kit.inputs(1, 4, 2, 10, 10, 4)
    kit.assert_close(*(kit.gradients(f, *given) for f in (compiled, in_tiles)), 1e-6)


class KeepsTheMask(Documents):
    """The mutant: right values, but the mask of the whole matrix is made, and a tile of it taken at each call."""
    def forward(self, scores, b, h, q_idx, k_idx):
        if not hasattr(self, "mask"):
            object.__setattr__(self, "mask", self.ids[:, None, :, None] == self.ids[:, None, None])
        return scores.masked_fill(~self.mask[:, :, q_idx, k_idx], -math.inf)


@pytest.mark.parametrize("sinks", [None, torch.zeros(2, dtype=torch.float16, requires_grad=True)], ids=["", "sinks"])
@needs_interpreter
def test_in_kernels_hooks_take_no_bytes(sinks, monkeypatch):
    monkeypatch.setattr(configs, "INTERPRETED", Config(128, 128, 4, 1))
    shapes = (1, 2, 200, 24), (1, 1, 230, 24), (1, 1, 230, 16)
    score = [Softcap(9.0), Documents(torch.arange(230)[None] // 50)]
    options = {"score": score} | ({} if sinks is None else {"sinks": sinks})
    predicted = flash_attention_bytes(*shapes[:2], torch.float16, v_dim=16, sinks=getattr(sinks, "dtype", None))
    assert kit.read(flash_attention, shapes, torch.float16, **options) == predicted
    mutant = KeepsTheMask(score[1].ids)
    assert kit.read(flash_attention, shapes, torch.float16, score=mutant)[1] > predicted.peak + 200 * 230


def test_in_tiles_hooks_take_three_tiles_and_no_matrix():
    """A tile is 32 × 32 for each of two heads; the mutant's mask is 256 × 256."""
    shapes, sizes = ((1, 2, 256, 16), (1, 2, 256, 16), (1, 2, 256, 24)), {"query_tile": 32, "key_tile": 32}
    ids, without = torch.arange(256)[None] // 100, tiled_attention_bytes(*shapes[:2], v_dim=24, **sizes)
    assert kit.read(tiled_attention, shapes, torch.float32, **sizes) == without
    limit = without.peak + 3 * 4 * 2 * 32 * 32
    for score in (Softcap(9.0), Alibi(alibi_slopes(2)), Documents(ids), PrefixLM(torch.tensor([100]))):
        kept, peak = kit.read(tiled_attention, shapes, torch.float32, score=score, **sizes)
        assert kept == without.kept and without.peak <= peak + 4096 <= limit + 4096, score
    assert kit.read(tiled_attention, shapes, torch.float32, score=KeepsTheMask(ids), **sizes)[1] > limit + 30_000


def test_a_dry_run_says_the_same_bytes():
    def step():
        score, sinks = [Softcap(3.0), Documents(torch.zeros(1, 96, dtype=torch.int64))], torch.zeros(2)
        return kit.read(tiled_attention, ((1, 2, 96, 8), (1, 2, 96, 8), (1, 2, 96, 12)), torch.float32, score=score,
                        sinks=sinks.requires_grad_(), causal=True, query_tile=32, key_tile=32)

    assert memory.dry_run(step).result == step()


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"score": 50.0}, TypeError, "score has a float: expected a ScoreHook"),
    ({"score": [Documents(INTS), Softcap(2.0)]}, ValueError, "Softcap after Documents, a mask: expected masks last"),
    ({"score": Alibi(alibi_slopes(3))}, ValueError, r"Alibi's slopes of shape \(3,\): expected \(4,\), one for each"),
    ({"score": Alibi(alibi_slopes(4).requires_grad_())}, ValueError, "slopes require a gradient.*slopes.detach"),
    ({"score": Alibi([0.5] * 4)}, TypeError, "Alibi's slopes are a list"),
    ({"score": Documents(INTS[:, :5])}, ValueError, r"Documents' ids of shape \(1, 5\): expected \(1, 6\)"),
    ({"score": Documents(INTS.float())}, ValueError, "ids are torch.float32: expected ints"),
    ({"score": Documents(INTS.to("meta"))}, ValueError, "ids are on meta, q is on cpu"),
    ({"score": Documents(INTS), "cu_seqlens": [0, 6]}, ValueError, "Documents with cu_seqlens: expected one of"),
    ({"score": PrefixLM(INTS[0, :2])}, ValueError, r"lengths of shape \(2,\): expected \(1,\), \(batch,\)"),
    ({"score": PrefixLM(INTS[0, :1]), "cu_seqlens": [0, 2, 6]}, ValueError, r"expected \(2,\), \(packed sequences,\)"),
    ({"score": PrefixLM(INTS[0, :1]), "causal": True}, ValueError, "PrefixLM with causal=True: expected causal=False"),
    ({"sinks": torch.zeros(2)}, ValueError, r"sinks of shape \(2,\): expected \(4,\), one logit for each query head"),
    ({"sinks": INTS[0, :4]}, ValueError, "sinks are torch.int64: expected floating-point"),
    ({"max_seqlen": 6}, ValueError, "max_seqlen=6 without cu_seqlens"),
    ({"max_seqlen": 3, "cu_seqlens": [0, 2, 6]}, ValueError, "max_seqlen=3: a sequence has 4 tokens"),
    ({"max_seqlen": 0, "cu_seqlens": [0, 6]}, ValueError, "max_seqlen=0: expected an int of at least 1"),
    ({"max_seqlen": 4, "max_seqlen_k": 3, "cu_seqlens": torch.tensor([0, 2, 6], dtype=torch.int32)}, ValueError,
     "max_seqlen_k=3: a sequence has 4 tokens"),
], ids=str)
@pytest.mark.parametrize("stage", [reference_attention, tiled_attention, flash_attention])
def test_bad_input_is_named(stage, options, error, words):
    with pytest.raises(error, match=words):
        stage(*kit.inputs(1, 4, 2, 6, 6, 8)[:3], **options)


@pytest.mark.parametrize("cap", [0, -1.0, math.inf, math.nan, True, "50"])
def test_a_softcap_that_is_none(cap):
    with pytest.raises(ValueError, match="Softcap.*: expected a finite number above 0"):
        Softcap(cap)


def test_nothing_is_no_hook():
    assert hook_of(None) is hook_of([]) is None and hook_of([Softcap(1.0)]) == Softcap(1.0)
