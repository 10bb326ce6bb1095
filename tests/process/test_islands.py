"""Islands: steps by themselves and outer steps between them, compared with a plain loop over copies of the model."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import onebox
from onebox.engine.state.checkpoint_files import find_save, read
from onebox.engine.state.remote import RemoteState
from onebox.errors import UsageError, WorkerDied
from onebox.plan import Plan, Stage, apportion
from onebox.plan_names import OuterCodec, StateAt
from tests.kit.covering import covering_array
from tests.kit.models import CASES, OPTIMIZERS
from tests.kit.pools import Pools, untouched
from tests.kit.reference import (
    AGREE,
    CODE_BLOCK,
    Cut,
    Outcome,
    assert_same,
    backward,
    clipped,
    coded,
    drawing,
    sizes_of,
    state_of,
)
from tests.kit.stages import SEED, segments, staged, tensors_of

SIZES = [12, 12, 9, 12, 12, 12, 9, 12, 12, 12, 12, 12]
MICRO_BATCH = 3
SMALL = onebox.DataParallel(micro_batch=MICRO_BATCH)


def optimizers_of(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a model: those of :data:`OPTIMIZERS`, or Muon for matrices and AdamW for the rest."""
    if name != "muon":
        return [OPTIMIZERS[name](model)]
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) == kind] for kind in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01, weight_decay=0.0)]


