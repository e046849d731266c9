"""Which layers each stage has, so that no stage has much more than others; and how a stage is built alone.

    with torch.device("meta"):
        model = GPT(config)                      # shapes, no bytes
    stages = partition(model, 4)                 # four modules, on the meta device
    build(stages[comm.rank], "cpu", model.initialize)

So a rank has its own stage's bytes and no others.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from .stages import layers_of, stage_of
from .stages_proof import prove_stages

STYLES = ("parameters", "uniform", "cost")


def partition(model: torch.nn.Module, stages: Any, style: str = "parameters", *,
              example: Any = None) -> list[torch.nn.Module]:
    """Divide a model into stages, each a run of its layers. Returns their modules, in order.

    - `model`: our GPT, an nn.Sequential, or a decoder of Hugging Face, as GPT-2 and Llama; also on the meta device. It
      does not change, and the stages share its parameters. The first stage has what is before the layers (embeddings),
      the last one what is after them (norm and head).
    - `style`: "uniform", as many layers in each, one more in the first ones; "parameters", so that the largest stage
      has as few parameters as can be; or "cost", as few floating-point operations of a forward.
    - `example`: for "cost", the inputs of a micro-batch: a tensor, or a tuple of them.

    ValueError for another style, for no example, and for more stages than layers; TypeError for a model whose layers
    are not known. A decoder of transformers is proven first, see `stages_proof`: CutDiffers if stages of its class
    would not compute what it does whole.
    """
    ends = cuts(model, stages, style, example=example)
    return [stage_of(model, first, end) for first, end in zip([0, *ends[:-1]], ends, strict=True)]


def cuts(model, stages, style="parameters", *, example=None):
    """Return before which layer each stage ends. Arguments and errors are `partition`'s."""
    layers = layers_of(model)
    if style not in STYLES:
        raise ValueError(f"style={style!r}: expected one of {', '.join(STYLES)}")
    if not isinstance(stages, int) or isinstance(stages, bool) or not 1 <= stages <= layers:
        raise ValueError(f"stages={stages!r} of a model of {layers} layers: expected 1 to {layers}, one layer or more "
                         "in each")
    if stages > 1:  # one stage is the model itself
        prove_stages(model)
    if style == "uniform":
        return [layers // stages * (s + 1) + min(s + 1, layers % stages) for s in range(stages)]
    singles = [stage_of(model, i, i + 1) for i in range(layers)]  # the first with the embedding, the last with the head
    costs = _operations(singles, example) if style == "cost" else [
        sum(p.numel() for p in single.parameters()) for single in singles]
    return balanced(costs, stages)


def balanced(costs, parts):
    """Return where each of so many parts of a list ends, such that the largest sum of a part is as small as can be.

    best[i] of n parts is min over j < i of max(best[j] of n − 1 parts, costs[j] + … + costs[i−1]).
    """
    n = len(costs)
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best, cuts = list(sums), []
    for part in range(2, parts + 1):
        found = {i: min((max(best[j], sums[i] - sums[j]), j) for j in range(part - 1, i)) for i in range(part, n + 1)}
        cuts.append({i: j for i, (_, j) in found.items()})
        best = [found[i][0] if i in found else float("inf") for i in range(n + 1)]
    ends = [n]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    return ends[::-1]


def _operations(singles, example):
    """Count the floating-point operations of each layer's forward, on tensors without data."""
    if example is None:
        raise ValueError("style='cost' without example=: expected the inputs of a micro-batch, whose shapes say what a "
                         "layer costs")
    found, x = [], (example,) if isinstance(example, torch.Tensor) else tuple(example)
    meta = next(singles[0].parameters()).is_meta
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:  # operations are counted, not computed
        x = tuple(each.to("meta") if meta else mode.from_tensor(each) for each in x)
        for single in singles:
            with FlopCounterMode(display=False) as counter:
                out = single(*x)
            x = tuple(out) if isinstance(out, (tuple, list)) else (out,)
            found.append(counter.get_total_flops())
    return found
