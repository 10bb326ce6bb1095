"""The language of argument rules: what must hold of the arguments of one call.

A row is a list of clauses with ``;`` between them, each of one of these forms. ``if CONDITION`` may end any of them.

``name name: property, property`` -- what holds of tensors, or of each of a list of them, by these properties:

====================  ==================================================================================
``int64|int32``       the element type is one of these; ``floating``: any of floating-point numbers
``like x``            the element type is that of the tensor x
``2d``                the count of dimensions
``contiguous``        the elements lie one after the other; ``dense``: in any order, without gaps;
                      ``adjacent``: those of the last dimension do
``~ x``               the shape is that of the tensor x, or a list of sizes: ``weight ~ [input[1]]``
``<~ x``              the shape expands to that one
``in a .. b``         each element is from a to below b; with ``or c``, or is c
``not nan``           each element is a number
====================  ==================================================================================

    A name with ``?`` may be of no tensor, of which nothing has to hold. The colon may be left out: ``x in 0 .. 3``.

``comparison`` -- as in Python, of numbers and lists: ``0 <= dim < len(self)``. An order holds for all items of a list.

``@function`` -- a function of :mod:`.rule_functions`, for what no row says well.

In an expression ``x[1]`` and ``x[:-2]`` are sizes of a tensor or items of a list, ``len(x)`` its dimensions or items,
``prod(x)`` its elements or the product of its items; the other functions are :data:`FUNCTIONS`. Names are those of the
operator's arguments and of element types, ``d``, the dimensions in the operator's name (2 of ``avg_pool2d``), and
``own``, whether an implementation of this project takes the operator's place.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire.attention import fits_fused
from onebox.wire.tensors import is_dense

Arguments = Mapping[str, Any]
"""Arguments of one call by their names in the operator's schema, defaults included, and :data:`OTHER_NAMES`."""

OTHER_NAMES = frozenset({"operator", "d", "own"})
"""The operator's name, the dimensions in it, and whether an implementation of this project takes its place."""

Rule = Callable[[Arguments], None]
"""A check, which raises :class:`onebox.errors.WireError`."""

Value = Callable[[Arguments], Any]


class Clause(NamedTuple):
    """A compiled clause.

    Args:
        check: The check.
        elements: Whether it reads elements of tensors: it is checked in every call then, not only for new shapes.
        apart: Whether what it reads must not be what the operator writes. Pointwise operators read it before that.
    """

    check: Rule
    elements: bool = False
    apart: bool = True


# ---- checks


def require(holds: bool, came: str, allowed: str) -> None:
    """Refuse a call unless a condition holds."""
    if not holds:
        raise WireError(f"{came}; allowed: {allowed}")


def require_shape(tensor: Tensor, name: str, shape: Sequence[int]) -> None:
    """Require a shape."""
    require(tuple(tensor.shape) == tuple(shape), f"{name} is {list(tensor.shape)}", str(list(shape)))


def require_all(condition: Tensor, came: Callable[[], str], allowed: str) -> None:
    """Require that all elements are true; on other devices than CPUs by an assertion in the device's stream."""
    if condition.device.type == "cpu":
        if not bool(condition.all()):
            raise WireError(f"{came()}; allowed: {allowed}")
    elif condition.device.type != "meta":
        torch._assert_async(condition.all())


def require_within(index: Tensor, name: str, start: float, stop: float, ignored: int | None = None) -> None:
    """Require that all elements are at least a number and less than another one, or are an ignored one."""
    if not index.numel() or index.device.type == "meta":
        return
    integral = not index.is_floating_point()
    if integral and index.device.type == "cpu":
        lowest, highest = torch.aminmax(index)
        if start <= int(lowest) and int(highest) < stop:
            return
    allowed = f"{start} to {stop - 1}" if integral else f"{start:g} to {stop:g}, {stop:g} excluded"
    inside = (index >= start) & (index < stop)
    if ignored is not None:
        allowed += f", or {ignored}"
        inside |= index == ignored
    require_all(inside, lambda: f"{name} has elements from {index.min().item()} to {index.max().item()}", allowed)


def require_numbers(tensor: Tensor | float, name: str) -> None:
    """Require that no element is NaN."""
    require_all(~torch.as_tensor(tensor).isnan(), lambda: f"an element of {name} is no number", "numbers")


