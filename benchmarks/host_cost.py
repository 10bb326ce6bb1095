"""What does the host of a GPU spend on a step, and how often does it wait?

Counted where no GPU is needed: the host's time for each operator of a program whose kernels do nothing, interpreted and
replayed as a captured graph; and, in real steps of a trainer on a worker whose accelerator counts, the calls that make
the host wait for the device and the copies from pageable memory, both for each step after the first ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from common import finish
from host_cost_counts import step_counts
from host_cost_operators import operator_costs

PARTS: tuple[Callable[[], dict[str, object]], ...] = (operator_costs, step_counts)
"""Each measures one part and returns its entries of the report."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    options = parser.parse_args()
    found: dict[str, object] = {}
    for part in PARTS:
        found |= part()
    finish(found, as_json=options.json)


if __name__ == "__main__":
    main()
