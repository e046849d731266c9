"""The small faults that one file can be given: each is a Mutant, an exact change of one place of its source."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

OTHER = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
         ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
         ast.NotIn: ("not in", "in"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"),
         ast.FloorDiv: ("//", "*"), ast.Div: ("/", "*"), ast.Mod: ("%", "*"), ast.And: ("and", "or"),
         ast.Or: ("or", "and")}
FREES = {"clear", "release", "resize_", "drop", "drop_gradients", "free", "pop", "close", "unlink"}
TEXT = ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp  # beside a + these are joined, not added


@dataclass(frozen=True)
class Mutant:
    """One change: the bytes from `start` to `end` of a file become `new`. `kind` says which sort of fault it is."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str
    kind: str
    text: str  # the line that it begins in, without its indentation

    @property
    def name(self):
        """What tells it apart from all others of the same tree."""
        return f"{self.file}:{self.line}+{self.start} {self.kind}: {self.change}"

    @property
    def change(self):
        """Both texts, in one line."""
        return " → ".join(" ".join(text.split()) for text in (self.old, self.new))

    def of(self, source):
        """Return the source with the fault, as bytes."""
        return source[: self.start] + self.new.encode() + source[self.end :]


def mutants_of(path, root):
    """List all Mutants of a file. A `raise`, an `assert`, an f-string, an annotation and a decorator are left as they
    are: they are words."""
    source = path.read_bytes()
    return sorted(_Finder(source, Path(path).relative_to(root).as_posix()).found, key=lambda each: each.start)


class _Finder(ast.NodeVisitor):
    def __init__(self, source, file):
        self.source, self.file, self.found = source, file, []
        self.lines = source.splitlines(keepends=True)
        self.begins = [0]
        for line in self.lines:
            self.begins.append(self.begins[-1] + len(line))
        self.visit(ast.parse(source))

    def start(self, node):
        return self.begins[node.lineno - 1] + node.col_offset

    def end(self, node):
        return self.begins[node.end_lineno - 1] + node.end_col_offset

    def add(self, kind, line, start, end, new):
        old = self.source[start:end].decode()
        if old != new:
            self.found.append(Mutant(self.file, line, start, end, old, new, kind,
                                     self.lines[line - 1].decode().strip()))

    def text(self, node):
        return self.source[self.start(node) : self.end(node)].decode()

    def operator(self, kind, node, left, right, operator):
        """Exchange the operator that stands between two operands."""
        if type(operator) not in OTHER:
            return
        old, new = OTHER[type(operator)]
        between = self.source[self.end(left) : self.start(right)].decode()
        pattern = re.escape(old).replace(r"\ ", r"\s+")
        if place := re.search(rf"(?<!\w){pattern}(?!\w)" if old[0].isalpha() else pattern, between):
            begin = self.end(left) + len(between[: place.start()].encode())
            self.add(kind, node.lineno, begin, begin + len(place.group().encode()), new)

    def visit_Raise(self, node):
        """Say nothing: a message is words."""

    visit_JoinedStr = visit_Assert = visit_AnnAssign = visit_Raise

    def visit_FunctionDef(self, node):
        """Find changed defaults, then what is in the body."""
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            if isinstance(default, ast.Constant) and isinstance(default.value, (bool, int, float)):
                value = default.value
                other = repr(not value) if isinstance(value, bool) else repr(value * 2 or 1)
                self.add("a default", default.lineno, self.start(default), self.end(default), other)
        if node.name not in ("__repr__", "__str__"):
            for each in node.body:
                self.visit(each)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Compare(self, node):
        """Exchange each comparison."""
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self.operator("a comparison", node, left, right, operator)
        self.generic_visit(node)

    def visit_BinOp(self, node):
        """Exchange an operation on numbers."""
        if not isinstance(node.left, TEXT[1:]) and not isinstance(node.right, TEXT[1:]) and not any(
                isinstance(each, ast.Constant) and isinstance(each.value, str) for each in (node.left, node.right)):
            self.operator("arithmetic", node, node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        """Exchange and, or."""
        self.operator("a condition", node, node.values[0], node.values[1], node.op)
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        """Drop a not."""
        if isinstance(node.op, ast.Not):
            self.add("a condition", node.lineno, self.start(node), self.end(node), f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node):
        """Count one more."""
        if type(node.value) is int:
            self.add("off by one", node.lineno, self.start(node), self.end(node), str(node.value + 1))

    def visit_Expr(self, node):
        """Drop a call whose result nobody takes."""
        if isinstance(node.value, ast.Call):
            name = getattr(node.value.func, "attr", "")
            kind = "a hook left" if name == "remove" else "memory kept" if name in FREES else "a dropped call"
            self.add(kind, node.lineno, self.start(node), self.end(node), "pass")
            self.visit(node.value)
        elif not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def visit_Delete(self, node):
        """Keep what is let go of."""
        self.add("memory kept", node.lineno, self.start(node), self.end(node), "pass")

    def visit_Assign(self, node):
        """Keep what an attribute holds."""
        if isinstance(node.value, ast.Constant) and node.value.value is None and all(
                isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self.add("memory kept", node.lineno, self.start(node), self.end(node), "pass")
        self.generic_visit(node)

    def visit_Call(self, node):
        """Exchange the first two arguments."""
        first, second = [*node.args, None, None][:2]
        if second is not None and not {type(first), type(second)} & {ast.Starred, ast.GeneratorExp}:
            between = self.source[self.end(first) : self.start(second)].decode()
            self.add("swapped arguments", node.lineno, self.start(first), self.end(second),
                     self.text(second) + between + self.text(first))
        self.generic_visit(node)
