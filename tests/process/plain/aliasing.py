"""Random programs of views, writes in place, ``out=``, lists, copies between devices and gradients, on two devices.

A program is written line by line while it runs on the CPU, so that most lines fit the tensors that there are; it ends
with an error. Then it runs on virtual devices, where the same has to come of it: values, gradients, versions, and an
error where the CPU has one. The same seed gives the same program.
"""

from __future__ import annotations

import contextlib
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from onebox.errors import WorkerDied

LINES = 24
"""The most lines of a program, after those that make its first tensors."""

ENDS = 0.15
"""Share of views and new tensors with an error that end a program, as an error of a write does, which may have changed
something; the others are left out, as a program that ends early says little."""

DEVICES = ("A", "B", "H")
"""Two devices and the host."""

TOLERANCE = 1e-9


class Doubled(torch.autograd.Function):
    """A product that saves its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x * 2


class Scaled(torch.autograd.Function):
    """A product in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def fresh(devices: dict[str, str]) -> dict[str, Any]:
    """Return the names that a program begins with."""
    return {"torch": torch, "Doubled": Doubled, "Scaled": Scaled, **devices}


HERE = dict.fromkeys(DEVICES, "cpu")
THERE = {"A": "vgpu:0", "B": "vgpu:1", "H": "cpu"}


@dataclass(kw_only=True)
class Program:
    """A program and what came of it on the CPU.

    Args:
        seed: It is made of.
        lines: Its statements.
        places: The device of each tensor.
        state: What its tensors are at the end.
        writes: For each line the tensors whose versions it raised: by how much is the device's business.
        error: The error of its last line; empty if there is none.
    """

    seed: int
    lines: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    writes: list[set[str]] = field(default_factory=list)
    error: str = ""

    def text(self) -> str:
        """Return a script that prints what it gives on virtual devices."""
        names = "\n".join(f"{name} = {place!r}" for name, place in THERE.items())
        body = "\n".join(self.lines)
        return f"# {self.seed}, on the CPU: {self.error or 'no error'}\n{names}\n{body}"


