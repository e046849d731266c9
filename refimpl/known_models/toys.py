"""A toy of a model: the same class and the same kind of layers, in a few thousand numbers of fp64.

    toy = toy_of(model)        a Llama of 126 layers of 16,384 → one of 4 layers of 48, its heads in the same ratio

What a class does with a model that is cut into parts does not depend on sizes. It does on what stays here as it is:
flags, multipliers, which layer is of which kind, windows shorter than a sequence, weights that are shared.

Sizes of the toy, by the config's own names for them:

    heads       H/G of them share a key, as in the model, or 8 if more do; G is 3 or 6, or 1 if it is 1: three ranks can
                share them
    a head      8, or a little more if fewer cannot be divided as the config says; what is named after it, in proportion
    hidden      its ratio to heads × head is the model's; what else is large goes in proportion to it, a multiple of 12
    layers      until each kind of layer has come and two more, 4 at least
    tokens      96 kinds, sequences of 12;  windows and chunks 4;  6 experts
    images      of 4 × 4 patches
"""

import copy
import itertools
import math

import torch

from ..equivalence.comparison import CannotShrink
from ..equivalence.cut_over_ranks import weights_of
from ..equivalence.fp64 import InFP64

SIZES = {"vocab": 96, "positions": 48, "window": 4, "experts": 6, "chosen": 2}
LENGTH, LAYERS, MOST, MOST_NUMBERS = 12, 4, 32, 8_000_000
HEADS = (8, 12, 16, 20, 24, 32)  # sizes of a head, tried in this order
SHORT = ("window", "chunk", "local_attention", "floor")  # in names of lengths that a toy's sequence exceeds
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k", "n_active_experts")
GROUPS = {"n_group": 3, "num_expert_groups": 3, "topk_group": 2, "n_groups": 2, "mamba_n_groups": 2}
NAMES = {"hidden_size": ("d_model",), "num_hidden_layers": ("num_layers", "n_layers", "n_layer"),
         "num_attention_heads": ("num_heads", "n_heads", "n_head", "attention_heads"), "num_key_value_heads": (),
         "vocab_size": ()}
EVERY = ("step", "interval", "period", "pattern", "freq", "every", "dense_replace", "_offset")


def config_of(model):
    """Return a model's config. CannotShrink if it has none of transformers."""
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict") or not hasattr(model, "base_model_prefix"):
        raise CannotShrink(f"{type(model).__name__} has no config of transformers, by which a toy of it could be made")
    return config


def kind_of(model):
    """Return a model's class, and its config when it is shrunk. CannotShrink as `config_of`."""
    config = config_of(model)
    return type(model), config._attn_implementation, repr(sorted(shrunk(config).to_dict().items()))


def toy_of(model, whole_windows=False):
    """Return (a small model of the class and the kind of config of `model`, a model of transformers, in fp64 with
    random values; how many ranks can share its heads: 3, or 4 where the class allows no 3).

    Windows see 4 of a sequence's tokens, or all. CannotShrink for a model that has no config of its own kind, or whose
    class does not take the smaller one.
    """
    config, first, window = config_of(model), None, LENGTH if whole_windows else SIZES["window"]
    for ranks, head in itertools.product((3, 4), HEADS):
        try:
            toy = _built(model, shrunk(config, head, ranks, window))
            with InFP64(), torch.no_grad():
                copy.deepcopy(toy)(**_named(toy, tokens_of(toy)))  # some keep what they saw
            return toy, ranks
        except Exception as error:  # whatever a class says of sizes that do not divide
            first = first or error
    raise CannotShrink(f"no toy of {type(model).__name__} can be built: {type(first).__name__}: "
                       f"{str(first).splitlines()[0] if str(first) else ''}") from first


def tokens_of(toy, rows=2, length=LENGTH):
    """Return tokens (rows, length) for a toy, or as many images for one that takes images."""
    config, generator = toy.config.get_text_config(), torch.Generator().manual_seed(0)
    if toy.main_input_name == "pixel_values":
        return torch.randn(rows, config.num_channels, config.image_size, config.image_size, generator=generator,
                           dtype=torch.float64)
    return torch.randint(3, config.vocab_size, (rows, length), generator=generator)


def _named(model, tokens):
    """Return the arguments of a model's forward."""
    if model.main_input_name == "pixel_values":
        return {"pixel_values": tokens}
    return {"input_ids": tokens, "use_cache": False}


