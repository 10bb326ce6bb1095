"""Recurrent networks on workers, each in one plan: the result of one process, in float64 to 1e-10.

That they go together with all settings is shown by :mod:`tests.process.test_covering_array`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import onebox
from onebox.graph import TracedModel
from onebox.plan import Plan, Stage
from tests.kit.captures import capture
from tests.kit.models import CLASSES, adamw
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same, drawing, train
from tests.kit.stages import outcome
from tests.kit.trainer_arguments import grouped

SEED, MICRO_BATCH = 5, 3
SIZES = (6, 8, 3, 5)
FEATURES, TIMES = 3, 5

NETWORKS: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm": lambda: nn.LSTM(FEATURES, 4, batch_first=True),
    "lstm-both-ways": lambda: nn.LSTM(FEATURES, 4, 2, bidirectional=True, batch_first=True),
    "lstm-dropout": lambda: nn.LSTM(FEATURES, 4, 2, bidirectional=True, batch_first=True, dropout=0.4),
    "lstm-projected": lambda: nn.LSTM(FEATURES, 4, 2, proj_size=2, batch_first=True),
    "gru": lambda: nn.GRU(FEATURES, 4, 2, bidirectional=True, batch_first=True),
    "gru-dropout": lambda: nn.GRU(FEATURES, 4, 3, bias=False, batch_first=True, dropout=0.3),
    "tanh": lambda: nn.RNN(FEATURES, 4, 2, batch_first=True),
    "relu": lambda: nn.RNN(FEATURES, 4, bidirectional=True, nonlinearity="relu", batch_first=True),
}


class Net(nn.Module):
    """A line, a recurrent network whose first hidden state is trained too if it has one, and a line for classes."""

    def __init__(self, layers: nn.RNNBase) -> None:
        super().__init__()
        self.line = nn.Linear(FEATURES, FEATURES)
        self.layers = layers
        directions = layers.num_layers * (2 if layers.bidirectional else 1)
        self.state = nn.Parameter(torch.randn(directions, 1, 4)) if layers.mode != "LSTM" else None
        self.head = nn.Linear((layers.proj_size or 4) * (2 if layers.bidirectional else 1), CLASSES)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Classify sequences."""
        state = None if self.state is None else self.state.expand(-1, len(x_BTD), -1).contiguous()
        states_BTD, ends = self.layers(self.line(x_BTD), state)
        last = ends[1] if isinstance(ends, tuple) else ends
        made: Tensor = self.head(states_BTD.mean(1)) + last.square().mean((0, 2))[:, None]
        return made


def build(name: str) -> nn.Module:
    """Return a model, with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        return Net(NETWORKS[name]()).double()


def batches(sizes: Sequence[int] = SIZES) -> list[tuple[Tensor, Tensor]]:
    """Return batches, the same each time."""
    generator = torch.Generator().manual_seed(11)
    return [
        (
            torch.randn(size, TIMES, FEATURES, dtype=torch.float64, generator=generator),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for size in sizes
    ]


def data_parallel(devices: int) -> Plan:
    """Return a plan of one stage with so many replicas."""
    replicas = tuple((device,) for device in range(devices))
    return Plan(stages=(Stage(replicas=replicas, shares=(1.0,) * devices),), micro_batch=MICRO_BATCH)


def staged(name: str, devices: Sequence[int], **more: Any) -> Plan:
    """Return a plan of stages with about equal numbers of segments."""
    names = TracedModel(capture(build(name), functional.cross_entropy, batches([3])[0]), backward=True).segments
    bounds = [len(names) * place // len(devices) for place in range(len(devices) + 1)]
    stages = tuple(
        Stage(segments=names[bounds[place] : bounds[place + 1]], replicas=((device,),), shares=(1.0,))
        for place, device in enumerate(devices)
    )
    return Plan(stages=stages, micro_batch=MICRO_BATCH, **more)


def run(pool: onebox.Pool, name: str, plan: Plan) -> Outcome:
    """Train on a pool."""
    model = build(name)
    options: dict[str, Any] = {"seed": SEED, "check_every": 1, "plan": plan}
    with onebox.Trainer(model, functional.cross_entropy, adamw(model), **grouped(pool=pool, **options)) as trainer:
        return outcome(trainer, [trainer.step(*batch) for batch in batches()])


def alone(name: str, plan: Plan) -> Outcome:
    """Train in this process, on the micro-batches of a plan."""

    model = build(name)
    around = drawing(SEED) if "dropout" in name else None
    return train(model, functional.cross_entropy, adamw(model), batches(), plan, around=around)


@pytest.mark.parametrize("name", NETWORKS)
def test_one_worker_computes_what_one_process_computes(name: str, pools: Pools) -> None:
    plan = data_parallel(1)
    assert_same(run(pools(1), name, plan), alone(name, plan))


@pytest.mark.feature("Trainer: Train recurrent layers and complex numbers")
@pytest.mark.parametrize(
    ("name", "devices", "schedule"),
    [
        ("lstm-both-ways", (0, 1), "1f1b"),
        ("lstm-dropout", (0, 1, 2), "zb-h1"),
        ("lstm-projected", (0, 1), "zb-h1"),
        ("gru", (0, 1), "zb-h1"),
        ("gru-dropout", (0, 1, 1, 0), "zbv"),
        ("tanh", (0, 1), "gpipe"),
    ],
)
def test_layers_in_stages(name: str, devices: tuple[int, ...], schedule: str, pools: Pools) -> None:
    plan = staged(name, devices, schedule=schedule)
    assert_same(run(pools(3), name, plan), alone(name, plan))


def test_memory_is_what_was_predicted(pools: Pools) -> None:
    """What a layer needs for all its steps is part of the prediction."""
    model, batch = build("gru"), batches([6])[0]
    with onebox.Trainer(
        model,
        functional.cross_entropy,
        adamw(model),
        pool=pools(1),
        plan=data_parallel(1),
        engine=onebox.Engine(check_every=0),
    ) as trainer:
        for _ in range(2):  # the optimizer's state is there when the second begins
            trainer.step(*batch).item()
        assert trainer.predicted_memory(*batch)[0] == max(event.peak_bytes for event in trainer.events())


def test_evaluation_is_that_of_one_process(pools: Pools) -> None:
    model, given = build("lstm-dropout"), batches([6, 6])
    with onebox.Trainer(model, functional.cross_entropy, adamw(model), pool=pools(2)) as trainer:
        found = trainer.evaluate(given)
    model.eval().requires_grad_(False)
    expected = sum(float(functional.cross_entropy(model(x), y)) for x, y in given) / len(given)
    assert abs(found.loss - expected) < 1e-10
