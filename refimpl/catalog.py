"""Published models and GPUs, and the pages of the course, read from models.toml, hardware.toml and pages.toml in data/.

    GPTConfig(**catalog.model("gpt2"))         # the shape of a published model, as keyword arguments
    catalog.hardware("a100-80").memory_bytes   # 85899345920
    catalog.page("recomputation").number       # as it is now; code names a page by its slug alone

Names are those of the files. An unknown name raises ValueError, which lists similar names. Each model and GPU has a
source.
"""

import difflib
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# A wheel has the files inside the package; a checkout has them beside it.
FOLDERS = (Path(__file__).parent / "_data", Path(__file__).parent.parent / "data")

MODEL_REQUIRED = {"vocab_size", "context_length", "layers", "hidden", "heads"}
MODEL_CONFIG = MODEL_REQUIRED | {
    "kv_heads", "head_dim", "mlp_hidden", "norm", "norm_eps", "activation", "positions", "rotary_fraction",
    "rotary_base", "bias", "qkv_bias", "post_norms", "tied", "parallel_residual",
}  # fmt: skip
MODEL_METADATA = {"source", "recalled", "parameters", "note", "training"}
TRAINING = {"micro_batch", "global_batch", "tensor_parallel", "pipeline_parallel", "interleave"}
HARDWARE_REQUIRED = {"memory_bytes", "memory_bandwidth", "bf16_flops", "link_bandwidth"}
HARDWARE_OPTIONAL = {"reported_bytes", "cuda_bytes", "context_bytes", "capability", "processors", "low_precision",
                     "source", "recalled", "note"}
LINKS = {"nvlink", "infinity_fabric", "pcie"}
PAGE = {"number", "title", "question", "minutes", "core", "needs"}


@dataclass(frozen=True)
class Hardware:
    """Describes a GPU by its maker's figures. Rates are peaks, which programs do not reach.

    A link's bandwidth is in one direction, summed over the GPU's links; None if the GPU has no such link.
    """

    name: str
    memory_bytes: int  # the advertised size, read as GiB: an upper bound
    reported_bytes: int  # what its driver says that there is, up to 6.3 % less; memory_bytes if that is not known
    cuda_bytes: int  # what CUDA says that there is in all; reported_bytes if that was not read
    context_bytes: int  # of those, what a process takes before its first tensor; 0 if that was not read
    capability: tuple[int, int] | None  # compute capability; None for a GPU that is not NVIDIA's
    processors: int | None  # streaming multiprocessors
    memory_bandwidth: float  # bytes/s
    bf16_flops: float  # FLOP/s, dense (no sparsity), in `low_precision` with fp32 accumulation
    low_precision: str  # "bf16", or "fp16" for a GPU without bf16
    nvlink_bandwidth: float | None  # bytes/s
    infinity_fabric_bandwidth: float | None  # bytes/s; AMD's
    pcie_bandwidth: float | None  # bytes/s
    source: str
    recalled: tuple[str, ...]  # fields written from memory, not checked against the source
    note: str


@dataclass(frozen=True)
class Page:
    """Describes a page of the course. data/pages.toml says what each field means."""

    slug: str  # the name that stays when the number changes
    number: str
    title: str
    question: str
    minutes: int  # for a person
    core: bool  # of the shortest course that is whole
    needs: tuple[str, ...]  # slugs

    @property
    def name(self) -> str:
        """Return number and title, as the page's heading and links to it have them."""
        return f"{self.number} · {self.title}"

    @property
    def filename(self) -> str:
        """Return the name of the notebook."""
        return f"{self.number}_{self.slug}.ipynb"


def model(name: str) -> dict[str, Any]:
    """Return the config of a published model, as a new dict of keyword arguments for `GPTConfig`.

    Fields equal to GPTConfig's default are absent. Raises ValueError for a name that is not in `model_names()`.
    """
    return {key: value for key, value in _model(name).items() if key in MODEL_CONFIG}


def model_names() -> list[str]:
    """Return the names that `model` takes, in the order of the file."""
    return list(_models())


def published_parameters(name: str) -> int | None:
    """Return the exact parameter count published for model `name`, or None if there is none.

    Raises ValueError for a name that is not in `model_names()`.
    """
    return _model(name).get("parameters")


def source(name: str) -> str:
    """Return where the config of model `name` is published: paper and table, or official config.

    Raises ValueError for a name that is not in `model_names()`.
    """
    return _model(name)["source"]


def note(name: str) -> str:
    """Return what is to know of model `name`, such as parts of it that `GPTConfig` does not have; "" if nothing is.

    Raises ValueError for a name that is not in `model_names()`.
    """
    return _model(name).get("note", "")


def training(name: str) -> dict[str, int]:
    """Return the batch sizes and parallel degrees published with model `name`, as a new dict of integers.

    Keys: micro_batch and global_batch (sequences), tensor_parallel, pipeline_parallel (GPUs), interleave (model chunks
    per pipeline stage, m in Korthikanti et al. 2022). Raises ValueError for an unknown name and for a model whose
    entry has no such facts.
    """
    facts = _model(name).get("training")
    if facts is None:
        known = ", ".join(each for each, entry in _models().items() if "training" in entry)
        raise ValueError(f"no training facts for model {name!r}; these have some: {known}")
    return dict(facts)


