"""Islands that are lost and join again, compared with a plain loop that sees the same membership."""

from __future__ import annotations

import copy
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onebox
from onebox.engine.islands.membership import IslandChange
from onebox.errors import PoolError, UsageError
from onebox.plan_names import OuterCodec, StateAt
from onebox.pool import Fault, Pool, open_pool
from onebox.pool.backends.local import LocalSource
from tests.kit.covering import covering_array
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.pools import Pools, untouched
from tests.kit.reference import AGREE, Outcome, assert_same
from tests.kit.stages import SEED, staged, tensors_of
from tests.kit.waiting import until
from tests.process.test_islands import SIZES, SMALL, Reference, islands, stages_of


class Changing(Reference):
    """The reference, whose islands leave and join."""

    def sums(self, fragment: int) -> dict[str, Tensor]:
        own = self.samples[fragment]
        self.sent[fragment] = [0 if island in self.bases else samples for island, samples in enumerate(own)]
        self.samples[fragment] = list(self.sent[fragment])
        found = super().sums(fragment)
        self.samples[fragment] = [all_ - sent for all_, sent in zip(own, self.sent[fragment], strict=True)]
        return found

    def redo(self, fragment: int | None) -> None:
        """Begin void sums that travel anew, of the islands that are left, without what codecs have lost."""
        self.lost.clear()
        if fragment not in self.due:
            return
        for island, samples in enumerate(self.sent[fragment]):
            if self.weights[island] or island in self.bases:
                self.samples[fragment][island] += samples
        self.due[fragment] = self.due[fragment][0], self.sums(fragment)

    def leave(self, island: int | None) -> None:
        self.weights = [0 if each == island else weight for each, weight in enumerate(self.weights)]
        for samples in self.samples:
            samples[island] = 0
        self.lost.clear()

    @torch.no_grad()
    def join(self, island: int | None, weight: float) -> None:
        """Take the global values, and of the first island that is there the optimizer's state and other buffers."""
        first = next(each for each, own in enumerate(self.weights) if own)
        self.weights = [weight if each == island else own for each, own in enumerate(self.weights)]
        self.models[island].load_state_dict(self.models[first].state_dict())
        for optimizer, other in zip(self.optimizers[island], self.optimizers[first], strict=True):
            optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
        self.lost.clear()
        local = dict(self._tensors(self.models[island]))
        for name, value in self._tensors(self.value):
            local[name].copy_(value)

    def apply(self, fragment: int, sums: dict[str, Tensor], keep: float) -> None:
        kept = {island: copy.deepcopy(self.models[island].state_dict()) for island in self.bases}
        super().apply(fragment, sums, keep)
        for island, state in kept.items():
            self.models[island].load_state_dict(state)
        self.applied += 1
        self.change()

    @torch.no_grad()
    def change(self) -> None:
        """Let islands leave, be late or punctual again before the next outer step, and redo void sums."""
        for change in self.now:
            island = change.island
            if change.outer_steps != self.applied:
                continue
            if change.kind == "redone":
                self.redo(change.fragment)
            elif island is None:
                continue
            elif change.kind == "left":
                self.bases.pop(island, None)
                self.leave(island)
            elif change.kind == "late":
                self.lost.clear()
                self.bases[island] = copy.deepcopy(self.value.state_dict())
                self.weights = [0 if each == island else weight for each, weight in enumerate(self.weights)]
            elif change.kind == "punctual":
                self.lost.clear()
                base = self.bases.pop(island)
                self.weights = [self.first[e] if e == island else weight for e, weight in enumerate(self.weights)]
                new = dict(self.value.named_parameters())
                for name, local in self.models[island].named_parameters():
                    local.add_(new[name] - base[name])

    def loss_without(self, island: int) -> float:
        """Return the loss of the last step without the part of an island."""
        others = [part for place, part in self.parts.items() if place != island]
        samples = sum(own for _, own in others)
        return sum(loss * own for loss, own in others) / samples if samples else math.nan

    def follow(self, batches: Sequence[Any], changes: Sequence[IslandChange]) -> Outcome:
        """Train with the changes of membership of a run."""
        self.first, losses = list(self.weights), list[float]()
        self.losses_without: list[dict[int, float]] = []
        """Of each step, the loss that lacks the part of an island."""
        self.sent: dict[int, list[float]] = {}
        self.bases: dict[int, dict[str, Tensor]] = {}
        """The global values that islands had which are late."""
        self.applied = 0
        for number, batch in enumerate(batches, 1):
            losses.append(self.inner(batch)[0])
            self.losses_without.append({island: self.loss_without(island) for island in self.parts})
            self.now = [change for change in changes if change.step == number]
            self.change()
            self.outer_steps()
            for change in self.now:
                if change.kind == "joined":
                    self.join(change.island, self.first[change.island])
        first = next(each for each, own in enumerate(self.weights) if own)
        return Outcome(losses=losses, norms=[], tensors=self.tensors(first))


