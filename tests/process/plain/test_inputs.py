"""What a step is given: kinds, types and shapes of inputs and targets, and what its loss can be used for."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit.pools import Pools
from tests.process.plain.case import Case, case, check, equal_or_refused, refused
from tests.process.plain.data import Between, labelled, mlp, sgd
from tests.process.plain.ways import Loop, Way


def test_as_plain_pytorch(case: Case, way: str, pools: Pools) -> None:
    check(case, way, pools)


def train(way: Way, batches: Any, **options: Any) -> None:
    way.train(options.pop("model", None) or mlp(), F.cross_entropy, sgd, batches, **options)


@case()
def arrays_of_numpy(way: Way) -> None:
    train(way, [(x.numpy(), y.numpy()) for x, y in labelled()])


@case(trainer=equal_or_refused("tensor"))
def lists_of_numbers(way: Way) -> None:
    """A list of lists could be a nest of inputs."""
    batches = labelled(2)
    if way.name == "trainer":
        batches = [(x.tolist(), y.tolist()) for x, y in batches]
    train(way, batches)


@case()
def no_targets(way: Way) -> None:
    model = Between()
    way.train(model, lambda o, t: o.pow(2).mean(), sgd, [(x, None) for x, _ in labelled()], micro_batch=8)


class Scaled(nn.Module):
    """A model with a second input."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, x: Tensor, t: Any = 1.0) -> Tensor:
        return self.a(x) * t


@case(trainer=equal_or_refused("number|float"))
def number_as_an_input(way: Way) -> None:
    model = Scaled()
    inputs = [((x, 0.5), y) for x, y in labelled()] if way.name == "trainer" else None
    way.train(model, F.cross_entropy, sgd, inputs or [((x, torch.tensor(0.5)), y) for x, y in labelled()])


@case(trainer=refused("first dimension"), vgpu=None)
def tensor_without_samples(way: Way) -> None:
    train(way, [((x, torch.tensor(0.5)), y) for x, y in labelled()], model=Scaled())


@case()
def inputs_by_name(way: Way) -> None:
    train(way, [({"x": x, "t": x[:, :1]}, y) for x, y in labelled()], model=Scaled(), micro_batch=8)


@case(trainer=refused("Long|int64|int32"), vgpu=refused("Long"))
def targets_of_int32(way: Way) -> None:
    train(way, [(x, y.int()) for x, y in labelled(1)])


@case(trainer=refused(r"[Tt]arget 7|label"), vgpu=refused("7|bounds"))
def label_out_of_range(way: Way) -> None:
    train(way, [(x, torch.where(y == 3, 7, y)) for x, y in labelled(1)])


@case(trainer=refused(r"float32.*float64"), vgpu=refused("dtype"))
def float32_for_a_float64_model(way: Way) -> None:
    train(way, [(x.float(), y) for x, y in labelled(1)])


@case(trainer=refused("7"), vgpu=refused("7"))
def inputs_of_another_width(way: Way) -> None:
    train(way, [(x[:, :7], y) for x, y in labelled(1)])


@case(vgpu=None)
def model_on_a_virtual_device(way: Way) -> None:
    train(way, labelled(), model=mlp() if way.name == "plain" else mlp().to("vgpu:0"), micro_batch=8)


@case(vgpu=None)
def batches_on_a_virtual_device(way: Way) -> None:
    device = "cpu" if way.name == "plain" else "vgpu:1"
    train(way, [(x.to(device), y.to(device)) for x, y in labelled()], micro_batch=8)


@case()
def inputs_that_are_slices_and_transposes(way: Way) -> None:
    train(way, [(x.T.contiguous().T, y.repeat_interleave(2)[::2]) for x, y in labelled()], micro_batch=8)


@case()
def inputs_that_are_changed_after_the_step(way: Way) -> None:
    batches = labelled()

    def after(step: int, loop: Loop) -> None:
        batches[step][0].zero_()

    train(way, batches, after=after)


@case()
def loss_as_a_number(way: Way) -> None:
    """Comparison, arithmetic, rounding, numpy, JSON and formats."""
    with way.loop(mlp(), F.cross_entropy, sgd) as loop:
        losses = [loop.step(*batch) for batch in labelled()]
        a, b = losses[:2]
        checks = [a < 3, a <= b, a > b, a >= 0, a == losses[0], a != b, bool(a), math.isnan(a), math.isfinite(a)]
        sums = [
            a + b,
            a - b,
            a * 2,
            2 * a,
            a / 2,
            1 / a,
            a**2,
            -a,
            abs(a),
            1 - a,
            sum(losses),
            max(losses),
            a // 1,
            a % 1,
        ]
        more = [
            round(a, 3),
            np.mean(losses),
            np.float64(a),
            float(torch.tensor(losses, dtype=torch.float64).mean()),
            math.sqrt(a),
        ]
        texts = [f"{a:.4f}", f"{a:8.2e}", json.dumps({"loss": float(a)})]
        way.note(checks=checks, sums=sums, more=more)
        way.note(texts=[float(sum(map(ord, text))) for text in texts])


@case()
def loss_written_as_json(way: Way) -> None:
    with way.loop(mlp(), F.cross_entropy, sgd) as loop:
        text = json.dumps({"loss": loop.step(*labelled(1)[0])}, default=float)
        way.note(loss=json.loads(text)["loss"])
