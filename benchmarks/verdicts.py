"""All benchmarks one after the other, as one table: each figure with a target, and whether the target is met.

Each is a process of its own that prints one JSON object, and is ended after ``--minutes``; a figure that did not come
is no figure. Before each of them a fixed computation is repeated for a second: by how much the ninth tenth of its times
exceeds the first is the noise of the machine at that time, below which no difference between two figures means
anything.

    python benchmarks/verdicts.py [--only remote eager] [--minutes 5] [--json]

Status 1 if a target is missed or a benchmark did not end. Ctrl-C and SIGTERM end the benchmark that runs; the table has
those before it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import commit, finish, machine, show

HERE = Path(__file__).resolve().parent

EQUAL = 20
"""Products of matrices in a computation by which the machine's noise is measured."""

GRACE_S = 10.0
"""Time that a benchmark has to end its processes when it is ended."""


@dataclass(frozen=True)
class Target:
    """A bound of a figure.

    Args:
        key: Its key in the benchmark's JSON object.
        bound: The bound.
        at_least: Whether it is a lower bound.
    """

    key: str
    bound: float
    at_least: bool = False

    @property
    def text(self) -> str:
        """The bound in words."""
        return f"at {'least' if self.at_least else 'most'} {self.bound:g}"

    def met(self, value: float) -> bool:
        """Return whether a figure is within the bound."""
        return value >= self.bound if self.at_least else value <= self.bound


def _most(**bounds: float) -> list[Target]:
    return [Target(key, bound) for key, bound in bounds.items()]


def _least(**bounds: float) -> list[Target]:
    return [Target(key, bound, at_least=True) for key, bound in bounds.items()]


TARGETS: dict[str, list[Target]] = {
    "opening": _most(start_s_over_python=1.0),
    "remote": _most(cnn_ratio=1.05, mlp_ratio=1.05, client_cpu_ms=1.0),
    "eager": _most(cnn_ratio=1.15, mlp_ratio=1.5, client_us_per_op=20, waits_per_step=0),
    "scripts": _most(dataparallel_over_fastest=1.05, ddp_uneven_over_ideal=1.1, recover_s=5, snapshot_share=0.02)
    + _most(far_ratio=1.05, far_ratio_uploads=1.05, round_trips_of_three_reads=1)
    + _least(recovered_same_bits=1, oom_scripts=10),
    "coverage": [*_least(opinfo=0.99, moduleinfo=1.0, optimizerinfo=1.0), *_most(wrong=0, crashed=0)],
    "correctness": _most(silent=0, unhelpful=0),
    "lengths": _most(captures=4, ratio=2.0),
    "scaling": _least(share_of_ceiling=0.93, over_ddp=1.0),
    "replicas": [*_most(sharded_bytes=0.7), *_least(hosts_speed=1.0)],
    "split_layers": [*_least(large_split=1, large_over_whole=1.0), *_most(small_split=0)],
    "memory": _least(alexnet_saving=0.45, vgg16_saving=0.45),
    "prediction": [*_most(mean_error=0.05, memory_error=0.05), *_least(spearman=0.95)],
    "pipeline": [
        *_least(real_vs_torch=1.2),
        *_most(equal_vs_torch=0.97, interleaved_bubble_over_theory_8=1.03, zbh1_bubble_over_theory_8=1.03),
        Target("1f1b_bubble_over_theory_8", 1.02),
    ],
    "adaptive": [*_least(share_of_bound=0.95, mean_vs_gpipe=2.8, mean_vs_best_peer=1.5), *_most(slow_device=1.1)],
    "staleness": [],
    "transfers": _most(step_ratio=1.0),
    "recovery": _most(snapshot_share=0.02),
    "feed": _most(over_ideal=1.005, over_slowest_stage=1.05, process_asleep_ms=0.5),
    "security": _most(crashes=0, hangs=0, intruders=0),
    "operator_fuzz": _most(crashes=0, canaries_changed=0, foreign_reads=0),
    "simd": [],
    "links": _least(gb_s_one_way_ratio_10g=0.6, gb_s_summed_ratio_10g=0.6),
    "account": [
        *_most(link_points=5, feed_points=5, saving_points=5, slow_device_points=5),
        *_most(none_not_attributed=3, link_not_attributed=3, saving_aside_over_none=1.5),
    ],
    "slow_links": _most(after_drop_over_best=1.1),
    "launchers": _most(failed=0, planned_over_dataparallel_uneven=0.7),
    "finetune": _most(peak_over_budget=1.0, loss_error=1e-10),
    "page": _most(update_s=2.0, step_slowdown=0.005, page_kb=300, server_core_share_64_devices=0.005),
    "growth": [
        *_most(open_s_64=3.0, client_ms_1=0.5, client_ms_64=2.0, message_us=50, auto_wait_s=15.0),
        *_most(plan_s_100x16=1.0, plan_s_1000x64=10.0, captures_100_lengths=4),
        *_least(share_of_bound_100x16=0.92, share_of_bound_1000x64=0.92),
    ],
    "many": [*_most(status_s=1.0, agent_mb_growth=1.0), *_least(again_leases_per_minute=1000)],
}
"""The figures with a target, by the name of the benchmark, in the order in which they run."""


