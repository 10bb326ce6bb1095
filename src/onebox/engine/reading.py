"""Reading the training state: which worker answers for which part of it, and how the answers are put together. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onebox.engine.holdings import Holdings
from onebox.engine.state import OptimizerEntries
from onebox.graph.placements import unshard
from onebox.pool import Answer
from onebox.wire import TensorSpec, from_frame
from onebox.wire.messages import Instruction
from onebox.wire.sayings import OptimizerState, Tensors
from onebox.wire.steps import Ask, Get


@dataclass(frozen=True, kw_only=True)
class State:
    """A training state.

    Args:
        tensors: Parameters and buffers, by name.
        entries: What the optimizer remembers.
    """

    tensors: Mapping[str, Tensor]
    entries: OptimizerEntries


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Who answers for what.

    Args:
        numbers: The buffer of each parameter and buffer, by name.
        names: For each worker the names whose tensors, or shares of them, it answers for.
        optimizer: The optimizer's definition.
        trained: For each worker the parameters that its optimizer steps, in their order.
        owned: Which of them it answers for.
        holdings: How they are split; ``None`` where nothing is.
    """

    numbers: Mapping[str, int]
    names: Mapping[int, tuple[str, ...]]
    optimizer: int
    trained: Mapping[int, tuple[str, ...]]
    owned: Mapping[int, tuple[str, ...]]
    holdings: Holdings | None

    def tensor_questions(self) -> dict[int, list[Instruction]]:
        """Return what to ask each worker about parameters and buffers."""
        return {worker: [Get(tuple(self.numbers[name] for name in own))] for worker, own in self.names.items() if own}

    def optimizer_questions(self) -> dict[int, list[Instruction]]:
        """Return what to ask each worker about what its optimizer remembers."""
        return {worker: [Ask("optimizer", (self.optimizer,))] for worker, owned in self.owned.items() if owned}

    def read(self, answers: Mapping[int, Answer]) -> State:
        """Put together what the workers answered to any of these questions."""
        parts: dict[str, list[Tensor]] = {}
        entries: dict[tuple[str, str], list[tuple[int, Any]]] = {}
        for worker, answer in answers.items():
            frames = iter(answer.frames)
            for result in answer.results:
                if isinstance(result, Tensors):
                    for name, spec in zip(self.names[worker], result.specs, strict=True):
                        parts.setdefault(name, []).append(from_frame(spec, next(frames)))
                elif isinstance(result, OptimizerState):
                    self._read_entries(worker, result, frames, entries)
        return State(
            tensors={name: self._whole(name, found) for name, found in parts.items()},
            entries=[(name, key, self._joined(name, values)) for (name, key), values in entries.items()],
        )

    def _read_entries(
        self,
        worker: int,
        listing: OptimizerState,
        frames: Iterator[Any],
        into: dict[tuple[str, str], list[tuple[int, Any]]],
    ) -> None:
        for entry in listing.entries:
            value = from_frame(entry.value, next(frames)) if isinstance(entry.value, TensorSpec) else entry.value
            name = self.trained[worker][entry.parameter]
            if name in self.owned[worker]:
                share = self.holdings.share(worker, name) if self.holdings else 0
                into.setdefault((name, entry.key), []).append((share, value))

    def _whole(self, name: str, parts: list[Tensor]) -> Tensor:
        return unshard(parts, self.holdings.placement(name)) if self.holdings and len(parts) > 1 else parts[0]

    def _joined(self, name: str, shares: list[tuple[int, Any]]) -> Any:
        """Put together an entry of the optimizer's state from those of its parameter's shares, whoever has them."""
        values = [value for _, value in sorted(shares, key=lambda share: share[0])]
        if len(values) == 1 or not isinstance(values[0], Tensor) or not values[0].dim():
            return values[0]
        return self._whole(name, values)