def hardware(name: str) -> Hardware:
    """Return the `Hardware` called `name`, or by an alias as "h100". ValueError for a name that is in neither."""
    return _lookup(_all_hardware(), _aliases().get(name, name), "hardware")


def hardware_names() -> list[str]:
    """Return the names that `hardware` takes, in the order of the file."""
    return list(_all_hardware())


def page(slug: str) -> Page:
    """Return the `Page` called `slug`, such as "zero_3". Raises ValueError for a slug that no page has."""
    return _lookup(_pages(), slug, "page")


def pages() -> list[Page]:
    """Return every `Page` of the course, in the order of reading."""
    return list(_pages().values())


def _model(name):
    return _lookup(_models(), name, "model")


def _lookup(entries, name, kind):
    if name in entries:
        return entries[name]
    spelled = str(name).lower().replace("_", "-").replace(" ", "-")
    close = difflib.get_close_matches(spelled, entries)
    if close:
        raise ValueError(f"unknown {kind} {name!r}; close names: {', '.join(close)}")
    raise ValueError(f"unknown {kind} {name!r}; known names: {', '.join(entries)}")


@cache
def _models():
    entries = _read("models.toml")
    for name, entry in entries.items():
        _check(f"model {name!r}", entry, MODEL_REQUIRED, MODEL_CONFIG | MODEL_METADATA)
        if "training" in entry:
            _check(f"model {name!r}, training", entry["training"], TRAINING, TRAINING)
    return entries


@cache
def _all_hardware():
    found = {}
    for name, entry in _read("hardware.toml").items():
        if name == "aliases":
            continue
        _check(f"hardware {name!r}", entry, HARDWARE_REQUIRED, HARDWARE_REQUIRED | HARDWARE_OPTIONAL)
        links = entry.pop("link_bandwidth")
        _check(f"hardware {name!r}, link_bandwidth", links, set(), LINKS)
        found[name] = Hardware(
            name=name,
            nvlink_bandwidth=links.get("nvlink"),
            infinity_fabric_bandwidth=links.get("infinity_fabric"),
            pcie_bandwidth=links.get("pcie"),
            recalled=tuple(entry.pop("recalled")),
            reported_bytes=(reported := entry.pop("reported_bytes", entry["memory_bytes"])),
            cuda_bytes=entry.pop("cuda_bytes", reported),
            context_bytes=entry.pop("context_bytes", 0),
            capability=tuple(entry.pop("capability", ())) or None,
            processors=entry.pop("processors", None),
            low_precision=entry.pop("low_precision", "bf16"),
            note=entry.pop("note", ""),
            **entry,
        )
    return found


@cache
def _pages():
    found = {}
    for slug, entry in _read("pages.toml").items():
        _check(f"page {slug!r}", entry, PAGE, PAGE)
        page, before = Page(slug, **entry | {"needs": tuple(entry["needs"])}), list(found.values())[-1:]
        if not re.fullmatch(r"\d\d[a-z]?", page.number):
            raise ValueError(f"page {slug!r}: number {page.number!r}; expected two digits, or two digits and a letter")
        if before and before[0].number >= page.number:
            raise ValueError(f"page {slug!r}: number {page.number} comes after {before[0].number}, which "
                             f"{before[0].slug!r} has; pages stand in the order of their numbers")
        for needed in page.needs:
            if needed not in found:
                raise ValueError(f"page {slug!r} needs {needed!r}, which is no page before it")
            if page.core and not found[needed].core:
                raise ValueError(f"page {slug!r} is core and needs {needed!r}, which is not")
        found[slug] = page
    return found


def _aliases():
    return _read("hardware.toml").get("aliases", {})


def _check(where, entry, required, known):
    """Raise ValueError for an unknown key (a misspelt one would silently become a default) and for a missing one."""
    if "source" in known:
        required = required | {"source", "recalled"}
    for key in entry:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}; known keys: {', '.join(sorted(known))}")
    for key in sorted(required):
        if key not in entry:
            raise ValueError(f"{where}: {key!r} is missing; expected {', '.join(sorted(required))}")
    if "source" in known and not entry["source"].strip():
        raise ValueError(f"{where}: 'source' is empty; cite the paper, table or config that the figures come from")


def _read(filename):
    for folder in FOLDERS:
        path = folder / filename
        if path.is_file():
            try:
                return tomllib.loads(path.read_text(encoding="utf-8"))
            except tomllib.TOMLDecodeError as error:
                raise ValueError(f"{path} is not valid TOML: {error}") from error
    looked = " nor ".join(str(folder / filename) for folder in FOLDERS)
    raise FileNotFoundError(f"no {looked}: reinstall refimpl, or restore data/{filename} in the checkout")
