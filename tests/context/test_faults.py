"""What goes wrong with a split sequence: a rank that dies in the ring, other lengths, models that cannot be split."""

import functools

import pytest
import torch
from outside.models import causal, seq2seq
from patience import patiently
from rank_pool import begins, killed_and_named, killing, on_ranks
from tensor_kit import tokens_of, whole
from torch import nn

from refimpl.attention import reference_attention
from refimpl.comm import FakeCommunicator, launch
from refimpl.context import SequenceParallelAttention, context_parallel, dense_pair
from refimpl.model import GPT, GPTConfig

SIZES = {"vocab_size": 61, "context_length": 16, "layers": 1, "hidden": 32, "heads": 4}
METHODS = ("ring", "gathered", "ulysses")


def dies(comm, method, when):
    calls, kill = [], killing(comm)

    def die():
        calls.append(1)
        if len(calls) == 2:  # in a ring, with the others' keys on their way
            kill()

    def block(*args, **how):
        die()
        return getattr(dense_pair, when)(*args, **how)

    pair = dense_pair._replace(**{when: block}) if method == "ring" else None
    attention = SequenceParallelAttention(comm, method, attention=pair)
    model = context_parallel(whole("gpt"), attention)
    if method != "ring":
        mlp = model.blocks[1].mlp
        (mlp.register_forward_pre_hook if when == "forward" else mlp.register_full_backward_hook)(
            lambda *_: [die(), die()] and None)
    tokens = attention.shard(tokens_of(model, 2, 16))
    begins()
    model(tokens, tokens).backward()


@pytest.mark.faults
@pytest.mark.parametrize(("rows", "length", "dtype"), [(2, 8, torch.float32), (1, 4, torch.float32),
                                                       (2, 4, torch.float64)])
@pytest.mark.parametrize("method", METHODS)
@on_ranks(4, fails="began other collectives than rank", launch=launch)
def test_a_rank_with_other_shapes_is_named_without_a_model_too(comm, method, rows, length, dtype):
    """A model checks lengths before its first layer."""
    q, k, v = (torch.randn(rows, 4, length, 8, dtype=dtype) for _ in range(3)) if comm.rank == 2 else (
        torch.randn(2, 4, 4, 8) for _ in range(3))
    comm.barrier()
    SequenceParallelAttention(comm, method)(q, k, v, causal=True)


@pytest.mark.faults
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("method", METHODS)
@patiently
def test_a_rank_that_dies_is_named_within_five_seconds(method, when, capfd):
    killed_and_named(capfd, dies, method, when)


@pytest.mark.parametrize("name", ["gpt", "llama"])
@on_ranks(4, fails=r"ranks \[2\] have other numbers of rows or tokens than rank 0: .* 2: \(2, 4\)")
def test_ranks_with_other_lengths_are_named(comm, name):
    model = context_parallel(whole(name), SequenceParallelAttention(comm))
    tokens = tokens_of(model, 2, 4 if comm.rank == 2 else 2)
    model(tokens) if name == "gpt" else model(input_ids=tokens)


def split(method="ring", N=2, **options):
    return SequenceParallelAttention(FakeCommunicator(0, N), method, **options)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: split("striped"), "method='striped': expected one of 'ring', 'ulysses', 'gathered'"),
    (lambda: split(order="striped"), "order='striped': expected one of 'plain', 'zig-zag'"),
    (lambda: split("ulysses", order="zig-zag"), "order='zig-zag' with Ulysses: expected 'plain'"),
    (lambda: context_parallel(nn.Linear(2, 2), split()), "how Linear computes attention is not known")])
def test_what_is_not_known_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_communicator_in_place_of_an_attention_is_refused():
    with pytest.raises(TypeError, match=r"attention=.*: expected a SequenceParallelAttention\(comm\)"):
        context_parallel(GPT(GPTConfig(**SIZES)), FakeCommunicator(0, 2))


SMALL = {"vocab_size": 61, "num_layers": 1, "num_heads": 4}


@pytest.mark.parametrize(("make", "words"), [
    (lambda: nn.Linear(2, 2), "how Linear computes attention is not known"),
    (causal("gpt_neo", **SMALL, hidden_size=32, attention_types=[[["global"], 1]]),
     "GPTNeoForCausalLM takes no other attention"),
    (seq2seq("t5", **SMALL, d_model=32, d_kv=8, d_ff=32), "T5.* takes no position_ids")])
def test_a_refusal_leaves_the_model_as_it_was(make, words):
    model = make()
    before = [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]
    with pytest.raises(ValueError, match=words):
        context_parallel(model, split())
    assert not hasattr(model, "_sequence_is_split") and not model._forward_pre_hooks
    assert before == [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]


def gpt(attention, **changes):
    return context_parallel(GPT(GPTConfig(**{**SIZES, **changes})), attention)


