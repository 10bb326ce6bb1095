"""Texts of other machines: what would steer a terminal, or look like other text there, is escaped.

Messages are cleaned where they are decoded, each text in them, so that nothing that prints one has to think of it.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from msgspec import Struct
from msgspec.structs import replace

T = TypeVar("T")

OF_LINES = frozenset({"failure", "last_words", "message", "reason", "why"})
"""Fields whose texts may have several lines."""

_WIDE = 0x10000


def clean_text(text: str, *, lines: bool = False) -> str:
    r"""Return a text with its control characters escaped, and all others that are not printable.

    Args:
        text: The text.
        lines: Whether ends of lines and tabs stay.

    Example:
        >>> clean_text("a\x1b[2Jb\n")
        'a\\u001b[2Jb\\u000a'
        >>> clean_text("one\ntwo\r", lines=True)
        'one\ntwo\\u000d'
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    made = "".join(one if one.isprintable() or one in kept else _escape(ord(one)) for one in text)
    return text if made == text else made  # itself, so that a message without changes is, too


def clean(message: T) -> T:
    """Return a decoded message with :func:`clean_text` of each text in it, however deep."""
    return _clean(message, False)


def _escape(number: int) -> str:
    return f"\\u{number:04x}" if number < _WIDE else f"\\U{number:08x}"


def _clean(value: Any, lines: bool) -> Any:
    kind = value.__class__
    if kind is str:
        return value if value.isprintable() else clean_text(value, lines=lines)
    if kind is tuple:
        for one in value:
            if _clean(one, lines) is not one:
                return tuple([_clean(one, lines) for one in value])
        return value
    changed: dict[str, Any] | None = None
    for name, of_lines in _text_fields(kind):
        before = getattr(value, name)
        if before and (after := _clean(before, of_lines)) is not before:  # most of what is there is empty
            changed = {**(changed or {}), name: after}
    return replace(value, **changed) if changed else value


@functools.cache
def _text_fields(kind: type) -> tuple[tuple[str, bool], ...]:
    """Return the fields of a class of messages that may hold text, each with whether it may have several lines."""
    if not issubclass(kind, Struct):
        return ()
    hints = get_type_hints(kind)
    return tuple((name, name in OF_LINES) for name in kind.__struct_fields__ if _holds_text(hints[name]))


def _holds_text(annotation: Any) -> bool:
    if annotation is str:
        return True
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        return bool(_text_fields(annotation))
    if get_origin(annotation) is Literal:
        return False
    return any(map(_holds_text, get_args(annotation)))


__all__ = ["clean", "clean_text"]
