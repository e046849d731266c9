"""autocast beside torch.autocast: the same dtypes out of every operation, the same gradients; and regions end."""

import weakref

import pytest
import torch
from precision_kit import Dtypes, recorded
from threads_kit import in_a_thread
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from refimpl import memory
from refimpl.common.nested_tensors import tensors_in
from refimpl.mixed_precision import autocast, keep_precision
from refimpl.mixed_precision.internals import recompute
from refimpl.mixed_precision.internals.autocast_regions import KEY, current, state
from refimpl.model import GPT, GPTConfig


@pytest.fixture(autouse=True)
def nothing_stays():
    """After each test no region is open, nothing is wrapped, and no operation comes to our kernels."""
    checkpoint = torch.utils.checkpoint
    before = checkpoint.CheckpointFunction.forward, checkpoint._CheckpointFrame.__init__
    yield
    assert not state().stack and recompute._open == 0 and torch._C._dispatch_tls_is_dispatch_key_excluded(KEY)
    assert not torch._C._dispatch_tls_is_dispatch_key_included(KEY)
    assert (checkpoint.CheckpointFunction.forward, checkpoint._CheckpointFrame.__init__) == before


def product(dtype=torch.float32):
    """A matrix product: low inside a region."""
    return torch.ones(2, 2, dtype=dtype) @ torch.ones(2, 2, dtype=dtype)


# --- the same as torch.autocast --------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_operation_of_our_gpt_has_the_dtype_that_torch_gives_it(gpt, dtype):
    theirs, loss, gradients = recorded(torch.autocast("cpu", dtype), *gpt)
    ours, our_loss, our_gradients = recorded(autocast(dtype), *gpt)
    assert ours.forward == theirs.forward and len(ours.forward) > 50
    assert ours.backward == theirs.backward and len(ours.backward) > 50
    assert ours.casts == theirs.casts and len(ours.casts) > 20
    assert ours.saved == theirs.saved and len(ours.saved) > 20
    assert torch.equal(our_loss, loss) and our_loss.dtype is torch.float32
    for one, other in zip(our_gradients, gradients, strict=True):
        assert torch.equal(one, other) and one.dtype is torch.float32


@pytest.mark.parametrize("attention", [F.scaled_dot_product_attention, None])
def test_dtypes_with_another_attention_and_without_targets(attention):
    config = GPTConfig(vocab_size=64, context_length=32, layers=1, hidden=32, heads=4, kv_heads=2)
    model = GPT(config) if attention is None else GPT(config, attention)
    tokens, records = torch.randint(0, 64, (2, 16)), []
    for region in (torch.autocast("cpu"), autocast(), autocast(enabled=False)):
        with Dtypes() as record, region:
            logits = model(tokens)
        records.append((record.everything(), logits.dtype))
    assert records[0] == records[1] != records[2]
    assert records[1][1] is torch.bfloat16 and records[2][1] is torch.float32


def test_a_region_that_casts_nothing_is_seen(model, tokens):
    """The mutant of the test above: it computes the same loss within rounding, in fp32."""
    theirs, *_ = recorded(torch.autocast("cpu"), model, tokens)
    ours, *_ = recorded(autocast(enabled=False), model, tokens)
    assert ours.forward != theirs.forward and ours.saved != theirs.saved


def test_backward_inside_the_region_is_as_torch_s(model, tokens):
    records = []
    for region in (torch.autocast("cpu"), autocast()):
        with Dtypes() as record, region:
            model(tokens, tokens).backward()
        model.zero_grad()
        records.append(record.everything())
    assert records[0] == records[1]


def outcome(region, module, given):
    """What a module returns in a region, or what is said of it: not every processor has an LSTM in bf16."""
    try:
        with region:
            return tensors_in(module(*given))
    except RuntimeError as error:
        return str(error)


def test_layers_beyond_our_gpt():
    """Convolutions, recurrent layers, torch's own transformer: the same dtypes and results."""
    for module, *given in (
        (nn.Conv2d(2, 3, 3, padding=1), torch.randn(1, 2, 5, 5)),
        (nn.Conv1d(2, 3, 3, padding="same"), torch.randn(1, 2, 5)),
        (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), torch.randn(2, 3, 16)),
        (nn.MultiheadAttention(16, 2), *[torch.randn(3, 2, 16)] * 3), (nn.LSTM(4, 4), torch.randn(3, 2, 4)),
        (nn.GRUCell(4, 4), torch.randn(2, 4), torch.randn(2, 4)), (nn.BatchNorm1d(4), torch.randn(2, 4)),
        (nn.GroupNorm(2, 4), torch.randn(2, 4)), (nn.EmbeddingBag(9, 4), torch.randint(0, 9, (2, 3))),
        (nn.Bilinear(4, 4, 3), torch.randn(2, 4), torch.randn(2, 4))):
        theirs, ours = (outcome(region, module, given) for region in (torch.autocast("cpu"), autocast()))
        if isinstance(theirs, str):
            assert isinstance(module, nn.LSTM) and ours == theirs
            continue
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype is other.dtype and torch.equal(one, other), module


