"""Models of transformers and our GPT without logits: numbers, bytes, options; and models that are refused."""

import copy

import outside  # noqa: F401 - before transformers
import pytest
import torch
from head_kit import peak_of
from outside.models import GROUPED, SMALL, causal, masked, padded, seq2seq, text

from refimpl.cross_entropy import chunked_cross_entropy_bytes, plain_cross_entropy_bytes, without_logits
from refimpl.known_models.lm_head import Change, changed
from refimpl.model import GPT, GPTConfig
from refimpl.others import _answers

GPT2 = {**SMALL, "n_embd": 64, "n_layer": 2, "n_head": 4}
BUILD = {"gpt2": causal("gpt2", **GPT2, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
         "llama": causal("llama", **GROUPED), "llama tied": causal("llama", tie_word_embeddings=True, **GROUPED),
         "mistral": causal("mistral", **GROUPED), "qwen2": causal("qwen2", **GROUPED)}
CHANGED = {"gemma2": {"final_logit_softcapping": 3.0}, "cohere": {"logit_scale": 0.3},
           "granite": {"logits_scaling": 3.0}}


def stepped(model, batch, **more):
    outputs = model(**batch, **more)
    outputs.loss.backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(model, batch, before, loss=1e-5, **more):
    """Without logits: loss and gradients as `before`, (outputs, gradients) of the model itself."""
    (outputs, found), (expected, gradients) = stepped(model, batch, **more), before
    assert outputs.logits is None and (outputs.loss - expected.loss).abs() < loss * expected.loss
    assert found.keys() == gradients.keys()
    assert all((found[k] - g).norm() < 1e-5 * g.norm() + 1e-7 for k, g in gradients.items())


def built(name):
    torch.manual_seed(0)
    return BUILD[name](), padded()()


@pytest.mark.core
@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": 77}], ids=["mean", "items"])
def test_loss_and_gradients_are_the_models_own(name, more):
    model, batch = built(name)
    before = stepped(copy.deepcopy(model), batch, **more)
    handle = without_logits(model, chunk_size=48)
    assert_same(model, batch, before, **more)
    assert torch.equal(model(input_ids=batch["input_ids"]).logits, model.eval()(input_ids=batch["input_ids"]).logits)
    handle.remove()
    assert torch.equal(model(**batch).logits, before[0].logits)


def test_names_and_ties_stay():
    model, _ = built("llama tied")
    names = list(model.state_dict())
    without_logits(model)
    assert list(model.state_dict()) == names and model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tuple_and_shifted_labels():
    model, batch = built("llama")
    shifted, expected = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:], model(**batch).loss
    without_logits(model)
    loss, logits, *_ = model(**batch, shift_labels=shifted, return_dict=False)
    assert logits is None and (loss - expected).abs() < 1e-6


def test_another_ignored_id_and_an_evaluation_with_items():
    model, batch = built("llama")
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] < 0, 7)
    copied = copy.deepcopy(model)
    without_logits(copied, chunk_size=48)
    for more in ({"ignore_index": 7}, {"ignore_index": 7, "num_items_in_batch": torch.tensor(77)}):
        with torch.no_grad():
            expected, found = model(**batch, **more).loss, copied(**batch, **more).loss
        assert (found - expected).abs() < 1e-6 * expected


