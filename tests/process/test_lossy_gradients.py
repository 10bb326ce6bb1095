"""Lossy gradients and activations: the result of plain implementations in one process; refused unless allowed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import onebox
from onebox.engine.compile.update import gradients
from onebox.engine.session import TrainingSession
from onebox.errors import DeviceMemoryError, UsageError
from onebox.plan import Plan, Stage
from onebox.plan.evaluate.lossy import with_codecs
from onebox.plan_names import GradientCodec
from onebox.pool import Fault, open_pool, raise_first
from onebox.wire.protocol.instructions import Ask
from onebox.wire.protocol.responses import Digest, WorkerMemory
from tests.kit.hosts import believe_slow, sum_in_hosts_first
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.pools import Pools
from tests.kit.reference import CODE_BLOCK, Outcome, assert_same, call, clipped, coded, sizes_of, state_of, train
from tests.kit.stages import SEED, run, segments, staged
from tests.kit.trainer_arguments import grouped

SIZES = (8, 8, 5, 8, 8)
LOSSY: dict[str, Any] = {"lossy": ("gradients",), "check_every": 1}


# ---- a plain implementation


class PlainSum:
    """The sum of a bucket over holders: what is lost is added in the next step, by each holder and each slice's owner.

    Args:
        codec: The codec.
        holders: Number of holders that encode.
        alone: Whether one of them needs the sum, so that it is not encoded again.
    """

    def __init__(self, codec: GradientCodec, holders: int, *, alone: bool = False) -> None:
        self.codec = codec
        self.alone = alone
        self.lost: list[Tensor | float] = [0.0] * holders
        self.lost_of_sum: Tensor | float = 0.0

    def __call__(self, contributions: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the sums, given the gradients of each holder."""
        unit = CODE_BLOCK * (1 if self.alone else len(contributions))
        travelled = []
        for place, own in enumerate(contributions):
            flat = torch.cat([gradient.reshape(-1) for gradient in own])
            wanted = nn.functional.pad(flat, (0, -len(flat) % unit)) + self.lost[place]
            travelled.append(coded(wanted, self.codec))
            self.lost[place] = wanted - travelled[-1]
        total = travelled[0]
        for more in travelled[1:]:
            total = total + more
        if not self.alone:
            wanted = total + self.lost_of_sum
            total = coded(wanted, self.codec)
            self.lost_of_sum = wanted - total
        parts = total[: len(flat)].split([gradient.numel() for gradient in contributions[0]])
        return [part.view_as(gradient) for part, gradient in zip(parts, contributions[0], strict=True)]