class Reference:
    """DiLoCo (arXiv:2311.08105) in one process: a copy of the model and of its optimizer for each island.

    Args:
        name: The case.
        optimizer: Name of the inner optimizer.
        weights: Share of a batch of each island.
        outer: The outer optimizer.
        cuts: For each island, into micro-batches.
        max_norm: For clipping.
        buckets: Divides the parameters of a fragment into those that travel together between given islands.
        dtype: Of parameters and samples.
    """

    def __init__(
        self,
        name: str,
        optimizer: str,
        weights: Sequence[float],
        outer: onebox.Outer,
        cuts: Sequence[Cut] = (),
        max_norm: float | None = None,
        buckets: Callable[[Sequence[str], Sequence[int]], Sequence[Sequence[str]]] = lambda names, present: [names],
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.dtype = dtype
        self.buckets = buckets
        self.lost: dict[str, list[Tensor | float]] = {}  # by the first parameter of the bucket
        self.case, self.weights, self.outer, self.max_norm = CASES[name], weights, outer, max_norm
        self.value = self.case.model(dtype)
        self.models = [self.case.model(dtype) for _ in weights]
        self.optimizers = [optimizers_of(optimizer, model) for model in self.models]
        self.cuts = cuts or [MICRO_BATCH] * len(weights)
        momentum = outer.momentum
        self.sgd = torch.optim.SGD(self.value.parameters(), lr=outer.lr, momentum=momentum, nesterov=momentum > 0)
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in self._tensors(self.value)))
        self.fragment = {
            name: modules.index(name.rpartition(".")[0]) % outer.fragments for name, _ in self._tensors(self.value)
        }
        self.samples = [[0] * len(weights) for _ in range(outer.fragments)]
        self.steps = 0
        self.due: dict[int, tuple[int, dict[str, Tensor]]] = {}

    @staticmethod
    def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
        """Return what is synchronised: parameters with gradients, and statistics."""
        buffers = [(name, each) for name, each in model.named_buffers() if "running" in name or name == "mean"]
        trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        return [*((name, each) for name, each in trained if not name.startswith("unused")), *buffers]

    def step(self, batch: Any) -> tuple[float, float]:
        """Make a step of each island, and the outer steps that are due."""
        found = self.inner(batch)
        self.outer_steps()
        return found

    def inner(self, batch: Any) -> tuple[float, float]:
        """Make a step of each island; keep the loss and samples of each."""
        loss = norm = 0.0
        self.parts: dict[int, tuple[float, int]] = {}
        size, start = sizes_of(batch), 0
        for island, own in enumerate(apportion(size, list(self.weights))):
            if not own:
                continue
            part = tree_map(lambda t, a=start, b=start + own: t[a:b], batch)
            model, optimizers = self.models[island], self.optimizers[island]
            around = drawing(SEED + island) if self.case.draws else None
            model.zero_grad()
            found = backward(
                model,
                self.case.loss,
                part,
                self.cuts[island],
                lambda index, a=around: a(self.steps, index) if a else None,
            )
            self.parts[island] = found, own
            loss += found * own / size
            norm += clipped(model, self.max_norm) * own / size
            for optimizer in optimizers:
                optimizer.step()
            start += own
            for samples in self.samples:
                samples[island] += own
        self.steps += 1
        return loss, norm

    def outer_steps(self) -> None:
        """Make the outer steps that are due."""
        every, overlap = self.outer.every, self.outer.overlap
        for fragment in [fragment for fragment, (due, _) in self.due.items() if due == self.steps]:
            self.apply(fragment, self.due.pop(fragment)[1], self.outer.keep)
        for fragment in range(self.outer.fragments):
            if (self.steps - fragment * every // self.outer.fragments) % every == 0:
                if overlap:
                    self.due[fragment] = self.steps + overlap, self.sums(fragment)
                else:
                    self.synchronize(fragment)

    def synchronize(self, fragment: int) -> None:
        """Make an outer step."""
        if any(self.samples[fragment]):
            self.apply(fragment, self.sums(fragment), 0.0)

    @torch.no_grad()
    def sums(self, fragment: int) -> dict[str, Tensor]:
        """Return the outer gradients, and the averages of buffers."""
        samples, total = self.samples[fragment], sum(self.samples[fragment])
        self.samples[fragment] = [0] * len(samples)
        own, values = [dict(self._tensors(model)) for model in self.models], dict(self._tensors(self.value))
        weighted: dict[str, list[Tensor]] = {}
        found: dict[str, Tensor] = {}
        for name, value in values.items():
            if self.fragment[name] == fragment:
                trained = isinstance(value, nn.Parameter)
                parts = [value - each[name] if trained else each[name] for each in own]
                weighted[name] = [part * (n / total) for part, n in zip(parts, samples, strict=True)]
                found[name] = sum(weighted[name][1:], weighted[name][0])
        present = [island for island, weight in enumerate(self.weights) if weight]
        if self.outer.compression != "none" and len(present) > 1:
            for names in self.buckets([name for name in found if isinstance(values[name], nn.Parameter)], present):
                found |= self.decoded({name: weighted[name] for name in names}) if names else {}
        return found

    def decoded(self, weighted: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """Return the sums of a bucket whose parts travel in a codec; what is lost is added to the next parts."""
        first, *_ = weighted
        lost = self.lost.setdefault(first, [0.0] * len(self.models))
        total: Tensor | None = None
        for island in range(len(self.models)):
            flat = torch.cat([parts[island].reshape(-1) for parts in weighted.values()])
            wanted = nn.functional.pad(flat, (0, -len(flat) % CODE_BLOCK)) + lost[island]
            arrived = coded(wanted, self.outer.compression)
            lost[island] = wanted - arrived
            total = arrived if total is None else total + arrived
        assert total is not None
        ends = total[: len(flat)].split([parts[0].numel() for parts in weighted.values()])
        return {name: end.view_as(parts[0]) for (name, parts), end in zip(weighted.items(), ends, strict=True)}

    @torch.no_grad()
    def apply(self, fragment: int, sums: dict[str, Tensor], keep: float) -> None:
        """Update the global values, and move those of the islands towards them."""
        self.sgd.zero_grad()
        for name, value in self._tensors(self.value):
            if name in sums and isinstance(value, nn.Parameter):
                value.grad = sums[name]
            elif name in sums:
                value.copy_(sums[name])
        self.sgd.step()
        for name, value in self._tensors(self.value):
            if self.fragment[name] == fragment:
                for model in self.models:
                    local = dict(self._tensors(model))[name]
                    local.copy_(keep * local + (1 - keep) * value)

    def run(self, sizes: Sequence[int]) -> Outcome:
        """Train."""
        found = [self.step(batch) for batch in self.case.batches(list(sizes), self.dtype)]
        return Outcome(losses=[loss for loss, _ in found], norms=[norm for _, norm in found], tensors=self.tensors())

    def tensors(self, island: int = 0) -> dict[str, Tensor]:
        """Return the global values, and what else an island has."""
        values = {name: value.detach().clone() for name, value in self._tensors(self.value)}
        return state_of(self.models[island]) | values


def islands(
    pool: onebox.Pool,
    name: str,
    groups: Sequence[Sequence[int]],
    sizes: Sequence[int] = SIZES,
    *,
    optimizer: str = "adamw",
    plan: Any = None,
    evaluating: Sequence[Any] = (),
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Outcome:
    """Train a case on islands of a pool, with an evaluation after each step where there is something to evaluate."""
    case = CASES[name]
    model = case.model(dtype)
    arguments = {"pool": pool, "seed": SEED, "islands": groups, "plan": plan or SMALL, **options}
    with onebox.Trainer(model, case.loss, optimizers_of(optimizer, model), **arguments) as trainer:
        return steps(trainer, case.batches(list(sizes), dtype), evaluating)


def steps(trainer: onebox.Trainer, batches: Sequence[Any], evaluating: Sequence[Any] = ()) -> Outcome:
    losses = []
    for batch in batches:
        losses.append(trainer.step(*batch))
        if evaluating:
            trainer.evaluate(evaluating)
    norms = [loss.gradient_norm or 0.0 for loss in losses]
    tensors = tensors_of(trainer)
    return Outcome(losses=[float(loss) for loss in losses], norms=norms, tensors=tensors)


# ---- numerics


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_islands_of_one_device(optimizer: str, momentum: float, pools: Pools) -> None:
    outer = onebox.Outer(every=3, lr=0.6, momentum=momentum)
    found = islands(pools(2), "mlp", [[0], [1]], optimizer=optimizer, outer=outer)
    assert_same(found, Reference("mlp", optimizer, [1, 1], outer).run(SIZES))


CASES_OF_ISLANDS: dict[str, tuple[str, int, list[list[int]], Callable[[], Any], list[float]]] = {
    "replicas": ("cnn", 4, [[0, 1], [2, 3]], lambda: SMALL, [1, 1]),
    "uneven": ("cnn", 3, [[0, 1], [2]], lambda: SMALL, [2, 1]),
    "sharded optimizer": (
        "mlp",
        4,
        [[0, 1], [2, 3]],
        lambda: onebox.DataParallel(micro_batch=MICRO_BATCH, shard_optimizer=True),
        [1, 1],
    ),
    "pipelines": ("mlp", 4, [[0, 1], [2, 3]], lambda: [staged("mlp", [0, 1]), staged("mlp", [3, 2])], [1, 1]),
    "mixed": (
        "cnn",
        4,
        [[0, 1, 2], [3]],
        lambda: [staged("cnn", [[0, 1], 2]), SMALL],
        [3, 1],
    ),
    "tied": ("tied", 3, [[0, 1], [2]], lambda: [staged("tied", [0, 1]), SMALL], [2, 1]),
    "dropout": ("dropping", 2, [[0], [1]], lambda: SMALL, [1, 1]),
    "three": ("mlp", 3, [[2], [0], [1]], lambda: SMALL, [1, 2, 1]),
    "one": ("mlp", 2, [[0, 1]], lambda: SMALL, [1]),
}
"""Model, workers, islands, plans and shares."""


@pytest.mark.feature("Islands: Train in islands with an outer optimizer")
@pytest.mark.parametrize("kind", CASES_OF_ISLANDS)
def test_islands_of_every_kind(kind: str, pools: Pools) -> None:
    name, workers, groups, plan, weights = CASES_OF_ISLANDS[kind]
    outer = onebox.Outer(every=4, shares=weights)
    found = islands(pools(workers), name, groups, plan=plan(), outer=outer)
    assert_same(found, Reference(name, "adamw", weights, outer).run(SIZES))


@pytest.mark.feature("Islands: Synchronise fragments in turn")
@pytest.mark.parametrize("fragments", [2, 3])
def test_fragments_are_synchronised_in_turn(fragments: int, pools: Pools) -> None:
    outer = onebox.Outer(every=4, fragments=fragments, shares=[2, 1])
    found = islands(pools(3), "cnn", [[0, 1], [2]], optimizer="sgd", outer=outer)
    assert_same(found, Reference("cnn", "sgd", [2, 1], outer).run(SIZES))


@pytest.mark.feature("Islands: Overlap outer steps with training")
@pytest.mark.parametrize(("overlap", "fragments", "keep"), [(1, 1, 0.5), (3, 2, 0.5), (2, 1, 0.0)])
def test_sums_travel_while_islands_go_on(overlap: int, fragments: int, keep: float, pools: Pools) -> None:
    outer = onebox.Outer(every=4, fragments=fragments, overlap=overlap, keep=keep, shares=[2, 1])
    found = islands(pools(3), "cnn", [[0, 1], [2]], outer=outer)
    assert_same(found, Reference("cnn", "adamw", [2, 1], outer).run(SIZES))


def test_each_island_clips_its_own_gradients(pools: Pools) -> None:
    outer = onebox.Outer(every=3, shares=[2, 1])
    found = islands(pools(3), "mlp", [[0, 1], [2]], outer=outer, clip_grad_norm=0.5)
    expected = Reference("mlp", "adamw", [2, 1], outer, max_norm=0.5).run(SIZES)
    assert_same(found, expected)
    assert found.norms == pytest.approx(expected.norms, abs=AGREE)


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_change_by_hand_while_sums_travel_comes_after_them(fragments: int, pools: Pools) -> None:
    case, model, batches = CASES["mlp"], CASES["mlp"].model(), CASES["mlp"].batches(SIZES)
    outer = onebox.Outer(every=4, overlap=2, fragments=fragments)
    reference = Reference("mlp", "sgd", [1, 1], outer)
    arguments: dict[str, Any] = {"pool": pools(2), "seed": SEED, "islands": [[0], [1]], "plan": SMALL, "outer": outer}
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), **arguments) as trainer:
        steps(trainer, batches[:5])
        trainer.pull()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        by_hand = copy.deepcopy(model.state_dict())
        found = steps(trainer, batches[5:])
    for batch in batches[:5]:
        reference.step(batch)
    for fragment in list(reference.due):
        reference.apply(fragment, reference.due.pop(fragment)[1], outer.keep)
    for changed in (reference.value, *reference.models):
        changed.load_state_dict(by_hand)
    losses = [reference.step(batch)[0] for batch in batches[5:]]
    assert_same(found, Outcome(losses=losses, norms=[], tensors=reference.tensors()))


def test_an_island_without_samples_in_a_step_sits_it_out(pools: Pools) -> None:
    sizes, outer = [6, 1, 6, 1, 6], onebox.Outer(every=4)
    found = islands(pools(2), "mlp", [[0], [1]], sizes, outer=outer)
    assert_same(found, Reference("mlp", "adamw", [1, 1], outer).run(sizes))


@pytest.mark.parametrize(
    ("groups", "outer"),
    [
        ([[0], [1]], onebox.Outer(every=3)),
        ([[0, 1], [2, 3]], onebox.Outer(every=3, momentum=0.6, fragments=2, overlap=1)),
    ],
)
def test_muon_inside_islands(groups: list[list[int]], outer: onebox.Outer, pools: Pools) -> None:
    """MuLoCo (arXiv:2505.23725): each island steps with Muon, and the outer optimizer stays the same."""
    found = islands(pools(sum(map(len, groups))), "mlp", groups, optimizer="muon", outer=outer)
    assert_same(found, Reference("mlp", "muon", [1, 1], outer).run(SIZES))


# ---- compression


def stages_of(plan: Plan, island: int = 0) -> Callable[[Sequence[str], Sequence[int]], Sequence[Sequence[str]]]:
    """Return the division of the parameters of numbered layers into those of each stage, which begins with a layer.

    Args:
        plan: The plan that has the stages.
        island: Its island, without which nothing is divided.
    """
    starts = [int(stage.segments[0].split(".")[-1]) for stage in plan.stages]

    def divided(names: Sequence[str], present: Sequence[int]) -> list[list[str]]:
        if island not in present:
            return [list(names)]
        stages = [sum(start <= int(name.split(".")[0]) for start in starts) for name in names]
        return [[n for n, own in zip(names, stages, strict=True) if own == stage + 1] for stage in range(len(starts))]

    return divided


CODED: dict[str, tuple[str, int, list[list[int]], Callable[[], Any], list[float]]] = {
    kind: CASES_OF_ISLANDS[kind] for kind in ("uneven", "pipelines", "three", "sharded optimizer", "one")
}


@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("codec", ["e3m0", "int8", "bf16"])
def test_outer_gradients_in_a_codec_are_those_of_the_plain_implementation(
    kind: str, codec: OuterCodec, pools: Pools
) -> None:
    """Plain steps of SGD have the same bits wherever they are computed, and so have codes: equal results but for the
    order in which replicas sum gradients."""
    name, workers, groups, plan, weights = CODED[kind]
    outer = onebox.Outer(every=2, shares=weights, compression=codec)
    found = islands(
        pools(workers), name, groups, optimizer="sgd", plan=plan(), outer=outer, engine=onebox.Engine(check_every=1)
    )
    buckets = stages_of(plan()[0]) if kind == "pipelines" else lambda names, present: [names]
    expected = Reference(name, "sgd", weights, outer, buckets=buckets).run(SIZES)
    assert_same(found, expected, tolerance=1e-14)


@pytest.mark.feature("Islands: Compress outer gradients")
@pytest.mark.parametrize(
    ("codec", "dtype", "overlap", "fragments"),
    [("e3m0", torch.float64, 0, 1), ("e3m0", torch.float32, 3, 2), ("int8", torch.float32, 1, 3)],
)
def test_islands_that_exchange_codes_have_the_bits_of_the_plain_implementation(
    codec: OuterCodec, dtype: torch.dtype, overlap: int, fragments: int, pools: Pools
) -> None:
    outer = onebox.Outer(every=4, fragments=fragments, overlap=overlap, compression=codec, shares=[2, 1])
    arguments: dict[str, Any] = {"optimizer": "sgd", "outer": outer, "engine": onebox.Engine(check_every=1)}
    found = islands(pools(2), "mlp", [[0], [1]], dtype=dtype, **arguments)
    expected = Reference("mlp", "sgd", [2, 1], outer, dtype=dtype).run(SIZES)
    if dtype == torch.float64:
        for name, tensor in expected.tensors.items():
            assert torch.equal(found.tensors[name], tensor)
    else:  # a step of an island itself may differ in its last bit
        assert_same(found, expected, tolerance=1e-6)


KINDS = {
    "model": ["mlp", "cnn", "gpt2", "tied", "dropping", "branches"],
    "optimizer": ["sgd", "adamw", "adam-in-groups"],
    "layout": ["devices", "replicas", "pipelines", "mixed"],
    "shares": ["even", "uneven"],
    "fragments": ["1", "2", "5"],
    "clipping": ["off", "on"],
    "momentum": ["0.9", "0"],
    "overlap": ["0", "2"],
    "state": ["device", "host"],
}
"""Settings of which every two meet in some run."""

LAYOUTS: dict[str, tuple[list[list[int]], Callable[[str], Any]]] = {
    "devices": ([[0], [1]], lambda name: SMALL),
    "replicas": ([[0, 2], [1, 3]], lambda name: onebox.DataParallel(micro_batch=MICRO_BATCH, shard_optimizer=True)),
    "pipelines": ([[0, 1], [2, 3]], lambda name: [staged(name, [1, 0]), staged(name, [2, 3])]),
    "mixed": ([[0, 1, 2], [3]], lambda name: [staged(name, [[0, 1], 2]), SMALL]),
}


@pytest.mark.parametrize("run", covering_array(KINDS, lambda run: False), ids=lambda run: "-".join(run.values()))
def test_settings_meet_in_pairs(run: dict[str, str], pools: Pools) -> None:
    groups, plan = LAYOUTS[run["layout"]]
    weights = [1, 1] if run["shares"] == "even" else [3, 1]
    max_norm = 0.5 if run["clipping"] == "on" else None
    outer = onebox.Outer(
        every=5,
        lr=0.8,
        momentum=float(run["momentum"]),
        fragments=int(run["fragments"]),
        overlap=int(run["overlap"]),
        state=run["state"],  # type: ignore[arg-type]
        shares=weights,
    )
    arguments: dict[str, Any] = {"plan": plan(run["model"]), "outer": outer, "clip_grad_norm": max_norm}
    workers = sum(map(len, groups))
    found = islands(pools(workers), run["model"], groups, optimizer=run["optimizer"], **arguments)
    assert_same(found, Reference(run["model"], run["optimizer"], weights, outer, max_norm=max_norm).run(SIZES))


def test_parts_weigh_as_their_losses_do(pools: Pools) -> None:
    """With targets that are ignored, an island's weight is the number of those that are not."""
    loss = nn.CrossEntropyLoss(ignore_index=0)
    reduction = onebox.Weighted(lambda targets: (targets != 0).sum())
    case, outer = CASES["mlp"], onebox.Outer(every=2)
    models = [case.model() for _ in range(3)]
    optimizers = [OPTIMIZERS["sgd"](model) for model in models]
    sgd = torch.optim.SGD(models[2].parameters(), lr=outer.lr, momentum=outer.momentum, nesterov=True)
    model, losses, expected, weights = case.model(), [], [], [0.0, 0.0]
    arguments: dict[str, Any] = {"pool": pools(2), "islands": [[0], [1]], "outer": outer, "loss_reduction": reduction}
    with onebox.Trainer(model, loss, OPTIMIZERS["sgd"](model), **arguments) as trainer:
        for step, (x_BD, y_B) in enumerate(case.batches([12] * 4)):
            losses.append(trainer.step(x_BD, y_B))
            counts = [float((part != 0).sum()) for part in y_B.split(6)]
            weights = [old + new for old, new in zip(weights, counts, strict=True)]
            values = []
            for own, optimizer, x, y in zip(models, optimizers, x_BD.split(6), y_B.split(6), strict=False):
                optimizer.zero_grad()
                values.append(loss(own(x), y))
                values[-1].backward()
                optimizer.step()
            expected.append(sum(v.item() * c for v, c in zip(values, counts, strict=True)) / sum(counts))
            if step % 2:
                with torch.no_grad():
                    for value, *parts in zip(*(each.parameters() for each in (models[2], *models[:2])), strict=True):
                        deltas = [(value - part) * w / sum(weights) for part, w in zip(parts, weights, strict=True)]
                        value.grad = deltas[0] + deltas[1]
                    sgd.step()
                    for value, *parts in zip(*(each.parameters() for each in (models[2], *models[:2])), strict=True):
                        for part in parts:
                            part.copy_(value)
                weights = [0.0, 0.0]
        found = trainer.tensors()
    for name, value in models[2].named_parameters():
        torch.testing.assert_close(found[f"model.{name}"], value.detach(), rtol=0, atol=AGREE)
    assert [float(each) for each in losses] == pytest.approx(expected, abs=AGREE)


def test_an_island_whose_targets_weigh_nothing_adds_nothing_to_the_loss(pools: Pools) -> None:
    loss = nn.CrossEntropyLoss(ignore_index=0)
    reduction = onebox.Weighted(lambda targets: (targets != 0).sum())
    case, model = CASES["mlp"], CASES["mlp"].model()
    (x_BD, y_B), *_ = case.batches([12])
    y_B = torch.cat([y_B[:6].clamp_min(1), torch.zeros_like(y_B[6:])])
    expected = loss(model(x_BD), y_B).item()
    arguments: dict[str, Any] = {"pool": pools(2), "islands": [[0], [1]], "loss_reduction": reduction}
    with onebox.Trainer(model, loss, OPTIMIZERS["sgd"](model), **arguments) as trainer:
        assert trainer.step(x_BD, y_B).item() == pytest.approx(expected, abs=AGREE)
        trainer.synchronize()
        assert all(tensor.isfinite().all() for tensor in trainer.tensors().values())


# ---- layers split over devices


def split_plan(devices: Sequence[int]) -> Plan:
    """Return a plan whose only stage splits its layers over two devices."""
    return Plan(
        stages=(Stage(segments=segments("mlp"), replicas=(tuple(devices),), shares=(1.0,)),), micro_batch=MICRO_BATCH
    )


def test_islands_that_split_layers_alike(pools: Pools) -> None:
    outer = onebox.Outer(every=4)
    found = islands(pools(4), "mlp", [[0, 1], [2, 3]], plan=[split_plan([0, 1]), split_plan([2, 3])], outer=outer)
    assert_same(found, Reference("mlp", "adamw", [1, 1], outer).run(SIZES))


def test_islands_that_split_layers_differently_are_refused(pools: Pools) -> None:
    with pytest.raises(UsageError, match="islands whose plans split layers have to split them alike"):
        islands(pools(3), "mlp", [[0, 1], [2]], plan=[split_plan([0, 1]), SMALL], outer=onebox.Outer(every=4))


# ---- reading the state


def test_evaluations_use_the_global_parameters_and_leave_each_island_its_own(pools: Pools) -> None:
    case, outer = CASES["cnn"], onebox.Outer(every=4, shares=[2, 1])
    reference, model = Reference("cnn", "adamw", [2, 1], outer), case.model()
    batches, held_out = case.batches(SIZES), case.batches([10, 7])
    arguments: dict[str, Any] = {"pool": pools(3), "plan": SMALL, "seed": SEED, "islands": [[0, 1], [2]]}
    with onebox.Trainer(model, case.loss, OPTIMIZERS["adamw"](model), outer=outer, **arguments) as trainer:
        assert trainer.evaluate(held_out).loss == pytest.approx(evaluated(reference, held_out), abs=AGREE)
        for batch in batches:
            trainer.step(*batch)
            reference.step(batch)
            assert trainer.evaluate(held_out).loss == pytest.approx(evaluated(reference, held_out), abs=AGREE)
        trainer.pull()
        for name, tensor in state_of(reference.value).items():
            if "num_batches" not in name:
                torch.testing.assert_close(state_of(model)[name], tensor, rtol=0, atol=AGREE)


def evaluated(reference: Reference, batches: Sequence[Any]) -> float:
    model = reference.value.eval()
    with torch.no_grad():
        found = sum(float(reference.case.loss(model(x), y)) * len(x) for x, y in batches)
    model.train()
    return found / sum(len(x) for x, _ in batches)


def test_an_evaluation_before_the_first_step_does_not_fix_plans_and_shares(pools: Pools) -> None:
    """With plan="auto" those of steps are made for their own batches, also for one that was uploaded before."""
    case, outer = CASES["mlp"], onebox.Outer(every=2, shares=[2, 1])
    batches, model = case.batches([12] * 5), case.model()
    arguments: dict[str, Any] = {"pool": pools(3), "plan": "auto", "islands": [[0, 1], [2]], "outer": outer}
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), **arguments) as trainer:
        before = trainer.evaluate(case.batches([5, 4]))
        assert [plan.predicted for plan in trainer.island_plans] == [None, None]
        uploaded = trainer.upload(*batches[0])
        trainer.step(uploaded)
        plans = trainer.island_plans
        assert [plan.predicted.batch for plan in plans if plan.predicted] == [8, 4]
        found = steps(trainer, batches[1:])
        assert trainer.island_plans == plans
        after = trainer.evaluate(case.batches([5, 4]))
    reference = Reference("mlp", "sgd", [2, 1], outer, plans)
    assert before.loss == pytest.approx(evaluated(reference, case.batches([5, 4])), abs=AGREE)
    reference.step(batches[0])
    expected = [reference.step(batch)[0] for batch in batches[1:]]
    assert after.loss == pytest.approx(evaluated(reference, case.batches([5, 4])), abs=AGREE)
    torch.testing.assert_close(found.losses, expected, rtol=0, atol=AGREE)
    for name, tensor in reference.tensors().items():
        torch.testing.assert_close(found.tensors[name], tensor, rtol=0, atol=AGREE)