LAYOUTS: dict[str, tuple[str, int, list[list[int]], Callable[[], Any], list[float]]] = {
    "devices": ("mlp", 3, [[0], [1], [2]], lambda: SMALL, [1, 1, 1]),
    "replicas": ("cnn", 4, [[0, 1], [2, 3]], lambda: SMALL, [1, 1]),
    "pipelines": ("mlp", 4, [[0, 1], [2, 3]], lambda: [staged("mlp", [0, 1]), staged("mlp", [3, 2])], [1, 1]),
    "cut": ("mlp", 4, [[0, 1], [2], [3]], lambda: [staged("mlp", [0, 1]), SMALL, SMALL], [1, 1, 1]),
    "mixed": ("cnn", 4, [[3], [0, 1, 2]], lambda: [SMALL, staged("cnn", [[0, 1], 2])], [1, 3]),
}


def training(pool: Pool, layout: str, outer: onebox.Outer, optimizer: str = "adamw") -> onebox.Trainer:
    """Return a trainer that goes on without islands that are lost."""
    name, _, groups, plan, _ = LAYOUTS[layout]
    case, model = CASES[name], CASES[name].model()
    arguments: dict[str, Any] = {"pool": pool, "seed": SEED, "islands": groups, "plan": plan(), "outer": outer}
    return onebox.Trainer(model, case.loss, OPTIMIZERS[optimizer](model), recovery=onebox.Recovery(), **arguments)


def kill(pool: Pool, worker: int) -> None:
    """End a worker, and wait until that is known."""
    os.kill(pool.process_ids[worker], signal.SIGKILL)
    until(lambda: pool.lost)


def checked(
    trainer: onebox.Trainer,
    layout: str,
    outer: onebox.Outer,
    kills: Mapping[int, int] = {},
    torn: int = 1,
    **settings: Any,
) -> None:
    """Train, killing workers before steps, and compare with the reference, which may have settings."""
    name, _, _, _, weights = LAYOUTS[layout]
    batches, losses = CASES[name].batches(SIZES), []
    for number, batch in enumerate(batches):
        if number in kills:
            trainer.wait()
            kill(trainer.pool, kills[number])
        losses.append(trainer.step(*batch))
    settings = {"optimizer": "adamw", **settings}
    compare(trainer, losses, Changing(name, weights=weights, outer=outer, **settings), batches, torn)


def compare(
    trainer: onebox.Trainer,
    losses: Sequence[onebox.StepLoss],
    reference: Changing,
    batches: Sequence[Any],
    torn: int = 1,
    late: bool = False,
) -> None:
    """Compare with the reference all tensors and losses, with late islands only the first losses. The losses of so many
    steps before an island left may lack its part."""
    tensors = tensors_of(trainer)
    values = [float(loss) for loss in losses]
    expected = reference.follow(batches, trainer.island_changes)
    assert all(math.isfinite(value) for value in values)
    numbers = range(5 if late else len(values))
    allowed = {number: [expected.losses[number]] for number in numbers}
    for change in trainer.island_changes:
        if change.kind == "left" and change.island is not None:
            for number in range(max(change.step - torn, 0), min(change.step, len(numbers))):
                without = reference.losses_without[number]
                allowed[number] += [without[change.island]] if change.island in without else []
    nearest = [min(allowed[n], key=lambda loss, n=n: abs(loss - values[n])) for n in numbers]
    found = Outcome(losses=[values[number] for number in numbers], norms=[], tensors=tensors)
    assert_same(found, Outcome(losses=nearest, norms=[], tensors=expected.tensors))


