"""A modelled accelerator for tests: an asynchronous device in host memory, whose kernels run as late as they may.

Tensors lie in one arena of host memory and are on a device of PyTorch's own (``PrivateUse1``), so that each operator,
copy and allocation comes by here. Kernels are queued on streams; a seeded scheduler runs them when the host waits for
them. Each access of a byte is checked: two that no stream, event or wait of the host orders are a race.

- :mod:`~onebox.worker.accelerator.model.happens_before`: vector clocks and the check of accesses;
- :mod:`~onebox.worker.accelerator.model.streams`: streams, events, the scheduler, modelled times;
- :mod:`~onebox.worker.accelerator.model.allocator`: the arena and its caching allocator;
- :mod:`~onebox.worker.accelerator.model.memory`: tensors over given memory, whose release is noticed;
- :mod:`~onebox.worker.accelerator.model.operators`: PyTorch's operators as queued kernels;
- :mod:`~onebox.worker.accelerator.model.graph`: captured kernels;
- :mod:`~onebox.worker.accelerator.model.accelerator`: the interface of the worker.
"""

from onebox.worker.accelerator.model.accelerator import Counters, ModelAccelerator

__all__ = ["Counters", "ModelAccelerator"]