class PlainPowerSGD:
    """PowerSGD as its paper has it (algorithms 1 and 2), for sums in place of means, with bases of full rank.

    Args:
        names: The parameters of the bucket, which determine the first matrices.
        holders: Number of holders.
    """

    RANK = 4

    def __init__(self, names: Sequence[str], holders: int) -> None:
        self.names = names
        self.lost: list[dict[str, Tensor]] = [{} for _ in range(holders)]
        self.second: dict[str, Tensor] = {}
        self.compressed: set[str] = set()

    def __call__(self, contributions: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the sums, given the gradients of each holder."""
        return [
            self.summed(name, list(each))
            for name, each in zip(self.names, zip(*contributions, strict=True), strict=True)
        ]

    def summed(self, name: str, gradients: list[Tensor]) -> Tensor:
        first = gradients[0]
        rows, columns = len(first), first.numel() // len(first)
        if first.dim() < 2 or 2 * self.RANK * (rows + columns) > rows * columns:
            return _exact([[gradient] for gradient in gradients])[0]
        self.compressed.add(name)
        if name not in self.second:
            generator = torch.Generator().manual_seed(crc32(f"model.{name}".encode()))
            self.second[name] = torch.randn(columns, self.RANK, generator=generator, dtype=first.dtype)
        matrices = [
            gradient.reshape(rows, columns) + lost.get(name, 0.0)
            for gradient, lost in zip(gradients, self.lost, strict=True)
        ]
        p = sum((matrix @ self.second[name] for matrix in matrices), torch.zeros(rows, self.RANK, dtype=first.dtype))
        for column in range(self.RANK):
            own, before = p[:, column], p[:, :column]
            left = own - before @ (before.t() @ own)
            if left.norm() <= 1e-13 * own.norm():
                left = torch.cos((column + 1.0) * torch.arange(rows, dtype=first.dtype))
            left = left - before @ (before.t() @ left)
            p[:, column] = left / left.norm()
        locals_ = [matrix.t() @ p for matrix in matrices]
        for matrix, q, lost in zip(matrices, locals_, self.lost, strict=True):
            lost[name] = matrix - p @ q.t()
        self.second[name] = sum(locals_[1:], locals_[0])
        return (p @ self.second[name].t()).view_as(first)


def plain(
    name: str,
    plan: Plan,
    buckets: Sequence[tuple[int, Sequence[str], Callable[[Sequence[Sequence[Tensor]]], list[Tensor]]]],
    *,
    optimizer: str = "sgd",
    max_norm: float | None = None,
    groups: Sequence[Sequence[int]] | None = None,
) -> Outcome:
    """Train a case in this process with lossy sums.

    Args:
        name: The case.
        plan: Its micro-batches and routes are used.
        buckets: For each bucket the stage, the parameters in their order, and its sum.
        optimizer: Of :data:`OPTIMIZERS`.
        max_norm: For clipping.
        groups: Holders that sum exactly first, if any.
    """
    case = CASES[name]
    model = case.model()
    stepping = OPTIMIZERS[optimizer](model)
    parameters = dict(model.named_parameters())
    losses, norms = [], []
    for batch in case.batches(list(SIZES)):
        size = sizes_of(batch)
        routes = plan.routes(size)
        held: dict[tuple[int, str], Tensor] = {}
        loss = 0.0
        for part in plan.micro_batches(size):
            inputs, targets = tree_map(lambda t, p=part: t[p.start : p.start + p.size], batch)
            value = case.loss(call(model, inputs), targets)
            stepping.zero_grad()
            (value * (part.size / size)).backward()
            loss += float(value.detach()) * part.size / size
            for stage, names, _ in buckets:
                (holder,) = routes[stage][part.index]
                for each in names:
                    fresh = parameters[each].grad
                    assert fresh is not None
                    before = held.get((holder, each))
                    held[holder, each] = fresh.clone() if before is None else before + fresh
        for stage, names, summed in buckets:
            holders = [device for (device,) in plan.stages[stage].replicas]
            own = {
                device: [held.get((device, each), torch.zeros_like(parameters[each])) for each in names]
                for device in holders
            }
            parts = groups or [[device] for device in holders]
            for each, total in zip(names, summed([_exact([own[d] for d in part]) for part in parts]), strict=True):
                parameters[each].grad = total.clone()
        losses.append(loss)
        norms.append(clipped(model, max_norm))
        stepping.step()
    return Outcome(losses=losses, norms=norms, tensors=state_of(model))


def _exact(contributions: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(list(each)).sum(0) if len(each) > 1 else each[0] for each in zip(*contributions, strict=True)]


def assert_alike(found: Outcome, expected: Outcome) -> None:
    """Require the same result but for the last bits of the optimizer's arithmetic: a codec rounds 1e10 times as much.

    ``tests/unit/graph/lower/test_codec_programs.py`` compares the codecs themselves bit for bit.
    """
    assert_same(found, expected, tolerance=1e-14)


# ---- plans


def lossy(plan: Plan, codec: GradientCodec) -> Plan:
    return replace(plan, stages=tuple(replace(stage, gradients=codec) for stage in plan.stages))


def replicas(count: int, shares: Sequence[float] | None = None) -> Plan:
    return Plan.data_parallel(range(count), shares or [1.0] * count, micro_batch=3)


def in_order(name: str) -> list[str]:
    """Return the parameters of a chain of layers, in the order in which backward makes their gradients."""
    layers = [*CASES[name].model().named_children()][::-1]
    return [f"{layer}.{own}" for layer, module in layers for own, _ in module.named_parameters()]


MLP = in_order("mlp")


@pytest.mark.feature("Compression: Compress gradients with a codec, if allowed")
@pytest.mark.parametrize("codec", ["bf16", "int8", "e3m0"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_replicas_train_as_the_plain_implementation_does(pools: Pools, count: int, codec: GradientCodec) -> None:
    plan = lossy(replicas(count), codec)
    found = run(pools(count), "mlp", plan, SIZES, optimizer="sgd", **LOSSY)
    assert_alike(found, plain("mlp", plan, [(0, MLP, PlainSum(codec, count))]))


@pytest.mark.parametrize("options", [{}, {"overlap": True}])
def test_each_bucket_keeps_what_it_lost(pools: Pools, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Also where a replica has no micro-batch of a batch, and where exact steps overlap."""
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)
    plan = lossy(replicas(3, [3.0, 2.0, 1.0]), "int8")
    found = run(pools(3), "mlp", plan, SIZES, optimizer="adamw", **options, **LOSSY)
    buckets = [(0, [name], PlainSum("int8", 3)) for name in MLP]
    assert_alike(found, plain("mlp", plan, buckets, optimizer="adamw"))


