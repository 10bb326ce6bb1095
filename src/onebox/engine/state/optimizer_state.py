"""State of the user's optimizers: downloaded when it is read, uploaded when the user has changed it.

A trainer replaces ``optimizer.state`` by its own mapping. ``optimizer.state_dict()`` and all other readers get the
workers' state in the form of ``torch.optim``; nothing is transferred until then.
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
"""By identity of the parameter: the mapping of its entries, and the version or value of each."""


class StateOnWorkers(defaultdict[Any, Any]):
    """``optimizer.state`` while a trainer is open: downloaded when it is read.

    Copies and pickles of it are plain mappings.

    Args:
        bring: Called before every read.
        found: Initial contents.
    """

    def __init__(self, bring: Callable[[], None], found: Mapping[Any, Any]) -> None:
        super().__init__(dict)
        super().update(found)
        self._bring = bring

    def held(self) -> dict[Any, Any]:
        """Return the local contents without a download."""
        return {key: super(StateOnWorkers, self).__getitem__(key) for key in super().__iter__()}

    def put(self, parameter: Tensor, entries: Mapping[str, Any]) -> None:
        """Replace the entries of a parameter; the mapping object that holds them stays the same."""
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
        """Return the entries of a parameter, or the default."""
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
        """Update the entries of parameters."""
        self._bring()
        super().update(*args, **more)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the entries of a parameter, inserting the default if there are none."""
        self._bring()
        return super().setdefault(key, default)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.items())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self.items())!r})"


class OptimizersOnWorkers:
    """State of the user's optimizers, local and on the workers.

    Args:
        optimizers: The optimizers.
        named: Parameters, by name.
        fetch: Returns the workers' optimizer state, or ``None`` if it is not available (any more).
        steps: Returns the number of steps begun.
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
        """Step count at which the local state equals the workers' state."""
        self._install()

    def changed(self) -> OptimizerEntries | None:
        """Return the whole optimizer state if the user has changed it since the last check.

        Raises:
            StaleState: It was changed after later steps had begun.
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
        """Download the state of unchanged optimizers alongside a changed one."""
        for each, state in zip(self._optimizers, self._states, strict=True):
            if each.state is state:
                self.bring()

    def bring(self) -> None:
        """Download the workers' present optimizer state."""
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
        """Give the optimizers plain mappings again, with the local state."""
        self._busy = True
        for each, state in zip(self._optimizers, self._states, strict=True):
            if each.state is state:
                each.state = defaultdict(dict, state.held())

    def _install(self) -> None:
        """Install the mappings that download the state on reading."""
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
    """A user change to an optimizer state that is not the newest."""


def _marks(state: StateOnWorkers) -> Marks:
    """Return the key that detects changes of a state."""
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
    """Return optimizer entries of a parameter in the form of a plain optimizer.

    Step counts and other scalars are on the CPU and have the default type, unless a kernel needs them on the device.
    """
    on_device = any(group.get(option) for option in _KERNEL_OPTIONS)
    device = torch.device("cpu") if parameter.is_meta else parameter.device
    scalar = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    found: dict[str, Any] = {}
    for key in sorted(entries, key=lambda key: (key != "step", key)):
        value = entries[key]
        if isinstance(value, Tensor):
            alone = not value.dim() and (key == "step" or bool(parameter.dim())) and value.is_floating_point()
            if not alone:
                value = value.to(device)
            elif on_device:
                value = value.to(device, torch.float32)
            else:
                value = value.to(scalar)
        found[key] = value
    return found
