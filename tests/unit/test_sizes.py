"""Numbers of bytes as people write them."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.sizes import parse_size, size_text


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
