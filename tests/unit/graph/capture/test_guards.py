"""Every kind of Python's state that code can read: a change after the capture is noticed, one within it is refused."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import os
import random
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from onebox.errors import CaptureError
from onebox.graph.capture.export import capture
from onebox.graph.capture.guards import Guards
from onebox.graph.capture.reading import read_step

EXAMPLE = torch.zeros(3, 4), torch.zeros(3, 4)
LAYERS = 5
"""Enough equal ones that Dynamo reads one of them by itself."""


class Model(nn.Module):
    """A layer, and what a case computes with its result."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.compute = compute
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return what the case computes."""
        return self.compute(self, self.line(x_BD))


class Held:
    """An object of the user's."""

    k = 1.0

    def value(self) -> float:
        """Return the state."""
        return self.k

    @property
    def seen(self) -> float:
        """The state."""
        return self.k

    def tick(self) -> float:
        """Count."""
        self.k += 1
        return self.k


class Slotted:
    __slots__ = ("k",)

    def __init__(self) -> None:
        self.k = 1.0


class Attributes(dict[str, float]):
    """A dict that is read like an object."""

    def __getattr__(self, name: str) -> float:
        return self[name]


class Descriptor:
    value = 1.0

    def __get__(self, owner: Any, kind: Any) -> float:
        return type(self).value


class Described(Model):
    k = Descriptor()


class Stored(Model):
    store: dict[str, float] = {}  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        return self.store[name] if name == "k" else super().__getattr__(name)


class Colour(enum.Enum):
    RED, BLUE = 1, 2


@dataclasses.dataclass
class Settings:
    k: float = 1.0


class Act(nn.Module):
    """An activation that a case replaces or patches."""

    def forward(self, h: Tensor) -> Tensor:
        """Return the activation."""
        return self.curve(h)

    def curve(self, h: Tensor) -> Tensor:
        """Return the activation."""
        return h.tanh()


class Waved(Act):
    def curve(self, h: Tensor) -> Tensor:
        return h.sin()


Pair = collections.namedtuple("Pair", "k")
Case = Callable[[pytest.MonkeyPatch], tuple[nn.Module, Callable[[], Any]]]
GLOBAL = 1.0
TABLE = {"k": 1.0}


def scaled(of: Callable[[Any], Any], **attributes: Any) -> Model:
    return Model(lambda self, y: y * of(self), **attributes)


def of_object(held: Any, read: Callable[[Any], Any], change: Callable[[Any], Any]) -> Case:
    """Return the case of an object that is reached by a closure."""
    return lambda patch: (scaled(lambda self: read(held)), lambda: change(held))


def of_model(make: Callable[[], nn.Module], change: Callable[[Any], Any]) -> Case:
    def case(patch: pytest.MonkeyPatch) -> tuple[nn.Module, Callable[[], Any]]:
        model = make()
        return model, lambda: change(model)

    return case


def patched(owner: Any, name: str, value: Any, make: Callable[[], nn.Module]) -> Case:
    return lambda patch: (make(), lambda: patch.setattr(owner, name, value))


def with_act() -> Model:
    return Model(lambda self, y: self.act(y), act=Act())


def stacked(*layers: nn.Module) -> Model:
    return Model(lambda self, y: self.layers(y), layers=nn.Sequential(*layers))


