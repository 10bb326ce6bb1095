"""Stages of policy offload, on real workers: the same bits, less memory, and nothing left behind when something
fails."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import onebox
from onebox.engine.compile import offload
from onebox.engine.memory.forecast import TrainingJob
from onebox.engine.memory.simulator import InitialContents, peak_of, peaks_of
from onebox.engine.steps.results import TraceEvent
from onebox.engine.workload.batch import as_batch
from onebox.errors import DeviceMemoryError, OneboxError, OperatorError, WorkerHung
from onebox.plan import ActivationPolicy, Plan, Stage
from onebox.pool import Fault, open_pool
from onebox.report.tables.memory import compare_memory
from onebox.wire.protocol.instructions import Ask
from onebox.wire.protocol.responses import WorkerMemory
from tests.kit.models import FATED, OPTIMIZERS
from tests.kit.pools import Pools, untouched
from tests.kit.reference import Outcome
from tests.kit.stages import SEED
from tests.kit.trainer_arguments import grouped
from tests.process.fated import captures
from tests.process.faults.scripts import Script, gone

STEPS = 2
BATCH = 12
ENDED_S = 30.0


@functools.cache
def plan_for(name: str, devices: Sequence[int], policy: ActivationPolicy, schedule: str = "1f1b") -> Plan:
    """Return a plan of stages of one policy and about as many segments each, micro-batches of 3."""
    names = captures(name).segments(as_batch(*FATED[name].batches([3])[0]), 3)
    count = len(devices)
    bounds = [len(names) * place // count for place in range(count + 1)]
    stages = (
        Stage(segments=names[start:end], replicas=((device,),), shares=(1.0,), policy=policy)
        for device, (start, end) in zip(devices, itertools.pairwise(bounds), strict=True)
    )
    return Plan(stages=tuple(stages), micro_batch=3, schedule=schedule)


def trainer_on(pool: onebox.Pool, name: str, plan: Plan, *, recover: bool = False) -> onebox.Trainer:
    case = FATED[name]
    model = case.model()
    options: dict[str, Any] = {"pool": pool, "plan": plan, "seed": SEED, "recover": recover, "in_flight": 1}
    trainer = onebox.Trainer(model, case.loss, OPTIMIZERS["adamw"](model), **grouped(**options))
    trainer.share_captures(captures(name))
    return trainer


def train(pool: onebox.Pool, name: str, plan: Plan) -> tuple[Outcome, list[int], list[TraceEvent]]:
    """Train a case; return how it went, the peak of each device, and what the last step did.

    Its memory is what was predicted at every instruction.
    """
    batches = FATED[name].batches([BATCH] * STEPS)
    with trainer_on(pool, name, plan) as trainer:
        losses = [float(trainer.step(*batch)) for batch in batches]
        trainer.wait()
        events = [event for event in trainer.events() if event.step == STEPS - 1]
        found = compare_memory(trainer.predicted_curves(*batches[-1]), events, STEPS - 1)
        assert [(one.difference_bytes, one.where) for one in found] == [(0, "")] * len(found)
        outcome = Outcome(losses=losses, norms=[], tensors=trainer.tensors())
    return outcome, [one.peak_bytes.predicted for one in found], events


DEVICES = (0, 1, 0, 1, 0, 1, 0, 1)
RUNS = [
    ("vgg", (0,) * 6, "1f1b"),
    ("unet", DEVICES, "zb-h1"),
]
"""A chain on one device, with dropout; skips, from device to device and back, and several micro-batches in flight."""


@pytest.mark.feature("Memory: Recompute, offload or swap activations")
@pytest.mark.parametrize(("name", "devices", "schedule"), RUNS, ids=lambda value: value if value in FATED else "")
def test_the_same_bits_in_less_memory(pools: Pools, name: str, devices: Sequence[int], schedule: str) -> None:
    pool = pools(2)
    kept, kept_bytes, _ = train(pool, name, plan_for(name, devices, "keep", schedule))
    before = kept_bytes
    for policy in ("offload", "swap"):
        found, found_bytes, events = train(pool, name, plan_for(name, devices, policy, schedule))
        assert found.losses == kept.losses
        assert found.tensors.keys() == kept.tensors.keys()
        assert all(torch.equal(tensor, kept.tensors[key]) for key, tensor in found.tensors.items())
        assert all(a <= b for a, b in zip(found_bytes, before, strict=True))
        assert found_bytes < kept_bytes
        before = found_bytes
        assert_seen(events)
        assert untouched(pool)


def test_gradients_wait_where_the_optimizer_is(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the optimizer on the host they are on the device only while a backward adds to them."""
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)
    pool, found = pools(2), {}
    for policy in ("keep", "swap"):
        plan = replace(plan_for("unet", (0, 0, 0, 0, 1, 1, 0, 0), policy, "zb-h1"), update="host")
        found[policy] = train(pool, "unet", plan)
        assert untouched(pool)
    kept, swapped = found["keep"], found["swap"]
    assert swapped[0].losses == kept[0].losses
    assert all(torch.equal(tensor, kept[0].tensors[key]) for key, tensor in swapped[0].tensors.items())
    parameters = sum(tensor.nbytes for _, tensor in FATED["unet"].model().named_parameters())
    assert sum(kept[1]) - sum(swapped[1]) > parameters, (kept[1], swapped[1], parameters)


