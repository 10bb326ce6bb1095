"""Python state that forward reads and writes, weights that are changed by hand, and modules that are shared."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.kit.pools import Pools
from tests.process.plain.case import Case, case, check, equal_or_refused, refused, warned
from tests.process.plain.data import Between, labelled, mlp, randn, sgd, still
from tests.process.plain.ways import Loop, Way


def test_as_plain_pytorch(case: Case, way: str, pools: Pools) -> None:
    check(case, way, pools)


def train(way: Way, model: nn.Module, **options: Any) -> None:
    way.train(model, options.pop("loss", F.cross_entropy), sgd, labelled(), **{"micro_batch": 8, **options})


@case(trainer=refused("random"))
def python_random(way: Way) -> None:
    train(way, Between(lambda module, h: h * random.random()))


@case(trainer=refused("random"))
def numpy_random(way: Way) -> None:
    train(way, Between(lambda module, h: h * float(np.random.rand())))


@case(trainer=refused("generator"))
def numpy_generator(way: Way) -> None:
    generator = np.random.default_rng(0)
    train(way, Between(lambda module, h: h * float(generator.random())))


@case(trainer=refused("default_rng"), vgpu=None)
def numpy_generator_made_in_forward(way: Way) -> None:
    """Each one draws from fresh entropy."""
    train(way, Between(lambda module, h: h * float(np.random.default_rng().random())))


@case(trainer=refused(r"test_state\.py:\d+.*decides by the value"), vgpu=None)
def layer_drop_by_torch(way: Way) -> None:
    train(way, Between(lambda module, h: h if torch.rand([]) < 0.5 else h.relu()))


def counted(module: Any, h: Tensor) -> Tensor:
    module.calls = getattr(module, "calls", 0) + 1
    return h * module.calls


@case(trainer=refused("calls"))
def counter_as_an_attribute(way: Way) -> None:
    train(way, Between(counted))


class Scaled(nn.Module):
    """A layer of which a stack has equal ones."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.k = 1.0

    def forward(self, h: Tensor) -> Tensor:
        """Map [B, 8] to [B, 8]."""
        return h + self.k * self.line(h).tanh()


@case()
def equal_layers_of_which_some_change(way: Way) -> None:
    model = nn.Sequential(*(Scaled() for _ in range(5)), nn.Linear(8, 4))
    places = {1: 0, 2: 2, 3: 4}

    def change(step: int, loop: Loop) -> None:
        if step in places:
            model[places[step]].k = 1.5

    train(way, model, before=change)


class Warmed(nn.Module):
    """A factor that grows with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.calls = nn.Linear(8, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.front(x) * self.calls


@case(trainer=refused("calls"))
def counter_from_the_constructor(way: Way) -> None:
    train(way, Warmed())


@case(trainer=refused("calls"))
def counter_in_a_dict(way: Way) -> None:
    calls = {"calls": 0}

    def counted(module: Any, h: Tensor) -> Tensor:
        calls["calls"] += 1
        return h * calls["calls"]

    train(way, Between(counted))


@case(trainer=refused("global|STEPS"))
def counter_as_a_global(way: Way) -> None:
    global STEPS  # noqa: PLW0603
    STEPS = 0

    def counted(module: Any, h: Tensor) -> Tensor:
        global STEPS  # noqa: PLW0603
        STEPS += 1
        return h * STEPS

    train(way, Between(counted))


STEPS = 0


class Carried(nn.Module):
    """A hidden state that goes from batch to batch: truncated backpropagation through time."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRUCell(8, 8), nn.Linear(8, 4)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.gru(x, self.state)
        self.state = hidden.detach()
        return self.head(hidden)


@case(trainer=refused("state"))
def hidden_state_as_an_attribute(way: Way) -> None:
    train(way, Carried(), micro_batch=None)


class Averaged(nn.Module):
    """A running mean in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.front(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return self.head(h - self.mean)


@case(devices=1)
def running_mean_in_a_buffer(way: Way) -> None:
    train(way, Averaged(), micro_batch=None)


@case()
def dropout_that_is_annealed(way: Way) -> None:
    """From nothing to all, so that no random number matters."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.0), nn.Linear(16, 4))

    def before(step: int, loop: Loop) -> None:
        model[1].p = 1.0 if step >= 2 else 0.0

    train(way, model, before=before)


