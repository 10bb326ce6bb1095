"""The memory of each worker when a step or an evaluation of a plan begins, from which it can be followed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from onebox.cost import host_copy_bytes
from onebox.engine.compile.compiler import CompiledStep, Compiler, Probe
from onebox.engine.memory.simulator import InitialContents, PersistentBuffer, peak_of
from onebox.engine.workload.batch import Batch

ConstantBytes = Mapping[int, Mapping[int, int]]
"""For each worker the bytes of constants that earlier batches have brought there, by number of the buffer."""


class StateBytes(NamedTuple):
    """Bytes of state of a worker.

    Args:
        on_device: Those on its device.
        on_host: Those in its host's memory.
    """

    on_device: int = 0
    on_host: int = 0


BytesBeside = Callable[[Compiler], Mapping[int, StateBytes]]
"""Returns the state on each worker beside that of a plan, given its compiler."""


def no_bytes_beside(compiler: Compiler) -> Mapping[int, StateBytes]:
    """Return no bytes: the plan's state is all that workers hold."""
    return {}


def step_contents(
    compiler: Compiler, batch: Batch, resident: ConstantBytes | None = None, *, windows: bool = False
) -> dict[int, InitialContents]:
    """Return what each worker has when a step with a batch begins.

    Args:
        compiler: The plan's.
        batch: The batch.
        resident: Constants that stay there from earlier batches.
        windows: Whether steps overlap.
    """
    compiled = compiler.step(batch, windows=windows)
    own = compiler.constant_bytes(batch, compiled)
    return _contents(compiler, batch, compiled, _with(resident, own, compiled), late=windows, stepped=True)


def evaluation_contents(
    compiler: Compiler, batch: Batch, resident: ConstantBytes, *, at_once: bool, stepped: bool
) -> dict[int, InitialContents]:
    """Return what each worker has when the evaluation of a batch begins.

    Args:
        compiler: The plan's.
        batch: The batch.
        resident: Constants that stay there from earlier batches.
        at_once: Whether each replica takes its part as one micro-batch.
        stepped: Whether the optimizer's state is there.
    """
    compiled = compiler.evaluation(batch, at_once=at_once)
    own = compiler.constant_bytes(batch, compiled, train=False)
    return _contents(compiler, batch, compiled, _with(resident, own, compiled), late=False, stepped=stepped)


def probe_contents(
    compiler: Compiler, batch: Batch, probe: Probe, resident: ConstantBytes, *, windows: bool
) -> dict[int, InitialContents]:
    """Return what each worker has when the probe of a batch begins.

    Args:
        compiler: The plan's.
        batch: The batch.
        probe: The routines of the probe.
        resident: Constants that stay there from earlier batches.
        windows: Whether steps overlap.
    """
    own = {number: tensor.nbytes for number, tensor in probe.constants.items()}
    constants = _with(resident, own, probe.compiled)
    return _contents(compiler, batch, probe.compiled, constants, late=windows, stepped=True)


def step_peaks(contents: Mapping[int, InitialContents], *, ahead: int = 0) -> dict[int, int]:
    """Return the most bytes that each worker will use in a step, from buffer lifetimes alone.

    Args:
        contents: What each has when the step begins.
        ahead: How many batches like the step's lie there already for later steps.
    """
    found = {}
    for worker, own in contents.items():
        waiting = sum(own.leaves[leaf] for leaf in own.routine.leaves)
        found[worker] = peak_of(own) + ahead * waiting
    return found


def _with(resident: ConstantBytes | None, own: Mapping[int, int], compiled: CompiledStep) -> ConstantBytes:
    """Return the constants of each worker, with those of a batch."""
    return {worker: {**(resident or {}).get(worker, {}), **own} for worker in compiled.routines}


def _contents(
    compiler: Compiler,
    batch: Batch,
    compiled: CompiledStep,
    constants: ConstantBytes,
    *,
    late: bool,
    stepped: bool,
) -> dict[int, InitialContents]:
    state, holdings, versions = compiler.state, compiler.holdings, compiler.versions
    on_host = compiler.plan.update == "host"  # then the devices hold nothing of the optimizer's state
    leaves = _leaf_bytes(batch, compiled)
    found = {}
    for worker, routine in compiled.routines.items():
        trained = {
            name: holdings.spec(worker, name, state.spec(name)).size_bytes
            for name in holdings.stepped_by(worker, compiler.trained)
        }
        optimizer_bytes = sum(compiler.footprints[name].size_bytes(own, late=late) for name, own in trained.items())
        cpu = compiler.devices[worker].kind == "cpu"
        copied_bytes = 0 if cpu else host_copy_bytes(tuple(trained.values()))
        found[worker] = InitialContents(
            routine=routine,
            held=_held(compiler, worker, constants[worker], late=late),
            leaves=leaves,
            gradients=compiler.gradients,
            optimizer_bytes=0 if on_host else stepped * optimizer_bytes,
            host_bytes=optimizer_bytes + copied_bytes if on_host else 0,
            ranks={number: ms.index(worker) for ms, number in compiler.groups.items() if worker in ms},
            earlier=compiled.earlier(worker),
            versions={
                previous: versions.ahead.get(name, state.numbers[name]) for name, previous in versions.previous.items()
            },
        )
    return found


def _leaf_bytes(batch: Batch, compiled: CompiledStep) -> dict[tuple[int, int], int]:
    """Return the bytes of each tensor of each micro-batch."""
    leaves = {
        (part.index, leaf): tensor[part.start : part.start + part.size].nbytes
        for part in compiled.micro_batches
        for leaf, tensor in enumerate(batch.leaves)
    }
    if compiled.travelling is not None:
        weight = (compiled.travelling.leaf, compiled.travelling.dtype.itemsize)
        leaves |= {(part.index, weight[0]): weight[1] for part in compiled.micro_batches}
    return leaves


def _held(compiler: Compiler, worker: int, constants: Mapping[int, int], *, late: bool) -> dict[int, PersistentBuffer]:
    """Return what stays on a worker from step to step, by number of the buffer."""
    state, holdings = compiler.state, compiler.holdings
    held = {
        state.numbers[name]: PersistentBuffer(
            "parameter" if name in state.parameters else "buffer",
            name,
            holdings.spec(worker, name, state.spec(name)).size_bytes,
        )
        for name in holdings.held_by(worker, state.tensors)
    }
    if late:
        held |= {
            number: PersistentBuffer("parameter", called, held[state.numbers[name]].size_bytes)
            for name in holdings.held_by(worker, compiler.trained)
            for number, called in compiler.versions.of(name).items()
        }
    held |= {
        number: PersistentBuffer("residual", "state of a lossy codec", state.spec.size_bytes)
        for number, state in compiler.residuals(worker).items()
    }
    return held | {number: PersistentBuffer("constant", "", size_bytes) for number, size_bytes in constants.items()}
