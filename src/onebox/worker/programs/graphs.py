"""Captured programs: the kernels of a program, recorded once and launched together, where a device can capture them.

A program is interpreted in its first two runs, which check it and show which inputs stay where they are. Then it is
captured. A graph reads and writes fixed addresses:

- an input with the address of the capture, such as a parameter, is read where it is; any other is copied into memory of
  the graph. If an input that was read in place moves, that run is interpreted, and it is copied from the next capture
  on;
- outputs are copied out of the graph's memory, one copy for all that share a storage; those that are views of inputs
  are made again from the inputs of the run. So tensors of the graph never leave this module;
- random operators have the seeds of their positions, as in an interpreted run.

A graph's memory is within the quota as long as nothing else needs it; see :class:`GraphMemory`. A program that cannot
be captured, or that would lose by the copies, is interpreted; :attr:`GraphMemory.refusals` has the reasons.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onebox.worker.accelerator import Accelerator, Graph
from onebox.worker.programs.interpreter import CompiledProgram, OperatorFailed
from onebox.worker.programs.tape import Seed
from onebox.worker.progress import WorkerProgress
from onebox.worker.sandbox.argument_checks import zeros_strided

COPIED_BYTES = 1 << 19
"""Most bytes of outputs for each operator. Launching an operator takes 2 to 3 µs of the host, in which a GPU copies
about four times as much."""

_FEWEST = 4
"""Operators from which a capture saves time."""

_CAPTURES = 4
"""Most captures of a program, each of which costs as much as some hundred runs."""

_PATIENCE = 64
"""Runs until a capture is tried again after memory was short."""

Room = Callable[[], int | None]
"""Returns the bytes that nothing uses within the quota; ``None`` while the host must not wait for the whole device, as
a capture does."""


class GraphMemory:
    """The captured programs of a worker, and their memory.

    Args:
        accelerator: The device.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.size_bytes = 0
        self.captures = 0
        self.replays = 0
        self.refusals: Counter[str] = Counter()
        """Reasons for which programs are interpreted, with the number of programs."""
        self._accelerator = accelerator
        self._programs: weakref.WeakKeyDictionary[CompiledProgram, ProgramGraph] = weakref.WeakKeyDictionary()

    def run(
        self,
        tape: CompiledProgram,
        inputs: list[Tensor],
        seed_of: Callable[[int], int],
        progress: WorkerProgress,
        room: Room,
        mode: object = None,
    ) -> list[Tensor] | None:
        """Run a program as a graph.

        Args:
            tape: The program.
            inputs: Its inputs.
            seed_of: Returns the seed of the random operator at a position.
            progress: Incremented for each operator.
            room: Asked before a capture.
            mode: All else that the choice of kernels depends on, such as the precision of products.

        Returns:
            Its outputs, laid out as required; ``None`` if it has to be interpreted this time.

        Raises:
            WireError: An input does not match the program.
        """
        if not self._accelerator.graphs:
            return None
        program = self._programs.get(tape)
        if program is None:
            program = self._programs[tape] = ProgramGraph(tape, self._accelerator, self)
        return program.run(inputs, seed_of, progress, room, mode)

    def release(self) -> None:
        """Drop all graphs, whose memory is needed; their programs are captured again after a while."""
        for program in self._programs.values():
            program.drop(_PATIENCE)

    def refuse(self, reason: str) -> None:
        """Record that a program cannot be captured."""
        self.refusals[reason] += 1