@pytest.mark.parametrize(("method", "N", "T", "changes", "words"), [
    ("ring", 4, 6, {}, "6 tokens on each of 4 ranks are a sequence of 24: the context has 16"),
    ("ring", 2, 3, {}, "3 tokens on a rank in zig-zag order: expected an even number"),
    ("ulysses", 8, 2, {}, "4 query heads on 8 ranks: expected a multiple of 8"),
    ("ring", 2, 4, {"dropout": 0.1}, "dropout_p=0.1: attention of a split sequence drops no weights"),
    ("gathered", 2, 4, {"dropout": 0.1}, "dropout_p=0.1"), ("ulysses", 2, 4, {"dropout": 0.1}, "dropout_p=0.1")])
def test_a_model_that_cannot_be_split_so(method, N, T, changes, words):
    model = gpt(split(method, N), **changes)
    with pytest.raises(ValueError, match=words):
        model(torch.zeros(1, T, dtype=torch.int64))


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_sequence_is_split_once(name):
    model = context_parallel(whole(name), split("ulysses"))
    with pytest.raises(ValueError, match="has its sequence split already"):
        context_parallel(model, split("ulysses"))


def test_gpt_names_wrong_arguments_itself():
    for given in ({"ids": 1}, {"tokens_BT": [1]}):
        with pytest.raises(TypeError, match="argument 'ids'|tokens as a list"):
            gpt(split())(**given)


@pytest.mark.parametrize("order", ["plain", "zig-zag"])
def test_an_attention_that_masks_by_itself_is_not_asked_about_more_keys(order):
    bare = functools.partial(nn.functional.scaled_dot_product_attention, is_causal=True)  # aligned top-left
    attention = SequenceParallelAttention(FakeCommunicator(1, 2), "gathered", order=order, attention=bare)
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="queries of . keys, and .* has no option `causal`, .*or use Ulysses"):
        attention(q, q, q, causal=True)
    assert attention(q, q, q).shape == q.shape


def test_dropout_is_no_hindrance_when_nothing_is_trained():
    gpt(split(), dropout=0.1).eval()(torch.zeros(1, 4, dtype=torch.int64))


def test_models_of_transformers_refuse_what_a_part_of_a_sequence_cannot_have():
    model = context_parallel(whole("llama"), split())
    tokens = tokens_of(model, 2, 4)
    with pytest.raises(ValueError, match="labels of a part of a sequence: .*both labels and shift_labels"):
        model(input_ids=tokens, labels=tokens)
    with pytest.raises(ValueError, match="attention_mask of a part of a sequence: expected none"):
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    for given in ({"use_cache": True}, {"past_key_values": model.generate}, {"position_ids": tokens}):
        with pytest.raises(ValueError, match=f"{next(iter(given))} .*expected none"):
            model(input_ids=tokens, **given)
    with pytest.raises(ValueError, match="generate with a model on one device"):
        model.eval().generate(tokens, max_new_tokens=2)
    embedded = model.get_input_embeddings()(tokens)
    assert torch.equal(model(input_ids=None, inputs_embeds=embedded).logits, model(tokens).logits)
    assert model(input_ids=tokens, labels=tokens, shift_labels=tokens).loss.isfinite()


@pytest.mark.parametrize("given", [{"offset": 1}, {"positions_BT": torch.zeros(1, 4, dtype=torch.int64)}])
def test_a_gpt_gets_no_other_positions(given):
    with pytest.raises(ValueError, match="offset or positions_BT of a part of a sequence: expected none"):
        gpt(split())(torch.zeros(1, 4, dtype=torch.int64), **given)


@pytest.mark.parametrize(("q", "k", "v"), [
    ((1, 4, 4, 8), (1, 4, 8, 8), (1, 4, 8, 8)), ((1, 4, 4, 8), (1, 4, 4, 8), (1, 4, 4, 6)),
    ((1, 4, 4, 8), (1, 3, 4, 8), (1, 3, 4, 8)), ((1, 4, 4, 8), (2, 4, 4, 8), (2, 4, 4, 8)), ((4, 4, 8),) * 3])
@pytest.mark.parametrize("method", METHODS)
def test_shapes_that_do_not_belong_together(method, q, k, v):
    with pytest.raises(ValueError, match=r"expected \(B, H, T, D\) and twice \(B, G, T, D\)"):
        split(method, 1)(torch.zeros(q), torch.zeros(k), torch.zeros(v))


def with_a_window():
    model = whole("mistral")
    model.config.sliding_window = 5
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 5
    return model, tokens_of(model, 1, 8)


@pytest.mark.parametrize("method", ["gathered", "ulysses", "ring"])
@on_ranks(2)
def test_a_window_of_mistral_by_each_method(comm, method):
    model, tokens = with_a_window()
    options = {"order": "plain"} if method == "ring" else {"attention": reference_attention}
    attention = SequenceParallelAttention(comm, method, **options)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        found = attention.gather(context_parallel(model, attention)(input_ids=attention.shard(tokens)).logits)
    assert (found - expected).abs().max() <= 1e-12


def test_a_window_of_mistral_is_refused_by_a_ring_in_zig_zag_order():
    model, tokens = with_a_window()
    context_parallel(model, split())
    with pytest.raises(ValueError, match="window=4 in ring attention"):
        model(input_ids=tokens)
