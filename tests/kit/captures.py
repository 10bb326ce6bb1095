"""Captures of models in tests that are not about changes of Python's state."""

from __future__ import annotations

import functools

from onebox.graph.capture import export

capture = functools.partial(export.capture, guards=False)
"""Trace a model, but do not let Dynamo read its code for guards, which takes longer than the trace."""
