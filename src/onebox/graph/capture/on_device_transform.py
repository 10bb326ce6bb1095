"""Tensor code in front of a model: captured with it, and run on the workers on the transferred inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onebox.errors import CaptureError
from onebox.graph.capture.locate import at_line, place_of_error

OnDevice = Callable[[Any], Any]


class OnDeviceTransform:
    """A user's callable that is not part of the model: its tensors are constants, and not in any state.

    Args:
        on_device: Maps the inputs of a micro-batch to those of the model. A module is copied with the present values of
            its parameters and buffers.
    """

    def __init__(self, on_device: OnDevice) -> None:
        self.call = on_device
        self._module: nn.Module | None = None
        if isinstance(on_device, nn.Module):
            self._module = self.call = copy.deepcopy(on_device).to("cpu")
            for part in self._module.modules():
                for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
                    delattr(part, name)
                    setattr(part, name, None if tensor is None else tensor.detach())  # a constant of the graph

    def run(self, inputs: Any, *, training: bool) -> Any:
        """Return the inputs of the model.

        Args:
            inputs: Inputs of a micro-batch.
            training: Whether the model is in training mode; a module is put into the same mode.

        Raises:
            CaptureError: A graph cannot hold it.
        """
        if self._module is not None:
            self._module.train(training)
        try:
            made = self.call(inputs)
        except Exception as error:
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            raise _refusal(f"{type(error).__name__}: {reason}".removesuffix(": "), error) from error
        for leaf in pytree.tree_leaves(made):
            if isinstance(leaf, Tensor) and any(isinstance(size, torch.SymInt) for size in leaf.shape):
                raise _refusal("it returns a tensor whose shape depends on the values of others")
        return made


def _refusal(reason: str, error: Exception | None = None) -> CaptureError:
    place = None if error is None else place_of_error(error)
    return CaptureError(
        f"on_device= cannot be captured as a graph{at_line(place)}\n  {reason}\n"
        "  It runs on the workers, on the inputs of a micro-batch, so it must be code of tensors whose shapes are "
        "known; all else belongs into the feed's transform=, which may be any code and runs here",
        where=str(place) if place else None,
    )
