"""Changes to sensible calls, as of a hostile client: numbers, indices, sizes, strides and types out of range."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from guarded_memory import Image, span_of
from operator_calls import Call, random_call, random_image

from onebox.wire import Complex, DType, LayoutArgument, Many, MemoryFormat, SlotArgument, Value
from onebox.wire.program import ITEM_BYTES

UNCHANGED = 0.15
"""Share of calls that stay as they are: sensible ones have to be safe, too."""

EXTREME = 0.03
"""Share of calls all of whose numbers are the least, or others at which a kernel divides by zero or never ends."""

RESIZED = 0.06
"""Share of calls in which a size is another one everywhere, as of a batch without samples: few kernels refuse that, and
some divide by the size, or leave results unwritten."""

MISPLACED = 0.1
"""Share of calls with tensors of integers in which some of these are places just outside of a tensor, or far away."""

UNRELATED = 0.05
"""Share of calls whose arguments only have the types of the schema."""

_LARGEST = 1 << 14
_EDGES = (
    -1, 0, 1, -2, 2, 3, 7, 8, 16, 63, 64, 127, 128, 255, 256, 1000, 4096, 65536, 1 << 20, 2**31 - 1, 2**31, 2**31 + 1,
    2**32 - 1, 2**32, 2**32 + 1, -(2**31), -(2**31) - 1, 1 << 40, -(1 << 40), 1 << 62, -(1 << 62), 2**63 - 1, -(2**63),
)  # fmt: skip
_FLOATS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -1.0, 1e-45, 1e38, 1e308, -1e308, 2.0**31, 2.0**63)
_TEXTS = (
    "", "sum", "mean", "max", "min", "prod", "constant", "reflect", "circular", "none", "tanh", "trunc", "floor",
    "x" * 300, "amax", "valid", "same",
)  # fmt: skip
_DTYPES = tuple(dtype for dtype in ITEM_BYTES if dtype != "complex32")
_FORMATS = {
    "int8": "b", "uint8": "B", "bool": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q",
    "uint64": "Q", "float32": "f", "float64": "d", "float16": "e",
}  # fmt: skip


def mutate(base: Sequence[Call], rng: random.Random) -> Call:
    """Return a variant of one of several calls of an operator."""
    call = rng.choice(base)
    chance = rng.random()
    if chance < UNCHANGED:
        return call
    if chance < UNCHANGED + UNRELATED:
        call = random_call(call.name, rng)
    draft = _Draft(call, rng)
    if rng.random() < EXTREME:
        draft.extremes()
    if rng.random() < MISPLACED and draft.misplace():
        return draft.call()
    if rng.random() < RESIZED:
        draft.resize()
        if rng.random() < 0.5:
            return draft.call()
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
        draft.change()
    return draft.call()


def varied(call: Call, rng: random.Random, *, shapes: bool) -> Call:
    """Return a call with the same constants and other tensors, some of the time those that it has.

    Args:
        call: The call.
        rng: Source of random numbers.
        shapes: Whether sizes and types may differ, not only values and strides.
    """
    if not call.images or rng.random() < UNCHANGED:
        return call
    images = list(call.images)
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = _place(images, rng)
        images[place] = (mutated_image if shapes else rng.choice((_values, _values, _strides)))(images[place], rng)
    return Call(call.name, call.args, call.kwargs, tuple(images))


def _place(images: Sequence[Image], rng: random.Random) -> int:
    """Return the place of an image to be changed: of integers, where there are some, more often than others."""
    indices = [place for place, image in enumerate(images) if "int" in image.dtype]
    return rng.choice(indices if indices and rng.random() < 0.5 else range(len(images)))


class _Draft:
    """A call that is being changed.

    Args:
        call: What it is at first.
        rng: Source of random numbers.
    """

    def __init__(self, call: Call, rng: random.Random) -> None:
        self._name = call.name
        self._args = list(call.args)
        self._kwargs = dict(call.kwargs)
        self._images = list(call.images)
        self._rng = rng

    def call(self) -> Call:
        """Return it as it is now, with the tensors that it uses."""
        places: dict[int, int] = {}

        def renumbered(value: Any) -> Any:
            if isinstance(value, SlotArgument):
                return SlotArgument(places.setdefault(value.index, len(places)))
            return Many(tuple(map(renumbered, value.items))) if isinstance(value, Many) else value

        args = tuple(map(renumbered, self._args))
        kwargs = {key: renumbered(value) for key, value in self._kwargs.items()}
        return Call(self._name, args, kwargs, tuple(self._images[place] for place in places))

    def change(self) -> None:
        """Change one argument, or the content of one tensor."""
        places: list[Any] = [*range(len(self._args)), *self._kwargs]
        if self._images and self._rng.random() < 0.5:
            place = _place(self._images, self._rng)
            self._images[place] = mutated_image(self._images[place], self._rng)
        elif places:
            place = self._rng.choice(places)
            holder: Any = self._args if isinstance(place, int) else self._kwargs
            holder[place] = self._mutated(holder[place])

    def extremes(self) -> None:
        """Set all elements of each tensor, and each number, to an extreme one."""
        self._images = [_extreme(image, self._rng) for image in self._images]
        self._args = [_extreme_scalar(value, self._rng) for value in self._args]
        self._kwargs = {key: _extreme_scalar(value, self._rng) for key, value in self._kwargs.items()}

    def misplace(self) -> bool:
        """Put places outside of the tensors into one of integers, if there is one, and change nothing else."""
        places = [place for place, image in enumerate(self._images) if "int" in image.dtype and image.data]
        if not places:
            return False
        place = self._rng.choice(places)
        sizes = {size for image in self._images for size in (*image.shape, prod(image.shape))}
        outside = [*sizes, *(size + 1 for size in sizes), *(-size - 1 for size in sizes), 1 << 31, 1 << 40, -(1 << 40)]
        image = self._images[place]
        width = ITEM_BYTES[image.dtype]
        count = len(image.data) // width
        number = self._rng.choice(sorted(outside)) & ((1 << 8 * width) - 1)
        element, at = number.to_bytes(width, "little"), self._rng.randrange(count) * width
        whole = self._rng.random() < 0.3
        data = element * count if whole else image.data[:at] + element + image.data[at + width :]
        self._images[place] = Image(image.dtype, image.shape, image.strides, data)
        return True

    def resize(self) -> None:
        """Change a size of some tensor in all tensors that have it, and where it is a number."""
        sizes = sorted({size for image in self._images for size in image.shape})
        if not sizes:
            return
        old, new = self._rng.choice(sizes), self._rng.choice((0, 0, 0, 1, 2, 5, 17))

        def changed(value: Any) -> Any:
            if isinstance(value, Many):
                return Many(tuple(map(changed, value.items)))
            return new if value == old and type(value) is int else value

        for place, image in enumerate(self._images):
            shape = tuple(new if size == old else size for size in image.shape)
            if shape != image.shape and prod(shape) <= _LARGEST:
                self._images[place] = _laid(image.dtype, shape, _dense(shape), image.data)
        self._args = list(map(changed, self._args))
        self._kwargs = {key: changed(value) for key, value in self._kwargs.items()}

    def _mutated(self, value: Value) -> Value:
        rng = self._rng
        if isinstance(value, Many):
            return self._mutated_list(value)
        if isinstance(value, SlotArgument):
            return self._other_tensor(value)
        if rng.random() < 0.03:
            return None
        return mutated_scalar(value, rng)

    def _other_tensor(self, value: SlotArgument) -> SlotArgument | None:
        """Return another tensor, or none, or change this one."""
        rng = self._rng
        chance = rng.random()
        if chance < 0.15:
            return None
        if chance < 0.5:
            return SlotArgument(rng.randrange(len(self._images)))  # the same tensor twice, or another's place
        self._images[value.index] = mutated_image(self._images[value.index], rng)
        return value

    def _mutated_list(self, value: Many) -> Many:
        rng = self._rng
        items: list[Any] = list(value.items)
        chance = rng.random()
        if chance < 0.1 or not items:
            return Many(tuple(items[: rng.randrange(len(items) + 1)])) if items else Many((rng.choice(_EDGES[:8]),))
        place = rng.randrange(len(items))
        if chance < 0.25:
            items.insert(place, items[rng.randrange(len(items))])
        elif chance < 0.35:
            del items[place]
        elif chance < 0.4:
            rng.shuffle(items)
        elif isinstance(items[place], SlotArgument):
            items[place] = self._other_tensor(items[place])
        elif chance < 0.5:
            items = [mutated_scalar(items[place], rng)] * len(items)
        else:
            items[place] = mutated_scalar(items[place], rng)
        return Many(tuple(items))


def mutated_scalar(value: Any, rng: random.Random) -> Any:
    """Return another value of the same type, or sometimes of another one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        chance = rng.random()
        if chance < 0.35:
            return max(-(2**63), min(2**63 - 1, value + rng.choice((-2, -1, 1, 2))))
        if chance < 0.45:
            return max(-(2**63), min(2**63 - 1, rng.choice((-value, 2 * value, value * value))))
        return rng.choice(_EDGES) if chance < 0.97 else float(value)
    if isinstance(value, float):
        return rng.choice(_FLOATS)
    if isinstance(value, Complex):
        return Complex(rng.choice(_FLOATS), value.imag)
    if isinstance(value, str):
        return rng.choice(_TEXTS)
    if isinstance(value, DType | MemoryFormat | LayoutArgument) and rng.random() < 0.1:
        return rng.choice(_EDGES)  # PyTorch takes enumerations as numbers, too
    if isinstance(value, DType):
        return DType(rng.choice(_DTYPES))
    if isinstance(value, MemoryFormat):
        return MemoryFormat(rng.choice(("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")))
    if value is None:
        return rng.choice((None, 0, 1, -1, 2, 0.5, True, DType("float64")))
    return value