class Optional(nn.Module):
    """A layer that is used as long as an attribute says so."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.more, self.both = nn.Linear(8, 4), nn.Linear(8, 4), True

    def forward(self, x: Tensor) -> Tensor:
        y = self.front(x)
        return y + self.more(x) if self.both else y


@case(trainer=refused(r"more\.\w+ has a gradient in some steps"))
def layer_that_is_used_no_more(way: Way) -> None:
    """Its momentum moves it no more either."""
    model = Optional()

    def before(step: int, loop: Loop) -> None:
        model.both = step < 2

    train(way, model, before=before)


@case()
def slope_that_is_annealed(way: Way) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.1), nn.Linear(16, 4))

    def before(step: int, loop: Loop) -> None:
        model[1].negative_slope = 0.5 if step >= 2 else 0.1

    train(way, model, before=before)


@case()
def momentum_of_a_batch_norm_that_changes(way: Way) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))

    def before(step: int, loop: Loop) -> None:
        model[1].momentum = 0.5 if step >= 2 else 0.1

    train(way, model, before=before)


@case()
def weight_of_a_term_in_a_closure(way: Way) -> None:
    beta = [0.0]

    def before(step: int, loop: Loop) -> None:
        beta[0] = 0.5 if step >= 2 else 0.0

    train(way, mlp(), loss=lambda o, t: F.cross_entropy(o, t) + beta[0] * o.pow(2).mean(), before=before)


@case()
def weight_of_a_term_rebound(way: Way) -> None:
    beta = 0.0

    def before(step: int, loop: Loop) -> None:
        nonlocal beta
        beta = 0.5 if step >= 2 else 0.0

    train(way, mlp(), loss=lambda o, t: F.cross_entropy(o, t) + beta * o.pow(2).mean(), before=before)


@case()
def weight_of_a_term_as_an_attribute_of_the_loss(way: Way) -> None:
    loss = nn.CrossEntropyLoss(label_smoothing=0.0)

    def before(step: int, loop: Loop) -> None:
        loss.label_smoothing = 0.2 if step >= 2 else 0.0

    train(way, mlp(), loss=loss, before=before)


@case()
def eval_mode_between_steps(way: Way) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    train(way, model, before=lambda step, loop: model.train(step < 2))


def halve(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


@case()
def weights_changed_after_pull(way: Way) -> None:
    def before(step: int, loop: Loop) -> None:
        if step == 2:
            loop.pull()
            halve(loop.model)

    train(way, mlp(), before=before)


@case()
def weights_changed_through_data(way: Way) -> None:
    """``.data`` does not count versions."""

    def before(step: int, loop: Loop) -> None:
        if step == 2:
            loop.pull()
            for parameter in loop.model.parameters():
                parameter.data.mul_(0.5)

    train(way, mlp(), before=before)


@case()
def weights_clamped_after_each_step(way: Way) -> None:
    def after(step: int, loop: Loop) -> None:
        loop.pull()
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.clamp_(-0.2, 0.2)

    train(way, mlp(), after=after)


@case()
def state_dict_loaded_after_pull(way: Way) -> None:
    other = copy.deepcopy(mlp().state_dict())

    def before(step: int, loop: Loop) -> None:
        if step == 2:
            loop.pull()
            loop.model.load_state_dict(other)

    train(way, mlp(), before=before)


@case(trainer=refused("pull"))
def weights_changed_without_pull(way: Way) -> None:
    train(way, mlp(), before=lambda step, loop: halve(loop.model) if step == 2 else None)


@case()
def weights_changed_before_the_first_step(way: Way) -> None:
    train(way, mlp(), before=lambda step, loop: halve(loop.model) if step == 0 else None)


@case()
def buffer_changed_after_pull(way: Way) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))

    def before(step: int, loop: Loop) -> None:
        if step == 2:
            loop.pull()
            model[1].reset_running_stats()

    train(way, model, before=before)


@case(trainer=equal_or_refused("is another one"))
def parameter_replaced(way: Way) -> None:
    """The optimizer keeps the old one, which plain PyTorch leaves without a gradient."""
    model = mlp()

    def before(step: int, loop: Loop) -> None:
        if step == 2:
            loop.pull()
            model[2].bias = nn.Parameter(torch.zeros_like(model[2].bias))

    train(way, model, before=before)


@case()
def average_of_the_weights(way: Way) -> None:
    model = mlp()
    if way.device:
        model.to(way.device)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def after(step: int, loop: Loop) -> None:
        loop.pull()
        average.update_parameters(model)

    train(way, model, after=after)
    way.note(average=list(average.module.state_dict().values()))


class Judging(nn.Module):
    """The discriminator's step: real samples, and generated ones that are detached."""

    def __init__(self, generator: nn.Module, judge: nn.Module) -> None:
        super().__init__()
        self.generator, self.judge = generator, judge

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.judge(x), self.judge(self.generator(z).detach())