class Mixed(nn.Module):
    """Float32 layers with one of bfloat16 between them, whose gradients are exchanged as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 1)
        self.middle = nn.Linear(16, 16, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        """Return values [B, 1]."""
        return self.last(self.middle(self.first(x).tanh().bfloat16()).tanh().float())


def test_exact_buckets_between_coded_ones_keep_the_order(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica without a micro-batch has all buckets ready at once, the other one after the other."""
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)

    def losses(codec: GradientCodec) -> list[float]:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(3)
            model = Mixed()
            batches = [(torch.randn(size, 16), torch.randn(size, 1)) for size in (6, 3, 6)]
        arguments = grouped(pool=pools(2), plan=lossy(replicas(2), codec), loss_reduction="mean", **LOSSY)
        with onebox.Trainer(
            model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), **arguments
        ) as trainer:
            return [trainer.step(*batch).item() for batch in batches]

    assert losses("int8") == pytest.approx(losses("none"), rel=0.05)


def test_owners_of_the_optimizers_state_sum_once(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 1)
    plan = replace(lossy(replicas(3), "int8"), optimizer="sharded")
    found = run(pools(3), "mlp", plan, SIZES, optimizer="sgd", clip_grad_norm=0.3, **LOSSY)
    buckets = [(0, [name], PlainSum("int8", 3, alone=True)) for name in MLP]
    assert_same(found, plain("mlp", plan, buckets, max_norm=0.3))


def test_stages_choose_for_themselves(pools: Pools) -> None:
    """The last stage sums exactly, the first as int8."""
    plan = staged("mlp", [(0, 1), (2, 3)])
    plan = replace(plan, stages=(replace(plan.stages[0], gradients="int8"), plan.stages[1]))
    found = run(pools(4), "mlp", plan, SIZES, optimizer="sgd", **LOSSY)
    first = [name for name in MLP if name.split(".")[0] in _layers(plan, 0)]
    last = [name for name in MLP if name not in first]
    assert first and last
    buckets = [(0, first, PlainSum("int8", 2)), (1, last, PlainSum("none", 2))]
    assert_same(found, plain("mlp", plan, buckets))


def test_copies_beside_shards_are_summed_alike(pools: Pools) -> None:
    """Where layers are split, each rank of a replica has a copy of what is not: blocks of codes hold no shards then."""
    case, model, pool = CASES["mlp"], CASES["mlp"].model(), pools(4)
    stage = Stage(segments=segments("mlp"), replicas=((0, 1), (2, 3)), shares=(1.0, 1.0), gradients="int8")
    plan = Plan(stages=(stage,), micro_batch=3)
    with onebox.Trainer(
        model, case.loss, OPTIMIZERS["sgd"](model), pool=pool, plan=plan, lossy=("gradients",)
    ) as trainer:
        for batch in case.batches([8, 8]):
            trainer.step(*batch)
        trainer.wait()
        ask = Ask("digest", (trainer._remote.named.numbers["model.4.weight"],))
        answers = raise_first([pool.post(worker, [ask], answer=True) for worker in range(4)])
    assert len({result.value for answer in answers for result in answer.results if isinstance(result, Digest)}) == 1