class _Output(NamedTuple):
    """An output of a captured program.

    Args:
        source: Its input, or its storage among those copied.
        of_input: Whether it is a view of that input.
        whole: Whether it is that input, or all of that storage, itself.
        shape: Its shape.
        strides: Its strides.
        offset: Its offset, relative to that of the input.
    """

    source: int
    of_input: bool
    whole: bool
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class _Captured:
    """A captured program.

    Args:
        graph: The graph.
        addresses: Address of each input that it reads in place.
        strides: Strides of all inputs.
        copies: Memory of the graph for the other inputs, by number.
        storages: A tensor over each storage of outputs.
        outputs: The outputs.
        mode: See :meth:`GraphMemory.run`.
    """

    def __init__(
        self,
        graph: Graph,
        addresses: dict[int, int],
        strides: list[tuple[int, ...]],
        copies: dict[int, Tensor],
        storages: list[Tensor],
        outputs: list[_Output],
        mode: object,
    ) -> None:
        self.graph = graph
        self.addresses = addresses
        self.strides = strides
        self.mode = mode
        self.size_bytes = graph.size_bytes + sum(copy.untyped_storage().nbytes() for copy in copies.values())
        self._places = list(addresses)
        self._expected = list(addresses.values())
        self._copied = list(copies)
        self._copies = list(copies.values())
        self._storages = storages
        self._outputs = outputs
        self._sources = sorted({output.source for output in outputs if output.of_input})

    def moved(self, inputs: Sequence[Tensor]) -> list[int]:
        """Return the inputs that are read in place and are no longer there."""
        if [inputs[place].data_ptr() for place in self._places] == self._expected:
            return []
        return [place for place, address in self.addresses.items() if inputs[place].data_ptr() != address]

    def replay(self, inputs: list[Tensor], seeds: Sequence[int]) -> list[Tensor]:
        """Copy inputs, launch the kernels, and return copies of the outputs; the list is emptied."""
        if self._copies:
            torch._foreach_copy_(self._copies, [inputs[place] for place in self._copied])
        self.graph.replay(seeds)
        bases = {source: inputs[source] for source in self._sources}
        inputs.clear()  # their memory can be used for the outputs
        made = [storage.clone() for storage in self._storages]
        outputs = []
        for source, of_input, whole, shape, strides, offset in self._outputs:
            base = bases[source] if of_input else made[source]
            if whole:
                outputs.append(base)
            else:
                outputs.append(base.as_strided(shape, strides, base.storage_offset() + offset))
        return outputs


class _Unfit(Exception):
    """A program cannot be captured; the message is the reason."""


class ProgramGraph:
    """A program, and its graph where it has one.

    Args:
        tape: The program.
        accelerator: The device.
        memory: Keeps account of its memory.
    """

    def __init__(self, tape: CompiledProgram, accelerator: Accelerator, memory: GraphMemory) -> None:
        self._tape = weakref.ref(tape)
        self._accelerator = accelerator
        self._memory = memory
        self._operators = len(tape.program.operators)
        self._positions = [operator.position for operator in tape.program.operators if operator.position >= 0]
        self._peak_bytes = tape.footprint(()).peak_bytes
        self._captured: _Captured | None = None
        self._seen: list[int] = []  # addresses of inputs in the run before
        self._moving: set[int] = set()
        self._runs = 0
        self._wait = 0
        self._captures = 0
        self._refused = False
        if self._operators < _FEWEST:
            self._refused = True  # not worth a reason

    def __del__(self) -> None:
        self.drop()

    def drop(self, runs: int = 0) -> None:
        """Drop the graph.

        Args:
            runs: Runs until it may be captured again.
        """
        if self._captured is not None:
            self._accelerator.current().synchronize()  # its kernels may still use its memory
            self._memory.size_bytes -= self._captured.size_bytes
            self._captured, self._wait = None, runs

    def run(
        self,
        inputs: list[Tensor],
        seed_of: Callable[[int], int],
        progress: WorkerProgress,
        room: Room,
        mode: object,
    ) -> list[Tensor] | None:
        """Run the program as a graph; see :meth:`GraphMemory.run`."""
        tape = self._tape()
        if self._refused or tape is None:
            return None
        tape.check_inputs(inputs)
        strides = [tensor.stride() for tensor in inputs]
        captured = self._captured
        if captured is not None and (captured.strides != strides or captured.mode != mode):
            self.drop()
            captured = None
        if captured is not None and (moved := captured.moved(inputs)):
            self._moving.update(moved)
            self.drop()
            captured = None
        if captured is None:
            captured = self._capture(tape, inputs, strides, progress, room, mode)
            if captured is None:
                return None
        progress.doing = "graph"
        outputs = captured.replay(inputs, [seed_of(position) for position in self._positions])
        progress.executed += self._operators
        self._memory.replays += 1
        return outputs

    def _capture(
        self,
        tape: CompiledProgram,
        inputs: Sequence[Tensor],
        strides: list[tuple[int, ...]],
        progress: WorkerProgress,
        room: Room,
        mode: object,
    ) -> _Captured | None:
        """Capture the program if it has run often enough and there is memory."""
        before, self._seen = self._seen, [tensor.data_ptr() for tensor in inputs]
        self._runs += 1
        self._wait -= 1
        if self._runs <= 2 or self._wait > 0:
            return None
        room_bytes = room()
        if room_bytes is None:  # perhaps in the next run
            return None
        places = zip(before, self._seen, strict=True)
        self._moving.update(place for place, (old, new) in enumerate(places) if old != new)
        copied_bytes = sum(inputs[place].nbytes for place in self._moving)
        if self._peak_bytes + copied_bytes > room_bytes:
            self._wait = _PATIENCE
            return None
        try:
            if self._captures >= _CAPTURES:
                raise _Unfit("its graph was dropped too often")
            self._captures += 1
            captured = self._record(tape, inputs, strides, progress, mode)
        except (_Unfit, RuntimeError) as error:  # a RuntimeError of the device, such as a wait by the host
            self._refused = True
            self._memory.refuse(str(error).split("\n", 1)[0])
            return None
        self._captured = captured
        self._memory.captures += 1
        self._memory.size_bytes += captured.size_bytes
        return captured

    def _record(
        self,
        tape: CompiledProgram,
        inputs: Sequence[Tensor],
        strides: list[tuple[int, ...]],
        progress: WorkerProgress,
        mode: object,
    ) -> _Captured:
        copies = {place: _memory_like(inputs[place]) for place in sorted(self._moving)}
        read = [copies.get(place, tensor) for place, tensor in enumerate(inputs)]
        done = progress.executed

        def work(draw: Callable[[], None]) -> list[Tensor]:
            def seed(position: int) -> None:
                draw()

            seeded: Seed = seed
            return tape.laid_out(tape.run(list(read), seeded, progress))

        try:
            graph, made = self._accelerator.capture(work, len(self._positions))
        except OperatorFailed as error:
            raise _Unfit(f"{error.operator}: {error.__cause__}") from error
        finally:
            progress.executed = done
        storages, outputs = _described(read, made)
        if sum(storage.nbytes for storage in storages) > self._operators * COPIED_BYTES:
            raise _Unfit("copying its outputs takes longer than launching its operators")
        addresses = {place: tensor.data_ptr() for place, tensor in enumerate(inputs) if place not in copies}
        return _Captured(graph, addresses, strides, copies, storages, outputs, mode)


