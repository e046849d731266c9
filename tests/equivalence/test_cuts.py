"""Cuts of models that others wrote are held to the whole: what is wrong is refused by name, what is right is not."""

import time
import warnings

import pytest
import torch
from net_kit import LLAMA, Quarters, on_meta
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from refimpl.checkpointing import recompute
from refimpl.comm import FakeCommunicator, RankError, simulate
from refimpl.context import SequenceParallelAttention, context, context_parallel
from refimpl.engine import together
from refimpl.equivalence import CannotShrink, CutDiffers
from refimpl.equivalence import cut_over_ranks as ranks
from refimpl.equivalence import once_per_class as once
from refimpl.equivalence.comparison import Computed, computed, difference
from refimpl.known_models import toys
from refimpl.known_models.changes import changes_of
from refimpl.known_models.decoder_anatomy import anatomy_of
from refimpl.known_models.toys import results_of, tokens_of, toy_of
from refimpl.mesh import Mesh
from refimpl.mlp import memory_efficient_mlps
from refimpl.model import GPT, GPTConfig
from refimpl.pipeline import partition, pipeline, stages, stages_proof
from refimpl.pipeline.stages_proof import prove_stages
from refimpl.tensor import sequence_parallel, tensor_parallel
from refimpl.tensor.sequence_parallelism import _SplitTokens
from refimpl.tensor.split_plan import Column, Row, region_of
from refimpl.tensor.tensor import proven_sums, split_as

THREE = FakeCommunicator(0, 3)


@pytest.fixture(autouse=True)
def _anew(monkeypatch):
    monkeypatch.setattr(once, "_found", {})


# --- stages ----------------------------------------------------------------------------------------------------------

BY_LAYER = ["gemma2", "gemma3_text", "olmo3", "exaone4", "cohere2", "gpt_oss", "qwen2", "qwen3", "ministral", "cwm",
            "smollm3", "vaultgemma"]
BEFORE = ["granite", "granitemoe", "hyperclovax", "nanochat"]
SETTINGS = {**{kind: {"use_sliding_window": True, "max_window_layers": 2} for kind in ("qwen2", "qwen3")},
            **{kind: {"embedding_multiplier": 12.0} for kind in ("granite", "granitemoe", "hyperclovax")}}


class Renumbered(nn.ModuleList):
    """Layers of a stage that count from 0, as without stand-ins."""

    def __init__(self, layers, chosen):
        super().__init__([layers[i] for i in chosen])


def first_of_its_own(model, first, end):
    """The mutant in which layers count from 0 in each stage."""
    stage, anatomy = stages.stage_of(model, first, end), anatomy_of(model)
    if not stage.is_first:
        layers = stage.get_submodule(anatomy.layers)
        kept = [layer for layer in layers if not isinstance(layer, stages.LayerOfAnotherStage)]
        marks = [layer for layer in layers if isinstance(layer, stages.LayerOfAnotherStage)]
        order = [marks[0], *kept, *marks[1:]] if stage.is_last else [marks[0], *kept, marks[-1]]
        stage.get_submodule(anatomy.layers)._modules = {str(i): layer for i, layer in enumerate(order)}
    return stage


@pytest.mark.parametrize("kind", [*BY_LAYER, *BEFORE])
def test_stages_of_models_that_know_layers_by_number_and_that_scale_before_them(kind):
    prove_stages(on_meta(kind, **SETTINGS.get(kind, {})))


@pytest.mark.parametrize("kind", ["gemma2", "olmo3", "qwen2"])
def test_layers_that_count_from_0_in_each_stage_are_seen(kind, monkeypatch):
    monkeypatch.setattr(stages_proof, "stage_of", first_of_its_own)
    with pytest.raises(CutDiffers, match=r"what model\.layers\.\d\S* returns differs by"):
        prove_stages(on_meta(kind, **SETTINGS.get(kind, {})))


@pytest.mark.parametrize("kind", ["granite", "hyperclovax", "nanochat"])
def test_what_is_done_before_the_layers_and_again_in_each_stage_is_seen(kind, monkeypatch):
    class Again(stages.DecoderStage):
        def forward(self, x, targets=None):
            layers = self.get_submodule(self.anatomy.layers)
            if not self.is_first:
                layers[0].__class__ = AsItCame
                given = {"inputs_embeds": x}
            else:
                given = {"input_ids": x}
            if self.is_last:
                out = super(stages.DecoderStage, self).forward(**given, use_cache=False, labels=targets)
                return out.logits if targets is None else out.loss
            layers[-1].passes = True
            self.get_submodule(self.anatomy.base)(**given, use_cache=False)
            x, layers[-1].arrives = layers[-1].arrives, None
            return x

    class AsItCame(stages.LayerOfAnotherStage):
        pass

    monkeypatch.setattr(stages, "_stage_class", lambda cls: type("Stage", (Again, cls), {}))
    with pytest.raises(CutDiffers, match=r"what model\.layers\.\d\S* returns differs by"):
        prove_stages(on_meta(kind, **SETTINGS.get(kind, {})))


