"""Recurrent layers in graphs: one operator each, forward and backward, and the numbers of plain PyTorch to 1e-10."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from onebox.errors import CaptureError
from onebox.graph import Port
from onebox.graph.capture.recurrent import WholeRecurrent
from onebox.wire import RECURRENT, RECURRENT_BACKWARD, Many
from tests.unit.graph.staged import Traced, trace, whole

FEATURES, HIDDEN, CLASSES = 3, 4, 5

LAYERS: dict[str, Any] = {
    "lstm": lambda: nn.LSTM(FEATURES, HIDDEN, batch_first=True),
    "lstm-both-ways": lambda: nn.LSTM(FEATURES, HIDDEN, 2, bidirectional=True),
    "lstm-projected": lambda: nn.LSTM(FEATURES, HIDDEN, 2, bidirectional=True, proj_size=2, batch_first=True),
    "gru": lambda: nn.GRU(FEATURES, HIDDEN, 3, bias=False),
    "gru-both-ways": lambda: nn.GRU(FEATURES, HIDDEN, bidirectional=True, batch_first=True),
    "tanh": lambda: nn.RNN(FEATURES, HIDDEN, 2),
    "relu": lambda: nn.RNN(FEATURES, HIDDEN, bidirectional=True, nonlinearity="relu"),
}


class Net(nn.Module):
    """A line, a recurrent network, and a line for classes; its last states count, too."""

    def __init__(self, layers: nn.RNNBase, *, given: bool = False) -> None:
        super().__init__()
        self.line = nn.Linear(FEATURES, FEATURES)
        self.layers = layers
        directions = layers.num_layers * (2 if layers.bidirectional else 1)
        sizes = [layers.proj_size or HIDDEN, *([HIDDEN] if layers.mode == "LSTM" else [])]
        self.states = nn.ParameterList(torch.randn(directions, 2, size) for size in sizes if given)
        self.head = nn.LazyLinear(CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Classify two sequences [2, T, F]."""
        x = self.line(x if self.layers.batch_first else x.transpose(0, 1))
        states = tuple(self.states)
        y, last = self.layers(x, states if len(states) > 1 else states[0]) if states else self.layers(x)
        y = y if self.layers.batch_first else y.transpose(0, 1)
        ends = last if isinstance(last, tuple) else (last,)
        made: Tensor = self.head(y).mean(1)
        return made + sum(end.square().mean() for end in ends)


def built(name: str, **options: Any) -> tuple[Net, tuple[Tensor, Tensor]]:
    torch.manual_seed(3)
    model = Net(LAYERS[name](), **options)
    batch = torch.randn(2, 6, FEATURES, dtype=torch.float64), torch.tensor([1, 4])
    model(batch[0])
    return model, batch


def gradients(model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    loss = functional.cross_entropy(model(batch[0]), batch[1])
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def names_of(traced: Traced) -> Counter[str]:
    phases = traced.model.divide().phases.items()
    whole = [part for phase, part in phases if phase.kind in ("F", "B")]
    return Counter(operator.name for part in whole for operator in part.program.operators)


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "parameters"])
@pytest.mark.parametrize("name", LAYERS)
def test_results_and_gradients_are_those_of_pytorch(name: str, given: bool) -> None:
    model, batch = built(name, given=given)
    plain = gradients(model, batch)
    with WholeRecurrent():
        found = gradients(model, batch)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_strides_are_those_of_pytorch(name: str) -> None:
    layers = LAYERS[name]().double()
    x = torch.randn(2, 6, FEATURES, dtype=torch.float64)
    plain = layers(x)[0]
    with WholeRecurrent():
        assert layers(x)[0].stride() == plain.stride()


