"""Costs and memory of a chain's spans under each activation policy, in the model of :mod:`onebox.plan.policies.solver`.
Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from onebox.plan.model.stage import OFFLOADING_POLICIES
from onebox.plan_names import ACTIVATION_POLICIES, ChainPolicy

NEIGHBOUR_STATES = range(5)
"""State of the two spans before a span, as far as it affects that span's memory: neither has a policy in
:data:`OFFLOADING_POLICIES`; the one before it is offloaded, and the one before that is not, or is; it is swapped, and
the one before that is not offloaded, or is."""
_NEITHER, _OFFLOADED, _BOTH, _SWAPPED, _BEHIND_OFFLOADED = NEIGHBOUR_STATES


class ChainLink(NamedTuple):
    """A part of a chain that is never cut, for one micro-batch.

    Args:
        forward_s: Seconds of forward on the device.
        backward_s: Seconds of backward, recomputation aside.
        saved_bytes: Of what its forward makes, what a backward reads.
        boundary_bytes: What crosses its end and is needed later; 0 at the end of the chain.
        forward_work_bytes: Needed beyond those while forward runs.
        backward_work_bytes: Needed beyond those while backward runs, gradients included.
        cpu_forward_s: Seconds of forward on the host's processor; ``None`` if it cannot be there.
        cpu_backward_s: Seconds of backward there.
        spared: Whether every tensor saved for its backward is also saved for the backward of the next link: at the end
            of a span it is not recomputed.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    boundary_bytes: int
    forward_work_bytes: int = 0
    backward_work_bytes: int = 0
    cpu_forward_s: float | None = None
    cpu_backward_s: float = 0.0
    spared: bool = False


class PolicySpan(NamedTuple):
    """Consecutive links with one activation policy.

    Args:
        start: The first link.
        end: The link after the last one.
        policy: The policy.
    """

    start: int
    end: int
    policy: ChainPolicy


@dataclass(frozen=True, kw_only=True)
class ChainCosts:
    """A chain with the costs that all its links share.

    Args:
        links: In the order of forward.
        host_bps: Bytes per second to the host, and back.
        in_flight: Micro-batches that the device holds at once.
        call_s: Seconds that a span costs beside its work: an action forward and one back.
        input_bytes: Bytes that cross into the first link.
        cpu_bps: Bytes per second to the host's processor for ``cpu`` spans, and back.
    """

    links: tuple[ChainLink, ...]
    host_bps: float
    in_flight: int = 1
    call_s: float = 0.0
    input_bytes: int = 0
    cpu_bps: float = float("inf")


class SpanCosts(NamedTuple):
    """Costs of a span under an activation policy.

    Args:
        price_s: Seconds beyond those of the plain chain, without waits.
        kept_bytes: Held from its forward to its backward.
        need_bytes: Peak bytes beyond those held before it.
        forward_s: Seconds of its forward: the window of a transfer to the host.
        backward_s: Seconds of its backward: the window of a transfer back.
    """

    price_s: float
    kept_bytes: int
    need_bytes: int
    forward_s: float
    backward_s: float


