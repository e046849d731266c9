"""What each line of a recipe does to a model: from one recipe to another, a field at a time, with the bytes of each.

    for step in steps(Recipe(), recipe, ask): …      # ask(recipe) → DryRank

The order is that of MESH first, since what ranks share decides what a field is worth, then that of the fields. A field
that cannot be changed alone (`folder` without `store`, or what the model does not have yet) is changed with the next.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..common.ledger import CATEGORIES, Ledger, human

if TYPE_CHECKING:
    from .dry import DryRank
    from .recipe import Recipe

MESH = ("dp", "shards", "tp", "pp", "cp", "micro_batches")


@dataclass
class Step:
    """One line: `changes` {field: (value before, value after)}, and what the fullest rank holds before and after."""

    changes: dict
    before: "DryRank"
    after: "DryRank"

    @property
    def difference(self) -> Ledger:
        """Return what the highest moment of a step has more, by category."""
        return self.after.peak - self.before.peak

    def __str__(self):
        said = ", ".join(f"{name} {_word(old)} → {_word(new)}" for name, (old, new) in self.changes.items())
        more, rows = self.difference, []
        for name in sorted(more, key=lambda name: -abs(more[name])):
            rows.append(f"{name} {_signed(more[name])}")
        return f"{said}: {_signed(more.total)}" + (f" ({', '.join(rows)})" if rows else "")


def steps(one: "Recipe", two: "Recipe", ask: Callable[["Recipe"], "DryRank"]) -> Iterator[Step]:
    """Yield the Steps that lead from one recipe to another. `ask` returns the fullest rank of a recipe.

    What `ask` raises for a recipe on the way is no error: its field waits for the next. ValueError or TypeError if it
    refuses one of the two.
    """
    before, current, waiting = ask(one), one, {}
    differ = one.diff(two)
    for name in sorted(differ, key=lambda name: (*MESH, name).index(name)):
        waiting[name] = differ[name]
        try:
            following = current.replace(**{field: new for field, (_, new) in waiting.items()})
            after = ask(following)
        except (ValueError, TypeError):
            if waiting.keys() | current.diff(two).keys() == waiting.keys():  # nothing is left that it could wait for
                raise
            continue
        yield Step(waiting, before, after)
        before, current, waiting = after, following, {}


def explained(recipe: "Recipe", ask: Callable[["Recipe"], "DryRank"]) -> str:
    """Return what each line of a recipe does, as text: first the bytes of a plain step, then one line for each, and
    below it what the field means."""
    means, lines, last = {each.name: each.metadata["means"] for each in fields(recipe)}, [], None
    for step in steps(type(recipe)(), recipe, ask):
        lines += [] if last else [f"a plain step on one device: {human(step.before.peak.total)}"]
        lines += [str(step), *(f"    {means[name]}" for name in step.changes)]
        last = step.after
    last = last or ask(recipe)
    most = max(CATEGORIES, key=lambda name: last.peak.get(name, 0))
    return "\n".join([*lines, f"the fullest rank, {last.rank} of {recipe.world_size}: {human(last.peak.total)}, most "
                              f"of it {most}, in {last.phase}"])


def _word(value: Any):
    return "none" if value is None else str(value)


def _signed(nbytes):
    return f"{'−' if nbytes < 0 else '+'}{human(abs(nbytes))}" if nbytes else "0 B"
