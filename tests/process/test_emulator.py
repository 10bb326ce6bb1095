"""The emulator does not drift: the same program has the same messages on CPU workers and on emulated devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace

import onebox
from onebox.engine.compile import offload
from onebox.plan import ActivationPolicy, Plan
from onebox.pool.client import loop
from onebox.wire import decode_envelope, encode
from onebox.wire.protocol.requests import Define, OptimizerSpec, StoredProgram
from onebox.wire.protocol.responses import Digest, Reply, Scalars
from tests.kit.models import CASES
from tests.kit.stages import staged
from tests.recorded.traffic import recorded

STEPS = 3


class Said(NamedTuple):
    """The messages to and from one worker, each way in their order: encoded, with the frames or their sizes."""

    told: list[tuple[bytes, ...]]
    answered: list[tuple[bytes, list[int]]]


def without_cost(instruction: Any) -> Any:
    """Return an instruction without the times that only an emulated device is told."""
    if isinstance(instruction, Define) and isinstance(instruction.what, StoredProgram | OptimizerSpec):
        return replace(instruction, what=replace(instruction.what, cost_s=0.0))
    return instruction


def without_values(reply: Reply) -> Reply:
    """Return a reply without the values and times that an emulated device does not share."""
    results = [
        Scalars((0.0,) * len(result.values))
        if isinstance(result, Scalars)
        else Digest(bytes(len(result.value)))
        if isinstance(result, Digest)
        else result
        for result in reply.results
    ]
    messages = tuple(replace(each, start_ns=0, end_ns=0, waited_ns=0) for each in reply.messages)
    return replace(reply, results=tuple(results), times_ns=(0,) * len(reply.times_ns), messages=messages)


def spoken(spec: str, train: Callable[[onebox.Pool], None], monkeypatch: pytest.MonkeyPatch) -> list[Said]:
    """Train on a pool; return what was said to and by each of its workers."""
    replies: list[tuple[Reply, list[int]]] = []
    decode = loop.decode_worker_message

    def heard(parts: Sequence[Any]) -> Any:
        message, frames = decode(parts)
        if isinstance(message, Reply) and message.number:
            replies.append((message, [len(frame) for frame in frames]))
        return message, frames

    with recorded() as traffic, monkeypatch.context() as patch, onebox.open(spec, threads=1, memory="64MiB") as pool:
        patch.setattr(loop, "decode_worker_message", heard)
        train(pool)
    found = []
    for sent in traffic.messages():
        envelopes = [decode_envelope(parts) for parts in sent]
        numbers = {envelope.number for envelope, _ in envelopes}
        told = []
        for envelope, frames in envelopes:
            plain = replace(envelope, instructions=tuple(map(without_cost, envelope.instructions)))
            told.append((encode(plain), *map(bytes, frames)))
        own = [(reply, sizes) for reply, sizes in replies if reply.number in numbers]
        for reply, _ in own:
            assert all(begin <= end for begin, end in zip(reply.times_ns[::2], reply.times_ns[1::2], strict=True))
            assert all(one <= next_ for one, next_ in pairwise(reply.times_ns[::2])), "one instruction after the other"
        if told and own:
            found.append(Said(told, [(encode(without_values(reply)), sizes) for reply, sizes in own]))
    return found


def with_policy(plan: Plan, policy: ActivationPolicy) -> Plan:
    """Return a plan whose stages have one policy of activations."""
    return replace(plan, stages=tuple(replace(stage, policy=policy) for stage in plan.stages))


PLANS = {
    "replicas": onebox.DataParallel(micro_batch=4),
    "stages": staged("mlp", (0, 1), micro_batch=4),
    "late": staged("mlp", (0, 1), micro_batch=4, schedule="async-1f1b"),
    "swapped": with_policy(staged("mlp", (0, 1), micro_batch=4), "swap"),
}


@pytest.mark.feature("Plans: Rehearse with emulated devices")
@pytest.mark.parametrize("plan", list(PLANS))
def test_the_same_program_has_the_same_messages_bytes_and_order(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)

    def train(pool: onebox.Pool) -> None:
        case = CASES["mlp"]
        torch.manual_seed(0)
        model = case.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        options: dict[str, Any] = (
            {"stale": onebox.StaleGradients(correction="predict", warm_up=1)} if plan == "late" else {}
        )
        options["loss_reduction"] = "mean"  # or a CPU's losses are looked at, whether they are means
        with onebox.Trainer(
            model, case.loss, optimizer, pool=pool, plan=PLANS[plan], clip_grad_norm=1.0, **options
        ) as trainer:
            for batch in case.batches([8] * STEPS):
                trainer.step(*batch).item()
            trainer.wait()
            trainer.memory()

    cpu, sim = (spoken(spec, train, monkeypatch) for spec in ("cpu*2", "sim*2"))
    assert len(cpu) == len(sim) == 2
    for one, other in zip(cpu, sim, strict=True):
        assert one.told == other.told
        assert one.answered == other.answered