def test_a_loss_that_looks_at_all_layers_is_refused():
    config = MixtralConfig(**LLAMA, num_local_experts=4, num_key_value_heads=2, output_router_logits=True)
    with pytest.raises(CutDiffers, match="its loss differs by .*output_router_logits=True adds to the loss"):
        partition(MixtralForCausalLM(config), 2)
    config.output_router_logits = False
    assert len(partition(MixtralForCausalLM(config), 2)) == 2


@pytest.mark.parametrize(("kind", "said"), [
    ("zamba2", r"what model\.layers\.6\.shared_transformer\.\S+ returns differs"), ("ctrl", "cannot be computed in"),
    ("xlm", "cannot be computed in"), ("git", "a toy of GitForCausalLM cannot be trained")])
def test_stages_that_would_be_wrong_are_refused(kind, said):
    model = on_meta(kind)
    before = {name: tuple(p.shape) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=said):
        partition(model, 2)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == before


@pytest.mark.parametrize("kind", ["opt", "gpt_neox", "bloom", "falcon", "gptj", "phi", "bert", "mamba"])
def test_models_of_other_layouts_have_stages(kind):
    prove_stages(on_meta(kind))


def llama(layers=4, **settings):
    return LlamaForCausalLM(LlamaConfig(**LLAMA | {"num_hidden_layers": layers, "num_key_value_heads": 2} | settings))


@pytest.mark.parametrize("make", [llama, lambda: GPT(GPTConfig(vocab_size=256, context_length=16, layers=2, hidden=16,
                                                               heads=2))])
def test_a_mask_beside_the_tokens_of_a_pipeline_is_refused(make):
    """A first stage would take it for targets, and later ones would not have it."""
    tokens = torch.randint(3, 256, (4, 8))
    with pytest.raises(RankError, match=r"a first stage takes tokens alone, and got \(2, 8\) beside them"):
        simulate(lambda comm: pipeline(make(), comm, "1f1b", 2).train_step(
            (tokens, torch.ones_like(tokens)) if comm.rank == 0 else None, tokens if comm.rank else None), 2)


def scored(comm):
    torch.manual_seed(0)
    config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32)
    model, tokens = BertForMaskedLM(config).double().eval(), torch.randint(3, 64, (4, 8))
    labels = torch.full_like(tokens, -100)
    labels[:2, 0], labels[2:] = tokens[:2, 0], tokens[2:]  # of the first micro-batch the first tokens alone
    expected = model(input_ids=tokens, labels=labels).loss.item()
    pipe = pipeline(model, comm, "1f1b", 2)
    return [None if x is None else x.item() - expected for x in (pipe.evaluate(tokens, labels),
                                                                 pipe.train_step(tokens, labels))]


def test_targets_of_a_loss_that_does_not_shift_are_counted_as_it_does():
    assert simulate(scored, 2)[1] == pytest.approx([0, 0], abs=1e-5)


def test_counts_of_targets_are_proven(monkeypatch):
    monkeypatch.setattr(stages.DecoderStage, "count_targets", lambda self, labels: int((labels != -100).sum()))
    with pytest.raises(CutDiffers, match="its loss differs by"):
        prove_stages(on_meta("llama"))


def test_a_model_that_skips_layers_in_training_has_no_stages():
    opt = on_meta("opt", hidden_size=16, word_embed_proj_dim=16, ffn_dim=32, num_attention_heads=2, num_hidden_layers=4,
                  vocab_size=64, layerdrop=0.5)
    first, last = partition(type(opt)(opt.config), 2)
    x, said_so = torch.randn(2, 4, 16, requires_grad=True), 0
    for seed in range(20):
        torch.manual_seed(seed)
        try:
            loss = last.train()(x, torch.ones(2, 4, dtype=torch.int64))
            assert torch.autograd.grad(loss, x)[0].any()
        except RuntimeError as error:
            assert "has not called each of its 4 layers once" in str(error)
            said_so += 1
    assert 0 < said_so < 20 and first.train()


