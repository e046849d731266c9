"""The tables are those of torch.autocast: the same operations, and for each the same dtype of the result."""

import pytest
import torch
from packaging.version import Version
from torch.nn import functional as F

from refimpl.mixed_precision import autocast
from refimpl.mixed_precision.internals import casting_kernels as kernels
from refimpl.mixed_precision.internals import lists

# Known to one side only: what a version of PyTorch took in or dropped, and cuDNN's LSTM, whose flat weights are cast
# as one buffer (only there where PyTorch was built with CUDA).
GONE = {"_cudnn_rnn", "index_copy.dimname", "prod.dim_Dimname", "cumprod.dimname", "cumsum.dimname",
        "log_softmax.Dimname", "norm.names_ScalarOpt_dim", "softmax.Dimname", "sum.dim_DimnameList"}
SINCE_2_14, UNTIL_2_14 = {"linalg_matrix_sqrth"}, {"cholesky", "qr"}
NOT_HERE = UNTIL_2_14 if Version(torch.__version__) >= Version("2.14") else SINCE_2_14


@pytest.mark.parametrize(("device", "key"), [("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")])
def test_the_tables_name_what_torch_s_do(device, key):
    names = {name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")
             and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)}
    assert set(lists.POLICIES[device]) - names <= NOT_HERE | {"rms_norm"}  # in CUDA's since 2.12
    assert names - set(lists.POLICIES[device]) <= GONE
    assert len(names) > 100


@pytest.mark.parametrize("table", [lists.CPU, lists.CUDA])
def test_every_line_has_a_reason_and_operations_that_exist(table):
    for policy, reason, names in table:
        assert policy in kernels.POLICIES and len(reason.split()) >= 5
        assert {name for name in names.split() if kernels.operation(name) is None} <= NOT_HERE


def test_an_operation_in_two_lines_is_an_error():
    with pytest.raises(AssertionError, match="mm stands in the table twice"):
        lists.policies(((lists.LOW, "", "mm"), (lists.FP32, "", "mm")))


