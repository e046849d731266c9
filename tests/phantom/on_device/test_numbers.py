"""Numbers: losses of models as on a CPU, dropout that follows the generator, what has none by name."""

import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from refimpl import memory
from refimpl.model import GPT, GPTConfig
from refimpl.phantom import numbers
from refimpl.zero.internals.elementwise import check_elementwise


def ours():
    return GPT(GPTConfig(vocab_size=500, context_length=64, layers=2, hidden=64, heads=4))


def llama():
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64))


def gpt2(dropout=0.0, **options):
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=500, n_positions=64, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, bos_token_id=1, eos_token_id=1, **options))


def losses(make, device, steps=4):
    torch.manual_seed(0)
    model = make().to(device).train()
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    x = torch.randint(0, 500, (2, 64), generator=torch.Generator().manual_seed(1)).to(device)
    for _ in range(steps):
        loss = model(x, x) if make is ours else model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("make", [ours, llama, gpt2])
def test_losses_are_those_of_a_cpu(make):
    with numbers.Numbers():
        found = losses(make, "cuda")
    assert found == pytest.approx(losses(make, "cpu"), abs=1e-5) and found[-1] < found[0]
    assert numbers.missing == {}


def test_dropout_follows_the_state_of_the_generator():
    with numbers.Numbers():
        first, again = (losses(lambda: gpt2(0.1), "cuda") for _ in range(2))
        x = torch.ones(1000, device="cuda")
        state = torch.cuda.get_rng_state()
        one, two = nn.functional.dropout(x, 0.3), nn.functional.dropout(x, 0.3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(one, nn.functional.dropout(x, 0.3)) and not torch.equal(one, two)
        assert one.count_nonzero().item() == pytest.approx(700, abs=60)
    assert first == again != losses(gpt2, "cpu")


class Seeded(TorchDispatchMode):
    """Each mask of a dropout begins with the next of some seeds."""

    def __init__(self, seeds):
        super().__init__()
        self.seeds = iter(seeds)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::bernoulli_", "aten::native_dropout"):
            torch.default_generator.manual_seed(next(self.seeds))
        return func(*args, **kwargs or {})


def test_dropout_is_a_cpu_s_with_the_same_random_numbers(monkeypatch):
    seeds, seed_of = [], numbers.seed_of
    monkeypatch.setattr(numbers, "seed_of", lambda generator: seeds.append(seed_of(generator)) or seeds[-1])
    with numbers.Numbers():
        found = losses(lambda: gpt2(0.1, attn_implementation="eager"), "cuda")
    with Seeded(seeds) as mode:
        expected = losses(lambda: gpt2(0.1, attn_implementation="eager"), "cpu")
    assert found == pytest.approx(expected, abs=1e-5) and next(mode.seeds, None) is None and len(set(seeds)) == 4 * 7
    with Seeded(seeds[1:] + seeds[:1]):
        assert found != pytest.approx(losses(lambda: gpt2(0.1, attn_implementation="eager"), "cpu"), abs=1e-3)


@pytest.mark.parametrize("D", [16, 80])
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "gqa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_s_kernels(dtype, kind, D):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2 if kind == "gqa" and i else 4, 40, D, generator=generator) for i in range(3))
    options = {"causal": {"is_causal": True}, "gqa": {"enable_gqa": True},
               "mask": {"attn_mask": torch.ones(40, 40, dtype=torch.bool).tril()}}.get(kind, {})

    def run(device, dtype):
        given = [x.to(device, dtype).requires_grad_() for x in (q, k, v)]
        there = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        out = nn.functional.scaled_dot_product_attention(*given, **there)
        return [x.double().cpu() for x in (out, *torch.autograd.grad(out.sum() + out.square().sum(), given))]

    with numbers.Numbers():
        found = run("cuda", dtype)
    for one, other in zip(found, run("cpu", torch.float64), strict=True):
        assert (one - other).norm() / other.norm() < (1e-5 if dtype is torch.float32 else 2e-2)


def test_sizes_that_depend_on_numbers():
    with numbers.Numbers():
        x = torch.arange(8, device="cuda")
        assert x[x > 4].tolist() == [5, 6, 7] and x.nonzero().shape == (7, 1)
        assert torch.unique(x // 2).tolist() == [0, 1, 2, 3] and torch.equal(x, x.clone())
        x[x > 5] = 0
        assert x.tolist() == [0, 1, 2, 3, 4, 5, 0, 0] and str(x)[:30] == "tensor([0, 1, 2, 3, 4, 5, 0, 0"


class Plain(torch.Tensor):
    """A class that dispatches nothing itself."""


def test_values_of_other_threads_classes_conjugates_and_devices(monkeypatch):
    """Each is what a CPU has: what is not seen by the mode as it is has no numbers."""
    def values(device):
        x, found = torch.arange(1.0, 5.0, device=device), []
        thread = threading.Thread(target=lambda: found.append(x * 2))
        thread.start()
        thread.join()
        ragged = torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged)
        y = (x * (1 + 2j)).conj()
        y[0] = 3 + 4j
        x.view(2, 2).t().as_strided_((2,), (2,))
        norm = nn.BatchNorm2d(1).to(device)
        norm(x.view(1, 1, 2, 2)).pow(3).sum().backward()
        return [*found, x.as_subclass(Plain) * 3, (ragged * 2).values(), torch.view_as_real(y.resolve_conj()), x,
                norm.weight.grad, norm.running_var]

    for owner, name in ((threading.Thread, "_bootstrap_inner"), (torch, "compile"), (torch.cuda.nccl, "is_available")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # as they were, in the end
    numbers.on()
    try:
        for one, other in zip(values("cuda"), values("cpu"), strict=True):
            assert torch.allclose(one.cpu(), other, atol=1e-5)
        own = torch.Generator("cuda:1").manual_seed(1)
        drawn = [torch.rand(8, device="cuda:1", generator=each) for each in (None, None, own, own)]
        assert len({tuple(each.tolist()) for each in drawn}) == 4
        assert torch.equal(drawn[2], torch.rand(8, device="cuda:1", generator=own.manual_seed(1)))
    finally:
        numbers._entered[0].__exit__(None, None, None)


def test_an_operation_without_a_twin_is_named(monkeypatch):
    monkeypatch.setattr(numbers, "LIMIT", 1000)
    monkeypatch.setattr(numbers, "missing", {})
    with numbers.Numbers():
        torch.ones(1000, device="cuda").add(1)
    assert numbers.missing == {"aten.ones.default": "its tensors have 4,000 bytes, more than 1,000",
                               "aten.add.Tensor": "its tensors have 4,000 bytes, more than 1,000"}


def test_dry_runs_and_trials_work_inside():
    def step():
        model = GPT(GPTConfig(vocab_size=64, context_length=16, layers=2, hidden=16, heads=2), device="cuda")
        tokens = torch.zeros(2, 16, dtype=torch.int64, device="cuda")
        with memory.track(model, tokens) as t:
            model(tokens, tokens).backward()
        return t

    with numbers.Numbers(), warnings.catch_warnings(action="ignore"):
        dry, real = memory.dry_run(step).result, step()
        assert dry.peak.total == real.peak.total > 0
        weight = nn.Parameter(torch.ones(4, device="cuda"))
        check_elementwise(torch.optim.AdamW, None, [("weight", weight)])


def test_without_numbers_an_optimizer_that_looks_at_others_is_refused_all_the_same():
    weight = nn.Parameter(torch.empty(8, 8, device="cuda"))
    with pytest.raises(TypeError, match="updates an element by others"):
        check_elementwise(torch.optim.Adafactor, None, [("weight", weight)])
    check_elementwise(torch.optim.AdamW, None, [("weight", weight)])
