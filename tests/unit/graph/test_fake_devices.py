"""Programs for GPUs: with fake tensors on ``cuda`` they make what they state, and CPU workers run them, too."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from onebox.graph import ModelPrograms, Port, TracedModel
from onebox.wire import ATTENTION, ATTENTION_BACKWARD, Many, Operator, Program, SlotArgument, TensorSpec
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.progress import WorkerProgress
from tests.kit.captures import capture
from tests.kit.models import CASES

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import fake_devices

CPU = torch.device("cpu")
ROWS, HEADS, SIZE = 6, 2, 8


class LogSigmoid(nn.Module):
    """A line behind which log-sigmoid is."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Map features [B, 10] to [B, 5]."""
        return functional.logsigmoid(self.line(x))


class Heads(nn.Module):
    """Attention of a line's rows to themselves.

    Args:
        dropout: Of the shares.
        options: More arguments of the attention.
    """

    def __init__(self, dropout: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3 * HEADS * SIZE)
        self.dropout, self.options = dropout, options

    def forward(self, x_BTF: Tensor) -> Tensor:
        """Map [B, T, 4] to [B, T, heads x size]."""
        q, k, v = (t.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for t in self.line(x_BTF).chunk(3, -1))
        made = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, **self.options)
        return made.transpose(1, 2).flatten(2)


def mean_square(outputs: Any, _: Tensor) -> Tensor:
    return outputs.square().mean()


def mean_square_in_float32(outputs: Any, targets: Tensor) -> Tensor:
    return mean_square(outputs.float(), targets)


def programs_of(model: nn.Module, loss: Any, batch: Any, device_type: str) -> ModelPrograms:
    return TracedModel(capture(model, loss, batch, device_type=device_type), backward=True).divide()


def results(model: nn.Module, made: ModelPrograms, batch: Any, seed: int = 0) -> dict[Port, Tensor]:
    """Run programs as a CPU worker does; return results, gradients and updates."""
    given = {Port("parameter", f"model.{name}"): t.detach() for name, t in model.named_parameters()}
    given |= {Port("buffer", f"model.{name}"): t.detach().clone() for name, t in model.named_buffers()}
    given |= {Port("leaf", place): leaf for place, leaf in enumerate(tree_leaves(batch))}
    given |= {Port("constant", name): tensor for name, tensor in made.constants.items()}
    given[Port("weight", 0)] = torch.ones((), dtype=next(model.parameters()).dtype)
    for part in (made.forward, made.backward):
        assert part is not None
        compiled = CompiledProgram(part.program, CPU)
        with torch.inference_mode():
            inputs = [given[port] for port in part.inputs]
            values = compiled.run(inputs, lambda place: torch.manual_seed(seed + place) and None, WorkerProgress())
        given |= dict(zip(part.outputs, values, strict=True))
    return {port: value for port, value in given.items() if port.kind in ("result", "gradient", "update")}


def operators_of(made: ModelPrograms) -> list[Operator]:
    return [operator for part in made.phases.values() for operator in part.program.operators]


# ---- what the fake device finds