def describe(name: str, value: Any) -> str:
    """Return what came as an argument, for an error."""
    if isinstance(value, Tensor):
        strides = "" if value.is_contiguous() else f" with strides {list(value.stride())}"
        return f"{name} is {value.dtype} {list(value.shape)}{strides}"
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        return f"{name} are {len(value)} tensors"
    return f"{name} is {value}"


# ---- expressions

_LISTS = (list, tuple)


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, _LISTS) else value.shape


def _element_type(value: Any) -> torch.dtype:
    return value if isinstance(value, torch.dtype) else value.dtype


def _broadcast(*shapes: Sequence[int]) -> Sequence[int]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise WireError(
            f"sizes are {' and '.join(map(str, map(list, shapes)))}; allowed: some that broadcast"
        ) from None


def _visits(sizes: Sequence[int]) -> int:
    return math.prod(max(size, 1) for size in sizes)


@functools.cache
def _shares_heads() -> bool:
    query, both = torch.ones(1, 2, 1, 8), torch.arange(16.0).reshape(1, 2, 1, 8)
    one = both[:, :1]  # a kernel that does not share them reads the other, within this memory
    try:
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(query, one, one)[0]
    except RuntimeError:
        return False
    return torch.equal(out[0, 1, 0], one[0, 0, 0])


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "max": max,
    "min": min,
    "len": lambda x: len(_items(x)),
    "prod": lambda x: math.prod(_items(x)),
    "visits": _visits,  # the product of sizes, where 0 counts as 1
    "distinct": lambda x: len(set(x)) == len(x),
    "broadcast": _broadcast,
    "stride": lambda x, dim: x.stride(dim),
    "cpu": lambda x: x.device.type == "cpu",
    "type": _element_type,
    "smallest": lambda x: min((tensor.numel() for tensor in x), default=0),
    "fused": fits_fused,  # as the operators onebox::attention choose
    "shares_heads": _shares_heads,  # whether attention on CPUs, which differs by release, shares keys among heads
    "floating": lambda x: _element_type(x).is_floating_point,
    "complex": lambda x: any(one.dtype.is_complex for one in ([x] if isinstance(x, Tensor) else x)),
    "given": lambda x: x is not None,  # x may be an argument that this overload does not have
}

_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda x, y: (*x, *y) if isinstance(x, _LISTS) else x + y,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def _equal(x: Any, y: Any) -> bool:
    return bool(x == y) or (isinstance(x, _LISTS) and isinstance(y, _LISTS) and tuple(x) == tuple(y))


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def holds(x: Any, y: Any) -> bool:
        if isinstance(x, _LISTS):
            return all(compare(item, y) for item in x)
        return all(compare(x, item) for item in y) if isinstance(y, _LISTS) else compare(x, y)

    return holds


_COMPARED: Mapping[type, Callable[[Any, Any], bool]] = {
    ast.Eq: _equal,
    ast.NotEq: lambda x, y: not _equal(x, y),
    ast.Lt: _ordered(operator.lt),
    ast.LtE: _ordered(operator.le),
    ast.Gt: _ordered(operator.gt),
    ast.GtE: _ordered(operator.ge),
    ast.In: lambda x, y: x in y,
    ast.NotIn: lambda x, y: x not in y,
}

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _parsed(text: str) -> ast.expr:
    """Return the syntax tree of an expression; ``from`` is a name here."""
    try:
        return ast.parse(re.sub(r"\bfrom\b", "from_", text.strip()), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text.strip()!r} is no expression") from error


def _argument(name: str) -> str:
    return "from" if name == "from_" else name


