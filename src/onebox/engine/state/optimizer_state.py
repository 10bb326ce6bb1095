"""State of the user's optimizers: brought from the workers when it is read, taken over when the user has changed it.

A trainer puts a mapping of its own in the place of ``optimizer.state``. ``optimizer.state_dict()`` and whoever else
reads it get the state as it is on the workers, in the form that ``torch.optim`` has; nothing travels until then.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onebox.engine.workload.named_state import NamedState, OptimizerEntries, local_optimizer_state
from onebox.worker import LAST_UPDATE

_KERNEL_OPTIONS = ("fused", "capturable")

Marks = dict[int, tuple[int, tuple[tuple[str, int, object], ...]]]
"""For each parameter, by its identity: the mapping of its entries, and each of these with its version or value."""


class StateOnWorkers(defaultdict[Any, Any]):
    """What ``optimizer.state`` is while a trainer is open: brought when it is read.

    Copies and pickles of it are plain mappings.

    Args:
        bring: Called before anything is read.
        found: What it holds at first.
    """

    def __init__(self, bring: Callable[[], None], found: Mapping[Any, Any]) -> None:
        super().__init__(dict)
        super().update(found)
        self._bring = bring

    def held(self) -> dict[Any, Any]:
        """Return what is here, without bringing anything."""
        return {key: super(StateOnWorkers, self).__getitem__(key) for key in super().__iter__()}

    def put(self, parameter: Tensor, entries: Mapping[str, Any]) -> None:
        """Let the entries of a parameter be others; the mapping that holds them stays the same one."""
        if not super().__contains__(parameter):
            super().__setitem__(parameter, {})
        own = super().__getitem__(parameter)
        own.clear()
        own.update(entries)

    def drop(self, parameter: Tensor) -> None:
        """Remove the entries of a parameter, if there are any."""
        super().pop(parameter, None)

    def __getitem__(self, key: Any) -> Any:
        self._bring()
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._bring()
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._bring()
        super().__delitem__(key)

    def __contains__(self, key: object) -> bool:
        self._bring()
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        self._bring()
        return super().__iter__()

    def __len__(self) -> int:
        self._bring()
        return super().__len__()

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the entries of a parameter, or else something."""
        self._bring()
        return super().get(key, default)

    def keys(self) -> Any:
        """Return the parameters."""
        self._bring()
        return super().keys()

    def values(self) -> Any:
        """Return the entries of each parameter."""
        self._bring()
        return super().values()

    def items(self) -> Any:
        """Return the parameters, each with its entries."""
        self._bring()
        return super().items()

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove the entries of a parameter, and return them."""
        self._bring()
        return super().pop(key, *default)

    def clear(self) -> None:
        """Remove all entries."""
        self._bring()
        super().clear()

    def update(self, *args: Any, **more: Any) -> None:
        """Take over entries of parameters."""
        self._bring()
        super().update(*args, **more)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the entries of a parameter, after putting them there where there are none."""
        self._bring()
        return super().setdefault(key, default)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.items())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.items())!r})"


class OptimizersOnWorkers:
    """The state of the user's optimizers, here and on the workers.

    Args:
        optimizers: The optimizers.
        named: Parameters, by name.
        fetch: Returns what the workers remember, or ``None`` where that cannot be asked for (any more).
        steps: Returns how many steps have been begun.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        named: NamedState,
        fetch: Callable[[], OptimizerEntries | None],
        steps: Callable[[], int],
    ) -> None:
        self._optimizers = optimizers
        self._named = named
        self._fetch = fetch
        self._steps = steps
        self._states: list[StateOnWorkers] = []
        self._marks: list[Marks] = []
        self._busy = False
        self._at = steps()
        """The step count at which what is here is what the workers remember."""
        self._install()

    def changed(self) -> OptimizerEntries | None:
        """Return all that the optimizers remember, if that has been changed by hand since it was last looked at.

        Raises:
            StaleState: It was changed after steps had been made with it.
        """
        replaced = any(each.state is not state for each, state in zip(self._optimizers, self._states, strict=True))
        if not replaced:
            if all(_marks(state) == marks for state, marks in zip(self._states, self._marks, strict=True)):
                return None
            if self._at != self._steps():
                raise StaleState
        else:
            self._bring_others()
        entries = [
            (name, key, value.detach().clone() if isinstance(value, Tensor) else value)
            for name, key, value in local_optimizer_state(self._optimizers, self._named)
        ]
        self._at = self._steps()
        self._install()
        return entries

    def _bring_others(self) -> None:
        """Bring the state of the optimizers that have not been changed beside one that has."""
        for each, state in zip(self._optimizers, self._states, strict=True):
            if each.state is state:
                self.bring()

    def bring(self) -> None:
        """Let what is here be what the workers remember now."""
        if self._busy or self._at == self._steps():
            return
        self._busy = True
        try:
            entries = self._fetch()
            if entries is None:
                return
            self._fill(entries)
            self._at = self._steps()
        finally:
            self._busy = False

    def close(self) -> None:
        """Let the optimizers have plain mappings again, with what is here."""
        self._busy = True
        for each, state in zip(self._optimizers, self._states, strict=True):
            if each.state is state:
                each.state = defaultdict(dict, state.held())

    def _install(self) -> None:
        """Let reading the optimizers' state bring it."""
        own = weakref.ref(self)

        def bring() -> None:
            if (found := own()) is not None:
                found.bring()

        before, self._busy = self._busy, True
        self._states = []
        for each in self._optimizers:
            state = StateOnWorkers(bring, dict(each.state.items()))
            each.state = state
            self._states.append(state)
        self._marks = [_marks(state) for state in self._states]
        self._busy = before

    def _fill(self, entries: OptimizerEntries) -> None:
        names = {id(tensor): name for name, tensor in self._named.tensors.items()}
        found: dict[str, dict[str, Any]] = {}
        for name, key, value in entries:
            if key != LAST_UPDATE:
                found.setdefault(name, {})[key] = value
        for each, state in zip(self._optimizers, self._states, strict=True):
            for group in each.param_groups:
                for parameter in group["params"]:
                    remembered = found.get(names[id(parameter)])
                    if remembered is None:
                        state.drop(parameter)
                    else:
                        state.put(parameter, _as_torch_has(remembered, parameter, group))
        self._marks = [_marks(state) for state in self._states]


class StaleState(Exception):
    """An optimizer's state was changed by hand that is not the newest."""


def _marks(state: StateOnWorkers) -> Marks:
    """Return what tells whether a state has been changed."""
    return {
        id(parameter): (
            id(own),
            tuple(
                (key, id(value), value._version) if isinstance(value, Tensor) else (key, 0, value)
                for key, value in own.items()
            ),
        )
        for parameter, own in state.held().items()
        if own
    }


def _as_torch_has(entries: Mapping[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an optimizer remembers of a parameter in the form that a plain one has.

    Counts of steps, and what else is one number, are on the CPU and of the default type, unless a kernel needs them on
    the device.
    """
    on_device = any(group.get(option) for option in _KERNEL_OPTIONS)
    scalar = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    found: dict[str, Any] = {}
    for key in sorted(entries, key=lambda key: (key != "step", key)):
        value = entries[key]
        if isinstance(value, Tensor):
            alone = not value.dim() and (key == "step" or bool(parameter.dim())) and value.is_floating_point()
            if not alone:
                value = value.to(parameter.device)
            elif on_device:
                value = value.to(parameter.device, torch.float32)
            else:
                value = value.to(scalar)
        found[key] = value
    return found
