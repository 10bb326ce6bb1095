"""What a rank that breaks the rules of shared memory can do to another one: it is lost, and nothing else happens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from onebox.errors import WireError
from onebox.wire import DTYPES, TensorSpec, overload
from onebox.wire.protocol.groups import FormGroup
from onebox.worker.comm.api import RankLost
from onebox.worker.comm.shm.layout import (
    CELL_BYTES,
    DIMENSIONS,
    FIRST_CELLS,
    HEADER,
    LEFT,
    NEXT_RETURNED,
    NUMBER,
    RETURNED,
    SENT,
    lane_start,
)
from onebox.worker.comm.shm.receiver import ShmReceiver
from onebox.worker.comm.shm.rendezvous import ShmPeers
from onebox.worker.comm.shm.segment import SharedMemory, supported
from onebox.worker.comm.shm.sender import ShmSender
from onebox.worker.memory.shared import LENT_STORAGES
from onebox.worker.sandbox.argument_checks import guarded
from tests.unit.ranks import MemoryGroup

pytestmark = pytest.mark.skipif(not supported(), reason="groups through shared memory need Linux on x86-64")

SMALL, LARGE = TensorSpec("float32", (4,)), TensorSpec("float32", (1, 1, 128, 128))
NEXT, OFFSET, TYPE, COUNT, SHAPE = 0, 4, 6, 7, 10


class Pair:
    """A sender and the receiver of its messages to rank 1."""

    def __init__(self) -> None:
        self.memory = SharedMemory.make()
        self.sender = ShmSender(self.memory, 2)
        self.receiver = ShmReceiver(self.memory, 0, 1, lambda rank, begin_s: None)

    def post(self, tensor: Tensor, spec: TensorSpec) -> None:
        """Send a tensor."""
        self.sender.post(1, 0, self.sender.write([tensor], tensor.nbytes), spec)

    def receive(self) -> Tensor:
        """Receive one."""
        expected = self.receiver.expect(0)
        expected.wait()
        return expected.take()


@pytest.mark.parametrize("spec", [SMALL, LARGE])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        (OFFSET, 1 << 46),
        (OFFSET, -2),
        (OFFSET, -(1 << 40)),
        (OFFSET, (1 << 36) - 8),
        (TYPE, len(DTYPES)),
        (TYPE, -1),
        (COUNT, -3),
        (COUNT, DIMENSIONS + 1),
        (SHAPE, -1),
        (SHAPE, 1 << 40),
        (SHAPE, (1 << 63) - 1),
        (NEXT, -8),
        (NEXT, 1 << 40),
        (NEXT, 4),
    ],
)
def test_no_field_of_a_header_leads_out_of_the_memory(field: int, value: int, spec: TensorSpec) -> None:
    pair = Pair()
    cell = lane_start(1) + FIRST_CELLS
    pair.post(torch.ones(spec.shape), spec)
    fields = list(HEADER.unpack_from(pair.memory.map, cell))
    fields[field] = value
    HEADER.pack_into(pair.memory.map, cell, *fields)
    for _ in range(2):
        with pytest.raises(RankLost, match="rank 0 has written the header"):
            pair.receive()


def test_more_messages_than_can_be_there_are_none() -> None:
    pair = Pair()
    pair.post(torch.ones(4), SMALL)
    pair.memory.words[lane_start(1) // 8 + SENT] = 1 << 60
    with pytest.raises(RankLost, match="has written 1152921504606846976 messages"):
        pair.receive()


def test_a_count_that_goes_back_ends_no_wait_and_no_bound_of_it() -> None:
    def give_up(rank: int, begin_s: float) -> None:
        raise RankLost("it did not come in time")

    pair = Pair()
    receiver = ShmReceiver(pair.memory, 0, 1, give_up)
    pair.memory.words[lane_start(1) // 8 + SENT] = -1
    expected = receiver.expect(0)
    with pytest.raises(RankLost, match="in time"):
        expected.wait()
    pair.memory.words[LEFT] = 1
    with pytest.raises(RankLost, match="has left"):
        expected.wait()


def returned(count: int, cell: int | None = None) -> Callable[[Pair], None]:
    """Return what writes a count of returned messages, and perhaps the next of their cells."""

    def write(pair: Pair) -> None:
        if cell is not None:
            tail = lane_start(1) + FIRST_CELLS + CELL_BYTES
            NUMBER.pack_into(pair.memory.map, tail + NEXT_RETURNED, cell)
        pair.memory.words[lane_start(1) // 8 + RETURNED] = count

    return write


@pytest.mark.parametrize("write", [returned(1 << 60), returned(1, 1 << 60), returned(1, -5), returned(1, 4096)])
def test_a_reader_returns_what_it_was_sent_and_nothing_else(write: Callable[[Pair], None]) -> None:
    pair = Pair()
    pair.post(torch.ones(4), SMALL)
    write(pair)
    with pytest.raises(RankLost, match="rank 1 has returned messages that it was not sent"):
        for _ in range(2):
            pair.post(torch.ones(4), SMALL)
    pair.sender.leave()
    assert not pair.sender.settle(), "it may still read"


def test_indices_are_in_memory_of_ones_own() -> None:
    pair = Pair()
    indices = torch.arange(1 << 14)
    pair.post(indices, TensorSpec("int64", (1 << 14,)))
    pair.post(torch.ones(1 << 14) > 0, TensorSpec("bool", (1 << 14,)))
    came, mask = pair.receive(), pair.receive()
    pair.memory.bytes[lane_start(2) :][: 1 << 20].fill_(1)
    assert torch.equal(came, indices)
    assert not LENT_STORAGES & {came.untyped_storage()._cdata, mask.untyped_storage()._cdata}


@pytest.mark.parametrize(
    ("name", "copied"),
    [
        ("aten.grid_sampler_2d_backward.default", True),
        ("aten.histc.default", True),
        ("aten.nonzero.default", True),
        ("aten.bincount.out", True),
        ("aten.unique_dim.out", True),
        ("aten.index_put_.default", True),
        ("aten.multilabel_margin_loss_forward.default", True),
        ("aten.masked_scatter_backward.default", True),
        ("aten.gather.default", True),
        ("aten.add.Tensor", False),
        ("aten.native_layer_norm.default", False),
    ],
)
def test_elements_that_lead_to_addresses_are_copied_before_they_are_checked(name: str, copied: bool) -> None:
    pair = Pair()
    pair.post(torch.zeros(LARGE.shape), LARGE)
    lent = pair.receive()
    assert lent.untyped_storage()._cdata in LENT_STORAGES
    operator = overload(name)
    given: list[Tensor] = []

    def run(*args: object, **kwargs: object) -> Tensor:
        given.extend(one for one in args if isinstance(one, Tensor))
        given.extend(one for value in args if isinstance(value, list) for one in value if isinstance(one, Tensor))
        return torch.zeros(1)

    viewed = lent.view(torch.int32)[0, 0]
    calls: dict[str, tuple[object, ...]] = {
        "grid_sampler_2d_backward": (lent, lent, lent[:, 0].view(1, 128, 64, 2), 0, 1, False, [True, True]),
        "histc": (lent, 4, 0.0, 1.0),
        "nonzero": (lent,),
        "bincount": (lent.view(torch.int64)[0, 0, 0],),
        "unique_dim": (lent, 0),
        "index_put_": (torch.zeros(128), [viewed[0]], torch.zeros(128)),
        "multilabel_margin_loss_forward": (torch.zeros(64), lent.view(torch.int64)[0, 0, 0], 1),
        "masked_scatter_backward": (torch.zeros(512), lent.view(torch.bool)[0, 0, 0], [512]),
        "gather": (torch.zeros(64), 0, lent.view(torch.int64)[0, 0, 0]),
        "add": (lent, lent),
        "native_layer_norm": (lent, [128], None, None, 1e-5),
    }
    arguments = calls[operator._schema.name.removeprefix("aten::")]
    if name.startswith("aten.grid"):
        arguments = (lent[..., :64], lent, *arguments[2:])
    guarded(operator, run)(*arguments)
    read = [one for one in given if one.untyped_storage()._cdata in LENT_STORAGES]
    assert bool(read) != copied
    del given[:], read, arguments, calls, viewed
    storage = lent.untyped_storage()._cdata
    del lent
    assert storage not in LENT_STORAGES


def test_what_another_worker_can_change_is_not_divided_in_place() -> None:
    """It could become the least integer after the check, of which the quotient by -1 ends a process."""
    pair = Pair()
    pair.post(torch.zeros(LARGE.shape), LARGE)
    lent = pair.receive()
    operator = overload("aten.floor_divide_.Tensor")
    divide = guarded(operator, operator)
    with pytest.raises(
        WireError, match=r"floor_divide_.Tensor: self is in memory that other workers can write; allowed"
    ):
        divide(lent.view(torch.int32), torch.tensor(-1, dtype=torch.int32))
    own = lent.view(torch.int32).clone()
    assert divide(own, torch.tensor(-1, dtype=torch.int32)) is own
    del lent


@pytest.mark.parametrize("at_ns", [-1, 1 << 62])
def test_no_message_is_of_before_all_time_or_of_after_the_next_day(at_ns: int) -> None:
    own, other = SharedMemory.make(), SharedMemory.make()
    form = FormGroup(1, 1, 2, "tcp", "127.0.0.1", 5.0, True)
    group = MemoryGroup(form, ShmPeers({0: other, 1: own}, {}))
    sender = ShmSender(other, 2)
    cell = lane_start(1) + 128
    sender.post(1, 0, sender.write([torch.ones(4)], 16), SMALL)
    fields = list(HEADER.unpack_from(other.map, cell))
    fields[5] = at_ns
    HEADER.pack_into(other.map, cell, *fields)
    with pytest.raises(RankLost, match="allowed: a day"):
        group.receive(SMALL, 0, 0)()
    group.close()
