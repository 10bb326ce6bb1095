"""Configuration of the documentation: Sphinx with MyST and Furo; ``make docs`` builds it without a network."""

from __future__ import annotations

import contextlib
import inspect
import re
import typing
from types import SimpleNamespace
from typing import Any

from sphinx.application import Sphinx

import onebox

project = "onebox"
author = "the onebox authors"
release = version = onebox.__version__
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|collections|concurrent|signal|pathlib|datetime|types|typing|lightning|transformers)\..*")
]
"""Names of other projects: their inventories would have to be fetched from a network."""

nitpick_ignore = [
    ("py:class", "onebox.engine.workload.captures.Captures"),
    ("py:class", "onebox.engine.problem.corrections.AppliedCorrection"),
    # autodoc does not resolve the types of a method with a decorator, as those of a trainer have
    *(
        ("py:class", name)
        for name in (
            "Islands", "Loss", "LossReduction", "LossyPart", "Metrics", "OnDevice", "Optimizers", "Path",
            "PlanArgument", "Precision", "nn.Module",
        )
    ),
]  # fmt: skip
"""Types that nobody needs to know: their objects are handed on only."""

myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # output of programs in console blocks is not a shell's syntax

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"onebox {release}"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {
    "source_repository": "https://github.com/onebox-project/onebox/",
    "source_branch": "main",
    "source_directory": "docs/",
}

_FILES = "https://github.com/onebox-project/onebox/blob/main"


def _link_to_repository(app: Sphinx, page: str, source: list[str]) -> None:
    """Make links to files outside of this folder, which work on GitHub as they are, links to the repository."""
    outside = "../" * (page.count("/") + 1)
    source[0] = re.sub(rf"\]\({re.escape(outside)}(?=[^./])", f"]({_FILES}/", source[0])


def _resolve_annotations(app: Sphinx, function: Any, bound: bool) -> None:
    """Replace the text of annotations by types, of which autodoc would look up those of a constructor in its class."""
    types: dict[str, Any] = {}
    for name, text in getattr(function, "__annotations__", {}).items():
        with contextlib.suppress(AttributeError, NameError, TypeError):  # types that are imported for checkers only
            types |= typing.get_type_hints(SimpleNamespace(__annotations__={name: text}), function.__globals__)
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        signature = inspect.signature(function)
        public = [each for each in signature.parameters.values() if not each.name.startswith("_")]
        resolved = [each.replace(annotation=types.get(each.name, each.annotation)) for each in public]
        function.__signature__ = signature.replace(parameters=resolved)


def _link_to_pages(app: Sphinx, kind: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Make links of the paths of pages in docstrings."""
    lines[:] = [re.sub(r"\bdocs/([\w/-]+)\.md", r":doc:`/\1`", line) for line in lines]


def setup(app: Sphinx) -> None:
    app.connect("autodoc-before-process-signature", _resolve_annotations)
    app.connect("autodoc-process-docstring", _link_to_pages)
    app.connect("source-read", _link_to_repository)
