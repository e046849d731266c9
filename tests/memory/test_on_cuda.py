"""A dry run for a GPU, on any machine. (tests/phantom/on_device holds all of it to PyTorch on a device.)"""

import pytest
import torch
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from refimpl import catalog, memory
from refimpl.estimate import kernels_of
from refimpl.memory.on_cuda import attention
from refimpl.memory.on_cuda.attention import choose
from refimpl.memory.on_cuda.inside import INSIDE
from refimpl.memory.storage_records import START
from refimpl.memory.tracking.taking import Processors

aten = torch.ops.aten
HALF, BF16 = torch.float16, torch.bfloat16


def made(function, gpu="h100-sxm"):
    """[(operation, bytes)] of the storages that a dry run of `function` makes, in order."""
    return [(r.op, r.nbytes) for r in memory.dry_run(function, gpu=kernels_of(gpu)).records if r.op != START]


def tensors(*shapes, dtype=torch.float32):
    return [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]


FP32, FP64 = torch.float32, torch.float64
CHOICES = [  # read off PyTorch: GPU, type, head sizes of q and v, heads of k, mask, dropout, causal, tokens of q
    ("h100-sxm", BF16, 64, 64, 8, False, 0.0, True, 512, "cuDNN"),
    ("h100-sxm", BF16, 264, 264, 8, False, 0.0, True, 512, "efficient"),
    ("a100-80", BF16, 64, 64, 2, False, 0.0, True, 512, "flash"),
    ("a100-80", HALF, 20, 20, 8, True, 0.0, False, 512, "math"),
    ("a100-80", HALF, 20, 20, 8, False, 0.0, True, 512, "flash"),
    ("a100-80", BF16, 128, 64, 8, False, 0.0, False, 512, "efficient"),
    ("a100-80", BF16, 64, 64, 8, True, 0.0, False, 512, "efficient"),
    ("a100-80", BF16, 64, 64, 8, False, 0.0, True, 8, "efficient"),
    ("a100-80", FP32, 64, 64, 8, False, 0.0, True, 512, "efficient"),
    ("a100-80", FP64, 64, 64, 8, False, 0.0, True, 512, "math"),
    ("t4", BF16, 64, 64, 8, False, 0.0, True, 512, "math"), ("t4", HALF, 64, 64, 8, False, 0.1, True, 512, "efficient"),
    ("rtx-3090", BF16, 256, 256, 8, False, 0.1, False, 512, "efficient")]


@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_the_kernel_of_attention(case):
    gpu, dtype, size, wide, groups, masked, dropout, causal, rows, kernel = case
    q, k, v = tensors((2, 8, rows, size), (2, groups, 512, size), (2, groups, 512, wide), dtype=dtype)
    mask = torch.empty(2, 1, rows, 512, dtype=dtype) if masked else None
    assert choose(catalog.hardware(gpu), q, k, v, mask, dropout, causal, groups != 8) == kernel


def test_a_single_row_of_queries_is_cudnn_s_on_one_generation_alone():
    q, k, v = tensors((2, 8, 1, 64), *[(2, 8, 512, 64)] * 2, dtype=BF16)
    rows, = tensors((2, 8, 2, 64), dtype=BF16)
    for gpu, of_one, of_more in (("h100-sxm", "cuDNN", "cuDNN"), ("b200", "flash", "cuDNN")):
        assert choose(catalog.hardware(gpu), q, k, v, None, 0.0, False, False) == of_one
        assert choose(catalog.hardware(gpu), rows, k, v, None, 0.0, False, False) == of_more


def test_a_flash_kernel_that_has_no_backward_there_is_taken_without_gradients():
    q, k, v = tensors(*[(2, 8, 16, 200)] * 3, dtype=BF16)
    gpu = catalog.hardware("rtx-3090")
    assert choose(gpu, q, k, v, None, 0.0, False, False) == "efficient"
    assert choose(gpu, q.detach(), k.detach(), v.detach(), None, 0.0, False, False) == "flash"
    with torch.no_grad():
        assert choose(gpu, q, k, v, None, 0.0, False, False) == "flash"


def test_rows_of_a_mask_are_made_longer_for_the_efficient_kernel_alone():
    def longer(gpu):
        def attend():
            q, k, v = tensors(*[(1, 1, 20, 64)] * 3, dtype=BF16)
            F.scaled_dot_product_attention(q, k, v, torch.zeros(20, 20, dtype=BF16))
        return [nbytes for operation, nbytes in made(attend, gpu) if operation == "constant_pad_nd"]

    assert longer("a100-80") == [20 * 32 * 2] and longer("h100-sxm") == []