# ---- without a loss


@pytest.mark.parametrize(("fragments", "overlap"), [(1, 0), (2, 0), (2, 3)])
def test_recovery_changes_no_bit_of_a_run_without_losses(fragments: int, overlap: int, pools: Pools) -> None:
    outer = onebox.Outer(every=4, fragments=fragments, overlap=overlap, shares=[2, 1])
    plain = islands(pools(3), "cnn", [[0, 1], [2]], outer=outer)
    found = islands(pools(3), "cnn", [[0, 1], [2]], outer=outer, recovery=onebox.Recovery())
    assert_same(found, plain, tolerance=0)
    assert untouched(pools(3))


# ---- an island leaves, and joins again


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("victim", [0, 2])
def test_an_island_that_loses_a_worker_joins_again_at_the_next_outer_step(layout: str, victim: int) -> None:
    outer = onebox.Outer(every=4, shares=LAYOUTS[layout][-1])
    with onebox.open(f"cpu*{LAYOUTS[layout][1]}", threads=1) as pool:
        with training(pool, layout, outer) as trainer:
            checked(trainer, layout, outer, {5: victim})
            assert [(change.kind, change.step) for change in trainer.island_changes] == [("left", 6), ("joined", 8)]
        assert untouched(pool)


@pytest.mark.parametrize("instruction", ["reduce", "optimizerstep", "replay", "ask", "call"])
@pytest.mark.parametrize("count", [2, 5])
def test_an_outer_step_that_fails_half_way_is_void_everywhere_and_done_again(instruction: str, count: int) -> None:
    """A worker dies in the middle of something, of an outer step among others. Two steps are in flight when the third,
    which is lost with them, is begun."""
    outer = onebox.Outer(every=2, fragments=2)
    faults = {1: [Fault("kill", instruction, count)]}
    with open_pool("cpu*3", threads=1, faults=faults) as pool, training(pool, "devices", outer) as trainer:
        checked(trainer, "devices", outer, torn=3)
        assert {change.kind for change in trainer.island_changes} >= {"left", "joined"}


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("step", [4, 5, 6, 7])
def test_sums_that_travel_while_an_island_is_lost(step: int, fragments: int) -> None:
    outer = onebox.Outer(every=4, overlap=2, fragments=fragments, shares=[1, 1, 1])
    with onebox.open("cpu*3", threads=1) as pool, training(pool, "devices", outer) as trainer:
        checked(trainer, "devices", outer, {step: 1})
        assert [change.kind for change in trainer.island_changes if change.kind != "redone"] == ["left", "joined"]


def test_sums_of_which_some_never_come_are_begun_again() -> None:
    outer = onebox.Outer(every=4, overlap=2, shares=[1, 1, 1])
    faults = {2: [Fault("kill", "reduce", 1)]}
    with open_pool("cpu*3", threads=1, faults=faults) as pool, training(pool, "devices", outer) as trainer:
        checked(trainer, "devices", outer, torn=6)
        assert [change.kind for change in trainer.island_changes][:2] == ["left", "redone"]


def test_two_islands_are_lost_one_after_the_other() -> None:
    outer = onebox.Outer(every=3)
    with onebox.open("cpu*3", threads=1) as pool, training(pool, "devices", outer) as trainer:
        checked(trainer, "devices", outer, {4: 0, 5: 1, 8: 0})
        assert [change.kind for change in trainer.island_changes].count("left") == 3


