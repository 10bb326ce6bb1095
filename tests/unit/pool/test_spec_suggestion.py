"""The nearest valid specification, in the errors about pools."""

from __future__ import annotations

import pytest

from onebox.errors import UsageError
from onebox.pool.discovery import requested_devices
from onebox.pool.spec import parse_spec
from onebox.pool.spec_suggestion import suggestion


@pytest.mark.parametrize(
    ("text", "suggested"),
    [
        ("gpu", "cuda"),
        ("gpu:1", "cuda:1"),
        ("GPUs*2", "cuda:0,cuda:1"),
        ("cdua:0", "cuda:0"),
        ("cuda0", "cuda:0"),
        ("cuda*2", "cuda:0,cuda:1"),
        ("cpu2", "cpu*2"),
        ("cpu:0", "cpu"),
        ("cpu*x", "cpu"),
        ("CPU", "cpu"),
        ("smi*4@2", "sim*4@2"),
        ("autoo", "auto"),
        ("raay", "ray"),
        ("lba1", "lab1"),
        ("lba1/cuda:0", "lab1/cuda:0"),
        ("lab-2:7300", "lab2:7300"),
    ],
)
def test_what_is_near_is_suggested(text: str, suggested: str) -> None:
    assert suggestion(text, ["lab1", "lab2:7300"]) == f" (perhaps {suggested!r}?)"


@pytest.mark.parametrize("text", ["", "*", "desk", "nothing", "10.0.0.7", "[::1]:7200", "no thing", "cuda:0"])
def test_what_resembles_nothing_gets_no_suggestion(text: str) -> None:
    assert suggestion(text, ["lab1"]) == ""


def test_errors_about_pools_have_it() -> None:
    with pytest.raises(UsageError, match=r"not understood at 'cdua:0' \(perhaps 'cuda:0'\?\); allowed: 'auto'"):
        parse_spec("cpu,cdua:0")
    with pytest.raises(UsageError, match=r"not understood at 'cpu:3' \(perhaps 'cpu\*3'\?\); allowed: 'auto'"):
        requested_devices("cpu:3")
