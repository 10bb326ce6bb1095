"""The fuzzer of operators: it finds the faults that PyTorch is known to have, and none that the worker lets through."""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))

import operator_fuzz
from guarded_memory import Arena, Image, ordinary, span_of
from operator_calls import Call, base_calls, random_call
from operator_mutations import mutate
from racing_peer import Peer, Place

from onebox.wire import Many, SlotArgument
from tests.kit.waiting import until

UNWRITTEN = "aten.empty.memory_format"
OUTSIDE = (
    "aten.adaptive_max_pool2d_backward.default",
    "aten.max_pool2d_with_indices_backward.default",
    "aten._convert_indices_from_coo_to_csr.default",
)

SOUND = (
    "aten.index_select.default",
    "aten.gather.default",
    "aten.scatter.src",
    "aten.embedding.default",
    "aten.convolution.default",
    "aten.native_layer_norm.default",
    "aten.cat.default",
    "aten.sum.dim_IntList",
    "aten.addmm.default",
    "aten._softmax.default",
)
"""Operators that check their arguments themselves."""

RACED = (
    "aten.max_pool2d_with_indices_backward.default",
    "aten.multilabel_margin_loss_forward.default",
    "aten.masked_scatter_backward.default",
    "aten.index_put_.default",
    "aten.searchsorted.Tensor",
    "aten.gather.default",
)

FLOATS = Image("float32", (2, 3), (3, 1), bytes(range(24)))


def fuzzed(*names: str, calls: int, options: tuple[str, ...] = ()) -> dict[str, Any]:
    """Fuzz some operators, or all, in one process."""
    only = [part for name in names for part in ("--only", name)]
    return operator_fuzz.in_processes(["--no-database", "--seed", "5", "--calls", str(calls), *options, *only], 1)


def test_without_the_checks_of_a_worker_it_finds_known_faults() -> None:
    """A fuzzer that finds nothing proves nothing."""
    found = fuzzed(UNWRITTEN, *OUTSIDE, calls=600, options=("--direct", "--patience", "2"))
    by_kind = found["operators"]
    assert f"{UNWRITTEN} (direct)" in by_kind["foreign_reads"], found
    faulty = {name for kind in ("crashes", "canaries_changed", "foreign_reads") for name in by_kind.get(kind, {})}
    assert faulty >= {f"{name} (direct)" for name in OUTSIDE}, found
    assert found["crashes"] > 0, found


def test_through_a_worker_it_finds_nothing_in_operators_that_are_sound() -> None:
    """In programs and in eager calls, alone and in blocks; faults that are not there would be as useless."""
    found = fuzzed(*SOUND, calls=1500)
    assert (found["crashes"], found["canaries_changed"], found["foreign_reads"]) == (0, 0, 0), found["operators"]
    assert found["calls"] == 1500
    assert found["computed"] > 400, found
    assert found["raised"] > 300, found


def test_what_another_process_changes_meanwhile_leads_nowhere() -> None:
    """Operators that trust their indices, that check them first, and that count before they write."""
    found = fuzzed(*RACED, calls=240, options=("--racing",))
    assert (found["crashes"], found["canaries_changed"], found["foreign_reads"]) == (0, 0, 0), found["operators"]
    assert found["computed"] > 50, found
    assert found["raised"] + found["refused"] > 50, found


def test_a_peer_changes_the_elements_that_it_is_told_and_no_others() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    memory[:24] = b"." * 24
    peer = Peer(memory)
    try:
        peer.change([Place(8, b"12345678"), Place(20, b"1234")])
        for part, values in ((slice(8, 16), [b"12345678", b"." * 8]), (slice(20, 24), [b"1234", b"...."])):
            for value in values:
                until(lambda part=part, value=value: memory[part] == value)
        peer.change([])
        assert memory[:24] == b"." * 24
    finally:
        peer.close()
    assert memory[24:] == bytes(mmap.PAGESIZE - 24)


@pytest.mark.parametrize("at_start", [False, True])
def test_what_is_written_beside_a_tensor_is_noticed(at_start: bool) -> None:
    arena = Arena((1, 1))
    images = [FLOATS, FLOATS]
    first, second = arena.place(images, 0, at_start)
    data = [image.data for image in images]
    assert arena.changed(data, frozenset()) == (0, [])
    second[1, 2] = 5
    assert arena.changed(data, frozenset()) == (0, [1])
    assert arena.changed(data, frozenset({1})) == (0, [])
    beside = first.data_ptr() + len(FLOATS.data) if at_start else first.data_ptr() - 1
    ctypes.memset(beside, 0, 1)
    assert arena.changed(data, frozenset({1})) == (1, [])