SETTINGS = {
    "codec": ["none", "bf16", "int8", "e3m0"],
    "state": ["device", "host"],
    "overlap": ["0", "2"],
    "fragments": ["1", "2"],
    "layout": ["devices", "replicas", "cut"],
    "victim": ["0", "2"],
    "step": ["5", "7"],
}
"""Settings of which every two meet in some run."""


@pytest.mark.parametrize("run", covering_array(SETTINGS, lambda run: False), ids=lambda run: "-".join(run.values()))
def test_codecs_overlap_and_state_on_the_host_with_islands_that_leave_and_join(run: dict[str, str]) -> None:
    """What codecs have lost is dropped with each change of the islands; steps of SGD have the same bits everywhere, so
    that codes are equal."""
    layout = run["layout"]
    outer = onebox.Outer(
        every=4,
        overlap=int(run["overlap"]),
        fragments=int(run["fragments"]),
        compression=run["codec"],  # type: ignore[arg-type]
        state=run["state"],  # type: ignore[arg-type]
        shares=LAYOUTS[layout][-1],
    )
    settings = {"buckets": stages_of(LAYOUTS[layout][3]()[0])} if layout == "cut" else {}
    with onebox.open(f"cpu*{LAYOUTS[layout][1]}", threads=1) as pool:
        with training(pool, layout, outer, "sgd") as trainer:
            checked(trainer, layout, outer, {int(run["step"]): int(run["victim"])}, optimizer="sgd", **settings)
            assert [each.kind for each in trainer.island_changes if each.kind != "redone"] == ["left", "joined"]
        assert untouched(pool)


@pytest.fixture
def unreplaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalSource, "replace", lambda self, worker, client_key: None)


@pytest.mark.usefixtures("unreplaced")
def test_a_run_goes_on_without_an_island_that_is_gone(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, pools: Pools
) -> None:
    """Its state is read, evaluated, saved and resumed without that island, which begins with the global parameters."""
    outer = onebox.Outer(every=4, shares=[1, 2])
    batches, held_out = CASES["cnn"].batches(SIZES), CASES["cnn"].batches([10, 7])
    reference = Changing("cnn", "adamw", [1, 2], outer)
    with onebox.open("cpu*3", threads=1) as pool:
        case, model = CASES["cnn"], CASES["cnn"].model()
        arguments: dict[str, Any] = {"pool": pool, "seed": SEED, "islands": [[0], [1, 2]], "plan": SMALL}
        optimizer = OPTIMIZERS["adamw"](model)
        recovery = onebox.Recovery()
        with (
            caplog.at_level(logging.WARNING, "onebox"),
            onebox.Trainer(model, case.loss, optimizer, outer=outer, recovery=recovery, **arguments) as trainer,
        ):
            losses = [trainer.step(*batch) for batch in batches[:6]]
            trainer.wait()
            kill(pool, 0)
            assert trainer.evaluate(held_out).samples == 17
            losses += [trainer.step(*batch) for batch in batches[6:]]
            compare(trainer, losses, reference, batches)
            evaluation = trainer.evaluate(held_out).loss
            trainer.save(tmp_path)
            assert [(change.kind, change.step) for change in trainer.island_changes] == [("left", 6)]
            lines = [each.getMessage() for each in caplog.records if each.module == "island_losses"]
            assert [str(change) for change in trainer.island_changes] == lines
            assert "island 0 left after step 6" in lines[0] and "WorkerDied" in lines[0]
    model = case.model()
    with onebox.Trainer.resume(tmp_path, model, case.loss, OPTIMIZERS["adamw"](model), pool=pools(3)) as trainer:
        assert trainer.evaluate(held_out).loss == pytest.approx(evaluation, abs=AGREE)
        trainer.step(*batches[0])
        trainer.synchronize()


