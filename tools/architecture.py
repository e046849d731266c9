"""Floors of the house: which package stands on which. Draws them, and who imports whom, in docs/architecture.md.

    python tools/architecture.py            write the drawing anew
    python tools/architecture.py --check    fail if it is not what the imports are
"""

import ast
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # where this file is imported, and not run
from closures import run_time

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, PAGE = ROOT / "refimpl", ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- drawn by tools/architecture.py -->\n", "<!-- end of the drawing -->"
TITLES = {4: "techniques together, and commands", 3: "techniques", 2: "what techniques share", 1: "meters and ranks",
          0: "the ground"}
TECHNIQUES = {"mixed_precision", "checkpointing", "accumulation", "sequence_length", "activations", "attention",
              "cross_entropy", "mlp", "zero", "offload", "tensor", "context", "pipeline", "compression", "allocator"}
FLOORS = {**dict.fromkeys(("versions", "phantom", "common", "papers", "untrusted"), 0),
          **dict.fromkeys(("memory", "comm", "ranks"), 1),
          **dict.fromkeys(("sharding", "mesh", "model", "rotary", "config", "data", "catalog", "optimizer_subset",
                           "side_effects", "saving", "equivalence", "others"), 2),
          **dict.fromkeys(TECHNIQUES, 3),
          **dict.fromkeys(("engine", "planner", "estimate", "explain", "known_models", "rehearse", "guard", "cli",
                           "parallel", "pytest_plugin", "__main__"), 4)}
GROUND = {"comm": {"ranks", "memory"}, "memory": set(), "ranks": {"memory"}}  # what stands on what on floor 1


def imports(path, package=PACKAGE):
    """The rooms of refimpl that a file imports from, wherever in it."""
    here = path.relative_to(package.parent).with_suffix("").parts
    found = set()
    for node in run_time(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            names = [base] if len(base) > 1 else [[*base, alias.name] for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "lazily":  # loaded when it is asked for
            for module in map(ast.literal_eval, node.args[1].keys):
                name = module.lstrip(".")
                level = len(module) - len(name)
                names.append([*(here[: len(here) - level] if level else ()), *name.split(".")])
        found |= {parts[1] for parts in names if len(parts) > 1 and parts[0] == "refimpl"}
    return found


def room(path, package=PACKAGE):
    """The package, or the module of the first level, that a file belongs to."""
    return path.relative_to(package).with_suffix("").parts[0]


def main(arguments):
    """Write the drawing, or compare it. Returns the exit status."""
    page = PAGE.read_text()
    drawn = redrawn(page, arrows())
    if "--check" in arguments:
        if drawn != page:
            print("docs/architecture.md is not what the imports are: run `python tools/architecture.py`")
        return int(drawn != page)
    PAGE.write_text(drawn)
    return 0


def arrows():
    """Return {room: {rooms that its files import from}}, an import inside a function included."""
    found = {name: set() for name in FLOORS}
    for path in PACKAGE.rglob("*.py"):
        if room(path) != "__init__":
            found.setdefault(room(path), set()).update(imports(path) - {room(path), "__init__"})
    return {name: targets for name, targets in found.items() if exists(name)}


def exists(name):
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def redrawn(page, found):
    """Return the page with the drawing of these arrows between its two marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{picture(found)}\n{table(found)}\n{END}{rest.split(END)[1]}"


def picture(found):
    """Draw the floors as a Mermaid chart: rooms of floors 0 and 1 by name, each floor above as one box."""
    boxes = {name: name if FLOORS[name] < 2 else f"floor{FLOORS[name]}" for name in found}
    lines = ["```mermaid", "flowchart TD"]
    for floor, title in TITLES.items():
        if floor >= 2:
            lines.append(f'    floor{floor}["floor {floor}: {title}"]')
        else:
            names = sorted(name for name in found if FLOORS[name] == floor)
            lines += [f'    subgraph "floor {floor}: {title}"', *(f"        {name}" for name in names), "    end"]
    edges = {(boxes[here], boxes[there]) for here, targets in found.items() for there in targets}
    lines += [f"    {here} --> {there}" for here, there in sorted(edges) if here != there]
    return "\n".join([*lines, "```", ""])


def table(found):
    """List each room with the rooms that it imports from, floor by floor."""
    lines = []
    for floor, title in TITLES.items():
        lines += [f"**Floor {floor}: {title}**", "", "| room | imports from |", "|---|---|"]
        for name in sorted(name for name in found if FLOORS[name] == floor):
            lines.append(f"| `{name}` | {', '.join(sorted(found[name])) or 'nothing of ours'} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