# --- what is cast, and what is not -----------------------------------------------------------------------------------

def test_keywords_lists_and_functions_of_either_spelling():
    x, w, b = torch.randn(2, 3), torch.randn(4, 3), torch.randn(4)
    with autocast():
        for result in (F.linear(x, w, b), F.linear(input=x, weight=w, bias=b), torch.matmul(x, other=w.T), x @ w.T,
                       x.mm(mat2=w.T), torch.addmm(b, x, w.T, beta=2, alpha=0.5), torch.einsum("bi,oi->bo", x, w)):
            assert result.dtype is torch.bfloat16
        assert F.cross_entropy(input=x.bfloat16(), target=torch.tensor([0, 1])).dtype is torch.float32
        joined = torch.cat([x, x.bfloat16()]), torch.stack(tensors=(x.bfloat16(), x))
        assert all(each.dtype is torch.float32 for each in joined)
        assert torch.cat([x.bfloat16(), x.bfloat16()]).dtype is torch.bfloat16
        assert (x + x.bfloat16()).dtype is torch.float32 and x.bfloat16().exp().dtype is torch.bfloat16


def test_float64_and_integers_are_left_alone():
    with autocast():
        assert product(torch.float64).dtype is torch.float64 and product(torch.int64).dtype is torch.int64
        assert F.linear(torch.ones(2, 3).double(), torch.ones(4, 3).double()).dtype is torch.float64
        with pytest.raises(RuntimeError, match="dtype"):  # as under torch.autocast: only the fp32 one was cast
            torch.ones(2, 2, dtype=torch.float64) @ torch.ones(2, 2)


def test_in_place_operations_and_out_write_into_what_they_are_given():
    a, b, out = torch.ones(2, 2), torch.ones(2, 2), torch.zeros(2, 2)
    with autocast():
        assert torch.mm(a, b, out=out) is out and out.dtype is torch.float32 and out.sum() == 8
        out.addmm_(a, b)
        assert out.dtype is torch.float32 and out.sum() == 16
        out += a
        assert out.dtype is torch.float32


# --- casts of weights ------------------------------------------------------------------------------------------------

def test_a_weight_is_cast_once_in_a_region():
    def casts_of(weight, region):
        """How many casts of `weight` are made in three uses in `region`, as the tracker sees them."""
        x = torch.randn(1, weight.shape[1])
        with memory.track(weight, x) as t, region:
            for _ in range(3):
                F.linear(x, weight)
        return sum(record.op == "_to_copy" and record.nbytes == weight.numel() * 2 for record in t.records)
    weight = nn.Parameter(torch.randn(8, 16))
    assert casts_of(weight, autocast()) == 1 and casts_of(weight, autocast(cache=False)) == 3
    assert casts_of(weight.detach(), autocast()) == 3  # no weight of anybody's: nothing says that it stays


def test_casts_are_dropped_when_the_region_ends():
    weight, x = nn.Parameter(torch.randn(8, 16)), torch.randn(1, 16)
    with memory.track(weight, x) as t:
        with autocast():
            F.linear(x, weight)
            assert t.now.total - t.start.total == weight.numel() * 2
        assert t.now.total == t.start.total


def test_a_weight_that_changes_is_cast_again():
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
    with autocast():
        assert F.linear(x, weight)[0, 0] == 2
        with torch.no_grad():
            weight.mul_(2)
        assert F.linear(x, weight)[0, 0] == 4
        weight.data = torch.full((2, 2), 5.0)
        assert F.linear(x, weight)[0, 0] == 10


def test_a_cast_made_without_gradients_does_not_lose_them():
    """A cast under no_grad has no way back to the weight: it must not be found again when autograd is on."""
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
    with autocast():
        with torch.no_grad():
            F.linear(x, weight)
        F.linear(x, weight).sum().backward()
        with torch.inference_mode():
            assert F.linear(x, weight).dtype is torch.bfloat16
        assert F.linear(x, weight).requires_grad
    assert torch.equal(weight.grad, torch.ones(2, 2))


