"""Public names that packages import at first use."""

from __future__ import annotations

import importlib

import pytest

from onebox.lazy_names import lazy_names

PACKAGES = ("onebox", "onebox.graph", "onebox.pool", "onebox.report", "onebox.wire", "onebox.worker")


@pytest.mark.parametrize("package", PACKAGES)
def test_all_public_names_are_there(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    with pytest.raises(AttributeError, match=rf"module '{package}' has no attribute 'Nothing'"):
        _ = module.Nothing


def test_a_name_may_be_another_one_in_its_module() -> None:
    get = lazy_names("here", {"math": ("pi", "tau as whole_turn")})
    assert get("whole_turn") == 2 * get("pi")
    with pytest.raises(AttributeError, match="module 'here' has no attribute 'tau'"):
        get("tau")
