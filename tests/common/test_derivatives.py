"""Derivatives and transforms that a backward written by hand lacks: refused by name, or as the reference's in fp64."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

from refimpl.attention import flash_attention, memory_efficient_attention, reference_attention
from refimpl.attention.flash import kernels_run_on
from refimpl.attention.memory_efficient import KNOWS_TRANSFORMS
from refimpl.attention.tiled import tiled_attention
from refimpl.cross_entropy import chunked_linear_cross_entropy
from refimpl.mlp import MemoryEfficientMLP

TARGETS = torch.tensor([3, 0, -100, 6, 2, 2])


LAYER = MemoryEfficientMLP(4, 8, bias=False, dtype=torch.float64)


def mlp(x, up, down):
    return functional_call(LAYER, {"up_proj.weight": up, "down_proj.weight": down}, x)


def inputs(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


QKV = [(1, 2, 5, 4)] * 3
FUNCTIONS = {  # name: (ours, plain, shapes, what to use)
    "tiled_attention": (lambda *x: tiled_attention(*x, query_tile=2, key_tile=2), reference_attention, QKV,
                        "reference_attention"),
    "flash_attention": (flash_attention, reference_attention, QKV, "reference_attention"),
    "memory_efficient_attention": (lambda *x: memory_efficient_attention(*x, query_chunk=2, key_chunk=2),
                                   reference_attention, QKV, "reference_attention"),
    "chunked cross-entropy": (lambda h, w: chunked_linear_cross_entropy(h, w, TARGETS, chunk_size=2),
                              lambda h, w: F.cross_entropy(h @ w.T, TARGETS), [(6, 4), (7, 4)],
                              "logits and torch.nn.functional.cross_entropy"),
    "MemoryEfficientMLP": (mlp, lambda x, up, down: F.gelu(x @ up.T) @ down.T, [(6, 4), (8, 4), (4, 8)],
                           "plain linear layers")}


def loss(f):
    return lambda *x: f(*x).square().sum()


def twice(f, *x):
    x = [each.clone().requires_grad_() for each in x]
    first = torch.autograd.grad(loss(f)(*x), x, create_graph=True)
    return torch.autograd.grad(sum(each.square().sum() for each in first), x)


def forward_mode(f, *x):
    with forward_ad.dual_level():
        out = f(*(forward_ad.make_dual(each, torch.ones_like(each)) for each in x))
        tangent = forward_ad.unpack_dual(out).tangent
        return out if tangent is None else tangent


def batched(f, *x):
    x = [each.clone().requires_grad_() for each in x]
    out = f(*x)
    return torch.autograd.grad(out, x, torch.stack([out.detach(), 2 * out.detach()]), is_grads_batched=True)


functional = torch.autograd.functional
TRANSFORMS = {
    "grad": lambda f, *x: grad(loss(f), tuple(range(len(x))))(*x),
    "vjp": lambda f, *x: vjp(f, *x)[1](torch.ones_like(f(*x))),
    "jvp": lambda f, *x: jvp(f, tuple(x), tuple(map(torch.ones_like, x))),
    "jacrev": lambda f, *x: jacrev(f)(*x), "jacfwd": lambda f, *x: jacfwd(f)(*x),
    "hessian": lambda f, *x: hessian(loss(f))(*x),
    "grad of grad": lambda f, *x: grad(lambda *y: grad(loss(f))(*y).square().sum())(*x),
    "vmap": lambda f, first, *x: vmap(lambda each: f(each, *x))(torch.stack([first, 2 * first])),
    "vmap of grad": lambda f, first, *x: vmap(grad(lambda each: loss(f)(each, *x)))(torch.stack([first, 2 * first])),
    "create_graph": twice, "forward mode": forward_mode, "is_grads_batched": batched,
    "jacobian": lambda f, *x: functional.jacobian(f, tuple(x)),
    "vectorized jacobian": lambda f, *x: functional.jacobian(f, tuple(x), vectorize=True),
    "autograd's hessian": lambda f, *x: functional.hessian(loss(f), tuple(x))}
BY_VERSION = set() if KNOWS_TRANSFORMS else {"jvp", "jacfwd", "vmap", "forward mode"}
RIGHT = {name: {"jacobian"} for name in FUNCTIONS} | {
    "memory_efficient_attention": TRANSFORMS.keys() - {"grad", "vjp", "jacrev", "hessian", "grad of grad",
                                                       "vmap of grad"} - BY_VERSION}
RIGHT_FOR_KERNELS = {"vmap", "is_grads_batched", "jacobian", "vectorized jacobian"}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_transform_is_right_or_refused_by_name(name, transform):
    (ours, plain, shapes, instead), how = FUNCTIONS[name], TRANSFORMS[transform]
    x = inputs(*shapes)
    if transform in RIGHT[name]:
        found, expected = tree_leaves(how(ours, *x)), tree_leaves(how(plain, *x))
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-10) for a, b in zip(found, expected, strict=True))
        return
    of = "tiled_attention" if name == "flash_attention" else name  # that takes fp64
    with pytest.raises(RuntimeError, match=f"{of}.* (use|compute) .*{instead}"):
        how(ours, *x)
    out = ours(*x)  # the refusal left everything as it was
    assert torch.allclose(out, plain(*x))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.skipif(not kernels_run_on(torch.device("cpu")), reason="needs Triton's interpreter")
def test_so_is_that_of_the_kernels(transform):
    x = [each.float() for each in inputs(*QKV)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # vmap calls an operator once for each of its batch
        try:
            found = TRANSFORMS[transform](flash_attention, *x)
        except RuntimeError as error:
            assert transform not in RIGHT_FOR_KERNELS and str(error).startswith("flash_attention")
            assert "use reference_attention" in str(error)
            return
    expected = tree_leaves(TRANSFORMS[transform](reference_attention, *x))
    assert transform in RIGHT_FOR_KERNELS
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(tree_leaves(found), expected, strict=True))