def test_an_interrupted_codec_leaves_nothing_behind_and_memory_is_foreseen(pools: Pools) -> None:
    """A trainer's residuals are in its forecast, to the byte, and gone when it is closed."""
    pool = pools(2)
    case = CASES["mlp"]
    before = [memory.used_bytes for memory in _memory(pool)]
    plans = [lossy(replicas(2), "int8"), lossy(replicas(2), "powersgd")]
    pipeline = staged("mlp", [0, 1], micro_batch=4)
    plans += [replace(pipeline, stages=tuple(replace(stage, activations="int8") for stage in pipeline.stages))]
    for plan in (*plans, replace(lossy(replicas(2), "bf16"), optimizer="sharded")):
        model = case.model()
        with onebox.Trainer(
            model,
            case.loss,
            OPTIMIZERS["adamw"](model),
            pool=pool,
            plan=plan,
            lossy=("gradients", "activations"),
            engine=onebox.Engine(in_flight=1),
        ) as trainer:
            (batch,) = case.batches([8])
            for _ in range(2):
                trainer.step(*batch).item()
            raise_first([pool.post(worker, [Ask("peak")], answer=True) for worker in range(2)])
            trainer.step(*batch).item()
            peaks = {number: memory.peak_bytes for number, memory in enumerate(trainer.memory())}
            assert trainer.predicted_memory(*batch) == peaks
            curves = trainer.predicted_curves(*batch)
            assert {device: curve.peak.peak_bytes for device, curve in curves.items()} == peaks
        assert [memory.used_bytes for memory in _memory(pool)] == before


def test_a_step_that_does_not_fit_with_its_codec_is_refused(pools: Pools) -> None:
    model = CASES["mlp"].model()
    plan = replace(lossy(replicas(2), "int8"), memory_bytes=(9000, 9000))
    arguments: dict[str, Any] = {"pool": pools(2), "plan": plan, "lossy": ("gradients",)}
    with onebox.Trainer(model, CASES["mlp"].loss, OPTIMIZERS["sgd"](model), **arguments) as trainer:
        (batch,) = CASES["mlp"].batches([8])
        with pytest.raises(DeviceMemoryError, match=r"would fail in decode: .* the quota is 9000 bytes"):
            trainer.step(*batch)


def _memory(pool: onebox.Pool) -> list[WorkerMemory]:
    answers = raise_first([pool.post(worker, [Ask("memory")], answer=True) for worker in range(len(pool))])
    return [result for answer in answers for result in answer.results if isinstance(result, WorkerMemory)]


@pytest.mark.parametrize(("codec", "sharded"), [("int8", False), ("int8", True), ("powersgd", False)])
def test_a_resumed_run_goes_on_with_what_was_lost(
    pools: Pools, tmp_path: Path, codec: GradientCodec, sharded: bool
) -> None:
    """With the same bits, also if it was saved again before its first step; and from zero with another plan."""
    case, pool = CASES["mlp"], pools(3)
    plan = lossy(replicas(3), codec)
    plan = replace(plan, optimizer="sharded") if sharded else plan
    straight = run(pool, "mlp", plan, SIZES, optimizer="sgd", **LOSSY)
    batches = case.batches(list(SIZES))

    def resumed(path: Path, **options: Any) -> onebox.Trainer:
        model = case.model()
        return onebox.Trainer.resume(path, model, case.loss, OPTIMIZERS["sgd"](model), pool=pool, **options)

    model = case.model()
    first = onebox.Trainer(
        model, case.loss, OPTIMIZERS["sgd"](model), pool=pool, plan=plan, seed=SEED, lossy=["gradients"]
    )
    with first:
        for batch in batches[:3]:
            first.step(*batch)
        first.save(tmp_path / "one")
    with resumed(tmp_path / "one") as second:
        second.save(tmp_path / "two")
    with resumed(tmp_path / "two") as third:
        assert third.lossy == ("gradients",)
        for batch in batches[3:]:
            third.step(*batch)
        found = third.tensors()
    for name, tensor in straight.tensors.items():
        assert torch.equal(found[f"model.{name}"], tensor), name
    with resumed(tmp_path / "two", plan=lossy(replicas(2), "int8")) as other:
        other.step(*batches[3]).item()


