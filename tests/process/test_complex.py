"""Complex numbers: transforms, values between stages, checkpoints, types that are refused.

That they go together with all settings is shown by :mod:`tests.process.test_covering_array`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional

import onebox
from onebox.errors import UsageError
from onebox.graph import TracedModel
from onebox.plan import Plan, Stage
from tests.kit.captures import capture
from tests.kit.models import Waves
from tests.kit.pools import Pools
from tests.kit.reference import Outcome, assert_same, state_of, train
from tests.kit.trainer_arguments import grouped

STEPS = 5
BATCH = 8
MICRO_BATCH = 3


class Spectrum(nn.Module):
    """A learned filter of frequencies, a transform with a window, and magnitudes and angles."""

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(17, 2))
        self.register_buffer("window", torch.hann_window(16))
        self.mix = nn.Conv1d(9, 6, 3)
        self.leave = nn.Linear(12, 4)

    def forward(self, x_BT: Tensor) -> Tensor:
        z_BF = torch.fft.rfft(x_BT) * torch.view_as_complex(self.filter)
        y_BT = torch.fft.irfft(z_BF, n=32)
        z_BFT = torch.stft(y_BT, 16, 4, window=self.window, return_complex=True)
        h_BKT = self.mix(z_BFT.abs().add(1e-3).log()).tanh()
        return self.leave(torch.cat([h_BKT.mean(-1), torch.cos(z_BF.angle())[:, :6]], 1))


class FrontEnd(nn.Module):
    """A spectrum that nobody trains, in front of a model of real numbers."""

    window: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.mix = nn.Conv1d(9, 6, 3)
        self.leave = nn.Linear(6, 4)

    def forward(self, x_BT: Tensor) -> Tensor:
        z_BFT = torch.stft(x_BT, 16, 4, window=self.window, return_complex=True)
        return self.leave(self.mix(z_BFT.abs().pow(2).add(1e-6).log()).mean(-1))


WIDTHS: dict[type[nn.Module], int] = {Waves: 10, Spectrum: 32, FrontEnd: 32}


def built(kind: type[nn.Module]) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            return kind()
    finally:
        torch.set_default_dtype(before)


def batches(kind: type[nn.Module], dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    shape = (BATCH, WIDTHS[kind])
    return [
        (torch.randn(shape, dtype=dtype, generator=generator), torch.randint(4, (BATCH,), generator=generator))
        for _ in range(STEPS)
    ]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def replicas(kind: type[nn.Module]) -> Plan:
    return Plan.data_parallel([0, 1], [1.0, 1.0], micro_batch=MICRO_BATCH)


def pipeline(kind: type[nn.Module], place: int | None = None) -> Plan:
    names = TracedModel(capture(built(kind), functional.cross_entropy, batches(kind)[0]), backward=True).segments
    middle = len(names) // 2 if place is None else place
    parts = names[:middle], names[middle:]
    stages = tuple(Stage(segments=own, replicas=((device,),), shares=(1.0,)) for device, own in enumerate(parts))
    return Plan(stages=stages, micro_batch=MICRO_BATCH, schedule="1f1b")


def run(
    pool: onebox.Pool, kind: type[nn.Module], optimizer: Callable[[nn.Module], torch.optim.Optimizer], **options: Any
) -> Outcome:
    model = built(kind)
    with onebox.Trainer(
        model, functional.cross_entropy, optimizer(model), **grouped(pool=pool, check_every=1, **options)
    ) as trainer:
        losses = [float(loss) for loss in [trainer.step(*batch) for batch in batches(kind)]]
        trainer.pull()
    return Outcome(losses=losses, norms=[], tensors=state_of(model))


def reference(
    kind: type[nn.Module], optimizer: Callable[[nn.Module], torch.optim.Optimizer], plan: Plan, limit: float | None
) -> Outcome:
    model = built(kind)
    cut = [part.size for part in plan.micro_batches(BATCH)]
    return train(model, functional.cross_entropy, optimizer(model), batches(kind), lambda size: cut, max_norm=limit)


@pytest.mark.feature("Trainer: Train recurrent layers and complex numbers")
@pytest.mark.parametrize("make", [lambda kind: replace(replicas(kind), optimizer="sharded"), pipeline])
def test_the_result_is_that_of_one_process(make: Callable[[type[nn.Module]], Plan], pools: Pools) -> None:
    plan = make(Spectrum)
    assert_same(run(pools(2), Spectrum, adam, plan=plan, clip_grad_norm=0.5), reference(Spectrum, adam, plan, 0.5))


def test_a_spectrum_that_nobody_trains(pools: Pools) -> None:
    plan = pipeline(FrontEnd)
    assert_same(run(pools(2), FrontEnd, momentum, plan=plan), reference(FrontEnd, momentum, plan, None))


def test_complex_values_go_between_stages(pools: Pools) -> None:
    """Wherever the model is cut."""
    names = pipeline(Waves).stages
    count = sum(len(stage.segments) for stage in names)
    for place in range(1, count):
        plan = pipeline(Waves, place)
        assert_same(run(pools(2), Waves, adam, plan=plan), reference(Waves, adam, plan, None))


def test_checkpoints_hold_complex_numbers(pools: Pools, tmp_path: Path) -> None:
    model = built(Waves)
    half = STEPS // 2
    with onebox.Trainer(
        model, functional.cross_entropy, adam(model), pool=pools(2), plan=onebox.DataParallel(micro_batch=MICRO_BATCH)
    ) as trainer:
        for batch in batches(Waves)[:half]:
            trainer.step(*batch)
        trainer.save(tmp_path)
        for batch in batches(Waves)[half:]:
            trainer.step(*batch)
        expected = dict(trainer.tensors())
    model = built(Waves)
    with onebox.Trainer.resume(tmp_path, model, functional.cross_entropy, adam(model), pool=pools(1)) as trainer:
        for batch in batches(Waves)[half:]:
            trainer.step(*batch)
        for name, tensor in trainer.tensors().items():
            assert tensor.dtype == expected[name].dtype
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12)


def test_a_type_that_cannot_be_trained_with_is_named(pools: Pools) -> None:
    model = nn.Linear(4, 4)
    x_BD = torch.zeros(4, 4, dtype=torch.uint16)
    with (
        onebox.Trainer(model, lambda outputs, _: outputs.mean(), adam(model), pool=pools(1)) as trainer,
        pytest.raises(
            (UsageError, onebox.errors.WireError), match=r"uint16 cannot be trained with; allowed: .*complex64"
        ),
    ):
        trainer.step(x_BD, torch.zeros(4))