def test_a_checkpoint_before_the_first_step_has_no_plans_of_an_evaluation(pools: Pools, tmp_path: Path) -> None:
    case, outer = CASES["mlp"], onebox.Outer(every=2)
    batches, model = case.batches([12] * 3), case.model()
    arguments: dict[str, Any] = {"pool": pools(3), "islands": [[0, 1], [2]], "outer": outer}
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), plan="auto", **arguments) as trainer:
        trainer.evaluate(case.batches([5]))
        trainer.save(tmp_path)
    entry = read(find_save(tmp_path)).manifest.islands
    assert entry is not None and entry.plans == () and entry.shares == ()
    model = case.model()
    with onebox.Trainer.resume(
        tmp_path, model, case.loss, OPTIMIZERS["sgd"](model), plan="auto", **arguments
    ) as trainer:
        trainer.step(*batches[0])
        assert all(plan.predicted for plan in trainer.island_plans)


@pytest.mark.parametrize("overlap", [0, 3])
def test_synchronize_includes_the_steps_since_the_last_outer_step(overlap: int, pools: Pools) -> None:
    case, outer = CASES["mlp"], onebox.Outer(every=4, fragments=2, overlap=overlap)
    reference, model = Reference("mlp", "sgd", [1, 1], outer), case.model()
    arguments: dict[str, Any] = {"pool": pools(2), "plan": SMALL, "islands": [[0], [1]], "outer": outer}
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), **arguments) as trainer:
        for batch in case.batches(SIZES[:7]):
            trainer.step(*batch)
            reference.step(batch)
        trainer.synchronize()
        trainer.synchronize()  # nothing is left to include
        for fragment, (_, sums) in sorted(reference.due.items()):
            reference.apply(fragment, sums, outer.keep)
        for fragment in range(2):
            reference.synchronize(fragment)
        trainer.pull()
        for name, tensor in state_of(reference.value).items():
            torch.testing.assert_close(state_of(model)[name], tensor, rtol=0, atol=AGREE)