ARGUMENTS = {"slow_links": ["--parts", "drop", "--islands", "2", "--rates", "1000", "100", "--settled", "10"]}
"""Arguments for the part of a benchmark that ends within minutes; the whole takes longer, and is run by name."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A benchmark that was run.

    Args:
        name: Its name.
        figures: Its JSON object; empty if it failed or did not end.
        minutes: The time that it took.
        noise: Noise of the machine before it.
        why: The reason that there are no figures; empty if there are.
    """

    name: str
    figures: dict[str, Any]
    minutes: float
    noise: float
    why: str = ""

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """Key, figure, bound and verdict of each target; one row without a key if there is no target or no figure."""
        targets = TARGETS[self.name]
        if self.why or not targets:
            return [("", "", "", self.why or "no target")]
        found = []
        for target in targets:
            value = self.figures.get(target.key)
            if isinstance(value, int | float):
                verdict = "met" if target.met(value) else "missed"
                found.append((target.key, f"{value:.4g}", target.text, verdict))
            else:
                found.append((target.key, "", target.text, "not measured"))
        return found


def noise_of_machine(seconds: float = 1.0) -> float:
    """Return by how much the ninth tenth of the times of equal computations of some 10 ms exceeds the first."""
    left, right = torch.ones(256, 256), torch.ones(256, 256)
    took_s: list[float] = []
    end_s = time.perf_counter() + seconds
    while (begin_s := time.perf_counter()) < end_s:
        for _ in range(EQUAL):
            left @ right
        took_s.append(time.perf_counter() - begin_s)
    took_s.sort()
    tenth = len(took_s) // 10
    return took_s[-1 - tenth] / took_s[tenth] - 1


def run(name: str, minutes: float) -> Ran:
    """Run a benchmark in its default form, for a bounded time."""
    noise, begin_s = noise_of_machine(), time.monotonic()
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", *ARGUMENTS.get(name, ())]
    figures: dict[str, Any] = {}
    with (
        tempfile.TemporaryFile("w+") as printed,  # a pipe would stay open as long as a process that was left behind
        subprocess.Popen(command, stdout=printed, start_new_session=True) as process,
    ):
        try:
            status = process.wait(60 * minutes)
            why = "" if status == 0 else f"failed: status {status}"
            printed.seek(0)
            with contextlib.suppress(ValueError, IndexError):
                figures = json.loads(printed.read().splitlines()[-1])
            if not why and not (isinstance(figures, dict) and figures):
                why = "failed: no JSON object"
        except subprocess.TimeoutExpired:
            why = f"did not end within {minutes:g} minutes"
        finally:
            _end(process)
    took = (time.monotonic() - begin_s) / 60
    return Ran(name=name, figures={} if why else figures, minutes=took, noise=noise, why=why)


def _end(process: subprocess.Popen[str]) -> None:
    """End a benchmark and what it started: as Ctrl-C does, and for good if it does not end."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
            if number == signal.SIGINT:
                continue  # workers of a benchmark that has ended may be left in its group
        if process.poll() is not None:
            return


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(TARGETS), choices=list(TARGETS), metavar="NAME")
    parser.add_argument("--minutes", type=float, default=5.0, help="bound of each benchmark")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    if not 0 < options.minutes <= 600:
        parser.error(f"--minutes {options.minutes:g}: allowed is more than 0, and up to 600")
    torch.set_num_threads(1)
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the benchmark that runs is ended, too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    ran: list[Ran] = []
    ended: int | str | None = None
    try:
        for name in options.only:
            print(f"{name}.py …", file=sys.stderr, flush=True)
            ran.append(run(name, options.minutes))
            found = ", ".join(filter(None, (" ".join(filter(None, row)) for row in ran[-1].rows)))
            print(f"  {ran[-1].minutes:.1f} minutes: {found}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        ended = 128 + signal.SIGINT
    except SystemExit as end:
        ended = end.code
    cells = []
    for one in ran:
        for number, row in enumerate(one.rows):
            own = (one.name, f"{one.minutes:.1f}", f"{100 * one.noise:.0f} %") if not number else ("", "", "")
            cells.append([*own, *row])
    columns = ["benchmark", "minutes", "noise before", "figure", "value", "target", "verdict"]
    show("Benchmarks", columns, cells)
    verdicts = [row[-1] for one in ran for row in one.rows]
    counts = {name: sum(verdict.startswith(name) for verdict in verdicts) for name in ("met", "missed", "did not end")}
    failed = sum(verdict.startswith("failed") or verdict == "not measured" for verdict in verdicts)
    result = {
        "verdicts": {one.name: {row[0] or "it": row[-1] for row in one.rows} for one in ran},
        "figures": {one.name: one.figures for one in ran},
        **{name.replace(" ", "_"): count for name, count in counts.items()},
        "failed": failed,
        "machine": machine(),
        "commit": commit(),
    }
    finish(result, as_json=options.json)
    raise SystemExit(ended or bool(counts["missed"] or counts["did not end"] or failed))


if __name__ == "__main__":
    main()
