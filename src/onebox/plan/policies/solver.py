"""The choice of activation policies for a chain on one device, so that a step is quickest under a memory budget.

A chain of links, in the order of forward, is cut into spans, and each span gets an activation policy:

- ``keep``: what its backward needs stays on the device;
- ``recompute``: only what crosses its end stays; its backward recomputes the rest, which takes its forward once more,
  except a last link of which nothing else is needed;
- ``offload``: what its backward needs goes to the host while the next span computes forward, and comes back while that
  span computes backward; the device waits for the part of either transfer that this does not hide. Such a span is one
  link: a longer one would only hold more for longer;
- ``swap``: the same, but the device waits for both transfers, and holds nothing of it in between;
- ``cpu``: the host's processor computes it. Values and gradients that cross its ends travel, and nothing hides that:
  with several micro-batches other ones compute meanwhile, which the simulator models and this model does not.

With `h` the bytes that earlier spans hold until their backward, and `p` the bytes that a span offloaded just before it
still holds during its forward (and again during its backward), a span needs, beside its inputs, in forward `h + p +`
what it makes `+` work, and in backward `h + p +` all that its backward reads `+` work. Of an offloaded span, what
crosses its end goes a span later than the rest, and comes back a span earlier, because the next span reads it, too;
where that is not offloaded, it stays. Every other micro-batch in flight holds as much as the whole chain holds. Each
further span costs a call.

The program is exact for this model except that held bytes are rounded up to whole buckets. Its states are (end of the
span, what of the two links before it is away, bytes held); a test compares it with a search that rounds nothing.

Sources: recomputed segments, Chen et al. 2016 (arXiv:1604.06174); dynamic programming over (position, memory) on
chains, Beaumont et al. 2019 (arXiv:1911.13214, "Rotor"), and with offloading too 2020
(doi:10.1007/978-3-030-57675-2_10); the window in which a transfer hides, Rhu et al. 2016 (arXiv:1602.08124, "vDNN") and
Peng et al. 2020 (doi:10.1145/3373376.3378505, "Capuchin"); integer programs as the exact answer, Jain et al. 2020
(arXiv:1910.02653, "Checkmate") and Schuler et al. 2022 (doi:10.1145/3568956, "XEngine").
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from onebox.plan.policies.policy_costs import (
    NEIGHBOUR_STATES,
    ChainCosts,
    PolicyCosts,
    PolicySpan,
    chain_outcome,
    next_neighbour_state,
)
from onebox.plan_names import ACTIVATION_POLICIES, ChainPolicy

_BUCKETS = 1500

_GUESSES = 12
"""Number of trial totals for the bytes that a micro-batch in flight may hold."""


def choose_policies(
    chain: ChainCosts,
    budget_bytes: int,
    allowed: Collection[ChainPolicy] = ACTIVATION_POLICIES,
    *,
    buckets: int = _BUCKETS,
) -> tuple[PolicySpan, ...] | None:
    """Return the spans under which a micro-batch takes the least time within a budget, or ``None`` where none fits.

    Args:
        chain: The chain.
        budget_bytes: Memory of the device beyond what it always holds.
        allowed: The allowed activation policies.
        buckets: Number of buckets of the budget; held bytes are rounded up to whole ones.

    Example:
        >>> from onebox.plan.policies.policy_costs import ChainLink
        >>> links = tuple(ChainLink(1.0, 2.0, 100, 10) for _ in range(4))
        >>> choose_policies(ChainCosts(links=links, host_bps=1.0), 250, ("keep", "recompute"))
        (PolicySpan(start=0, end=2, policy='recompute'), PolicySpan(start=2, end=4, policy='keep'))
    """
    prices = PolicyCosts(chain, allowed)
    if budget_bytes <= 0:
        return None
    if "keep" in prices.allowed:
        whole = (PolicySpan(0, len(chain.links), "keep"),)
        found = chain_outcome(prices, whole)
        if found.peak_bytes <= budget_bytes and "cpu" not in prices.allowed:
            return whole
    best: tuple[float, tuple[PolicySpan, ...]] | None = None
    for most in _totals(chain.in_flight, budget_bytes):
        spans = _Program(prices, budget_bytes - (chain.in_flight - 1) * most, most, buckets).solve()
        if spans is None:
            continue
        extra_s = chain_outcome(prices, spans).extra_s
        if best is None or extra_s < best[0]:
            best = extra_s, spans
    return best[1] if best is not None else None


def least_budget(
    chain: ChainCosts, allowed: Collection[ChainPolicy] = ACTIVATION_POLICIES, *, within: float = 0.005
) -> int:
    """Return approximately the least budget under which a chain can be computed.

    Args:
        chain: The chain.
        allowed: The allowed activation policies.
        within: Relative precision.
    """
    high = (
        1 + chain.in_flight * chain_outcome(PolicyCosts(chain), (PolicySpan(0, len(chain.links), "keep"),)).peak_bytes
    )
    low = 0
    while high - low > max(1, within * high):
        middle = (low + high) // 2
        if choose_policies(chain, middle, allowed, buckets=_BUCKETS // 5) is None:
            low = middle
        else:
            high = middle
    return high


def _totals(in_flight: int, budget: int) -> list[int]:
    """Return trial totals of the bytes that a micro-batch in flight may hold; each leaves another budget."""
    if in_flight == 1:
        return [budget]
    return [budget * turn // (_GUESSES * in_flight) for turn in range(_GUESSES + 1)]


class _Program:
    """The dynamic program for one budget.

    Args:
        prices: Costs of spans.
        budget: Most bytes of the micro-batch that runs.
        most: Most bytes that it may hold after its forward.
        buckets: Number of buckets of the budget.
    """

    def __init__(self, prices: PolicyCosts, budget: int, most: int, buckets: int) -> None:
        self.prices, self.budget, self.most = prices, budget, most
        self.count = len(prices.chain.links)
        self.width = max(1, -(-budget // buckets))
        self.size = budget // self.width + 1
        shape = (self.count + 1, len(NEIGHBOUR_STATES), self.size)
        self.best: NDArray[np.float64] = np.full(shape, np.inf)
        self.best[0, 0, 0] = 0.0
        self.reached = {(0, 0)}
        self.came: NDArray[np.int32] = np.full(shape, -1, np.int32)
        self.steps: list[tuple[PolicySpan, int, int]] = []

    def solve(self) -> tuple[PolicySpan, ...] | None:
        """Return the best spans, or ``None``."""
        if self.budget <= 0:
            return None
        for start in range(self.count):
            for span in self.prices.spans(start):
                for beside in NEIGHBOUR_STATES:
                    self._take(span, beside)
        top = min(self.most // self.width + 1, self.size)
        final = self.best[self.count, 0, :top]  # the last span is never away
        if not len(final) or not np.isfinite(final.min()):
            return None
        return self._back(int(final.argmin()))

    def _take(self, span: PolicySpan, beside: int) -> None:
        """Extend every state that ends at a span's start by that span."""
        prices, start = self.prices, span.start
        if (start, beside) not in self.reached:
            return
        cost = prices.of(span)
        room = self.budget - prices.pending_bytes(start, beside) - cost.need_bytes
        shift = -(-prices.kept_bytes(span, beside) // self.width)
        fitting = min(room // self.width + 1, self.size - shift)
        if fitting <= 0:
            return
        old = self.best[start, beside, :fitting]
        price = cost.price_s + prices.waits_s(span, beside)
        after = next_neighbour_state(beside, span)
        target = self.best[span.end, after, shift : shift + fitting]
        better = old + price < target
        if better.any():
            target[better] = old[better] + price
            self.came[span.end, after, shift : shift + fitting][better] = len(self.steps)
            self.steps.append((span, beside, shift))
            self.reached.add((span.end, after))

    def _back(self, held: int) -> tuple[PolicySpan, ...]:
        found: list[PolicySpan] = []
        end, beside = self.count, 0
        while end:
            span, before, shift = self.steps[self.came[end, beside, held]]
            found.append(span)
            end, beside, held = span.start, before, held - shift
        return tuple(reversed(found))