def test_changes_by_hand_reach_every_island(pools: Pools) -> None:
    case, outer = CASES["mlp"], onebox.Outer(every=3)
    reference, model = Reference("mlp", "sgd", [1, 1], outer), case.model()
    arguments: dict[str, Any] = {"pool": pools(2), "plan": SMALL, "islands": [[0], [1]], "outer": outer}
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), **arguments) as trainer:
        for place, batch in enumerate(case.batches(SIZES[:8])):
            if place == 4:
                trainer.pull()
                for each in (model, reference.value, *reference.models):
                    with torch.no_grad():
                        next(each.parameters()).mul_(0.5)
                first = next(reference.value.parameters())
                for each in reference.models:
                    next(each.parameters()).data.copy_(first)
            trainer.step(*batch)
            reference.step(batch)
        found = trainer.tensors()
        for name, tensor in reference.value.named_parameters():
            torch.testing.assert_close(found[f"model.{name}"], tensor.detach(), rtol=0, atol=AGREE)


def test_after_synchronize_a_change_of_the_model_before_it_is_refused(pools: Pools) -> None:
    """The outer steps have other values than pull() brought; a second synchronize() makes none."""
    case, model = CASES["mlp"], CASES["mlp"].model()
    arguments: dict[str, Any] = {"pool": pools(2), "plan": SMALL, "islands": [[0], [1]], "outer": onebox.Outer(every=5)}
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), **arguments) as trainer:
        first = next(model.parameters())
        batches = case.batches(SIZES[:3])
        for batch in batches:
            trainer.step(*batch)
        trainer.pull()
        trainer.synchronize()
        with torch.no_grad():
            first.mul_(0.5)
        with pytest.raises(UsageError, match=r"an outer step behind the workers'.*trainer\.pull\(\) before a change"):
            trainer.step(*batches[0])
        trainer.pull()
        trainer.synchronize()
        with torch.no_grad():
            first.mul_(0.5)
        found = trainer.tensors()
        assert any(torch.equal(tensor, first) for tensor in found.values()), "the model was that of the workers"