def results_of(model, tokens, labels=None):
    """Return {name: tensor} of a model's output of tokens; "loss" is the model's own, or weighs its output."""
    if model.get_output_embeddings() is not None:
        output = model(**_named(model, tokens), labels=tokens if labels is None else labels)
        return {"logits": output.logits, "loss": output.loss}
    output = model(**_named(model, tokens))[0]
    return {"output": output, "loss": (output * weights_of(output, output.shape[1])).sum()}


def described(toy):
    """Return a toy's size in words."""
    config = toy.config.get_text_config()
    return f"a toy of it, {config.num_hidden_layers} layers of {config.hidden_size}, in fp64"


def shrunk(config, head=HEADS[0], ranks=3, window=SIZES["window"]):
    """Return a small config of the same kind, with heads of size `head`, which so many ranks can share.
    ValueError for sizes that do not divide."""
    small = copy.deepcopy(config)  # the model's own config stays
    for name in getattr(small, "sub_configs", ()):
        if getattr(small, name, None) is not None:
            setattr(small, name, shrunk(getattr(small, name), head, ranks, window))
    sizes = _ToySizes(config, head, ranks, window)
    if sizes.hidden is not None:
        of_layers = vars(small).pop("_heterogeneity_spec", None)  # layers with values of their own, as Gemma 4's heads
        for key, value in sizes.all():
            setattr(small, key, value)
        if of_layers is not None:
            small.per_layer_config = {i: {key: sizes.small(key, value) for key, value in own.items()}
                                      for i, own in of_layers.per_layer_overrides.items() if i < sizes.small_layers}
    return small