def _names(tree: ast.AST) -> list[str]:
    """Return the names of arguments in a syntax tree, in order."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called]
    return [_argument(name) for name in dict.fromkeys(found) if name not in _DTYPES]


def _expression(tree: ast.expr) -> Value:
    """Compile an expression to a function of the arguments."""
    made = _compiled(tree)
    if _names(tree):
        return made
    value = made({})
    return lambda a: value


def _compiled(tree: ast.expr) -> Value:
    match tree:
        case ast.Constant(value=value):
            return lambda a: value
        case ast.Name(id=name) if name in _DTYPES:
            return lambda a: _DTYPES[name]
        case ast.Name(id=name):
            argument = _argument(name)
            return lambda a: a[argument]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            items = [_expression(part) for part in parts]
            return lambda a: tuple([item(a) for item in items])
        case ast.Subscript(value=of, slice=ast.Slice(lower=lower, upper=upper, step=None)):
            base, first, last = _expression(of), *(_expression(one or ast.Constant(None)) for one in (lower, upper))
            return lambda a: _items(base(a))[first(a) : last(a)]
        case ast.Subscript(value=of, slice=place):
            base, at = _expression(of), _expression(place)
            return lambda a: _items(base(a))[at(a)]
    return _operation(tree)


def _operation(tree: ast.expr) -> Value:
    """Compile an expression of others."""
    match tree:
        case ast.Call(func=ast.Name(id="given"), args=[ast.Name(id=name)], keywords=[]):
            return lambda a: a.get(name) is not None
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if name in FUNCTIONS:
            function, given = FUNCTIONS[name], [_expression(part) for part in parts]
            return lambda a: function(*[one(a) for one in given])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            both, x, y = _BINARY[type(op)], _expression(left), _expression(right)
            return lambda a: both(x(a), y(a))
        case ast.UnaryOp(op=ast.USub() | ast.Not() as op, operand=part):
            one, unary = _expression(part), operator.neg if isinstance(op, ast.USub) else operator.not_
            return lambda a: unary(one(a))
        case ast.BoolOp(op=op, values=[left, *rest]):
            x, y = _expression(left), _expression(ast.BoolOp(op, rest) if rest[1:] else rest[0])
            return (lambda a: x(a) and y(a)) if isinstance(op, ast.And) else lambda a: x(a) or y(a)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
            compare, x, y = _COMPARED[type(op)], _expression(left), _expression(right)
            return lambda a: compare(x(a), y(a))
        case ast.Compare(left=left, ops=[op, *ops], comparators=[right, *rest]) if ops:
            pair = ast.Compare(left, [op], [right])
            return _expression(ast.BoolOp(ast.And(), [pair, ast.Compare(right, ops, rest)]))
    raise ValueError(f"{ast.unparse(tree)!r} is not in the language of argument rules")


# ---- clauses

Property = Callable[[Arguments, Tensor, str], None]
"""A check of one tensor, with its name."""

_TENSORS = re.compile(r"([a-z_]\w*\??(?: [a-z_]\w*\??)*)(?:: (.*)| ((?:<?~|in .* \.\.) .*))", re.I)
_NEXT = re.compile(r", (?=<?~ |in |like |not |\dd\b|contiguous|dense|adjacent|floating|u?int\d)")
_D = re.compile(r"\bd\b")
_RANGE = re.compile(r"in (.*?) \.\. (.*?)(?: or (.*))?")

_WORDS: Mapping[str, tuple[Callable[[Tensor], bool], str]] = {
    "contiguous": (Tensor.is_contiguous, "a contiguous tensor"),
    "dense": (is_dense, "a dense tensor"),
    "adjacent": (
        lambda x: not x.numel() or x.stride(-1) == 1 or x.shape[-1] == 1,
        "elements of the last dimension side by side",
    ),
    "floating": (Tensor.is_floating_point, "floating-point numbers"),
    "1d": (lambda x: x.dim() == 1, "1 dimension"),
    "2d": (lambda x: x.dim() == 2, "2 dimensions"),
    "3d": (lambda x: x.dim() == 3, "3 dimensions"),
    "4d": (lambda x: x.dim() == 4, "4 dimensions"),
}


class Row:
    """A compiled row.

    Args:
        text: The row.
        functions: The functions that it may name.

    Attributes:
        shapes: Checks of everything but elements.
        elements: Checks of elements of tensors.
        apart: Whether checked elements must not be what the operator writes.
        names: Names of arguments in it.

    Raises:
        ValueError: The text is not in the language.
    """

    def __init__(self, text: str, functions: Mapping[str, Clause]) -> None:
        self.names: set[str] = set()
        self.shapes: list[Rule] = []
        self.elements: list[Rule] = []
        self.apart = False
        for part in text.split("; "):
            held, _, condition = part.rpartition(" if ") if " if " in part else (part, "", "")
            holds = self._expression(condition) if condition else None
            for check, elements, apart in self._clauses(held, functions):
                self.apart |= elements and apart
                (self.elements if elements else self.shapes).append(_under(holds, check) if holds else check)

    def _expression(self, text: str) -> Value:
        tree = _parsed(text)
        self.names |= set(_names(tree))
        return _expression(tree)

    def _clauses(self, text: str, functions: Mapping[str, Clause]) -> list[Clause]:
        """Compile a clause without its condition, apart what it says of elements."""
        if text.startswith("@") and text[1:] in functions:
            return [functions[text[1:]]]
        found = _TENSORS.fullmatch(text)
        if found is None:
            return [Clause(_comparison(self._expression(text), text))]
        heads = [(name.rstrip("?"), name.endswith("?")) for name in found[1].split()]
        self.names |= {name for name, _ in heads}
        properties = [self._property(part) for part in _NEXT.split(found[2] or found[3])]
        kinds = [(kind, [check for check, elements in properties if elements == kind]) for kind in (False, True)]
        return [Clause(_of_tensors(heads, checks), kind) for kind, checks in kinds if checks]

    def _property(self, text: str) -> tuple[Property, bool]:
        """Compile a property; return also whether it reads elements."""
        if text in _WORDS:
            return _form(*_WORDS[text]), False
        if text == "not nan":
            return lambda a, x, name: require_numbers(x, name), True
        if text.startswith("like "):
            return _like(self._expression(text[5:])), False
        if text.startswith(("~ ", "<~ ")):
            return _shape(self._expression(text.partition("~ ")[2]), expands=text[0] == "<"), False
        if (found := _RANGE.fullmatch(text)) is not None:
            return _range(*(self._expression(part) for part in found.groups() if part)), True
        dtypes = {_DTYPES.get(name) for name in text.split("|")}
        if None in dtypes:
            raise ValueError(f"{text!r} is no property of tensors")
        return _form(lambda x: x.dtype in dtypes, text.replace("|", " or ")), False


def _under(condition: Value, check: Rule) -> Rule:
    def rule(a: Arguments) -> None:
        if condition(a):
            check(a)

    return rule


def _comparison(holds: Value, text: str) -> Rule:
    names = [name for name in _names(_parsed(text)) if name not in OTHER_NAMES]

    def rule(a: Arguments) -> None:
        if not holds(a):
            came = ", ".join(describe(name, a.get(name)) for name in names)
            raise WireError(f"{came}; allowed: {_D.sub(str(a.get('d')), text)}")

    return rule


def _of_tensors(heads: Iterable[tuple[str, bool]], checks: Sequence[Property]) -> Rule:
    def rule(a: Arguments) -> None:
        for name, optional in heads:
            if optional and a.get(name) is None:
                continue
            value = a[name]
            for tensor in value if isinstance(value, _LISTS) else (value,):
                for check in checks:
                    check(a, tensor, name)

    return rule


def _form(holds: Callable[[Tensor], bool], allowed: str) -> Property:
    def check(_: Arguments, tensor: Tensor, name: str) -> None:
        if not holds(tensor):
            raise WireError(f"{describe(name, tensor)}; allowed: {allowed}")

    return check


def _like(other: Value) -> Property:
    def check(a: Arguments, tensor: Tensor, name: str) -> None:
        if tensor.dtype is not other(a).dtype:
            raise WireError(f"{describe(name, tensor)}; allowed: {other(a).dtype}")

    return check


def _shape(of: Value, *, expands: bool) -> Property:
    def check(a: Arguments, tensor: Tensor, name: str) -> None:
        wanted = _items(of(a))
        if tensor.shape == wanted:
            return
        if expands:
            pairs = zip(reversed(tensor.shape), reversed(wanted), strict=False)
            fits = tensor.dim() <= len(wanted) and all(size in (1, other) for size, other in pairs)
            require(fits, f"{name} is {list(tensor.shape)}", f"{list(wanted)}, or 1 in place of a size")
        else:
            require_shape(tensor, name, wanted)

    return check


def _range(start: Value, stop: Value, ignored: Value = lambda a: None) -> Property:
    return lambda a, tensor, name: require_within(tensor, name, start(a), stop(a), ignored(a))
