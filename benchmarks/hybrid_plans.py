"""The plans that ``hybrid.py`` compares: what the planner chooses, and policies that need no planner.

Device 0 is the one whose memory is short, device 1 the CPU beside it. All plans have the same micro-batches, but for
choices that may have smaller ones, so that all runs have the same losses.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from hybrid_models import Workload, sgd
from torch import nn

import onebox
from onebox.engine.memory.forecast import TrainingJob
from onebox.engine.workload.batch import as_batch
from onebox.engine.workload.captures import Captures, CaptureSpec
from onebox.errors import DeviceMemoryError, PlanError
from onebox.plan import Plan, Stage
from onebox.plan.model.stage import ActivationPolicy
from onebox.pool import DeviceInfo

DEVICE, CPU = 0, 1
LOSS = nn.functional.cross_entropy


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A plan that was run on a device of limited memory.

    Args:
        trains: Whether it got through.
        predicted_bytes: The peak of the device as it was predicted.
        measured_bytes: And as its worker counted it; 0 if it did not get through.
    """

    trains: bool
    predicted_bytes: int
    measured_bytes: int


class Bench:
    """A model with its batch, its captures, and the devices that it is planned for.

    Args:
        case: What is trained.
        device: The device whose memory is short: ``cpu`` or ``cuda:0``.
        data: The folder of the pictures.
    """

    def __init__(self, case: Workload, device: str, data: Path) -> None:
        self.case = case
        self.device = device
        self.data = case.data(data)
        model = case.model()
        trained = frozenset(f"model.{name}" for name, _ in model.named_parameters())
        recipe = CaptureSpec(
            model=model,
            loss=LOSS,
            metrics={},
            precision="fp32",
            device_type=device.partition(":")[0],
            trained=trained,
        )
        self.captures = Captures(recipe)
        self.segments = self.captures.segments(as_batch(*self.data), case.micro_batch)
        blocks = itertools.groupby(self.segments, key=lambda name: name.split(".")[1])
        self.blocks = [tuple(names) for _, names in blocks]

    def pool(self, budget_bytes: int | None = None, *, alone: bool = False) -> onebox.Pool:
        """Open a pool of the device and the CPU beside it, one thread each.

        Args:
            budget_bytes: The memory of the device; no limit when ``None``.
            alone: Whether to leave out the CPU.
        """
        spec = self.device if alone else f"{self.device},cpu"
        return onebox.open(spec, threads=1, memory=None if budget_bytes is None else {DEVICE: budget_bytes})

    def trainer(self, pool: onebox.Pool, plan: Plan) -> onebox.Trainer:
        """Return a trainer: one step under way at a time, so that no other batch lies on the device."""
        model = self.case.model()
        found = onebox.Trainer(
            model, LOSS, sgd(model), pool=pool, plan=plan, engine=onebox.Engine(in_flight=1, trace=False)
        )
        found.share_captures(self.captures)
        return found

    def predicted(self, plan: Plan, devices: Sequence[DeviceInfo]) -> int:
        """Return the predicted peak of the device, in bytes."""
        optimizer, batch = sgd(self.captures.recipe.model), as_batch(*self.data)
        job = TrainingJob(captures=self.captures, optimizer=optimizer, batch=batch, devices=devices)
        return job.peaks(plan)[DEVICE]

    # ---- policies

    def plain(self) -> Plan:
        """Keep all: one stage."""
        return Plan.data_parallel([DEVICE], [1.0], micro_batch=self.case.micro_batch)

    def all_recomputed(self) -> Plan:
        """Recompute each block of the model, as the rival does."""
        return self._each(self.blocks, "recompute")

    def all_offloaded(self) -> Plan:
        """Offload each segment, so that only what the next one needs comes back early."""
        return self._each([(name,) for name in self.segments], "offload")

    def all_swapped(self) -> Plan:
        """Swap each segment: nothing of it is on the device between its forward and its backward."""
        return self._each([(name,) for name in self.segments], "swap")

    def _each(self, parts: Sequence[tuple[str, ...]], policy: ActivationPolicy) -> Plan:
        stages = (Stage(segments=names, replicas=((DEVICE,),), shares=(1.0,), policy=policy) for names in parts)
        return Plan(stages=tuple(stages), micro_batch=self.case.micro_batch)

    def first_on_cpu(self, count: int) -> Plan:
        """Compute the first so many segments on the CPU, and keep the others."""
        parts = ((CPU, self.segments[:count]), (DEVICE, self.segments[count:]))
        stages = (Stage(segments=names, replicas=((device,),), shares=(1.0,)) for device, names in parts)
        return Plan(stages=tuple(stages), micro_batch=self.case.micro_batch)

    def fewest_on_cpu(self, budget_bytes: int, devices: Sequence[DeviceInfo]) -> tuple[int, Plan] | None:
        """Return the fewest first segments that have to be on the CPU for the others to fit, and the plan."""
        counts = range(1, len(self.segments))
        place = bisect_left(
            counts, True, key=lambda count: self.predicted(self.first_on_cpu(count), devices) <= budget_bytes
        )
        return (counts[place], self.first_on_cpu(counts[place])) if place < len(counts) else None

    @property
    def looks_at_batches(self) -> bool:
        """Whether the model looks at a micro-batch as a whole, so that smaller ones would compute something else."""
        return any(isinstance(module, nn.BatchNorm2d) for module in self.case.model().modules())

    def chosen(self, pool: onebox.Pool, *, smaller: bool) -> Plan | None:
        """Return what the planner chooses for a pool, if it finds anything that fits.

        Args:
            pool: The pool.
            smaller: Whether it may halve micro-batches, up to three times.
        """
        model, size = self.case.model(), self.case.micro_batch
        try:
            planned = onebox.make_plan(
                model,
                LOSS,
                sgd(model),
                *self.data,
                pool=pool,
                micro_batches=[size // part for part in (1, 2, 4, 8) if size >= part] if smaller else [size],
                update=("device", "host"),
                budget_s=self.case.search_s,
            )
        except PlanError:
            return None
        return planned.plan

    def tried(self, pool: onebox.Pool, plan: Plan, steps: int = 3) -> Tried:
        """Run a few steps on a pool whose device has its budget, and that nothing else has used."""
        with self.trainer(pool, plan) as trainer:
            predicted = trainer.predicted_memory(*self.data)[DEVICE] if DEVICE in plan.devices else 0
            try:
                for _ in range(steps):
                    trainer.step(*self.data)
                trainer.wait()
            except DeviceMemoryError:
                return Tried(trains=False, predicted_bytes=predicted, measured_bytes=0)
            return Tried(trains=True, predicted_bytes=predicted, measured_bytes=trainer.memory()[DEVICE].peak_bytes)


def same(one: Plan, other: Plan) -> bool:
    """Tell whether two plans do the same, whatever was predicted of them."""
    bare = [msgspec.structs.replace(plan, predicted=None) for plan in (one, other)]
    return bare[0] == bare[1]


def told(plan: Plan) -> str:
    """Return a plan in a few words: neighbouring stages on the same devices, and their policies."""
    runs = []
    for replicas, group in itertools.groupby(plan.stages, key=lambda stage: stage.replicas):
        stages = list(group)
        policies = Counter(stage.policy for stage in stages)
        several = ", ".join(f"{count} {policy}" for policy, count in policies.items())
        runs.append(f"device {' and '.join(str(replica[0]) for replica in replicas)}: {several}")
    more = ", the optimizer on the host" if plan.update == "host" else ""
    return f"{'; '.join(runs)}; {plan.schedule}, micro-batches of {plan.micro_batch}{more}"