def test_trainers_of_the_same_tensors_see_what_synchronize_made(pools: Pools) -> None:
    case, model = CASES["mlp"], CASES["mlp"].model()
    arguments: dict[str, Any] = {"pool": pools(2), "plan": SMALL, "islands": [[0], [1]], "outer": onebox.Outer(every=5)}
    batches = case.batches(SIZES[:3])
    with (
        onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), **arguments) as trainer,
        onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), pool=pools(2)) as other,
    ):
        other.evaluate([batches[0]])
        for batch in batches:
            trainer.step(*batch)
        other.tensors()  # takes over what the last outer step made
        trainer.synchronize()
        wanted = trainer.tensors()
        found = other.tensors()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_uploads_ahead_change_nothing(pools: Pools) -> None:
    case, outer = CASES["mlp"], onebox.Outer(every=4, shares=[2, 1])
    model = case.model()
    arguments: dict[str, Any] = {"pool": pools(3), "plan": SMALL, "islands": [[0, 1], [2]], "outer": outer}
    with onebox.Trainer(model, case.loss, OPTIMIZERS["adamw"](model), **arguments) as trainer:
        losses, uploaded = [], []
        for batch in case.batches(SIZES):
            uploaded.append(trainer.upload(*batch))
            if len(uploaded) > 1:
                losses.append(trainer.step(uploaded.pop(0)))
        losses.append(trainer.step(uploaded[0]))
        with pytest.raises(UsageError, match="stepped or closed before"):
            trainer.step(uploaded[0])
        assert trainer.upload_counters().ahead > len(SIZES) // 2
        found = tensors_of(trainer)
    expected = Reference("mlp", "adamw", [2, 1], outer).run(SIZES)
    assert_same(Outcome(losses=[float(loss) for loss in losses], norms=[], tensors=found), expected)


