"""A user's own model and loss, named ``package.module:function`` on the command line.

They are imported in this process alone: workers receive the captured graph, never a module's name.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

import onebox
from onebox.cli.models import seeded
from onebox.cli.options.common import BUILT_IN_MODELS
from onebox.cli.options.jobs import JobConfig
from onebox.cli.options.pools import ProfileConfig
from onebox.errors import UsageError
from onebox.feed import Data

_NOT_THE_USERS = (*(f"{Path(str(each.__file__)).parent}{os.sep}" for each in (onebox, torch, importlib)), "<frozen ")


def own_model(reference: str, data: Data, seed: int) -> nn.Module:
    """Call a user's function, or class, that makes a model.

    Args:
        reference: Its name, ``package.module:function``. It has no required argument, or one called ``data``, which is
            the data set: ``data.shape`` (channels, height, width), ``data.classes``, ``data.mean`` and ``data.std``.
        data: The data set.
        seed: Seed of PyTorch's generator during the call; the global random state is unchanged.

    Returns:
        What it returned: a model that takes images ``uint8 [B, C, H, W]``.

    Raises:
        UsageError: It cannot be imported or called, has failed, or returned something else.
    """
    flag = f"--model {reference}"
    factory = load_callable("--model", reference)
    if isinstance(factory, nn.Module):
        raise UsageError(f"{flag} is a model itself: name a function that makes one, so that --seed sets its weights")
    takes_data = _takes_data(flag, factory)
    with seeded(seed):
        try:
            model = factory(data=data) if takes_data else factory()
        except (Exception, SystemExit) as error:
            raise _failure(f"{flag} has failed", error) from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"{flag} returned {type(model).__qualname__}; it has to return a torch.nn.Module")
    return model


def import_functions(config: JobConfig | ProfileConfig) -> None:
    """Import a user's own model and loss, if the options name any, so that errors come before devices are opened.

    Raises:
        UsageError: One cannot be imported.
    """
    if config.model is not None and config.model not in BUILT_IN_MODELS:
        load_callable("--model", config.model)
    if config.loss is not None:
        load_callable("--loss", config.loss)


def load_callable(flag: str, reference: str) -> Callable[..., object]:
    """Import what ``package.module:function`` names; the current folder is searched first, as by ``python -m``.

    Args:
        flag: The flag that names it, for messages.
        reference: The name; a dot after the colon leads to an attribute of a class or an object.

    Raises:
        UsageError: There is no such module or function, it cannot be called, or the module's own code has failed.
    """
    place, _, path = reference.partition(":")
    found: object = _import(f"{flag} {reference}", place)
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise UsageError(f"{flag} {reference}: there is no {attribute} in {place}{_others(found, attribute)}")
        found, place = getattr(found, attribute), f"{place}.{attribute}"
    if not callable(found):
        raise UsageError(f"{flag} {reference} is of type {type(found).__qualname__}, which cannot be called")
    return found


def _import(flag: str, name: str) -> ModuleType:
    folder = os.getcwd()
    if not sys.flags.safe_path and sys.path[:1] not in ([folder], [""]):  # python -P: without the current folder
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            near = difflib.get_close_matches(name, (file.stem for file in Path(folder).glob("*.py")), n=1)
            hint = f" (perhaps {near[0]}?)" if near else ""
            raise UsageError(
                f"{flag}: there is no module {error.name}{hint}, neither in the current folder, {folder}, nor among "
                "what is installed"
            ) from None
        raise _failure(f"{flag}: importing {name} has failed", error) from error


def _others(holder: object, name: str) -> str:
    """Return a hint at similar names or, without any, at those that a module defines."""
    names = [each for each, value in vars(holder).items() if callable(value) and not each.startswith("_")]
    near = difflib.get_close_matches(name, names, n=3)
    if near:
        return f" (perhaps {' or '.join(near)}?)"
    own = [each for each in names if getattr(vars(holder)[each], "__module__", "") == getattr(holder, "__name__", None)]
    return f"; it defines {', '.join(own[:8])}" if own else ""


def _takes_data(flag: str, factory: Callable[..., object]) -> bool:
    """Return whether a factory has a required argument ``data``.

    Raises:
        UsageError: It has another required one.
    """
    try:
        arguments = inspect.signature(factory).parameters.values()
    except ValueError:  # of some built-in functions nothing is known
        return False
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [each for each in arguments if each.default is each.empty and each.kind not in variadic]
    odd = [each.name for each in required if each.name != "data" or each.kind is each.POSITIONAL_ONLY]
    if odd:
        raise UsageError(
            f"{flag} needs {', '.join(odd)}: allowed is one argument without a default, data, which is the data set; "
            "give the others defaults, or name a function that calls it"
        )
    return bool(required)


def _failure(what: str, error: BaseException) -> UsageError:
    """Return an error that names the user's line, with the lines that led there below it."""
    steps = [s for s in traceback.extract_tb(error.__traceback__) if not s.filename.startswith(_NOT_THE_USERS)]
    text = ": ".join(part for part in (type(error).__name__, " ".join(str(error).split())) if part)
    where = f" ({steps[-1].filename}, line {steps[-1].lineno}, in {steps[-1].name})" if steps else ""
    return UsageError("\n".join([f"{what}: {text}{where}", *"".join(traceback.format_list(steps)).splitlines()]))
