"""Does any operator that a worker runs read or write memory that is not its arguments'?

Every operator of both lists is called with arguments that a hostile client might send: sensible ones, and mutations of
them. The calls take the worker's own way: the interpreter of stored programs, and eager calls. What was compiled for
one is called again with other tensors, as it is by scripts. Each call runs twice, with other words in all memory that
belongs to no argument (see ``guarded_memory.py``):

- a process that ends is a crash: an access to an inaccessible page beside a tensor, or any other;
- words beside a tensor that changed, or an input that changed though the operator may not write to it, are a write
  outside (``canaries_changed``);
- results that depend on the words are a read outside, or of memory that nobody had written (``foreign_reads``).

With ``--kind`` only operators are called that run without rules, as their kind needs none (``operator_kinds.txt``).

With ``--racing`` another process changes elements of the tensors all the while, as a worker of the same group can do
with tensors that it has lent; a read outside is then one whose results contain such a word.

Calls run in child processes, a batch in each. A call is given by the seed, its operator and the round, and can be run
again: ``--only OPERATOR --round ROUND``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import hashlib
import itertools
import json
import mmap
import os
import random
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import commit, finish, machine, show
from guarded_memory import WORDS, Allocator, Arena, Image, build_allocator, ordinary, span_of
from operator_calls import Call, base_calls, load, run_directly
from operator_mutations import mutate, varied
from racing_peer import Peer, Place
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import (
    GeneratorArgument,
    Hole,
    KernelSpec,
    Many,
    Operator,
    Program,
    SlotArgument,
    Strided,
    TensorSpec,
    overload,
)
from onebox.wire.program import ITEM_BYTES
from onebox.wire.protocol.eager import Perform, Replay, alone
from onebox.worker.device import ComputeDevice
from onebox.worker.execution.eager import EagerExecutor
from onebox.worker.memory.buffers import BufferStore
from onebox.worker.memory.shared import LENT_STORAGES
from onebox.worker.programs.interpreter import CompiledProgram, OperatorFailed
from onebox.worker.programs.kernels import CompiledKernel, flatten, strided_of, written_inputs
from onebox.worker.programs.tape import Row
from onebox.worker.progress import WorkerProgress
from onebox.worker.sandbox.allow_list import EAGER, PROGRAMS, kinds, pinned_names
from onebox.worker.sandbox.argument_rules import kind_of

VARIANTS = 4
"""Calls of what is compiled for one of them."""

BATCH = 1000
"""Compiled calls of a child process."""

SHARED = 0.1
"""Share of calls in which a tensor lies in the memory of another one, as views of one buffer do."""

RACES = 20
"""Runs of a call while its tensors are changed."""

CPU_S = 1.0
"""Time of the processor from which a call is slow; it is ended."""

STALLED_S = 20.0
"""Time without another call from which a child is ended."""

LIMIT_BYTES = 64 << 20
"""Largest tensor; as if the quota of the worker were that."""

_READ_BYTES = 1 << 16
_CPU = torch.device("cpu")
_FIRST = 1000
_STATE = struct.Struct("<5Q")
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP})


# ---- ways to run a call


class _AnyResult(CompiledProgram):
    """A program that is not held to the results that it states: a client could find out the right ones by trying."""

    def _check(self, row: Row, registers: list[Any]) -> None:
        pass


class Programs:
    """Stored programs of one operator."""

    def __init__(self) -> None:
        self._known: tuple[str, int] | None = None
        self._program: _AnyResult

    def first(self, call: Call, tensors: Sequence[Tensor], round_: int) -> list[Any]:
        """Compile a call as a program and run it."""
        self._known = None
        self._program = _AnyResult(_program(call, round_), _CPU)
        self._known = call.name, round_
        return self._run(tensors)

    def stored(self, call: Call, tensors: Sequence[Tensor], round_: int) -> list[Any]:
        """Run the program of a call with the same constants."""
        return self._run(tensors) if self._known == (call.name, round_) else self.first(call, tensors, round_)

    def _run(self, tensors: Sequence[Tensor]) -> list[Any]:
        return flatten(self._program.run(list(tensors), lambda position: None, WorkerProgress()))


def _program(call: Call, round_: int) -> Program:
    specs = tuple(TensorSpec(image.dtype, tuple(image.shape)) for image in call.images)
    first = specs[0] if specs else TensorSpec("float32", ())
    returns = overload(call.name)._schema.returns
    count = len(returns)
    if count == 1 and str(returns[0].type) != "Tensor":
        lists = [len(value.items) for value in call.args if isinstance(value, Many)]
        count = lists[0] if lists and call.name.startswith("aten._foreach") else 1 + round_ % 3
    stated = TensorSpec("float32", first.shape) if round_ % 4 == 0 else first
    outs = tuple(range(len(specs), len(specs) + count))
    kwargs = {key: _for_programs(value) for key, value in call.kwargs.items()}
    operator = Operator(call.name, tuple(map(_for_programs, call.args)), kwargs, outs, (stated,) * count)
    return Program(specs, (operator,), outs, len(specs) + count)


def _for_programs(value: Any) -> Any:
    return None if isinstance(value, GeneratorArgument) else value


class Eager:
    """A worker's eager operators, of one process."""

    def __init__(self) -> None:
        self._device = ComputeDevice("cpu", 1)
        self._outs: tuple[Strided | None, ...] | None = None
        self._known: tuple[str, int] | None = None
        self._kernel: CompiledKernel
        self._floats: tuple[float, ...] = ()
        self._clear()

    def _clear(self) -> None:
        """Begin with no buffers and no definitions."""
        self._failed = False
        self._store = BufferStore()
        self._definitions: dict[int, Any] = {}
        self._executor = EagerExecutor(self._device, self._store, self._definitions, WorkerProgress(), self._report)

    def _report(self, failure: Any) -> None:
        self._failed = True

    def first(self, call: Call, tensors: Sequence[Tensor], round_: int) -> list[Any]:
        """Run a call whose results are not known."""
        kernel, floats = kernel_of(call, (), holes=bool(round_ & 1))
        inputs = self._put(tensors)
        try:
            self._outs = None
            results = self._executor.perform(Perform(kernel, inputs, floats, _FIRST)).results
            own = {id(tensor) for tensor in tensors}
            made = [
                self._store.get(number) if isinstance(one, Strided) else one
                for number, one in enumerate(results, _FIRST)
            ]
            made = [None if id(one) in own else one for one in made]
            if all(isinstance(one, Tensor | None) for one in made):
                self._outs = tuple(None if one is None else strided_of(one) for one in made)
            return made
        finally:
            self._clear()

    def again(self, call: Call, tensors: Sequence[Tensor], round_: int) -> list[Any]:
        """Run a call once more, now perhaps with known results, as for the first time or again."""
        outs = self._outs
        if outs is None or round_ % 3 == 0:
            return self.first(call, tensors, round_)
        kernel, floats = kernel_of(call, outs, holes=bool(round_ & 1))
        inputs = self._put(tensors)
        kept = [place for place, out in enumerate(outs) if out is not None]
        numbers = tuple(range(_FIRST, _FIRST + len(kept)))
        try:
            self._definitions[1] = self._executor.define(1, kernel)
            tape = self._executor.define(2, alone(1, kernel))
            if round_ % 3 == 2:
                tape.peak_bytes = 0  # as after a first run
            self._definitions[2] = tape
            self._executor.replay(Replay(2, inputs, numbers, floats))
            if self._failed:
                raise OperatorFailed(call.name, "")
            made = dict(zip(kept, map(self._store.get, numbers), strict=True))
            return [made.get(place) for place in range(len(outs))]
        finally:
            self._clear()

    def stored(self, call: Call, tensors: Sequence[Tensor], round_: int) -> list[Any]:
        """Run the kernel of a call with the same constants, whose results are not held to what a client expects."""
        if self._known != (call.name, round_):
            self._known = None
            spec, self._floats = kernel_of(call, (), holes=bool(round_ & 1))
            self._kernel = CompiledKernel(spec, _CPU, self._executor.generator)
            self._known = call.name, round_
        kernel = self._kernel
        result = kernel.run(*kernel.pick([*tensors, *self._floats, *kernel.constants]))
        own = {id(tensor) for tensor in tensors}
        return [None if id(one) in own else one for one in flatten(result)] if kernel.returns else []

    def _put(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        for number, tensor in enumerate(tensors, 1):
            self._store.put(number, tensor)
        return tuple(range(1, len(tensors) + 1))


def kernel_of(call: Call, outs: Sequence[Strided | None], *, holes: bool) -> tuple[KernelSpec, tuple[float, ...]]:
    """Return the kernel of a call, and its numbers if they come with the call."""
    floats: list[float] = []

    def argument(value: Any) -> Any:
        if holes and isinstance(value, float):
            floats.append(value)
            return Hole(len(floats) - 1)
        return value

    args = tuple(map(argument, call.args))
    kwargs = {key: argument(value) for key, value in call.kwargs.items()}
    return KernelSpec(call.name, args, kwargs, len(call.images), len(floats), tuple(outs)), tuple(floats)


class Way(NamedTuple):
    """A way to run calls.

    Args:
        first: Runs one for the first time.
        again: Runs it again.
        stored: Runs one with other tensors than that for which it was compiled.
    """

    first: Callable[[Call, Sequence[Tensor], int], list[Any]]
    again: Callable[[Call, Sequence[Tensor], int], list[Any]]
    stored: Callable[[Call, Sequence[Tensor], int], list[Any]]


def ways() -> dict[str, Way]:
    """Return the ways to run calls, by name."""
    eager, programs = Eager(), Programs()

    def direct(call: Call, tensors: Sequence[Tensor], _: int) -> list[Any]:
        return flatten(run_directly(call, tensors))

    return {
        "program": Way(programs.first, programs.stored, programs.stored),
        "eager": Way(eager.first, eager.again, eager.stored),
        "direct": Way(direct, direct, direct),
    }


# ---- one call


class Entry(NamedTuple):
    """An operator and a way to call it."""

    way: str
    name: str


class Shared(NamedTuple):
    """A tensor that lies in another's memory.

    Args:
        inner: Its number.
        outer: The number of the other one.
        start: The element of its own type at which it begins.
    """

    inner: int
    outer: int
    start: int

    def place(self, tensors: list[Tensor]) -> None:
        """Put a view in place of the tensor."""
        inner, outer = tensors[self.inner], tensors[self.outer].untyped_storage()
        view = torch.empty(0, dtype=inner.dtype)
        tensors[self.inner] = view.set_(outer, self.start, inner.shape, inner.stride())


def shared_memory(call: Call, round_: int, variant: int) -> Shared | None:
    """Return the tensor of a call that lies in another's memory, if there is one and it fits."""
    rng = random.Random(f"{call.name} {round_} {variant}")
    if len(call.images) < 2 or rng.random() >= SHARED:
        return None
    inner, outer = rng.sample(range(len(call.images)), 2)
    size, room = (len(call.images[number].data) for number in (inner, outer))
    width = ITEM_BYTES[call.images[inner].dtype]
    if not 0 < size <= room or room % width:
        return None
    return Shared(inner, outer, rng.choice((0, 1, rng.randrange(1 << 14))) % ((room - size) // width + 1))


class Outcome(NamedTuple):
    """Effect of one run of a call.

    Args:
        status: ``computed``, ``raised`` (by the operator), or ``refused`` (by the worker).
        results: All that the client can read afterwards; ``None`` if it did not compute.
        canaries: Places where something was written beside a tensor.
        changed: Inputs that changed although they must not.
        outside: Whether a result reaches beyond its memory.
    """

    status: str
    results: Any
    canaries: int
    changed: tuple[int, ...]
    outside: bool


class Prober:
    """Runs calls and looks at memory after each; in a child process."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._allocator = Allocator()
        self._allocator.enable(LIMIT_BYTES)
        self._ways = ways()
        self._written: frozenset[int] = frozenset()
        self._guarded = self._at_start = False
        self._shared: Shared | None = None

    def probe(self, entry: Entry, call: Call, round_: int, variant: int) -> tuple[str, list[str]]:
        """Run a call; return its status, and the kinds of what is wrong."""
        way = self._ways[entry.way]
        run, again = (way.stored, way.stored) if variant else (way.first, way.again)
        self._written = frozenset(written_inputs(KernelSpec(call.name, call.args, call.kwargs, len(call.images), 0)))
        self._guarded = (round_ + variant) % 3 != 2
        self._shared = shared_memory(call, round_, variant)
        self._at_start = (round_ + variant) % 4 == 3
        first = self._once(run, call, round_, 0)
        wrong = []
        if first.status == "computed":
            second = self._once(again, call, round_, 1)
            if first.outside or (first.results != second.results and self._foreign(run, call, round_, first)):
                wrong.append("foreign_reads")
            first = first._replace(canaries=first.canaries + second.canaries, changed=first.changed + second.changed)
        if first.canaries or first.changed:
            wrong.append("canaries_changed")
        return first.status, wrong

    def _foreign(self, run: Callable[..., list[Any]], call: Call, round_: int, first: Outcome) -> bool:
        """Return whether results differ because of the words in memory, not by chance."""
        again = self._once(run, call, round_, 0)
        other = self._once(run, call, round_, 1)
        if again.results == first.results:
            return other.results != first.results
        words = [word.to_bytes(8, "little")[:4] for word in WORDS]
        return any(word in part for word in words for part in _bytes_in(first.results))

    def _once(self, run: Callable[..., list[Any]], call: Call, round_: int, filling: int) -> Outcome:
        arena, allocator = self._arena, self._allocator
        allocator.fill(WORDS[filling], self._at_start)
        guarded, written = self._guarded, self._written
        damaged = allocator.damaged
        results, outside, status = None, False, "computed"
        tensors: list[Tensor] = []
        try:
            if guarded:
                with contextlib.suppress(MemoryError):
                    tensors = arena.place(call.images, filling, self._at_start)
            guarded = len(tensors) == len(call.images) > 0
            if not guarded:
                tensors = [ordinary(image) for image in call.images]
            elif self._shared is not None:
                self._shared.place(tensors)
            torch.default_generator.manual_seed(1)
            made = run(call, tensors, round_)
            readable = [*made, *(tensors[index] for index in sorted(written) if index < len(tensors))]
            outside = any(_outside(one) for one in readable)
            results = None if outside else [self._read(one) for one in readable]
            del made, readable
        except WireError:
            status = "refused"
        except Exception as error:
            status = "refused" if isinstance(error.__cause__, WireError) else "raised"
        canaries, changed = 0, []
        if guarded:
            canaries, changed = arena.changed([image.data for image in call.images], written)
            if self._shared is not None and written:
                changed = []  # what is written may be theirs, too
        else:
            changed = [
                number
                for number, (image, tensor) in enumerate(zip(call.images, tensors, strict=True))
                if number not in written and _content(tensor, len(image.data)) != image.data
            ]
        tensors.clear()
        return Outcome(status, results, canaries + allocator.damaged - damaged, tuple(changed), outside)

    def close(self) -> None:
        """End what it has started."""

    def _read(self, value: Any) -> Any:
        """Return all that a client can read of a result: also what lies between and behind the elements."""
        if not isinstance(value, Tensor):
            return repr(value)
        storage = value.untyped_storage()
        address = storage.data_ptr()
        size = min(storage.nbytes(), _READ_BYTES)
        if self._arena.holds(address):  # an input: what was written there is compared by itself
            size = span_of(value.shape, value.stride()) * value.itemsize
            address += value.storage_offset() * value.itemsize
        layout = str(value.dtype), tuple(value.shape), value.stride(), value.storage_offset(), storage.nbytes()
        return layout, ctypes.string_at(address, size) if address else b""


class Racer(Prober):
    """Runs calls whose tensors another process changes meanwhile; in a child process."""

    _OTHERS = (b"\xff" * 8, bytes(8), b"\0\0\0\0\0\1\0\0", b"\0\0\1\0\0\0\0\0", b"\x40" * 8, b"\1\0\0\0\0\0\0\0")
    """Other elements: as integers -1, 0, 1, and some that are large in 4 or 8 bytes; as floats also NaN."""

    def __init__(self) -> None:
        super().__init__()
        self._arena = Arena(shared=True)
        self._peer = Peer(self._arena.memory)

    def probe(self, entry: Entry, call: Call, round_: int, variant: int) -> tuple[str, list[str]]:
        """Run a call several times; return the status of the last, and the kinds of what is wrong."""
        way, rng = self._ways[entry.way], random.Random(f"{call.name} {round_} {variant}")
        at_start = (round_ + variant) % 4 == 3
        self._allocator.fill(WORDS[0], at_start)
        damaged, wrong, status = self._allocator.damaged, set(), "refused"
        try:
            for turn in range(RACES):
                tensors = self._lend(call, at_start)
                if turn == 0:
                    self._peer.change(self._places(call, tensors, rng))
                run = way.stored if turn or variant else way.first
                status, results = self._raced(run, call, tensors, round_)
                words = [word.to_bytes(8, "little")[:4] for word in WORDS]
                if any(word in part for word in words for part in _bytes_in(results)):
                    wrong.add("foreign_reads")
                if self._arena.changed([image.data for image in call.images], frozenset())[0]:
                    wrong.add("canaries_changed")
                tensors.clear()
        except MemoryError:  # no slot for one of them
            return "refused", []
        finally:
            self._peer.change([])
            LENT_STORAGES.clear()
        if self._allocator.damaged > damaged:
            wrong.add("canaries_changed")
        return status, sorted(wrong)

    def close(self) -> None:
        self._peer.close()

    def _lend(self, call: Call, at_start: bool) -> list[Tensor]:
        """Return tensors in memory of the other process."""
        tensors = self._arena.place(call.images, 0, at_start)
        LENT_STORAGES.clear()
        LENT_STORAGES.update(tensor.untyped_storage()._cdata for tensor in tensors)
        return tensors

    def _places(self, call: Call, tensors: Sequence[Tensor], rng: random.Random) -> list[Place]:
        """Return some elements, of integers if there are any."""
        sized = [number for number, image in enumerate(call.images) if image.data]
        numbers = [number for number in sized if "float" not in call.images[number].dtype] or sized
        places = []
        for number in rng.sample(numbers, min(2, len(numbers))):
            width = ITEM_BYTES[call.images[number].dtype]
            element = rng.choice((0, -1, rng.randrange(1 << 14))) % (len(call.images[number].data) // width)
            other = rng.choice(self._OTHERS) * 2
            places.append(Place(self._arena.offset(tensors[number]) + element * width, other[: min(width, 8)]))
        return places

    def _raced(
        self, run: Callable[..., list[Any]], call: Call, tensors: list[Tensor], round_: int
    ) -> tuple[str, list[Any] | None]:
        try:
            made = run(call, tensors, round_)
            return "computed", None if any(map(_outside, made)) else [self._read(one) for one in made]
        except WireError:
            return "refused", None
        except Exception as error:
            return "refused" if isinstance(error.__cause__, WireError) else "raised", None


def _content(tensor: Tensor, size: int) -> bytes:
    return ctypes.string_at(tensor.untyped_storage().data_ptr(), size) if size else b""


def _outside(value: Any) -> bool:
    """Return whether a tensor reaches beyond its storage."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or not value.numel():
        return False
    span = span_of(value.shape, value.stride())
    return (value.storage_offset() + span) * value.itemsize > value.untyped_storage().nbytes()


def _bytes_in(results: Any) -> list[bytes]:
    return [part[1] for part in results or () if isinstance(part, tuple)]


def describe(call: Call) -> str:
    """Return a call as text."""

    def text(value: Any) -> str:
        if isinstance(value, SlotArgument):
            image = call.images[value.index]
            size = len(image.data)
            shown = ""
            if "int" in image.dtype and 0 < size <= 64:
                whole = torch.frombuffer(bytearray(image.data), dtype=getattr(torch, image.dtype))
                shown = f"={whole.tolist()}"
            return f"{image.dtype}{list(image.shape)}/{list(image.strides)}{shown}"
        if isinstance(value, Many):
            return f"[{', '.join(map(text, value.items))}]"
        return repr(value)[:80]

    named = [f"{key}={text(value)}" for key, value in call.kwargs.items()]
    return f"{call.name}({', '.join([*map(text, call.args), *named])})"[:600]


def _place_of(call: Call, round_: int, variant: int) -> str:
    """Return a call as text, and what is needed to run it again."""
    shared = shared_memory(call, round_, variant)
    return f"round {round_}, variant {variant}: {describe(call)}" + (f", {shared}" if shared else "")


# ---- many calls


class Fuzzer:
    """Runs rounds of calls of all entries in child processes, one after the other.

    Args:
        entries: The operators, and the ways to call them.
        base: Sensible calls of each operator.
        seed: Of the mutations.
        patience: Crashes or slow calls of an entry after which it is left out: each costs a process.
        racing: Whether another process changes the tensors meanwhile.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        base: dict[str, list[Call]],
        seed: int,
        patience: int,
        *,
        racing: bool = False,
    ) -> None:
        self._racing = racing
        self._entries = entries
        self._base = base
        self._seed = seed
        self._patience = patience
        self._last: tuple[int, Call] | None = None
        self._state = mmap.mmap(-1, mmap.PAGESIZE)
        self._left_out: set[Entry] = set()
        self._deaths: Counter[Entry] = Counter()
        self.statuses: Counter[str] = Counter()
        self.calls = 0
        self.found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))

    def call(self, number: int, variant: int) -> tuple[Entry, Call, int]:
        """Return a variant of the call with a number: its entry, itself, and its round."""
        round_, place = divmod(number, len(self._entries))
        entry = self._entries[place]
        text = f"{self._seed} {entry.way} {entry.name} {round_}"
        if self._last is None or self._last[0] != number:
            self._last = number, mutate(self._base[entry.name], random.Random(text))
        call = self._last[1]
        if variant:
            call = varied(call, random.Random(f"{text} {variant}"), shapes=entry.way != "program")
        return entry, call, round_

    def run(self, numbers: range, seconds: float) -> None:
        """Run all variants of the calls with some numbers; begin no further batch after so many seconds."""
        at, end_s = 0, time.monotonic() + seconds
        while at < len(numbers) and time.monotonic() < end_s:
            at = self._batch(numbers, at)

    def _batch(self, numbers: range, at: int) -> int:
        """Run the next calls in a child; return the place after the last one that it began."""
        stop = min(len(numbers), at + BATCH)
        with tempfile.TemporaryFile() as findings:
            status, ended_by, place, variant = self._in_child(numbers, at, stop, findings.fileno())
            findings.seek(0)
            for line in findings:
                self._note(*json.loads(line))
        self.statuses.update(status)
        self.calls += sum(status.values())
        if ended_by is None:
            return stop
        self._end_of_child(numbers[place], variant, ended_by)
        return place + 1

    def _note(self, kind: str, text: str, name: str) -> None:
        """Note a fault; print it at once, as a run may take hours."""
        self.found[kind][name].append(text)
        if text:
            print(f"{kind}: {name}: {text}", file=sys.stderr, flush=True)

    def _end_of_child(self, number: int, variant: int, ended_by: int) -> None:
        """Note that a child ended within a call; run it alone to see whether that was its fault."""
        entry, call, round_ = self.call(number, variant)
        kind = "crashes" if ended_by in _CRASHES else "slow"
        name = f"{entry.name} ({entry.way})"
        self.calls += 1
        self.statuses[kind] += 1
        if kind == "crashes":
            with tempfile.TemporaryFile() as findings:
                one = range(number, number + 1)
                _, alone, _, _ = self._in_child(one, 0, 1, findings.fileno(), [variant])
            if alone is None:
                name = f"after {name}"  # something before it has damaged memory
        signal_name = signal.Signals(ended_by).name
        self._note(kind, f"{signal_name}, {_place_of(call, round_, variant)}", name)
        self._deaths[entry] += 1
        if self._deaths[entry] >= self._patience:
            self._left_out.add(entry)

    def _in_child(
        self, numbers: range, at: int, stop: int, findings: int, variants: Sequence[int] = range(VARIANTS)
    ) -> tuple[dict[str, int], int | None, int, int]:
        """Run calls in a child process.

        Returns:
            How many had which status; the signal that ended the child, ``None`` if nothing did; and the place and
            variant of the call that it ended in.
        """
        _STATE.pack_into(self._state, 0, at, 0, 0, 0, 0)
        child = os.fork()
        if child == 0:
            try:
                self._child(numbers, at, stop, findings, variants)
            except BaseException as error:  # the fuzzer's own fault
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
                os._exit(3)
            os._exit(0)
        ended = _await(child, lambda: _STATE.unpack_from(self._state))
        place, variant, computed, raised, refused = _STATE.unpack_from(self._state)
        if os.WIFEXITED(ended) and os.WEXITSTATUS(ended) == 3:
            raise RuntimeError(f"the fuzzer failed at {describe(self.call(numbers[place], variant)[1])}")
        status = {"computed": computed, "raised": raised, "refused": refused}
        if os.WIFSIGNALED(ended):
            return status, os.WTERMSIG(ended), place, variant
        return status, None if os.WEXITSTATUS(ended) == 0 else signal.SIGABRT, place, variant

    def _child(self, numbers: range, at: int, stop: int, findings: int, variants: Sequence[int]) -> None:
        for number in (signal.SIGALRM, signal.SIGINT, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        faulthandler.disable()
        errors = os.dup(2)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)  # MKL prints there
        os.dup2(nowhere, 2)
        Tensor.__repr__ = lambda _: "tensor"  # errors about types print tensors
        prober = Racer() if self._racing else Prober()
        _limit()
        counts = dict.fromkeys(("computed", "raised", "refused"), 0)
        told: set[tuple[str, str]] = set()
        with torch.inference_mode():
            for place, variant in itertools.product(range(at, stop), variants):
                entry, call, round_ = self.call(numbers[place], variant)
                if entry in self._left_out:
                    continue
                _STATE.pack_into(self._state, 0, place, variant, *counts.values())
                signal.setitimer(signal.ITIMER_PROF, CPU_S)
                try:
                    status, wrong = prober.probe(entry, call, round_, variant)
                except BaseException as error:
                    os.dup2(errors, 2)
                    raise RuntimeError(f"{describe(call)}: {error!r}") from error
                counts[status] += 1
                for kind in wrong:
                    name = f"{entry.name} ({entry.way})"
                    text = "" if (kind, name) in told else _place_of(call, round_, variant)
                    told.add((kind, name))
                    os.write(findings, json.dumps([kind, text, name]).encode() + b"\n")
        signal.setitimer(signal.ITIMER_PROF, 0)
        prober.close()
        _STATE.pack_into(self._state, 0, stop, 0, *counts.values())

    @property
    def left_out(self) -> list[str]:
        """Entries that were left out after too many crashes or slow calls."""
        return sorted(f"{entry.name} ({entry.way})" for entry in self._left_out)


def _limit() -> None:
    """Limit memory and processor time of this process."""
    torch.empty(1)  # the allocator reserves its addresses
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * mmap.PAGESIZE + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (600, 600))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _await(child: int, progress: Callable[[], Any]) -> int:
    """Wait for a child; end it when it makes no progress. Return its status."""
    descriptor = os.pidfd_open(child)
    try:
        before = None
        while not select.select([descriptor], [], [], STALLED_S)[0]:
            now = progress()
            if now == before:
                os.kill(child, signal.SIGKILL)
            before = now
    finally:
        os.close(descriptor)
    return os.waitpid(child, 0)[1]


# ---- a run


def all_entries(only: Sequence[str], *, direct: bool) -> list[Entry]:
    """Return the entries of both lists, or of some operators, in a fixed random order."""
    programs, eager = pinned_names(PROGRAMS), pinned_names(EAGER)
    if direct:
        found = [Entry("direct", name) for name in (only or eager)]
    else:
        found = [Entry("program", name) for name in programs] + [Entry("eager", name) for name in eager]
        found = [entry for entry in found if not only or entry.name in only]
    known = []
    for entry in sorted(found):
        with contextlib.suppress(WireError):  # of another torch
            overload(entry.name)
            known.append(entry)
    random.Random(0).shuffle(known)
    return known


def _warm_up() -> None:
    """Import all that first calls import, so that not every child does."""
    image = Image("float32", (2,), (1,), bytes(8))
    sum_ = Call("aten.add.Tensor", (SlotArgument(0), SlotArgument(0)), {}, (image,))
    wrong = Call("aten.mm.default", (SlotArgument(0), SlotArgument(0)), {}, (image,))
    with torch.inference_mode():
        for way in ways().values():
            for call in (sum_, wrong):
                for run in way:
                    with contextlib.suppress(RuntimeError, OperatorFailed):
                        run(call, [ordinary(image)], 1)


def calls_file() -> Path:
    """Return the file of sensible calls, made on first use in a process of its own."""
    source = Path(__file__).with_name("operator_calls.py")
    digest = hashlib.sha256(source.read_bytes() + torch.__version__.encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onebox"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"operator-calls-{digest.hexdigest()[:16]}.msgpack"
    if not path.exists():
        print("Recording calls of every operator, once; this takes minutes.", file=sys.stderr, flush=True)
        processes = str(len(os.sched_getaffinity(0)))
        subprocess.run([sys.executable, str(source), str(path), processes], check=True, timeout=3600)
    return path


def fuzz(fuzzer: Fuzzer, numbers: range, seconds: float) -> dict[str, Any]:
    """Run the calls with some numbers in this process's children; return what they found."""
    warnings.simplefilter("ignore")
    begin_s = time.monotonic()
    _warm_up()
    gc.freeze()
    fuzzer.run(numbers, seconds)
    return {
        "calls": fuzzer.calls,
        "statuses": dict(fuzzer.statuses),
        "found": fuzzer.found,
        "left_out": fuzzer.left_out,
        "debug_allocator": Allocator().present,
        "seconds": time.monotonic() - begin_s,
    }


def in_processes(arguments: Sequence[str], processes: int) -> dict[str, Any]:
    """Run a share of the calls in each of several processes, which have the debug allocator; return what they found.

    Args:
        arguments: Of the command line.
        processes: Their number.
    """
    library = build_allocator()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if library is not None:
        environment["LD_PRELOAD"] = str(library)
    command = [sys.executable, str(Path(__file__)), *arguments, "--processes", str(processes)]
    shares = [
        subprocess.Popen([*command, "--share", str(share)], stdout=subprocess.PIPE, env=environment, text=True)
        for share in range(processes)
    ]
    try:
        outputs = [share.communicate()[0] for share in shares]
    finally:
        for share in shares:
            share.kill()
            share.wait()
    if any(share.returncode for share in shares):
        raise RuntimeError(f"processes ended with {[share.returncode for share in shares]}")
    return merged([json.loads(output) for output in outputs])


def merged(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of what several processes found, and the operators with an example of each kind."""
    operators: dict[str, dict[str, Any]] = {}
    kinds = ("crashes", "canaries_changed", "foreign_reads", "slow")
    totals = dict.fromkeys(kinds, 0)
    for kind in kinds:
        names = sorted({name for one in found for name in one["found"].get(kind, {})})
        for name in names:
            texts = [text for one in found for text in one["found"].get(kind, {}).get(name, [])]
            totals[kind] += len(texts)
            example = next(filter(None, texts), "")
            operators.setdefault(kind, {})[name] = {"count": len(texts), "example": example}
    statuses: Counter[str] = Counter()
    for one in found:
        statuses.update(one["statuses"])
    seconds = max(one["seconds"] for one in found)
    calls = sum(one["calls"] for one in found)
    return {
        "calls": calls,
        **totals,
        "computed": statuses["computed"],
        "raised": statuses["raised"],
        "refused": statuses["refused"],
        "calls_per_s": round(calls / seconds, 1),
        "seconds": round(seconds, 1),
        "left_out": sorted({name for one in found for name in one["left_out"]}),
        "debug_allocator": all(one["debug_allocator"] for one in found),
        "operators": operators,
    }


def report(result: dict[str, Any], seed: int, *, examples: bool) -> None:
    """Print a table of the counts, and one of the operators."""
    names = ("calls", "computed", "raised", "refused", "slow", "crashes", "canaries_changed", "foreign_reads")
    show(
        f"Operators with hostile arguments, seed {seed}: {result['seconds']:.0f} s, {result['calls_per_s']:.0f} a s",
        [name.replace("_", " ") for name in names],
        [[f"{result[name]:,}" for name in names]],
    )
    for kind, operators in result["operators"].items():
        print(f"{kind}:")
        for name, one in operators.items():
            print(f"  {name}: {one['count']}" + (f"\n      {one['example']}" if examples else ""))
    if result["left_out"]:
        print(f"left out after too many crashes or slow calls: {', '.join(result['left_out'])}")
    if not result["debug_allocator"]:
        print("without a C compiler PyTorch's own allocations have no guard pages")


def main() -> None:
    """Call operators and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no batch of calls after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], metavar="OPERATOR", help="such as aten.add.Tensor")
    parser.add_argument("--kind", action="append", default=[], help="operators of a kind that needs no rules, or 'all'")
    parser.add_argument("--round", type=int, help="only this round of each operator")
    parser.add_argument("--patience", type=int, default=20, help="crashes or slow calls until an operator is left out")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--direct", action="store_true", help="call operators without a worker's checks")
    parser.add_argument("--racing", action="store_true", help="let another process change the tensors meanwhile")
    parser.add_argument("--examples", action="store_true", help="print an example of each fault")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--no-database", action="store_true", help="start from calls of examples and random ones only")
    options = parser.parse_args()
    entries = all_entries(options.only, direct=options.direct)
    if options.kind:
        wanted = set(kinds().values()) if "all" in options.kind else set(options.kind)
        entries = [entry for entry in entries if kind_of(overload(entry.name)) in wanted]
    if not entries:
        parser.error("no such operator is on a list")
    if options.share is not None:
        print(json.dumps(share_of(entries, options)))
        return
    if not options.no_database:
        calls_file()
    result = in_processes(sys.argv[1:], options.processes)
    report(result, options.seed, examples=options.examples)
    result |= {"seed": options.seed, "machine": machine(), "commit": commit()}
    finish(result, as_json=options.json)


def share_of(entries: Sequence[Entry], options: argparse.Namespace) -> dict[str, Any]:
    """Run this process's share of the calls."""
    names = {entry.name for entry in entries}
    torch.set_num_threads(1)
    base = base_calls(names, database=False) if options.no_database else load(calls_file(), names)
    numbers = range(options.share, options.calls // VARIANTS, options.processes)
    if options.round is not None:
        first = options.round * len(entries)
        numbers = range(first + options.share, first + len(entries), options.processes)
    return fuzz(Fuzzer(entries, base, options.seed, options.patience, racing=options.racing), numbers, options.seconds)


if __name__ == "__main__":
    main()
