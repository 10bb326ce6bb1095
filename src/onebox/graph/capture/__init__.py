"""Capture of a model as a joint ATen graph: tracing, the user's Python state, errors with source lines; no programs."""