def _extreme_scalar(value: Value, rng: random.Random) -> Value:
    if isinstance(value, bool) or rng.random() < 0.5:
        return value
    if isinstance(value, int):
        return rng.choice((-1, 0, 7, -(2**31), -(2**63), 2**63 - 1))
    return rng.choice(_FLOATS) if isinstance(value, float) else value


# ---- tensors


def _extreme(image: Image, rng: random.Random) -> Image:
    form = _FORMATS.get(image.dtype)
    width = ITEM_BYTES[image.dtype]
    if form is None or image.dtype == "bool":
        return image
    if form in "fde":
        element = struct.pack(form, rng.choice((float("nan"), float("inf"), 0.0, -1.0)))
    else:
        number = rng.choice((-1 << (8 * width - 1), -1, 0, 7))
        element = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    return Image(image.dtype, image.shape, image.strides, element * (len(image.data) // width))


def mutated_image(image: Image, rng: random.Random) -> Image:
    """Return another tensor for the same place."""
    integral = "int" in image.dtype
    changes: tuple[Callable[[Image, random.Random], Image], ...] = (
        (*(_values,) * 5, _shape, _strides, _type) if integral else (_shape, _shape, _strides, _type, _values)
    )
    return rng.choice(changes)(image, rng)


def _values(image: Image, rng: random.Random) -> Image:
    """Change one element or all of them."""
    width = ITEM_BYTES[image.dtype]
    count = len(image.data) // width
    if not count:
        return image
    at = rng.choice((0, count - 1, rng.randrange(count))) * width
    form = _FORMATS.get(image.dtype)
    if form is None:  # of bfloat16 and complex numbers all bits
        element = rng.choice((b"\xff" * width, bytes(width), rng.randbytes(width)))
    elif image.dtype == "bool":
        element = bytes([rng.choice((0, 1, 1, 2, 255))])  # a byte that a client may send, although it is no bool
    elif form in "fde":
        number = rng.choice(_FLOATS)
        try:
            element = struct.pack(form, number)
        except OverflowError:
            element = struct.pack(form, float("inf"))
    else:
        number = int.from_bytes(image.data[at : at + width], "little") + rng.choice((-2, -1, 1, 1, 2, 3, 5, 8, 50))
        if rng.random() < 0.5:
            number = rng.choice((*_EDGES, count, -count, count - 1, count + 1))
        element = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    if rng.random() < 0.2:
        return Image(image.dtype, image.shape, image.strides, element * count)
    return Image(image.dtype, image.shape, image.strides, image.data[:at] + element + image.data[at + width :])


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for place in reversed(range(len(shape) - 1)):
        strides[place] = strides[place + 1] * max(1, shape[place + 1])
    return tuple(strides)


def _laid(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], data: bytes) -> Image:
    """Return an image whose elements repeat what there is."""
    width = ITEM_BYTES[dtype]
    size = span_of(shape, strides) * width
    data = data or bytes(width)
    return Image(dtype, shape, strides, (data * (size // len(data) + 1))[:size])


def _shape(image: Image, rng: random.Random) -> Image:
    """Change the sizes."""
    shape = list(image.shape)
    chance = rng.random()
    if not shape or chance < 0.12:
        shape.insert(rng.randrange(len(shape) + 1), rng.choice((0, 1, 2, 3)))
    elif chance < 0.24:
        del shape[rng.randrange(len(shape))]
    elif chance < 0.3:
        rng.shuffle(shape)
    elif chance < 0.4:
        shape = [rng.choice((0, 1, 2, 3, 5)) for _ in shape]
    else:
        place = rng.randrange(len(shape))
        size = shape[place]
        shape[place] = rng.choice((0, 1, size + 1, max(0, size - 1), 2 * size, size + 7, size + 64, 1000))
    if prod(shape) > _LARGEST:
        return image
    return _laid(image.dtype, tuple(shape), _dense(shape), image.data)


def _strides(image: Image, rng: random.Random) -> Image:
    """Change the layout, not the sizes: gaps, elements that share memory, another order of dimensions."""
    if not image.shape:
        return image
    strides = list(image.strides)
    chance = rng.random()
    if chance < 0.25:
        strides[rng.randrange(len(strides))] = 0
    elif chance < 0.5:
        strides = [2 * stride for stride in strides]
    elif chance < 0.75:
        order = list(range(len(strides)))
        rng.shuffle(order)
        dense = _dense([image.shape[place] for place in order])
        for place, stride in zip(order, dense, strict=True):
            strides[place] = stride
    else:
        strides[rng.randrange(len(strides))] = rng.choice((0, 1, 2, 3, 5, 17))
    if span_of(image.shape, strides) > _LARGEST:
        return image
    return _laid(image.dtype, image.shape, tuple(strides), image.data)


def _type(image: Image, rng: random.Random) -> Image:
    """Change the type of the elements, which keep small values."""
    dtype = rng.choice(_DTYPES)
    if prod(image.shape) > 512:
        return _laid(dtype, image.shape, _dense(image.shape), bytes(ITEM_BYTES[dtype]))
    return random_image(rng, dtype, image.shape)