@pytest.mark.parametrize("replaced", [True, False])
def test_the_state_is_read_right_after_a_loss(
    replaced: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pools: Pools
) -> None:
    """Before another outer step; it is that of the islands that are left."""
    if not replaced:
        monkeypatch.setattr(LocalSource, "replace", lambda self, worker, client_key: None)
    case, batches, outer = CASES["mlp"], CASES["mlp"].batches(SIZES), onebox.Outer(every=4, overlap=2)
    with onebox.open("cpu*3", threads=1) as pool, training(pool, "devices", outer) as trainer:
        for batch in batches[:5]:
            trainer.step(*batch)
        trainer.wait()
        before = trainer.tensors()
        kill(pool, 0)
        after = trainer.tensors()
        trainer.save(tmp_path)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert {change.kind for change in trainer.island_changes} <= {"left", "redone"}
        losses = [trainer.step(*batch).item() for batch in batches[5:]]
        assert all(map(math.isfinite, losses))
    model = case.model()
    with onebox.Trainer.resume(tmp_path, model, case.loss, OPTIMIZERS["adamw"](model), pool=pools(3)) as trainer:
        assert all(torch.equal(tensor, after[name]) for name, tensor in trainer.tensors().items())


@pytest.mark.usefixtures("unreplaced")
def test_the_loss_of_the_last_island_is_one_error() -> None:
    with onebox.open("cpu*3", threads=1) as pool, training(pool, "devices", onebox.Outer(every=4)) as trainer:
        batch = CASES["mlp"].batches([12])[0]
        for worker in range(3):
            trainer.step(*batch).item()
            kill(pool, worker)
            if worker < 2:
                trainer.step(*batch)
        with pytest.raises(PoolError, match="no island is left; resume from a checkpoint, if there is one"):
            trainer.step(*batch)
        with pytest.raises(PoolError, match="no island is left"):
            trainer.wait()


def test_uploads_ahead_and_losses_that_are_read_late() -> None:
    outer = onebox.Outer(every=4)
    batches, losses, uploaded = CASES["mlp"].batches(SIZES), [], []
    with onebox.open("cpu*3", threads=1) as pool, training(pool, "devices", outer) as trainer:
        for number, batch in enumerate(batches):
            if number == 6:
                kill(pool, 2)
            uploaded.append(trainer.upload(*batch))
            if len(uploaded) > 2:
                losses.append(trainer.step(uploaded.pop(0)))
        losses += [trainer.step(each) for each in uploaded]
        assert all(math.isfinite(float(loss)) for loss in losses)
        assert [change.kind for change in trainer.island_changes] == ["left", "joined"]


def test_a_worker_that_hangs_is_an_island_that_leaves() -> None:
    outer = onebox.Outer(every=4)
    with onebox.open("cpu*3", threads=1) as pool, training(pool, "devices", outer) as trainer:
        batches = CASES["mlp"].batches(SIZES)
        losses = [trainer.step(*batch) for batch in batches[:5]]
        trainer.wait()
        os.kill(pool.process_ids[1], signal.SIGSTOP)
        losses += [trainer.step(*batch) for batch in batches[5:]]
        compare(trainer, losses, Changing("mlp", "adamw", [1, 1, 1], outer), batches, torn=4)
        assert "WorkerHung" in trainer.island_changes[0].cause


# ---- islands that are late


def late_run(
    pool: Pool, layout: str, outer: onebox.Outer, victim: int, optimizer: str = "adamw", before: int = 6
) -> list[IslandChange]:
    """Stop a worker after some steps until its island is late, and let it go on; compare with the reference."""
    name, _, _, _, weights = LAYOUTS[layout]
    batches, losses = CASES[name].batches([12] * 400), list[onebox.StepLoss]()
    with training(pool, layout, outer, optimizer) as trainer:

        def step() -> None:
            losses.append(trainer.step(*batches[len(losses)]))

        def happened(kind: str) -> bool:
            return any(change.kind == kind for change in trainer.island_changes)

        for _ in range(before):
            step()
        trainer.wait()
        os.kill(pool.process_ids[victim], signal.SIGSTOP)
        try:
            while not happened("late"):
                step()
            for _ in range(outer.every):
                step()
        finally:
            os.kill(pool.process_ids[victim], signal.SIGCONT)
        while not happened("punctual"):
            step()
            time.sleep(0.02)  # for the steps that the island still has to make
        for _ in range(6):
            step()
        assert not happened("left")
        compare(trainer, losses, Changing(name, optimizer, weights, outer), batches[: len(losses)], late=True)
        return trainer.island_changes