def _memory_like(tensor: Tensor) -> Tensor:
    """Return new memory with the layout of a tensor, whose gaps are zero.

    Raises:
        _Unfit: Elements of the tensor share memory.
    """
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise _Unfit("an input whose elements share memory moves")
    return zeros_strided(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _described(inputs: Sequence[Tensor], made: Sequence[Tensor]) -> tuple[list[Tensor], list[_Output]]:
    """Return a tensor over each storage that outputs of a capture have, and how to make the outputs from copies.

    Raises:
        _Unfit: An output cannot be made so.
    """
    bases = {_storage(tensor): (place, tensor) for place, tensor in reversed(list(enumerate(inputs)))}
    places = {id(tensor): place for place, tensor in reversed(list(enumerate(inputs)))}
    groups: dict[int, list[Tensor]] = {}
    for tensor in made:
        if _storage(tensor) not in bases:
            groups.setdefault(_storage(tensor), []).append(tensor)
    own = {storage: _cover(tensors) for storage, tensors in groups.items()}
    number = {storage: place for place, storage in enumerate(own)}
    outputs = []
    for tensor in made:
        storage = _storage(tensor)
        of_input = storage in bases
        place, base = bases[storage] if of_input else (number[storage], own[storage])
        if tensor.dtype is not base.dtype or tensor.is_conj() or tensor.is_neg():
            raise _Unfit("an output is another tensor's memory as another type, or lazily conjugate or negative")
        whole = tensor is base
        if of_input and id(tensor) in places:
            place, whole = places[id(tensor)], True
        offset = int(tensor.storage_offset()) - int(base.storage_offset())
        outputs.append(_Output(place, of_input, whole, tensor.shape, tensor.stride(), offset))
    return list(own.values()), outputs


def _storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def _cover(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensor over all of a storage, of which the given ones are all: one of them if a copy of it is laid
    out as it is, otherwise a flat one.
    """
    first = tensors[0]
    storage = first.untyped_storage()
    alone = all(tensor is first for tensor in tensors) and storage.nbytes() == first.nbytes and not first.is_conj()
    if alone and torch.empty_like(first, device="meta").stride() == first.stride():
        return first
    length = storage.nbytes() // first.itemsize
    return torch.empty(0, dtype=first.dtype, device=first.device).set_(storage, 0, (length,), (1,))