def looped() -> Model:
    def compute(self: Any, y: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(y)
        return y

    return Model(compute, layers=nn.ModuleList([nn.Tanh(), nn.Sigmoid()]))


def made(k: float) -> Callable[[Tensor], Tensor]:
    return lambda h: h * k


def module_with(k: float) -> Any:
    settings: Any = types.ModuleType("settings")
    settings.k = k
    return settings


def tagged(k: float) -> Any:
    function: Any = made(k)
    function.k = k
    return function


def by_default(k: float = 1.0, *, more: float = 0.0) -> float:
    return k + more


def counted() -> tuple[Callable[[], float], Callable[[float], None]]:
    k = 1.0

    def get() -> float:
        return k

    def put(value: float) -> None:
        nonlocal k
        k = value

    return get, put


def local() -> Case:
    own = threading.local()
    own.k = 1.0
    return of_object(own, lambda own: own.k, lambda own: setattr(own, "k", 2.0))


def cell() -> Case:
    get, put = counted()
    return lambda patch: (scaled(lambda self: get()), lambda: put(2.0))


def hooked(register: Callable[[Any, float], Any]) -> Case:
    """Return the case of a hook that another one replaces."""

    def case(patch: pytest.MonkeyPatch) -> tuple[nn.Module, Callable[[], Any]]:
        model = Model(lambda self, y: y)
        handle = register(model.line, 2.0)

        def change() -> None:
            handle.remove()
            register(model.line, 3.0)

        return model, change

    return case


def reading_hook(register: Callable[[Any, Any], Any]) -> Case:
    """Return the case of a hook that reads an object."""

    def case(patch: pytest.MonkeyPatch) -> tuple[nn.Module, Callable[[], Any]]:
        model, held = with_act(), Held()
        register(model, held)
        return model, lambda: setattr(held, "k", 2.0)

    return case


def backward_hook(model: Any, held: Any) -> Any:
    return model.act.register_full_backward_hook(lambda _, before, after: (before[0] * held.k,))


def within(self: Any, y: Tensor) -> Tensor:
    made = y * 1.0
    made.register_hook(lambda gradient: gradient * y.detach().mean() * GLOBAL)
    return made


READ: dict[str, Case] = {
    "an attribute": of_model(lambda: scaled(lambda self: self.k, k=1.0), lambda model: setattr(model, "k", 2.0)),
    "vars()": of_model(lambda: scaled(lambda self: vars(self)["k"], k=1.0), lambda model: setattr(model, "k", 2.0)),
    "a missing attribute": of_model(
        lambda: scaled(lambda self: getattr(self, "k", 1.0)), lambda model: setattr(model, "k", 2.0)
    ),
    "hasattr": of_model(
        lambda: scaled(lambda self: 1.0 if hasattr(self, "k") else 2.0), lambda model: setattr(model, "k", 2.0)
    ),
    "a class attribute": patched(Held, "k", 2.0, lambda: scaled(lambda self: Held.k)),
    "a class attribute of an object": patched(Held, "k", 2.0, lambda: scaled(lambda self: self.held.k, held=Held())),
    "an object": of_object(Held(), lambda held: held.k, lambda held: setattr(held, "k", 2.0)),
    "a method of an object": of_object(Held(), lambda held: held.value(), lambda held: setattr(held, "k", 2.0)),
    "a property of an object": of_object(Held(), lambda held: held.seen, lambda held: setattr(held, "k", 2.0)),
    "an object with slots": of_object(Slotted(), lambda held: held.k, lambda held: setattr(held, "k", 2.0)),
    "a data class": of_object(Settings(), lambda held: held.k, lambda held: setattr(held, "k", 2.0)),
    "a name space": of_object(types.SimpleNamespace(k=1.0), lambda held: held.k, lambda held: setattr(held, "k", 2.0)),
    "a module of Python's": of_object(module_with(1.0), lambda held: held.k, lambda held: setattr(held, "k", 2.0)),
    "a thread's own": local(),
    "a weak reference": of_object(
        Settings(), lambda held, ref=weakref.ref: held.k, lambda held: setattr(held, "k", 2.0)
    ),
    "a dict": of_object({"k": 1.0}, lambda held: held["k"], lambda held: held.update(k=2.0)),
    "a missing key": of_object({}, lambda held: held.get("k", 1.0), lambda held: held.update(k=2.0)),
    "a key": of_object({}, lambda held: 2.0 if "k" in held else 1.0, lambda held: held.update(k=2.0)),
    "a dict read like an object": of_object(Attributes(k=1.0), lambda held: held.k, lambda held: held.update(k=2.0)),
    "a nested dict": of_object(
        {"a": [1.0, {"k": 1.0}]}, lambda held: held["a"][1]["k"], lambda held: held["a"][1].update(k=2.0)
    ),
    "a view of a dict": of_object(
        {"k": 1.0}, lambda held: types.MappingProxyType(held)["k"], lambda held: held.update(k=2.0)
    ),
    "a list": of_object([1.0], lambda held: held[0], lambda held: held.__setitem__(0, 2.0)),
    "a list's length": of_object([1.0], len, lambda held: held.append(1.0)),
    "a list's sum": of_object([1.0], sum, lambda held: held.append(1.0)),
    "a set": of_object(set(), lambda held: 2.0 if 1 in held else 1.0, lambda held: held.add(1)),
    "a named tuple in a list": of_object(
        [Pair(1.0)], lambda held: held[0].k, lambda held: held.__setitem__(0, Pair(2.0))
    ),
    "an array": of_object(np.ones(4), torch.from_numpy, lambda held: held.fill(2.0)),
    "an element of an array": of_object(np.ones(4), lambda held: float(held[0]), lambda held: held.fill(2.0)),
    "a tensor": of_object(torch.ones(4), lambda held: held, lambda held: held.fill_(2.0)),
    "a tensor in a dict": of_object(
        {"k": torch.ones(4)}, lambda held: held["k"], lambda held: held.update(k=torch.full((4,), 2.0))
    ),
    "a tensor that is an attribute": of_model(
        lambda: scaled(lambda self: self.k, k=torch.ones(4)), lambda model: setattr(model, "k", torch.full((4,), 2.0))
    ),
    "an enumeration": of_model(
        lambda: scaled(lambda self: 1.0 if self.k is Colour.RED else 2.0, k=Colour.RED),
        lambda model: setattr(model, "k", Colour.BLUE),
    ),
    "text": of_model(
        lambda: scaled(lambda self: 1.0 if f"{self.k}x" == "ax" else 2.0, k="a"), lambda model: setattr(model, "k", "b")
    ),
    "a descriptor": patched(Descriptor, "value", 2.0, lambda: Described(lambda self, y: y * self.k)),
    "__getattr__": lambda patch: (
        patch.setitem(Stored.store, "k", 1.0),  # type: ignore[func-returns-value]
        (Stored(lambda self, y: y * self.k), lambda: patch.setitem(Stored.store, "k", 2.0)),
    )[1],
    "a global": lambda patch: (scaled(lambda self: GLOBAL), lambda: patch.setitem(globals(), "GLOBAL", 2.0)),
    "a dict that is a global": lambda patch: (scaled(lambda self: TABLE["k"]), lambda: patch.setitem(TABLE, "k", 2.0)),
    "a variable of a closure": cell(),
    "a function that is a global": patched(
        os.sys.modules[__name__],
        "by_default",
        lambda: 2.0,
        lambda: scaled(lambda self: by_default()),  # type: ignore[attr-defined]
    ),
    "a default": patched(by_default, "__defaults__", (2.0,), lambda: scaled(lambda self: by_default())),
    "a default by name": patched(
        by_default, "__kwdefaults__", {"more": 2.0}, lambda: scaled(lambda self: by_default())
    ),
    "a function's attribute": of_object(tagged(1.0), lambda held: held.k, lambda f: setattr(f, "k", 2.0)),
    "a partial function": of_model(
        lambda: scaled(lambda self: self.k(), k=functools.partial(by_default, 1.0)),
        lambda model: setattr(model, "k", functools.partial(by_default, 2.0)),
    ),
    "a closure that is an attribute": of_model(
        lambda: Model(lambda self, y: self.k(y), k=made(1.0)), lambda model: setattr(model, "k", made(2.0))
    ),
    "an environment variable": lambda patch: (
        scaled(lambda self: float(os.environ.get("ONEBOX_TEST_K", "1"))),
        lambda: patch.setenv("ONEBOX_TEST_K", "2"),
    ),
    "a function of PyTorch's": patched(torch, "tanh", torch.sin, lambda: Model(lambda self, y: torch.tanh(y))),
    "a mode": of_model(lambda: scaled(lambda self: 1.0 if self.training else 2.0), lambda model: model.eval()),
    "a layer's mode": of_model(
        lambda: Model(lambda self, y: self.drop(y), drop=nn.Dropout(0.5)), lambda model: model.drop.eval()
    ),
    "a rate": of_model(
        lambda: Model(lambda self, y: self.drop(y), drop=nn.Dropout(0.5)), lambda model: setattr(model.drop, "p", 0.1)
    ),
    "a layer's setting": of_model(
        lambda: stacked(nn.LeakyReLU(0.1)), lambda model: setattr(model.layers[0], "negative_slope", 0.2)
    ),
    "a layer": of_model(with_act, lambda model: setattr(model, "act", nn.ReLU())),
    "a layer of a sequence": of_model(lambda: stacked(nn.Tanh()), lambda model: model.layers.__setitem__(0, nn.ReLU())),
    "one more layer": of_model(lambda: stacked(nn.Tanh()), lambda model: model.layers.append(nn.ReLU())),
    "one more layer of a list": of_model(looped, lambda model: model.layers.append(nn.ReLU())),
    "one layer less": of_model(looped, lambda model: model.layers.__delitem__(1)),
    "a choice of layers": of_model(
        lambda: Model(
            lambda self, y: self.layers[self.k](y), layers=nn.ModuleDict({"a": nn.Tanh(), "b": nn.ReLU()}), k="a"
        ),
        lambda model: setattr(model, "k", "b"),
    ),
    "forward of an instance": of_model(with_act, lambda model: setattr(model.act, "forward", lambda h: h.sin())),
    "forward of the model": of_model(with_act, lambda model: setattr(model, "forward", lambda h: h)),
    "forward of a class": patched(Act, "forward", lambda self, h: h.sin(), with_act),
    "a method of a class": patched(Act, "curve", lambda self, h: h.sin(), with_act),
    "a method of an instance": of_model(with_act, lambda model: setattr(model.act, "curve", lambda h: h.sin())),
    "a layer's class": of_model(with_act, lambda model: setattr(model.act, "__class__", Waved)),
    "a hook": of_model(with_act, lambda model: model.act.register_forward_hook(lambda *given: given[2] * 2)),
    "another hook": hooked(lambda layer, k: layer.register_forward_hook(lambda *given: given[2] * k)),
    "another hook of a gradient": hooked(lambda layer, k: layer.weight.register_hook(lambda gradient: gradient * k)),
    "what a hook reads": reading_hook(
        lambda model, held: model.line.register_forward_hook(lambda *given: given[2] * held.k)
    ),
    "what a hook of a parameter reads": reading_hook(
        lambda model, held: model.line.weight.register_hook(lambda gradient: gradient * held.k)
    ),
    "what a hook of a layer's gradient reads": reading_hook(backward_hook),
    "what a hook within forward reads": lambda patch: (Model(within), lambda: patch.setitem(globals(), "GLOBAL", 2.0)),
    "the default type": lambda patch: (
        scaled(lambda self: torch.tensor(1.1)),
        lambda: patch.setattr(torch, "get_default_dtype", lambda: torch.float64),
    ),
}


@pytest.mark.feature("Trainer: Follow changes of all that the model's code reads of Python")
@pytest.mark.parametrize(("kind", "place"), list(zip(READ, cycle((0, LAYERS // 2, LAYERS - 1)), strict=False)))
def test_a_change_of_what_forward_reads_is_noticed(kind: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    models, changes = zip(*(READ[kind](monkeypatch) for _ in range(LAYERS)), strict=True)
    both = [capture(model, mse_loss, EXAMPLE) for model in (models[place], nn.Sequential(*models))]
    assert len(both[1].watch.guards[0].equal_layers) >= LAYERS - 1
    for captured in both:
        assert captured.unread is None
        assert captured.watch.changed is None
    changes[place]()
    for captured in both:
        assert captured.watch.changed is not None


def notes_rows(self: Any, y: Tensor) -> Tensor:
    self.calls = self.calls + 1
    self.rows = y.nonzero().shape[0] + 1
    return y


def test_a_side_effect_of_a_value_of_a_tensor_cannot_be_done() -> None:
    step = {"evaluated": False, "moved": False}
    assert read_step(Model(notes_rows, calls=0), mse_loss, {}, None, EXAMPLE, **step).effects is None


def draws(self: Any, y: Tensor) -> Tensor:
    return y * self.held.random()


def appends(self: Any, y: Tensor) -> Tensor:
    self.held.append(1)
    return y * len(self.held)


def swaps(self: Any, y: Tensor) -> Tensor:
    self.first, self.second = self.second, self.first
    return self.first(y)


def rises(self: Any, y: Tensor) -> Tensor:
    global GLOBAL  # noqa: PLW0603
    GLOBAL += 1
    return y * GLOBAL


CHANGED: dict[str, Callable[[], nn.Module]] = {
    "a counter of an object": lambda: scaled(lambda self: self.held.tick(), held=Held()),
    "a counter of a class": lambda: Model(lambda self, y: setattr(Held, "k", Held.k + 1) or y * Held.k),
    "a counter in a dict": lambda: Model(lambda self, y: TABLE.update(k=TABLE["k"] + 1) or y * TABLE["k"]),  # type: ignore[func-returns-value]
    "a counter that is a global": lambda: Model(rises),
    "a list": lambda: Model(appends, held=[]),
    "a generator of random numbers": lambda: Model(draws, held=random.Random(0)),
    "an array": lambda: Model(
        lambda self, y: self.held.fill(self.held[0] + 1) or y * float(self.held[0]), held=np.ones(1)
    ),
    "a tensor": lambda: Model(lambda self, y: y * self.held.add_(1), held=torch.ones(4)),
    "layers": lambda: Model(swaps, first=nn.Tanh(), second=nn.Sigmoid()),
    "a mode": lambda: Model(lambda self, y: (y * (1 if self.act.training else 2), self.act.train(False))[0], act=Act()),
    "a hook": lambda: Model(lambda self, y: (y, self.line.register_forward_hook(lambda *given: given[2] * 2))[0]),
    "the environment": lambda: Model(
        lambda self, y: (y * len(os.environ.get("ONEBOX_TEST_K", "")), os.environ.update(ONEBOX_TEST_K="12"))[0]
    ),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_what_forward_changes_and_reads_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Held, "k", 1.0)
    monkeypatch.setitem(TABLE, "k", 1.0)
    monkeypatch.setitem(globals(), "GLOBAL", 1.0)
    monkeypatch.delenv("ONEBOX_TEST_K", raising=False)
    try:
        captured = capture(CHANGED[kind](), mse_loss, EXAMPLE)
    except CaptureError as error:
        assert "changes" in str(error) or "writes" in str(error)
    else:
        assert captured.unread is not None, "a value of the first step stays in the graph"


def test_reading_a_hook_that_adds_noise_draws_nothing() -> None:
    model = Model(lambda self, y: y)
    model.line.weight.register_hook(lambda gradient: gradient + torch.rand_like(gradient))
    before = torch.get_rng_state()
    assert capture(model, mse_loss, EXAMPLE).unread is None
    assert torch.equal(torch.get_rng_state(), before)


CODE = """
import logging
from torch import nn

K, LOG = 1.0, logging.getLogger("run")

class Run(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x):
        LOG.info("forward of %s", x.shape)
        return self.line(x) * K
"""


@pytest.mark.parametrize("name", ["__main__", "nowhere", "json"])
def test_code_that_is_in_no_module_is_read_where_it_is(name: str) -> None:
    variables: dict[str, Any] = {"__name__": name}
    exec(compile(CODE, "run.py", "exec"), variables)
    captured = capture(variables["Run"](), mse_loss, EXAMPLE)
    assert captured.unread is None
    watch, variables["other"] = captured.watch, 1
    assert watch.changed is None
    variables["K"] = 2.0
    assert watch.changed == "K (now 2.0)"
    assert variables["__name__"] == name


def test_without_guards_the_code_is_run_once() -> None:
    generator = np.random.default_rng(0)
    model = Model(lambda self, y: y * self.k * generator.random(), k=1.0)
    captured = capture(model, mse_loss, EXAMPLE, guards=False)
    assert captured.unread is None
    model.k = 2.0
    assert captured.watch.changed is None


def test_what_is_read_once_more_serves_all_further_numbers_of_samples() -> None:
    model = Model(lambda self, y: y * (self.k if len(y) < 9 else self.other), k=1.0, other=2.0)
    known: list[Guards] = []
    read = []
    for size in (3, 4, 5, 6, 7, 9, 1):
        (guards,) = capture(model, mse_loss, (torch.zeros(size, 4), torch.zeros(size, 4)), known=known).watch.guards
        read.append(guards not in known)
        known.append(guards)
    assert read == [True, True, True, False, False, True, True]


def test_what_was_read_of_one_shape_is_not_of_another() -> None:
    model = Model(lambda self, y: y)
    (guards,) = capture(model, mse_loss, EXAMPLE).watch.guards
    assert not guards.serve((torch.zeros(3, 4), torch.zeros(3, 1)))
    assert not guards.serve((torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.float64)))
    assert not guards.serve(((torch.zeros(3, 4),), torch.zeros(3, 4)))


def test_a_watch_covers_another_one_that_reads_less() -> None:
    model = Model(lambda self, y: y * self.k, k=1.0)
    more = capture(model, mse_loss, EXAMPLE).watch
    less = capture(model, mse_loss, EXAMPLE, mode="evaluate").watch
    assert more.covers(less)
    assert more.covers(more)
    other = capture(Model(lambda self, y: y * self.q, q=1.0), mse_loss, EXAMPLE).watch
    assert not more.covers(other)


IN_A_SCRIPT = """
import torch
from torch import nn

import onebox
from onebox.graph.capture.export import capture
from onebox.vgpu.compile.dynamo import DYNAMO


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.k = nn.Linear(4, 4), 1.0

    def forward(self, x):
        made = torch.tensor([self.k] * 4) + torch.as_tensor(self.k) + torch.asarray([1.0] * 4) + torch.zeros(4)
        return self.line(x.to(torch.float32)) + made + x.new_tensor([self.k] * 4)


def changes():
    model = Model()
    watch = capture(model, nn.functional.mse_loss, (torch.zeros(3, 4), torch.zeros(3, 4))).watch
    model.k = 2.0
    return watch.changed


print(changes())
DYNAMO.apply()
print(changes())
with onebox.open("cpu*2"):
    print(changes())
    with onebox.vgpu.alias_cuda():
        print(changes())
print(changes())
"""


def test_functions_of_pytorch_that_scripts_have_replaced_are_read() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines() == ["model.k (now 2.0)"] * 5, done.stderr
