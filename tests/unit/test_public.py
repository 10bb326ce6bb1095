"""The public face: these names and no others, and nothing happens before one of them is used."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import pkgutil
from typing import Any

import pytest

import onebox

PUBLIC = [
    "Buckets",
    "DataParallel",
    "Engine",
    "Evaluation",
    "Feed",
    "Link",
    "Numerics",
    "OneboxError",
    "Outer",
    "Plan",
    "Pool",
    "Recovery",
    "Staging",
    "StaleGradients",
    "StepLoss",
    "StopSignals",
    "Trainer",
    "Weighted",
    "Weights",
    "estimate_memory",
    "make_plan",
    "meta_parameters",
    "open",
    "quantize_frozen",
]


def test_the_public_names_are_pinned() -> None:
    assert onebox.__all__ == PUBLIC
    assert dir(onebox) == PUBLIC


def test_every_public_name_is_there_and_documented() -> None:
    for name in PUBLIC:
        found = getattr(onebox, name)
        assert callable(found)
        assert found.__doc__, name


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        _ = onebox.train


def test_a_star_gives_the_public_names() -> None:
    names: dict[str, Any] = {}
    importlib.import_module("onebox")
    for name in onebox.__all__:
        names[name] = getattr(onebox, name)
    assert names["open"] is importlib.import_module("onebox.vgpu").open_devices


def packages() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(onebox.__path__, "onebox.") if module.ispkg]


@pytest.mark.parametrize("name", packages())
def test_every_room_shows_what_it_says(name: str) -> None:
    package = importlib.import_module(name)
    names = package.__all__
    assert len(set(names)) == len(names)
    for public in names:
        assert hasattr(package, public), public
        assert not public.startswith("_")


def test_importing_onebox_imports_nothing_heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is executed once more under another name, with an eye on what it imports."""
    imported: list[str] = []
    original = builtins.__import__

    def note(name: str, *args: Any, **kwargs: Any) -> Any:
        imported.append(name)
        return original(name, *args, **kwargs)

    spec = importlib.util.spec_from_file_location("onebox_again", str(onebox.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(builtins, "__import__", note)
    spec.loader.exec_module(module)
    monkeypatch.undo()
    light = {"onebox.lazy_names", "onebox.torch_first", "onebox.version", "typing"}
    assert {name for name in imported if not name.startswith("_")} <= light
    assert module.__all__ == PUBLIC
