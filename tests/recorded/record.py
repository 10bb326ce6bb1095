"""Compares what the runs compute with the recording, or writes it anew.

python -m tests.recorded.record            each run: same or different; exit status 1 where any differs
python -m tests.recorded.record --write    record all runs anew

With --only, the other runs stay as they were recorded; on another machine than theirs, so do the parts that are not the
same everywhere.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from onebox.worker.accelerator.cpu import HostAccelerator
from tests.recorded.runs import EVERYWHERE, WITH_RESULTS, Record, runs

FILE = Path(__file__).with_name("recorded.json")


def machine() -> dict[str, str]:
    """Return what results depend on beside the code."""
    return {
        "torch": torch.__version__,
        "architecture": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": HostAccelerator(torch.device("cpu")).identity().product,  # MKL has other kernels for other makers
    }


def execute(run: Callable[[Path], Record]) -> Record:
    """Return the record of a run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = run(Path(folder))
    finally:
        torch.set_num_threads(threads)
    return json.loads(json.dumps(found))


def differences(name: str, found: Record, expected: Record, *, same_machine: bool) -> Iterator[str]:
    """Yield the parts of a run's record that differ; on another machine, of those that are the same everywhere."""
    if not same_machine and name in WITH_RESULTS:
        found, expected = without_hashes(found), without_hashes(expected)
    for part in sorted(found.keys() | expected.keys()):
        if (same_machine or part in EVERYWHERE) and found.get(part) != expected.get(part):
            yield part


def same_everywhere(name: str, record: Record) -> Record:
    """Return the parts of a run's record that do not depend on the machine."""
    parts = (part for part in record if part in EVERYWHERE and (part != "messages" or name not in WITH_RESULTS))
    return {part: record[part] for part in parts}


def without_hashes(record: Record) -> Record:
    """Return a record with the numbers and bytes of its messages alone."""
    each = [{key: value for key, value in one.items() if key != "sha256"} for one in record["messages"]]
    return {**record, "messages": sorted(each, key=lambda one: (one["messages"], one["bytes"]))}


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the runs anew")
    parser.add_argument("--only", metavar="TEXT", nargs="*", default=[], help="runs whose names contain one of these")
    parser.add_argument("--show", action="store_true", help="show values that differ")
    arguments = parser.parse_args()
    stored: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"machine": machine(), "runs": {}}
    same_machine = stored["machine"] == machine()
    chosen = {
        name: run for name, run in runs().items() if not arguments.only or any(part in name for part in arguments.only)
    }
    different, made = 0, {}
    for name, run in chosen.items():
        start_s = time.perf_counter()
        made[name] = execute(run)
        took_s = time.perf_counter() - start_s
        expected = stored["runs"].get(name, {})
        parts = list(differences(name, made[name], expected, same_machine=same_machine))
        different += bool(parts)
        verdict = f"different: {', '.join(parts)}" if parts else "same"
        verdict = verdict if expected else "new"
        print(f"{took_s:5.1f} s  {name:<55} {verdict}", flush=True)
        if arguments.show:
            for part in parts:
                print(f"    {part}\n      recorded {expected.get(part)}\n      now      {made[name].get(part)}")
    if arguments.write:
        kept = stored["runs"] if arguments.only else {}
        if kept and not same_machine:
            made = {name: {**kept.get(name, {}), **same_everywhere(name, record)} for name, record in made.items()}
        everything = {name: {**kept, **made}[name] for name in runs() if name in {**kept, **made}}
        recorded_with = stored["machine"] if kept else machine()
        FILE.write_text(json.dumps({"machine": recorded_with, "runs": everything}, indent=1) + "\n")
        return 0
    print(f"{len(chosen) - different} same, {different} different" + ("" if same_machine else ", on another machine"))
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
