"""Safetensors files, read and written one tensor at a time; nothing is ever unpickled."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from onebox.errors import CheckpointError
from onebox.wire import DTYPES, TensorSpec, spec_of, to_frame

_TYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
"""Element types by their safetensors names."""

_NAMES = {theirs: name for name, theirs in _TYPES.items()}

_HEADER_ALIGN_BYTES = 8


class StoredTensor(NamedTuple):
    """A tensor in a file.

    Args:
        file: The file.
        name: Its name there.
        dtype: Its element type as the file names it.
        shape: Its shape.
        version: Identity of the file and of its last change.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    version: tuple[int, ...] = ()

    @property
    def spec(self) -> TensorSpec | None:
        """Its spec; ``None`` for an element type that workers do not have."""
        return TensorSpec(_NAMES[self.dtype], self.shape) if self.dtype in _NAMES else None

    def read(self) -> Tensor:
        """Return the tensor, a view of the mapped file: its elements are read when they are used.

        Raises:
            CheckpointError: The file has become another one.
        """
        try:
            if self.version not in ((), _version(self.file)):
                raise CheckpointError(
                    f"{self.file} is another file by now: leave the weights as they are while they are trained with",
                    path=self.file,
                )
            with safe_open(self.file, "pt") as opened:
                tensor: Tensor = opened.get_tensor(self.name)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{self.file} cannot be read any more: {error}", path=self.file) from None
        if spec_of(tensor) != self.spec:
            raise CheckpointError(f"{self.file} has changed: {self.name} is {spec_of(tensor)} now", path=self.file)
        return tensor


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a file, by name, from its header.

    Raises:
        CheckpointError: It cannot be read, or is no safetensors file.
    """
    try:
        version = _version(file)
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 # no dict
            return {
                name: StoredTensor(file, name, str(each.get_dtype()), tuple(each.get_shape()), version)
                for name, each in slices.items()
            }
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is no safetensors file, or is cut short: {error}", path=file) from None


def _version(file: Path) -> tuple[int, ...]:
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class WrittenFile(NamedTuple):
    """A written file: its bytes, and their SHA-256."""

    size_bytes: int
    sha256: str


def write_tensors(
    file: Path,
    specs: Mapping[str, TensorSpec],
    elements: Callable[[Sequence[str]], Iterable[Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> WrittenFile:
    """Write a new safetensors file as its tensors arrive: the header follows from their specs.

    The header is the length of a JSON object and the object itself; the elements follow, largest types first, so that
    all are aligned (https://github.com/huggingface/safetensors, Format).

    Args:
        file: The file.
        specs: Spec of each tensor, by name.
        elements: Maps names to the elements of their tensors, one tensor after the other, in chunks of any shape.
        metadata: Strings for the header.

    Raises:
        CheckpointError: A tensor is of a type that no such file can hold.
        OSError: It cannot be written.
    """
    names = sorted(specs, key=lambda name: (-DTYPES[specs[name].dtype].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        spec = specs[name]
        if spec.dtype not in _TYPES:
            raise CheckpointError(
                f"{name} is of {spec}, which no safetensors file can hold: train without it", path=file
            )
        start, end = end, end + spec.size_bytes
        header[name] = {"dtype": _TYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGN_BYTES)
    begin = [memoryview(struct.pack("<Q", len(text))), memoryview(text)]
    digest, size_bytes = hashlib.sha256(), 0
    with file.open("xb") as stream:
        for part in itertools.chain(begin, map(to_frame, elements(names))):
            stream.write(part)
            digest.update(part)
            size_bytes += len(part)
    assert size_bytes == sum(map(len, begin)) + end, f"{file} lacks something"
    return WrittenFile(size_bytes, digest.hexdigest())
