"""``nn.DataParallel`` over devices of different speed gives what the plain module gives on one, in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onebox
from onebox.vgpu.distributed import uneven_forward
from onebox.vgpu.distributed.batch_division import WARM, BatchDivision, Trials
from onebox.vgpu.distributed.uneven_forward import EQUAL_SHARES, batch_size, have_rows
from onebox.vgpu.runtime.context import current_context
from tests.process.vgpu.test_data_parallel import Net, assert_same_state, batches, trained

EXACT = {"rtol": 0.0, "atol": 1e-12}

pytestmark = pytest.mark.usefixtures("pool", "in_float64")


@pytest.fixture(scope="module")
def pool() -> Iterator[onebox.Pool]:
    """Three devices, two of which are slower, at least by what they are called."""
    with onebox.open("cpu,cpu@0.9,cpu@0.8", threads=1) as pool:
        yield pool


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Divide batches from the first step on, as a test says."""

    def found(count: int) -> Trials:
        trials = Trials(count)
        trials.current, trials.settled = request.param, True
        return trials

    monkeypatch.setattr(uneven_forward, "Trials", found)


DIVISIONS = [
    BatchDivision((0, 1, 2), (4.0, 1.0, 2.0)),
    BatchDivision((0, 2), (1.0, 5.0)),
    BatchDivision((1, 2), (2.0, 1.0)),
    BatchDivision((0,)),
    BatchDivision((2,)),
]


@pytest.mark.feature("Virtual devices: Train with nn.DataParallel on devices of different speed")
@pytest.mark.parametrize("divided", DIVISIONS, indirect=True)
def test_training_is_that_of_one_device(divided: None) -> None:
    """Also where the device that has the model is left out, and where there are fewer samples than devices."""
    data = batches([12, 10, 5, 2, 1])
    plain = Net()
    parallel = nn.DataParallel(copy.deepcopy(plain).to("vgpu"))
    assert trained(parallel, data, "vgpu") == pytest.approx(trained(plain, data, "cpu"), rel=1e-12)
    assert_same_state(plain, parallel.module)


@pytest.mark.parametrize("divided", DIVISIONS, indirect=True)
def test_each_device_normalises_its_share(divided: None, request: pytest.FixtureRequest) -> None:
    """The statistics of the first one stay in the module, wherever it was."""
    division: BatchDivision = request.node.callspec.params["divided"]
    plain = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    parallel = nn.DataParallel(copy.deepcopy(plain).to("vgpu"))
    x = torch.randn(15, 4)
    chunks = x.split(list(division.chunks(15, 2).values()))
    first = plain(chunks[0])
    expected = torch.cat([first, *(copy.deepcopy(plain)(chunk) for chunk in chunks[1:])])
    torch.testing.assert_close(parallel(x).cpu(), expected, **EXACT)
    assert_same_state(plain, parallel.module)


@pytest.mark.parametrize("divided", [BatchDivision((0,))], indirect=True)
def test_what_the_device_of_the_model_computes_alone_is_not_copied(divided: None) -> None:
    net, x = Net().to("vgpu"), torch.randn(12, 3, 6, 6)
    for output_device, copied in ((None, False), (1, True)):
        made = nn.DataParallel(net, output_device=output_device)(x)
        assert ("Gather" in str(made.grad_fn)) is copied


class Pieces(nn.Module):
    """Takes tensors of several lengths in containers, and returns such."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: dict[str, Tensor], *, words: list[Tensor]) -> dict[str, Any]:
        return {"rows": self.layer(x["rows"]), "words": (self.layer(words[0]), None), "at": x["rows"].sum(1)}


@pytest.mark.parametrize("divided", DIVISIONS[:3], indirect=True)
def test_outputs_are_gathered_in_order(divided: None) -> None:
    plain = Pieces()
    parallel = nn.DataParallel(copy.deepcopy(plain).to("vgpu"), output_device=1)
    x, words = {"rows": torch.randn(7, 3, requires_grad=True)}, [torch.randn(21, 3)]
    on_device = {"rows": x["rows"].detach().to("vgpu").requires_grad_()}
    result, expected = parallel(on_device, words=words), plain(x, words=words)
    assert result["words"][1] is None
    pairs = [(result["rows"], expected["rows"]), (result["words"][0], expected["words"][0])]
    for value, known in [*pairs, (result["at"], expected["at"])]:
        assert value.device == torch.device("vgpu", 1)
        torch.testing.assert_close(value.cpu(), known, **EXACT)
    (grad,) = torch.autograd.grad(result["rows"].square().sum() + result["words"][0].sum(), on_device["rows"])
    (known,) = torch.autograd.grad(expected["rows"].square().sum(), x["rows"])
    torch.testing.assert_close(grad.cpu(), known, **EXACT)


class MeanLoss(nn.Module):
    """Returns its loss, as models for nn.DataParallel often do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean().view(1)


