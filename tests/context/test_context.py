"""Context parallelism of whole models, ours and others': numbers, activations and traffic, with engines and splits."""

import contextlib
import copy
import functools

import pytest
import torch
from families import LLAMA
from rank_pool import pooled
from tensor_kit import GPTS, block_of, bodies, logits_of, tokens_of, whole
from torch.nn import functional as F

from refimpl import memory
from refimpl.accumulation import accumulate
from refimpl.attention import tiled_attention
from refimpl.checkpointing import recompute
from refimpl.context import SequenceParallelAttention, context_parallel
from refimpl.context.closed_forms import attention_traffic, context_activation_bytes
from refimpl.mesh import Mesh
from refimpl.model import GPT, GPTConfig
from refimpl.tensor import tensor_parallel
from refimpl.zero import DataParallel, Zero1, Zero2, Zero3

ROWS, T = 2, 16
METHODS = {"ring, plain": ("ring", "plain"), "ring, zig-zag": ("ring", "zig-zag"), "gathered": ("gathered", "zig-zag"),
           "ulysses": ("ulysses", None)}
CHECK = 2 * 8  # bytes of a rank's numbers of rows and tokens


def split(comm, method, **options):
    kind, order = METHODS[method]
    return SequenceParallelAttention(comm, kind, order=order, **options)


def gradients(model, tokens, targets):
    """Return {name: gradient} of the sum of all losses, and the logits."""
    logits = logits_of(model, tokens)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    return {name: p.grad for name, p in model.named_parameters()}, logits.detach()


def distances(comm, name, method, dtype):
    """Return the largest differences of logits and summed gradients from the model on one device."""
    model, attention = whole(name, dtype), split(comm, method)
    tokens = tokens_of(model, ROWS, T)
    targets = tokens.roll(-1, 1)
    expected, logits = gradients(copy.deepcopy(model), tokens, targets)
    context_parallel(model, attention)
    found, mine = gradients(model, attention.shard(tokens), attention.shard(targets))
    far = [(attention.gather(mine) - logits).abs().max() / logits.abs().max()]
    far += [(comm.all_reduce(g) - expected[key]).abs().max() / expected[key].abs().max() for key, g in found.items()]
    return max(far).item()


@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [*GPTS, "llama", "tied llama", "qwen2", "mistral", "gpt2"])
def test_logits_and_gradients_of_one_device(name, method, N):
    assert max(pooled(distances, N, name, method, torch.float64)) <= 1e-12
    assert max(pooled(distances, N, name, method, torch.float32)) <= 2e-5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["grouped gpt", "llama"])
def test_on_four_ranks(name, method):
    assert max(pooled(distances, 4, name, method, torch.float64)) <= 1e-12


def restarted(comm, name):
    """The mutant whose positions restart on each rank."""
    model, attention = whole(name), split(comm, "ring, plain")
    tokens = tokens_of(model, ROWS, T)
    expected = logits_of(model, tokens).detach()
    context_parallel(model, attention)
    attention.positions = lambda length, device=None: torch.arange(length)  # from here on: it is proven before
    return (attention.gather(logits_of(model, attention.shard(tokens))) - expected).abs().max().item()


@pytest.mark.parametrize("name", ["gpt", "grouped gpt", "llama"])
def test_positions_that_restart_on_each_rank_are_seen(name):
    assert pooled(restarted, 1, name)[0] <= 1e-12
    assert min(pooled(restarted, 2, name)) > 1e-4  # and 1e-12 with the right ones


# --- bytes and traffic -----------------------------------------------------------------------------------------------

SIZES = {"vocab_size": 61, "context_length": 64, "layers": 2, "hidden": 32, "heads": 4}
CONFIGS = {"gpt": GPTConfig(**SIZES), "llama": GPTConfig(**SIZES, **LLAMA, mlp_hidden=54)}


def read(comm, name, method, dtype, kept=False):
    """Return (activations after a forward, what it sent, what backward sent)."""
    attention = split(comm, method, **({"attention": tiled_attention} if METHODS[method][0] != "ring" else {}))
    model = context_parallel(GPT(CONFIGS[name], dtype=dtype), attention)
    if kept:
        for block in model.blocks:
            block.attention.set_attention(functools.partial(everything_kept, comm))
    tokens = attention.shard(torch.zeros(ROWS, 64, dtype=torch.int64))
    start = comm.traffic
    with memory.track(model, tokens) as t:
        loss = model(tokens, tokens)
        kept = t.now["activations"]
        assert t.now["communication"] == 0, "what was received is gone"
        middle = comm.traffic
        loss.backward()
    return kept, dict(middle - start), dict(comm.traffic - middle)


def everything_kept(comm, q, k, v, *, causal=False):
    """The mutant that gathers all keys and values, and keeps them."""
    k, v = (torch.cat(comm.all_gather(x.contiguous()).chunk(comm.world_size), 2) + 0 * x.sum() for x in (k, v))
    return tiled_attention(q, k, v)


@pytest.mark.parametrize(("name", "method", "N", "dtype"), [
    (name, method, N, dtype) for name in CONFIGS for method in METHODS for N in (1, 2, 4)
    for dtype in (torch.float32, torch.bfloat16) if N > 1 or method != "ulysses"])
