"""The choice of fates against two oracles: every division of a short chain, and a search of a longer one
that rounds nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebox.plan.fates import choose_fates, least_budget
from onebox.plan.prices import AWAY, FATES, ChainCosts, FateSpan, Link, Prices, outcome

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
                spared=place < length - 1 and saved % 3 == 0,
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


def _least_s(prices: Prices, budget: int) -> float | None:
    """Return the least seconds of all divisions of a chain, for one micro-batch; nothing if none fits.

    The model is written out here once more. Beginnings of divisions are extended link by link; of those that end at
    the same place after the same two fates, only such are kept as no other one beats in seconds and in bytes.

    Args:
        prices: What spans cost.
        budget: Bytes.
    """
    links = prices.chain.links
    assert prices.chain.in_flight == 1
    found: dict[tuple[int, str, str], list[tuple[float, int]]] = defaultdict(list)
    found[0, "", ""] = [(0.0, 0)]
    for start in range(len(links)):
        for (place, last, behind), beginnings in list(found.items()):
            if place != start:
                continue
            lent = prices.lent_bytes(start - 1) if last in AWAY else 0
            pending = links[start - 1].saved_bytes if last == "offload" else lent
            if last in AWAY and behind == "offload":
                pending += prices.lent_bytes(start - 2)
            for span in prices.spans(start):
                cost = prices.of(span)
                seconds = cost.price_s + (prices.waits_s(span, 1) if last == "offload" else 0.0)
                kept = cost.kept_bytes + (lent if span.fate not in AWAY else 0)
                after = (span.end, span.fate, last if span.end == start + 1 else "")
                found[after] += [
                    (before_s + seconds, held + kept)
                    for before_s, held in _unbeaten(beginnings)
                    if held + pending + cost.need_bytes <= budget
                ]
    ends = [seconds for (place, _, _), whole in found.items() if place == len(links) for seconds, _ in whole]
    return min(ends, default=None)


def _unbeaten(pairs: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the pairs for which no other one is as little in both numbers."""
    kept: list[tuple[float, int]] = []
    for pair in sorted(pairs):
        if not kept or pair[1] < kept[-1][1]:
            kept.append(pair)
    return kept


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
def test_a_search_that_rounds_nothing_finds_nothing_better(length: int) -> None:
    random = Random(length)
    compared = 0
    for _ in range(4):
        chain = _chain(random, length, cpu=random.random() < 0.5)
        prices = Prices(chain)
        budget = int(_spread(prices) * random.choice([0.3, 0.45, 0.6, 0.8]))
        oracle = _least_s(prices, budget)
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


def test_a_last_link_that_the_next_one_holds_is_not_computed_again() -> None:
    links = (Link(1.0, 2.0, 100, 10), Link(3.0, 4.0, 20, 20, spared=True), Link(5.0, 6.0, 30, 0))
    prices = Prices(ChainCosts(links=links, host_bps=1.0, call_s=0.5))
    found = [prices.of(FateSpan(0, end, "recompute")) for end in (1, 2, 3)]
    assert [one.price_s for one in found] == [1.5, 1.5, 9.5]
    assert [one.backward_s for one in found] == [3.0, 7.0, 21.0]


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


def test_a_transfer_is_waited_for_where_one_that_hides_needs_too_much() -> None:
    links = tuple(Link(1.0, 2.0, 100, 10, 0, 50) for _ in range(6))
    chain = ChainCosts(links=links, host_bps=1000.0)
    loose, tight = (least_budget(chain, ("keep", fate)) for fate in ("offload", "swap"))
    assert loose == pytest.approx(260, abs=4)  # all of a link, of the one before it, and what that has lent
    assert tight == pytest.approx(160, abs=4)  # of the one before it only what the link reads
    for budget, fates in ((265, {"keep", "offload"}), (255, {"keep", "offload", "swap"}), (165, {"keep", "swap"})):
        spans = choose_fates(chain, budget, ("keep", "offload", "swap"))
        assert spans is not None
        assert {span.fate for span in spans} == fates
    waits = outcome(Prices(chain), tuple(FateSpan(n, n + 1, "swap" if n < 5 else "keep") for n in range(6))).extra_s
    assert waits == pytest.approx(5 * 2 * 100 / 1000.0)


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