@pytest.mark.parametrize("change", ["hook", "forward", "base"])
def test_what_each_stage_would_do_again_is_refused(change):
    model = llama()
    if change == "hook":
        model.register_forward_hook(lambda module, args, output: None)
    else:
        part = model if change == "forward" else model.model
        part.forward = part.forward
    with pytest.raises(TypeError, match="which each stage would run: divide the model first"):
        partition(model, 2)


def test_a_stage_keeps_no_message_alive():
    parts = partition(LlamaForCausalLM(LlamaConfig(**LLAMA)), 3)
    x = parts[0](torch.ones(1, 4, dtype=torch.int64))
    parts[1](x)
    for part in parts:
        assert all(layer.arrives is None for layer in part.model.layers
                   if isinstance(layer, stages.LayerOfAnotherStage))
    broken = RuntimeError("out of memory")
    parts[1].model.layers[1].register_forward_pre_hook(lambda *given: (_ for _ in ()).throw(broken))
    with pytest.raises(RuntimeError, match="out of memory"):
        parts[1](x)
    assert all(layer.arrives is None for layer in parts[1].model.layers
               if isinstance(layer, stages.LayerOfAnotherStage))


def test_a_loss_of_more_than_logits_is_refused_by_together():
    def mixtral(balances):
        return MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=4, num_key_value_heads=2,
                                                output_router_logits=balances))

    mesh = Mesh(dp=2).connect(FakeCommunicator(0, 2))
    with pytest.raises(CutDiffers, match="returns a loss of .*output_router_logits=True adds what balances experts"):
        together(mixtral(True), mesh)
    together(mixtral(False), mesh)
    together(mixtral(True), mesh, loss=lambda logits, targets: nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten()))


# --- tensor parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma", "gemma2", "gemma3_text", "gpt_neox", "phi", "phi3", "olmo2",
                                  "olmo3", "glm", "qwen3", "cohere", "granite"])
def test_plans_of_models_are_proven(kind):
    assert proven_sums(on_meta(kind), THREE, None, False) == ()


SERVED = ["llama", "gpt2", "gemma2", "gemma3_text", "phi3", "olmo2", "qwen3", "apertus", "mixtral", "qwen2_moe",
          "olmoe", "deepseek_v2", "llama4_text", "cohere", "glm", "granite_swa"]


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", SERVED)
def test_on_two_and_four_ranks(kind, n):
    """The proof is on three: here with as many heads as four can share."""
    def find(model):
        toy = toys._built(model, toys.shrunk(model.config, ranks=4))
        tokens = tokens_of(toy)
        with torch.enable_grad():
            whole = computed(toy, lambda: results_of(toy, tokens))
            return ranks._compared(model, toy, n, whole, tokens, lambda toy, comm, summed: split_as(
                toy, comm, None, False, summed), ranks._all_tokens, summed)

    model = on_meta(kind)
    summed = proven_sums(model, THREE)
    assert once.once(f"on {n}", model, find) == (None, ())


def test_norms_over_heads_that_a_class_lays_out_by_head_are_refused():
    with pytest.raises(CutDiffers, match="CohereForCausalLM cannot be cut over 3 ranks: RuntimeError: The size of"):
        tensor_parallel(on_meta("cohere", use_qk_norm=True), THREE)


def test_what_a_plan_leaves_out_is_summed():
    """Apertus' activation has two parameters in each layer; its plan does not name them."""
    assert proven_sums(on_meta("apertus"), THREE, None, False) == ("model.layers.*.mlp.act_fn",)

    def trained(comm):
        torch.manual_seed(0)
        toy, _ = toy_of(on_meta("apertus"))
        tokens = tokens_of(toy)
        whole = toy(input_ids=tokens, labels=tokens)
        whole.loss.backward()
        expected = {name: p.grad for name, p in toy.named_parameters() if "act_fn" in name}
        split = tensor_parallel(toy.requires_grad_(), comm)
        split.zero_grad()
        split(input_ids=tokens, labels=tokens).loss.backward()
        return max((p.grad - expected[name]).abs().max().item() for name, p in split.named_parameters()
                   if "act_fn" in name)

    assert max(simulate(trained, 3)) < 1e-6


PLAN = {"model.layers.*.self_attn.q_proj": "column", "model.layers.*.self_attn.k_proj": "column",
        "model.layers.*.self_attn.v_proj": "column", "model.layers.*.self_attn.o_proj": "row"}


def test_norms_of_heads_that_a_plan_omits_are_summed():
    assert proven_sums(on_meta("qwen3"), THREE, PLAN, False) == ("model.layers.*.self_attn.k_norm",
                                                                 "model.layers.*.self_attn.q_norm")


