"""Weights that are read in this process without a pull, and lines that a plain loop leaves behind."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

from tests.kit.pools import Pools
from tests.process.plain.case import Case, case, check, refused, warned
from tests.process.plain.data import Between, labelled, mlp, randn, sgd
from tests.process.plain.ways import Loop, Way


def test_as_plain_pytorch(case: Case, way: str, pools: Pools) -> None:
    check(case, way, pools)


def train(
    way: Way, model: nn.Module, *, reads: Callable[[int, Any], Any] = lambda step, model: None, **opts: Any
) -> None:
    """Train, and note what is read after each step."""

    def after(step: int, loop: Loop) -> None:
        if (found := reads(step, loop.model)) is not None:
            way.note(**{f"read at {step}": found})

    way.train(model, opts.pop("loss", F.cross_entropy), opts.pop("optimizer", sgd), labelled(), after=after, **opts)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().cpu().clone() for tensor in model.parameters()]


@case()
def state_dict_after_each_step(way: Way) -> None:
    train(way, mlp(), reads=lambda step, model: {k: v.cpu().clone() for k, v in model.state_dict().items()})


@case()
def state_dict_of_a_part(way: Way) -> None:
    train(way, mlp(), reads=lambda step, model: {k: v.cpu().clone() for k, v in model[0].state_dict().items()})


@case(vgpu=None)
def saved_by_torch_save(way: Way) -> None:
    def saved(step: int, model: nn.Module) -> Any:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        return torch.load(file)

    train(way, mlp(), reads=saved)


class Direct(nn.Module):
    """Has a parameter of its own beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, 8] to [B, 4]."""
        return self.last(self.first(x * self.scale).tanh())


@case()
def copied_after_each_step(way: Way) -> None:
    train(way, Direct(), reads=lambda step, model: values(copy.deepcopy(model)))


@case()
def copied_in_a_list(way: Way) -> None:
    train(way, Direct(), reads=lambda step, model: values(copy.deepcopy([0, model])[1]))


@case(vgpu=None)
def whole_model_saved(way: Way) -> None:
    def saved(step: int, model: nn.Module) -> Any:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        return [*values(loaded), loaded(randn(4, 8))]

    train(way, mlp(), reads=saved)


@case()
def a_copy_is_trained_on(way: Way) -> None:
    model = mlp()
    train(way, model)
    train(way, copy.deepcopy(model).train())


@case()
def forward_after_each_step(way: Way) -> None:
    x = randn(4, 8)
    train(way, mlp(), reads=lambda step, model: model(x.to(next(model.parameters()).device)))


@case()
def forward_of_a_layer_after_each_step(way: Way) -> None:
    x = randn(4, 8)
    train(way, mlp(), reads=lambda step, model: model[0](x.to(next(model[0].parameters()).device)))


@case()
def evaluation_in_eval_mode(way: Way) -> None:
    x = randn(6, 8)

    def evaluated(step: int, model: nn.Module) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            found = model(x.to(next(model.parameters()).device))
        model.train()
        return found

    train(
        way,
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 4)),
        reads=evaluated,
        micro_batch=8,
    )


@case()
def best_weights_kept(way: Way) -> None:
    kept: dict[str, Any] = {}

    def keep(step: int, model: nn.Module) -> None:
        if step == 1:
            kept.update({name: tensor.cpu().clone() for name, tensor in model.state_dict().items()})

    model = mlp()
    train(way, model, reads=keep)
    way.note(best=kept)


@case()
def back_to_earlier_weights(way: Way) -> None:
    kept: dict[str, Any] = {}

    def back(step: int, loop: Loop) -> None:
        if step == 0:
            kept.update({name: tensor.clone() for name, tensor in loop.model.state_dict().items()})
        if step == 2:
            loop.model.state_dict()
            loop.model.load_state_dict(kept)

    way.train(mlp(), F.cross_entropy, sgd, labelled(), after=back)


@case()
def averaged_model(way: Way) -> None:
    model = mlp().to(way.device or "cpu")
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    train(way, model, reads=lambda step, model: averaged.update_parameters(model))
    way.note(averaged=values(averaged))


@case()
def averaged_model_with_buffers(way: Way) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(way.device or "cpu")
    averaged = AveragedModel(model, avg_fn=get_ema_avg_fn(0.5), use_buffers=True)
    train(way, model, reads=lambda step, model: averaged.update_parameters(model), micro_batch=8)
    way.note(averaged=values(averaged))


@case()
def stochastic_weight_averaging(way: Way) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(way.device or "cpu")
    averaged = AveragedModel(model)
    train(way, model, reads=lambda step, model: averaged.update_parameters(model) if step >= 2 else None, micro_batch=8)
    update_bn([randn(8, 8, seed=n).to(way.device or "cpu") for n in range(3)], averaged)
    way.note(averaged=values(averaged), buffers=[tensor for tensor in averaged.buffers() if tensor.is_floating_point()])


@case()
def a_step_by_hand_between(way: Way) -> None:
    x = randn(4, 8)

    def by_hand(step: int, loop: Loop) -> None:
        if step == 1:
            (optimizer,) = loop.optimizers
            optimizer.zero_grad()
            loop.model(x.to(next(loop.model.parameters()).device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    way.train(mlp(), F.cross_entropy, sgd, labelled(), after=by_hand)


@case()
def lines_left_behind(way: Way) -> None:
    """Of a plain loop: without gradients they change nothing."""

    def left(step: int, loop: Loop) -> None:
        for optimizer in loop.optimizers:
            optimizer.zero_grad()
            optimizer.step()

    way.train(mlp(), F.cross_entropy, sgd, labelled(), after=left)


@case(trainer=warned("clip_grad_norm="), vgpu=None)
def clipping_left_behind(way: Way) -> None:
    def clip(step: int, loop: Loop) -> None:
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)

    way.train(mlp(), F.cross_entropy, sgd, labelled(), after=clip)


# ---- what workers do not call


@case(trainer=refused(r"SGD\.step has been replaced by a function of.*test_readers\.py:\d+"))
def step_replaced_on_the_instance(way: Way) -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = sgd(model)
        step = made.step

        def centred(*args: Any, **kwargs: Any) -> Any:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.sub_(parameter.grad.mean())
            return step(*args, **kwargs)

        made.step = centred  # type: ignore[method-assign]
        return made

    train(way, mlp(), optimizer=optimizer)


@case(trainer=refused(r"SGD\.step has been replaced by a function of"))
def step_replaced_later(way: Way) -> None:
    def before(step: int, loop: Loop) -> None:
        if step == 2:
            (optimizer,) = loop.optimizers
            optimizer.step = lambda *_: None  # type: ignore[method-assign]

    way.train(mlp(), F.cross_entropy, sgd, labelled(), before=before)


@case()
def step_wrapped_by_a_scheduler(way: Way) -> None:
    schedulers: list[Any] = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = sgd(model)
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(made, 0.5))
        schedulers.append(torch.optim.lr_scheduler.StepLR(made, 2))
        return made

    train(way, mlp(), optimizer=optimizer, reads=lambda step, model: [each.step() for each in schedulers] and None)


@case(trainer=refused("a hook for the steps of all optimizers"), vgpu=None)
def hook_for_all_optimizers(way: Way) -> None:
    def halve(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    handle = register_optimizer_step_pre_hook(halve)
    try:
        train(way, mlp())
    finally:
        handle.remove()


def coarse(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * 8).round() / 8


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def within(context: Callable[[], Any]) -> Between:
    def between(module: Any, h: torch.Tensor) -> torch.Tensor:
        with context():
            return h.tanh().square()

    return Between(between)


@case(trainer=refused(r"test_readers\.py:\d+.*saved_tensors_hooks"))
def saved_tensors_hooks_in_forward(way: Way) -> None:
    train(way, within(lambda: torch.autograd.graph.saved_tensors_hooks(coarse, same)))


@case(trainer=refused(r"within torch\.autograd\.graph\.saved_tensors_hooks\(coarse"), vgpu=None)
def saved_tensors_hooks_around_a_step(way: Way) -> None:
    with torch.autograd.graph.saved_tensors_hooks(coarse, same):
        train(way, mlp())


@case()
def save_on_cpu_in_forward(way: Way) -> None:
    train(way, within(torch.autograd.graph.save_on_cpu))


@case()
def disabled_saved_tensors_hooks(way: Way) -> None:
    train(way, within(lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here")))


@case()
def no_grad_in_forward(way: Way) -> None:
    def between(module: Any, h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = h.abs().amax(1, keepdim=True)
        return h / scale

    train(way, Between(between))


class Carried(nn.Module):
    """A recurrent layer whose state goes on from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)
        self.register_buffer("state", torch.zeros(1, 16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, 8] to [B, 4]."""
        y, state = self.layer(x[:, None], self.state.clone())
        self.state.copy_(state.detach())
        return self.head(y[:, 0])


@case(trainer=refused("Buffer state.*carried from batch to batch.*one micro-batch on one replica"), vgpu=None)
def state_carried_from_batch_to_batch(way: Way) -> None:
    train(way, Carried())