@pytest.mark.feature("Islands: Go on without late islands")
@pytest.mark.parametrize(("layout", "victim"), [("devices", 1), ("replicas", 0), ("pipelines", 2)])
def test_a_late_island_is_not_waited_for_and_its_samples_count_when_it_is_back(layout: str, victim: int) -> None:
    outer = onebox.Outer(every=4, shares=LAYOUTS[layout][-1], quorum=1, grace_s=0.3)
    with onebox.open(f"cpu*{LAYOUTS[layout][1]}", threads=1) as pool:
        late_run(pool, layout, outer, victim)
        assert untouched(pool)


@pytest.mark.parametrize(
    ("compression", "state", "victim"),
    [
        ("none", "device", 2),
        ("e3m0", "host", 0),
        ("int8", "device", 1),
    ],
)
def test_sums_on_their_way_are_begun_again_without_an_island_that_is_late(
    compression: OuterCodec, state: StateAt, victim: int
) -> None:
    """It is stopped between the step after which they begin and the one after which they are due."""
    options: dict[str, Any] = {"compression": compression, "state": state, "quorum": 2, "grace_s": 0.3}
    outer = onebox.Outer(every=4, overlap=2, **options)
    with onebox.open("cpu*3", threads=1) as pool:
        changes = late_run(pool, "devices", outer, victim, "sgd", before=5)
        found = [(change.kind, change.step, change.island, change.fragment) for change in changes[:2]]
        assert found == [("late", 6, victim, None), ("redone", 6, None, 0)]
        assert untouched(pool)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(("fragments", "overlap"), [(2, 0), (1, 2), (2, 3)])
def test_late_islands_with_fragments_and_overlap(fragments: int, overlap: int, victim: int) -> None:
    outer = onebox.Outer(every=4, fragments=fragments, overlap=overlap, quorum=2, grace_s=0.3)
    with onebox.open("cpu*3", threads=1) as pool:
        late_run(pool, "devices", outer, victim)


@pytest.mark.parametrize("overlap", [0, 2])
def test_late_islands_whose_outer_gradients_travel_in_a_codec(overlap: int) -> None:
    outer = onebox.Outer(every=4, overlap=overlap, compression="e3m0", state="host", quorum=2, grace_s=0.3)
    with onebox.open("cpu*3", threads=1) as pool:
        late_run(pool, "devices", outer, 2, "sgd")
        assert untouched(pool)


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_quorum_changes_no_bit_of_a_run_in_which_all_are_punctual(overlap: int, pools: Pools) -> None:
    outer = {"every": 4, "overlap": overlap, "shares": [2, 1]}
    plain = islands(pools(3), "cnn", [[0, 1], [2]], outer=onebox.Outer(**outer))
    quorum = onebox.Outer(**outer, quorum=1, grace_s=60.0)
    found = islands(pools(3), "cnn", [[0, 1], [2]], outer=quorum, recovery=onebox.Recovery())
    assert_same(found, plain, tolerance=0)


@pytest.mark.parametrize(
    ("outer", "recovery", "message"),
    [
        (onebox.Outer(quorum=3), onebox.Recovery(), r"Outer\(quorum=3\): there are 2 islands; allowed are 1 to 2"),
        (onebox.Outer(quorum=1), "auto", "give recovery=onebox.Recovery"),
        (onebox.Outer(quorum=1), None, "give recovery=onebox.Recovery"),
    ],
)
def test_a_quorum_that_cannot_be(outer: onebox.Outer, recovery: Any, message: str, pools: Pools) -> None:
    with pytest.raises(UsageError, match=message):
        islands(pools(2), "mlp", [[0], [1]], outer=outer, recovery=recovery)