def test_one_norm_for_each_head_is_refused():
    model = on_meta("stablelm", qk_layernorm=True)
    with pytest.raises(CutDiffers, match=r"StableLmForCausalLM(, cut over 3 ranks, would not| cannot be cut over 3)"):
        tensor_parallel(model, THREE, PLAN)
    assert proven_sums(on_meta("stablelm"), THREE, PLAN, False) == ()


def test_a_parameter_that_nobody_sums_is_seen(monkeypatch):
    monkeypatch.setattr("refimpl.tensor.tensor.sum_gradients", lambda parameters, comm: None)
    with pytest.raises(CutDiffers, match=r"the gradient of model\.layers\.0\.self_attn\.[qk]_norm\.weight differs"):
        proven_sums(on_meta("qwen3"), THREE, None, False)


def test_a_class_of_four_heads_is_cut_over_two_and_four_ranks():
    model = Quarters(LlamaConfig(**LLAMA | {"num_key_value_heads": 4}))
    proven = ranks.prove(model, "quarters", lambda toy, comm, summed: split_as(toy, comm, None, False, summed))
    assert proven == ((2, 4), ())


class Own(nn.Module):
    """A model of a user's own."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


def test_a_model_of_which_there_is_no_toy_is_cut_with_a_line_that_says_so():
    with pytest.warns(UserWarning, match="Own is cut, and it was not checked against the whole: Own has no config"):
        tensor_parallel(Own(), THREE, {"up": "column", "down": "row"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor_parallel(Own(), FakeCommunicator(0, 1), {"up": "column", "down": "row"})  # nothing is cut


def test_a_class_whose_toy_cannot_be_built_is_refused_before_anything_is_cut():
    class Fixed(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            if config.hidden_size != 64:
                raise ValueError("hidden_size has to be 64")

    model = Fixed(LlamaConfig(**LLAMA | {"num_attention_heads": 8}))
    before = {name: p.clone() for name, p in model.named_parameters()}
    monkey = pytest.MonkeyPatch()
    with monkey.context() as here, pytest.raises(CannotShrink, match="hidden_size has to be 64"):
        here.setattr("refimpl.known_models.toys.HEADS", (12,))
        tensor_parallel(model, THREE)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


class Scaled(LlamaForCausalLM):
    def __init__(self, config, power=0.0):
        super().__init__(config)
        self.power = power


def hooked(model):
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda module, args: args)


def swapped(model):
    model.model.layers[0].mlp.act_fn = nn.Softmax(-1)


def added(model):
    model.model.layers[0].mlp.gain = nn.Parameter(torch.ones(()))


def patched(model):
    model.model.layers[0].mlp.forward = model.model.layers[0].mlp.forward


def shorter(model):
    model.model.layers = model.model.layers[:3]


CHANGES = {shorter: "layers.3 is gone", hooked: "layers.1.mlp.down_proj has a hook",
           swapped: "layers.0.mlp.act_fn is Softmax, and SiLU",
           added: "the shape of gain of model.layers.0.mlp", patched: "layers.0.mlp has a forward of its own"}


@pytest.mark.parametrize("cut", ["tensor", "tokens", "context"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_somebody_has_changed_is_said_since_the_proof_is_of_the_class(change, cut):
    model = llama(num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
    change(model)
    with pytest.warns(UserWarning, match=rf"what was checked against the whole is its class: .*{CHANGES[change]}"):
        {"tensor": tensor_parallel, "tokens": sequence_parallel, "context": lambda model, comm: context_parallel(
            model, SequenceParallelAttention(comm))}[cut](model, THREE)


def test_an_argument_of_a_constructor_is_a_change_and_what_refimpl_does_is_none():
    with pytest.warns(UserWarning, match="power of the model is 1.0, and 0.0 as its class makes it"):
        tensor_parallel(Scaled(LlamaConfig(**LLAMA), power=1.0), FakeCommunicator(0, 2))
    model = llama()
    recompute(model.model.layers)
    memory_efficient_mlps(model)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    tensor_parallel(model, FakeCommunicator(0, 2))
    assert changes_of(model) is None  # nor is a layer that is split


@pytest.mark.parametrize("plan", [
    {"model.layers.6.mlp.up_proj": "column", "model.layers.6.mlp.down_proj": "row"},
    {"model.layers.*.mlp.up_proj": Column(parts=(128,)), "model.layers.*.mlp.down_proj": "row"},
    {"model.layers.*.self_attn.o_proj": Row(4),
     **{f"model.layers.*.self_attn.{name}_proj": "column" for name in "qkv"}}])
def test_a_plan_that_a_toy_cannot_follow_is_taken_unchecked_and_that_is_said(plan):
    with pytest.warns(UserWarning, match="not checked against the whole: (a toy has not all|the plan has the real)"):
        tensor_parallel(llama(8), FakeCommunicator(0, 2), plan)


# --- tokens between split layers -------------------------------------------------------------------------------------

OPT = {"model.decoder.layers.*.self_attn.q_proj": "column", "model.decoder.layers.*.self_attn.k_proj": "column",
       "model.decoder.layers.*.self_attn.v_proj": "column", "model.decoder.layers.*.self_attn.out_proj": "row",
       "model.decoder.layers.*.fc1": "column", "model.decoder.layers.*.fc2": "row"}


@pytest.mark.parametrize(("kind", "plan"), [("phi", None), ("gpt_neox", None), ("opt", OPT), ("gemma2", None),
                                            ("phi3", None)])
def test_tokens_of_models_whose_region_nobody_named(kind, plan):
    model = on_meta(kind)
    assert proven_sums(model, THREE, plan, False, _SplitTokens(*region_of(model))) == ()


def test_a_norm_that_sees_all_tokens_and_is_summed_is_seen():
    """OLMo-2's norms of q and k read what is gathered: their gradients are whole on each rank already."""
    model = on_meta("olmo2")
    with pytest.raises(CutDiffers, match=r"the gradient of model\.layers\.0\.self_attn\.q_norm\.weight differs"):
        sequence_parallel(model, THREE)


