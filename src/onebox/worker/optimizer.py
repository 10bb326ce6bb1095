"""The optimizer of a worker: a class of ``torch.optim`` by name, over buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire.messages import Delay, Optimizer, Options
from onebox.wire.state import StateEntry
from onebox.wire.tensors import spec_of
from onebox.worker.delays import AHEAD, CORRECTS, LAST_UPDATE, PREDICTS, correct, expected_update, momentum_of
from onebox.worker.host import HostMemory
from onebox.worker.masters import Masters, runs

ALLOWED = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD",
)  # fmt: skip
"""Classes of ``torch.optim`` that workers run. Not LBFGS (it calls the model again) and not SparseAdam."""


KERNEL_OPTIONS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Options that choose a kernel; they stay as they were decided when the optimizer was made."""


class NativeOptimizer:
    """An optimizer that updates buffers in place.

    One that steps on the host keeps its state there, and copies of parameters that are elsewhere; parameters that are
    in the host's memory already, those of a CPU worker, are stepped where they are. Either way its steps have the bits
    that they would have on a CPU.

    Args:
        spec: Class, groups and options.
        parameters: The buffers, in the order of ``spec.parameters``.
        state: Tensors for the entries of ``spec.state`` that have one, in order.
        host: The account of the host's memory, for one that steps there.

    Raises:
        WireError: The class is not allowed or this torch has not got it, or the options are not its.
        QuotaExceeded: The account has no room.
    """

    def __init__(
        self, spec: Optimizer, parameters: list[Tensor], state: list[Tensor], host: HostMemory | None = None
    ) -> None:
        if spec.name not in ALLOWED or not hasattr(torch.optim, spec.name):
            raise WireError(f"optimizer {spec.name!r} is not allowed; allowed: {', '.join(ALLOWED)}")
        self.numbers = spec.parameters
        self.cost_s = spec.cost_s
        self._host = (host or HostMemory(0)) if spec.host else None
        self._masters = self._copies(parameters) if spec.host and parameters else None
        # Tensors of its own over the same memory: it knows its state by them, wherever they come to lie.
        self.parameters = parameters = (
            self._masters.tensors if self._masters else [parameter.detach() for parameter in parameters]
        )
        groups = [
            {"params": [parameters[index] for index in members], **self._options(options)}
            for members, options in spec.groups
        ]
        kind = getattr(torch.optim, spec.name)
        try:
            self.optimizer: Any = kind(groups)
        except (TypeError, ValueError) as error:
            raise WireError(f"optimizer {spec.name} refuses its options: {error}") from None
        unknown = {key for _, options in spec.groups for key in options} - set(self.optimizer.defaults)
        if unknown:
            raise WireError(f"optimizer {spec.name} has no option {sorted(unknown)[0]!r}")
        for group in self.optimizer.param_groups:
            self._choose_kernel(group)
        self._name = spec.name
        self._parameter_bytes = max(1, sum(parameter.nbytes for parameter in parameters))
        self.delay = self._checked(spec.delay)
        self._group_of = {
            index: group
            for (members, _), group in zip(spec.groups, self.optimizer.param_groups, strict=True)
            for index in members
        }
        self._counted: set[tuple[int, bool]] = (
            set()
        )  # positions that have been stepped, and whether with late gradients
        self._charged_bytes, self._host_bytes = 0, 0
        self.remember(spec.state, state)

    def remember(self, entries: Sequence[StateEntry], tensors: Iterable[Tensor]) -> None:
        """Take over entries of a state, with the tensors of those that have one, in order."""
        left = iter(tensors)
        for entry in entries:
            plain = isinstance(entry.value, bool | int | float | None)
            value = entry.value if plain else self._place(entry, next(left))
            self.optimizer.state[self.parameters[entry.parameter]][entry.key] = value
        self._count()

    def _place(self, entry: StateEntry, tensor: Tensor) -> Tensor:
        """Return a tensor of the state where the optimizer wants it: counters stay on the CPU unless kernels fuse."""
        parameter = self.parameters[entry.parameter]
        group = next(g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"]))
        on_device = entry.key != "step" or group.get("fused") or group.get("capturable")
        return tensor.to(parameter.device) if on_device else tensor

    def set_options(self, options: tuple[Options, ...]) -> None:
        """Set options of each group, such as the learning rate of this step."""
        for group, changed in zip(self.optimizer.param_groups, options, strict=True):
            group.update({key: value for key, value in self._options(changed).items() if key not in KERNEL_OPTIONS})

    def step(
        self,
        gradients: Sequence[Tensor],
        max_norm: float,
        norm: Tensor | None = None,
        *,
        members: Sequence[int] = (),
        late: bool = False,
    ) -> float | None:
        """Update parameters.

        Args:
            gradients: One for each parameter, or for each of ``members``, not written to.
            max_norm: Where positive, the most that the joint 2-norm of the gradients may be.
            norm: That norm, where it is of more gradients than these.
            members: Positions of the parameters that are updated; empty for all.
            late: Whether the gradients are treated as those of weights that are not the newest; see ``spec.delay``.

        Returns:
            The norm before scaling, where ``max_norm`` is positive.

        Raises:
            WireError: The gradients are not as many as the parameters, or there are no such parameters.
        """
        chosen = self.chosen(members)
        if len(gradients) != len(chosen):
            raise WireError(f"{len(gradients)} gradients for {len(chosen)} parameters")
        factor = None
        if max_norm > 0:
            norm = torch.nn.utils.get_total_norm(gradients) if norm is None else norm
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ does
        late = late and self.delay in CORRECTS
        self._update(chosen, gradients, factor, late)
        stepped = {(index, late) for index in chosen}
        if not stepped <= self._counted:
            self._counted |= stepped
            self._count()
        return None if norm is None else float(norm)

    def chosen(self, members: Sequence[int]) -> Sequence[int]:
        """Return the positions of parameters that ``members`` stand for.

        Raises:
            WireError: There are no such parameters, or one is named twice.
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
            for run in runs(gradients):  # copies of all at once would be as much memory as the gradients
                few = [gradients[place] for place in run]
                if factor is not None:
                    few = [gradient * factor.to(gradient.dtype) for gradient in few]
                apply([chosen[place] for place in run], few)

    def _apply(self, members: Sequence[int], gradients: Sequence[Tensor], late: bool) -> None:
        """Step some parameters; the others, which have no gradient, stay as they are."""
        before = [self.parameters[index].clone() for index in members] if late else []
        for index, gradient in zip(members, gradients, strict=True):
            # fused kernels take for granted that it lies as the parameter does
            self.parameters[index].grad = gradient.contiguous()
        self.optimizer.step()
        for index in members:
            self.parameters[index].grad = None
        for index, old in zip(members, before, strict=False):
            self._correct(index, old)

    def _correct(self, index: int, before: Tensor) -> None:
        """Treat an update that was made of a late gradient."""
        parameter = self.parameters[index]
        group, state = self._group_of.get(index), self.optimizer.state[parameter]
        if group is not None:
            factor = 1.0 if self.delay == "feedback" else momentum_of(self._name, group) or 0.0
            state[LAST_UPDATE] = correct(parameter, before, state.get(LAST_UPDATE), factor)

    def updates(self, index: int, tensor: Tensor) -> bool:
        """Tell whether a tensor lies where a parameter is."""
        own = (self._masters.parameters if self._masters is not None else self.parameters)[index]
        return own.untyped_storage()._cdata == tensor.untyped_storage()._cdata

    def cost_of(self, chosen: Sequence[int]) -> float:
        """Return the seconds that a step of some parameters takes on a ``sim`` device of speed 1."""
        if len(chosen) == len(self.parameters) or not self.cost_s:
            return self.cost_s
        return self.cost_s * sum(self.parameters[index].nbytes for index in chosen) / self._parameter_bytes

    def move(self, index: int, place: Tensor) -> None:
        """Let a parameter lie in other memory from its next step on.

        Args:
            index: Its position.
            place: A tensor that lies as it does, which becomes what it is.
        """
        if self._masters is not None:
            self._masters.move(index, place)
        else:
            place.copy_(self.parameters[index])
            self.parameters[index].data = place

    def expect(self, index: int, into: Tensor) -> None:
        """Let a tensor become what a parameter is expected to be one step later.

        Raises:
            WireError: Nothing can be expected of this class.
        """
        own, group = self.parameters[index], self._group_of.get(index)
        known = self.optimizer.state.get(own, {})
        update = None if group is None else expected_update(self._name, group, known, own)
        into.copy_(own if update is None else update.add_(own))

    def state(self) -> tuple[list[StateEntry], list[Tensor]]:
        """Return the entries of the state and the tensors of those that have one."""
        entries: list[StateEntry] = []
        tensors: list[Tensor] = []
        for index, parameter in enumerate(self.parameters):
            for key, value in sorted(self.optimizer.state.get(parameter, {}).items()):
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
        """Bytes of the state's tensors on the device, as of the last step; none where it is on the host."""
        return self._charged_bytes

    @property
    def on_host(self) -> bool:
        """Whether it steps on the host."""
        return self._host is not None

    def close(self) -> None:
        """Give back what is counted as the host's memory. Idempotent."""
        if self._host is not None:
            self._host.charge(-self._host_bytes)
            self._host_bytes = 0

    def _count(self) -> None:
        """Count the state anew, and what is kept of the parameters."""
        values = [value for state in self.optimizer.state.values() for value in state.values()]
        size_bytes = sum(value.nbytes for value in values if isinstance(value, Tensor))
        if self._host is None:
            self._charged_bytes = size_bytes
            return
        size_bytes += self._masters.size_bytes if self._masters else 0
        self._host.charge(size_bytes - self._host_bytes)
        self._host_bytes = size_bytes

    def _copies(self, parameters: list[Tensor]) -> Masters | None:
        """Return copies of parameters that the host cannot step where they are."""
        return Masters(parameters) if parameters[0].device.type == "cuda" else None

    def _options(self, options: Options) -> dict[str, Any]:
        """Return options as the class takes them."""
        return {key: tuple(value) if isinstance(value, list | tuple) else value for key, value in options.items()}

    def _checked(self, delay: Delay) -> Delay:
        """Return a treatment of late gradients.

        Raises:
            WireError: The class cannot have it.
        """
        if delay in AHEAD and self._name not in PREDICTS:
            raise WireError(
                f"delay {delay!r} needs one of these optimizers: {', '.join(PREDICTS)}; this is {self._name}"
            )
        if delay in ("lookahead", "both") and any(
            momentum_of(self._name, group) is None for group in self.optimizer.param_groups
        ):
            raise WireError(f"delay {delay!r} needs an optimizer with momentum; {self._name} has none")
        return delay

    def _choose_kernel(self, group: dict[str, Any]) -> None:
        """Let one kernel update all parameters of a group, unless the user chose otherwise."""
        if self._masters is not None and group.get("capturable"):
            group["capturable"] = False  # what CUDA graphs need, and CPU kernels refuse
        if "fused" not in group or group["fused"] is not None or group.get("foreach") is not None:
            return
        unsuited = group.get("differentiable") or group.get("capturable")
        if not unsuited and all(parameter.is_floating_point() for parameter in self.parameters):
            group["fused"] = True