def test_tensors_hold_what_their_images_say() -> None:
    gaps = Image("int64", (2, 2), (4, 2), b"".join(number.to_bytes(8, "little") for number in range(7)))
    empty = Image("float64", (0, 3), (3, 1), b"")
    one, none, floats = Arena((1, 1, 1)).place([gaps, empty, FLOATS], 1, False)
    assert one.tolist() == [[0, 2], [4, 6]]
    assert none.shape == (0, 3)
    assert bytes(floats.contiguous().view(torch.uint8).numpy().tobytes()) == FLOATS.data
    assert span_of(gaps.shape, gaps.strides) == 7


def test_a_tensor_may_lie_in_the_memory_of_another() -> None:
    whole = Image("float32", (8,), (1,), bytes(32))
    call = Call("aten.add.Tensor", (SlotArgument(0), SlotArgument(1)), {}, (FLOATS, whole))
    found = [operator_fuzz.shared_memory(call, round_, 0) for round_ in range(500)]
    shared = [one for one in found if one is not None]
    assert {(one.inner, one.outer, one.start) for one in shared} == {(0, 1, 0), (0, 1, 1), (0, 1, 2)}
    tensors = Arena((1, 1)).place([FLOATS, whole], 0, False)
    operator_fuzz.Shared(0, 1, 2).place(tensors)
    tensors[0].fill_(1.0)
    assert tensors[1].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]


def test_results_in_a_list_beside_others_are_compared_as_well() -> None:
    number = Image("float32", (), (), bytes(4))
    values = Many((SlotArgument(0),))
    call = Call(
        "aten._amp_foreach_non_finite_check_and_unscale.default",
        (values, SlotArgument(1), SlotArgument(2)),
        {},
        (FLOATS, number, number),
    )
    made = operator_fuzz.Programs().first(call, [ordinary(image) for image in call.images], 1)
    assert [one.shape for one in made] == [(2, 3), ()]


def test_a_call_can_be_made_again() -> None:
    name = "aten._embedding_bag.default"
    base = base_calls([name], database=False)[name]

    def made(seed: int) -> list[Any]:
        rng = random.Random(seed)
        return [mutate(base, rng) for _ in range(20)]

    assert made(1) == made(1) != made(2)
    assert random_call(name, random.Random(3)) == random_call(name, random.Random(3))


def test_places_outside_of_tensors_are_tried() -> None:
    indices = Image("int64", (3,), (1,), bytes(24))
    call = Call("aten.index_select.default", (SlotArgument(0), 0, SlotArgument(1)), {}, (FLOATS, indices))
    rng, tried = random.Random(0), set()
    for _ in range(1000):
        for image in mutate([call], rng).images:
            if image.dtype == "int64":
                tried |= (
                    set(torch.frombuffer(bytearray(image.data), dtype=torch.int64).tolist()) if image.data else set()
                )
    assert tried >= {2, 3, 4, -3, -4, 6, 7, -7, 1 << 31, 1 << 40, -(1 << 40)}


def test_it_finds_nothing_in_operators_whose_kind_needs_no_rules() -> None:
    found = fuzzed(calls=1600, options=("--kind", "all"))
    assert (found["crashes"], found["canaries_changed"], found["foreign_reads"]) == (0, 0, 0), found["operators"]
    assert found["calls"] == 1600
    assert found["computed"] > 300, found


@pytest.mark.parametrize("seed", range(3))
def test_mutations_use_all_the_tensors_that_they_bring(seed: int) -> None:
    """The worker refuses a call that brings a tensor for nothing, so that nothing would be tried."""
    rng = random.Random(seed)
    base = [random_call("aten.cat.default", rng), random_call("aten.addmm.default", rng)]
    for _ in range(200):
        call = mutate(base, rng)
        kernel, _ = operator_fuzz.kernel_of(call, (), holes=False)
        used = set()
        for value in (*kernel.args, *kernel.kwargs.values()):
            for item in getattr(value, "items", (value,)) if not isinstance(value, str) else ():
                used.add(getattr(item, "index", None))
        assert used - {None} == set(range(len(call.images)))