def test_one_sequence_without_a_batch() -> None:
    layers, x = nn.GRU(FEATURES, HIDDEN, 2).double(), torch.randn(6, FEATURES, dtype=torch.float64)
    plain = layers(x)
    with WholeRecurrent():
        torch.testing.assert_close(layers(x), plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_has_one_operator_for_each_layer_and_one_for_its_gradient(name: str) -> None:
    model, batch = built(name)
    found = names_of(trace(model, functional.cross_entropy, batch))
    layers = model.layers.num_layers
    assert found[str(RECURRENT)] == layers
    assert found[str(RECURRENT_BACKWARD)] == layers
    assert found.total() < 120


def test_the_length_of_sequences_does_not_matter() -> None:
    model, (_, y) = built("gru")
    sizes = {
        names_of(trace(model, functional.cross_entropy, (torch.randn(2, steps, FEATURES).double(), y))).total()
        for steps in (2, 50)
    }
    assert len(sizes) == 1


def test_aotautograd_traces_a_plain_module_to_whole_layers() -> None:
    """Without ``torch.export`` in front: the gradient is traced as the one operator that it is."""
    model, (x, y) = built("lstm-both-ways")

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
            with WholeRecurrent():
                return (functional.cross_entropy(self.model(x), y),)

    with contextlib.ExitStack() as stack:
        graph = aot_export_joint_with_descriptors(stack, Whole(), (x, y)).graph_module.graph
    found = Counter(node.target for node in graph.nodes)
    assert (found[RECURRENT], found[RECURRENT_BACKWARD]) == (2, 2)
    assert len(list(graph.nodes)) < 150
    origins = {
        target: [node.meta["seq_nr"] for node in graph.find_nodes(op="call_function", target=target)]
        for target in (RECURRENT, RECURRENT_BACKWARD)
    }
    assert origins[RECURRENT] == origins[RECURRENT_BACKWARD][::-1], "each gradient knows what it is the gradient of"


def test_each_layer_is_a_segment_with_its_gradient() -> None:
    model, batch = built("gru")
    traced = trace(model, functional.cross_entropy, batch)
    names = traced.model.segments
    assert [name for name in names if "layers" in name] == ["model.layers", "model.layers#2", "model.layers#3"]
    phases = traced.model.divide([[name] for name in names]).phases
    for place, name in enumerate(names):
        for kind in ("F", "B"):
            operators = [o.name for phase, p in phases.items() if phase == (place, kind) for o in p.program.operators]
            assert sum("recurrent" in each for each in operators) == ("layers" in name)


def test_states_that_need_no_gradient_get_none() -> None:
    model, batch = built("lstm")
    phases = trace(model, functional.cross_entropy, batch).model.divide().phases.values()
    found = [o for phase in phases for o in phase.program.operators if o.name == str(RECURRENT_BACKWARD)]
    assert found[0].args[-1] == Many((True, False, False, True, True, True, True))


def test_dropout_between_layers_is_ordinary_dropout() -> None:
    model, batch = built("gru")
    model.layers.dropout = 0.5
    traced = trace(model, functional.cross_entropy, batch)
    assert names_of(traced)["aten.native_dropout.default"] == 2
    model.eval()
    assert not names_of(trace(model, functional.cross_entropy, batch, backward=False))["aten.native_dropout.default"]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", ["lstm", "lstm-both-ways", "lstm-projected", "gru"])
def test_float32_runs_the_kernels_that_pytorch_chooses(name: str) -> None:
    """For an LSTM on a CPU those are oneDNN's."""
    model, (x, y) = built(name)
    plain = gradients(model.float(), (x.float(), y))
    with WholeRecurrent():
        found = gradients(model, (x.float(), y))
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", ["gru", "lstm-projected", "tanh"])
def test_autocast_runs_a_layer_in_bfloat16(name: str) -> None:
    model, (x, _) = built(name)
    model, x = model.float(), x.float()
    with torch.no_grad():
        plain = model(x)
        with torch.autocast("cpu", torch.bfloat16), WholeRecurrent():
            y, _ = model.layers(x if model.layers.batch_first else x.transpose(0, 1))
            assert y.dtype == torch.bfloat16
            torch.testing.assert_close(model(x).float(), plain, rtol=0.05, atol=0.05)


class Packed(nn.Module):
    """An LSTM over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(FEATURES, CLASSES, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return the last hidden state."""
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        made: Tensor = self.layers(packed)[1][0][-1]
        return made


def test_packed_sequences_are_refused_with_the_line() -> None:
    batch = (torch.randn(2, 6, FEATURES), torch.tensor([6, 4])), torch.tensor([1, 4])
    with pytest.raises(CaptureError, match=r"(?s)pack_padded_sequence\(x, lengths.*it packs.*Pad.*vgpu"):
        trace(Packed(), functional.cross_entropy, batch)


def test_sequences_that_come_packed_are_refused() -> None:
    packed = pack_padded_sequence(torch.randn(2, 6, FEATURES), [6, 4], batch_first=True)
    with WholeRecurrent(), pytest.raises(CaptureError, match="it packs sequences"):
        nn.GRU(FEATURES, HIDDEN)(packed)


class Penalised(nn.Module):
    """A loss of a network's outputs and of the norm of its gradient by the inputs."""

    def __init__(self, layers: nn.RNNBase) -> None:
        super().__init__()
        self.layers = layers.double()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
        """Return the loss."""
        x = x.detach().requires_grad_()
        made = self.layers(x)[0]
        (gradient,) = torch.autograd.grad(made.square().sum(), x, create_graph=True)
        return (made.mean() + gradient.square().sum(),)


@pytest.mark.parametrize("name", ["lstm-both-ways", "gru"])
def test_second_derivatives_are_those_of_pytorch(name: str) -> None:
    model, batch = Penalised(LAYERS[name]()), torch.randn(4, 2, FEATURES, dtype=torch.float64)
    plain = torch.autograd.grad(model(batch, None)[0], list(model.parameters()))
    with WholeRecurrent():
        found = torch.autograd.grad(model(batch, None)[0], list(model.parameters()))
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-10)


