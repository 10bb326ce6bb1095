"""Random small changes of the code that some test should notice: ``python -m tests.seeded_faults --random 300``."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.seeded_faults.table import Tier

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr)
"""What says why something is refused, or what holds anyway."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A change of one expression or statement of a function.

    Attributes:
        file: The file, relative to the repository.
        start: Its first character in the file's bytes.
        end: The one behind its last.
        new: What is there instead.
        tests: Tests that should notice it, as arguments of pytest.
    """

    file: str
    line: int
    start: int
    end: int
    new: str
    tests: tuple[str, ...] = ()
    tier: Tier = "short"

    @property
    def name(self) -> str:
        """What is changed where."""
        return f"{self.file}:{self.line} {' '.join(self.new.split())[:60]}"

    def seeded(self, text: str) -> str:
        """Return the file's text with the change."""
        data = text.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Return all changes of the functions of a file."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    tree = ast.parse(text)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node, new in (each for statement in function.body for each in _changes(statement)):
                assert node.end_lineno is not None and node.end_col_offset is not None
                found.append(
                    Mutant(
                        file=file,
                        line=node.lineno,
                        start=starts[node.lineno - 1] + node.col_offset,
                        end=starts[node.end_lineno - 1] + node.end_col_offset,
                        new=new,
                    )
                )
    return list(dict.fromkeys(found))


def sample(root: Path, count: int, seed: int) -> list[Mutant]:
    """Return random changes of the package, the same for a seed and a tree; a file has as many as suit its length."""
    texts = {path: path.read_text() for path in sorted((root / "src" / "onebox").rglob("*.py"))}
    random, own, found = Random(seed), dict[Path, list[Mutant]](), dict[Mutant, None]()
    while len(found) < count:
        (path,) = random.choices(list(texts), [len(text) for text in texts.values()])
        if path not in own:
            own[path] = mutants_of(str(path.relative_to(root)), texts[path])
        if own[path]:
            found[random.choice(own[path])] = None
    return list(found)


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield the changes of a statement and what is in it: what is replaced, and by what."""
    if isinstance(node, (*_SKIPPED, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    if isinstance(node, ast.expr | ast.stmt):
        new = _changed(node)
        if new is not None:
            # Parentheses keep an expression whole where it was without them; an f-string is never entered.
            yield node, f"({ast.unparse(new)})" if isinstance(new, ast.expr) else ast.unparse(new)
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_comment", "decorator_list"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield from _changes(each)


def _changed(node: ast.expr | ast.stmt) -> ast.expr | ast.stmt | None:
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARED:
            new.ops = [_COMPARED[type(operator)]()]
        case ast.BinOp(op=operator) if type(operator) in _COMPUTED and not _texts(new):
            new.op = _COMPUTED[type(operator)]()
        case ast.BoolOp():
            new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()):
            return new.operand
        case ast.IfExp():
            new.body, new.orelse = new.orelse, new.body
        case ast.Constant(value=bool(value)):
            new.value = not value
        case ast.Constant(value=int(value)):
            new.value = value + 1
        case ast.Return(value=ast.expr()) if not isinstance(new.value, ast.Constant):
            new.value = ast.Constant(None)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
            return ast.Pass()
        case _:
            return None
    return new


def _texts(node: ast.BinOp) -> bool:
    """Tell whether texts are added."""
    return any(
        isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, str))
        for each in ast.walk(node)
    )