def test_a_plan_that_is_prepared_leaves_what_was_lost_alone(pools: Pools, tmp_path: Path) -> None:
    """Also in a save meanwhile, and if it is dropped; its own begins when it takes over."""
    case, pool, batches = CASES["mlp"], pools(3), CASES["mlp"].batches([8] * 6)
    plan, fewer = lossy(replicas(3), "int8"), lossy(replicas(2), "int8")

    def trained(*, prepares: bool) -> list[dict[str, Tensor]]:
        model, found = case.model(), []
        arguments = grouped(pool=pool, plan=plan, seed=SEED, **LOSSY)
        with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), **arguments) as trainer:
            run, used_bytes = trainer._run, list[int]()
            assert isinstance(run, TrainingSession)
            for step, batch in enumerate(batches):
                prepared = run.prepare(fewer) if prepares and step in (2, 4) else None
                if step == 4:
                    run.adopt(fewer, prepared)
                trainer.step(*batch).item()
                if step == 2:
                    trainer.save(tmp_path / str(prepares))
                used_bytes.append(sum(memory.used_bytes for memory in trainer.memory()))
                found.append(trainer.tensors())
            size_bytes = sum(parameter.nbytes for parameter in model.parameters())
            assert used_bytes[2] - used_bytes[1] < size_bytes, "a plan that may never run has no residuals"
        model = case.model()
        saved = tmp_path / str(prepares)
        with onebox.Trainer.resume(saved, model, case.loss, OPTIMIZERS["sgd"](model), pool=pool) as trainer:
            trainer.step(*batches[3]).item()
            found.append(trainer.tensors())
        return found

    wanted, found = trained(prepares=False), trained(prepares=True)
    for one, other in zip(found, wanted, strict=True):
        assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
    assert all(torch.equal(found[-1][name], tensor) for name, tensor in found[3].items()), "resumed"


# ---- activations


class Coded(torch.autograd.Function):
    """A value that is encoded forward, and its gradient backward, each with a codec of its own."""

    @staticmethod
    def forward(context: Any, value: Tensor, forth: GradientCodec, back: GradientCodec) -> Tensor:
        context.back = back
        return travelled(value, forth)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return travelled(gradient, context.back), None, None


