"""Trainers of other frameworks whose steps a :class:`onebox.Trainer` runs by a plan, Lightning and transformers; and
parts for PyTorch's own distributed training.

Each module imports its framework, and users import it by its own name; nothing else of onebox needs one of them.
"""

__all__: list[str] = []