def test_a_factor_and_a_softcap():
    """No model of theirs has both; one that did would have the factor first."""
    model, batch = causal("cohere", **GROUPED, logit_scale=0.5)(), padded()()
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    model.config.final_logit_softcapping = 3.0
    logits = model(**batch).logits.detach()
    expected = model.loss_function(3.0 * torch.tanh(logits / 3.0), batch["labels"], 256)
    without_logits(model, chunk_size=48)
    inner = model.loss_function
    model.loss_function = lambda logits, **given: inner(logits=3.0 * torch.tanh(logits / 3.0), **given)
    assert (model(**batch).loss - expected).abs() < 1e-5 * expected


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_peak_of_a_model_whose_vocabulary_is_large(name):
    """It falls by nearly the difference of the heads' closed forms, and is that of a step without a head."""
    sizes = GPT2 if name == "gpt2" else {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
    model, batch = causal(name, **sizes | {"vocab_size": 5000})(), text(8, 64, 5000)()
    logits = peak_of(model, batch)
    without_logits(model, chunk_size=64)
    without = peak_of(model, batch)
    N, V, C = 8 * 64, 5000, 64
    saved = plain_cross_entropy_bytes(N, V, C).peak - chunked_cross_entropy_bytes(N, V, C, chunk_size=64).peak
    assert logits - without > 0.9 * saved > 0.4 * logits


def test_their_trainer(tmp_path):
    """Two accumulated batches: their Trainer passes num_items_in_batch."""
    from transformers import Trainer, TrainingArguments

    found = []
    for replaced in (False, True):
        model, batch = built("llama")
        if replaced:
            without_logits(model, chunk_size=48)
        rows = [{k: v[i] for k, v in batch.items()} for i in range(8)]
        arguments = TrainingArguments(
            tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, report_to=[], seed=0,
            save_strategy="no", logging_strategy="no", use_cpu=True, disable_tqdm=True)
        Trainer(model, arguments, train_dataset=rows).train()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert (found[0] - found[1]).abs().max() < 1e-5


def test_our_gpt():
    model = GPT(GPTConfig(vocab_size=256, context_length=64, layers=2, hidden=32, heads=4))
    tokens = text()()["input_ids"]
    targets = tokens.masked_fill(tokens < 40, -100)
    def step(reduction):
        model.zero_grad()
        loss = model(tokens, targets, reduction=reduction)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    for reduction in ("mean", "sum"):
        expected = step(reduction)
        handle = without_logits(model, chunk_size=48)
        assert all((a - b).norm() <= 1e-5 * b.norm() + 1e-7 for a, b in zip(step(reduction), expected, strict=True))
        with pytest.raises(ValueError, match="remove"):
            without_logits(model)
        with pytest.raises(ValueError, match="targets run from"):
            model(tokens, tokens + 256)
        handle.remove()
        assert torch.equal(step(reduction)[0], expected[0])


def test_what_is_refused():
    t5 = seq2seq("t5", vocab_size=256, d_model=32, d_ff=64, d_kv=8, num_layers=1, num_heads=4,
                 tie_word_embeddings=False)
    bart = causal("bart", vocab_size=256, d_model=64, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=64)
    for model, words in ((masked("bert")(), "ForMaskedLMLoss"), (t5(), "expected a decoder"), (
            bart(), "BartForCausalLM does not call its loss_function"), (torch.nn.Linear(3, 3), "nn.Linear")):
        with pytest.raises(TypeError, match=words):
            without_logits(model)
    model, _ = built("llama")
    without_logits(model)
    with pytest.raises(ValueError, match="remove"):
        without_logits(model)


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_between_head_and_loss_is_taken_along(name, monkeypatch):
    model, batch = causal(name, **GROUPED, **CHANGED[name])(), padded()()
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)  # logits that the change changes
    expected, gradients = stepped(copy.deepcopy(model), batch)
    handle = without_logits(model, chunk_size=48)
    outputs, found = stepped(model, batch)
    assert (outputs.loss - expected.loss).abs() < 1e-5 * expected.loss
    most = max(g.norm() for g in gradients.values())
    assert all((found[k] - g).norm() < 1e-4 * g.norm() + 1e-6 * most for k, g in gradients.items())
    handle.remove()
    monkeypatch.setitem(_answers, "between", [lambda *_: Change()])  # a version that forgets it is far off
    without_logits(model)
    assert (model(**batch).loss - expected.loss).abs() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.02, 1.0, 300.0])
