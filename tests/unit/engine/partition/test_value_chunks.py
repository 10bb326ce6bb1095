"""Which values leave in chunks, and when the simulator is told that they leave."""

from __future__ import annotations

import functools

import torch
from msgspec.structs import replace
from torch import nn

from onebox.engine.partition.phase_programs import PhasePrograms
from onebox.engine.partition.value_chunks import choose_chunks
from onebox.graph import ModelPrograms, Phase, TracedModel
from onebox.plan import ASYNC, Links, Plan, Prediction, Stage
from tests.kit.captures import capture

SAMPLES, WIDE, NARROW = 16, 4096, 8


@functools.cache
def traced() -> TracedModel:
    layers = nn.Sequential(nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW), nn.Linear(NARROW, NARROW))
    batch = torch.zeros(SAMPLES, NARROW), torch.zeros(SAMPLES, NARROW)
    return TracedModel(capture(layers, nn.functional.mse_loss, batch), backward=True, halves=True)


@functools.cache
def programs() -> ModelPrograms:
    names = traced().segments
    return traced().divide([names[:1], names[1:2], names[2:]])


def plan_of(seconds: float = 0.01, devices: tuple[int, ...] = (0, 1, 2)) -> Plan:
    names = traced().segments
    stages = [names[:1], names[1:2], names[2:]]
    return Plan(
        stages=tuple(
            Stage(segments=own, replicas=((device,),), shares=(1.0,))
            for own, device in zip(stages, devices, strict=True)
        ),
        micro_batch=SAMPLES,
        predicted=Prediction(
            batch=SAMPLES,
            step_s=1.0,
            bubble=0.0,
            peak_bytes=(1,) * len(set(devices)),
            stages_s=((seconds,) * 3,) * 3,
        ),
    )


def links(bandwidth_bps: float) -> Links:
    every = {a: dict.fromkeys(range(3), bandwidth_bps) for a in range(3)}
    return Links(latency_s={a: dict.fromkeys(range(3), 0.0) for a in range(3)}, bandwidth_bps=every)


def test_only_what_travels_long_and_is_made_long_leaves_in_chunks() -> None:
    size_bytes = SAMPLES * WIDE * 4
    found = choose_chunks(programs(), plan_of(), SAMPLES, links(size_bytes / 0.01))
    assert {phase for phase in found if phase.stage == 0} == {Phase(0, "F")}
    assert {phase.kind for phase in found if phase.stage == 1} == {"B", "I"}, "the gradient, made whole or in halves"
    assert not [phase for phase in found if phase.stage == 2], "a narrow value"
    (first,) = (choice for phase, choice in found.items() if phase.stage == 0)
    assert sum(first.samples) == sum(first.rows) == SAMPLES
    assert not first.keep
    assert len({choice.samples for phase, choice in found.items() if phase.stage == 1}) == 1
    assert choose_chunks(programs(), plan_of(), SAMPLES, links(size_bytes / 1e-5)) == {}
    assert choose_chunks(programs(), plan_of(1e-5), SAMPLES, links(size_bytes / 0.01)) == {}
    assert choose_chunks(programs(), replace(plan_of(), predicted=None), SAMPLES, links(1e3)) == {}


def test_pipelines_that_are_deep_enough_for_their_messages_send_them_whole() -> None:
    known = links(SAMPLES * WIDE * 4 / 0.01)
    late = replace(plan_of(), schedule=ASYNC)
    assert choose_chunks(programs(), late, SAMPLES, known) == choose_chunks(programs(), plan_of(), SAMPLES, known) != {}
    assert choose_chunks(programs(), replace(late, in_flight=(0, 0, 0)), SAMPLES, known) != {}
    assert choose_chunks(programs(), replace(late, in_flight=(5, 3, 1)), SAMPLES, known) == {}


def test_links_of_which_nothing_is_known_are_those_of_ten_gigabits() -> None:
    assert choose_chunks(programs(), plan_of(), SAMPLES, None) == {}  # 0.2 ms


def test_a_value_that_its_own_device_reads_is_put_together() -> None:
    found = choose_chunks(programs(), plan_of(devices=(0, 1, 0)), SAMPLES, links(1e6))
    assert not found[Phase(0, "F")].keep, "the second stage alone reads it, on another device"
    assert not found.get(Phase(1, "F")) or not found[Phase(1, "F")].keep


def test_smaller_micro_batches_have_no_more_chunks_than_samples() -> None:
    small = choose_chunks(programs(), plan_of(1.0), SAMPLES, links(1e5))
    assert all(min(choice.samples) >= 1 for choice in small.values())
    assert choose_chunks(programs(), plan_of(1.0), 1, links(1e5)) == {}


def test_parts_are_made_once() -> None:
    whole = PhasePrograms(programs(), plan_of(), links=links(SAMPLES * WIDE * 4 / 0.01))
    parts = whole.in_chunks(SAMPLES)
    assert parts is whole.in_chunks(SAMPLES)
