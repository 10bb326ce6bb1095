"""Trainers of other frameworks whose steps a :class:`onebox.Trainer` runs by a plan: Lightning, transformers.

Each module imports its framework, and is imported by users alone; nothing else of onebox needs one of them.
"""
