"""A modelled accelerator for tests: an asynchronous device in host memory, whose kernels run as late as they may.

Tensors lie in one arena of host memory and are on a device of PyTorch's own (``PrivateUse1``), so that each operator,
copy and allocation comes by here. Kernels are queued on streams; a seeded scheduler runs them when the host waits for
them. Each access of a byte is checked: two that no stream, event or wait of the host orders are a race.

- :mod:`~tests.kit.accelerator.happens_before`: vector clocks and the check of accesses;
- :mod:`~tests.kit.accelerator.streams`: streams, events, the scheduler, modelled times;
- :mod:`~tests.kit.accelerator.allocator`: the arena and its caching allocator;
- :mod:`~tests.kit.accelerator.memory`: tensors over given memory, whose release is noticed;
- :mod:`~tests.kit.accelerator.operators`: PyTorch's operators as queued kernels;
- :mod:`~tests.kit.accelerator.graph`: captured kernels;
- :mod:`~tests.kit.accelerator.accelerator`: the interface of the worker.
"""

from tests.kit.accelerator.accelerator import Counters, ModelAccelerator

__all__ = ["Counters", "ModelAccelerator"]
