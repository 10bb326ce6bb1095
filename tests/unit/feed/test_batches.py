"""The order of samples is a pure function of seed and epoch, and can be taken up again anywhere."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.feed import Batches, Position, Split

SEEDS = st.integers(min_value=-(2**70), max_value=2**70)
EPOCHS = st.integers(min_value=0, max_value=10**6)


def make_batches(count: int = 10, **fields: object) -> Batches:
    images = torch.arange(count, dtype=torch.uint8).view(count, 1, 1, 1)
    split = Split(images=images, labels=torch.arange(count))
    return Batches(**{"split": split, "batch_size": 3, "seed": 0, **fields})


def seen(batches: Batches, epoch: int, start: int = 0) -> list[list[int]]:
    """The labels of each batch, once they are known to be those of its images."""
    out = []
    for images, labels in batches.epoch(epoch, start):
        assert images.dtype == torch.uint8
        assert images.flatten().tolist() == labels.tolist()
        out.append(labels.tolist())
    return out


@given(count=st.integers(1, 200), seed=SEEDS, epoch=EPOCHS)
def test_order_is_a_permutation_and_pure(count, seed, epoch):
    batches = make_batches(count, seed=seed)
    state = torch.get_rng_state()

    order = batches.order(epoch)

    assert order.sort().values.tolist() == list(range(count))
    assert torch.equal(make_batches(count, seed=seed).order(epoch), order)
    assert torch.equal(torch.get_rng_state(), state)


@given(
    count=st.integers(1, 60),
    batch_size=st.integers(1, 60),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    seed=SEEDS,
    epoch=EPOCHS,
    data=st.data(),
)
def test_resuming_gives_the_rest_of_the_epoch(count, batch_size, drop_last, shuffle, seed, epoch, data):
    batch_size = min(batch_size, count)
    batches = make_batches(count, batch_size=batch_size, drop_last=drop_last, shuffle=shuffle, seed=seed)
    start = data.draw(st.integers(0, len(batches)))

    whole = seen(batches, epoch)

    assert seen(batches, epoch, start) == whole[start:]
    assert len(whole) == len(batches)
    flat = [label for labels in whole for label in labels]
    assert flat == batches.order(epoch).tolist()[: len(flat)]
    assert len(flat) == (count // batch_size * batch_size if drop_last else count)


def test_order_differs_by_seed_and_epoch():
    orders = {tuple(make_batches(50, seed=seed).order(e).tolist()) for seed in range(4) for e in range(4)}

    assert len(orders) == 16


def test_order_is_the_one_that_checkpoints_rest_on():
    # A torch or onebox that shuffles otherwise would resume a run on samples that it has seen already.
    assert make_batches(seed=0).order(0).tolist() == [4, 9, 2, 1, 6, 5, 7, 3, 8, 0]
    assert make_batches(seed=-1).order(5).tolist() == [5, 2, 4, 3, 1, 9, 8, 7, 6, 0]


def test_without_shuffle_every_epoch_has_the_splits_order():
    batches = make_batches(shuffle=False)

    assert seen(batches, 0) == seen(batches, 7) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_batches_are_copies():
    batches = make_batches(shuffle=False)
    images, labels = next(batches.epoch(0))
    images.fill_(9)
    labels.fill_(9)

    assert seen(batches, 0)[0] == [0, 1, 2]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"batch_size": 0}, "batch_size is 0; it has to be an integer of at least 1"),
        ({"batch_size": -3}, "batch_size is -3"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": 2.0}, r"batch_size is 2\.0"),
        ({"seed": "x"}, "seed is 'x'; it has to be an integer"),
        ({"batch_size": 11, "drop_last": True}, "leaves no batch: allowed are at most 10"),
    ],
)
def test_wrong_fields(fields, said):
    with pytest.raises(UsageError, match=said):
        make_batches(**fields)


@pytest.mark.parametrize(
    ("epoch", "start", "said"),
    [
        (-1, 0, "epoch is -1"),
        (0, -1, "start is -1"),
        (0, 5, "start is 5; the epoch has 4 batches"),
    ],
)
def test_wrong_epoch_or_start_is_told_at_once(epoch, start, said):
    with pytest.raises(UsageError, match=said):
        make_batches().epoch(epoch, start)


@given(epoch=EPOCHS, index=st.integers(0, 10**9), seed=SEEDS)
def test_position_goes_to_a_dict_and_back(epoch, index, seed):
    position = Position(epoch=epoch, index=index, seed=seed)

    assert position.to_dict() == {"epoch": epoch, "index": index, "seed": seed}
    assert Position.from_dict(position.to_dict()) == position


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"epoch": 0, "index": 0}, r"came with \['epoch', 'index'\]; its fields are"),
        ({"epoch": 0, "index": 0, "seed": 0, "more": 1}, "came with"),
        ({"epoch": -1, "index": 0, "seed": 0}, "epoch is -1"),
        ({"epoch": 0, "index": "0", "seed": 0}, "index is '0'"),
        ({"epoch": 0, "index": 0, "seed": None}, "seed is None"),
    ],
)
def test_wrong_position(values, said):
    with pytest.raises(UsageError, match=said):
        Position.from_dict(values)