# --- a part of a sequence --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["gathered", "ulysses"])
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "gemma3_text", "mistral"])
def test_windows_caps_and_sinks_of_a_split_sequence(kind, method):
    context_parallel(on_meta(kind), SequenceParallelAttention(THREE, method))


ROPES = {"dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
         "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 1e4,
                      "original_max_position_embeddings": 64}}


@pytest.mark.parametrize("order", ["plain", "zig-zag"])
@pytest.mark.parametrize("kind", ROPES)
def test_rotary_tables_that_follow_the_longest_position_are_refused(kind, order):
    """A rank sees positions of its own tokens, and would take another table than ranks with later ones."""
    config = LlamaConfig(**LLAMA, rope_parameters=ROPES[kind], max_position_embeddings=64 if kind == "dynamic" else 256)
    with pytest.raises(CutDiffers, match="LlamaForCausalLM, cut over 3 ranks, would not compute what it does whole"):
        context_parallel(LlamaForCausalLM(config), SequenceParallelAttention(THREE, "ring", order=order))


def test_sinks_without_a_gradient_are_seen(monkeypatch):
    real = context.METHODS["gathered"]
    monkeypatch.setitem(context.METHODS, "gathered",
                        lambda *given, sinks=None, **options: real(*given, sinks=sinks.detach(), **options))
    with pytest.raises(CutDiffers, match=r"the gradient of model\.layers\.0\.self_attn\.sinks differs"):
        context_parallel(on_meta("gpt_oss"), SequenceParallelAttention(THREE, "gathered"))


# --- how it is compared ----------------------------------------------------------------------------------------------


def test_the_first_that_differs_is_named():
    x = torch.ones(3, dtype=torch.float64)
    whole = Computed({"a": x, "b": x, "c": x}, {"loss": x}, {"w": x, "v": x, "u": None})
    assert difference(whole, whole) is None
    for where, at, what in ((0, "b", "what b returns"), (1, "loss", "its loss"), (2, "v", "the gradient of v"),
                            (2, "u", "the gradient of u")):
        other = Computed(*map(dict, whole))
        other[where][at] = x + torch.tensor([0, 1e-6, 0])
        assert difference(whole, other).startswith(what)
        other[where][at] = x * float("nan")
        assert difference(whole, other).startswith(what)
        if at != "u":
            other[where][at] = x + torch.tensor([0, 1e-12, 0])
            assert difference(whole, other) is None


def test_it_is_found_out_once_for_a_class_and_what_is_small_of_its_config(monkeypatch):
    calls = []
    monkeypatch.setattr(stages_proof, "_prove", calls.append)
    for settings in ({}, {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 64,
                          "intermediate_size": 22016}):
        prove_stages(on_meta("llama", **settings))
    assert len(calls) == 1
    prove_stages(on_meta("llama", rms_norm_eps=1e-3))
    prove_stages(on_meta("qwen3"))
    assert len(calls) == 3


def test_a_proof_takes_less_than_two_seconds():
    """By the processor's clock: a neighbour's load doubles the wall's."""
    for kind in ("llama", "gemma3_text", "qwen3"):
        model, begin = on_meta(kind), time.process_time()
        prove_stages(model)
        proven_sums(model, THREE, None, False)
        assert time.process_time() - begin < 4  # two proofs
