"""Decoders that the installed transformers can build, on the meta device, as their configs say by default; and what
each can be cut into: `python tests/kits/net_kit.py` writes docs/cut_models.md."""

import re
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from refimpl.comm import FakeCommunicator
from refimpl.context import SequenceParallelAttention, context_parallel
from refimpl.pipeline.stages_proof import prove_stages
from refimpl.tensor.sequence_parallelism import _SplitTokens
from refimpl.tensor.split_plan import region_of
from refimpl.tensor.tensor import proven_sums

LLAMA = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
         "intermediate_size": 128}
# What a config lacks by default, and its class needs.
NEEDED = {"hunyuan_v1_dense": {"head_dim": 128}, "hunyuan_v1_moe": {"head_dim": 128}, "ministral": {"head_dim": 128},
          "deepseek_v2": {"num_experts_per_tok": 6}, "nemotron": {"num_key_value_heads": 8},
          "dots1": {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2}}


class Quarters(LlamaForCausalLM):
    """Has its heads in four parts, as CodeGen was trained."""

    def __init__(self, config):
        super().__init__(config)
        if config.num_attention_heads % 4:
            raise ValueError(f"{config.num_attention_heads} heads: expected a multiple of 4")


def on_meta(kind, **settings):
    """Return the causal language model of this type, as large as its config says."""
    config = AutoConfig.for_model(kind, **{**NEEDED.get(kind, {}), **settings})
    with torch.device("meta"):
        return getattr(transformers, CLASSES[kind])(config)


# --- what each kind of decoder can be cut into, as a page ------------------------------------------------------------

PAGE = Path(__file__).parent.parent.parent / "docs" / "cut_models.md"
HEAD = """# Which models can be cut

Every causal language model of transformers {version} that can be built by its type, cut by default in each way, as the
test `tests/equivalence/test_net.py` finds it each night. **yes**: a toy of its class computes cut what it computes
whole, in fp64: its logits, its loss and every gradient. **no**: it is refused, by name, before anything is cut.

- stages: `pipeline` and `together`, in as many stages as there are layers, and in three.
- tensor: `tensor_parallel` by the model's own plan, on three ranks; "no plan": it has none, give one. `+`: gradients of
  modules that the plan leaves out are summed.
- tokens: `sequence_parallel` by that plan. context: `context_parallel` by ring, gathered keys, Ulysses.

Counts: {counts}.

| kind | stages | tensor | tokens | ring | gathered | ulysses |
|---|---|---|---|---|---|---|
"""
COLUMNS = ("stages", "tensor", "tokens", "ring", "gathered", "ulysses")


def row_of(kind):
    """Return what each way of cutting says of a kind: yes, no, no plan; None if its config has no defaults to build."""
    try:
        model = on_meta(kind)
    except Exception:  # whatever a class says of its own config's defaults
        return None
    comm = FakeCommunicator(0, 3)
    return [_said(prove_stages, model), _said(lambda model: "+" * len(proven_sums(model, comm)), model),
            _said(lambda model: "+" * len(proven_sums(model, comm, None, False, _SplitTokens(*region_of(model)))),
                  model),
            *(_said(lambda model, method=method: context_parallel(model, SequenceParallelAttention(comm, method)),
                    on_meta(kind)) for method in ("ring", "gathered", "ulysses"))]


def _said(cut, model):
    try:
        found = cut(model)
    except (ValueError, TypeError) as error:  # a refusal; anything else is a fault
        return "no plan" if "no plan is known" in str(error) else "no"
    return "yes" + (" +" if isinstance(found, str) and found else "")


def rows_of_page():
    """Return {kind: [what the page says]}."""
    lines = re.findall(r"^\| (\S+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    return {kind: rest.split(" | ") for kind, rest in lines if kind != "kind"}


def write_page():
    rows = {kind: row for kind in CLASSES if (row := row_of(kind)) is not None}
    counts = ", ".join(f"{name} {sum(row[i].startswith('yes') for row in rows.values())}"
                       for i, name in enumerate(COLUMNS)) + f" of {len(rows)}"
    lines = [f"| {kind} | {' | '.join(row)} |" for kind, row in rows.items()]
    PAGE.write_text(HEAD.format(version=transformers.__version__, counts=counts) + "\n".join(lines) + "\n")


if __name__ == "__main__":
    write_page()