DIFFERENT = {
    "frozen batch norm": lambda: (CASES["cnn"].model(torch.float32).eval(), "cnn", torch.float32),
    "batch norm in bfloat16": lambda: (CASES["cnn"].model(torch.bfloat16), "cnn", torch.bfloat16),
    "layer norm in bfloat16": lambda: (CASES["vit"].model(torch.bfloat16), "vit", torch.bfloat16),
    "log-sigmoid": lambda: (LogSigmoid(), "mlp", torch.float32),
    "attention": lambda: (CASES["gpt2"].model(torch.float32), "gpt2", torch.float32),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_operators_that_differ_on_a_gpu_are_found_in_programs_for_cpus_and_not_in_those_for_gpus(what: str) -> None:
    model, name, dtype = DIFFERENT[what]()
    case, batch = CASES[name], CASES[name].batches([3], dtype)[0]
    assert fake_devices.of_model(what, programs_of(model, case.loss, batch, "cpu")), "the check must see them"
    assert fake_devices.of_model(what, programs_of(model, case.loss, batch, "cuda")) == []


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_worker_on_a_cpu_runs_programs_for_gpus(what: str) -> None:
    torch.manual_seed(0)
    model, name, dtype = DIFFERENT[what]()
    case, batch = CASES[name], CASES[name].batches([3], dtype)[0]
    plain = results(model, programs_of(model, case.loss, batch, "cpu"), batch)
    found = results(model, programs_of(model, case.loss, batch, "cuda"), batch)
    assert plain.keys() == found.keys()
    for port, value in plain.items():
        torch.testing.assert_close(found[port], value, msg=lambda text, port=port: f"{port}: {text}")


class Bags(nn.Module):
    """Bags of two and three words, as features.

    Args:
        options: Of the embeddings.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(7, 4, **options)

    def forward(self, words: Tensor) -> Tensor:
        """Map 5 words to features [2, 4]."""
        return self.words(words, torch.tensor([0, 2, 5] if self.words.include_last_offset else [0, 2]))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings(mode: str, last: bool) -> None:
    torch.manual_seed(0)
    model, batch = Bags(mode=mode, include_last_offset=last), (torch.tensor([1, 4, 2, 2, 6]), torch.zeros(2))
    made = programs_of(model, mean_square, batch, "cuda")
    assert fake_devices.of_model("bags", made) == []
    plain = results(model, programs_of(model, mean_square, batch, "cpu"), batch)
    for port, value in results(model, made, batch).items():
        torch.testing.assert_close(value, plain[port])


NARROW_NORMS = {
    "batch norm without parameters": lambda: nn.BatchNorm2d(6, affine=False),
    "batch norm without statistics": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "batch norm without either": lambda: nn.BatchNorm2d(6, affine=False, track_running_stats=False),
    "instance norm": lambda: nn.InstanceNorm2d(6, affine=True),
    "instance norm with statistics": lambda: nn.InstanceNorm2d(6, track_running_stats=True),
}


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("name", NARROW_NORMS)
def test_a_worker_on_a_cpu_normalises_bfloat16_with_parameters_in_float32(name: str, device_type: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 6, 1), NARROW_NORMS[name]())
    batch = torch.randn(3, 6, 4, 4), torch.zeros(3)
    with torch.autocast("cpu", torch.bfloat16):
        expected = mean_square(model(batch[0]).float(), batch[1])
    (gradient,) = torch.autograd.grad(expected, [model[0].weight])
    captured = capture(model, mean_square_in_float32, batch, precision="bf16", device_type=device_type)
    made = TracedModel(captured, backward=True).divide()
    found = results(model, made, batch)
    torch.testing.assert_close(found[Port("result", 0)], expected.detach())
    torch.testing.assert_close(found[Port("gradient", "model.0.weight")], gradient, rtol=0.02, atol=0.02)
    if device_type == "cuda":
        assert fake_devices.of_model(name, made) == []


@pytest.mark.parametrize("name", CASES)
def test_models_make_on_a_gpu_what_their_programs_state(name: str) -> None:
    case = CASES[name]
    batch = case.batches([3], torch.float32)[0]
    assert fake_devices.of_model(name, programs_of(case.model(torch.float32), case.loss, batch, "cuda")) == []


def test_an_operator_without_a_cuda_kernel_is_found() -> None:
    spec = TensorSpec("float32", (1, 2, 4, 8))
    sums = TensorSpec("float32", (1, 2, 4))
    name = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    program = Program((spec,), (Operator(name, (SlotArgument(0),) * 3, {}, (1, 2), (spec, sums)),), (1,), 3)
    (bad,) = fake_devices.mismatches("attention", program)
    assert bad.problem == "has no CUDA kernel"


def test_a_view_of_another_order_in_memory_is_a_copy_off_the_cpu() -> None:
    source, made = TensorSpec("float32", (3, 4)), TensorSpec("float32", (12,))
    view = Operator("aten.view.default", (SlotArgument(0), Many((12,))), {}, (1,), (made,))
    compiled = CompiledProgram(Program((source,), (view,), (1,), 2), torch.device("meta"))
    given = torch.empty(4, 3, device="meta").t()
    (found,) = compiled.run([given], lambda _: None, WorkerProgress())
    assert found.shape == (12,)


# ---- attention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [8, 5])
def test_attention_computes_what_pytorch_computes(causal: bool, masked: bool, size: int) -> None:
    torch.manual_seed(1)
    given = [torch.randn(2, 3, rows, size, requires_grad=True) for rows in (6, 5, 5)]
    mask = torch.randn(2, 1, 6, 5) if masked else None
    if causal and masked:
        later = torch.ones(6, 5, dtype=torch.bool).triu(1)
        expected = functional.scaled_dot_product_attention(*given, attn_mask=mask.masked_fill(later, -math.inf))
    else:
        expected = functional.scaled_dot_product_attention(*given, attn_mask=mask, is_causal=causal)
    if causal and masked:
        return  # no caller may pass both
    made, _ = ATTENTION(*given, 0.0, causal, mask)
    torch.testing.assert_close(made, expected)
    gradient = torch.randn_like(made)
    found = torch.autograd.grad(made, given, gradient)
    for own, plain in zip(found, torch.autograd.grad(expected, given, gradient), strict=True):
        torch.testing.assert_close(own, plain)


def test_attentions_two_operators_agree_with_their_shape_functions() -> None:
    given = [torch.randn(2, 3, 6, 8, requires_grad=True) for _ in range(3)]
    torch.library.opcheck(ATTENTION, (*given, 0.0, True), test_utils=("test_schema", "test_faketensor"))
    out, sums = ATTENTION(*(tensor.detach() for tensor in given), 0.0, True)
    plain = [tensor.detach() for tensor in given]
    torch.library.opcheck(
        ATTENTION_BACKWARD, (out, *plain, out, sums, 0.0, True), test_utils=("test_schema", "test_faketensor")
    )


def test_second_derivatives_of_attention() -> None:
    torch.manual_seed(1)
    given = [torch.randn(1, 1, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradgradcheck(lambda *t: ATTENTION(*t, 0.0, True)[0], given)


def test_the_gradient_of_attention_draws_the_dropout_of_its_forward() -> None:
    torch.manual_seed(1)
    model, batch = Heads(dropout=0.4), (torch.randn(2, ROWS, 4), torch.zeros(2))
    made = programs_of(model, mean_square, batch, "cuda")
    places = {operator.name: operator.position for operator in operators_of(made)}
    assert places[str(ATTENTION)] == places[str(ATTENTION_BACKWARD)] == 0
    gradients = results(model, made, batch)
    (port,) = (port for port in gradients if port.kind == "gradient" and str(port.name).endswith("weight"))
    direction, step = torch.randn_like(model.line.weight), 1e-2
    losses = []
    for sign in (1, -1):  # with the same numbers drawn, the loss is a smooth function of the weights
        with torch.no_grad():
            model.line.weight.add_(direction, alpha=sign * step)
        losses.append(results(model, made, batch)[Port("result", 0)])
        with torch.no_grad():
            model.line.weight.sub_(direction, alpha=sign * step)
    slope = (losses[0] - losses[1]) / (2 * step)
    torch.testing.assert_close(slope, (gradients[port] * direction).sum(), rtol=1e-2, atol=1e-3)


def test_attention_is_one_operator_in_programs_for_gpus_however_it_is_called() -> None:
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    models: list[tuple[nn.Module, int]] = [(Heads(is_causal=True), 4), (Heads(attn_mask=mask), 4), (layer, 16)]
    for model, features in models:
        batch = torch.randn(2, ROWS, features), torch.zeros(2)
        made = programs_of(model, mean_square, batch, "cuda")
        names = [operator.name for operator in operators_of(made)]
        assert (names.count(str(ATTENTION)), names.count(str(ATTENTION_BACKWARD))) == (1, 1)
        assert fake_devices.of_model("attention", made) == []
        plain = results(model, programs_of(model, mean_square, batch, "cpu"), batch)
        for port, value in results(model, made, batch).items():
            torch.testing.assert_close(value, plain[port])


def test_keys_that_several_heads_share_are_repeated() -> None:
    class Grouped(Heads):
        def forward(self, x_BTF: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for t in self.line(x_BTF).chunk(3, -1))
            return functional.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)

    torch.manual_seed(1)
    model, batch = Grouped(), (torch.randn(2, ROWS, 4), torch.zeros(2))
    made = programs_of(model, mean_square, batch, "cuda")
    assert str(ATTENTION) in {operator.name for operator in operators_of(made)}
    plain = results(model, programs_of(model, mean_square, batch, "cpu"), batch)
    for port, value in results(model, made, batch).items():
        torch.testing.assert_close(value, plain[port])


def test_attention_without_a_fused_kernel_on_every_device_stays_plain() -> None:
    model, batch = Heads().double(), (torch.randn(2, ROWS, 4, dtype=torch.float64), torch.zeros(2))
    names = {operator.name for operator in operators_of(programs_of(model, mean_square, batch, "cuda"))}
    assert not [name for name in names if "attention" in name]
