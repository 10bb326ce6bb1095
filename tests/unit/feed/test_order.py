"""The order of samples is a function of seed and epoch, cut into batches; a position tells where a run is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.feed import Position
from onebox.feed.order import batch_count, batch_slices, epoch_order

SEEDS = st.integers(min_value=-(2**70), max_value=2**70)
EPOCHS = st.integers(min_value=0, max_value=10**6)


@given(count=st.integers(1, 200), seed=SEEDS, epoch=EPOCHS)
def test_order_is_a_permutation_and_pure(count, seed, epoch):
    state = torch.get_rng_state()

    order = epoch_order(count, seed=seed, epoch=epoch)

    assert order.sort().values.tolist() == list(range(count))
    assert torch.equal(epoch_order(count, seed=seed, epoch=epoch), order)
    assert torch.equal(torch.get_rng_state(), state)


def test_order_differs_by_seed_and_epoch():
    orders = {tuple(epoch_order(50, seed=seed, epoch=epoch).tolist()) for seed in range(4) for epoch in range(4)}

    assert len(orders) == 16


def test_order_is_the_one_that_checkpoints_rest_on():
    # A torch or onebox that shuffles otherwise would resume a run on samples that it has seen already.
    assert epoch_order(10, seed=0, epoch=0).tolist() == [4, 9, 2, 1, 6, 5, 7, 3, 8, 0]
    assert epoch_order(10, seed=-1, epoch=5).tolist() == [5, 2, 4, 3, 1, 9, 8, 7, 6, 0]


def test_without_shuffle_every_epoch_has_the_sources_order():
    assert epoch_order(4, seed=3, epoch=7, shuffle=False).tolist() == [0, 1, 2, 3]


@given(count=st.integers(1, 60), size=st.integers(1, 60), drop_last=st.booleans(), data=st.data())
def test_batches_cover_the_order_from_any_sample_on(count, size, drop_last, data):
    order = epoch_order(count, seed=1, epoch=2)
    first = data.draw(st.integers(0, count))

    batches = list(batch_slices(order, size, number=5, first=first, drop_last=drop_last))

    flat = [index for batch in batches for index in batch.indices]
    assert flat == order[first:].tolist()[: len(flat)]
    assert len(flat) == ((count - first) // size * size if drop_last else count - first)
    assert [batch.number for batch in batches] == list(range(5, 5 + len(batches)))
    assert [batch.first for batch in batches] == [first + n * size for n in range(len(batches))]
    assert len(batches) == batch_count(count - first, size, drop_last=drop_last)


def test_a_negative_epoch_has_no_order():
    with pytest.raises(UsageError, match="epoch is -1"):
        epoch_order(3, seed=0, epoch=-1)


@given(epoch=EPOCHS, index=st.integers(0, 10**9), seed=SEEDS, samples=st.none() | st.integers(0, 10**9))
def test_position_goes_to_a_dict_and_back(epoch, index, seed, samples):
    position = Position(epoch=epoch, index=index, seed=seed, samples=samples)
    known = {} if samples is None else {"samples": samples}

    assert position.to_dict() == {"epoch": epoch, "index": index, "seed": seed, **known}
    assert Position.from_dict(position.to_dict()) == position


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"epoch": 0, "index": 0}, r"came with \['epoch', 'index'\]; its fields are"),
        ({"epoch": 0, "index": 0, "seed": 0, "more": 1}, "came with"),
        ({"epoch": -1, "index": 0, "seed": 0}, "epoch is -1"),
        ({"epoch": 0, "index": "0", "seed": 0}, "index is '0'"),
        ({"epoch": 0, "index": 0, "seed": None}, "seed is None"),
        ({"epoch": 0, "index": 0, "seed": 0, "samples": -1}, "samples is -1"),
    ],
)
def test_wrong_position(values, said):
    with pytest.raises(UsageError, match=said):
        Position.from_dict(values)
