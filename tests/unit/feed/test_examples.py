"""The examples in the feed's docstrings run, and its face is what it says."""

import doctest
import importlib
import pkgutil

import pytest

import onebox.feed

MODULES = [module.name for module in pkgutil.iter_modules(onebox.feed.__path__, "onebox.feed.")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_public_names():
    assert onebox.feed.__all__ == [
        "Data",
        "DataSet",
        "Feed",
        "Position",
        "Source",
        "Split",
        "Stream",
        "as_source",
        "load_dataset",
        "open_dataset",
    ]
