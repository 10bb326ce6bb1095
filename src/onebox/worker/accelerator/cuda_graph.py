"""CUDA graphs of captured kernels; not yet run on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from onebox.worker.accelerator.interface import DeviceTensors

_Made = TypeVar("_Made")


class CudaGraph:
    """A CUDA graph with a private pool of memory; implements :class:`~onebox.worker.accelerator.interface.Graph`.

    A replay reads the seed of each generator state that is registered with the graph. Every random operator is captured
    with a state of its own, which has the seed and the offset 0 before each replay, as a seeded generator has.

    Args:
        device: The GPU.
        generator: Its default generator.
        draws: The number of random operators.
    """

    def __init__(self, device: torch.device, generator: torch.Generator, draws: int) -> None:
        self.size_bytes = 0
        self._device = device
        self._generator = generator
        self._states = [generator.clone_state() for _ in range(draws)]
        self._graph = torch.cuda.CUDAGraph()
        for state in self._states:
            self._graph.register_generator_state(state)

    def capture(self, work: Callable[[Callable[[], None]], _Made]) -> _Made:
        """Capture the kernels of a function; see :meth:`onebox.worker.accelerator.interface.Accelerator.capture`."""
        states: Iterator[torch.Generator] = iter(self._states)

        def draw() -> None:
            self._generator.graphsafe_set_state(next(states))

        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before, own = torch.cuda.memory_reserved(self._device), self._generator.graphsafe_get_state()
        try:
            # Other threads may go on with copies; only this one is held to the rules of a capture.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                made = work(draw)
        finally:
            self._generator.graphsafe_set_state(own)
        self.size_bytes = max(0, torch.cuda.memory_reserved(self._device) - before)
        return made

    def replay(self, seeds: Sequence[int]) -> None:
        """Launch the kernels on the stream of this thread."""
        for state, seed in zip(self._states, seeds, strict=True):
            state.manual_seed(seed)
        self._graph.replay()


class GraphCapture(DeviceTensors):
    """A GPU's capture of CUDA graphs.

    Args:
        device: The GPU, with its index.
    """

    graphs = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.cuda.set_device(device)  # also makes the generators
        self.generator: torch.Generator = torch.cuda.default_generators[device.index]

    def capture(self, work: Callable[[Callable[[], None]], _Made], draws: int) -> tuple[CudaGraph, _Made]:
        """Capture the kernels of a function; see :meth:`onebox.worker.accelerator.interface.Accelerator.capture`."""
        graph = CudaGraph(self.device, self.generator, draws)
        return graph, graph.capture(work)