@pytest.mark.parametrize("divided", [DIVISIONS[0], DIVISIONS[2]], indirect=True)
def test_a_loss_of_each_device_keeps_equal_chunks(divided: None, capfd: pytest.CaptureFixture[str]) -> None:
    plain = MeanLoss()
    parallel = nn.DataParallel(copy.deepcopy(plain).to("vgpu"))
    x = torch.randn(9, 3)
    for _ in range(2):
        expected = torch.stack([plain(chunk) for chunk in x.chunk(3)]).mean()
        torch.testing.assert_close(parallel(x).mean().cpu(), expected, **EXACT)
    assert capfd.readouterr().err.count("onebox: nn.DataParallel keeps equal chunks") == 1


@pytest.mark.parametrize("divided", DIVISIONS[:1], indirect=True)
def test_equal_shares_are_kept_on_request(divided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = nn.DataParallel(Sizes().to("vgpu"))
    assert sizes(torch.randn(7, 2)).tolist() == [4, 4, 4, 4, 1, 2, 2]
    monkeypatch.setenv(EQUAL_SHARES, "1")
    assert sizes(torch.randn(7, 2)).tolist() == [3, 3, 3, 3, 3, 3, 1]


class Sizes(nn.Module):
    """Returns the size of its chunk in each row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.full((len(x),), float(len(x)), device=x.device)


def test_a_subclass_with_a_scatter_of_its_own_keeps_it() -> None:
    class Own(nn.DataParallel[nn.Module]):
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            return super().scatter(inputs, kwargs, device_ids)

    assert Own(Sizes().to("vgpu"))(torch.randn(7, 2)).tolist() == [3, 3, 3, 3, 3, 3, 1]


def test_the_search_waits_for_nothing_and_leaves_the_numbers(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The devices are as fast as measurements are said to be; the script reads a loss in each step."""
    searches: list[Trials] = []

    class Injected(Trials):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            searches.append(self)

        def note(self, division: BatchDivision, seconds: float, speeds: dict[int, float]) -> None:
            assert seconds > 0
            assert min(speeds.values()) > 0
            known = {device: (4.0, 1.0, 0.05)[device] for device in speeds}
            assert list(speeds) == list(division.chunks(12))
            chunks = division.chunks(12).items()
            super().note(division, max(size / known[device] for device, size in chunks), known)

    monkeypatch.setattr(uneven_forward, "Trials", Injected)
    plain = Net()
    parallel = nn.DataParallel(copy.deepcopy(plain).to("vgpu"))
    ((x, y),) = batches([12])
    both = [
        (model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), y.to(place))
        for model, place in ((parallel, "vgpu"), (plain, "cpu"))
    ]
    waits = list[tuple[BatchDivision, int]]()
    while not (searches and searches[0].settled):
        for model, optimizer, expected in both:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), expected)
            loss.backward()
            optimizer.step()
            loss.item()
        waits.append((searches[0].current, sum(queue.channel.waits for queue in current_context().queues)))
    assert len(searches) == 1
    assert searches[0].current == BatchDivision((0, 1), (4.0, 1.0))
    assert_same_state(plain, parallel.module)
    assert len({division for division, _ in waits}) == 4
    for at in range(WARM + 1, len(waits)):
        if len({division for division, _ in waits[at - WARM - 1 : at + 1]}) == 1:
            assert waits[at][1] - waits[at - 1][1] == 1, "that of loss.item()"
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("onebox: nn.DataParallel")]
    assert len(said) == 1
    assert "vgpu:0 80 %, vgpu:1 20 %; it leaves out vgpu:2" in said[0]


def test_what_has_rows() -> None:
    x = torch.zeros(6, 2)
    assert batch_size(((x, [torch.zeros(12)]), {"scale": 2.0}), 0) == 6
    assert batch_size(((x, torch.zeros(())), {}), 0) == batch_size(((x, torch.zeros(4)), {}), 0) == 0
    assert batch_size((x,), 1) == batch_size((x,), -1) == 2
    assert batch_size((), 0) == 0
    assert have_rows([(x, None), (x[:2], None)], [3, 1], 0)
    assert not have_rows([x, x], [3, 1], 0)
    assert not have_rows([torch.zeros(1), torch.zeros(1)], [3, 2], 0)
    assert not have_rows([torch.zeros(())], [1], 0)