class Writer:
    """Writes a program while it runs on the CPU.

    Args:
        seed: Of all choices.
    """

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.program = Program(seed=seed)
        self._names = fresh(HERE)
        self._versions: dict[str, int] = {}
        self._count = 0

    def write(self) -> Program:
        """Return the program."""
        with quiet():
            for _ in range(self.choose.randint(2, 4)):
                self._run(self._first())
            for _ in range(self.choose.randint(LINES // 3, LINES)):
                kind = self.choose.choices(KINDS, WEIGHTS)[0]
                try:
                    line = kind(self)
                except RuntimeError:  # of a view that can no longer be asked for its gradient
                    continue
                if line and not self._run(line):
                    if kind not in (view, pure) or self.choose.random() < ENDS:
                        break
                    self._leave_out()
            self._run_again()
        return self.program

    def _run_again(self) -> None:
        """Run the program as it is, and note what it does: while it was written its tensors were looked at, by which
        PyTorch sets the histories of views whose bases were written to.
        """
        lines, self.program.lines = self.program.lines, []
        self._names, self._versions = fresh(HERE), {}
        self.program.error, self.program.writes = "", []
        if all(map(self._run, lines)):
            self.program.state = state_of(self._names, self.program.places)

    def _run(self, line: str) -> bool:
        """Run a line; return whether it succeeded."""
        self.program.lines.append(line)
        try:
            exec(line, self._names)  # of this module's own making
        except Exception as error:
            self.program.error = f"{type(error).__name__}: {error}"
            return False
        self.program.writes.append(raised(self._names, self._versions))
        return True

    def _leave_out(self) -> None:
        """Leave the last line out, which failed and so changed nothing."""
        name = self.program.lines.pop().partition(" = ")[0]
        if name not in self._names:
            self.program.places.pop(name, None)
        raised(self._names, self._versions)
        self.program.error = ""

    # ---- tensors

    def new(self, place: str) -> str:
        """Return the name of a new tensor of a device."""
        name = f"t{self._count}"
        self._count += 1
        self.program.places[name] = place
        return name

    def tensor(self, name: str) -> Tensor:
        """Return a tensor by its name."""
        found: Tensor = self._names[name]
        return found

    def any(self, where: Callable[[Tensor], bool] = lambda tensor: True, place: str | None = None) -> str:
        """Return the name of a tensor, the later the likelier; empty if there is none."""
        places = self.program.places
        found = [n for n in places if place in (None, places[n]) and where(self.tensor(n))]
        return found[max(self.choose.randrange(len(found)) for _ in range(2))] if found else ""

    def beside(self, name: str, where: Callable[[Tensor], bool] = lambda tensor: True) -> str:
        """Return the name of a tensor on the device of another one, often of its shape."""
        shape = self.tensor(name).shape
        alike = self.any(lambda tensor: tensor.shape == shape and where(tensor), self.place(name))
        if alike and self.choose.random() < 0.9:
            return alike
        return self.any(where, self.place(name))

    def place(self, name: str) -> str:
        """Return the device of a tensor."""
        return self.program.places[name]

    def apart(self, target: str, *read: str) -> bool:
        """Return whether a result has memory of its own: kernels that check nothing compute anything otherwise."""
        memory = {self.tensor(name).untyped_storage().data_ptr() for name in read}
        return self.tensor(target).untyped_storage().data_ptr() not in memory

    def laid_alike(self, *names: str) -> bool:
        """Return whether tensors have the same layout, wherever they are."""
        tensors = map(self.tensor, names)
        return len({(each.shape, each.stride(), each.storage_offset()) for each in tensors}) == 1

    def _first(self) -> str:
        place = self.choose.choice("AAAB")
        shape = self.choose.choice(((3,), (4,), (2, 3), (3, 3), (4, 2)))
        size = torch.Size(shape).numel()
        start = self.choose.randint(-3, 2)
        made = f"torch.arange({start}, {start + size}, dtype=torch.float64, device={place}).div(3).view{shape}"
        return f"{self.new(place)} = {made}.clone(){self.choose.choice(('', '.requires_grad_()'))}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let PyTorch's warnings be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# ---- kinds of lines

VIEWS = (
    "[0]", "[-1]", "[1:]", "[:-1]", "[::2]", "[..., :1]", "[..., 1:]", "[..., ::2]", "[None]", ".t()", ".view(-1)",
    ".reshape(-1)", ".flatten()", ".unsqueeze(0)", ".unsqueeze(-1)", ".squeeze(0)", ".squeeze()", ".detach()", ".data",
    ".expand(2, *{0}.shape)", ".unbind(0)[0]", ".unbind(-1)[-1]", ".split(1)[0]", ".split(2, -1)[0]", ".chunk(2)[0]",
    ".diagonal()", ".movedim(0, -1)", ".narrow(0, 0, 1)", ".unfold(0, 2, 1)", ".view_as({0})", ".T", ".select(-1, 0)",
    ".as_strided((2,), (1,))", ".expand_as({0})", ".permute(*range({0}.dim())[::-1])", ".view({0}.shape)", ".real",
)  # fmt: skip

PURE = (
    "{0} + {1}", "{0} * {1}", "{0} - {1}", "{0}.sin()", "{0}.tanh()", "{0}.sigmoid()", "{0} * 2", "{0}.clone()",
    "{0}.contiguous()", "{0}.sum()", "{0}.sum(0)", "{0}.mean(-1)", "{0}.abs()", "torch.maximum({0}, {1})",
    "torch.where({0} > 0, {0}, {1})", "torch.stack([{0}, {1}])", "torch.cat([{0}, {1}])", "{0}.cumsum(0)",
    "{0}.flip(0)", "{0}.relu()", "Doubled.apply({0})", "{0}.softmax(0)", "{0}.square()", "{0}.index_select(0, {i})",
    "{0}[{i}]", "{0}.lerp({1}, 0.25)", "torch._foreach_mul([{0}, {1}], 0.5)[1]", "{0}.expand(2, *{0}.shape).sum(0)",
    "torch.nn.functional.one_hot({i}, 2).double()", "{0}.masked_fill({0} > 0, 0.5)", "{0}.prod()", "{0}.amax(0)",
    "torch.empty_like({0}).copy_({1})", "{0}.new_zeros({0}.shape).add_({1})", "{0}.T @ {0}",
)  # fmt: skip

WRITES = (
    "{0}.add_({1})", "{0}.mul_({1})", "{0}.sub_(0.5)", "{0}.mul_(0.5)", "{0}.copy_({1})", "{0}.fill_(0.25)",
    "{0}.zero_()", "{0}.sin_()", "{0}.tanh_()", "{0}.clamp_(-1, 1)", "{0}.lerp_({1}, 0.5)", "{0}.addcmul_({1}, {1})",
    "{0}[0] = 0.5", "{0}[:1] = {1}[:1]", "{0}[1:] = {0}[:-1]", "{0}[{0} > 0] = 0.5", "{0}[{i}] = 0.75",
    "{0}.masked_fill_({0} > 0, -0.5)", "{0}.index_fill_(0, {i}, 0.5)", "{0}.index_add_(0, {i}, {0}[{i}])",
    "{0}.index_copy_(0, {i}, {0}[{i}])", "{0}.index_put_(({i},), {0}[{i}], accumulate=True)", "{0} += {1}",
    "{0} *= 0.5", "{0}.relu_()", "{0}.unsqueeze_(0)", "{0}.squeeze_(0)", "{0}.t_()", "{0}.neg_()",
    "{0}.masked_scatter_({0} > 0, {1})", "Scaled.apply({0})", "{0}.sigmoid_()",
    "{0}.resize_(min(2, {0}.numel()))",  # what it would add has no value
    "{0}.abs_()",
    "{0}.set_({1})", "{0}.data = {1}.data", "{0}.data.mul_(0.5)", "{0}.detach().mul_(0.5)", "{0}.transpose_(0, -1)",
    "{0}.cumsum_(0)", "{0}.as_strided_((2,), (1,))", "{0}.swapaxes_(0, -1)",
)  # fmt: skip

RELAID = re.compile(r"\.(as_strided|squeeze|swapaxes|t|transpose|unsqueeze)_\(")
"""Writes to layouts. Not of what requires a gradient: PyTorch finds that of its views by replaying them, which it does
not on CPUs."""

REPLACED = re.compile(r"\.set_\(|\.data = ")
"""Writes to memory and layouts, which are of that kind where the layout is another one."""

LISTS = (
    "torch._foreach_add_([{0}, {1}], 1.0)", "torch._foreach_mul_([{0}, {1}], [0.5, 2.0])",
    "torch._foreach_add_([{0}], [{1}], alpha=0.5)", "torch._foreach_copy_([{0}], [{1}])",
    "torch._foreach_lerp_([{0}], [{1}], 0.5)", "torch._foreach_zero_([{0}, {1}])", "torch._foreach_tanh_([{0}])",
    "torch._foreach_addcmul_([{0}], [{1}], [{1}], 0.5)", "torch._foreach_sub_([{0}, {0}], 0.5)",
    "torch._foreach_maximum_([{0}], [{1}])", "torch._foreach_neg_([{0}, {1}])", "torch._foreach_clamp_max_([{0}], 1.0)",
    "torch.unbind_copy({1}[:1].clone(), out=[{0}])", "torch.split_copy({1}.clone(), 9, out=[{0}])",
)  # fmt: skip

OUTS = (
    "torch.add({1}, {2}, out={0})", "torch.mul({1}, 0.5, out={0})", "torch.sin({1}, out={0})",
    "torch.maximum({1}, {2}, out={0})", "torch.tanh({1}, out={0})", "torch.where({1} > 0, {1}, {2}, out={0})",
    "torch.index_select({1}, 0, {i}, out={0})", "torch.cat([{1}, {2}], out={0})", "torch.stack([{1}, {2}], out={0})",
    "torch.cumsum({1}, 0, out={0})", "torch.clamp({1}, -1, 1, out={0})", "torch.lerp({1}, {2}, 0.5, out={0})",
)  # fmt: skip

APART = (
    "torch.sum({1}, 0, out={0})", "torch.mean({1}, -1, out={0})", "torch.mm({1}, {2}, out={0})",
    "torch.amax({1}, 0, out={0})", "torch.max({1}, 0, out=({0}, {0}.new_zeros(0).long()))",
    "torch.matmul({1}, {2}, out={0})", "torch.softmax({1}, 0, out={0})",
)  # fmt: skip
"""Operators with ``out`` that check no memory: what they compute in that of their arguments is nobody's business."""

GRADIENTS = (
    "{0}.sum().backward()", "{0}.square().sum().backward()", "{0}.sum().backward(retain_graph=True)",
    "{0}.backward(torch.ones_like({0}))", "({0} * {1}).sum().backward()",
    "torch.autograd.grad({0}.sin().sum(), {0})[0].mul_(2)",
    "torch.optim.SGD([{0}], lr=0.1, momentum=0.5, foreach=True).step()",
    "torch.optim.AdamW([{0}], lr=0.1, foreach=True).step()", "torch.nn.utils.clip_grad_norm_([{0}], 0.5)",
)  # fmt: skip

ON_GRADIENTS = (
    "{0}.grad.zero_()", "{0}.grad.mul_(0.5)", "{0}.grad = None", "{0}.grad.add_({0}.detach())",
    "torch._foreach_mul_([{0}.grad], 0.5)", "{0}.grad = {0}.detach().clone()",
)  # fmt: skip


def _indices(writer: Writer, place: str) -> str:
    return f"torch.tensor([{', '.join(str(writer.choose.randint(0, 1)) for _ in range(2))}], device={place})"


def _filled(writer: Writer, text: str, *names: str) -> str:
    return text.replace("{i}", _indices(writer, writer.place(names[0]))).format(*names)


def view(writer: Writer) -> str:
    """A view of a tensor."""
    name = writer.any()
    return f"{writer.new(writer.place(name))} = {name}{writer.choose.choice(VIEWS).format(name)}"


def pure(writer: Writer) -> str:
    """A new tensor."""
    name = writer.any()
    line = _filled(writer, writer.choose.choice(PURE), name, writer.beside(name))
    return f"{writer.new(writer.place(name))} = {line}"


def leaf(writer: Writer) -> str:
    """A leaf that requires a gradient, made of another tensor."""
    name = writer.any()
    return f"{writer.new(writer.place(name))} = {name}.detach().clone().requires_grad_()"


def _maybe_untracked(writer: Writer, name: str, line: str) -> str:
    """Return a write as it is or, nearly always for what requires a gradient and is a leaf, without gradients."""
    tensor = writer.tensor(name)
    often = 0.95 if tensor.requires_grad and tensor.is_leaf else 0.2
    return f"with torch.no_grad(): {line}" if writer.choose.random() < often else line


def write(writer: Writer) -> str:
    """A write in place."""
    name = writer.any()
    text = writer.choose.choice(WRITES)
    if RELAID.search(text) and writer.tensor(name).requires_grad:
        return ""
    other = writer.beside(name)
    if REPLACED.search(text) and writer.tensor(name).requires_grad and not writer.laid_alike(name, other):
        return ""
    return _maybe_untracked(writer, name, _filled(writer, text, name, other))


def lists(writer: Writer) -> str:
    """A write to tensors of a list."""
    name = writer.any()
    text = writer.choose.choice(LISTS)
    if "out=" in text and writer.tensor(name).requires_grad:
        return ""
    line = _filled(writer, text, name, writer.beside(name))
    # of a list PyTorch changes the history of a view alone, not that of its base
    return f"with torch.no_grad(): {line}" if writer.tensor(name)._is_view() else _maybe_untracked(writer, name, line)


def out(writer: Writer) -> str:
    """A result in a tensor that is there."""
    name = writer.any(lambda tensor: not tensor.requires_grad)
    if not name:
        return ""
    read = writer.beside(name), writer.beside(name)
    apart = writer.choose.random() < 0.25
    gaps = not all(map(_dense, (writer.tensor(one) for one in (name, *read))))  # such are not checked, either
    if (apart or gaps) and not writer.apart(name, *read):
        return ""
    return _maybe_untracked(
        writer, read[0], _filled(writer, writer.choose.choice(APART if apart else OUTS), name, *read)
    )


def _dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or tensor.t().is_contiguous() if tensor.dim() < 3 else tensor.is_contiguous()


def copy(writer: Writer) -> str:
    """A copy to another device, or from it into a tensor that is there."""
    name = writer.any()
    place = writer.choose.choice(DEVICES)
    if writer.choose.random() < 0.5:
        return f"{writer.new(place)} = {name}.to({place}, copy=True)"
    shape = writer.tensor(name).shape
    target = writer.any(lambda tensor: tensor.shape == shape, place)
    return _maybe_untracked(writer, target, f"{target}.copy_({name})") if target else ""


def gradient(writer: Writer) -> str:
    """Something with gradients."""
    if writer.choose.random() < 0.3:
        name = writer.any(lambda tensor: tensor.is_leaf and tensor.grad is not None)
        return "with torch.no_grad(): " + writer.choose.choice(ON_GRADIENTS).format(name) if name else ""
    text = writer.choose.choice(GRADIENTS)
    leaves = "optim" in text or "clip" in text
    name = writer.any(lambda tensor: tensor.requires_grad and (tensor.is_leaf or not leaves))
    return text.format(name, writer.beside(name)) if name else ""


KINDS = (view, pure, leaf, write, lists, out, copy, gradient)
WEIGHTS = (5, 6, 1, 6, 3, 3, 2, 4)


# ---- comparison


def raised(names: dict[str, Any], versions: dict[str, int]) -> set[str]:
    """Return the tensors whose versions have been raised, and note the versions."""
    now = {name: each._version for name, each in names.items() if isinstance(each, Tensor)}
    found = {name for name, version in now.items() if version != versions.get(name, version)}
    versions.update(now)
    return found


def state_of(names: dict[str, Any], places: dict[str, str]) -> dict[str, Any]:
    """Return what tensors are, each device read once."""
    found: dict[str, Any] = {}
    flat: dict[str, list[Tensor]] = {place: [] for place in DEVICES}
    for name, place in places.items():
        tensor: Tensor = names[name]
        grad: Tensor | None = None
        history: Any
        try:
            grad = tensor.grad if tensor.is_leaf else None
            history = tensor.requires_grad, tensor.is_leaf
        except RuntimeError as error:  # of a view whose base was written to
            history = str(error)[:60]
        flat[place] += [each.detach().reshape(-1).to(torch.float64) for each in (tensor, grad) if each is not None]
        shapes = [None if each is None else tuple(each.shape) for each in (tensor, grad)]
        found[name] = history, shapes
    for place, parts in flat.items():
        if parts:
            found[place] = torch.cat(parts).cpu()
    return found


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What a program did on virtual devices.

    Args:
        kind: ``equal``; ``refused``: both raise an error; ``silent``: only the CPU does, or values, gradients or
            versions differ; ``raised``: only the virtual devices do.
        said: The difference.
    """

    kind: Literal["equal", "refused", "silent", "raised"]
    said: str = ""


def compared(program: Program) -> Compared:
    """Run a program on virtual devices, and compare."""
    names, versions = fresh(THERE), dict[str, int]()
    try:
        with quiet():
            for place, line in enumerate(program.lines):
                exec(line, names)
                writes = raised(names, versions)
                if place < len(program.writes) and writes != program.writes[place]:
                    text = f"{line} raises the versions of {writes}, not of {program.writes[place]}"
                    return Compared(kind="silent", said=text)
            if program.error:  # later than on the CPU, if at all
                present = {name: place for name, place in program.places.items() if name in names}
                state_of(names, present)
                for device in ("A", "B"):
                    torch.accelerator.synchronize(THERE[device])
                return Compared(kind="silent", said=f"the CPU raises {program.error}")
            found = state_of(names, program.places)
    except WorkerDied:
        raise
    except Exception as error:
        for device in ("A", "B"):
            with contextlib.suppress(Exception):  # it has been told
                torch.accelerator.synchronize(THERE[device])
        return Compared(kind="refused" if program.error else "raised", said=f"{type(error).__name__}: {error}")
    for key, expected in program.state.items():
        if isinstance(expected, Tensor):
            if not torch.allclose(found[key], expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
                return Compared(kind="silent", said=f"values on {key}: {found[key].tolist()}, not {expected.tolist()}")
        elif found[key] != expected:
            return Compared(kind="silent", said=f"{key} is {found[key]}, not {expected}")
    return Compared(kind="equal")


def fuzzed(seeds: Iterable[int]) -> tuple[Counter[str], list[str]]:
    """Compare programs; return how many there are of each kind, and a report of each that differs."""
    counts: Counter[str] = Counter()
    reports = []
    for seed in seeds:
        program = Writer(seed).write()
        found = compared(program)
        counts[found.kind] += 1
        if found.kind in ("silent", "raised"):
            reports.append(f"{program.text()}\n# {found.kind}: {found.said}")
    return counts, reports
