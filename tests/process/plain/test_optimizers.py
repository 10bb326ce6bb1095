"""Optimizers: groups, several at once, schedulers, frozen parameters, hooks, subclasses, and half precision."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit.pools import Pools
from tests.process.plain.case import Case, case, check, equal_or_refused, refused
from tests.process.plain.data import Between, labelled, mlp, sgd, tokens
from tests.process.plain.ways import Loop, Way


def test_as_plain_pytorch(case: Case, way: str, pools: Pools) -> None:
    check(case, way, pools)


def train(way: Way, optimizer: Any, **options: Any) -> None:
    model = options.pop("model", None) or mlp()
    way.train(model, F.cross_entropy, optimizer, options.pop("batches", labelled()), **{"micro_batch": 8, **options})


@case()
def two_optimizers_and_clipping(way: Way) -> None:
    def both(model: Any) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(model.first.parameters(), lr=0.01),
            torch.optim.SGD(model.last.parameters(), lr=0.1),
        ]

    train(way, both, model=Between(), clip=0.5)


@case()
def groups_with_options_of_their_own(way: Way) -> None:
    def grouped(model: Any) -> torch.optim.Optimizer:
        groups = [{"params": model[0].parameters(), "lr": 1e-3, "weight_decay": 0.1}, {"params": model[2].parameters()}]
        return torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)

    train(way, grouped)


@case()
def one_cycle_with_momentum(way: Way) -> None:
    schedulers: list[Any] = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = sgd(model)
        schedulers.append(torch.optim.lr_scheduler.OneCycleLR(made, max_lr=0.5, total_steps=20, cycle_momentum=True))
        return made

    train(way, optimizer, after=lambda step, loop: schedulers[-1].step())


@case()
def reduced_on_a_plateau(way: Way) -> None:
    schedulers: list[Any] = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(model.parameters(), lr=1.0)
        schedulers.append(torch.optim.lr_scheduler.ReduceLROnPlateau(made, patience=0, factor=0.5))
        return made

    def after(step: int, loop: Loop) -> None:
        schedulers[-1].step(loop.evaluate(labelled(1)))
        way.note(**{f"lr after {step}": loop.optimizers[0].param_groups[0]["lr"]})

    train(way, optimizer, after=after, batches=labelled(6))


@case()
def plateau_of_the_loss_of_the_step(way: Way) -> None:
    with way.loop(mlp(), F.cross_entropy, lambda m: torch.optim.SGD(m.parameters(), lr=1.0)) as loop:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(loop.optimizers[0], patience=0, factor=0.5)
        for batch in labelled(6):
            scheduler.step(loop.step(*batch))


@case()
def learning_rate_as_a_tensor(way: Way) -> None:
    train(way, lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01)))


@case()
def options_changed_between_steps(way: Way) -> None:
    def before(step: int, loop: Loop) -> None:
        loop.optimizers[0].param_groups[0].update(momentum=0.5 + 0.1 * step, weight_decay=0.01 * step)

    train(way, sgd, before=before)


FROZEN = "since this trainer was made.*close this trainer and make another one"


@case(trainer=equal_or_refused(FROZEN))
def unfrozen_later(way: Way) -> None:
    model = mlp()
    model[0].requires_grad_(False)
    train(way, sgd, model=model, before=lambda step, loop: model[0].requires_grad_(step >= 2))


@case(trainer=equal_or_refused(FROZEN))
def frozen_later(way: Way) -> None:
    model = mlp()
    train(way, sgd, model=model, before=lambda step, loop: model[0].requires_grad_(step < 2))


@case(trainer=equal_or_refused(FROZEN))
def group_added_later(way: Way) -> None:
    model = mlp()
    model[0].requires_grad_(False)

    def before(step: int, loop: Loop) -> None:
        if step == 2:
            model[0].requires_grad_(True)
            loop.optimizers[0].add_param_group({"params": list(model[0].parameters()), "lr": 0.01})

    train(way, lambda m: torch.optim.SGD(m[2].parameters(), lr=0.1, momentum=0.9), model=model, before=before)


class Lion(torch.optim.Optimizer):
    """A class of the user's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


