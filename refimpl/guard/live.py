"""What is live when a request has failed: by category, by line, by module, and who holds it.

A GPU's allocator knows each block, and by its history the stack that asked for it. Python knows tensors: those of
models and optimizers, those that a graph keeps, those in variables. A block that no tensor of Python's has is a
temporary of an operation, or waits in C++. On a CPU nobody knows the lines, unless a tracker was there.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

from ..common.ledger import ACTIVATIONS, PARAMETERS, TEMPORARIES
from ..common.nested_tensors import dense_parts
from ..explain.kept import Holder, Holders, tensors_there
from ..explain.kept.names import UNSEEN
from ..memory.tracking.lines import LIBRARY, USER, kind_of, line_of

OTHERS = "other tensors"
RUNNING = "the graph of the step that runs"
LIVE_STATES = ("active_allocated", "active_awaiting_free", "active_pending_free")
GROUPS, ROWS = 8, 12  # of which the holder is looked for; of a table
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # of a layer, inside a path


@dataclass
class Held:
    """What one holder has, of what is no weight, gradient or state: `count` tensors, made at `line` if that is known.
    `in_graph`: whether a graph keeps them."""

    holder: str
    nbytes: int
    count: int
    cure: str = ""
    line: str = ""
    in_graph: bool = False


@dataclass
class Live:
    """Bytes that are live. `ledger`: by category; `lines`, `modules`: rows [words, bytes, how many], and `holders`,
    those with most first. `lines_of_models`: {model: the line that made the first of its weights}."""

    ledger: dict = field(default_factory=dict)
    lines: list = field(default_factory=list)
    modules: list = field(default_factory=list)
    holders: list = field(default_factory=list)
    lines_of_models: dict = field(default_factory=dict)

    def as_dict(self):
        """Return lists, dicts, texts and numbers."""
        return {name: value for name, value in vars(self).items() if name != "lines_of_models"} | {
            "holders": [vars(each) for each in self.holders]}


@dataclass
class _Storage:
    """A storage that Python sees, or a block of an allocator's."""

    nbytes: int
    category: str
    module: str = ""
    key: int = 0
    sort: tuple = ()
    line: str = ""


def live(known, device, segments=None):
    """Return what is Live on a device, by its index, −1 for the CPU. `known`: KnownBytes; `segments`: of its allocator.
    """
    seen = _seen_by_python(known, device)
    there = list(_blocks(segments, device, seen, _forwards(known))) if segments else list(seen.values())
    sums = Counter()
    for each in there:
        sums[each.category] += each.nbytes
    model_of, lines_of_models = {module: model for model in known.models for module in model.modules()}, {}
    for category, storage, _, module, _ in known.storages(device):
        if category == PARAMETERS and module in model_of and storage.data_ptr() in seen:
            lines_of_models.setdefault(model_of[module], seen[storage.data_ptr()].line)
    return Live(dict(sums.most_common()), _table((each.line, each.nbytes) for each in there),
                _table((each.module, each.nbytes) for each in there), _held(seen.values()), lines_of_models)


def line_of_frames(frames):
    """Return the program's Line in an allocator's stack, or a library's if there is none, or None."""
    for wanted in (USER, LIBRARY):
        for each in frames:
            if kind_of(each["filename"]) == wanted:
                return line_of(each["filename"], each["line"])
    return None


# --- what Python sees ------------------------------------------------------------------------------------------------


def _seen_by_python(known, device):
    """Return {address: _Storage}."""
    found, paths = {}, {module: path for model in known.models for path, module in _paths(model)}
    for category, storage, tensor, module, name in known.storages(device):
        path = _NUMBER.sub("*", f"{paths[module]}.{name}") if module in paths else ""
        _note(found, tensor, storage, category, path)
    there = list(tensors_there())
    for _, what, beside in there:
        for each in beside if what == "the graph" else ():
            _note_parts(found, each, device, ACTIVATIONS)
    for tensor, *_ in there:
        _note_parts(found, tensor, device, ACTIVATIONS if tensor.grad_fn is not None else OTHERS)
    return found


def _paths(model):
    name = type(model).__name__
    return [(f"{name}.{path}" if path else name, module) for path, module in model.named_modules()]


def _note_parts(found, tensor, device, category):
    try:
        for part in dense_parts(tensor):
            if part.get_device() == device and not part.is_meta:
                _note(found, part, part.untyped_storage(), category, "")
    except (RuntimeError, NotImplementedError, ValueError):  # a fake tensor, or a layout without a storage
        return


def _note(found, tensor, storage, category, module):
    if storage.nbytes():
        found.setdefault(storage.data_ptr(), _Storage(storage.nbytes(), category, module, storage._cdata,
                                                      (category, str(tensor.dtype), tuple(tensor.shape))))


def _held(storages):
    """List Held: tensors of one sort are named together, by the first."""
    groups = {}
    for each in storages:
        if each.category in (ACTIVATIONS, OTHERS):
            groups.setdefault(each.sort, []).append(each)
    most = sorted(groups.values(), key=lambda group: -sum(each.nbytes for each in group))[:GROUPS]
    holders, rows = Holders([group[0].key for group in most]), {}
    for group in most:
        holder = holders[group[0].key]
        if group[0].category == ACTIVATIONS and (UNSEEN in holder.words or "._call_impl" in holder.words):
            holder = Holder(RUNNING)
        row = rows.setdefault(holder.words, Held(holder.words, 0, 0, holder.cure, group[0].line,
                                                 group[0].category == ACTIVATIONS))
        row.nbytes += sum(each.nbytes for each in group)
        row.count += len(group)
    return sorted(rows.values(), key=lambda row: -row.nbytes)


# --- what the allocator knows ----------------------------------------------------------------------------------------


def _blocks(segments, device, seen, forwards):
    """Yield a _Storage for each live block, and give those that Python sees their line."""
    for segment in segments:
        at = segment["address"]
        for block in segment["blocks"] if segment["device"] == device else ():
            if block["state"] in LIVE_STATES:
                frames = block.get("frames", ())
                line = str(line_of_frames(frames) or "")
                of_python = seen.get(at, _Storage(0, TEMPORARIES))
                of_python.line = line
                yield _Storage(block["requested_size"], of_python.category,
                               of_python.module or _module_of(frames, forwards), line=line)
            at += block["size"]


def _module_of(frames, forwards):
    """Return the path of the module whose forward is the innermost of a stack, "" if none is."""
    return next((path for each in frames if each["name"] == "forward"
                 for first, last, path in forwards.get(each["filename"], ()) if first <= each["line"] <= last), "")


def _forwards(known):
    """Return {file: [(first line, last line, path)]} of the forwards of all modules. Where modules of one class have
    several paths, the path is that of the first, and how many there are."""
    paths, found = {}, {}
    for model in known.models:
        for path, module in _paths(model):
            paths.setdefault(type(module), Counter())[_NUMBER.sub("*", path)] += 1
    for kind, counted in paths.items():
        code = getattr(kind.forward, "__code__", None)
        if code is not None and not kind.__module__.startswith("torch.nn."):
            path, *more = counted
            last = max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno)
            found.setdefault(code.co_filename, []).append(
                (code.co_firstlineno, last, f"{path} and {len(more)} more" if more else path))
    return found


def _table(pairs):
    sums, counts = Counter(), Counter()
    for words, nbytes in pairs:
        sums[words] += nbytes * bool(words)
        counts[words] += 1
    return [[words, nbytes, counts[words]] for words, nbytes in sums.most_common(ROWS) if nbytes]
