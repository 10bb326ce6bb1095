"""The optimizer of a worker: classes of ``torch.optim`` by name, over buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from onebox.cost import runs
from onebox.errors import WireError
from onebox.wire.protocol.instructions import Delay, Options
from onebox.wire.protocol.requests import OptimizerSpec
from onebox.wire.protocol.snapshots import StateEntry
from onebox.wire.tensors import is_dense, spec_of
from onebox.worker.accelerator import Accelerator, accelerator_for
from onebox.worker.memory.host import HostMemory
from onebox.worker.optimizer.delay_compensation import (
    AHEAD,
    LAST_UPDATE,
    PREDICTS,
    REMEMBERS,
    correct,
    expected_update,
    extrapolated,
    momentum_of,
)
from onebox.worker.optimizer.fused_kernels import is_exact
from onebox.worker.optimizer.host_parameters import HostParameters
from onebox.worker.optimizer.optimizer_patch import without_compiler

ALLOWED = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD",
)  # fmt: skip
"""Classes of ``torch.optim`` that workers run. Not LBFGS (it calls the model again) and not SparseAdam."""


KERNEL_OPTIONS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Options that select a kernel; they are fixed when the optimizer is created."""

T = TypeVar("T", bound=str)


def for_each_group(value: T | tuple[T, ...], groups: int) -> tuple[T, ...]:
    """Return a value for each parameter group, from one for all groups or one for each.

    Raises:
        WireError: Their number differs from that of the groups.
    """
    found = value if isinstance(value, tuple) else (value,) * groups
    if len(found) != groups:
        raise WireError(f"{len(found)} for {groups} parameter groups; allowed is one for all, or one for each")
    return found