class Transformed(nn.Module):
    """The gradient of a recurrent network by ``torch.func``."""

    def __init__(self, layers: nn.RNNBase) -> None:
        super().__init__()
        self.layers = layers.double()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
        """Return a number made of the gradient by the inputs."""
        gradient: Tensor = torch.func.grad(lambda x: self.layers(x)[0].square().sum())(x)
        return (gradient.square().sum(),)


@pytest.mark.parametrize("kind", [Penalised, Transformed])
def test_second_derivatives_are_traced(kind: type[Penalised | Transformed]) -> None:
    x, y = torch.randn(4, 2, FEATURES, dtype=torch.float64), torch.zeros(4)
    model = kind(LAYERS["gru"]())
    made = whole(trace(model, lambda outputs, _: outputs[0], ((x, y), y))).made
    expected = torch.autograd.grad(model(x, y)[0], list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(made[Port("gradient", f"model.{name}")], 0.375 * gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("dtype", "features", "message"),
    [
        (torch.float32, FEATURES, r"gru of float32 \[2, 6, 3\], float64 \[1, 2, 4\].*expected scalar type Float"),
        (torch.float64, FEATURES + 1, r"gru of float64 \[2, 6, 4\], float64 \[1, 2, 4\], float64 \[12, 3\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_when_they_are_traced(
    dtype: torch.dtype, features: int, message: str
) -> None:
    layers = nn.GRU(FEATURES, HIDDEN).double()
    weights = layers.all_weights[0]

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(weights)

        def forward(self, x: Tensor) -> Tensor:
            state = torch.zeros(1, 2, HIDDEN, dtype=torch.float64)
            made: Tensor = torch.gru(x, state, list(self.weights), True, 1, 0.0, True, False, True)[0]
            return made

    with pytest.raises(CaptureError, match=rf"(?s)torch\.gru\(.*{message}"):
        trace(Called(), lambda outputs, _: outputs.mean(), (torch.randn(2, 6, features, dtype=dtype), torch.zeros(2)))


def test_tensors_of_inference_mode_will_do() -> None:
    """A worker has no others."""
    model, _ = built("lstm-both-ways")
    with torch.inference_mode():
        x = torch.randn(6, 2, FEATURES, dtype=torch.float64)
        states = [torch.zeros(2, 2, HIDDEN, dtype=torch.float64) for _ in range(2)]
        weights = [weight.clone() for weight in model.layers.all_weights[0] + model.layers.all_weights[1]]
        options = ("lstm", True, True)
        outputs = RECURRENT(x, states, weights, *options)
        wanted = [True] * (3 + len(weights))
        found = RECURRENT_BACKWARD([torch.ones_like(outputs[0]), None, None], x, states, weights, *options, wanted)
    given = [tensor.clone().requires_grad_() for tensor in (x, *states, *weights)]
    with WholeRecurrent():
        plain = torch._VF.lstm(given[0], given[1:3], given[3:], True, 1, 0.0, True, True, False)  # type: ignore[attr-defined]
    expected = torch.autograd.grad(plain[0].sum(), given)
    torch.testing.assert_close(found, list(expected), rtol=0, atol=1e-10)


def test_a_kind_that_is_none_is_refused() -> None:
    x, state, weights = torch.randn(6, 2, 3), torch.zeros(1, 2, 4), [torch.randn(4, 3), torch.randn(4, 4)]
    with pytest.raises(ValueError, match="'system'; allowed: lstm, gru, rnn_tanh, rnn_relu"):
        RECURRENT(x, [state], weights, "system", False, False)
    with pytest.raises(ValueError, match="2 marks of wanted gradients for 4 tensors"):
        RECURRENT_BACKWARD([None], x, [state], weights, "gru", False, False, [True, False])