def assert_seen(events: Sequence[TraceEvent]) -> None:
    """Require that each copy is seen on its track, for as long as it took, and ends before what waits for it."""
    for worker in {event.worker for event in events}:
        mine = [event for event in events if event.worker == worker]
        kinds = {kind: [e for e in mine if e.name.startswith(kind)] for kind in ("offload ", "evict ", "prefetch ")}
        assert len({frozenset(event.name.split(maxsplit=1)[1] for event in found) for found in kinds.values()}) == 1
        for copied, evicted in zip(kinds["offload "], kinds["evict "], strict=True):
            assert copied.track == "transfer"
            assert copied.name.removeprefix("offload ") == evicted.name.removeprefix("evict ")
            assert copied.start_ns < copied.end_ns <= evicted.end_ns
        assert all(event.track == "transfer" for event in kinds["prefetch "])
        assert all(event.start_ns < event.end_ns for event in kinds["prefetch "])


def chain(policy: ActivationPolicy) -> Plan:
    """Return a plan of one device."""
    return plan_for("vgg", (0,) * 6, policy)


def forecast(pool: onebox.Pool, name: str, plan: Plan) -> dict[int, InitialContents]:
    """Return what each worker will have in its memory, of which nothing is run."""
    case, known = FATED[name], captures(name)
    job = TrainingJob(
        captures=known,
        optimizer=OPTIMIZERS["adamw"](known.recipe.model),
        batch=as_batch(*case.batches([BATCH])[0]),
        devices=pool.devices,
    )
    return job.contents(plan)


def test_a_budget_that_only_the_offloaded_run_fits_into(pools: Pools) -> None:
    batches = FATED["vgg"].batches([BATCH] * STEPS)
    budget = peak_of(forecast(pools(1), "vgg", chain("offload"))[0])
    assert budget < peak_of(forecast(pools(1), "vgg", chain("keep"))[0])
    with open_pool("cpu", threads=1, memory=f"{budget}") as pool:
        with trainer_on(pool, "vgg", chain("keep")) as trainer, pytest.raises(DeviceMemoryError, match="quota"):
            for batch in batches:
                trainer.step(*batch).item()
        with trainer_on(pool, "vgg", chain("offload")) as trainer:
            for batch in batches:
                trainer.step(*batch).item()
            trainer.wait()
            (memory,) = pool.post(0, [Ask("memory")], answer=True).result(30).results
            assert isinstance(memory, WorkerMemory)
            assert memory.peak_bytes == memory.quota_bytes, "not a byte less would do"
            contents = forecast(pool, "vgg", chain("offload"))
            assert memory.host_peak_bytes == peaks_of(contents[0])[1] > 0
        assert untouched(pool)