def test_the_state_of_the_outer_optimizer_counts_in_the_forecast_of_memory(pools: Pools) -> None:
    case, model = CASES["mlp"], CASES["mlp"].model()
    batch, peaks, held = case.batches([12])[0], [], []
    for momentum in (0.0, 0.9):
        arguments: dict[str, Any] = {"pool": pools(2), "islands": [[0], [1]]}
        arguments["outer"] = onebox.Outer(every=2, momentum=momentum)
        with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), **arguments) as trainer:
            peaks.append(trainer.predicted_memory(*batch)[0])
            for _ in range(4):
                trainer.step(*batch)
            trainer.wait()
            held.append(trainer.memory()[0].used_bytes)
    assert peaks[1] - peaks[0] == held[1] - held[0] == sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.feature("Islands: Keep outer state on the host")
@pytest.mark.parametrize(("overlap", "codec"), [(2, "e3m0"), (0, "int8"), (0, "none")])
def test_outer_state_on_the_host_has_the_same_bits_and_leaves_the_device(
    overlap: int, codec: OuterCodec, pools: Pools
) -> None:
    """Also where it is read, evaluated and changed by hand between outer steps; forecasts count it in its place."""
    case = CASES["cnn"]
    batches, held_out = case.batches(SIZES), case.batches([5])
    found, synchronised, memory, forecasts, on_host = {}, {}, {}, {}, {}
    for state in ("device", "host"):
        model, fragments = case.model(), 1 + (overlap > 0)
        outer = onebox.Outer(
            every=3, fragments=fragments, overlap=overlap, compression=codec, state=state, shares=[2, 1]
        )
        arguments: dict[str, Any] = {"plan": SMALL, "islands": [[0, 1], [2]], "outer": outer}
        engine = onebox.Engine(check_every=1)
        optimizer = OPTIMIZERS["adamw"](model)
        with onebox.Trainer(model, case.loss, optimizer, pool=pools(3), engine=engine, **arguments) as trainer:
            forecasts[state] = trainer.predicted_memory(*batches[0])[0]
            steps(trainer, batches[:7], held_out)
            trainer.pull()
            with torch.no_grad():
                next(model.parameters()).mul_(0.5)
            found[state] = steps(trainer, batches[7:])
            trainer.synchronize()
            memory[state] = trainer.memory()[0]
            on_host[state] = trainer._run.contents(trainer._batch(*batches[0]))[0].host_bytes
            synchronised[state] = trainer.tensors()
    assert_same(found["host"], found["device"], tolerance=0)
    for name, tensor in synchronised["device"].items():
        assert torch.equal(synchronised["host"][name], tensor)
    moved = memory["host"].host_bytes
    assert on_host == {"device": 0, "host": moved} and memory["device"].host_bytes == 0
    assert forecasts["device"] - forecasts["host"] == memory["device"].used_bytes - memory["host"].used_bytes == moved
    parameters = sum(p.nbytes for name, p in case.model().named_parameters() if not name.startswith("unused"))
    assert 2 * parameters <= moved <= 3 * parameters + 2 * fragments * CODE_BLOCK * 8


# ---- checkpoints


@pytest.mark.feature("Islands: Resume a run of islands")
@pytest.mark.parametrize("half", [4, 6])  # right after an outer step, and between two
@pytest.mark.parametrize(("fragments", "overlap"), [(1, 0), (2, 0), (2, 3)])
def test_a_resumed_run_ends_with_the_same_bits(
    half: int, fragments: int, overlap: int, pools: Pools, tmp_path: Path
) -> None:
    resumed_with_the_same_bits(onebox.Outer(every=4, fragments=fragments, overlap=overlap), half, pools, tmp_path)


@pytest.mark.parametrize("half", [4, 6])
@pytest.mark.parametrize(("overlap", "codec", "state"), [(3, "e3m0", "host"), (0, "int8", "device")])
def test_a_resumed_run_goes_on_with_what_codes_have_lost(
    half: int, overlap: int, codec: OuterCodec, state: StateAt, pools: Pools, tmp_path: Path
) -> None:
    outer = onebox.Outer(every=4, fragments=2, overlap=overlap, compression=codec, state=state)
    resumed_with_the_same_bits(outer, half, pools, tmp_path)