class Zeroed(torch.optim.Adam):
    """A subclass with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        return super().step(closure)


@case(trainer=refused("Lion is no optimizer that workers run"))
def optimizer_of_the_user(way: Way) -> None:
    train(way, lambda m: Lion(m.parameters()))


@case(trainer=refused("Zeroed is no optimizer that workers run"))
def subclass_with_another_step(way: Way) -> None:
    train(way, lambda m: Zeroed(m.parameters()))


@case(trainer=refused("LBFGS is no optimizer"), vgpu=None)
def lbfgs(way: Way) -> None:
    train(way, lambda m: torch.optim.LBFGS(m.parameters()))


@case(trainer=refused("SparseAdam is no optimizer|layout"))
def sparse_adam(way: Way) -> None:
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(40, 4))

    def both(m: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SparseAdam(m[0].parameters()), torch.optim.Adam(m[2].parameters())]

    train(way, both, model=model, batches=tokens(), micro_batch=None)


def with_hook(kind: str) -> Any:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = sgd(model)

        def halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)

        getattr(made, f"register_step_{kind}_hook")(halve)
        return made

    return optimizer


@case(trainer=refused("hook"))
def hook_after_the_step_of_an_optimizer(way: Way) -> None:
    train(way, with_hook("post"))


@case(trainer=refused("hook"))
def hook_before_the_step_of_an_optimizer(way: Way) -> None:
    train(way, with_hook("pre"))


@case()
def scheduler_without_a_warning(way: Way) -> None:
    """A scheduler's step comes after that of the optimizer, also where workers do that."""
    with way.loop(mlp(), F.cross_entropy, sgd) as loop:
        scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizers[0], 1, gamma=0.5)
        for batch in labelled(3):
            loop.step(*batch)
            scheduler.step()


@case()
def state_of_the_optimizer_after_pull(way: Way) -> None:
    with way.loop(mlp(), F.cross_entropy, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), micro_batch=8) as loop:
        for batch in labelled():
            loop.step(*batch)
        loop.pull()
        state = loop.optimizers[0].state_dict()["state"]
        way.note(state=[state[n][key] for n in sorted(state) for key in ("step", "exp_avg", "exp_avg_sq")])


@case(trainer=equal_or_refused("state"))
def state_of_the_optimizer_from_a_plain_run(way: Way) -> None:
    model = mlp()
    first = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in labelled(3):
        first.zero_grad()
        F.cross_entropy(model(x), y).backward()
        first.step()
    saved = copy.deepcopy(first.state_dict())

    def again(m: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(m.parameters(), lr=0.01)
        made.load_state_dict(saved)
        return made

    train(way, again, model=model)


@case(trainer=equal_or_refused("state"))
def state_of_the_optimizer_loaded_between_steps(way: Way) -> None:
    def before(step: int, loop: Loop) -> None:
        if step == 2:
            loop.pull()
            loop.optimizers[0].load_state_dict(torch.optim.AdamW(loop.model.parameters(), lr=0.01).state_dict())

    train(way, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), before=before)


def halves(way: Way, dtype: torch.dtype, **options: Any) -> None:
    batches = [(x.to(dtype), y) for x, y in labelled(6)]
    train(way, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, **options), model=mlp().to(dtype), batches=batches)


@case(tolerance=5e-3)
def bf16_parameters(way: Way) -> None:
    halves(way, torch.bfloat16)


@case(tolerance=1e-3)
def fp16_parameters(way: Way) -> None:
    halves(way, torch.float16)


@case(tolerance=1e-2)
def bf16_parameters_with_momentum(way: Way) -> None:
    halves(way, torch.bfloat16, momentum=0.9)


@case(tolerance=5e-3)
def bf16_parameters_with_a_fused_optimizer(way: Way) -> None:
    """On the CPU plain PyTorch's own fused kernel leaves some where they are: the unfused one is compared with."""
    halves(way, torch.bfloat16, **({"fused": True} if way.name != "plain" else {}))


def in_float32(way: Way, model: nn.Module, **options: Any) -> None:
    batches = [(x.float(), y) for x, y in labelled()]
    way.train(model.float(), F.cross_entropy, sgd, batches, micro_batch=8, **options)


@case(tolerance=2e-2, vgpu=None)
def bf16_precision(way: Way) -> None:
    in_float32(way, mlp(), precision="bf16")


def under_autocast(module: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module.first(h).relu().float()


@case(tolerance=1e-5, vgpu=None)
def autocast_in_forward(way: Way) -> None:
    in_float32(way, Between(under_autocast))
