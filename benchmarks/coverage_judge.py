"""Whether a trial gives the same on a device as on the CPU: inputs moved, results compared, errors told apart."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

OUTCOMES = ("passed", "skipped", "failed", "unsupported", "wrong", "crashed")
"""What may become of a trial; ``skipped`` are those that the CPU refuses, too."""

UNSUPPORTED_WORDS = ("not supported", "unsupported", "virtual devices hold", "cannot run on a virtual device")
"""What an error says that is about a kind of thing, such as a sparse layout, and not about this trial."""

DEAD = ("WorkerDied", "WorkerHung", "PeerLost", "PoolError")
"""Errors after which a pool is no longer of use."""


class Verdict(NamedTuple):
    """What became of a trial.

    Args:
        outcome: One of :data:`OUTCOMES`.
        message: First line of the error, or of the difference.
    """

    outcome: str
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Something to run on the CPU and on a device.

    Args:
        name: What is tried, such as the shapes of a sample.
        run: Makes copies of its inputs on a device, runs there, and returns its results by name.
        seed: The random state to begin with.
        values: Whether results must have the same elements; otherwise the same shapes and types.
        rtol: Relative tolerance, and absolute tolerance, where they are not those of the type.
        atol: Likewise.
    """

    name: str
    run: Callable[[torch.device], dict[str, Any]]
    seed: int
    values: bool = True
    rtol: float | None = None
    atol: float | None = None


class Mover:
    """Copies nested inputs to a device: tensors keep strides, what shares memory keeps sharing it.

    Args:
        device: Where to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[tuple[int, torch.dtype], Tensor] = {}
        self._known: dict[int, Any] = {}
        self.tensors: list[Tensor] = []
        self.placed = False
        """Whether anything that it has copied says on which device an operator is to run."""

    def __call__(self, value: Any) -> Any:
        """Return a copy of a nested value with all its tensors, devices and generators on the device."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        self.placed = self.placed or isinstance(value, torch.device | torch.Generator) or value == "cpu"
        if isinstance(value, torch.device):
            return self._device if value.type == "cpu" else value
        if isinstance(value, torch.Generator):
            return torch.Generator(self._device).manual_seed(value.initial_seed())
        if isinstance(value, str) and value == "cpu":
            return str(self._device)
        if isinstance(value, dict):
            return {name: self(item) for name, item in value.items()}
        if type(value) in (list, tuple, torch.Size):
            return type(value)(self(item) for item in value)
        if isinstance(value, tuple):
            return tree_map(self, value)
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._known:
            made = self._copy(tensor.detach()).requires_grad_(tensor.requires_grad)
            self._known[id(tensor)] = made if type(tensor) is Tensor else torch.nn.Parameter(made, tensor.requires_grad)
            self.tensors.append(self._known[id(tensor)])
            self.placed = True
        return self._known[id(tensor)]

    def _copy(self, tensor: Tensor) -> Tensor:
        whole = tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized
        if whole or tensor.is_conj() or tensor.is_neg():
            return tensor.clone().to(self._device)
        storage = tensor.untyped_storage()
        if storage.nbytes() == tensor.numel() * tensor.itemsize and tensor.is_contiguous():
            return tensor.clone().to(self._device)
        key = (storage.data_ptr(), tensor.dtype)
        if key not in self._storages:
            flat = torch.empty(0, dtype=tensor.dtype).set_(storage)  # all of it, also what lies between the elements
            self._storages[key] = flat.clone().to(self._device)
        return self._storages[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()


class Misplaced(RuntimeError):
    """A result is not on the device that it was computed on."""


def fetch(value: Any, device: torch.device) -> Any:
    """Return a nested result on the CPU.

    Raises:
        Misplaced: A tensor of it is not on the device.
    """

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.device.type != device.type:
            raise Misplaced(f"a result is on {leaf.device}, not on {device}")
        return leaf.detach().cpu()

    return tree_map(one, value)


def seed_all(seed: int) -> None:
    """Set every random state that a sample or an operator may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back warnings: those of PyTorch are about its own samples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def judge(trial: Trial, device: torch.device, repeat: int = 1) -> Verdict:
    """Run a trial on the CPU, and so often on a device, and compare."""
    with quiet():
        try:
            reference = _run(trial, torch.device("cpu"))
        except Exception as error:
            return Verdict("skipped", first_line(error))
        verdict = Verdict("passed")
        for _ in range(repeat):
            try:
                verdict = compare(trial, reference, _run(trial, device))
            except Exception as error:
                return refused(error)
            if verdict.outcome != "passed":
                break
        return verdict


def _run(trial: Trial, device: torch.device) -> dict[str, Any]:
    seed_all(trial.seed)
    return {name: fetch(value, device) for name, value in trial.run(device).items()}


def refused(error: Exception) -> Verdict:
    """Return the verdict on what raised an error."""
    message = first_line(error)
    if type(error).__name__ in DEAD:
        return Verdict("crashed", message)
    if any(word in str(error).lower() for word in UNSUPPORTED_WORDS):
        return Verdict("unsupported", message)
    return Verdict("failed", message)


def first_line(error: BaseException) -> str:
    """Return an error in a line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def compare(trial: Trial, reference: dict[str, Any], candidate: dict[str, Any]) -> Verdict:
    """Return the verdict on results that are both on the CPU."""
    if reference.keys() != candidate.keys():
        return Verdict("wrong", f"results are {', '.join(candidate)}, not {', '.join(reference)}")
    for name, expected in reference.items():
        difference = _difference(trial, expected, candidate[name])
        if difference:
            return Verdict("wrong", f"{name}: {difference}")
    return Verdict("passed")


def _difference(trial: Trial, expected: Any, actual: Any) -> str:
    """Say in what two nested results differ."""
    ours, theirs = tree_flatten(actual)[0], tree_flatten(expected)[0]
    if len(ours) != len(theirs):
        return f"{len(ours)} values, not {len(theirs)}"
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(other, Tensor) != isinstance(mine, Tensor):
            return f"a {type(mine).__name__}, not a {type(other).__name__}"
        if isinstance(other, torch.device | torch.Generator):
            continue  # they are what differs
        if isinstance(other, Tensor):
            difference = _tensors_differ(trial, other, mine)
        elif isinstance(other, bool | int | float | complex) and trial.values:
            difference = _values_differ(trial, other, mine)
        else:
            difference = "" if other == mine or not trial.values else f"{mine!r}, not {other!r}"
        if difference:
            return difference
    return ""


def _tensors_differ(trial: Trial, expected: Tensor, actual: Tensor) -> str:
    for what in ("dtype", "shape", "layout"):
        if getattr(expected, what) != getattr(actual, what):
            return f"{what} {getattr(actual, what)}, not {getattr(expected, what)}"
    return _values_differ(trial, expected, actual) if trial.values else ""


def _values_differ(trial: Trial, expected: Any, actual: Any) -> str:
    try:
        torch.testing.assert_close(
            actual, expected, rtol=trial.rtol, atol=trial.atol, equal_nan=True, check_stride=False
        )
    except AssertionError as error:
        return " ".join(str(error).split())[:250]
    return ""
