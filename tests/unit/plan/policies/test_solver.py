"""The choice of policies against two oracles: every division of a short chain, and a search of a longer one
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

from onebox.plan.model.stage import OFFLOADING_POLICIES
from onebox.plan.policies.policy_costs import ChainCosts, ChainLink, PolicyCosts, PolicySpan, chain_outcome
from onebox.plan.policies.solver import choose_policies, least_budget
from onebox.plan_names import ACTIVATION_POLICIES

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
            ChainLink(
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


def _divisions(prices: PolicyCosts, start: int = 0) -> Iterator[tuple[PolicySpan, ...]]:
    """Yield every division of a chain into spans with policies."""
    if start == len(prices.chain.links):
        yield ()
        return
    for span in prices.spans(start):
        for rest in _divisions(prices, span.end):
            yield (span, *rest)


def _least_s(prices: PolicyCosts, budget: int) -> float | None:
    """Return the least seconds of all divisions of a chain, for one micro-batch; nothing if none fits.

    The model is written out here once more. Beginnings of divisions are extended link by link; of those that end at
    the same place after the same two policies, only such are kept as no other one beats in seconds and in bytes.

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
            lent = prices.lent_bytes(start - 1) if last in OFFLOADING_POLICIES else 0
            pending = links[start - 1].saved_bytes if last == "offload" else lent
            if last in OFFLOADING_POLICIES and behind == "offload":
                pending += prices.lent_bytes(start - 2)
            for span in prices.spans(start):
                cost = prices.of(span)
                seconds = cost.price_s + (prices.waits_s(span, 1) if last == "offload" else 0.0)
                kept = cost.kept_bytes + (lent if span.policy not in OFFLOADING_POLICIES else 0)
                after = (span.end, span.policy, last if span.end == start + 1 else "")
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


def _spread(prices: PolicyCosts) -> int:
    """Return a budget between what the chain can do with and what it takes when all is kept."""
    return chain_outcome(prices, (PolicySpan(0, len(prices.chain.links), "keep"),)).peak_bytes


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 5), part=st.floats(0.1, 1.1), in_flight=st.integers(1, 3))
def test_no_division_of_a_short_chain_is_better(seed: int, length: int, part: float, in_flight: int) -> None:
    chain = _chain(Random(seed), length, in_flight=in_flight)
    prices = PolicyCosts(chain)
    budget = int(_spread(prices) * part)
    chosen = choose_policies(chain, budget, buckets=_FINE)
    fitting = [found for spans in _divisions(prices) if (found := chain_outcome(prices, spans)).peak_bytes <= budget]
    if chosen is None:
        # With several micro-batches in flight, totals are guessed, each a twelfth of what they may hold.
        slack = 1 - 0.01 - (0.1 if in_flight > 1 else 0.0)
        assert not [found for found in fitting if found.peak_bytes <= budget * slack]
        return
    got = chain_outcome(prices, chosen)
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
        prices = PolicyCosts(chain)
        budget = int(_spread(prices) * random.choice([0.3, 0.45, 0.6, 0.8]))
        oracle = _least_s(prices, budget)
        chosen = choose_policies(chain, budget, buckets=_FINE)
        if oracle is None:
            assert chosen is None
            continue
        assert chosen is not None
        compared += 1
        got, plain = chain_outcome(prices, chosen).extra_s, _plain_s(chain)
        assert got >= oracle - 1e-6  # else the oracle would be wrong
        assert got <= oracle + 1e-6
        assert plain + got <= 1.05 * (plain + oracle)
        coarse = choose_policies(_million_fold(chain), budget * 10**6)
        assert coarse is not None or choose_policies(chain, int(0.99 * budget)) is None
        if coarse is not None:
            assert plain + chain_outcome(prices, coarse).extra_s <= 1.05 * (plain + oracle)
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
    links = (ChainLink(1.0, 2.0, 100, 10), ChainLink(3.0, 4.0, 20, 20, spared=True), ChainLink(5.0, 6.0, 30, 0))
    prices = PolicyCosts(ChainCosts(links=links, host_bps=1.0, call_s=0.5))
    found = [prices.of(PolicySpan(0, end, "recompute")) for end in (1, 2, 3)]
    assert [one.price_s for one in found] == [1.5, 1.5, 9.5]
    assert [one.backward_s for one in found] == [3.0, 7.0, 21.0]


def test_what_fits_is_kept() -> None:
    chain = _chain(Random(3), 8, cpu=False)
    assert choose_policies(chain, _spread(PolicyCosts(chain))) == (PolicySpan(0, 8, "keep"),)


def test_few_spans_win_where_they_are_as_good() -> None:
    links = tuple(ChainLink(1.0, 2.0, 100, 10) for _ in range(9))
    spans = choose_policies(ChainCosts(links=links, host_bps=1.0, call_s=1e-3), 420, ("keep", "recompute"))
    assert spans is not None
    assert len(spans) <= 4


def test_a_transfer_that_hides_beats_computing_again_and_one_that_does_not_loses() -> None:
    links = tuple(ChainLink(1.0, 2.0, 100, 10) for _ in range(6))
    for bandwidth, policy in ((1000.0, "offload"), (5.0, "recompute")):
        spans = choose_policies(ChainCosts(links=links, host_bps=bandwidth), 450)
        assert spans is not None
        assert {span.policy for span in spans} == {"keep", policy}


def test_a_transfer_is_waited_for_where_one_that_hides_needs_too_much() -> None:
    links = tuple(ChainLink(1.0, 2.0, 100, 10, 0, 50) for _ in range(6))
    chain = ChainCosts(links=links, host_bps=1000.0)
    loose, tight = (least_budget(chain, ("keep", policy)) for policy in ("offload", "swap"))
    assert loose == pytest.approx(260, abs=4)  # all of a link, of the one before it, and what that has lent
    assert tight == pytest.approx(160, abs=4)  # of the one before it only what the link reads
    for budget, policies in ((265, {"keep", "offload"}), (255, {"keep", "offload", "swap"}), (165, {"keep", "swap"})):
        spans = choose_policies(chain, budget, ("keep", "offload", "swap"))
        assert spans is not None
        assert {span.policy for span in spans} == policies
    waits = chain_outcome(
        PolicyCosts(chain), tuple(PolicySpan(n, n + 1, "swap" if n < 5 else "keep") for n in range(6))
    ).extra_s
    assert waits == pytest.approx(5 * 2 * 100 / 1000.0)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_a_least_budget_is_enough_and_little_less_is_not(seed: int) -> None:
    chain = _chain(Random(seed), 6)
    least = least_budget(chain)
    assert choose_policies(chain, least, buckets=300) is not None
    assert choose_policies(chain, int(least * 0.98) - 1, buckets=300) is None


def test_only_what_is_allowed_is_chosen() -> None:
    chain = _chain(Random(5), 7)
    budget = int(_spread(PolicyCosts(chain)) * 0.7)
    for policies in product(ACTIVATION_POLICIES, repeat=2):
        spans = choose_policies(chain, budget, policies)
        assert spans is None or {span.policy for span in spans} <= set(policies)
