"""Uploads in any order of adding, stepping, dropping and losing: what a step finds at the workers is its batch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from onebox.engine.compile.compiler import CompiledStep
from onebox.engine.data.batch_transfer import BatchTransfer
from onebox.engine.data.prefetch import AHEAD_STEPS, BatchPrefetcher, UploadedBatch
from onebox.engine.install.installed_plan import InstalledPlan
from onebox.engine.workload.batch import Batch, as_batch
from onebox.errors import WorkerDied
from onebox.plan import MicroBatch
from onebox.pool import Pool
from onebox.wire import DTYPES, KernelSpec, TapeSpec, from_frame
from onebox.wire.protocol.eager import Replay
from onebox.wire.protocol.instructions import Free
from onebox.wire.protocol.requests import Define, Put

SAMPLES = 12
DATA = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1))


class Workers:
    """A pool whose workers keep buffers and run kernels, as far as uploads need it."""

    def __init__(self, count: int) -> None:
        self.devices = [SimpleNamespace(kind="cpu", codecs=()) for _ in range(count)]
        self.client_bandwidth = SimpleNamespace(bps=lambda workers: dict.fromkeys(workers, float("inf")))
        self.gone: frozenset[int] = frozenset()
        self.sent_bytes = (0,) * count
        self.buffers: list[dict[int, Tensor]] = [{} for _ in range(count)]
        self.kernels: list[dict[int, KernelSpec]] = [{} for _ in range(count)]
        self.fails_in = -1
        self._numbers = 0

    def new_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def post(self, worker: int, instructions: Sequence[Any], frames: Sequence[Any] = ()) -> Future[Any]:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise WorkerDied("it is gone")
        left = iter(frames)
        buffers, kernels = self.buffers[worker], self.kernels[worker]
        for instruction in instructions:
            match instruction:
                case Put():
                    for number, spec in zip(instruction.buffers, instruction.specs, strict=True):
                        buffers[number] = from_frame(spec, next(left))
                case Free():
                    for number in instruction.buffers:
                        buffers.pop(number, None)
                    for number in instruction.definitions:
                        kernels.pop(number, None)
                case Define():
                    what = instruction.what
                    if isinstance(what, TapeSpec):  # of one call
                        what = kernels[what.calls[0]]
                    assert isinstance(what, KernelSpec)
                    kernels[instruction.number] = what
                case Replay():
                    numbers = (*instruction.inputs, *instruction.outputs)
                    self._operate(kernels[instruction.tape], buffers, numbers)
        assert next(left, None) is None
        return Future()

    def _operate(self, kernel: KernelSpec, buffers: dict[int, Tensor], numbers: Sequence[int]) -> None:
        match kernel.name:
            case "aten.empty.memory_format":
                (out,) = kernel.outs
                assert out is not None
                buffers[numbers[0]] = torch.full(out.shape, torch.nan, dtype=DTYPES[out.dtype])
            case "aten.index_select.default":
                buffers[numbers[2]] = buffers[numbers[0]].index_select(0, buffers[numbers[1]])
            case "aten.index_copy_.default":
                buffers[numbers[0]].index_copy_(0, buffers[numbers[1]], buffers[numbers[2]])


class Steps:
    """Uploads of two workers: the first reads both tensors of all samples but the last two, the second the rest."""

    def __init__(self, spare: int, ahead: int, cache: int) -> None:
        self.pool = Workers(2)
        self.uploads = BatchPrefetcher(cast(Pool, self.pool), ahead, cache)
        self.spare, self.ahead = spare, ahead
        self.waiting: list[tuple[Batch, UploadedBatch]] = []
        self.ready()

    def ready(self) -> None:
        """Get ready, at first or anew."""
        self._compiled: dict[int, CompiledStep] = {}
        ready: Any = SimpleNamespace(
            known=self.compiled,
            plan=SimpleNamespace(devices=(0, 1)),
            spare_bytes=dict.fromkeys((0, 1), self.spare),
        )
        self.uploads.use(cast(InstalledPlan, ready))

    def compiled(self, batch: Batch) -> CompiledStep:
        """Return the routines for a batch."""
        if batch.size not in self._compiled:
            first = batch.size - 2
            parts = (
                MicroBatch(index=0, start=0, size=first),
                MicroBatch(index=1, start=first, size=2),
            )
            routines: Any = {worker: SimpleNamespace(leaves=((worker, 0), (worker, 1)), number=7) for worker in (0, 1)}
            self._compiled[batch.size] = CompiledStep(micro_batches=parts, routines=routines)
        return self._compiled[batch.size]

    def add(self, samples: list[int]) -> None:
        """Upload a batch."""
        own = torch.tensor(samples)
        batch = as_batch(DATA[own], own % 3, own).kept()
        self.waiting.append((batch, self.uploads.add(batch)))
        self.check()

    def step(self) -> None:
        """Step the batch that has waited longest; one that is not uploaded where there is none."""
        if not self.waiting:
            return
        batch, uploaded = self.waiting.pop(0)
        parcel = self.uploads.claim(uploaded)
        compiled = self.compiled(batch)
        with self.uploads.bringing(batch, compiled, parcel) as parts:
            for worker, part in parts.items():
                self.pool.post(worker, part.instructions, part.frames)
                cut = compiled.micro_batches[worker]
                for number, leaf in zip(part.bindings, batch.leaves, strict=True):
                    found = self.pool.buffers[worker].pop(number)  # the step frees it
                    assert torch.equal(found, leaf[cut.start : cut.start + cut.size])
        self.check()

    def check(self) -> None:
        """Require that what lies ahead is within its bounds."""
        for worker in (0, 1):
            held = self.uploads.cached_bytes(worker)
            lies = sum(tensor.nbytes for tensor in self.pool.buffers[worker].values())
            counted = sum(parcel.needs[worker] for parcel in self.sent)
            assert lies <= counted + held <= max(self.spare, held)
            assert counted <= self.ahead
        assert len(self.sent) <= AHEAD_STEPS

    @property
    def sent(self) -> list[BatchTransfer]:
        """What lies ahead."""
        return [uploaded.parcel for _, uploaded in self.waiting if uploaded.parcel.sent]


BATCHES = st.lists(st.integers(0, SAMPLES - 1), min_size=4, max_size=6)
ACTIONS = st.one_of(BATCHES, st.sampled_from(["step", "drop", "anew", "fail", "less", "aside"]))


@given(
    actions=st.lists(ACTIONS, min_size=5, max_size=30),
    spare=st.sampled_from([150, 400, 1000, 4000]),
    ahead=st.sampled_from([0, 150, 4000]),
    cache=st.sampled_from([0, 60, 150, 4000]),
)
def test_a_step_finds_its_batch_whatever_came_before(actions: list[Any], spare: int, ahead: int, cache: int) -> None:
    steps = Steps(spare, ahead, cache)
    for action in actions:
        match action:
            case "step":
                steps.step()
            case "drop" if steps.waiting:
                steps.waiting.pop(len(steps.waiting) // 2)[1].close()
            case "anew":
                steps.uploads.use(None)
                assert steps.pool.buffers == [{}, {}]
                steps.ready()
            case "fail":  # the next message, or one soon after, cannot be sent ahead
                steps.pool.fails_in = 2
                steps.add([1, 2, 3, 4])
                steps.pool.fails_in = -1
            case "less":
                steps.spare = min(steps.spare, 100)
                cast(Any, steps.uploads._ready).spare_bytes.update(dict.fromkeys((0, 1), steps.spare))
                steps.step()
            case "aside":
                with steps.uploads.out_of_the_way():
                    assert not steps.sent
            case list():
                steps.add(action)
    while steps.waiting:
        steps.step()
    steps.uploads.close()
    assert steps.pool.buffers == [{}, {}]
    assert all(not kernels for kernels in steps.pool.kernels) or not cache
