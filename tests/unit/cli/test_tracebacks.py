"""Tracebacks of a script show the script's lines, and those of this package only where it is to blame."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import onebox
from onebox.cli.tracebacks import without_own_frames
from onebox.errors import UsageError
from onebox.pool.discovery import requested_devices
from onebox.vgpu.cuda_alias.device_arguments import named

PACKAGE = str(Path(onebox.__file__).parent)


def shown(call: Callable[..., Any], *arguments: Any) -> str:
    """Return what is printed for the error that a call raises."""
    try:
        call(*arguments)
    except Exception as error:
        return "".join(traceback.format_exception(without_own_frames(error)))
    raise AssertionError("it did not fail")


def test_lines_of_this_package_are_left_out() -> None:
    text = shown(requested_devices, "nothing")
    assert PACKAGE not in text
    assert "in shown" in text and "call(*arguments)" in text
    assert "UsageError: pool 'nothing' is not understood" in text


def test_lines_of_pytorch_are_left_out_only_below_those_of_this_package() -> None:
    wrong = (torch.ones(2, 3), torch.ones(2, 3), None, None, -100, None, "wrong")
    assert "functional.py" in shown(functional.cross_entropy, *wrong)
    text = shown(named(functional.cross_entropy), *wrong)
    assert "functional.py" not in text and PACKAGE not in text
    assert "in shown" in text and "wrong" in text


def test_lines_of_the_script_below_those_of_this_package_stay() -> None:
    def of_the_script() -> None:
        raise ValueError("mine")

    text = shown(named(of_the_script))
    assert PACKAGE not in text
    assert "in of_the_script" in text and "ValueError: mine" in text


def test_a_fault_of_this_package_shows_its_lines() -> None:
    text = shown(requested_devices, None)
    assert PACKAGE in text and "AttributeError" in text


def test_errors_behind_an_error_are_shown_where_the_script_had_part_in_them() -> None:
    def handled() -> None:
        try:
            raise KeyError("first, of the script")
        except KeyError:
            requested_devices("nothing")

    text = shown(handled)
    assert "first, of the script" in text and "During handling of the above exception" in text
    assert PACKAGE not in text

    def raised() -> None:
        try:
            requested_devices("nothing")
        except UsageError as error:
            raise RuntimeError("second, of the script") from error

    text = shown(raised)
    assert "pool 'nothing' is not understood" in text and "direct cause" in text and PACKAGE not in text


def test_errors_behind_an_error_that_are_of_this_package_alone_are_left_out() -> None:
    try:
        requested_devices("nothing")
    except UsageError as error:
        inner = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)

    def raised() -> None:
        raise RuntimeError("of the script") from inner

    text = shown(raised)
    assert "of the script" in text
    assert "not understood" not in text and "cause" not in text