def test_attention_without_a_batch_takes_a_fused_kernel_since_2_14(monkeypatch):
    def program():
        q, k, v = tensors((8, 512, 64), *[(8, 384, 64)] * 2, dtype=BF16)
        for shape in ((), (512, 384), (8, 512, 384)):
            mask = torch.zeros(shape, dtype=BF16) if shape else None
            output, kernel = attention.attend(catalog.hardware("a100-80"), q, k, v, mask, 0.0, False, scale=None,
                                              gqa=False)
            taken.append(kernel)
            assert output.shape == q.shape

    for version, expected in (("2.13.0", ["math"] * 3), ("2.14.0", ["flash", "efficient", "efficient"])):
        monkeypatch.setattr(attention, "VERSION", TorchVersion(version))
        taken = []
        memory.dry_run(program, gpu=kernels_of("a100-80"))
        assert taken == expected


@pytest.mark.parametrize(("operation", "args", "nbytes"), [  # read off PyTorch's allocator
    (aten._scaled_dot_product_flash_attention_backward, [(2, 8, 512, 64)] * 5, 2_129_920 + 2 * 2**20),
    (aten._scaled_dot_product_flash_attention_backward, [(2, 8, 512, 64)] * 2 + [(2, 2, 512, 64)] * 2 +
     [(2, 8, 512, 64)], 4_227_072 + 2 * 2**20),
    (aten._scaled_dot_product_flash_attention, [(2, 8, 512, 64)] * 3, 4_259_840),
    (aten._scaled_dot_product_flash_attention, [(2, 8, 1024, 64)] * 3, 0),
    (aten._scaled_dot_product_efficient_attention, [(2, 4, 512, 264)] * 3, 4_325_376),
    (aten._scaled_dot_product_efficient_attention_backward, [(2, 4, 512, 264)] * 4, 17_844_736 + 2_162_688),
    (aten._softmax_backward_data, [(4, 64)] * 2, 512)])
def test_what_a_kernel_takes_inside(operation, args, nbytes):
    given = tensors(*args, dtype=BF16)
    assert sum(INSIDE[operation.default](Processors((8, 0), 132), *given)) == nbytes


def test_a_loss_takes_the_loss_of_each_element_unless_that_is_asked_for():
    x, target, of_mean, of_each = torch.empty(8, 16), torch.empty(8, 16), 1, 0
    gpu, nbytes = catalog.hardware("a100-80"), 8 * 16 * 4
    for loss in (aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default):
        assert INSIDE[loss](gpu, x, target) == INSIDE[loss](gpu, x, target, of_mean) == (nbytes,)
        assert INSIDE[loss](gpu, x, target, of_each) == ()
    loss = INSIDE[aten.binary_cross_entropy_with_logits.default]
    assert loss(gpu, x, target) == (nbytes, nbytes) and loss(gpu, x, target, None, None, of_each) == (nbytes,)


def test_sums_of_a_bias_and_of_an_embedding_leave_their_parts():
    gpu = catalog.hardware("a100-80")
    x, wide, ids = torch.empty(2048, 512), torch.empty(8192, 512, dtype=BF16), torch.zeros(8, 1024, dtype=torch.int64)
    assert sum(INSIDE[aten.sum.dim_IntList](gpu, x, [0])) == 8_388_624 and not INSIDE[aten.sum.dim_IntList](gpu, x, [1])
    assert sum(INSIDE[aten.embedding_dense_backward.default](gpu, wide, ids, 8192)) == 18_854_312
    assert not INSIDE[aten.embedding_dense_backward.default](gpu, wide, ids[:2], 8192)


def test_a_processor_with_fewer_threads_leaves_fewer_parts():
    def parts(*capability):
        return sum(INSIDE[aten.sum.dim_IntList](Processors(capability, 132), torch.empty(1 << 17, 512), [0]))

    assert parts(8, 0) == parts(9, 0) > parts(8, 6) == parts(8, 9) == parts(12, 0) == parts(12, 1) > parts(7, 5)


