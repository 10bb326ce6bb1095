"""Suggestions for pool specifications that are not understood. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

_SYNONYMS = {"gpu": "cuda", "gpus": "cuda", "nvidia": "cuda", "cpus": "cpu", "all": "auto", "local": "auto"}
_WORDS = {word: word for word in ("auto", "cpu", "cuda", "sim", "ray")} | _SYNONYMS
"""Names in specifications, and what they stand for."""

_VALID = re.compile(r"auto|ray|cuda(?::\d{1,3})?|(?:cpu|sim)(?:\*[1-9]\d{0,2})?(?:@\d{1,6}(?:\.\d{1,9})?)?", re.ASCII)
_WRITTEN = re.compile(r"(?P<name>[a-z]+)(?P<rest>\W*(?P<number>\d*).*)", re.ASCII | re.IGNORECASE)

_SIMILAR = 0.7
"""The least similarity of a suggestion, in the measure of difflib: that of two swapped letters of four is 0.75."""

_SHORT, _SIMILAR_SHORT = 3, 0.66
"""The same for names of up to three letters, of which two swapped ones leave 0.67."""

_MOST_LISTED = 8


def suggestion(text: str, hosts: Sequence[str] = ()) -> str:
    """Return the nearest valid part of a specification, in the form of a parenthesis; empty if none is near.

    Args:
        text: The part that is not understood.
        hosts: Addresses of hosts that it may stand for.

    Example:
        >>> suggestion("cdua:0"), suggestion("gpu"), suggestion("lba1", ["lab1", "lab2"]), suggestion("tpu")
        (" (perhaps 'cuda:0'?)", " (perhaps 'cuda'?)", " (perhaps 'lab1'?)", " (perhaps 'cpu'?)")
    """
    host, slash, device = text.partition("/")
    written = None if slash else _WRITTEN.fullmatch(text)
    similar = [(_similarity(host, known), f"{known}{slash}{device}") for known in hosts if known != host]
    if written is not None:
        name = written["name"].lower()
        similar += [
            (_similarity(name, word), part)
            for word, meant in _WORDS.items()
            if (part := _part(meant, written["rest"], written["number"])) != text
        ]
    likeness, found = max(similar, default=(0.0, ""), key=lambda one: one[0])
    return f" (perhaps {found!r}?)" if likeness else ""


def _similarity(text: str, known: str) -> float:
    """Return the similarity of two names, 0 if they are not similar enough."""
    ratio = SequenceMatcher(None, text.lower(), known.lower()).ratio()
    return ratio if ratio >= (_SIMILAR_SHORT if len(text) <= _SHORT else _SIMILAR) else 0.0


def _part(name: str, rest: str, number: str) -> str:
    """Return the devices of a kind that the rest of a part asks for, as far as it can be understood."""
    count = int(number or 0)
    if name == "cuda" and rest == f"*{number}" and 1 <= count <= _MOST_LISTED:
        return ",".join(f"cuda:{index}" for index in range(count))
    separator = ":" if name == "cuda" else "*"
    return next((part for part in (name + rest, f"{name}{separator}{number}") if _VALID.fullmatch(part)), name)