def test_regions_inside_share_the_casts_of_the_same_dtype_only():
    weight, x = nn.Parameter(torch.randn(8, 16)), torch.randn(1, 16)
    with memory.track(weight, x) as t:
        with autocast():
            F.linear(x, weight)
            for _ in range(3):
                with autocast():
                    F.linear(x, weight)
            assert t.now.total - t.start.total == 2 * weight.numel()
            with autocast(torch.float16):
                F.linear(x, weight)
                assert t.now.total - t.start.total == 4 * weight.numel()
            assert t.now.total - t.start.total == 2 * weight.numel()


# --- regions ---------------------------------------------------------------------------------------------------------

def test_nesting_disabling_and_the_way_back():
    assert product().dtype is torch.float32
    with autocast():
        assert product().dtype is torch.bfloat16
        with autocast(torch.float16):
            assert product().dtype is torch.float16
            with autocast(enabled=False):
                assert product().dtype is torch.float32
                with autocast():
                    assert product().dtype is torch.bfloat16
            assert product().dtype is torch.float16
        assert product().dtype is torch.bfloat16
    assert product().dtype is torch.float32


def test_an_exception_ends_the_region():
    with pytest.raises(ZeroDivisionError), autocast():
        product()[0, 0].item() / 0
    assert product().dtype is torch.float32
    with autocast():
        with pytest.raises(RuntimeError, match="shapes"):
            torch.ones(2, 3) @ torch.ones(2, 3)
        assert product().dtype is torch.bfloat16


def test_an_instance_can_be_entered_again_and_inside_itself():
    region = autocast()
    for _ in range(2):
        with region:
            with region:
                assert product().dtype is torch.bfloat16
            assert product().dtype is torch.bfloat16
        assert product().dtype is torch.float32


def test_as_a_decorator_of_functions_recursion_and_generators():
    @autocast()
    def deep(n):
        """Documented."""
        return product().dtype if n == 0 else deep(n - 1)
    @autocast()
    def generator():
        while True:
            received = yield product().dtype
            assert received in (None, "sent")
    assert deep(3) is torch.bfloat16 and deep.__doc__ == "Documented."
    running = generator()
    assert next(running) is torch.bfloat16
    assert product().dtype is torch.float32  # between two stretches of the generator
    assert running.send("sent") is torch.bfloat16
    running.close()
    with pytest.raises(TypeError, match="autocast cannot decorate waits, which is async.*with autocast"):
        @autocast()
        async def waits():
            pass


def test_generators_that_end_in_another_order_than_they_began():
    def holding(dtype):
        with autocast(dtype):
            yield
    first, second = holding(torch.bfloat16), holding(torch.float16)
    next(first)
    next(second)
    assert product().dtype is torch.float16
    first.close()
    assert product().dtype is torch.float16
    second.close()
    assert product().dtype is torch.float32


def test_a_region_is_its_thread_s():
    found = {}
    def work(name):
        found[name] = product().dtype
        with autocast(torch.float16):
            found[name + ", own region"] = product().dtype
    with autocast():
        for name, target in (("plain", work), ("kept", keep_precision(work))):
            in_a_thread(target, name)
        assert product().dtype is torch.bfloat16
    assert found == {"plain": torch.float32, "plain, own region": torch.float16, "kept": torch.bfloat16,
                     "kept, own region": torch.float16}


def test_a_region_cannot_be_left_in_another_thread():
    with autocast() as region, pytest.raises(RuntimeError, match="was not entered in the thread that leaves it"):
        in_a_thread(region.__exit__, None, None, None)


def test_a_dry_run_reads_what_the_real_run_reads(model, tokens):
    def step(model, tokens):
        with autocast():
            loss = model(tokens, tokens)
        loss.backward()
    step(model, tokens)
    model.zero_grad()
    dry = memory.dry_run(step, model, tokens)
    with memory.track(model, tokens) as real:
        step(model, tokens)
    assert dry.peak == real.peak and dry.now == real.now


def test_what_cannot_be_asked_for():
    for dtype in (torch.float32, torch.float64, torch.int8, "bf16", None):
        with pytest.raises(ValueError, match=r"dtype=.*: expected torch.bfloat16 or torch.float16"):
            autocast(dtype)
    with pytest.raises(ValueError, match="device_type='tpu': expected 'cpu' or 'cuda'"):
        autocast(device_type="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device_type='cuda', but torch .* sees no GPU"):
            autocast(device_type="cuda")


@pytest.mark.parametrize("change", [lambda p, a, b: (setattr(p, "data", b), setattr(p, "data", a.clone())),
                                    lambda p, a, b: setattr(p, "data", a[2:]),
                                    lambda p, a, b: setattr(p, "data", a[:2].t()),
                                    lambda p, a, b: setattr(p, "data", a[:1])],
                         ids=["twice", "another part of the storage", "transposed", "fewer rows"])
