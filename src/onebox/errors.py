"""The exception tree: everything that onebox raises on purpose.

    OneboxError
    ├── UsageError(ValueError)      a wrong argument, flag or call; exit status 2 on the command line
    │   └── MissingExtra            ... because an optional package is not installed
    ├── PlanError                   no plan fits the memory of the devices, or they cannot run this one
    ├── CaptureError                a model that cannot be captured as a graph
    ├── DataError                   a data file or sample that is missing or damaged
    ├── CheckpointError             a checkpoint that is missing, damaged or foreign
    ├── WireError                   a message that breaks the protocol or its limits
    ├── PoolError                   devices could not be had, or were given back
    ├── InternalError               a fault of onebox itself, with its cause
    └── WorkerError                 something failed on a worker
        ├── OperatorError(RuntimeError)   an operator failed; everything computed from it is void
        │   └── DeviceMemoryError   ... because the device, or its quota, has no memory left
        ├── WorkerDied              the process of a worker ended
        ├── WorkerHung              a worker stopped answering, or stopped making progress
        ├── PeerLost                a worker waited in vain for another one of its group
        └── ReplicasParted          replicas that must be bit-identical are not

A message says what came, what is allowed and what to do. The fields that say where are attributes.
"""

from __future__ import annotations

from typing import Any


class OneboxError(Exception):
    """Root of every error that onebox raises on purpose."""


class UsageError(OneboxError, ValueError):
    """A wrong argument, flag or call."""


class MissingExtra(UsageError):
    """A feature that needs an optional package, which is not installed.

    Args:
        message: The feature, the package, and the command that installs it.
        package: The package, as pip calls it.
        extra: The extra of onebox that brings it, such as ``plot``.
    """

    def __init__(self, message: str, *, package: str = "", extra: str = "") -> None:
        super().__init__(message)
        self.package = package
        self.extra = extra