def test_activations_and_traffic_of_the_closed_forms(name, method, N, dtype):
    c, kind = CONFIGS[name], METHODS[method][0]
    once = attention_traffic(kind, ROWS, 64 // N, c.heads, c.kv_heads, c.head_dim, N, dtype)
    forward, backward = ({key: c.layers * n for key, n in dict(each).items()} for each in once)
    if N > 1:
        forward["all_gather"] = forward.get("all_gather", 0) + (N - 1) * CHECK
    for read_here in pooled(read, N, name, method, dtype):
        assert read_here == (context_activation_bytes(c, ROWS, 64 // N, N, kind, dtype), forward, backward)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CONFIGS)
def test_activations_fall_as_one_over_n(name, method):
    few = 2 if method == "ulysses" else 1  # of one rank there is nothing to exchange
    more = pooled(read, few, name, method, torch.float32)[0][0]
    for kept, *_ in pooled(read, 4, name, method, torch.float32):
        repeated = 2 * 4 * ROWS * 16 * 2 * 8 * 2 if (name, method) == ("llama", "ulysses") else 0  # key heads, twice
        assert 4 * (kept - 4 - repeated) == few * (more - 4)  # 4: what the mean of the loss was divided by


@pytest.mark.parametrize("name", CONFIGS)
def test_keys_that_are_gathered_and_kept_are_seen(name):
    c = CONFIGS[name]
    for kept, *_ in pooled(read, 4, name, "gathered", torch.float32, True):
        assert kept > context_activation_bytes(c, ROWS, 16, 4, "gathered") + c.layers * 3 * 16 * ROWS * 2 * 4


# --- with engines, tensor parallelism and recomputation --------------------------------------------------------------

STEPS, ADAMW = 3, functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)


def batch(model, step):
    tokens = tokens_of(model, 4, T, step)
    targets = tokens.roll(-1, 1)
    targets[0, 3:] = targets[3, 7:] = -100  # ranks have other numbers of targets
    return tokens, targets


@functools.cache
def alone(name):
    model, losses = whole(name), []
    optimizer = ADAMW(model.parameters())
    for step in range(STEPS):
        losses.append(accumulate(model, *batch(model, step), micro_batch=4).item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {key: p.detach() for key, p in model.named_parameters()}


def trained(comm, sizes, method, stage, recomputed, name="gpt", parallel=context_parallel):
    """Return (losses, largest distance of a parameter from one process) of cp × dp or cp × tp."""
    mesh, model, losses = Mesh(**sizes).connect(comm), whole(name), []
    attention, data = split(mesh.get_parallel_group("cp"), method), mesh.get_parallel_group("dp", "cp")
    if mesh.tp > 1:
        tensor_parallel(model, mesh.get_parallel_group("tp"))
    parallel(model, attention)
    with recompute(bodies(model)) if recomputed else contextlib.nullcontext():
        engine = stage(model, data, ADAMW, world=comm)
        for step in range(STEPS):
            mine = [attention.shard(x.chunk(mesh.dp)[mesh.here["dp"]]) for x in batch(model, step)]
            losses.append(accumulate(engine, *mine, micro_batch=1).item())
            engine.clip_grad_norm_(0.3)
            engine.step()
    far, expected = [], alone(name)[1]
    with engine.gathered() if stage is Zero3 else contextlib.nullcontext():
        for key, p in model.named_parameters():
            value = block_of(expected[p.shard_spec.name], p.shard_spec) if mesh.tp > 1 else expected[key]
            far.append((p - value).abs().max().item())
    return losses, max(far)


STAGES = (DataParallel, Zero1, Zero2, Zero3)


@pytest.mark.parametrize(("method", "stage", "recomputed"), [
    *((method, Zero3, True) for method in METHODS),
    *(("ring, zig-zag", stage, recomputed) for stage in STAGES for recomputed in (False, True))])
def test_steps_on_dp_by_cp_are_those_of_one_process(method, stage, recomputed):
    for losses, far in pooled(trained, 4, {"dp": 2, "cp": 2}, method, stage, recomputed):
        assert losses == pytest.approx(alone("gpt")[0], rel=1e-6) and far <= 1e-9


@pytest.mark.parametrize(("method", "stage"), [*((each, Zero3) for each in METHODS), ("ring, zig-zag", DataParallel)])
def test_steps_on_tp_by_cp_are_those_of_one_process(method, stage):
    for losses, far in pooled(trained, 4, {"tp": 2, "cp": 2}, method, stage, True):
        assert losses == pytest.approx(alone("gpt")[0], rel=1e-6) and far <= 1e-9


def test_engines_on_four_ranks_of_one_sequence():
    for losses, far in pooled(trained, 4, {"cp": 4}, "ring, zig-zag", Zero3, True, "grouped gpt"):
        assert losses == pytest.approx(alone("grouped gpt")[0], rel=1e-6) and far <= 1e-9


def unmarked(model, attention):
    """The mutant that does not say so: a rank does not run a micro-batch in which it has no target."""
    context_parallel(model, attention)._sequence_is_split = False


def test_a_rank_without_targets_takes_part():
    """Row 0 has targets on rank 0 alone. Without it, keys of row 0 would meet queries of row 1."""
    how = {"cp": 2}, "ring, plain", DataParallel, False, "gpt"
    assert min(far for _, far in pooled(trained, 2, *how, unmarked)) > 1e-6
    for losses, far in pooled(trained, 2, *how):
        assert losses == pytest.approx(alone("gpt")[0], rel=1e-6) and far <= 1e-9
