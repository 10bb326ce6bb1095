"""Captures of the models that all tests train, each made once: a capture takes longer than the steps of most tests.

A capture depends on what a model is and not on the values of its parameters. Two trainers share one where their models
were built by the same :class:`~tests.kit.models.Case`, and nothing that a capture can see has changed since. Other
models are captured each time. All are captured without guards, which takes a third of the time, unless a module says
``GUARDED = True``: it is about Python's state, or about what users' code may have.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from onebox.engine.readers import ReadingHook
from onebox.engine.workload.batch import Batch
from onebox.engine.workload.captures import Captures, CaptureSpec
from onebox.graph import TracedModel
from onebox.graph.capture.guards import Guards, Watch
from tests.kit.models import BUILT

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

guarded = True
"""Whether models are captured with guards."""

_plain = Captures._capture
_known: dict[Hashable, TracedModel] = {}


def capture(captures: Captures, batch: Batch, size: int, *, train: bool, probe: bool = False) -> TracedModel:
    """Do what :class:`Captures` does, but for what has been captured before in this process."""
    seen = what_it_sees(captures.recipe)
    key = seen, guarded, batch.signature(size), train, probe
    if seen is not None and key in _known:
        found = of_model(_known[key], captures.recipe)
        if (
            found.watch.changed is None
        ):  # else it was captured in other surroundings, or some layers are compared by identity
            return found
    with pytest.MonkeyPatch.context() as patch:
        if not guarded:
            patch.setattr(captures, "recipe", replace(captures.recipe, guards="none"))
        made = _plain(captures, batch, size, train=train, probe=probe)
    if seen is None:
        return made
    _known[key] = made
    return of_model(made, captures.recipe)


def of_model(traced: TracedModel, recipe: CaptureSpec) -> TracedModel:
    """Return a capture of one model as that of another that is alike: what was read of Python is that one's."""
    made = copy.copy(traced)
    made.watch = Watch([of(guards, recipe.model) for guards in traced.watch.guards], [recipe.model], [])
    return made


def of(guards: Guards, model: nn.Module) -> Guards:
    """Return guards of one model's code as those of another that is alike."""
    made, given = copy.copy(guards), {**guards._scope, "model": model}
    made._scope, made.read = given, {}
    made.read = {name: made._present(name) for name in guards.read}
    return made


def what_it_sees(recipe: CaptureSpec) -> Hashable | None:
    """Return all that a capture can see of a model and of what it is captured with; ``None`` for other models."""
    model = recipe.model
    case = BUILT.get(model)
    own = any("forward" in vars(module) for module in model.modules())
    code = recipe.loss, recipe.on_device
    if case is None or own or any(isinstance(each, nn.Module) for each in code):
        return None
    modules = tuple((name, type(each), each.training, _hooks(each)) for name, each in model.named_modules())
    metrics = tuple(recipe.metrics.items())
    recipes = code, metrics, recipe.precision, recipe.device_type, recipe.trained, recipe.fuse
    return case, repr(model), modules, tuple(_tensors(model)), recipes, torch.get_default_dtype()


def _hooks(module: nn.Module) -> Hashable:
    """Return the numbers of a module's hooks; those of trainers are all alike, as they leave what is computed alone."""
    hooks = (getattr(module, name).items() for name in _HOOKS)
    return tuple(tuple(-1 if isinstance(hook, ReadingHook) else number for number, hook in each) for each in hooks)


def _tensors(model: nn.Module) -> Iterator[Hashable]:
    """Yield what each parameter and buffer is, under all of its names; one that has several has one number."""
    numbers: dict[int, int] = {}
    named: list[tuple[str, Any]] = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        number = numbers.setdefault(id(tensor), len(numbers))
        yield name, number, type(tensor), tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.device