class _ToySizes:
    """The sizes of a config, and of its toy's."""

    def __init__(self, config, head, ranks, window):
        self.of, self.head, self.ranks, self.window = vars(config), head, ranks, window
        names = getattr(config, "attribute_map", {})
        self.named = {name: next((key for key in (names.get(name, name), *others) if key in self.of), name)
                      for name, others in NAMES.items()}
        self.hidden, self.layers, self.heads, self.kv, _ = (self.of.get(key) for key in self.named.values())
        if not isinstance(self.hidden, int):
            self.hidden = None
            return
        self.rotary = repr([value for key, value in self.of.items() if "rope" in key])
        stated = next((self.of[key] for key in ("head_dim", "kv_channels", "v_head_dim")
                       if isinstance(self.of.get(key), int)), None)
        self.heads = self.heads if isinstance(self.heads, int) and self.heads > 0 else None
        self.width = stated or (self.hidden // self.heads if self.heads else head)
        self.small_heads, self.small_kv = self._small_heads()
        ratio = self.hidden / (self.heads * self.width) if self.heads else 1
        small = ratio * self.small_heads * head
        self.small_hidden = int(small) if small == int(small) and small % 2 == 0 else 12 * max(1, round(small / 12))
        self.small_layers = self._small_layers()

    def all(self):
        """Yield (key, value) of what is smaller."""
        for key, value in list(self.of.items()):
            if not key.startswith("_") and value is not None and not isinstance(value, (bool, str, float)):
                small = self.small(key, value)
                if small is not value:
                    yield key, small

    def small(self, key, value):
        """Return the value of a key in the toy's config."""
        known = dict(zip(self.named.values(), (self.small_hidden, self.small_layers, self.small_heads, self.small_kv,
                                               SIZES["vocab"]), strict=True))
        if key == "original_max_position_embeddings" and type(value) is int:
            return self._position(value, "longrope" in self.rotary)
        if key in known and isinstance(value, int):
            return known[key] if key != self.named["num_key_value_heads"] or value == self.kv else self._scaled(value)
        if key.endswith("token_id"):
            return _clipped(value)
        if isinstance(value, (list, tuple)) and self._numbers_layers(value):
            return type(value)(each for each in value if each < self.small_layers)
        if isinstance(value, (list, tuple)) and len(value) == self.layers:
            return type(value)(value[:self.small_layers])
        if isinstance(value, dict):
            return self._small_rope(value) if "rope" in key else value
        return self._small_number(key, value) if type(value) is int else value

    def _small_heads(self):
        """Return counts of heads and of heads of keys."""
        if self.heads is None:
            return 2 * self.ranks, 2 * self.ranks
        kv = self.kv if isinstance(self.kv, int) and self.kv > 0 else self.heads
        if kv in (1, self.heads):
            return 2 * self.ranks, 1 if kv == 1 else 2 * self.ranks
        together = self.heads // kv
        return self.ranks * next(n for n in range(min(together, 8), 0, -1) if together % n == 0), self.ranks

    def _small_number(self, key, value):
        words = key.split("_")
        if any(word in key for word in EVERY):
            return value
        if any(word in key for word in SHORT):
            return LENGTH if value and self.window == LENGTH else min(value, self.window)
        if key in EXPERTS:
            return min(value, SIZES["experts"])
        if key in CHOSEN:
            return min(value, SIZES["chosen"])
        if key in GROUPS:
            return min(value, GROUPS[key])
        if "position" in key or key in ("n_ctx", "seq_length", "max_seq_len", "max_sequence_length"):
            return self._position(value, "dynamic" in self.rotary and key == "max_position_embeddings")
        if key == "image_size":
            return 4 * self.of["patch_size"] if type(self.of.get("patch_size")) is int else value
        if "vocab" in words:
            return min(value, SIZES["vocab"])
        if any(word in key for word in ("head_dim", "rotary", "kv_channels", "d_head", "head_size")):
            return max(2, 2 * round(value * self.head / self.width / 2))
        if "heads" in words or key in ("n_head", "num_head"):
            return self._scaled(value)
        if value == self.hidden:
            return self.small_hidden
        if "shared" in words and "layers" in words and self.layers:
            return min(value, 2)  # the last two, which come after each kind
        if value == self.layers and "layers" in words:
            return self.small_layers
        # small numbers are counts, and stay
        return value if value < 64 else 12 * max(1, round(value * self.small_hidden / self.hidden / 12))

    def _scaled(self, heads):
        """Return another count of heads in proportion; as it is if it has none."""
        scaled = heads * self.small_heads / (self.heads or 2 * self.ranks)
        return int(scaled) if scaled == int(scaled) and scaled else heads

    def _position(self, value, bound=False):
        """Return a toy's number of positions. `bound`: rotary embeddings differ from there on, so a toy's sequence goes
        beyond it, and the first parts of the sequence do not."""
        if bound:
            return LENGTH - 2
        most = max(self.of.get("max_position_embeddings") or 0, value)
        return value if value <= SIZES["positions"] else max(2, SIZES["positions"] * value // most)

    def _small_rope(self, rope):
        """Return the parameters of rotary embeddings: the same kind, lists as long as half a head is."""
        found = {}
        for key, value in rope.items():
            if isinstance(value, dict):
                value = self._small_rope(value)
            elif isinstance(value, (list, tuple)):
                short = max(1, math.floor(len(value) * self.head / self.width)) if key.endswith("factor") else None
                value = list(value[:short]) if short else [max(1, round(x * self.head / self.width)) for x in value]
            elif key == "original_max_position_embeddings":
                value = self._position(value, "longrope" in self.rotary)
            found[key] = value
        return found

    def _numbers_layers(self, values):
        """Tell whether a list has numbers of layers, as those that have experts."""
        return len(values) > 1 and all(type(each) is int and 0 <= each < (self.layers or 0) for each in values) and (
            len({*values}) == len(values))

    def _small_layers(self):
        """Return how many layers it takes until each kind has come, and two more."""
        if not isinstance(self.layers, int):
            return self.layers
        need = LAYERS
        for key, value in self.of.items():
            if isinstance(value, (list, tuple)) and self._numbers_layers(value):
                need = max(need, min(value) + 2)
            elif isinstance(value, (list, tuple)) and len(value) == self.layers:
                need = max(need, 2 + max(value.index(each) + 1 for each in value))
            elif type(value) is int and value <= MOST and any(word in key for word in EVERY):
                need = max(need, value + 2)
        return min(self.layers, need)


def _clipped(value):
    if isinstance(value, (list, tuple)):
        return [_clipped(each) for each in value]
    return value if not isinstance(value, int) or value < SIZES["vocab"] else value % 3


def _built(model, config):
    """Return a model of this config, in fp64, that computes; its values are random and none is special."""
    config._attn_implementation = "eager" if model.config._attn_implementation == "eager" else "sdpa"
    config._experts_implementation = "eager"  # others have no fp64
    with torch.device("meta"):
        numbers = sum(p.numel() for p in type(model)(config).parameters())
    if numbers > MOST_NUMBERS:
        raise ValueError(f"{numbers:,} parameters are left: a size of its config goes by a name that is not known")
    with torch.device("cpu"), InFP64():
        toy = type(model)(config).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in toy.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            if p.dim() > 1:
                p.copy_(noise * p.shape[-1] ** -0.5)  # variance is kept from layer to layer
            else:
                p.add_(noise * 0.2)  # gains near 1, biases near 0: neither is special
    return toy