class PlanError(OneboxError):
    """No plan fits the memory of the devices, or GPUs cannot run the transfers of one in their order.

    Args:
        message: Which stage misses which device by how many bytes, and what would help.
        stage: Number of the stage, in the plan that came closest.
        device: Number of the device in the pool.
        missing_bytes: Memory that it lacks for the stage.
    """

    def __init__(
        self, message: str, *, stage: int | None = None, device: int | None = None, missing_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.stage = stage
        self.device = device
        self.missing_bytes = missing_bytes


class CaptureError(OneboxError):
    """A model that cannot be captured as a graph.

    Args:
        message: What came, and what to do.
        where: Line of the user's model, as ``file:line``, where it is known.
        unfit: Whether plain PyTorch refuses the batch, too.
    """

    def __init__(self, message: str, *, where: str | None = None, unfit: bool = False) -> None:
        super().__init__(message)
        self.where = where
        self.unfit = unfit


class DataError(OneboxError):
    """A data file or a sample that is missing or damaged.

    Args:
        message: What came, what is allowed, what to do.
        path: The file.
        sample: Index or name of the sample inside it, where one is to blame.
    """

    def __init__(self, message: str, *, path: object = None, sample: object = None) -> None:
        super().__init__(message)
        self.path = path
        self.sample = sample


class CheckpointError(OneboxError):
    """A checkpoint that is missing, damaged, or belongs to something else.

    Args:
        message: What is wrong with it, and what to do.
        path: The folder or file.
    """

    def __init__(self, message: str, *, path: object = None) -> None:
        super().__init__(message)
        self.path = path


class WireError(OneboxError):
    """A message that breaks the protocol, or is larger or deeper than the limits allow."""


class PoolError(OneboxError):
    """Devices could not be had, or the pool is closed."""


class InternalError(OneboxError):
    """A fault of onebox itself; ``__cause__`` is the exception behind it.

    Args:
        message: The call that failed, the model, the cause, and what to do until it is mended.
        where: Line of the user's code that made the call, as ``file:line``, where it is known.
    """

    def __init__(self, message: str, *, where: str | None = None) -> None:
        super().__init__(message)
        self.where = where


class WorkerError(OneboxError):
    """Something failed on a worker.

    Args:
        message: What happened, and what to do.
        worker: The worker's number in its pool.
        host: The worker's host.
        device: The worker's device, such as ``cpu`` or ``cuda:0``.
    """

    def __init__(
        self, message: str, *, worker: int | None = None, host: str | None = None, device: str | None = None
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.host = host
        self.device = device


class OperatorError(WorkerError, RuntimeError):
    """An operator failed on a worker; what it would have made is void.

    It is a ``RuntimeError``, too, as what PyTorch raises for a GPU that fails.

    Args:
        message: The whole story, for a person.
        operator: Name of the operator or instruction, such as ``aten.mm.default``.
        shapes: Types and shapes of its tensor arguments, for a person.
        said: Message of the original exception on the worker.
        cause: Its type, such as ``IndexError``.
        instruction: Numbers of the routine and of its instruction in which it failed; ``None`` outside of a routine.
        index: Number of the operator in the program of that instruction; -1 if it is not known.
        kept: Whether it cost a training step, or the batch of one, and nothing else: weights, the optimizer's state
            and buffers are those before the step.
        steps: Numbers of the steps that it cost, as ``StepLoss.step``: late gradients may cost two.
        **where: ``worker``, ``host`` and ``device`` of :class:`WorkerError`.
    """

    def __init__(
        self,
        message: str,
        *,
        operator: str = "",
        shapes: str = "",
        said: str = "",
        cause: str = "",
        instruction: tuple[int, int] | None = None,
        index: int = -1,
        kept: bool = False,
        steps: tuple[int, ...] = (),
        **where: Any,
    ) -> None:
        super().__init__(message, **where)
        self.operator = operator
        self.shapes = shapes
        self.said = said
        self.cause = cause
        self.instruction = instruction
        self.index = index
        self.kept = kept
        self.steps = steps
        self.stage: int | None = None
        """The stage of the plan that the operator belongs to, where it is known."""
        self.doing = ""
        """Part of the training step, such as ``stage 1 forward 0``, where it is known."""
        self.layer = ""
        """The path of the innermost module of the model that calls the operator, or whose gradient it is, where it is
        known."""
        self.where: str | None = None
        """The line of the user's code that calls it, as ``file:line``, where it is known."""

    def add(self, text: str) -> None:
        """Add a line to the message."""
        self.args = (f"{self.args[0]}\n  {text}",)

    def located(self, doing: str, stage: int | None, layer: str = "", line: tuple[str, str] | None = None) -> None:
        """Take note of what of a step it was, which only who has made the step knows; the first time counts.

        Args:
            doing: The part of the step.
            stage: Its stage.
            layer: The path of the module.
            line: The line of the user's code, as ``file:line`` and its text.
        """
        if not self.doing:
            self.doing, self.stage, self.layer, self.where = doing, stage, layer, line[0] if line else None
            said = str(self.args[0])
            self.args = (said.replace(f"{self.operator} failed", f"{self.operator} failed in {doing}", 1),)
            called = f" at {line[0]}: {line[1]}" if line else ""
            called += f" (layer {layer})" if layer else ""
            if called:
                self.add(f"it was called{called}")


class DeviceMemoryError(OperatorError):
    """The device, or the worker's quota on it, has no memory left for an operator.

    Args:
        message: The whole story, for a person.
        asked_bytes: Bytes that the operator asked for; 0 where they are not known.
        used_bytes: Bytes in use beside them; 0 where they are not known.
        allowed_bytes: The quota, or the device's memory; 0 where it is not known.
        **about: What else :class:`OperatorError` takes.
    """

    def __init__(
        self, message: str, *, asked_bytes: int = 0, used_bytes: int = 0, allowed_bytes: int = 0, **about: Any
    ) -> None:
        super().__init__(message, **about)
        self.asked_bytes = asked_bytes
        self.used_bytes = used_bytes
        self.allowed_bytes = allowed_bytes


class WorkerDied(WorkerError):
    """The process of a worker ended.

    Args:
        message: The whole story, for a person.
        exit_status: Exit status; negative for the signal that ended it.
        last_words: The end of what it wrote to standard error.
        **where: ``worker``, ``host`` and ``device`` of :class:`WorkerError`.
    """

    def __init__(self, message: str, *, exit_status: int | None = None, last_words: str = "", **where: Any) -> None:
        super().__init__(message, **where)
        self.exit_status = exit_status
        self.last_words = last_words


class WorkerHung(WorkerError):
    """A worker stopped answering, or stopped making progress."""


class PeerLost(WorkerError):
    """A worker waited in vain for another one of its group; raised only where nothing worse is known."""


class ReplicasParted(WorkerError):
    """Replicas that must be bit-identical are not."""