def square(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def positive(n):
    return square(n, n) @ square(n, n).T + n * torch.eye(n)


x, image, volume = square(4, 4), square(1, 2, 6, 6), square(1, 2, 6, 6, 6)
labels, signs = torch.tensor([0, 1, 2, 3]), torch.tensor([1.0, -1, 1, -1])
CASES = {  # an operation of each line of the CPU's table: a function of a cast
    "bmm": lambda c: torch.bmm(c(square(2, 3, 4)), c(square(2, 4, 3))),
    "baddbmm": lambda c: torch.baddbmm(c(square(2, 3, 3)), c(square(2, 3, 4)), c(square(2, 4, 3))),
    "addbmm": lambda c: torch.addbmm(c(square(3, 3)), c(square(2, 3, 4)), c(square(2, 4, 3))),
    "linalg_vecdot": lambda c: torch.linalg.vecdot(c(x), c(x)),
    "conv_tbc": lambda c: torch.conv_tbc(c(square(3, 2, 4)), c(square(3, 4, 5)), c(square(5))),
    "conv_transpose2d": lambda c: F.conv_transpose2d(c(image), c(square(2, 3, 3, 3))),
    "conv3d": lambda c: F.conv3d(c(volume), c(square(3, 2, 3, 3, 3)), padding="same"),
    "scaled_dot_product_attention": lambda c: F.scaled_dot_product_attention(*[c(square(1, 2, 4, 8))] * 3),
    "prelu": lambda c: F.prelu(c(x), c(square(1))),
    "cross_entropy": lambda c: F.cross_entropy(c(x), labels),
    "nll_loss": lambda c: F.nll_loss(c(x), labels),
    "binary_cross_entropy": lambda c: F.binary_cross_entropy(c(x.sigmoid()), c(x.sigmoid())),
    "with logits": lambda c: F.binary_cross_entropy_with_logits(c(x), c(x)),
    "kl_div": lambda c: F.kl_div(c(x), c(x.sigmoid()), reduction="batchmean"),
    "mse": lambda c: F.mse_loss(c(x), c(x)), "l1": lambda c: F.l1_loss(c(x), c(x)),
    "huber": lambda c: F.huber_loss(c(x), c(x)), "smooth": lambda c: F.smooth_l1_loss(c(x), c(x)),
    "hinge": lambda c: F.hinge_embedding_loss(c(x), signs), "soft margin": lambda c: F.soft_margin_loss(c(x), signs),
    "cosine": lambda c: F.cosine_embedding_loss(c(x), c(x), signs),
    "margin": lambda c: F.margin_ranking_loss(c(x[0]), c(x[1]), signs),
    "multi margin": lambda c: F.multi_margin_loss(c(x), labels),
    "multilabel": lambda c: F.multilabel_margin_loss(c(x), labels.expand(4, 4)),
    "triplet": lambda c: F.triplet_margin_loss(c(x), c(x), c(x)), "poisson": lambda c: F.poisson_nll_loss(c(x), c(x)),
    "ctc": lambda c: F.ctc_loss(c(square(5, 1, 4)).log_softmax(-1), torch.tensor([[1, 2]]), (5,), (2,)),
    "prod": lambda c: c(x).prod(), "prod over a dim": lambda c: c(x).prod(0), "trace": lambda c: c(x).trace(),
    "cdist": lambda c: torch.cdist(c(x), c(x)), "avg_pool3d": lambda c: F.avg_pool3d(c(volume), 2),
    "max_pool3d": lambda c: F.max_pool3d(c(volume), 2), "reflection": lambda c: F.pad(c(image), [1] * 4, "reflect"),
    "replication": lambda c: F.pad(c(image), [1] * 4, "replicate"),
    "grid_sampler": lambda c: F.grid_sample(c(image), c(square(1, 2, 2, 2)), align_corners=False),
    "quantile": lambda c: c(x).quantile(0.5), "fft": lambda c: torch.fft.fft(c(x)),
    "stft": lambda c: torch.stft(c(square(16)), 4, window=torch.ones(4), return_complex=True),
    "polar": lambda c: torch.polar(c(x), c(x)), "inverse": lambda c: torch.linalg.inv(c(positive(3))),
    "cholesky": lambda c: torch.linalg.cholesky(c(positive(3))), "svd": lambda c: torch.linalg.svd(c(x)),
    "solve": lambda c: torch.linalg.solve(c(positive(3)), c(square(3, 1))), "eigh": lambda c: torch.linalg.eigh(c(x)),
    **({"sqrth": lambda c: torch.linalg.matrix_sqrth(c(positive(3)))} if not SINCE_2_14 & NOT_HERE else {}),
    "fake_quantize": lambda c: torch.fake_quantize_per_tensor_affine(c(x), 0.1, 0, 0, 255),
    "cat": lambda c: torch.cat([c(x), x]), "stack": lambda c: torch.stack([x, c(x)]),
    "index_copy": lambda c: c(x).index_copy(0, labels[:2], x[:2]),
    "in no table": lambda c: (c(x).softmax(-1), c(x).sum(), c(x).exp(), c(x) + x, F.gelu(c(x))),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_results_have_torch_s_dtypes_and_values(case, dtype):
    for cast in (lambda tensor: tensor, lambda tensor: tensor.to(dtype), lambda tensor: tensor.double()):
        outcomes = []
        for region in (torch.autocast("cpu", dtype), autocast(dtype)):
            try:
                with region:
                    result = CASES[case](cast)
            except (RuntimeError, ValueError) as error:
                outcomes.append(type(error))
            else:
                result = result if isinstance(result, tuple) else (result,)
                outcomes.append([(tensor.dtype, tensor.tolist()) for tensor in result])
        assert outcomes[0] == outcomes[1]
