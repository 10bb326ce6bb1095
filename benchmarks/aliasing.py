"""Do views, writes in place, lists, copies and gradients on virtual devices give what they give on the CPU?

Random programs (``tests/process/plain/aliasing.py``) run on the CPU and on two virtual devices: values, gradients,
versions of tensors and errors are compared. ``silent`` counts programs with another value, or without the CPU's error;
``raised`` those with an error that the CPU does not have; a worker that ends stops the run. The same ``--seed`` gives
the same programs, and a difference is printed as a script.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from common import commit, finish, show

import onebox
from onebox.errors import WorkerDied
from onebox.vgpu import attach
from tests.process.plain.aliasing import fuzzed

CHUNK = 500
"""Programs between two lines of progress."""


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; each has its own")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--memory", help="of each device, beyond which tensors go to the memory of the host")
    options = parser.parse_args()
    counts: Counter[str] = Counter(dict.fromkeys(("equal", "refused", "silent", "raised", "crashes"), 0))
    begin_s, end = time.monotonic(), options.seed + options.programs
    with onebox.open(
        "cpu*2", threads=1, memory=options.memory, memory_policy="offload" if options.memory else None
    ) as pool:
        attach(pool)
        for first in range(options.seed, end, CHUNK):
            try:
                found, reports = fuzzed(range(first, min(first + CHUNK, end)))
            except WorkerDied as error:
                counts["crashes"] += 1
                print(error, flush=True)
                break
            counts += found
            for report in reports:
                print(f"{report}\n", flush=True)
            done = sum(counts.values())
            print(f"{done} programs, {time.monotonic() - begin_s:.0f} s: {dict(counts)}", file=sys.stderr, flush=True)
    named = {name: counts[name] for name in ("equal", "refused", "silent", "raised", "crashes")}
    figures = {"programs": sum(counts.values()), **named, "seconds": round(time.monotonic() - begin_s)}
    show("programs on virtual devices against the CPU", ["", "programs"], [[name, str(n)] for name, n in named.items()])
    finish({"benchmark": "aliasing", "commit": commit(), **figures}, as_json=options.json)


if __name__ == "__main__":
    main()
