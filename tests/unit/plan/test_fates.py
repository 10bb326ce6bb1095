"""The choice of fates against two oracles: every division of a short chain, and an integer program of a longer one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from onebox.plan.fates import (
    FATES,
    ChainCosts,
    FateSpan,
    Link,
    Prices,
    choose_fates,
    least_budget,
    outcome,
)

_FINE = 4000
"""Buckets for the comparisons: what rounding costs them stands beside."""


def _chain(random: Random, length: int, *, in_flight: int = 1, cpu: bool = True) -> ChainCosts:
    """Return a chain whose transfers hide in part, and whose host is slower than the device, for most links."""
    links = []
    for place in range(length):
        saved = random.randrange(1, 100)
        boundary = random.randrange(0, saved + 1) if place < length - 1 else 0
        forward = random.uniform(0.5, 3.0)
        slower = random.choice([0.8, 2.0, 6.0])
        links.append(
            Link(
                forward_s=forward,
                backward_s=forward * random.uniform(1.0, 2.5),
                saved_bytes=saved,
                boundary_bytes=boundary,
                forward_work_bytes=random.randrange(0, 30),
                backward_work_bytes=random.randrange(0, 60),
                cpu_forward_s=forward * slower if cpu and random.random() < 0.7 else None,
                cpu_backward_s=2 * forward * slower,
            )
        )
    return ChainCosts(
        links=tuple(links),
        host_bps=random.choice([10.0, 40.0, 1000.0]),
        in_flight=in_flight,
        call_s=random.choice([0.0, 0.05]),
        input_bytes=random.randrange(0, 50),
        cpu_bps=random.choice([20.0, 200.0]),
    )


def _divisions(prices: Prices, start: int = 0) -> Iterator[tuple[FateSpan, ...]]:
    """Yield every division of a chain into spans with fates."""
    if start == len(prices.chain.links):
        yield ()
        return
    for span in prices.spans(start):
        for rest in _divisions(prices, span.end):
            yield (span, *rest)


def _integer_program(prices: Prices, budget: int) -> float | None:
    """Return the least seconds that spans of one micro-batch can cost under a budget, by HiGHS; nothing if none fits.

    A variable for each span with a fate says whether it is chosen; the chosen ones are a path through the chain. A
    second set of variables, one for each link that may be offloaded, takes the waits.
    """
    chain, links = prices.chain, prices.chain.links
    spans = [span for start in range(len(links)) for span in prices.spans(start)]
    number = {span: turn for turn, span in enumerate(spans)}
    offloads = [span for span in spans if span.fate == "offload"]
    size = len(spans) + len(offloads)
    cost = np.zeros(size)
    cost[: len(spans)] = [prices.of(span).price_s for span in spans]
    cost[len(spans) :] = 1.0
    rows, low, high = [], [], []

    def add(row: np.ndarray, least: float, most: float) -> None:
        rows.append(row)
        low.append(least)
        high.append(most)

    for place in range(len(links) + 1):
        flow = np.zeros(size)
        for span in spans:
            flow[number[span]] += (span.start == place) - (span.end == place)
        want = 1.0 if place == 0 else -1.0 if place == len(links) else 0.0
        add(flow, want, want)
    ends = {span.start + 1: span for span in offloads}
    most = sum(link.saved_bytes + link.boundary_bytes for link in links) * 3.0
    for span in spans:
        own = prices.of(span)
        row = np.zeros(size)
        for other in spans:
            if other.end <= span.start:
                row[number[other]] += prices.of(other).kept_bytes
        row[number[span]] += own.need_bytes + most
        if span.start in ends:
            row[number[ends[span.start]]] += prices.pending_bytes(ends[span.start])
        add(row, -np.inf, budget + most)
    for turn, before in enumerate(offloads):
        for span in prices.spans(before.end):
            wait = prices.waits_s(before, span)
            row = np.zeros(size)
            row[len(spans) + turn] = 1.0
            row[number[before]] -= wait
            row[number[span]] -= wait
            add(row, -wait, np.inf)  # both chosen: it waits at least so long
    assert chain.in_flight == 1
    bounds = Bounds(np.zeros(size), np.concatenate([np.ones(len(spans)), np.full(len(offloads), np.inf)]))
    whole = np.concatenate([np.ones(len(spans)), np.zeros(len(offloads))])
    found = milp(cost, constraints=LinearConstraint(np.array(rows), low, high), bounds=bounds, integrality=whole)
    return float(found.fun) if found.success else None


def _plain_s(chain: ChainCosts) -> float:
    return sum(link.forward_s + link.backward_s for link in chain.links)


def _spread(prices: Prices) -> int:
    """Return a budget between what the chain can do with and what it takes when all is kept."""
    return outcome(prices, (FateSpan(0, len(prices.chain.links), "keep"),)).peak_bytes


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 5), part=st.floats(0.1, 1.1), in_flight=st.integers(1, 3))
def test_no_division_of_a_short_chain_is_better(seed: int, length: int, part: float, in_flight: int) -> None:
    chain = _chain(Random(seed), length, in_flight=in_flight)
    prices = Prices(chain)
    budget = int(_spread(prices) * part)
    chosen = choose_fates(chain, budget, buckets=_FINE)
    fitting = [found for spans in _divisions(prices) if (found := outcome(prices, spans)).peak_bytes <= budget]
    if chosen is None:
        # With several micro-batches in flight, totals are guessed, each a twelfth of what they may hold.
        slack = 1 - 0.01 - (0.1 if in_flight > 1 else 0.0)
        assert not [found for found in fitting if found.peak_bytes <= budget * slack]
        return
    got = outcome(prices, chosen)
    assert got.peak_bytes <= budget
    assert [span.start for span in chosen] == [0, *(span.end for span in chosen)][:-1]
    assert chosen[-1].end == length
    best = min(found.extra_s for found in fitting)
    if in_flight == 1:
        assert got.extra_s <= best + 1e-9
    else:
        tighter = [found.extra_s for found in fitting if found.peak_bytes <= budget * 0.89]
        assert got.extra_s <= min(tighter, default=got.extra_s) + 1e-9


@pytest.mark.parametrize("length", [6, 9, 12])
def test_an_integer_program_finds_nothing_better(length: int) -> None:
    random = Random(length)
    compared = 0
    for _ in range(4):
        chain = _chain(random, length, cpu=random.random() < 0.5)
        prices = Prices(chain)
        budget = int(_spread(prices) * random.choice([0.3, 0.45, 0.6, 0.8]))
        oracle = _integer_program(prices, budget)
        chosen = choose_fates(chain, budget, buckets=_FINE)
        if oracle is None:
            assert chosen is None
            continue
        assert chosen is not None
        compared += 1
        got, plain = outcome(prices, chosen).extra_s, _plain_s(chain)
        assert got >= oracle - 1e-6  # else the oracle would be wrong
        assert got <= oracle + 1e-6
        assert plain + got <= 1.05 * (plain + oracle)
        coarse = choose_fates(_million_fold(chain), budget * 10**6)
        assert coarse is not None or choose_fates(chain, int(0.99 * budget)) is None
        if coarse is not None:
            assert plain + outcome(prices, coarse).extra_s <= 1.05 * (plain + oracle)
    assert compared


def _million_fold(chain: ChainCosts) -> ChainCosts:
    """Return a chain with as many megabytes as it has bytes, so that held bytes are rounded."""
    links = tuple(
        link._replace(
            saved_bytes=link.saved_bytes * 10**6,
            boundary_bytes=link.boundary_bytes * 10**6,
            forward_work_bytes=link.forward_work_bytes * 10**6,
            backward_work_bytes=link.backward_work_bytes * 10**6,
        )
        for link in chain.links
    )
    wider = {name: getattr(chain, name) * 10**6 for name in ("host_bps", "cpu_bps", "input_bytes")}
    return replace(chain, links=links, **wider)


def test_what_fits_is_kept() -> None:
    chain = _chain(Random(3), 8, cpu=False)
    assert choose_fates(chain, _spread(Prices(chain))) == (FateSpan(0, 8, "keep"),)


def test_few_spans_win_where_they_are_as_good() -> None:
    links = tuple(Link(1.0, 2.0, 100, 10) for _ in range(9))
    spans = choose_fates(ChainCosts(links=links, host_bps=1.0, call_s=1e-3), 420, ("keep", "recompute"))
    assert spans is not None
    assert len(spans) <= 4


def test_a_transfer_that_hides_beats_computing_again_and_one_that_does_not_loses() -> None:
    links = tuple(Link(1.0, 2.0, 100, 10) for _ in range(6))
    for bandwidth, fate in ((1000.0, "offload"), (5.0, "recompute")):
        spans = choose_fates(ChainCosts(links=links, host_bps=bandwidth), 450)
        assert spans is not None
        assert {span.fate for span in spans} == {"keep", fate}


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_a_least_budget_is_enough_and_little_less_is_not(seed: int) -> None:
    chain = _chain(Random(seed), 6)
    least = least_budget(chain)
    assert choose_fates(chain, least, buckets=300) is not None
    assert choose_fates(chain, int(least * 0.98) - 1, buckets=300) is None


def test_only_what_is_allowed_is_chosen() -> None:
    chain = _chain(Random(5), 7)
    budget = int(_spread(Prices(chain)) * 0.7)
    for fates in product(FATES, repeat=2):
        spans = choose_fates(chain, budget, fates)
        assert spans is None or {span.fate for span in spans} <= set(fates)
