"""The bytes of saved tensors that are compressed or offloaded, for our GPT: from the same terms as the uncompressed.

`memory.activation_terms` says what autograd keeps in sum; here each term is split into its storages, because a code's
bytes are those of one storage: its last group is short for itself.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..common.activation_bytes import activation_terms, block_terms, kept_on, norm_terms
from .codecs import cast_bytes, group_bytes, mask_bytes
from .compress import ROUNDED, check_method
from .compress import SMALLEST as SMALLEST_COMPRESSED
from .offload import SMALLEST as SMALLEST_OFFLOADED

if TYPE_CHECKING:
    from ..config import GPTConfig

ACTIVATION, MASK, OTHER = "activation", "mask", "other"
OTHERS = {"norm statistics", "positions", "rotation", "loss weight"}


@dataclass(frozen=True)
class Saved:
    """`count` storages of `n` elements of `itemsize` bytes: activations, masks, or other things, such as statistics."""

    name: str
    kind: str
    n: int
    itemsize: int
    count: int = 1

    @property
    def nbytes(self):
        """Return the bytes of one of them."""
        return self.n * self.itemsize


def saved_storages(config: "GPTConfig", batch: int, sequence: int, dtype: torch.dtype = torch.float32,
                   device: torch.device | str = "cpu") -> list[Any]:
    """List the storages that autograd keeps of our GPT with targets: [Saved, …]. Σ count·nbytes is `activation_bytes`.

    Takes and raises what `memory.activation_terms` does.
    """
    outside = activation_terms(config, batch, sequence, dtype, device)
    kept = kept_on(device, dtype.itemsize)
    norm = norm_terms(config, batch * sequence, dtype.itemsize, kept)
    del outside["blocks"], outside["last norm"]  # these are split below, norm by norm
    split = _Split(config, batch * sequence, dtype.itemsize, kept, norm)
    saved = [each for terms in (norm, outside) for name, nbytes in terms.items() for each in split(name, nbytes)]
    for name, nbytes in block_terms(config, batch, sequence, dtype, device).items():
        saved += [Saved(each.name, each.kind, each.n, each.itemsize, config.layers * each.count)
                  for each in split(name, nbytes)]
    return saved


class _Split:
    """Splits a term (its name and bytes) into the storages that it is made of."""

    def __init__(self, config, tokens, e, kept, norm):
        self.config, self.tokens, self.e, self.kept, self.norm = config, tokens, e, kept, norm

    def __call__(self, name, nbytes):
        h, tokens = self.config.hidden, self.tokens
        if name == "queries and keys":
            q, kv = tokens * self.config.q_hidden, tokens * self.config.kv_hidden
            return [Saved("queries", ACTIVATION, q, self.e), Saved("keys", ACTIVATION, kv, self.e)]
        if name in OTHERS:
            size, parts = self._other(name, nbytes)
            return [Saved(name, OTHER, nbytes // size // parts, size, parts)]
        if "mask" in name:
            size = 1 if name == "causal mask" else self.kept.mask
            return [Saved(name, MASK, nbytes // size, size)]
        if name in self.norm:
            n, one = tokens * h, self.norm[name]
            return [Saved(name, ACTIVATION, n, one // n, nbytes // one)]
        size = 4 if name == "log-probabilities" else self.e
        return [Saved(name, ACTIVATION, nbytes // size, size)]

    def _other(self, name, nbytes):
        """Return (bytes of an element, storages). Each norm keeps statistics of its own; a rotation is cos and sin."""
        if name == "norm statistics":
            each = 2 if self.config.norm == "layernorm" else 1
            size = self.norm[name] // each // self.tokens
            return size, nbytes // size // self.tokens
        return {"positions": (8, 1), "rotation": (self.e, 2), "loss weight": (4, 1)}[name]


FLOATING = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def compressed_activation_terms(config: "GPTConfig", batch: int, sequence: int, method: str = "int8", *,
                                group: int = 128, smallest: int = SMALLEST_COMPRESSED,
                                dtype: torch.dtype = torch.float32,
                                device: torch.device | str = "cpu") -> dict[str, int]:
    """Predict the bytes that autograd keeps of our GPT under `compress_activations`: {term: bytes}.

    For each storage of n elements of e bytes, if e·n ≥ smallest:

        mask                          ⌈n/8⌉ if boolean, ⌈n/8⌉ + 2e if of two values of e bytes
        activation, bf16              2n if e > 2
        activation, int8              n + 8·⌈n/g⌉, g = group

    and e·n for all others, and where that is less. ValueError for an unknown method or a group below 1, and as
    `memory.activation_terms`.
    """
    check_method(method, group)
    terms = {}
    for each in saved_storages(config, batch, sequence, dtype, device):
        packed = each.nbytes
        if each.kind == MASK:
            packed = mask_bytes(each.n, each.itemsize)
        elif each.kind == ACTIVATION and FLOATING[each.itemsize] in ROUNDED.get(method, ()):
            packed = cast_bytes(each.n) if method == "bf16" else group_bytes(each.n, group)
        kept = each.nbytes if each.nbytes < smallest else min(packed, each.nbytes)
        terms[each.name] = terms.get(each.name, 0) + each.count * kept
    return terms


def compressed_activation_bytes(config: "GPTConfig", batch: int, sequence: int, method: str = "int8", *,
                                group: int = 128, smallest: int = SMALLEST_COMPRESSED,
                                dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> int:
    """Predict the bytes that autograd keeps of our GPT under `compress_activations`: the sum of
    `compressed_activation_terms`, with its equation and errors.
    """
    terms = compressed_activation_terms(config, batch, sequence, method, group=group, smallest=smallest, dtype=dtype,
                                        device=device)
    return sum(terms.values())


def offloaded_activation_bytes(config: "GPTConfig", batch: int, sequence: int, *, smallest: int = SMALLEST_OFFLOADED,
                               dtype: torch.dtype = torch.float32,
                               device: torch.device | str = "cuda") -> tuple[int, int]:
    """Predict (bytes on the device, bytes in host memory) between forward and backward under `offload_activations`:

        device = Σ e·n of storages below `smallest`        host = Σ e·n of the others

    On a CPU all stays: (`activation_bytes`, 0). Pinned blocks are powers of two, which is not counted. ValueError as in
    `memory.activation_terms`.
    """
    saved = saved_storages(config, batch, sequence, dtype, device)
    if torch.device(device).type == "cpu":
        smallest = float("inf")  # a CPU's tensors are in host memory already
    host = sum(each.count * each.nbytes for each in saved if each.nbytes >= smallest)
    return sum(each.count * each.nbytes for each in saved) - host, host
