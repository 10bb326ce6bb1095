"""Runs the tapes of all ranks of a group in lockstep, collectives done by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from onebox.graph import Port
from onebox.graph.shard.placements import PARTIAL, Partial, Placement, Replicate, shard_of
from onebox.graph.shard.search import AllGather, AllReduce, NamedTape, RankTape, Sharded
from onebox.wire import Program, spec_of
from onebox.worker.programs.interpreter import CompiledProgram
from onebox.worker.progress import WorkerProgress
from tests.unit.programs import CPU


def seed(position: int) -> None:
    """Seed a random operator by its position, as workers do."""
    torch.default_generator.manual_seed(1000 + position)


def unshard(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """Return the whole tensor from the shares of all ranks, in their order: the inverse of :func:`shard_of`."""
    if isinstance(placement, Replicate):
        return parts[0]
    if isinstance(placement, Partial):
        return torch.stack(list(parts)).sum(0)
    dim = placement.dim
    rows = [part.unflatten(dim, (placement.blocks, size)) for part, size in zip(parts, placement.sizes, strict=True)]
    return torch.cat(rows, dim + 1).flatten(dim, dim + 1)


def run_tape(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run a tape with the interpreter of workers, which checks the shapes of all that it makes the first time."""
    with torch.random.fork_rng(devices=[]):
        return CompiledProgram(program, CPU).run(list(inputs), seed, WorkerProgress())


def run_ranks(tapes: Sequence[RankTape], inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Run one tape on every rank.

    Args:
        tapes: The tape of each rank.
        inputs: The inputs of each rank.

    Returns:
        The outputs of each rank.
    """
    slots: list[dict[int, Tensor]] = [dict(enumerate(tensors)) for tensors in inputs]
    assert len({len(tape.steps) for tape in tapes}) == 1
    for step in zip(*(tape.steps for tape in tapes), strict=True):
        first = step[0]
        assert all(type(other) is type(first) for other in step)
        sources = [held[s.source] for held, s in zip(slots, step, strict=True) if not hasattr(s, "program")]
        if isinstance(first, AllReduce):
            total = torch.stack(sources).sum(0)
            for held, own in zip(slots, step, strict=True):
                assert own.spec == spec_of(total)
                held[own.target] = total.clone()
                del held[own.source]
        elif isinstance(first, AllGather):
            assert [spec_of(source) for source in sources] == list(first.parts)
            for held, own in zip(slots, step, strict=True):
                held[own.target] = torch.cat(sources, own.dim)
                assert own.spec == spec_of(held[own.target])
        else:
            for held, piece in zip(slots, step, strict=True):
                made = run_tape(piece.program, [held[slot] for slot in piece.inputs])
                held.update(zip(piece.outputs, made, strict=True))
    return [[held[slot] for slot in tape.outputs] for held, tape in zip(slots, tapes, strict=True)]


def compare(
    whole: Sequence[NamedTape], sharded: Sharded, given: Mapping[Port, Tensor], tolerance: float = 1e-10
) -> None:
    """Run tapes whole and shared, one after the other, and require that they compute the same.

    Args:
        whole: The tapes.
        sharded: The same, shared.
        given: Every input that no tape makes.
        tolerance: Relative to the largest element of each output.
    """
    known: dict[Port, Tensor] = dict(given)
    held: dict[Port, list[Tensor]] = {}
    for port, tensor in given.items():
        placement = sharded.placements.get(port, Replicate())
        held[port] = [shard_of(tensor, placement, rank) for rank in range(sharded.ranks)]
    for tape, ranks in zip(whole, sharded.tapes, strict=True):
        expected = run_tape(tape.program, [known[port] for port in tape.inputs])
        inputs = [[held[port][rank] for port in tape.inputs] for rank in range(sharded.ranks)]
        for tensors, own in zip(inputs, ranks, strict=True):
            assert [spec_of(tensor) for tensor in tensors] == list(own.inputs)
        made = run_ranks(ranks, inputs)
        for number, port in enumerate(tape.outputs):
            parts = [outputs[number] for outputs in made]
            placement = sharded.placements[port]
            assert placement != PARTIAL
            assert [spec_of(part) for part in parts] == [own.specs[number] for own in ranks]
            if isinstance(placement, Replicate):
                assert all(torch.equal(part, parts[0]) for part in parts), f"ranks have different {port}"
            close(unshard(parts, placement), expected[number], tolerance, port)
            known[port], held[port] = expected[number], parts


def close(made: Tensor, expected: Tensor, tolerance: float, port: Port) -> None:
    """Require equality up to the order of sums."""
    assert spec_of(made) == spec_of(expected)
    scale = float(expected.abs().max()) if expected.numel() and expected.is_floating_point() else 1.0
    torch.testing.assert_close(
        made, expected, rtol=0, atol=tolerance * max(1.0, scale), equal_nan=True, msg=lambda text: f"{port}: {text}"
    )