def travelled(value: Tensor, codec: GradientCodec) -> Tensor:
    """Return a value as it arrives: one that becomes no smaller is sent as it is."""
    blocks = -(-value.numel() // CODE_BLOCK)
    if codec == "none" or blocks * CODE_BLOCK * (2 if codec == "bf16" else 1 + 4 / CODE_BLOCK) >= value.nbytes:
        return value
    flat = nn.functional.pad(value.reshape(-1), (0, blocks * CODE_BLOCK - value.numel()))
    return coded(flat, codec)[: value.numel()].view_as(value)


@pytest.mark.feature("Compression: Compress activations between stages")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(("forth", "back"), [("int8", "int8"), ("bf16", "none"), ("none", "int8")])
def test_values_between_stages_travel_in_their_codecs(
    pools: Pools, forth: GradientCodec, back: GradientCodec, schedule: str
) -> None:
    """What the first stage sends forward, and what the last one sends back; evaluations stay exact."""
    case = CASES["mlp"]
    plan = staged("mlp", [0, 1], micro_batch=8, schedule=schedule)
    stages = [replace(stage, activations=codec) for stage, codec in zip(plan.stages, (forth, back), strict=True)]
    plan = replace(plan, stages=tuple(stages))
    assert plan.stages[0].segments == ("model.0",)  # with the activation after it
    sizes, model = (16, 16, 11), case.model()

    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            for place, layer in enumerate(model.children()):
                x = layer(Coded.apply(x, forth, back) if place == 2 else x)
            return x

    other = case.model()
    with onebox.Trainer(
        other, case.loss, OPTIMIZERS["sgd"](other), pool=pools(2), plan=plan, lossy=("activations",)
    ) as trainer:
        (batch,) = case.batches([16])
        exact = case.loss(model(batch[0]), batch[1]).item()
        assert trainer.evaluate([batch]).loss == pytest.approx(exact, abs=1e-12)
    lossy_run: dict[str, Any] = {"lossy": ("activations",), "check_every": 1}
    found = run(pools(2), "mlp", plan, sizes, optimizer="sgd", **lossy_run)
    expected = train(Cut(), case.loss, OPTIMIZERS["sgd"](model), case.batches(list(sizes)), plan)
    named = {name.removeprefix("model."): tensor for name, tensor in expected.tensors.items()}
    assert_alike(found, Outcome(losses=expected.losses, norms=expected.norms, tensors=named))


# ---- the planner's choice


@pytest.mark.feature("Compression: Let the planner choose a codec")
def test_the_planner_measures_encoding_and_chooses_by_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas with 1 MB of gradients: int8 over 1 MB/s, nothing within this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(16, 512), torch.zeros(16, 4)
    plan = Plan.data_parallel((0, 1), (1.0, 1.0), micro_batch=8)
    for bandwidth_bps, expected in ((None, ()), (1e6, ("int8",))):
        with onebox.open("cpu*2", threads=1) as pool:
            if bandwidth_bps:
                believe_slow(pool, latency_s=1e-4, bandwidth_bps=bandwidth_bps)
            planned = onebox.make_plan(
                model, nn.functional.mse_loss, optimizer, *batch, pool=pool, lossy=("gradients",), budget_s=1.0
            )
            for device in planned.problem.devices:
                assert set(device.coding_bps) == {"bf16", "int8"} and min(device.coding_bps.values()) > 1e6
            chosen = with_codecs(planned.problem, plan, "gradients")
            assert chosen.codecs == expected
            with onebox.Trainer(
                model, nn.functional.mse_loss, optimizer, pool=pool, plan=chosen, lossy=("gradients",)
            ) as trainer:
                assert trainer.step(*batch).item() >= 0


# ---- a loss


def test_a_recovered_run_goes_on_in_its_codec() -> None:
    """What had been lost begins at zero: the result is near that of an undisturbed run."""
    case, model = CASES["mlp"], CASES["mlp"].model()
    plan = lossy(replicas(2), "int8")
    options: dict[str, Any] = {"plan": plan, "seed": SEED, "lossy": ("gradients",)}
    with (
        open_pool("cpu*2", threads=1, faults={1: (Fault("kill", "optimizerstep", 4),)}) as pool,
        onebox.Trainer(
            model,
            case.loss,
            OPTIMIZERS["sgd"](model),
            pool=pool,
            recovery=onebox.Recovery(snapshot_every=2),
            **options,
        ) as trainer,
    ):
        losses = [float(trainer.step(*batch)) for batch in case.batches(list(SIZES))]
        assert [story.gone for story in trainer.recoveries] == [(1,)] or len(trainer.recoveries) == 1
        assert trainer.plan is not None and trainer.plan.codecs == ("int8",)
    undisturbed = plain("mlp", plan, [(0, MLP, PlainSum("int8", 2))])
    assert losses[:3] == pytest.approx(undisturbed.losses[:3], abs=1e-12)
    assert losses == pytest.approx(undisturbed.losses, abs=1e-2)


# ---- refusals


@pytest.mark.feature("Compression: Compress gradients with a codec, if allowed")
def test_a_plan_with_a_codec_needs_leave(pools: Pools) -> None:
    model = CASES["mlp"].model()
    arguments: dict[str, Any] = {"pool": pools(2), "plan": lossy(replicas(2), "int8")}
    with pytest.raises(UsageError, match=r"the plan sends gradients as int8.*lossy=\('gradients',\)"):
        onebox.Trainer(model, CASES["mlp"].loss, OPTIMIZERS["sgd"](model), **arguments)
    with pytest.raises(UsageError, match=r"lossy=\('weights',\): allowed are 'gradients', 'activations'"):
        onebox.Trainer(model, CASES["mlp"].loss, OPTIMIZERS["sgd"](model), lossy=("weights",), **arguments)


def test_unknown_codecs_and_odd_places_are_refused() -> None:
    with pytest.raises(
        UsageError, match="gradients='int9' of a stage: allowed are 'none', 'bf16', 'int8', 'e3m0', 'pow"
    ):
        lossy(replicas(2), "int9")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="gradients='int8' of a stage with sync='client'"):
        lossy(replace(replicas(2), sync="client"), "int8")
    with pytest.raises(UsageError, match="gradients='bf16' of a stage with schedule 'async-1f1b'"):
        lossy(staged("mlp", [(0, 1), (2, 3)], schedule="async-1f1b"), "bf16")
    stage = staged("mlp", [0, 1]).stages[0]
    with pytest.raises(UsageError, match="activations='powersgd' of a stage: allowed are 'none', 'bf16', 'int8'"):
        replace(stage, activations="powersgd")
    offloaded = staged("mlp", [0, 1])
    with pytest.raises(UsageError, match="not for plans that offload or swap activations"):
        replace(offloaded, stages=tuple(replace(s, activations="int8", policy="offload") for s in offloaded.stages))