class Generating(nn.Module):
    """The generator's step."""

    def __init__(self, generator: nn.Module, judge: nn.Module) -> None:
        super().__init__()
        self.generator, self.judge = generator, judge

    def forward(self, z: Tensor) -> Tensor:
        return self.judge(self.generator(z))


def real(logits: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


def fake(logits: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits))


def adversaries(way: Way, *, pull: bool) -> None:
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    judge = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def adam(module: nn.Module) -> Any:
        return lambda model: torch.optim.Adam(module.parameters(), lr=1e-2)

    first = way.loop(
        Judging(generator, judge), lambda o, t: real(o[0]) + fake(o[1]), adam(judge), name="d ", micro_batch=8
    )
    second = way.loop(Generating(generator, judge), lambda o, t: real(o), adam(generator), name="g ", micro_batch=8)
    with first as judging, second as generating:
        for step in range(3):
            x, z = randn(16, 8, seed=step), randn(16, 4, seed=50 + step)
            judging.step((x, z))
            if pull:
                judging.pull()
            generating.step(z)
            if pull:
                generating.pull()


@case()
def adversaries_with_pull(way: Way) -> None:
    adversaries(way, pull=True)


@case(trainer=equal_or_refused("share"))
def adversaries_without_pull(way: Way) -> None:
    adversaries(way, pull=False)


@case()
def weights_saved_and_loaded(way: Way) -> None:
    model, other = mlp(), mlp()
    train(way, model)
    other.load_state_dict(copy.deepcopy({name: value.cpu() for name, value in model.state_dict().items()}))
    train(way, other, name="other ")


@case()
def frozen_by_requires_grad(way: Way) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    train(way, model)


@case(vgpu=None)
def evaluation_between_steps(way: Way) -> None:
    losses: list[float] = []
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    model[2].p = 0.0
    train(way, model, after=lambda step, loop: losses.append(loop.evaluate(labelled(2))))
    way.note(losses=losses)


class Elsewhere(nn.Module):
    """Another layer for eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.other = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.front(x) if self.training else self.other(x)


@case(trainer=equal_or_refused("other"), vgpu=None)
def layer_of_eval_mode_alone(way: Way) -> None:
    losses: list[float] = []
    train(way, Elsewhere(), after=lambda step, loop: losses.append(loop.evaluate(labelled(1))))
    way.note(losses=losses)


class Counted(nn.Module):
    """A buffer that counts calls, in eval mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.front(x)


@case(trainer=warned("calls"), vgpu=None)
def buffer_written_by_an_evaluation(way: Way) -> None:
    train(way, Counted(), after=lambda step, loop: loop.evaluate(labelled(1)))


class Steps(nn.Module):
    """A counter of its own type beside that of a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return self.head(self.norm(x))


@case()
def counters_of_two_types_in_buffers(way: Way) -> None:
    way.train(Steps(), F.cross_entropy, sgd, labelled(3, samples=12), micro_batch=4)


class Counters(nn.Module):
    """Counters of one type that count differently, the later one first."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("ones", torch.zeros(()))
        self.register_buffer("twos", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.twos.add_(2)
        h = self.front(x)
        self.ones.add_(1)
        return self.head(h)


@case()
def counters_that_count_differently(way: Way) -> None:
    way.train(Counters(), F.cross_entropy, sgd, labelled(3, samples=12), micro_batch=4)


@case()
def nothing_changes_with_a_learning_rate_of_zero(way: Way) -> None:
    way.train(mlp(), F.cross_entropy, still, labelled(), micro_batch=8)
