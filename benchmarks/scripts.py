"""How well do unmodified scripts use devices of different speed, and what does it cost that they survive their workers?

``nn.DataParallel`` over four uneven pools of emulated devices, once it has found a division, against the same script on
the fastest device of the pool alone, in turn; then two ranks of DistributedDataParallel with batches by speed, against
that device alone at the speed of both. The CNN is that of PyTorch's MNIST example.

Then six scripts whose workers are killed or stopped at random moments: how many end with the bits of an undisturbed
run, and seconds from the notice of a loss until what ran since the snapshot is sent again. And what recovery costs a
script that loses nothing: the share of the time that workers spend on snapshots, steps with it and without it in turn,
and the bytes that are kept. ``--losses 34`` has 200 disturbed runs and more.

Then a worker that is far, 30 ms each way and 100 Mbit/s: loops that read nothing, with batches that the device has and
with uploads, against the same loops beside a worker, in turn; and the round trips of loops that read values.

Last ten scripts that run out of memory and go on; and twice the batch that fits, with the rest in the host's memory.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import Budget, batches, finish, make, show, spread
from far_workers import UPLOADS, open_pools, round_trips, train_near_and_far
from lost_workers import NAMES, random_losses, run
from lost_workers_script import STEPS as SCRIPT_STEPS
from memory_scripts import WAYS, goes_on
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

import onebox
import onebox.vgpu
from onebox.integrations.torch import UnevenSampler, weight_by_samples

POOLS = ("cpu,cpu@0.25", "cpu,cpu@0.05", "cpu,cpu@0.5,cpu@0.25", "cpu@0.25,cpu")
"""The pools; the model is on the first device of each, which is the slowest one of the last pool."""

PARTS = ("data_parallel", "ranks", "losses", "snapshots", "far", "memory")

SHARES = (1.0, 0.25)
"""The speeds of the two ranks' devices."""

BATCH = 32

RANKS_BATCH = 160
"""Samples of all ranks in a step: DistributedDataParallel has costs of its own, of which more samples hide a part."""

FIRST = 60
"""Steps in which a division is found."""

STEPS = 5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--long", action="store_true", help="all rounds, however long they take")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--losses", type=int, default=1, help="disturbed runs of each script")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    budget, result = Budget(long=options.long), dict[str, Any]()
    if "data_parallel" in options.parts:
        result |= data_parallel(options.rounds, budget)
    if "ranks" in options.parts:
        result |= uneven_ranks(options.rounds, budget)
    if "losses" in options.parts:
        result |= losses(options.losses)
    if "snapshots" in options.parts:
        result |= snapshots(options.rounds)
    if "far" in options.parts:
        result |= far(options.rounds, budget)
    if "memory" in options.parts:
        result |= memory(options.rounds)
    finish(result, as_json=options.json)


def data_parallel(rounds: int, budget: Budget) -> dict[str, Any]:
    """Compare nn.DataParallel with the fastest device alone."""
    rows, worst = list[list[str]](), 0.0
    for number, pool in enumerate(POOLS, 1):
        with onebox.open(pool, threads=1) as opened:
            fastest = max(opened.devices, key=lambda device: device.speed).number
            sides = [training("vgpu:0", parallel=True), training(f"vgpu:{fastest}", parallel=False)]
            for side in sides:
                side(FIRST)
            times: list[list[float]] = [[], []]
            for _ in budget.rounds(rounds, 0.8 * number / len(POOLS), least=3):
                for side, of_side in zip(sides, times, strict=True):
                    of_side.append(side(STEPS))
        ratios = [ours / alone for ours, alone in zip(*times, strict=True)]
        rows.append([pool, *(spread(each, 1) for each in times), spread(ratios)])
        worst = max(worst, statistics.median(ratios))
    show(
        f"nn.DataParallel over uneven devices, CNN, batch {BATCH}, SGD: ms/step, median (least to most)",
        ["pool", "DataParallel", "fastest alone", "ratio"],
        rows,
    )
    return {"dataparallel_over_fastest": round(worst, 4)}