def test_dropout_norms_and_casts_are_composed_as_on_cuda():
    def program():
        x, = tensors((8, 16))
        F.dropout(x, 0.1)
        F.rms_norm(x, (16,))
        with torch.autocast("cpu", BF16):
            (x @ x.T) ** 2

    assert made(program) == [
        ("empty", 512), ("native_dropout", 512), ("native_dropout", 128), ("_fused_rms_norm", 512),
        ("_fused_rms_norm", 32), ("_to_copy", 256), ("_to_copy", 256), ("mm", 128), ("_to_copy", 256), ("pow", 256)]


def test_what_a_dry_run_changed_is_as_before_it():
    def operations():
        with memory.track() as t, torch.autocast("cpu", BF16):
            F.dropout(torch.ones(4, 4), 0.5) ** 2, F.rms_norm(torch.ones(4, 4, requires_grad=True), (4,))
        return [op.name for op in t.ops]

    before = operations()
    memory.dry_run(lambda: F.dropout(torch.ones(4), 0.1), gpu=kernels_of("a100-80"))
    assert operations() == before and "bernoulli_" in before and "_to_copy" not in before


def test_tensors_that_autograd_does_not_see_are_composed_so_too():
    def program():
        with torch.inference_mode():
            F.scaled_dot_product_attention(*[torch.ones(1, 2, 8, 16, dtype=BF16)] * 3)

    (note,) = memory.dry_run(program, gpu=kernels_of("a100-80")).notes
    assert note == "attention: the flash kernel, as PyTorch takes it on a100-80"


def test_the_kernel_that_the_program_leaves_is_taken():
    def program():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            F.scaled_dot_product_attention(*tensors(*[(1, 2, 8, 16)] * 3, dtype=BF16))

    (note, *_) = memory.dry_run(program, gpu=kernels_of("a100-80")).notes
    assert "the math kernel" in note


def test_one_at_a_time():
    def within():
        with pytest.raises(RuntimeError, match="a dry run for a GPU is under way in this process"):
            memory.dry_run(lambda: None, gpu=kernels_of("a100-80"))

    memory.dry_run(within, gpu=kernels_of("t4"))
    memory.dry_run(lambda: None, gpu=kernels_of("a100-80"))


@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.Adam, torch.optim.RMSprop])
def test_optimizers_take_foreach_kernels_by_default_and_only_there(make):
    def program():
        p = torch.nn.Parameter(torch.empty(64, 64))
        p.grad = torch.empty_like(p)
        optimizer = make([p])
        optimizer.step()

    named = {gpu: {op.name for op in memory.dry_run(program, gpu=gpu).ops} for gpu in (kernels_of("t4"), None)}
    assert [any(name.startswith("_foreach") for name in names) for names in named.values()] == [True, False]


def test_scores_of_16_bits_are_not_copied_for_their_softmax():
    assert made(lambda: F.softmax(torch.empty(4, 8, dtype=HALF), -1, dtype=FP32)) == [("empty", 64), ("_softmax", 128)]
    assert ("_to_copy", 128) in made(lambda: F.softmax(torch.empty(4, 8, dtype=BF16), -1, dtype=FP32))


def test_a_second_backward_is_read():
    def program():
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
        x = torch.ones(2, 8, requires_grad=True)
        gradient, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.pow(2).sum().backward()

    assert memory.dry_run(program).peak.total > 0 < memory.dry_run(program, gpu=kernels_of("t4")).peak.total


def test_a_gpu_whose_kernels_are_not_known_is_refused():
    with pytest.raises(ValueError, match="gpu='mi300x': PyTorch's kernels on it are not known; give a GPU of NVIDIA's"):
        kernels_of("mi300x")
    with pytest.raises(TypeError, match="gpu='a100-80': expected a GPU's kernels, refimpl.estimate.kernels_of"):
        memory.dry_run(lambda: None, gpu="a100-80")


def test_a_library_that_is_imported_inside_is_told_that_no_tensor_is_fake(tmp_path, monkeypatch):
    """transformers masks otherwise under fake tensors, whether it is imported before the dry run or in it."""
    from refimpl.memory.fakes import pytorch

    (tmp_path / "a_library.py").write_text("def is_fake_tensor(x):\n    return True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(pytorch, "_ASKING", (("a_library", "is_fake_tensor"),))

    def program():
        import a_library

        return a_library.is_fake_tensor(torch.ones(3))

    assert memory.dry_run(program).result is False
    import a_library

    assert a_library.is_fake_tensor(None)