def resumed_with_the_same_bits(outer: onebox.Outer, half: int, pools: Pools, tmp_path: Path) -> None:
    """Save a run and resume it: on the same devices with the same bits, on others with the same result."""
    case, outer = CASES["cnn"], replace(outer, shares=[2, 1])
    batches, model = case.batches(SIZES), case.model()
    arguments: dict[str, Any] = {"plan": SMALL, "seed": SEED, "islands": [[0, 1], [2]], "outer": outer}
    with onebox.Trainer(model, case.loss, OPTIMIZERS["adamw"](model), pool=pools(3), **arguments) as trainer:
        steps(trainer, batches[:half])
        trainer.save(tmp_path)
        straight = steps(trainer, batches[half:])
    model = case.model()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    with onebox.Trainer.resume(tmp_path, model, case.loss, OPTIMIZERS["adamw"](model), pool=pools(3)) as trainer:
        assert trainer.steps_done == half
        trainer.save(tmp_path / "again")  # before its first step
        resumed = steps(trainer, batches[half:])
    assert_same(resumed, straight, tolerance=0)
    model = case.model()
    arguments = {"pool": pools(3), "islands": [[2, 1], [0]]}
    optimizer = OPTIMIZERS["adamw"](model)
    with onebox.Trainer.resume(tmp_path / "again", model, case.loss, optimizer, **arguments) as trainer:
        assert_same(steps(trainer, batches[half:]), straight)


@pytest.mark.parametrize("overlap", [0, 3])
def test_a_resumed_run_is_synchronised_before_its_first_step(overlap: int, pools: Pools, tmp_path: Path) -> None:
    """With the first batch, be it of an evaluation."""
    case, outer, found = CASES["mlp"], onebox.Outer(every=4, overlap=overlap), []
    batches, model = case.batches(SIZES), case.model()
    arguments: dict[str, Any] = {"pool": pools(2), "seed": SEED, "islands": [[0], [1]], "plan": SMALL, "outer": outer}
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), **arguments) as trainer:
        steps(trainer, batches[:6])
        assert trainer.behind
        trainer.save(tmp_path)
        trainer.synchronize()
        assert not trainer.behind
        found.append((trainer.evaluate(batches[6:]).loss, trainer.tensors()))
    with onebox.Trainer.resume(tmp_path, model, case.loss, OPTIMIZERS["sgd"](model), pool=pools(2)) as trainer:
        trainer.synchronize()
        found.append((trainer.evaluate(batches[6:]).loss, trainer.tensors()))
        assert not trainer.behind
    (before, wanted), (after, tensors) = found
    assert after == before
    assert all(torch.equal(tensors[name], tensor) for name, tensor in wanted.items())