def test_a_softcap_is_found_in_every_dtype(dtype, scale):
    """In fp64, of which fp32 keeps half; and where it moves numbers by less than they are rounded."""
    model = causal("gemma2", **GROUPED)()
    for cap in (15.0, 50.0):
        model.config.final_logit_softcapping = cap
        hidden = (scale * torch.randn(4, 16, 64)).to(dtype)
        assert changed(model, hidden, torch.tanh(hidden / cap) * cap) == Change(1.0, cap)
        assert changed(model, hidden, hidden * 1) == Change()
        assert changed(model, torch.zeros_like(hidden), torch.zeros_like(hidden)) == Change(1.0, cap)


def test_a_model_with_a_softcap_in_fp64():
    model, batch = causal("gemma2", **GROUPED, final_logit_softcapping=3.0)().double(), padded()()
    before = stepped(copy.deepcopy(model), batch)
    without_logits(model, chunk_size=48)
    assert_same(model, batch, before, loss=1e-6)  # theirs computes it in fp32


def test_another_change_is_named():
    """A penalty on the first features, one written in place, a factor that the configuration does not know."""
    model, batch = built("llama")
    shift = torch.zeros(64)
    shift[:2] = 1
    for change in (lambda z: z - shift, lambda z: z.mul_(1), lambda z: z * 1.01, lambda z: z[..., :32]):
        handle = without_logits(model)
        head = model.lm_head.forward
        model.lm_head.forward = lambda hidden, change=change, head=head: change(head(hidden))  # as if it came after
        with pytest.raises(RuntimeError, match="between head and loss"):
            model(**batch)
        model.lm_head.forward = head
        handle.remove()
    model = causal("gemma2", **GROUPED, final_logit_softcapping=30.0)()
    without_logits(model, softcap=20.0)
    with pytest.raises(RuntimeError, match="softcap=20.0: Gemma2ForCausalLM has its own, 30.0"):
        model(**text()())


def test_a_peft_model_and_labels_by_position():
    import peft

    model, batch = built("llama")
    expected = model(**batch).loss
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    without_logits(adapted, chunk_size=48)
    by_position = model(batch["input_ids"], batch["attention_mask"], None, None, None, batch["labels"])
    for outputs in (adapted(**batch), by_position):
        assert outputs.logits is None and (outputs.loss - expected).abs() < 1e-5 * expected


def test_a_peft_model_that_adapts_its_head_is_refused_before_it_runs():
    """At once, not in its first call; and one with a prompt in front, whose labels grow, has its own loss."""
    import peft

    saves = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    for options in ({"target_modules": ["q_proj", "lm_head"]}, saves):
        adapted = peft.get_peft_model(built("llama")[0], peft.LoraConfig(**options))
        with pytest.raises(TypeError, match="as its output embedding: expected an nn.Linear"):
            without_logits(adapted)
    model, batch = built("llama")
    adapted = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    expected = adapted(**batch).loss
    without_logits(adapted, chunk_size=48)
    outputs = adapted(**batch)
    assert outputs.logits is None and (outputs.loss - expected).abs() < 1e-5 * expected


def test_a_replica_is_refused_and_a_copy_is_a_model_of_its_own():
    """A replica has the head of the first GPU's model, and its threads share what stands between head and loss."""
    model, batch = built("llama")
    before = stepped(copy.deepcopy(model), batch)
    handle = without_logits(model, chunk_size=48)
    with pytest.raises(RuntimeError, match="replica .*DataParallel.*torchrun"):
        model._replicate_for_data_parallel()(**batch)
    copied = copy.deepcopy(model)
    handle.remove()
    assert_same(copied, batch, before)
    assert all(p.grad is None for p in model.parameters()) and model(**batch).logits is not None


def test_a_model_with_a_loss_of_its_own_is_named():
    model, batch = built("llama")
    without_logits(model, chunk_size=48)
    model.forward = lambda input_ids, labels, attention_mask: {
        "loss": model.lm_head(model.model(input_ids, attention_mask).last_hidden_state).mean()}
    with pytest.raises(RuntimeError, match="did not call its loss_function"):
        model(**batch)
