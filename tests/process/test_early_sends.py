"""What others wait for is sent ahead of the rest of a program, and not a bit of the result changes."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import onebox
from onebox.engine.partition import early_send
from onebox.graph import TracedModel
from onebox.graph.capture.export import capture
from onebox.plan import Plan, Prediction, Stage
from onebox.pool import Link
from tests.kit.pools import Pools
from tests.kit.reference import assert_same
from tests.kit.stages import expected, reference, run, staged

SIZES = [8, 5]


@pytest.mark.parametrize(
    ("name", "devices", "schedule"),
    [("unet", (0, 1, 2), "1f1b"), ("gpt2", (0, 1), "1f1b"), ("cnn", (0, 1), "zb-h1")],
)
def test_sending_early_wherever_possible_gives_the_result_of_one_process(
    pools: Pools, monkeypatch: pytest.MonkeyPatch, name: str, devices: tuple[int, ...], schedule: str
) -> None:
    monkeypatch.setattr(early_send, "pays", lambda left_s, size_bytes: True)
    plan = staged(name, devices, schedule=schedule)
    plan = replace(plan, predicted=expected(plan, SIZES[0]))
    assert_same(run(pools(3), name, plan, SIZES), reference(name, plan, SIZES))


class Skipping(nn.Module):
    """A large value that is there at the beginning of the first stage, and wanted by the second one at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 4096)
        self.narrow = nn.Linear(4096, 16)
        self.rest = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
        self.last = nn.Linear(16, 4096)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.wide(x)
        return self.last(self.rest(self.narrow(wide))) * wide


@pytest.mark.parametrize("early", [True, False])
def test_a_skip_connection_travels_while_the_rest_of_its_stage_is_computed(
    monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """If it is predicted to pay; on devices that sleep, over a link that is slow."""
    if not early:
        monkeypatch.setattr(early_send, "CALL_S", 10.0)
    inputs, targets = torch.zeros(64, 16), torch.zeros(64, 4096)
    loss, model = nn.functional.mse_loss, Skipping()
    names = TracedModel(capture(model, loss, (inputs, targets)), backward=True).segments
    cut = names.index("model.last")
    stages = (names[:cut], names[cut:])
    plan = Plan(
        stages=tuple(Stage(segments=own, replicas=((n,),), shares=(1.0,)) for n, own in enumerate(stages)),
        micro_batch=64,
        schedule="1f1b",
        predicted=Prediction(
            batch=64, step_s=1.0, bubble=0.0, peak_bytes=(1, 1), stages_s=((0.1, 0.01, 0.01), (0.01, 0.01, 0.01))
        ),
    )
    with (
        onebox.open("sim*2", threads=1, links={(0, 1): Link(latency_s=1e-3, bandwidth_bps=20e6)}) as pool,
        onebox.Trainer(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), pool=pool, plan=plan) as trainer,
    ):
        trainer.step(inputs, targets)
        trainer.wait()
        events = [event for event in trainer.events() if event.step == 0 and event.worker == 0]
    forward = [event for event in events if event.name == "stage 0 forward 0"]
    sends = [event for event in events if event.name.startswith("send of stage 0")]
    assert len(sends) == 2
    if early:
        assert min(send.start_ns for send in sends) <= forward[-1].start_ns
    else:
        assert len(forward) == 1
        assert min(send.start_ns for send in sends) >= forward[0].end_ns