def test_what_the_host_has_no_memory_for_is_refused() -> None:
    """A worker with a quota may take four times that of its host's memory, and a step that needs more is not begun."""
    batches = FATED["vgg"].batches([BATCH])
    with open_pool("cpu", threads=1, memory="8MiB") as pool:
        own = pool.devices[0]
        assert own.host_bytes == 4 * own.memory_bytes
        assert own.host_free_bytes > own.host_bytes
        pool.devices = (dataclasses.replace(own, host_bytes=1000),)
        for plan in (chain("offload"), replace(chain("keep"), update="host")):
            with trainer_on(pool, "vgg", plan) as trainer:
                with pytest.raises(DeviceMemoryError, match="may take there 1000 bytes; no step was begun"):
                    trainer.step(*batches[0])
                assert untouched(pool)
        with trainer_on(pool, "vgg", chain("recompute")) as trainer:
            assert trainer.step(*batches[0]).item() > 0


def failing(*faults: Fault) -> tuple[OneboxError, bool, list[int]]:
    """Train until a fault; return the error, whether the worker is as at its beginning, and the worker's process."""
    with open_pool("cpu", threads=1, faults={0: list(faults)}) as pool:
        processes = list(pool.process_ids)
        with trainer_on(pool, "vgg", chain("offload")) as trainer, pytest.raises(OneboxError) as caught:
            for batch in FATED["vgg"].batches([BATCH] * STEPS):
                trainer.step(*batch).item()
        empty = untouched(pool)
    return caught.value, empty, processes


@pytest.mark.parametrize(
    ("kind", "instruction", "count"),
    [("error", "moving", 3), ("error", "call", 9), ("memory", "prefetch", 2)],
)
def test_one_error_and_nothing_is_left(kind: str, instruction: str, count: int) -> None:
    """A copy fails; an operator, while values are away; the way back."""
    error, empty, processes = failing(Fault(kind, instruction, count))  # type: ignore[arg-type]
    assert type(error) is {"error": OperatorError, "memory": DeviceMemoryError}[kind]
    assert "injected fault" in str(error)
    assert empty
    assert gone(processes, ENDED_S)


def test_a_copy_that_hangs_is_noticed() -> None:
    error, empty, processes = failing(Fault("hang", "moving", 4))
    assert isinstance(error, WorkerHung)
    assert not empty
    assert gone(processes, ENDED_S)


def test_a_worker_that_is_killed_while_it_copies_is_made_up_for() -> None:
    plan, batches = plan_for("unet", DEVICES, "offload"), FATED["unet"].batches([BATCH] * 3)
    runs = []
    cases: list[dict[int, list[Fault]]] = [{}, {1: [Fault("kill", "moving", 100)]}]
    for faults in cases:
        with open_pool("cpu*2", threads=1, faults=faults) as pool:
            with trainer_on(pool, "unet", plan, recover=True) as trainer:
                for batch in batches:
                    trainer.step(*batch).item()
                runs.append(trainer.tensors())
                assert [one.failure.split(":")[0] for one in trainer.recoveries] == ["WorkerDied"] * len(faults)
            assert untouched(pool)
    assert all(torch.equal(tensor, runs[1][name]) for name, tensor in runs[0].items())


TRAIN = """
from onebox.engine.compile import offload
from tests.process.test_offload import BATCH, FATED, chain, trainer_on as over
offload.LEAST_BYTES = 1
with open_pool("cpu", threads=1) as pool, over(pool, "vgg", chain("offload")) as trainer:
    given = FATED["vgg"].batches([BATCH])[0]
    trainer.step(*given).item()
    ready(pool)
    while True:
        trainer.step(*given)
"""


def test_ctrl_c_while_copies_are_under_way(tmp_path: Path) -> None:
    with Script(tmp_path, TRAIN) as script:
        script.wait_until_ready()
        script.signal(signal.SIGINT, group=True)
        status, _, errors = script.end(ENDED_S)
        assert status == -signal.SIGINT
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert gone(script.workers, 0)
