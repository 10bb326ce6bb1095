"""Layers that are traced once: the programs are those of a trace of the whole model, whatever the layers do."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from onebox.errors import CaptureError
from onebox.graph import TRACING, TracedModel
from onebox.graph.capture.repeated import layer_operator, layers
from onebox.graph.capture.repeated.records import Record
from onebox.wire import Many, Program, SlotArgument
from tests.kit.captures import capture

LAYERS = 9
WIDTH = 16


class Attention(nn.Module):
    """A layer of a transformer."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH), nn.Dropout(dropout))
        self.dropout = dropout

    def forward(self, x_BTW: Tensor, bias_TT: Tensor | None = None) -> Tensor:
        batch, words, _ = x_BTW.shape
        parts = self.mixed(self.before(x_BTW)).split(WIDTH, -1)
        query, key, value = (part.view(batch, words, 2, WIDTH // 2).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, bias_TT, dropout, bias_TT is None)
        x_BTW = x_BTW + self.out(mixed.transpose(1, 2).reshape(batch, words, WIDTH))
        return x_BTW + self.wide(self.after(x_BTW))


class Words(nn.Module):
    """Transformer layers over words, which may share a learned bias."""

    def __init__(self, *, biased: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH)
        self.body = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.bias = nn.Parameter(torch.zeros(8, 8)) if biased else None

    def forward(self, words_BT: Tensor) -> Tensor:
        x_BTW = self.embed(words_BT)
        for layer in self.body:
            x_BTW = layer(x_BTW, self.bias)
        return functional.linear(x_BTW, self.embed.weight).flatten(0, 1)


class Plain(nn.Module):
    """A residual layer; the layers below differ from it in one way each."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x_BW: Tensor) -> Tensor:
        return x_BW + self.inner(x_BW)


class Stack(nn.Module):
    """Layers of a kind in a row."""

    def __init__(self, kind: Callable[[int], nn.Module] = Plain) -> None:
        super().__init__()
        self.body = nn.ModuleList(kind(number) for number in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x_BW: Tensor) -> Tensor:
        for layer in self.body:
            x_BW = layer(x_BW)
        return self.head(x_BW)


class Numbered(Plain):
    """Computes with its number, of which there are two."""

    def __init__(self, number: int) -> None:
        super().__init__(number % 2)

    def forward(self, x_BW: Tensor) -> Tensor:
        return super().forward(x_BW) * (1.0 + self.number)


class Convolution(nn.Module):
    """Writes to the running statistics of its batch norm."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.BatchNorm1d(1))

    def forward(self, x_BW: Tensor) -> Tensor:
        return x_BW + self.inner(x_BW[:, None])[:, 0]


class Doubled(torch.autograd.Function):
    """Doubles a gradient, too, in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.factor * gradient, None


class OwnGradient(Plain):
    """Has a gradient of its own, which only backward shows to differ."""

    def forward(self, x_BW: Tensor) -> Tensor:
        return Doubled.apply(super().forward(x_BW), 2.0 + self.number)


class Hooked(Plain):
    """Changes a gradient by a hook, which only backward shows to differ."""

    def forward(self, x_BW: Tensor) -> Tensor:
        made = super().forward(x_BW)
        made.register_hook(lambda gradient: gradient * (1.0 + self.number))
        return made


class Remembering(Plain):
    """Keeps a tensor as an attribute, which the model reads."""

    def forward(self, x_BW: Tensor) -> Tensor:
        self.kept = super().forward(x_BW)
        return self.kept * 2


class ReadsKept(Stack):
    def __init__(self) -> None:
        super().__init__(Remembering)

    def forward(self, x_BW: Tensor) -> Tensor:
        made = super().forward(x_BW)
        return made + sum(layer.kept.mean() for layer in self.body)


class Leaking(Plain):
    """Passes a tensor on by a list that it is given."""

    def forward(self, x_BW: Tensor, out: list[Tensor]) -> Tensor:
        made = self.inner(x_BW)
        out.append(made.square())
        return x_BW + made


class ReadsList(Stack):
    def __init__(self) -> None:
        super().__init__(Leaking)

    def forward(self, x_BW: Tensor) -> Tensor:
        found: list[Tensor] = []
        for layer in self.body:
            x_BW = layer(x_BW, found)
        return self.head(x_BW) + torch.stack(found).mean()


class InPlace(Plain):
    """Writes to its input."""

    def forward(self, x_BW: Tensor) -> Tensor:
        x_BW.mul_(0.5)
        return x_BW + self.inner(x_BW)


class WritesInput(Stack):
    def __init__(self) -> None:
        super().__init__(InPlace)

    def forward(self, x_BW: Tensor) -> Tensor:
        return super().forward(x_BW * 1.0)


class Pair(Plain):
    """Returns a second tensor, and numbers."""

    def forward(self, x_BW: Tensor, *, scale: float) -> dict[str, Any]:
        made = super().forward(x_BW) * scale
        return {"out": made, "other": made.square().mean(), "none": None, "number": 3}


class ReadsPairs(Stack):
    def __init__(self, *, both: bool) -> None:
        super().__init__(Pair)
        self.both = both

    def forward(self, x_BW: Tensor) -> Tensor:
        others = []
        for layer in self.body:
            made = layer(x_BW, scale=0.5)
            x_BW = made["out"]
            others.append(made["other"] * made["number"])
        return self.head(x_BW) + (sum(others) if self.both else 0.0)


class Frozen(Stack):
    """Computes without gradients in its layers."""

    def forward(self, x_BW: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.body:
                x_BW = layer(x_BW)
        return self.head(x_BW)


class InnerAutocast(Stack):
    """Computes its layers in bfloat16."""

    def forward(self, x_BW: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.body:
                x_BW = layer(x_BW).float()
        return self.head(x_BW)


class Penalised(Stack):
    """Adds a gradient of its layers to what it returns."""

    def forward(self, x_BW: Tensor) -> Tensor:
        made = super().forward(x_BW)
        (slope,) = torch.autograd.grad(made.sum(), self.body[0].inner[0].weight, create_graph=True)
        return made + slope.square().mean()


class Constant(Plain):
    """Makes a tensor of numbers, which operators do not show."""

    def forward(self, x_BW: Tensor) -> Tensor:
        return super().forward(x_BW) + torch.tensor([float(self.number)] * WIDTH)


class Closed(Plain):
    """Reads a parameter of another module."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.others: list[nn.Linear] = []

    def forward(self, x_BW: Tensor) -> Tensor:
        return super().forward(x_BW) * self.others[0].weight[0]


class ReadsOthers(Stack):
    def __init__(self) -> None:
        super().__init__(Closed)
        for layer in self.body:
            layer.others.append(self.head)


class Views(Plain):
    """Returns a view of its input beside its result."""

    def forward(self, x_BW: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x_BW), x_BW[:, :1]


class ReadsViews(Stack):
    def __init__(self) -> None:
        super().__init__(Views)

    def forward(self, x_BW: Tensor) -> Tensor:
        for layer in self.body:
            x_BW, view = layer(x_BW)
            x_BW = x_BW + view
        return self.head(x_BW)


class Tied(Stack):
    """Has one parameter in all of its layers, and one frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.body:
            layer.inner[0].weight = self.body[0].inner[0].weight
        self.body[2].requires_grad_(False)


class CountedHook(Stack):
    """Has forward hooks on its layers and in them, one of which changes a result."""

    def __init__(self) -> None:
        super().__init__()
        self.body[1].inner[0].register_forward_hook(lambda module, given, made: made * 2)
        for layer in self.body:
            layer.register_forward_hook(lambda module, given, made: made + 1)


class Dropped(nn.Module):
    """Averages the results, so that the last layer's gradient has no rows of its own in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Plain(number) for number in range(LAYERS))

    def forward(self, x_BW: Tensor) -> Tensor:
        for layer in self.body:
            x_BW = layer(x_BW)
        return x_BW.mean(1, keepdim=True).expand(-1, 4)


scaled = Doubled.apply


class Bound(Plain):
    """Calls its own gradient by another name."""

    def forward(self, x_BW: Tensor) -> Tensor:
        return scaled(super().forward(x_BW), 2.0 + self.number)


class GradientNode(Plain):
    """Has a hook on a node of autograd."""

    def forward(self, x_BW: Tensor) -> Tensor:
        made = super().forward(x_BW)
        if made.grad_fn is not None:
            made.grad_fn.register_prehook(lambda given: tuple(each * (1.0 + self.number) for each in given))
        return made


class Features(Stack):
    """Collects tensors of its layers by hooks, in a list of each forward."""

    def __init__(self, *, cleared: bool) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        self.cleared = cleared
        for layer in self.body:
            layer.inner[1].register_forward_hook(lambda module, given, made: self.found.append(made))

    def forward(self, x_BW: Tensor) -> Tensor:
        if self.cleared:
            self.found.clear()
        else:
            self.found = []
        made = super().forward(x_BW)
        made = made + torch.stack([each.square().mean() for each in self.found]).sum()
        if self.cleared:
            self.found.clear()
        return made


class Filling(Plain):
    """Puts its result into a list that it is given."""

    def forward(self, x_BW: Tensor, found: list[Tensor]) -> Tensor:
        made = super().forward(x_BW)
        found.append(made)
        return made


class ReadsFilled(Stack):
    def __init__(self) -> None:
        super().__init__(Filling)

    def forward(self, x_BW: Tensor) -> Tensor:
        total = torch.zeros(())
        for layer in self.body:
            found: list[Tensor] = []
            x_BW = layer(x_BW, found)
            total = total + sum(each.mean() for each in found)
        return self.head(x_BW) + total


class Factor(nn.Module):
    """Multiplies by what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH))

    def forward(self, x_BW: Tensor, factor: float = 1.0) -> Tensor:
        return self.inner(x_BW) * factor


class Holder(nn.Module):
    """Calls a layer that others call, too."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held

    def forward(self, x_BW: Tensor) -> Tensor:
        return self.held(x_BW)


class CallsHeld(nn.Module):
    """Calls the layers of its layers."""

    def __init__(self) -> None:
        super().__init__()
        held = [Factor() for _ in range(LAYERS)]
        self.body = nn.ModuleList(map(Holder, held))
        self.held = nn.ModuleList(held)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x_BW: Tensor) -> Tensor:
        for layer, held in zip(self.body, self.held, strict=True):
            x_BW = held(held(layer(x_BW), 1.0), 3.0)
        return self.head(x_BW)


class Signatures(Stack):
    """Passes what a layer's forward takes."""

    def __init__(self) -> None:
        super().__init__(lambda number: Factor())

    def forward(self, x_BW: Tensor) -> Tensor:
        for layer in self.body:
            more = {"factor": 2.0} if "factor" in inspect.signature(layer.forward).parameters else {}
            x_BW = layer(x_BW, **more)
        return self.head(x_BW)


class Marking(Plain):
    """Marks its result."""

    def forward(self, x_BW: Tensor) -> Tensor:
        made = super().forward(x_BW)
        made.factor = 2.0
        return made


class ReadsMarks(Stack):
    def __init__(self) -> None:
        super().__init__(Marking)

    def forward(self, x_BW: Tensor) -> Tensor:
        for layer in self.body:
            x_BW = layer(x_BW)
            x_BW = x_BW * getattr(x_BW, "factor", 1.0)
        return self.head(x_BW)


class Skips(Stack):
    """Adds the layers' inputs at the end."""

    def forward(self, x_BW: Tensor) -> Tensor:
        states = []
        for layer in self.body:
            x_BW = layer(x_BW)
            states.append(x_BW)
        return self.head(x_BW) + torch.stack([state.square().mean() for state in states]).sum()


class Signed(Plain):
    """Multiplies by zeros of two signs."""

    def forward(self, x_BW: Tensor) -> Tensor:
        return super().forward(x_BW) * (0.0 if self.number % 2 else -0.0)


class Laid(nn.Module):
    """Takes its rows as columns in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Plain(number) for number in range(LAYERS))
        self.mixed = nn.Linear(6, 6)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x_BW: Tensor) -> Tensor:
        for layer in self.body:
            x_BW = layer(x_BW)
        return self.head(self.mixed(x_BW.t()).t())


class Shared(nn.Module):
    """Has a module under two names, the first of which stands before that of its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.net = nn.Sequential(self.shared, nn.Tanh(), nn.Linear(WIDTH, 4))

    def forward(self, x_BW: Tensor) -> Tensor:
        return self.net(self.shared(x_BW))


class Translation(nn.Module):
    """Encoder and decoder of PyTorch; all layers of the decoder read one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, WIDTH)
        self.body = nn.Transformer(WIDTH, 2, LAYERS, LAYERS, 32, 0.0, batch_first=True)

    def forward(self, words_BT: Tensor) -> Tensor:
        x_BTW = self.embed(words_BT)
        return functional.linear(self.body(x_BTW, x_BTW), self.embed.weight).flatten(0, 1)


class FrozenRest(Stack):
    """Trains the layer before the others only."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BW: Tensor) -> Tensor:
        return super().forward(self.first(x_BW))


class Twice(Stack):
    """Calls each layer twice."""

    def forward(self, x_BW: Tensor) -> Tensor:
        for layer in self.body:
            x_BW = layer(layer(x_BW))
        return self.head(x_BW)


def expressions(program: Program) -> list[int]:
    """Return the outputs of a program as hashes of all that they are computed by, whatever the order."""
    known: dict[int, Any] = {slot: ("input", slot) for slot in range(len(program.inputs))}

    def value(argument: Any) -> Any:
        if isinstance(argument, SlotArgument):
            return known[argument.index]
        if isinstance(argument, Many):
            return tuple(map(value, argument.items))
        return repr(argument)

    for each in program.operators:
        made = (
            each.name,
            each.position,
            tuple(map(value, each.args)),
            tuple((key, value(v)) for key, v in each.kwargs.items()),
        )
        known |= {slot: hash((made, place)) for place, slot in enumerate(each.outs) if slot is not None}
    return [hash(known[slot]) for slot in program.outputs]


def divided(model: nn.Module) -> dict[Any, Any]:
    """Return the programs of a model's segments in training."""
    with TRACING:
        traced = TracedModel(capture(model, functional.cross_entropy, ROWS), backward=True)
        return dict(traced.divide([[name] for name in traced.segments]).phases)


def encoded(model: nn.Module, example: tuple[Any, Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """Return the segments, the programs of a model, and its divisions' ports."""
    with TRACING:
        captured = capture(model, functional.cross_entropy, example, **options)
        if captured.joint.symbols is not None:
            sized = captured.sized(list(example))
            assert sized is not None
            captured = sized
        traced = TracedModel(captured, backward=captured.backward)
        divided = traced.divide([[name] for name in traced.segments])
    phases = {
        phase: (
            msgspec.msgpack.encode(named.program),
            [(port.kind, port.name if port.kind != "value" else 0) for port in (*named.inputs, *named.outputs)],
        )
        for phase, named in divided.phases.items()
    }
    return traced.segments, phases, dict(divided.updates)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of copies of layers that traces have put."""
    found: list[int] = []
    put = layers.put_copies

    def counted(graph: Any, copies: Any) -> None:
        put(graph, copies)
        found.append(len(copies))

    monkeypatch.setattr(layers, "put_copies", counted)
    return found


def both(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, example: tuple[Any, Any], options: dict[str, Any]
) -> tuple[Any, Any]:
    """Return what the trace with equal layers apart gives, and that of the whole model."""
    apart = encoded(model, example, options)
    with monkeypatch.context() as patch:
        patch.setattr(layers, "_LEAST", 1 << 30)
        whole = encoded(model, example, options)
    return apart, whole


REST = LAYERS - 1
"""Layers after the first, whose input requires no gradient."""

WORDS = torch.arange(32).view(4, 8) % 30, torch.arange(32) % 30
ROWS = torch.linspace(-1, 1, 6 * WIDTH).view(6, WIDTH), torch.arange(6) % 4
OPTIONS: dict[str, dict[str, Any]] = {
    "training": {},
    "evaluation": {"mode": "evaluate"},
    "bf16": {"precision": "bf16"},
    "gpu": {"device_type": "cuda"},
    "fused": {"fuse": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_programs_of_transformers(
    monkeypatch: pytest.MonkeyPatch, copies: list[int], options: dict[str, Any], biased: bool
) -> None:
    apart, whole = both(monkeypatch, Words(biased=biased), WORDS, options)
    assert apart == whole
    shared_cast = biased and "precision" in options  # autocast keeps the bias in bfloat16 from layer to layer
    assert copies == ([] if shared_cast else [LAYERS])


def test_programs_of_sizes_that_vary(monkeypatch: pytest.MonkeyPatch, copies: list[int]) -> None:
    varying = {0: frozenset({0}), 1: frozenset({0})}
    apart, whole = both(monkeypatch, Stack(), ROWS, {"varying": varying})
    assert apart == whole
    assert copies == [REST]


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "plain": (Stack, REST),
    "numbered": (lambda: Stack(Numbered), REST),
    "buffers": (lambda: Stack(Convolution), 0),
    "gradients": (lambda: Stack(OwnGradient), 0),
    "hooks": (lambda: Stack(Hooked), 0),
    "attributes": (ReadsKept, 0),
    "lists": (ReadsList, 0),
    "input": (WritesInput, 0),
    "results": (lambda: ReadsPairs(both=True), REST),
    "unread": (lambda: ReadsPairs(both=False), 0),
    "no_grad": (Frozen, LAYERS),
    "autocast": (InnerAutocast, REST),
    "penalty": (Penalised, 0),
    "constant": (lambda: Stack(Constant), 0),
    "others": (ReadsOthers, 0),
    "views": (ReadsViews, 0),
    "tied": (Tied, REST - 1),
    "forward hooks": (CountedHook, REST - 1),
    "expanded": (Dropped, REST),
    "bound": (lambda: Stack(Bound), 0),
    "nodes": (lambda: Stack(GradientNode), 0),
    "features": (lambda: Features(cleared=False), 0),
    "features cleared": (lambda: Features(cleared=True), 0),
    "filled": (ReadsFilled, 0),
    "signatures": (Signatures, REST),
    "marks": (ReadsMarks, 0),
    "skips": (Skips, 0),
    "signed": (lambda: Stack(Signed), REST),
    "laid out": (Laid, REST),
    "shared": (Shared, 0),
    "frozen": (FrozenRest, LAYERS),
}


@pytest.mark.filterwarnings("ignore:forward assigns")
@pytest.mark.parametrize(("make", "copied"), MODELS.values(), ids=MODELS)
def test_programs_of_layers(
    monkeypatch: pytest.MonkeyPatch, copies: list[int], make: Callable[[], nn.Module], copied: int
) -> None:
    apart, whole = both(monkeypatch, make(), ROWS, {})
    assert apart == whole
    assert copies == ([copied] if copied else [])


def test_programs_of_encoders_and_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of the memory are summed over the decoder's layers, and within each."""
    apart, whole = both(monkeypatch, Translation(), WORDS, {})
    assert apart == whole


def test_nothing_is_left_of_a_capture() -> None:
    model = Features(cleared=True)
    capture(model, functional.cross_entropy, ROWS)
    gc.collect()
    assert model.found == []
    assert not any("forward" in vars(module) for module in model.modules())
    assert not layer_operator._specs
    assert not [each for each in gc.get_objects() if isinstance(each, Record)]


def test_an_error_in_a_layer_leaves_nothing(recwarn: pytest.WarningsRecorder) -> None:
    class Failing(Plain):
        def forward(self, x_BW: Tensor) -> Tensor:
            return super().forward(x_BW) @ x_BW if self.number == 7 else super().forward(x_BW)

    model = Stack(Failing)
    with pytest.raises(CaptureError, match=r"self.number == 7") as caught:
        capture(model, functional.cross_entropy, ROWS)
    assert "mat1 and mat2" in str(caught.value) or "reduction dim" in str(caught.value)
    assert not any("forward" in vars(module) for module in model.modules())
    assert not layer_operator._specs


def test_a_trace_of_the_whole_model_comes_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    capture(Penalised(), functional.cross_entropy, ROWS)
    assert not [each for each in recwarn if "RepeatedLayer" in str(each.message)]


@pytest.mark.parametrize("make", [Twice, CallsHeld])
def test_programs_of_layers_that_are_called_again(
    monkeypatch: pytest.MonkeyPatch, copies: list[int], make: Callable[[], nn.Module]
) -> None:
    """Gradients of weights and of biases are summed over calls, in an order among each other that does not matter."""
    apart = divided(make())
    assert copies
    monkeypatch.setattr(layers, "_LEAST", 1 << 30)
    whole = divided(make())
    assert apart.keys() == whole.keys()
    for phase, named in apart.items():
        assert expressions(named.program) == expressions(whole[phase].program), phase