def test_powersgd_among_unlike_devices_is_refused() -> None:
    """Unless one of them computes the result: the others then receive what it has made of it."""
    case = CASES["mlp"]
    (batch,) = case.batches([8])
    with onebox.open("cpu*2", threads=1) as pool:
        first, second = pool.devices
        pool.devices = first, dataclasses.replace(second, name="another processor")
        kinds: list[tuple[GradientCodec, bool]] = [("powersgd", False), ("powersgd", True), ("int8", False)]
        for codec, sharded in kinds:
            plan, model = lossy(replicas(2), codec), case.model()
            plan = replace(plan, optimizer="sharded") if sharded else plan
            with onebox.Trainer(
                model, case.loss, OPTIMIZERS["sgd"](model), pool=pool, plan=plan, lossy=("gradients",)
            ) as trainer:
                if codec == "powersgd" and not sharded:
                    with pytest.raises(UsageError, match=r"among device 0 .* and device 1 .*another processor"):
                        trainer.step(*batch)
                else:
                    trainer.step(*batch).item()


def _layers(plan: Plan, stage: int) -> set[str]:
    return {segment.split(".")[-1] for segment in plan.stages[stage].segments}


@pytest.mark.feature("Compression: Sum with PowerSGD")
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"optimizer": "sharded"}])
def test_powersgd_is_that_of_its_paper(pools: Pools, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """In float64 to 1e-10, for matrices that thin ones are clearly smaller than; other gradients are summed exactly."""
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 256)
    more = dict(options)
    plan = lossy(replicas(3), "powersgd")
    plan = replace(plan, **({"optimizer": more.pop("optimizer")} if "optimizer" in more else {}))
    found = run(pools(3), "mlp", plan, SIZES, optimizer="sgd", **more, **LOSSY)
    summed = PlainPowerSGD(MLP, 3)
    assert_same(found, plain("mlp", plan, [(0, MLP, summed)]))
    assert summed.compressed == {"2.weight"}


def test_hosts_sum_exactly_before_they_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one worker of each host encodes; the others receive its bits."""
    sum_in_hosts_first(monkeypatch, (0, 1), (2, 3))
    plan = lossy(replicas(4), "int8")
    with onebox.open("cpu*4", threads=1) as pool:
        found = run(pool, "mlp", plan, SIZES, optimizer="sgd", **LOSSY)
    buckets = [(0, MLP, PlainSum("int8", 2))]
    assert_alike(found, plain("mlp", plan, buckets, groups=[[0, 1], [2, 3]]))
