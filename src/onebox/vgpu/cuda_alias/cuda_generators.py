"""Random number generators for scripts written for CUDA: PyTorch's own, of virtual devices, which report ``cuda``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch

from onebox.vgpu.cuda_alias.device_names import number_of, to_cuda, to_vgpu
from onebox.vgpu.integration import device_module
from onebox.vgpu.integration.generators import making_own
from onebox.vgpu.runtime import context

_plain: Any = torch._C.Generator


class _Translating(type(_plain)):  # type: ignore[misc]
    """Metaclass that makes generators of any device, and whose ``isinstance`` accepts all of them."""

    def __call__(cls, device: Any = "cpu") -> Any:
        place = torch.device(to_vgpu(device))
        return _plain.__new__(cls, place) if place.type == "vgpu" else _plain(place)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _plain)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, _plain)


class CudaGenerator(_plain, metaclass=_Translating):
    """A random number generator, of a virtual device if requested.

    Args:
        device: Its device.
    """

    @property
    def device(self) -> torch.device:
        """The device, such as ``cuda:0``."""
        return to_cuda(_plain.device.__get__(self))

    def clone_state(self) -> Any:
        """Return another generator in the same state."""
        return CudaGenerator(self.device).set_state(self.get_state())


class DeviceGenerator(CudaGenerator):
    """The generator that a device draws from where none is given."""

    def manual_seed(self, seed: int) -> Any:
        """Seed the generator."""
        with device_module.device(number_of(self.device)):
            device_module.manual_seed(seed)
        return self

    def initial_seed(self) -> int:
        """Return the seed."""
        with device_module.device(number_of(self.device)):
            return device_module.initial_seed()


def default_generator(device: Any) -> Any:
    """Return the generator of a device."""
    with making_own():
        return DeviceGenerator(torch.device("vgpu", number_of(device)))


class DefaultGenerators(Sequence[Any]):
    """The devices' own generators, by number."""

    def __len__(self) -> int:
        return context.device_count()

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        numbers = range(len(self))[index]
        return tuple(map(default_generator, numbers)) if isinstance(numbers, range) else default_generator(numbers)

    def __iter__(self) -> Iterator[Any]:
        return map(default_generator, range(len(self)))
