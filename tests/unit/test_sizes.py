"""Numbers of bytes as people write them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.sizes import parse_budgets, parse_size, size_text


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1", 1),
        ("1000000", 1_000_000),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("512M", 512 << 20),
        ("1.5KiB", 1536),
        ("3MB", 3_000_000),
        ("1T", 1 << 40),
        ("7b", 7),
        ("2 gb", 2 * 10**9),
    ],
)
def test_bytes(text: str, size_bytes: int) -> None:
    assert parse_size("--memory", text) == size_bytes


@pytest.mark.parametrize("text", ["", "0", "-1", "GiB", "1XB", "1e3", "0.1", "1 2", "²", "99999999T"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(UsageError, match="--memory"):
        parse_size("--memory", text)


@given(st.text(max_size=12))
def test_any_text_is_bytes_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_size("--memory", text) >= 1


@given(st.integers(1, 1 << 50))
def test_what_is_said_of_a_size_is_that_size(size_bytes: int) -> None:
    """But for what the last digit leaves out."""
    said = size_text(size_bytes).removesuffix(" bytes")
    assert (
        abs(parse_size("memory", said) - size_bytes) <= 0.5 * (1 << 20 if size_bytes < 1 << 30 else 0.1 * (1 << 30)) + 1
    )


# ---- budgets


@pytest.mark.parametrize(
    ("memory", "count", "quotas"),
    [
        (None, 2, (0, 0)),
        (5, 2, (5, 5)),
        ("2KiB", 1, (2048,)),
        ("1k,2k", 2, (1024, 2048)),
        (" 1k , 2k ", 2, (1024, 2048)),
        (["1k", 7], 2, (1024, 7)),
        ((9,), 1, (9,)),
        ({2: "1k", 0: 3}, 3, (3, 0, 1024)),
        ("1:1k", 2, (0, 1024)),
        ("1:1k, 0:2", 2, (2, 1024)),
    ],
)
def test_budgets(memory: Any, count: int, quotas: tuple[int, ...]) -> None:
    assert parse_budgets("memory", memory).of(count) == quotas
    assert parse_budgets("memory", memory).alike == (isinstance(memory, int | None) or memory == "2KiB")


@pytest.mark.parametrize(
    "memory", [0, "", "1k,", ",", "1:", ":1k", "1:1k,2k", "1:1k,1:2k", [], {}, {"0": 1}, {-1: 1}, [None], 1.5, True]
)
def test_what_is_no_budget(memory: Any) -> None:
    with pytest.raises(UsageError, match="memory"):
        parse_budgets("memory", memory)


@pytest.mark.parametrize(("memory", "count"), [("1k,2k", 1), ("1k,2k", 3), ("2:1k", 2), ({5: 1}, 5)])
def test_budgets_of_other_devices(memory: Any, count: int) -> None:
    with pytest.raises(UsageError, match=f"but lab1 has {count}"):
        parse_budgets("memory", memory).of(count, "lab1")


@given(st.text(alphabet="0123456789:,kKiB .-", max_size=14))
def test_any_text_is_budgets_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        found = parse_budgets("memory", text)
        count = len(found.listed) or max(found.own, default=0) + 1
        assert max(found.of(count)) >= 1