def training(device: str, *, parallel: bool, batch: int = BATCH) -> Callable[[int], float]:
    """Return a function that trains for some steps, the last of which reads its loss, and returns the ms of one."""
    model = make("cnn")[0].to(device)
    called = nn.DataParallel(model) if parallel else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ((images, labels),) = batches(1, batch)

    def run(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(called(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        loss.item()
        return (time.perf_counter() - begin) / steps * 1e3

    return run


def uneven_ranks(rounds: int, budget: Budget) -> dict[str, Any]:
    """Compare two ranks with batches by speed with the fast device alone, over the sum of both speeds."""
    times: dict[str, list[float]] = {"alone": [], "ranks": []}
    pool = ",".join("cpu" if share == 1 else f"cpu@{share:g}" for share in SHARES)
    with onebox.open(pool, threads=1):
        alone = training("vgpu:0", parallel=False, batch=RANKS_BATCH)
        alone(STEPS)
        for _ in budget.rounds(rounds, 1, least=3):
            times["alone"].append(alone(STEPS))
            onebox.vgpu.spawn(lambda rank: _rank(rank, times["ranks"]), nprocs=len(SHARES))
    ratios = [ours / single * sum(SHARES) for ours, single in zip(times["ranks"], times["alone"], strict=True)]
    show(
        f"Two ranks with batches by speed, {pool}, CNN, {RANKS_BATCH} samples in all: ms/step, median (least to most)",
        ["ranks", "fast device alone", "over ideal"],
        [[spread(times["ranks"], 1), spread(times["alone"], 1), spread(ratios)]],
    )
    return {"ddp_uneven_over_ideal": round(statistics.median(ratios), 4)}


def _rank(rank: int, times: list[float]) -> None:
    """Train as a rank; the first one adds the milliseconds of a step."""
    dist.init_process_group("onebox")
    device = f"vgpu:{rank}"
    model = DistributedDataParallel(make("cnn")[0].to(device))
    weight_by_samples(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ((images, labels),) = batches(1, RANKS_BATCH)
    sampler = DistributedSampler(range(RANKS_BATCH), num_replicas=len(SHARES), rank=rank)
    (indices,) = UnevenSampler(sampler, RANKS_BATCH // len(SHARES), shares=SHARES)
    for count in (3, STEPS):  # the first ones learn operators
        begin = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[indices].to(device)), labels[indices].to(device))
            loss.backward()
            optimizer.step()
        loss.item()
        dist.barrier()
    if rank == 0:
        times.append((time.perf_counter() - begin) / STEPS * 1e3)
    dist.destroy_process_group()


def losses(count: int) -> dict[str, Any]:
    """Run scripts whose workers are lost at random moments, and compare their bits."""
    rows, same, seconds = list[list[str]](), 0, list[float]()
    for number, name in enumerate(NAMES):
        expected, own, equal, sent = run(name, []), list[float](), 0, 0
        for turn in range(1, count + 1):
            found = run(name, random_losses(1000 * turn + number, SCRIPT_STEPS))
            equal += found.status == 0 and bool(found.bits) and found.bits == expected.bits
            sent += found.sent
            own += found.recovered_s
        rows.append([name, f"{equal} of {count}", str(sent), spread(own, 2) if own else "-"])
        same, seconds = same + equal, seconds + own
    show(
        "Scripts on two workers that are killed or stopped: runs with the same bits; seconds of a recovery",
        ["script", "same bits", "losses", "seconds: median (least to most)"],
        rows,
    )
    found_s = round(statistics.median(seconds), 3) if seconds else None
    return {"recovered_same_bits": same / (count * len(NAMES)), "recover_s": found_s}


def snapshots(rounds: int) -> dict[str, Any]:
    """Train the CNN with recovery and without it, in turn."""
    times: list[list[float]] = [[], []]
    shares, kept = list[float](), list[float]()
    for _ in range(rounds):
        for recover, of_side in zip((False, True), times, strict=True):
            with onebox.open("cpu", threads=1, recover=recover) as pool:
                side = training("vgpu:0", parallel=False)
                side(FIRST)
                begin, found = time.perf_counter(), pool.script_recovery
                before_s = found.snapshot_s if found is not None else 0.0
                of_side.append(side(10 * FIRST))
                if found is not None:
                    shares.append((found.snapshot_s - before_s) / (time.perf_counter() - begin))
                    kept.append(found.kept_bytes / 2**20)
    ratios = [ours / plain for plain, ours in zip(*times, strict=True)]
    show(
        f"The CNN on one worker, batch {BATCH}: ms/step without and with recovery; the workers' time for snapshots",
        ["without", "with", "ratio", "share of snapshots", "MiB kept"],
        [[*(spread(each, 1) for each in times), spread(ratios), spread(shares, 4), spread(kept, 1)]],
    )
    return {
        "snapshot_share": round(statistics.median(shares), 5),
        "recover_ratio": round(statistics.median(ratios), 4),
        "log_bytes": int(max(kept) * 2**20),
    }


def far(rounds: int, budget: Budget) -> dict[str, Any]:
    """Train on a worker that is far, reading nothing, and beside one."""
    rows, ratios, sent = list[list[str]](), dict[str, float](), dict[str, float]()
    turns = [(name, kind) for kind in UPLOADS for name in ("mlp", "cnn")]
    with open_pools() as pools:
        for number, (name, kind) in enumerate(turns, 1):
            found = train_near_and_far(pools, name, kind, budget.rounds(rounds, number / len(turns), least=3))
            own = [there / here for there, here in zip(found.far, found.near, strict=True)]
            key = "far_ratio" if kind == UPLOADS[0] else "far_ratio_uploads"
            ratios[key] = max(ratios.get(key, 0.0), statistics.median(own))
            sent |= {kind: found.near_bytes, f"{kind}, far": found.far_bytes}
            kib = [f"{each / 2**10:.1f}" for each in (found.near_bytes, found.far_bytes)]
            rows.append([f"{name}, {kind}", spread(found.near), spread(found.far), spread(own), *kib])
        waits = round_trips(pools.far)
    show(
        f"A worker that is far, nothing read, batch {BATCH}: ms/step, median (least to most), KiB sent a step",
        ["model, images", "near", "far", "far / near", "KiB near", "KiB far"],
        rows,
    )
    return {
        **{key: round(ratio, 4) for key, ratio in ratios.items()},
        "far_upload_bytes": round(sent["floats, far"]),
        "far_upload_bytes_plain": round(sent["floats"]),
        "round_trips_of_three_reads": waits["three_reads"],
        "round_trips_of_ten_steps": waits["ten_steps"],
    }


def memory(rounds: int) -> dict[str, Any]:
    """Run scripts that go on after a lack of memory; then train twice the batch that fits, with what does not in the
    host's memory, and without a limit, in turn."""
    retried = {way: goes_on(way) for way in WAYS}
    show(
        "Scripts that begin with more than fits, find out, and train with what fits",
        ["way", "goes on"],
        [[way, "yes" if done else "no"] for way, done in retried.items()],
    )
    largest, limit_bytes = 0, 16 << 20
    with onebox.open("cpu", threads=1, memory=limit_bytes), contextlib.suppress(torch.OutOfMemoryError):
        for batch in range(64, 1 << 16, 64):
            _deep(batch)(1)
            largest = batch
    times: list[list[float]] = [[], []]
    peaks = list[int]()
    for _ in range(rounds):
        for limited, of_side in zip((False, True), times, strict=True):
            limits: dict[str, Any] = {"memory": limit_bytes, "memory_policy": "offload"} if limited else {}
            with onebox.open("cpu", threads=1, **limits):
                side = _deep(2 * largest)
                side(3)
                of_side.append(side(STEPS))
                peaks.append(torch.vgpu.max_memory_allocated())
    ratios = [ours / plain for plain, ours in zip(*times, strict=True)]
    show(
        f"An MLP of 9 layers, batch {2 * largest}, where {largest} fit in 16 MiB: ms/step, median (least to most)",
        ["without a limit", "in 16 MiB", "ratio", "MiB without a limit"],
        [[*(spread(each, 1) for each in times), spread(ratios), f"{max(peaks) / 2**20:.1f}"]],
    )
    return {"oom_scripts": sum(retried.values()), "offload_ratio": round(statistics.median(ratios), 4)}


def _deep(batch: int) -> Callable[[int], float]:
    """Return a function like that of :func:`training`, for a model whose activations take most of its memory."""
    torch.manual_seed(0)
    layers = [each for _ in range(8) for each in (nn.Linear(128, 128), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(128, 10)).to("vgpu:0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, labels = torch.randn(batch, 128), torch.randint(10, (batch,))

    def run(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs.to("vgpu:0")), labels.to("vgpu:0")).backward()
            optimizer.step()
        torch.vgpu.synchronize()
        return (time.perf_counter() - begin) / steps * 1e3

    return run


if __name__ == "__main__":
    main()