def test_a_weight_that_is_given_other_data_is_cast_again(change):
    """Also in the storage that it had, and in one that took the address of the one before."""
    data = torch.arange(8.0).reshape(4, 2)
    weight, x = nn.Parameter(data[:2]), torch.ones(1, 2)
    with autocast():
        F.linear(x, weight)
        change(weight, data, torch.zeros(2, 2))
        assert torch.equal(F.linear(x, weight), x.bfloat16() @ weight.detach().bfloat16().t())


def test_streamed_weights_are_cast_every_time():
    """A weight whose data come, are let go and come again: each new storage likes to take the old one's address."""
    weight, x = nn.Parameter(torch.empty(0)), torch.ones(1, 2)
    with autocast():
        for number in range(20):
            weight.data = torch.full((1, 2), float(number))
            assert F.linear(x, weight) == 2 * number
            weight.data = torch.empty(0)
        assert len(current("cpu").casts) == 1


def test_a_cast_does_not_hold_the_storage_that_it_was_made_from_nor_its_weight_past_the_region():
    weight = nn.Parameter(torch.ones(1, 2))
    storage, reference = StorageWeakRef(weight.untyped_storage()), weakref.ref(weight)
    with autocast():
        F.linear(torch.ones(1, 2), weight)
        weight.data = torch.zeros(1, 2)
        assert storage.expired()
        del weight
    assert reference() is None


def test_function_transforms_have_torch_s_results():
    """torch.func's tensors have no storage to compare: they are cast at each use."""
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    stacked = {name: torch.stack([p, 2 * p]).requires_grad_() for name, p in weights.items()}
    def call(weights, x):
        return torch.func.functional_call(layer, weights, (x,)).float()
    def loss(weights, x):
        return call(weights, x).square().sum()
    def everything():
        layer(x)  # and a cast is there already
        return [*torch.func.grad(loss)(weights, x).values(),
                *torch.vmap(torch.func.grad(loss), (None, 0))(weights, x).values(),
                torch.vmap(call, (0, None))(stacked, x),
                *torch.func.jvp(lambda w: call(w, x), (weights,), (weights,)),
                torch.func.hessian(lambda w: loss({**weights, "weight": w}, x))(weights["weight"])]
    with autocast():
        ours = everything()
    with torch.autocast("cpu", torch.bfloat16):
        theirs = everything()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.filterwarnings("error")
def test_under_torch_compile():
    """A region inside a compiled function counts; a compiled function in a region is compiled for that region's dtype.

    Traced, `__enter__` would change nothing that lasts, and the body would run in fp32 without a word.
    """
    weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4)
    def region_inside(x):
        with autocast():
            return x @ weight
    torch.compiler.reset()
    inside = torch.compile(region_inside, backend="eager")
    assert [inside(x).dtype for _ in range(3)] == [torch.bfloat16] * 3 and (x @ weight).dtype is torch.float32
    made_before = autocast()
    def region_of_the_outside(x):
        with made_before:
            return x @ weight
    assert torch.compile(region_of_the_outside, backend="eager")(x).dtype is torch.bfloat16
    assert (x @ weight).dtype is torch.float32
    outside = torch.compile(lambda x: x @ weight, backend="eager")
    for region, dtype in ((autocast(), torch.bfloat16), (autocast(enabled=False), torch.float32)):
        with region:
            assert outside(x).dtype is dtype
    torch.compiler.reset()


def test_a_weight_that_two_types_are_asked_of_is_cast_to_each():
    weight, x = nn.Parameter(torch.ones(4, 4, dtype=torch.float16)), torch.ones(4, 4)
    with autocast(device_type="cpu"):
        for _ in range(2):
            assert (x @ weight).dtype is torch.bfloat16 and torch.prod(weight).dtype is torch.float32


@pytest.mark.filterwarnings("ignore")
def test_torch_export_refuses_a_region_inside_and_its_program_runs_in_one():
    linear, x = nn.Linear(4, 4), torch.randn(3, 4)
    class Inside(nn.Linear):
        def forward(self, x):
            with autocast(device_type="cpu"):
                return super().forward(x)

    with pytest.raises(RuntimeError, match="torch.export keeps no casts.*: export the model without autocast"):
        torch.export.export(Inside(4, 4), (x,), strict=False)
    assert linear(x).dtype is torch.float32  # no region is left open
    program = torch.export.export(linear, (x,), strict=False).module()
    with autocast(device_type="cpu"):
        assert program(x).dtype is torch.bfloat16
    assert program(x).dtype is torch.float32


def test_torch_s_own_autocast_has_the_last_word():
    x = torch.ones(2, 2)
    with autocast(torch.float16), torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16), autocast(torch.float16):
        assert (x @ x).dtype is torch.bfloat16
