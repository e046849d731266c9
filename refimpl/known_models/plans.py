"""How the layers of a model of transformers are split over ranks: by the plan of its config; of GPT-2, which has none,
by the names of its layers."""

from ..tensor.split_plan import Column, Row, matches, names_of

NOT_SPLIT = ("replicate", "local_params")  # what else transformers says of modules


def plan_of(model):
    """Return {names of modules: style} for `tensor/split_plan`."""
    config = getattr(model, "config", None)
    if getattr(config, "model_type", "") == "gpt2":
        return _plan_of_gpt2(model, config)
    return _plan_of_hugging_face(model, config) if getattr(config, "base_model_tp_plan", None) else None


def _plan_of_gpt2(model, config):
    base = model.base_model_prefix + "." if hasattr(model, model.base_model_prefix) else ""
    C, H = config.n_embd, config.n_head
    return {f"{base}h.*.attn.c_attn": Column((C, C, C), (H, H, H)), f"{base}h.*.attn.c_proj": Row(H),
            f"{base}h.*.mlp.c_fc": "column", f"{base}h.*.mlp.c_proj": "row", **_ends(model)}


def _plan_of_hugging_face(model, config):
    base = model.base_model_prefix + "." if hasattr(model, model.base_model_prefix) else ""
    plan = {base + name: "gathered" if style == "colwise_gather_output" else style
            for name, style in config.base_model_tp_plan.items() if style not in NOT_SPLIT}
    names = names_of(model)
    return {**{name: style for name, style in plan.items() if matches(name, names)}, **_ends(model)}


def _ends(model):
    """Return the plan of the embedding, and of the head that gives logits, of a model of Hugging Face."""
    names, head = {module: name for name, module in model.named_modules()}, model.get_output_embeddings()
    ends = {names[model.get_input_embeddings()]: "vocabulary"}
    return ends if head is None else {**ends, names[head]: "head"}
