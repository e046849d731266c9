"""What a run took and why: the ledger at the peak, what the arithmetic leaves out, what would help."""

import re
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..common.ledger import human
from ..memory.storage_records import BUILD
from ..memory.top import NO_MODULE, module_of
from ..untrusted.text import one_line
from ..versions import misfit
from . import no_gradients
from .answers import answers, first, together
from .arithmetic import arithmetic
from .helps import helps
from .kept.names import CYCLE
from .lines_below import lines_below
from .longest import at_the_longest
from .phases import REACHED, peaks, phases_of
from .recorded_timeline import RecordedTimeline

if TYPE_CHECKING:
    from ..memory.trace import Moment
    from .answers import Answer
    from .kept import Held
    from .script_run import Run

SCHEMA = 1  # of as_dict(): another number if what is there is called otherwise, or means something else
VIEWS = ("module", "line", "tensor")
ROWS = 8
NOTED, SHOWN = 0.001, 0.01  # shares of the peak: what grows by less is a note, what is kept is not shown below
UNNAMED = 0.1
SMALL = 0.005  # what saves less, would be 0 % or 1 %, is no row
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer, inside a path


class Explanation:
    """Reads a Run. `str` is what a terminal shows, `as_dict()` what JSON has."""

    def __init__(self, run: "Run") -> None:
        self.run, self.trace = run, run.recording.trace

    @cached_property
    def timeline(self) -> Any:
        """Return the RecordedTimeline of the recording."""
        return RecordedTimeline(self.run.recording)

    @cached_property
    def moment(self) -> "Moment":
        """Return the Moment of the peak, from the first forward on."""
        return self.trace.timeline[self.timeline.peak_row]

    @property
    def phase(self) -> str | None:
        """Return the phase that `top` takes so that it reads that moment; None if the peak is that of all."""
        whole = self.trace.peak_moment()
        return self.moment.phase if whole.index != self.moment.index else None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was allocated."""
        return not self.trace.ops or not self.timeline.peak

    @cached_property
    def trains(self) -> bool:
        """Whether a model ran and a backward with it."""
        return bool(self.timeline.backwards) and any(
            trained for model in self.run.recording.models for *_, trained in model.parameters)

    @cached_property
    def arithmetic(self) -> Any:
        """Return the Arithmetic, None if nothing trained."""
        return arithmetic(self.timeline) if self.trains else None

    @cached_property
    def answers(self) -> list["Answer"]:
        """Return the plain Answers; none if nothing trained."""
        return answers(self.timeline) if self.trains else []

    @cached_property
    def first(self) -> list["Answer"]:
        """Return what to change first: Answers, three of them or all that grows."""
        return first(self)

    @cached_property
    def helps(self) -> Any:
        """Return what would help; nothing if nothing trained."""
        return helps(self.timeline) if self.trains else []

    def top(self, by: str) -> list[tuple[str, int]]:
        """Return the largest holders at the peak, [(name, bytes)]. Layers of one list are one row: "blocks.*.mlp"; what
        no module made is named by its operation, if it is a tenth of the peak."""
        sums, counts = Counter(), Counter()
        rows = self.trace.top(10**9, by=by, phase=self.phase)
        if by == "module" and dict(rows).get(NO_MODULE, 0) >= UNNAMED * self.moment.ledger.total:
            rows = [row for row in rows if row[0] != NO_MODULE]
            rows += [(f"{NO_MODULE} {each.operation}", each.nbytes) for each in self.trace.held(phase=self.phase)
                     if not module_of(self.trace.records[each.record])]
        for name, nbytes in rows:
            merged = name if by == "line" else _NUMBER.sub("*", name)
            sums[merged] += nbytes
            counts[merged] += 1
        return [(f"{name}  × {counts[name]}" if counts[name] > 1 else name, n) for name, n in sums.most_common(ROWS)]

    def rows(self, by: str) -> list[tuple[str, int]]:
        """Return the rows of `top`; below a line with over half of the peak the library's lines that it came to."""
        rows = self.top(by)
        line, below = lines_below(self.trace.held(self.phase)) if by == "line" else (None, [])
        at = next((i for i, (name, _) in enumerate(rows, 1) if line and name.startswith(f"{line}: ")), len(rows))
        return rows[:at] + [(f"    {each}: {each.text}", nbytes) for each, nbytes in below[:ROWS]] + rows[at:]

    @cached_property
    def phases(self) -> dict[str, int]:
        """Return the peak of each phase of the script, as it goes through them, in bytes."""
        return peaks(self.timeline, self._phases)

    @property
    def phase_of_peak(self) -> str:
        """Return the phase of the script in which the peak is."""
        return self._phases[self.timeline.peak_row - 1]

    @cached_property
    def _phases(self):
        return phases_of(self.run.recording)

    @property
    def grows(self) -> list["Held"]:
        """Return what each step leaves more than the one before, as Held; what is less than a thousandth of the peak
        is a note."""
        return [each for each in self.run.recording.grows or () if each.nbytes >= self.timeline.peak * NOTED]

    @property
    def kept(self) -> list["Held"]:
        """Return what outlives its step and belongs to the script, as Held, where it has a hundredth of the peak."""
        return [each for each in self.run.recording.kept if each.nbytes >= self.timeline.peak * SHOWN]

    @property
    def notes(self) -> list[str]:
        """Return sentences on what the figures leave out."""
        found = [*self.run.notes, *self.trace.notes]
        if cure := misfit(self.run.ending.text):
            found.append(cure)
        whole = self.trace.peak_moment()
        if whole.phase == BUILD and whole.ledger.total > self.timeline.peak:
            found.append(f"building the model took more, {whole.ledger.total:,} bytes, after {whole.operation}")
        found += [f"grows by {each.nbytes:,} bytes a step, less than a thousandth of the peak: {each}"
                  for each in self.run.recording.grows or () if each not in self.grows]
        if any(each.holder == CYCLE for each in (*(self.run.recording.grows or ()), *self.run.recording.kept)):
            found.append("how much of what only cycles keep is there, Python's collector decides: without the recorder "
                         "it may run sooner or later, and the peak be another")
        if self.trains:
            found += filter(None, [at_the_longest(self.timeline)])
        found += filter(None, [no_gradients.note(self.run.recording, self.run.ending.text or "")])
        mapped = [i for i in self.timeline.alive(self.timeline.peak_row).tolist() if _is_mapped(self.trace.records[i])]
        if mapped:
            found.append(f"{self.timeline.nbytes[mapped].sum():,} bytes of the peak, loaded at "
                         f"{self.trace.records[mapped[0]].line}, are safetensors' file, mapped: the process has them, "
                         "and no allocator counts them")
        missed = [phase for phase in REACHED if phase not in self.phases] if self.run.done else []
        if missed:
            found.append(f"these steps had no {', no '.join(missed)}: where the script comes to one later, ask with "
                         f"--until {missed[0]}")
        if not self.run.by_class and not cure:
            found.append("no optimizer made a step here: this is no training, or it steps elsewhere (in other "
                         "processes or threads)")
        elif self.run.recording.waiting:
            found.append(f"{self.run.recording.waiting:,} parameters want gradients, and no optimizer that made a step "
                         "here updates them: if one does later, as a GAN's second, ask for more with --steps; if none "
                         "does, requires_grad_(False) saves their gradients")
        return found

    def __str__(self):
        return self.text()

    def text(self, everything: bool = False) -> str:
        """Return what a terminal shows. `everything`: what saves nothing, too, with the reason."""
        head = one_line(f"{self.run.name}: {self.run.words}")
        notes = [f"note: {one_line(note)}" for note in self.notes]
        if self.is_empty:
            why = "made no tensor in this process" if self.run.is_recorded else "ended before the recording began"
            return "\n".join([head, f"it {why}", *notes])
        moment = self.moment
        where = one_line(f"after {moment.operation} in {moment.module or 'no module'}, {self.phase_of_peak}")
        parts = [head] + [f"what to change first\n{_listed(self.first)}"] * bool(self.first)
        parts.append(f"peak on {self.trace.device}: {human(moment.ledger.total)}, {where}\n\n{moment.ledger}")
        parts += [f"by {by}\n{_rows(self.rows(by))}" for by in VIEWS]
        parts.append(f"by phase, each at its peak\n{_rows([(name, n) for name, n in self.phases.items()])}")
        if self.kept:
            rows = _rows([(f"{each}{f': {each.cure}' if each.cure else ''}", each.nbytes) for each in self.kept])
            parts.append(f"what your script keeps from step to step\n{rows}")
        if self.arithmetic:
            parts.append(f"what the arithmetic leaves out\n{_indented(str(self.arithmetic))}")
        if self.helps:
            parts.append(f"what would help here, each alone, of these {moment.ledger.total:,} bytes\n"
                         f"{_helps(self.helps, moment.ledger.total, everything)}")
        return "\n\n".join(parts + notes)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as lists, dicts, strings and numbers."""
        parameters = [each for model in self.run.recording.models for each in model.parameters]
        found = {"schema": SCHEMA, "script": self.run.name, "ending": self.run.words, "status": self.run.status,
                 "steps": self.run.steps, "parameters": {
                     "total": sum(count for _, count, *_ in parameters),
                     "trainable": sum(count for _, count, _, is_trained in parameters if is_trained)},
                 "device": self.trace.device, "notes": self.notes}
        if self.is_empty:
            return found
        moment, rest = self.moment, self.arithmetic
        found |= {"peak": moment.ledger.total, "peak of the last step": self.timeline.last_peak,
                  "operation": moment.operation, "module": moment.module,
                  "phase": moment.phase,
                  "ledger": dict(moment.ledger), "peaks of phases": self.phases,
                  "grows": None if self.run.recording.grows is None else _held(self.run.recording.grows),
                  "kept": _held(self.run.recording.kept),
                  "top": {by: [[name, nbytes] for name, nbytes in self.top(by)] for by in VIEWS}}
        line, below = lines_below(self.trace.held(self.phase))
        found["below"] = {"line": str(line), "lines": [[str(each), nbytes] for each, nbytes in below]} if line else None
        if rest:
            found["arithmetic"] = {"terms": rest.terms, "expected": rest.expected, "rest": rest.rest,
                                   "beyond": rest.beyond}
        return found | {"first": _answers(self.first), "answers": _answers(self.answers),
                        "helps": [each._asdict() for each in self.helps]}


def _is_mapped(record):
    """Tell whether a storage is a part of a file that safetensors mapped, and nothing that an allocator made."""
    return record.op == "set_" and record.source is not None and record.source.file.startswith("safetensors")


def _held(rows):
    return [{"bytes": each.nbytes, "lines": list(map(str, each.lines)), "holder": each.holder, "cure": each.cure}
            for each in rows]


def _answers(rows):
    return [each._asdict() | {"lines": list(map(str, each.lines))} for each in rows]


def _listed(rows):
    """Number Answers."""
    return "\n".join("\n     ".join([f"  {n}. {one_line(first)}", *map(one_line, filter(None, (*rest, *changes)))])
                     for n, (what, changes) in enumerate(together(rows).items(), 1)
                     for first, *rest in [what.split("\n")])


def _rows(rows):
    width = max((len(f"{nbytes:,}") for _, nbytes in rows), default=0)
    return "\n".join(f"  {nbytes:>{width},}  {one_line(name)}" for name, nbytes in rows)


def _indented(text):
    return "\n".join(f"  {line}" for line in text.splitlines())


def _helps(rows, peak, everything):
    useful = [row for row in rows if row.saves >= SMALL * peak]
    alone, ranks = ([row for row in useful if row.ranks == many] for many in (False, True))
    cells = [(row.words, f"{row.saves / peak:.0%}", row.title, row.cost, row.page) for row in alone + ranks]
    titles = ("saves", "", "technique", "costs", "page")
    widths = [max(len(line[k]) for line in (titles, *cells)) for k in range(5)]
    lines = ["  ".join([line[0].rjust(widths[0]), line[1].rjust(widths[1]), *(
        cell.ljust(width) for cell, width in zip(line[2:], widths[2:], strict=True))]).rstrip()
        for line in (titles, *cells)]
    if ranks:
        lines.insert(1 + len(alone), "on several devices, each with such a model")
    rest = [row for row in rows if row not in useful]
    if everything:
        lines += [f"{row.words if row.saves else 'nothing'}: {row.title} ({row.why or 'next to nothing'})"
                  for row in rest]
    elif rest:
        lines.append(f"nothing, or next to nothing, by {len(rest)} others: --all says why")
    return _indented("\n".join(lines))
