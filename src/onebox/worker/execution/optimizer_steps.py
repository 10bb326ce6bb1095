"""Updates of parameters: execution of ``OptimizerStep``, ``Branch`` and ``Rename``."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from torch import Tensor

from onebox.errors import WireError
from onebox.wire import spec_of
from onebox.wire.protocol.instructions import Branch, OptimizerStep, Options, Rename
from onebox.wire.protocol.requests import Run
from onebox.worker.device import ComputeDevice
from onebox.worker.execution.communication import Resolve
from onebox.worker.execution.pending_reply import Outcome
from onebox.worker.memory.buffers import BufferStore
from onebox.worker.memory.offload import Offloader
from onebox.worker.optimizer.delay_compensation import AHEAD
from onebox.worker.optimizer.native import NativeOptimizer
from onebox.worker.optimizer.versions import ParameterVersions
from onebox.worker.progress import Trace

_KEPT = 4
"""Number of steps whose options are kept; a schedule has two in flight."""

Changes = list[tuple[int, tuple[Options, ...]]]
"""Options of each group, with the step from which they apply."""


class OptimizerSteps:
    """Executes ``OptimizerStep``, ``Branch`` and ``Rename``.

    Args:
        device: Device of the tensors.
        store: The buffers.
        offloader: Provides buffers that are in host memory.
        definition: Returns an optimizer by its number.
        before_update: Completes or copies pending reads of buffers that are about to be overwritten.
        takes_effect: Returns whether a step of an optimizer is to be applied, given the numbers of both.
    """

    def __init__(
        self,
        device: ComputeDevice,
        store: BufferStore,
        offloader: Offloader,
        definition: Callable[[int, type[NativeOptimizer]], NativeOptimizer],
        before_update: Callable[[], None],
        takes_effect: Callable[[int, int], bool],
    ) -> None:
        self.versions = ParameterVersions()
        self._device = device
        self._store = store
        self._offloader = offloader
        self._definition = definition
        self._before_update = before_update
        self._takes_effect = takes_effect
        self._changes: dict[int, Changes] = {}
        self._applied: dict[int, tuple[Options, ...]] = {}

    def begin(self, run: Run, steps: Sequence[Any], definitions: Container[int]) -> None:
        """Store a message's options for those of its optimizers that exist."""
        if not run.options:
            return
        optimizers = {run.optimizer, *(step.optimizer for step in steps if isinstance(step, OptimizerStep))}
        for optimizer in (number for number in optimizers if number in definitions):
            earlier = [change for change in self._changes.get(optimizer, []) if change[0] < run.step]
            self._changes[optimizer] = [*earlier[-_KEPT:], (run.step, run.options)]

    def end(self, optimizer: int) -> None:
        """Remove an optimizer, if it exists."""
        self.versions.end(optimizer)
        self._changes.pop(optimizer, None)
        self._applied.pop(optimizer, None)

    def step(self, step: OptimizerStep, resolve: Resolve, run: Run, trace: Trace) -> list[Outcome]:
        """Execute a step of an optimizer, unless a worker has objected to the step of its gradients.

        Returns:
            The norm of the gradients if they are clipped, and their delay if parameters have versions; nothing without
            a step.

        Raises:
            Poisoned: An input is void.
            QuotaExceeded: There is no room for its state.
            WireError: The instruction is invalid.
        """
        if not self._takes_effect(step.optimizer, run.step - step.age):
            self._keep(step, resolve)
            return []
        optimizer = self._definition(step.optimizer, NativeOptimizer)
        chosen = optimizer.chosen(step.members)
        read = self._offloader.readable if optimizer.on_host else self._store.get
        gradients = [read(resolve(reference)) for reference in step.gradients]
        numbers = [optimizer.numbers[index] for index in chosen]
        previous = [resolve(reference) for reference in step.previous]
        ahead = [resolve(reference) for reference in step.ahead]
        self._check(step, optimizer, chosen, previous, ahead)
        trace.ready()
        self._use_options(step, optimizer, run)
        self._before_update()
        before_bytes = optimizer.charged_bytes
        norm = self._store.get(resolve(step.square_norm)).sqrt() if step.square_norm else None
        if previous and not ahead:
            for index, number in zip(chosen, previous, strict=True):
                optimizer.move(index, self._store.get(number))
            self._rename(dict(zip((*numbers, *previous), (*previous, *numbers), strict=True)))
        found = optimizer.step(gradients, step.max_norm, norm, members=chosen, late=bool(previous))
        self._store.charge(optimizer.charged_bytes - before_bytes)
        delays = self.versions.applied(step.optimizer, chosen, run.step - step.age)
        if ahead:
            self._rename(dict(zip((*ahead, *previous), (*previous, *ahead), strict=True)))
            for index, number in zip(chosen, ahead, strict=True):
                optimizer.expect(index, self._store.get(number))
        self.versions.renewed(step.optimizer, chosen, [(n, self._store.get(n)) for n in numbers] if delays else ())
        if ahead:
            self.versions.renewed(step.optimizer, chosen, [(n, self._store.get(n)) for n in ahead])
        return [*([] if found is None else [self._device.scalars([found])]), *([] if delays is None else [delays])]

    def _keep(self, step: OptimizerStep, resolve: Resolve) -> None:
        """Let the former versions of parameters be like the present ones, as after a step that changes nothing."""
        if not step.previous:
            return
        optimizer = self._definition(step.optimizer, NativeOptimizer)
        present = [resolve(reference) for reference in step.ahead] or [
            optimizer.numbers[index] for index in optimizer.chosen(step.members)
        ]
        self._before_update()
        for number, like in zip(map(resolve, step.previous), present, strict=True):
            self._store.get(number).copy_(self._store.get(like))
            self.versions.repeated(number, like)

    def overwrite(self, number: int, made: Tensor, definitions: Iterable[object]) -> None:
        """Overwrite a buffer in place; its optimizers continue from the new elements.

        Args:
            number: The buffer.
            made: A tensor with the new elements.
            definitions: All definitions of the worker.

        Raises:
            Poisoned: The buffer is void.
            WireError: The tensors differ in spec, or the buffer has versions.
        """
        tensor = self._store.get(number)
        if spec_of(made) != spec_of(tensor):
            raise WireError(f"{spec_of(made)} for buffer {number} of {spec_of(tensor)}; allowed is one like it")
        if number in self.versions:
            raise WireError(f"buffer {number} is a version of a parameter; only steps of its optimizer change it")
        self._before_update()
        tensor.detach().copy_(made)
        for optimizer in definitions:
            if isinstance(optimizer, NativeOptimizer):
                optimizer.overwritten(number)

    def branch(self, branch: Branch, resolve: Resolve) -> None:
        """Create versions of an optimizer's parameters.

        Raises:
            Poisoned: A parameter is void.
            QuotaExceeded: There is no room for them.
            WireError: The instruction is invalid.
        """
        optimizer = self._definition(branch.optimizer, NativeOptimizer)
        numbers = optimizer.numbers
        previous = [resolve(reference) for reference in branch.previous]
        ahead = [resolve(reference) for reference in branch.ahead]
        self._check_branch(branch, optimizer, (*numbers, *previous, *ahead))
        if branch.options:
            self._have(branch.optimizer, optimizer, branch.options)
        parameters = [(number, self._store.get(number)) for number in numbers]
        for index, (number, tensor) in enumerate(parameters):
            if not optimizer.updates(index, tensor):
                raise WireError(f"buffer {number} is no more what optimizer {branch.optimizer} updates")
        made: list[list[tuple[int, Tensor]]] = []
        copy = self._there if branch.behind else self._copied
        for copies in (previous, ahead):
            pairs = zip(copies, parameters, strict=False)  # empty, or one for each
            made.append([(number, copy(number, tensor)) for number, (_, tensor) in pairs])
        if not branch.behind:
            for index, (_, tensor) in enumerate(made[1]):
                optimizer.expect(index, tensor)
        self.versions.begin(branch.optimizer, parameters, made[0], made[1], branch.behind)

    def expect(self, branch: Branch, parameters: Sequence[int]) -> None:
        """Record versions that exist already, or are in transit, of an optimizer that is created later.

        Args:
            branch: The later argument of :meth:`branch`.
            parameters: The buffers of its parameters.
        """
        self.versions.expect(branch.optimizer, parameters, branch.previous, branch.ahead, branch.behind)

    def rename(self, rename: Rename, resolve: Resolve) -> None:
        """Renumber buffers.

        Raises:
            WireError: The instruction is invalid.
        """
        buffers = [resolve(reference) for reference in rename.buffers]
        into = [resolve(reference) for reference in rename.into]
        if len(buffers) != len(into) or len(set(buffers)) < len(buffers) or len(set(into)) < len(into):
            raise WireError(f"{len(buffers)} buffers become {len(into)}; allowed is each once, and as many")
        versions = next((number for number in (*buffers, *into) if number in self.versions), None)
        if versions is not None:
            raise WireError(f"buffer {versions} is a version of a parameter; only steps of its optimizer rename it")
        self._store.rename(dict(zip(buffers, into, strict=True)))

    def _check(
        self,
        step: OptimizerStep,
        optimizer: NativeOptimizer,
        chosen: Sequence[int],
        previous: Sequence[int],
        ahead: Sequence[int],
    ) -> None:
        """Require that a step is valid, before anything is changed."""
        if len(step.gradients) != len(chosen):
            raise WireError(f"{len(step.gradients)} gradients for {len(chosen)} parameters")
        if step.age < 0:
            raise WireError(f"an age of {step.age} steps; allowed is 0 or more")
        if not previous and not ahead:
            return
        predicts = optimizer.predicts
        if len(previous) != len(chosen) or len(ahead) != (len(chosen) if predicts else 0):
            raise _wrong_versions(len(previous), len(ahead), len(chosen), optimizer.delays)
        numbers = [optimizer.numbers[index] for index in chosen]
        if len({*numbers, *previous, *ahead}) < len(numbers) + len(previous) + len(ahead):
            raise WireError("versions of parameters are buffers of their own")
        for buffers in (numbers, previous, *([ahead] if ahead else [])):
            self.versions.check(step.optimizer, chosen, [(number, self._store.get(number)) for number in buffers])

    def _check_branch(self, branch: Branch, optimizer: NativeOptimizer, buffers: Sequence[int]) -> None:
        parameters, predicts = len(optimizer.numbers), optimizer.predicts
        if len(branch.previous) != parameters or len(branch.ahead) != (parameters if predicts else 0):
            raise _wrong_versions(len(branch.previous), len(branch.ahead), parameters, optimizer.delays)
        if branch.behind < 0:
            raise WireError(f"versions {branch.behind} updates behind; allowed is 0 or more")
        others = any(self.versions.owner(number) not in (None, branch.optimizer) for number in buffers)
        if len(set(buffers)) < len(buffers) or others:
            raise WireError("versions of parameters are buffers of their own, and those of one optimizer only")

    def _copied(self, number: int, parameter: Tensor) -> Tensor:
        """Copy a parameter, with the same layout, to a buffer."""
        self._store.forget(number)
        self._store.reserve(parameter.nbytes)
        copy = parameter.clone()
        _check_alike(number, copy, parameter)
        self._store.put(number, copy)
        return copy

    def _there(self, number: int, parameter: Tensor) -> Tensor:
        """Return an existing buffer that becomes a version of a parameter."""
        tensor = self._store.get(number)
        _check_alike(number, tensor, parameter)
        if self._store.shares(number):
            raise WireError(f"buffer {number} shares its memory with another one; versions are buffers of their own")
        return tensor

    def _rename(self, into: dict[int, int]) -> None:
        self._store.rename(into)
        self.versions.renamed(into)

    def _use_options(self, step: OptimizerStep, optimizer: NativeOptimizer, run: Run) -> None:
        """Set an optimizer's options to those of the step whose gradients it applies."""
        changes = self._changes.get(step.optimizer, ())
        options = next((options for since, options in reversed(changes) if since <= run.step - step.age), None)
        if options is not None and self._applied.get(step.optimizer) is not options:
            self._have(step.optimizer, optimizer, options)

    def _have(self, number: int, optimizer: NativeOptimizer, options: tuple[Options, ...]) -> None:
        optimizer.set_options(options)
        self._applied[number] = options


def _wrong_versions(previous: int, ahead: int, parameters: int, delays: Sequence[str]) -> WireError:
    return WireError(
        f"{previous} versions before and {ahead} ahead for {parameters} parameters, with delay "
        f"{', '.join(map(repr, dict.fromkeys(delays)))}; allowed is one before for each, and one ahead for each with "
        f"{', '.join(map(repr, AHEAD))} only"
    )


def _check_alike(number: int, tensor: Tensor, parameter: Tensor) -> None:
    if spec_of(tensor) != spec_of(parameter) or tensor.stride() != parameter.stride():
        raise WireError(
            f"buffer {number} of {spec_of(tensor)} lies otherwise than its parameter of {spec_of(parameter)}; versions "
            "of a parameter lie as it does, without gaps"
        )