def test_an_interrupt_while_a_run_is_resumed_changes_nothing(
    pools: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, outer = CASES["mlp"], onebox.Outer(every=4)
    batches, model = case.batches(SIZES), case.model()
    arguments: dict[str, Any] = {"pool": pools(2), "seed": SEED, "islands": [[0], [1]], "plan": SMALL, "outer": outer}
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), **arguments) as trainer:
        steps(trainer, batches[:6])
        trainer.save(tmp_path)
        straight = steps(trainer, batches[6:])
    model = case.model()
    with onebox.Trainer.resume(tmp_path, model, case.loss, OPTIMIZERS["sgd"](model), pool=pools(2)) as trainer:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(RemoteState, "write", interrupted)
            trainer.step(*batches[6])
        assert_same(steps(trainer, batches[6:]), straight, tolerance=0)


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_what_codes_have_lost_of_shards_is_resumed_and_begins_anew_for_others(
    pools: Pools, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Islands that split layers have residuals for each shard; those that do not, others."""
    case, model = CASES["mlp"], CASES["mlp"].model()
    outer = onebox.Outer(every=2, compression="int8")
    split = {"plan": [split_plan([0, 1]), split_plan([2, 3])], "islands": [[0, 1], [2, 3]]}
    batches = case.batches(SIZES[:8])
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), pool=pools(4), outer=outer, **split) as trainer:
        steps(trainer, batches[:5])
        trainer.save(tmp_path)
        straight = steps(trainer, batches[5:])
    with onebox.Trainer.resume(tmp_path, model, case.loss, OPTIMIZERS["sgd"](model), pool=pools(4)) as trainer:
        assert_same(steps(trainer, batches[5:]), straight, tolerance=0)
    assert "begins anew" not in caplog.text
    others: dict[str, Any] = {"pool": pools(2), "plan": SMALL, "islands": [[0], [1]]}
    with onebox.Trainer.resume(tmp_path, model, case.loss, OPTIMIZERS["sgd"](model), **others) as trainer:
        steps(trainer, batches[5:])
    assert "the state of lossy gradients in the checkpoint is for another plan: it begins anew" in caplog.text


def test_lossy_gradients_inside_islands_are_resumed_with_the_same_bits(pools: Pools, tmp_path: Path) -> None:
    case, model = CASES["mlp"], CASES["mlp"].model()
    stages = [Stage(replicas=((a,), (a + 1,)), shares=(1.0, 1.0), gradients="int8") for a in (0, 2)]
    plans = [Plan(stages=(stage,), micro_batch=MICRO_BATCH) for stage in stages]
    arguments: dict[str, Any] = {"plan": plans, "islands": [[0, 1], [2, 3]], "lossy": ("gradients",)}
    arguments["outer"] = onebox.Outer(every=3)
    batches = case.batches(SIZES[:8])
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), pool=pools(4), **arguments) as trainer:
        steps(trainer, batches[:4])
        trainer.save(tmp_path)
        straight = steps(trainer, batches[4:])
    model = case.model()
    with onebox.Trainer.resume(tmp_path, model, case.loss, OPTIMIZERS["sgd"](model), pool=pools(4)) as trainer:
        trainer.save(tmp_path / "again")
    with onebox.Trainer.resume(
        tmp_path / "again", model, case.loss, OPTIMIZERS["sgd"](model), pool=pools(4)
    ) as trainer:
        assert_same(steps(trainer, batches[4:]), straight, tolerance=0)


def test_a_run_is_resumed_with_as_many_islands(pools: Pools, tmp_path: Path) -> None:
    case, model = CASES["mlp"], CASES["mlp"].model()
    arguments: dict[str, Any] = {"plan": SMALL, "islands": [[0], [1]], "outer": onebox.Outer(every=4, fragments=2)}
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), pool=pools(2), **arguments) as trainer:
        trainer.save(tmp_path)
    for more, message in (
        ({"islands": [[0, 1]]}, r"the run to be resumed has 2 islands, and each island has a state of its own"),
        ({"islands": None}, r"islands=None: the run to be resumed has 2 islands"),
        ({"islands": 2}, r"islands=2: allowed are 'auto', and the devices of each island"),
        ({"islands": [0, 1]}, r"islands=\[0, 1\]: allowed are 'auto', and the devices of each island"),
        ({"outer": onebox.Outer(every=4)}, r"has fragments=2, each with outer steps of its own"),
    ):
        with pytest.raises(UsageError, match=message):
            onebox.Trainer.resume(tmp_path, model, case.loss, OPTIMIZERS["sgd"](model), pool=pools(2), **more)
    with onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), pool=pools(2)) as trainer:
        trainer.save(tmp_path / "plain")
    with pytest.raises(UsageError, match="has no islands; leave islands= and outer= out"):
        onebox.Trainer.resume(
            tmp_path / "plain", model, case.loss, OPTIMIZERS["sgd"](model), pool=pools(2), islands=[[0], [1]]
        )
    with onebox.Trainer.resume(
        tmp_path / "plain", model, case.loss, OPTIMIZERS["sgd"](model), pool=pools(2), islands=None
    ) as resumed:
        assert resumed.steps_done == 0


# ---- faults


def test_a_worker_that_dies_is_one_error() -> None:
    case, model = CASES["mlp"], CASES["mlp"].model()
    arguments: dict[str, Any] = {"islands": [[0], [1]], "outer": onebox.Outer(every=3)}
    with (
        onebox.open("cpu*2", threads=1) as pool,
        onebox.Trainer(model, case.loss, OPTIMIZERS["sgd"](model), pool=pool, **arguments) as trainer,
    ):
        batch = case.batches([12])[0]
        trainer.step(*batch).item()
        os.kill(pool.process_ids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            for _ in range(6):
                trainer.step(*batch)
            trainer.wait()
        with pytest.raises(WorkerDied):
            trainer.step(*batch)


def test_nothing_is_left_on_the_workers(pools: Pools) -> None:
    for outer in (onebox.Outer(every=4), onebox.Outer(every=4, overlap=1, compression="int8", state="host")):
        islands(pools(3), "cnn", [[0, 1], [2]], outer=outer, evaluating=CASES["cnn"].batches([5]))
        assert untouched(pools(3))


def test_steps_and_outer_steps_are_requested_before_earlier_ones_are_answered() -> None:
    """A stopped worker answers nothing: no round trip lies on a step's way."""
    case, model = CASES["mlp"], CASES["mlp"].model()
    outer = onebox.Outer(every=2, overlap=1, compression="e3m0")
    arguments: dict[str, Any] = {"islands": [[0], [1]], "plan": SMALL, "outer": outer}
    batches = case.batches(SIZES)
    with (
        onebox.open("cpu*2", threads=1) as pool,
        onebox.Trainer(
            model, case.loss, OPTIMIZERS["sgd"](model), pool=pool, engine=onebox.Engine(in_flight=8), **arguments
        ) as trainer,
    ):
        losses = [trainer.step(*batch) for batch in batches[:5]]  # the routines of all shapes and steps are there
        trainer.wait()
        os.kill(pool.process_ids[1], signal.SIGSTOP)
        try:
            losses += [trainer.step(*batch) for batch in batches[5:]]
        finally:
            os.kill(pool.process_ids[1], signal.SIGCONT)
        found = Outcome(losses=[float(each) for each in losses], norms=[], tensors=trainer.tensors())
    expected = Reference("mlp", "sgd", [1, 1], outer).run(SIZES)
    assert found.losses == pytest.approx(expected.losses, abs=AGREE)
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(found.tensors[f"model.{name}"], tensor, rtol=0, atol=AGREE)


# ---- what is refused


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"islands": [[0], [0, 1]]}, "device 0 is named twice; each belongs to one island"),
        ({"islands": [[0], [2]]}, "there is no device 2; the pool has 2, numbered from 0"),
        ({"islands": [[1]]}, "device 0 is in no island"),
        ({"islands": "near"}, "islands='near': allowed are 'auto'"),
        ({"islands": [[0], []]}, "allowed are 'auto'"),
        ({"islands": None, "outer": onebox.Outer()}, "it is the outer optimizer of islands; give islands= too"),
        ({"outer": 3}, r"outer=3: allowed are onebox.Outer\(\.\.\.\)"),
        ({"outer": onebox.Outer(shares=[1, 2, 3])}, "3 weights for 2 islands"),
        ({"plan": [SMALL] * 3}, "plan= has 3 plans for 2 islands"),
        ({"islands": None, "plan": [SMALL]}, "which are for islands="),
        ({"plan": onebox.DataParallel(sync="client")}, "islands and sync='client' do not go together"),
        ({"plan": onebox.DataParallel(update="host")}, "islands and update='host' do not go together"),
        ({"plan": [Plan.data_parallel([1], [1]), SMALL]}, r"the plan of island 0 uses device 1"),
        ({"stale": onebox.StaleGradients()}, "islands and stale="),
        ({"recovery": onebox.Recovery(snapshot_every=3)}, r"islands and recovery=.* needs no snapshots"),
        ({"adaptive": True}, "islands and adaptive=True"),
        ({"engine": onebox.Engine(overlap=True)}, r"islands and Engine\(overlap=True\)"),
    ],
)
def test_what_does_not_go_together_is_refused(more: dict[str, Any], message: str, pools: Pools) -> None:
    model = CASES["mlp"].model()
    arguments: dict[str, Any] = {"pool": pools(2), "islands": [[0], [1]], **more}
    with pytest.raises(UsageError, match=message):
        onebox.Trainer(model, CASES["mlp"].loss, OPTIMIZERS["sgd"](model), **arguments)


def test_the_first_batch_has_samples_for_each_island(pools: Pools) -> None:
    with pytest.raises(UsageError, match="the first batch has 1 sample"):
        islands(pools(2), "mlp", [[0], [1]], [1])
