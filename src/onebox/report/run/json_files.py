"""JSON encoding for all files of a run."""

from __future__ import annotations

from pathlib import PurePath

import msgspec

from onebox.errors import UsageError


def to_json(value: object) -> bytes:
    """Encode a value as one line of JSON.

    JSON has no NaN and no infinity: a number that is not finite becomes ``null``.

    Args:
        value: Anything that msgspec encodes (mappings, sequences, dataclasses, dates, ...), with paths and
            NumPy scalars or one-element arrays and tensors allowed inside.

    Returns:
        UTF-8 bytes without a newline.

    Raises:
        UsageError: The value contains something that JSON cannot express.

    Example:
        >>> to_json({"loss": float("nan"), "step": 3})
        b'{"loss":null,"step":3}'
    """
    try:
        return msgspec.json.encode(value, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"cannot write this as JSON: {error}; allowed are numbers, texts, true and false, None, paths, "
            "and mappings, lists and dataclasses of these"
        ) from error


def _plain(value: object) -> object:
    if isinstance(value, PurePath):
        return str(value)
    item = getattr(value, "item", None)
    if callable(item):
        plain: object = item()
        if plain is not value:
            return plain
    raise TypeError(f"a value of type {type(value).__qualname__}")