class PolicyCosts:
    """Costs of each span of a chain under each activation policy.

    Args:
        chain: The chain.
        allowed: The allowed activation policies.
    """

    def __init__(self, chain: ChainCosts, allowed: Collection[ChainPolicy] = ACTIVATION_POLICIES) -> None:
        self.chain, self.allowed = chain, frozenset(allowed)
        links = chain.links
        self._forward = _sums(link.forward_s for link in links)
        self._backward = _sums(link.backward_s for link in links)
        self._saved = [0, *accumulate(link.saved_bytes for link in links)]
        self._cpu_forward = _sums(link.cpu_forward_s or 0.0 for link in links)
        self._cpu_backward = _sums(link.cpu_backward_s for link in links)
        self._known: dict[PolicySpan, SpanCosts] = {}

    def spans(self, start: int) -> Iterator[PolicySpan]:
        """Yield the spans that may begin at a link."""
        links = self.chain.links
        on_cpu = "cpu" in self.allowed
        for end in range(start + 1, len(links) + 1):
            if "keep" in self.allowed:
                yield PolicySpan(start, end, "keep")
            if "recompute" in self.allowed:
                yield PolicySpan(start, end, "recompute")
            if end == start + 1 < len(links):
                yield from (PolicySpan(start, end, policy) for policy in ("offload", "swap") if policy in self.allowed)
            on_cpu = on_cpu and links[end - 1].cpu_forward_s is not None
            if on_cpu:
                yield PolicySpan(start, end, "cpu")

    def of(self, span: PolicySpan) -> SpanCosts:
        """Return the costs of a span."""
        if span not in self._known:
            self._known[span] = self._price(span)
        return self._known[span]

    def _price(self, span: PolicySpan) -> SpanCosts:
        start, end, policy = span
        links, call_s = self.chain.links, self.chain.call_s
        forward = self._forward[end] - self._forward[start]
        backward = self._backward[end] - self._backward[start]
        saved = self._saved[end] - self._saved[start]
        out = links[end - 1].boundary_bytes
        back = max(
            self._saved[place + 1] - self._saved[start] + links[place].backward_work_bytes
            for place in range(start, end)
        )
        if policy == "recompute":
            # In forward, a link has its input from within the span, and frees it at its end.
            ahead = max(
                links[place].saved_bytes
                + links[place].forward_work_bytes
                + (links[place - 1].boundary_bytes if place > start else 0)
                for place in range(start, end)
            )
            again = forward - (links[end - 1].forward_s if links[end - 1].spared else 0.0)
            return SpanCosts(call_s + again, out, max(ahead, back, out), forward, again + backward)
        if policy == "cpu":
            cpu_forward = self._cpu_forward[end] - self._cpu_forward[start]
            cpu_backward = self._cpu_backward[end] - self._cpu_backward[start]
            into = links[start - 1].boundary_bytes if start else self.chain.input_bytes
            travel = 2 * (into + out) / self.chain.cpu_bps
            price = call_s + cpu_forward + cpu_backward - forward - backward + travel
            return SpanCosts(price, out, 2 * out, cpu_forward, cpu_backward)
        ahead = max(
            self._saved[place + 1] - self._saved[start] + links[place].forward_work_bytes for place in range(start, end)
        )
        kept = saved if policy == "keep" else 0
        waits_s = 2 * saved / self.chain.host_bps if policy == "swap" else 0.0
        return SpanCosts(call_s + waits_s, kept, max(ahead, back), forward, backward)

    def waits_s(self, span: PolicySpan, before: int) -> float:
        """Return the seconds of an offloaded span's transfers that the next span does not hide.

        Args:
            span: The next span.
            before: As for :meth:`pending_bytes`.
        """
        if before not in (_OFFLOADED, _BOTH):
            return 0.0
        transfer_s = self.chain.links[span.start - 1].saved_bytes / self.chain.host_bps
        window = self.of(span)
        return max(0.0, transfer_s - window.forward_s) + max(0.0, transfer_s - window.backward_s)

    def lent_bytes(self, link: int) -> int:
        """Return the bytes of an offloaded link that the next span reads."""
        return min(self.chain.links[link].saved_bytes, self.chain.links[link].boundary_bytes)

    def pending_bytes(self, start: int, before: int) -> int:
        """Return the bytes that offloaded spans still hold during the forward and the backward of a span.

        Args:
            start: Start of the span.
            before: State before it: one of :data:`NEIGHBOUR_STATES`.
        """
        if before in (_OFFLOADED, _BOTH):
            pending = self.chain.links[start - 1].saved_bytes
        else:
            pending = self.lent_bytes(start - 1) if before != _NEITHER else 0
        return pending + (self.lent_bytes(start - 2) if before in (_BOTH, _BEHIND_OFFLOADED) else 0)

    def kept_bytes(self, span: PolicySpan, before: int) -> int:
        """Return the bytes held for the backward after a span's forward, beyond those held before.

        Args:
            span: The span.
            before: As for :meth:`pending_bytes`.
        """
        stays = self.lent_bytes(span.start - 1) if before != _NEITHER and span.policy not in OFFLOADING_POLICIES else 0
        return self.of(span).kept_bytes + stays


class ChainOutcome(NamedTuple):
    """Totals of a chain's spans.

    Args:
        extra_s: Seconds of a micro-batch beyond those of the plain chain.
        peak_bytes: Peak bytes beyond the permanent ones.
        held_bytes: Bytes that a micro-batch holds between its forward and its backward.
    """

    extra_s: float
    peak_bytes: int
    held_bytes: int


def chain_outcome(prices: PolicyCosts, spans: Sequence[PolicySpan]) -> ChainOutcome:
    """Return the totals of spans, without rounding.

    Args:
        prices: Costs of spans.
        spans: Spans of the whole chain, in order.
    """
    held = peak = beside = 0
    extra = 0.0
    for span in spans:
        cost = prices.of(span)
        peak = max(peak, held + prices.pending_bytes(span.start, beside) + cost.need_bytes)
        extra += cost.price_s + prices.waits_s(span, beside)
        held += prices.kept_bytes(span, beside)
        beside = next_neighbour_state(beside, span)
    return ChainOutcome(extra, peak + (prices.chain.in_flight - 1) * held, held)


def _sums(values: Iterator[float]) -> list[float]:
    return [0.0, *accumulate(values)]


def next_neighbour_state(before: int, span: PolicySpan) -> int:
    """Return the state after a span, one of :data:`NEIGHBOUR_STATES`, from the state before it."""
    offloaded = before in (_OFFLOADED, _BOTH)
    if span.policy == "offload":
        return _BOTH if offloaded else _OFFLOADED
    if span.policy == "swap":
        return _BEHIND_OFFLOADED if offloaded else _SWAPPED
    return _NEITHER
