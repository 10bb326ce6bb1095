"""The lease service: turns decisions about leases into starts and ends of workers, messages to clients and journal
lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial

from onebox.agent.admission import explain_invalid
from onebox.agent.leases import Client, Decision, Dequeue, End, Grant, Leases, Refuse, Wait
from onebox.agent.reporter import LogValue, Reporter
from onebox.agent.sessions import SessionFaultIsolator
from onebox.agent.workers import (
    ClientImportsAlone,
    LeaseClosed,
    LeasedWorkerExited,
    LeaseEvent,
    LeaseNotStarted,
    LeaseReady,
    Workers,
)
from onebox.reaping import LEFT_BEHIND
from onebox.wire.protocol.agents import (
    AgentResponse,
    Done,
    Lease,
    Leased,
    LeaseEnded,
    Queued,
    Refused,
    Release,
    WorkerEnded,
)

RELEASE_S = 1.0
"""How long workers of a released lease may take to end by themselves, as their client requests."""

_EVENTS = {"released": "released", "silent": "expired", "time": "timed-out", "failed": "start-failed"}
"""The journal's event for the end of a lease, by its cause."""


class LeaseService:
    """Carries out lease requests.

    Args:
        leases: State of the leases.
        workers: The workers of all leases.
        send: Function that sends a message to a session.
        report: Sink of events.
    """

    def __init__(
        self, leases: Leases, workers: Workers, send: Callable[[Client, AgentResponse, float], None], report: Reporter
    ) -> None:
        self._leases = leases
        self._workers = workers
        self._send = send
        self._report = report
        self.guard = SessionFaultIsolator(report, self._part)
        self._asked: dict[tuple[Client, int], Lease] = {}
        self._granted: dict[int, Grant] = {}
        self._ready: dict[int, Leased] = {}
        self._releasing: dict[int, list[tuple[Client, int]]] = {}
        self._parting: dict[tuple[int, int], list[tuple[Client, int]]] = {}

    # ---- requests of clients

    def lease(self, client: Client, request: Lease, now_s: float) -> None:
        """Handle a request for devices."""
        wrong = explain_invalid(request)
        if wrong is not None:
            self._apply([Refuse(client, request.number, "usage", wrong)], now_s)
            return
        for lease, grant in self._granted.items():  # repeated request: the answer was lost, or does not exist yet
            if (grant.client, grant.number) == (client, request.number):
                if lease in self._ready:
                    self._send(client, self._ready[lease], now_s)
                return
        self._asked[client, request.number] = request
        decisions = self._leases.ask(
            client, request.number, request.wants, grace_s=request.grace_s, wait=request.wait, now_s=now_s
        )
        self._apply(decisions, now_s)

    def release(self, client: Client, request: Release, now_s: float) -> None:
        """End a lease or a worker of it, or cancel a request."""
        lease = request.lease
        if not lease:
            left = self._leases.leave(client, request.request, now_s)
            if left is not None:
                self._asked.pop((client, request.request), None)
                self._record("left", client, now_s)
                self._send(client, Done(request.number), now_s)
                self._apply(left, now_s)
                return
            of_request = (key for key, g in self._granted.items() if (g.client, g.number) == (client, request.request))
            lease = next(of_request, 0)  # granted a moment ago
        grant = self._granted.get(lease)
        if grant is None or grant.client.key != client.key:
            why = f"you have no lease {lease}" if request.lease else f"no request {request.request} waits"
            self._send(client, Refused(request.number, "ended", f"{why}, or no longer"), now_s)
            return
        if request.worker is not None and self._workers.kill(lease, request.worker):
            self._parting.setdefault((lease, request.worker), []).append((client, request.number))
            return
        if request.worker is not None:
            self._send(client, Done(request.number), now_s)
            return
        self._releasing.setdefault(lease, []).append((client, request.number))
        self._apply(self._leases.release(client, lease), now_s)

    # ---- time

    def tick(self, now_s: float) -> None:
        """End the leases that are over."""
        self._apply(self._leases.tick(now_s), now_s)
        self._report_left()

    def attend(self, ready: Set[int], now_s: float) -> None:
        """Process the workers' events.

        Args:
            ready: The descriptors that are readable.
            now_s: The time.
        """
        for news in self._workers.attend(ready, now_s):
            self._learn(news, now_s)
        self._report_zygotes(now_s)

    def close(self, why: str, now_s: float) -> None:
        """End all workers, and notify their clients."""
        for lease, grant in self._granted.items():
            self._send(grant.client, LeaseEnded(lease, why), now_s)
        self._workers.close()
        self._report_zygotes(now_s)
        self._report_left()

    def _report_zygotes(self, now_s: float) -> None:
        """Record which zygotes have ended."""
        for zygote in self._workers.ended_zygotes():
            self._report.dealing("zygote-ended", "", now_s, process=zygote.process, reason=zygote.why)

    def _report_left(self) -> None:
        """Record which processes were left behind, and which of them have ended."""
        for left in LEFT_BEHIND.news():
            self._report("process-reaped" if left.ended else "process-left", process=left.pid, what=left.name)

    # ---- decisions

    def _part(self, client: Client, why: str, now_s: float) -> None:
        """End all leases and requests of a session."""
        self._apply(self._leases.part(client, why, now_s), now_s)

    def _apply(self, decisions: Sequence[Decision], now_s: float) -> None:
        for decision in decisions:
            self.guard("lease", decision.client, partial(self._carry_out, decision, now_s), now_s)

    def _carry_out(self, decision: Decision, now_s: float) -> None:
        client = decision.client
        match decision:
            case Grant():
                self._start(decision, now_s)
            case Wait():
                place, behind, lacking = decision.place, decision.behind, decision.lacking
                self._record("queued", client, now_s, place=place, behind=behind, lacking=lacking)
                self._send(client, Queued(decision.number, place, behind, lacking), now_s)
            case Refuse():
                self._asked.pop((client, decision.number), None)
                self._report.refusal(
                    "lease-refused", client.name, now_s, client=client.name, kind=decision.kind, reason=decision.reason
                )
                self._send(client, Refused(decision.number, decision.kind, decision.reason), now_s)
            case End():
                self._end(decision, now_s)
            case Dequeue():
                self._asked.pop((client, decision.number), None)
                self._record("dropped", client, now_s, reason=decision.why)
                self._send(client, Refused(decision.number, "ended", decision.why), now_s)

    def _start(self, grant: Grant, now_s: float) -> None:
        """Start the workers of a lease."""
        asked = self._asked.pop((grant.client, grant.number))
        self._granted[grant.lease] = grant
        devices = ", ".join(share.device for share in grant.shares)
        self._record("leased", grant.client, now_s, lease=grant.lease, devices=devices)
        why = self._workers.start(grant.lease, grant.shares, grant.client.key, asked.key, asked.speed, now_s)
        if why is not None:
            self._learn(LeaseNotStarted(grant.lease, why), now_s)

    def _end(self, end: End, now_s: float) -> None:
        """End the workers of a lease, and notify its client unless the client ended it."""
        started = self._ready.pop(end.lease, None) is not None
        # workers that still start have no client that could ask them to end
        self._workers.end(end.lease, RELEASE_S if end.cause == "released" and started else 0.0, now_s)
        self._record(_EVENTS[end.cause], end.client, now_s, lease=end.lease, reason=end.why)
        if end.cause == "failed" and not started:
            self._send(end.client, Refused(self._granted[end.lease].number, "failed", end.why), now_s)
        elif end.cause != "released":
            self._send(end.client, LeaseEnded(end.lease, end.why), now_s)

    # ---- events of workers

    def _learn(self, news: LeaseEvent, now_s: float) -> None:
        grant = self._granted.get(news.lease)
        client = None if grant is None else grant.client
        self.guard("workers", client, lambda: self._take_in(news, grant, now_s), now_s)

    def _take_in(self, news: LeaseEvent, grant: Grant | None, now_s: float) -> None:
        """Handle an event of workers; for a lease whose start failed, only their end matters."""
        if isinstance(news, LeaseClosed):
            self._free(news, grant, now_s)
            return
        assert grant is not None
        client = grant.client
        match news:
            case LeaseReady():
                for started in news.workers:
                    self._record(
                        "worker-started",
                        client,
                        now_s,
                        lease=news.lease,
                        device=started.device,
                        process=started.process,
                    )
                self._ready[news.lease] = Leased(grant.number, news.lease, news.workers)
                self._send(client, self._ready[news.lease], now_s)
            case ClientImportsAlone():
                self._record("imports-alone", client, now_s, lease=news.lease, reason=news.why)
            case LeaseNotStarted():
                self._apply(self._leases.failed(news.lease, news.why), now_s)
            case LeasedWorkerExited():
                self._record(
                    "worker-left" if news.exit_status == 0 else "worker-ended",  # left: its client asked it to end
                    client,
                    now_s,
                    lease=news.lease,
                    device=grant.shares[news.worker].device,
                    exit_status=news.exit_status,
                )
                self._send(client, WorkerEnded(news.lease, news.worker, news.exit_status, news.last_words), now_s)
                self._apply(self._leases.worker_ended(news.lease, news.worker, now_s), now_s)
                for releaser, number in self._parting.pop((news.lease, news.worker), ()):
                    self._send(releaser, Done(number), now_s)

    def _free(self, news: LeaseClosed, grant: Grant | None, now_s: float) -> None:
        lease = news.lease
        self._granted.pop(lease, None)
        if grant is not None and news.left:
            processes = " ".join(map(str, news.left))
            self._record("processes-left", grant.client, now_s, lease=lease, processes=processes)
        if grant is not None:
            self._record("freed", grant.client, now_s, lease=lease)
        waiting = self._releasing.pop(lease, [])
        for key in [key for key in self._parting if key[0] == lease]:
            waiting += self._parting.pop(key)
        for releaser, number in waiting:
            self._send(releaser, Done(number), now_s)
        self._apply(self._leases.freed(lease, now_s), now_s)

    def _record(self, event: str, client: Client, now_s: float, **fields: LogValue) -> None:
        self._report.dealing(event, client.name, now_s, client=client.name, **fields)


__all__ = ["LeaseService"]