class NativeOptimizer:
    """An optimizer that updates buffers in place; parameter groups may have different classes.

    On the host, it keeps its state there, and copies of parameters that are elsewhere; parameters in host memory, those
    of a CPU worker, are updated in place. Either way its steps are bitwise those of a CPU.

    Args:
        spec: Classes, groups and options.
        parameters: The buffers, in the order of ``spec.parameters``, each in one group.
        state: Tensors for the entries of ``spec.state`` that have one, in order.
        host: The count of host memory, for an optimizer on the host.
        accelerator: The device of the parameters; ``None`` for the CPU.

    Raises:
        WireError: A class is not allowed or missing in this torch, options do not match it, or a parameter is not in
            exactly one group.
        QuotaExceeded: Host memory is insufficient.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        parameters: list[Tensor],
        state: list[Tensor],
        host: HostMemory | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._accelerator = accelerator or accelerator_for("cpu")
        self._names = for_each_group(spec.name, len(spec.groups))
        _check(spec, self._names)
        self.numbers = spec.parameters
        self._host = (host or HostMemory(0)) if spec.host else None
        self._masters = self._copies(parameters) if spec.host and parameters else None
        # Separate tensor objects over the same memory: they key its state, even if the parameters are relocated.
        self.parameters = parameters = (
            self._masters.tensors if self._masters else [parameter.detach() for parameter in parameters]
        )
        self.groups = self._made(spec)
        """Options of each group, and its parameters."""
        for name, group in zip(self._names, self.groups, strict=True):
            self._choose_kernel(name, group)
        self.delays = tuple(map(self._checked, self._names, self.groups, for_each_group(spec.delay, len(spec.groups))))
        """Treatment of late gradients of each group."""
        self._group_of = {index: place for place, (members, _) in enumerate(spec.groups) for index in members}
        self._counted: set[tuple[int, bool]] = set()  # updated positions, and whether with late gradients
        self._charged_bytes, self._host_bytes = 0, 0
        self.remember(spec.state, state)

    def remember(self, entries: Sequence[StateEntry], tensors: Iterable[Tensor]) -> None:
        """Set entries of the state, with the tensors of those that have one, in order."""
        left = iter(tensors)
        for entry in entries:
            plain = isinstance(entry.value, bool | int | float | None)
            value = entry.value if plain else self._place(entry, next(left))
            self._remembered(entry.parameter)[entry.key] = value
        self._count()

    def _place(self, entry: StateEntry, tensor: Tensor) -> Tensor:
        """Return a state tensor in its required place: counters stay on the CPU unless kernels are fused, whose are
        float32, as where PyTorch loads them.

        Raises:
            WireError: It does not match its parameter, which fused kernels rely on.
        """
        group, parameter = self.groups[self._group_of[entry.parameter]], self.parameters[entry.parameter]
        fits = tensor.numel() == 1 if entry.key == "step" else tensor.shape == parameter.shape
        if group.get("fused") and not (fits and (entry.key == "step" or tensor.dtype is parameter.dtype)):
            raise WireError(
                f"state {entry.key!r} of the optimizer is {spec_of(tensor)}; allowed is one number for 'step', and "
                f"otherwise {spec_of(parameter)}, as its parameter"
            )
        if entry.key != "step":
            return tensor.to(parameter.device)
        of_kernel = group.get("fused") or group.get("capturable")
        return tensor.to(parameter.device, torch.float32) if of_kernel else tensor

    def set_options(self, options: tuple[Options, ...]) -> None:
        """Set options of each group, such as the learning rate of this step."""
        for group, changed in zip(self.groups, options, strict=True):
            group.update({key: value for key, value in self._options(changed).items() if key not in KERNEL_OPTIONS})

    def step(
        self,
        gradients: Sequence[Tensor],
        max_norm: float,
        norm: Tensor | None = None,
        *,
        members: Sequence[int] = (),
        late: bool = False,
    ) -> Tensor | None:
        """Update parameters.

        Args:
            gradients: One for each parameter, or for each of ``members``, not written to.
            max_norm: If positive, the limit of the joint 2-norm of the gradients.
            norm: That norm, if it covers more gradients than these.
            members: Positions of the updated parameters; empty for all.
            late: Whether the gradients are treated as late; see ``spec.delay``.

        Returns:
            The norm before scaling, if ``max_norm`` is positive.

        Raises:
            WireError: The number of gradients differs from that of the parameters, or parameters do not exist.
        """
        chosen = self.chosen(members)
        if len(gradients) != len(chosen):
            raise WireError(f"{len(gradients)} gradients for {len(chosen)} parameters")
        factor = None
        if max_norm > 0:
            norm = torch.nn.utils.get_total_norm(gradients) if norm is None else norm
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ does
        late = late and self.remembers(chosen)
        self._update(chosen, gradients, factor, late)
        stepped = {(index, late) for index in chosen}
        if not stepped <= self._counted:
            self._counted |= stepped
            self._count()
        return norm

    def chosen(self, members: Sequence[int]) -> Sequence[int]:
        """Return the positions of the parameters denoted by ``members``.

        Raises:
            WireError: Parameters do not exist, or one is named twice.
        """
        if not members:
            return range(len(self.parameters))
        if len(set(members)) < len(members) or not all(0 <= index < len(self.parameters) for index in members):
            raise WireError(
                f"members {members[:8]} of an optimizer of {len(self.parameters)} parameters; allowed is each once"
            )
        return members

    def _update(self, chosen: Sequence[int], gradients: Sequence[Tensor], factor: Tensor | None, late: bool) -> None:
        def apply(run: Sequence[int], scaled: Sequence[Tensor]) -> None:
            self._apply(run, scaled, late)

        if self._masters is not None:
            self._masters.step(dict(zip(chosen, gradients, strict=True)), factor, apply)
        elif factor is None and not late:
            apply(chosen, gradients)
        else:
            for run in runs(
                [gradient.nbytes for gradient in gradients]
            ):  # copies of all at once would take as much memory as the gradients
                few = [gradients[place] for place in run]
                if factor is not None:
                    few = self._scaled(few, factor)
                apply([chosen[place] for place in run], few)

    def _scaled(self, gradients: list[Tensor], factor: Tensor) -> list[Tensor]:
        """Return gradients times a factor; by one call for all where each call has a kernel to launch."""
        kinds = {gradient.dtype for gradient in gradients}
        if self._accelerator.asynchronous and len(kinds) == 1:
            return list(torch._foreach_mul(gradients, factor.to(kinds.pop())))
        return [gradient * factor.to(gradient.dtype) for gradient in gradients]

    def _apply(self, members: Sequence[int], gradients: Sequence[Tensor], late: bool) -> None:
        """Update some parameters; the others, without gradients, stay unchanged."""
        before = {index: self._kept(index) for index in members if late and self.remembers((index,))}
        for index, gradient in zip(members, gradients, strict=True):
            # fused kernels require the parameter's memory layout
            self.parameters[index].grad = gradient.contiguous()
        for optimizer in {self._names[self._group_of[index]]: self._of(index) for index in members}.values():
            optimizer.step()
        for index in members:
            self.parameters[index].grad = None
        for index, old in before.items():
            self._treat(index, old)

    def _kept(self, index: int) -> Tensor | None:
        """Return the data that a treatment needs from before a step: the parameter, or the predicted update."""
        extrapolates = self.delays[self._group_of[index]] == "extrapolate"
        return self._expected(index) if extrapolates else self.parameters[index].clone()

    def _treat(self, index: int, before: Tensor | None) -> None:
        """Treat an update from a late gradient, given the data from before."""
        place, state = self._group_of[index], self._remembered(index)
        if self.delays[place] == "extrapolate":
            before = self._expected(index) if before is None else before  # the first step: as if nothing changed
            if before is not None:
                state[LAST_UPDATE] = before
            return
        assert before is not None
        feedback = self.delays[place] == "feedback"
        factor = 1.0 if feedback else momentum_of(self._names[place], self.groups[place]) or 0.0
        state[LAST_UPDATE] = correct(self.parameters[index], before, state.get(LAST_UPDATE), factor)

    def remembers(self, chosen: Sequence[int]) -> bool:
        """Return whether the treatment of late gradients stores updates of some parameters."""
        return any(self.delays[self._group_of[index]] in REMEMBERS for index in chosen)

    @property
    def predicts(self) -> bool:
        """True if predicted versions of parameters are kept."""
        return any(delay in AHEAD for delay in self.delays)

    def updates(self, index: int, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter's memory."""
        own = (self._masters.parameters if self._masters is not None else self.parameters)[index]
        return own.untyped_storage()._cdata == tensor.untyped_storage()._cdata

    def move(self, index: int, place: Tensor) -> None:
        """Relocate a parameter from its next step on.

        Args:
            index: Its position.
            place: A tensor with the same layout, which becomes the parameter.
        """
        if self._masters is not None:
            self._masters.move(index, place)
        else:
            place.copy_(self.parameters[index])
            self.parameters[index].data = place

    def overwritten(self, number: int) -> None:
        """Record that a buffer was overwritten, so that the host's copy of a parameter is updated."""
        if self._masters is not None and number in self.numbers:
            self._masters.refresh(self.numbers.index(number))

    def remembered(self, index: int, key: str) -> Tensor:
        """Return a state tensor of a parameter.

        Raises:
            WireError: There is none.
        """
        value = None
        if 0 <= index < len(self.parameters):
            value = self._of(index).state.get(self.parameters[index], {}).get(key)
        if not isinstance(value, Tensor):
            raise WireError(
                f"the optimizer of {len(self.parameters)} parameters has no tensor {key!r} of parameter {index}"
            )
        return value

    def expect(self, index: int, into: Tensor) -> None:
        """Write the predicted parameter after the next step to a tensor; the present one without a prediction."""
        own, delay = self.parameters[index], self.delays[self._group_of[index]]
        update = self._expected(index) if delay in AHEAD else None
        if update is not None and delay == "extrapolate":
            update = extrapolated(update, self._remembered(index).get(LAST_UPDATE))
        into.copy_(own if update is None else update.add_(own))

    def _expected(self, index: int) -> Tensor | None:
        """Return the update predicted from a parameter's momentum; ``None`` without a prediction."""
        own, place = self.parameters[index], self._group_of[index]
        return expected_update(self._names[place], self.groups[place], self._of(index).state.get(own, {}), own)

    def state(self) -> tuple[list[StateEntry], list[Tensor]]:
        """Return the entries of the state and the tensors of those that have one."""
        entries: list[StateEntry] = []
        tensors: list[Tensor] = []
        for index, parameter in enumerate(self.parameters):
            for key, value in sorted(self._of(index).state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    entries.append(StateEntry(index, key, spec_of(value)))
                    tensors.append(value)
                elif isinstance(value, bool | int | float | None):
                    entries.append(StateEntry(index, key, value))
                else:
                    raise WireError(f"state {key!r} of the optimizer is a {type(value).__name__}, which cannot travel")
        return entries, tensors

    @property
    def charged_bytes(self) -> int:
        """Bytes of the state's tensors on the device, as of the last step; 0 if it is on the host."""
        return self._charged_bytes

    @property
    def on_host(self) -> bool:
        """True if it runs on the host."""
        return self._host is not None

    def close(self) -> None:
        """Release its count of host memory. Idempotent."""
        if self._host is not None:
            self._host.charge(-self._host_bytes)
            self._host_bytes = 0

    def _count(self) -> None:
        """Recount the state and the copies of parameters."""
        states = (state for optimizer in self._optimizers.values() for state in optimizer.state.values())
        values = [value for state in states for value in state.values()]
        size_bytes = sum(value.nbytes for value in values if isinstance(value, Tensor))
        if self._host is None:
            self._charged_bytes = size_bytes
            return
        size_bytes += self._masters.size_bytes if self._masters else 0
        self._host.charge(size_bytes - self._host_bytes)
        self._host_bytes = size_bytes

    def _copies(self, parameters: list[Tensor]) -> HostParameters | None:
        """Return copies of parameters that the host cannot update in place."""
        return HostParameters(parameters, self._accelerator) if self._accelerator.asynchronous else None

    def _options(self, options: Options) -> dict[str, Any]:
        """Return options in the form of the class."""
        return {key: tuple(value) if isinstance(value, list | tuple) else value for key, value in options.items()}

    def _made(self, spec: OptimizerSpec) -> list[dict[str, Any]]:
        """Create one optimizer of each class; return the groups of all, in the order of the spec.

        Raises:
            WireError: A class refuses its options or parameters.
        """
        groups: dict[str, list[dict[str, Any]]] = {}
        for name, (members, options) in zip(self._names, spec.groups, strict=True):
            of_class = {"params": [self.parameters[index] for index in members], **self._options(options)}
            groups.setdefault(name, []).append(of_class)
        self._optimizers: dict[str, Any] = {}
        for name, own in groups.items():
            try:
                self._optimizers[name] = made = without_compiler(name)(own)
            except (TypeError, ValueError) as error:
                raise WireError(f"optimizer {name} refuses its options: {error}") from None
            unknown = {key for group in own for key in group} - {"params", *made.defaults}
            if unknown:
                raise WireError(f"optimizer {name} has no option {sorted(unknown)[0]!r}")
        left = {name: iter(made.param_groups) for name, made in self._optimizers.items()}
        return [next(left[name]) for name in self._names]

    def _of(self, index: int) -> Any:
        """Return the optimizer of a parameter."""
        return self._optimizers[self._names[self._group_of[index]]]

    def _remembered(self, index: int) -> dict[str, Any]:
        """Return the mutable state of a parameter."""
        found: dict[str, Any] = self._of(index).state[self.parameters[index]]
        return found

    @staticmethod
    def _checked(name: str, group: dict[str, Any], delay: Delay) -> Delay:
        """Return a treatment of late gradients, checked.

        Raises:
            WireError: The class does not support it.
        """
        if delay in AHEAD and name not in PREDICTS:
            raise WireError(f"delay {delay!r} needs one of these optimizers: {', '.join(PREDICTS)}; this is {name}")
        if delay in ("lookahead", "both") and momentum_of(name, group) is None:
            raise WireError(f"delay {delay!r} needs an optimizer with momentum; {name} has none")
        return delay

    def _choose_kernel(self, name: str, group: dict[str, Any]) -> None:
        """Let one kernel update all parameters of a group, unless the user chose otherwise or the kernel is inexact."""
        if self._masters is not None and group.get("capturable"):
            group["capturable"] = False  # for CUDA graphs only, and refused by CPU kernels
        if "fused" not in group or group["fused"] is False or (group["fused"] is None and group.get("foreach")):
            return
        unsuited = group.get("differentiable") or group.get("capturable")
        kinds = {(parameter.dtype, parameter.device) for parameter in group["params"]}
        exact = all(dtype.is_floating_point and is_exact(name, dtype, device) for dtype, device in kinds)
        exact = exact and all(map(is_dense, group["params"]))  # fused kernels see rows of elements, not strides
        if group["fused"]:
            group["fused"] = exact or None
        elif group.get("foreach") is None and not unsuited and exact:
            group["fused"] = True


def _check(spec: OptimizerSpec, names: Sequence[str]) -> None:
    """Require that classes are allowed, and that each parameter is in one group."""
    for name in names:
        if name not in ALLOWED or not hasattr(torch.optim, name):
            raise WireError(f"optimizer {name!r} is not allowed; allowed: {', '.join(ALLOWED)}")
    members = sorted(index for own, _ in spec.groups for index in own)
    if members != list(range(len(spec.parameters))):
        raise WireError(
            f"the groups of an optimizer of {len(spec.parameters)} parameters have {members[:8]}; allowed is each once"
        )
