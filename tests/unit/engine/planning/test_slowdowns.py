"""Quantiles of a machine's slowdown over slices of a profile and over parts of them."""

from __future__ import annotations

from itertools import chain, repeat

import msgspec
import pytest

from onebox.cost.model_profile import SegmentTimes, SlowdownWindow
from onebox.engine.planning.slowdowns import SliceSlowdown, at_median, slice_slowdown

UNDISTURBED = SegmentTimes(size=1, seconds=((1.0, 2.0, 3.0),), update_s=0.5, call_s=0.25)


def even(slowdown: float, seconds: float = 1.0) -> SliceSlowdown:
    """Return a slice of sixteen equal actions with the same slowdown."""
    return slice_slowdown([[(seconds / 16, seconds / 16 / slowdown)] * 16])


def test_times_are_those_of_the_median_slowdown_and_its_quantiles_need_enough_slices() -> None:
    found = at_median(UNDISTURBED, [even(1.0 + n / 8) for n in range(11)])
    assert found.seconds == (pytest.approx((1.625, 3.25, 4.875)),)
    assert found.slowdown is not None
    assert (found.slowdown.low, found.slowdown.median, found.slowdown.high) == pytest.approx((1.125, 1.625, 2.125))
    assert found.slowdown.slices == 11
    assert (found.update_s, found.call_s) == (0.5, 0.25)
    few = at_median(UNDISTURBED, [even(slowdown) for slowdown in (1.0, 2.0, 4.0)])
    assert few.seconds == (pytest.approx((2.0, 4.0, 6.0)),)
    assert few.slowdown is None


@pytest.mark.parametrize("factor", [1.1, 1.2, 1.3, 1.7])
def test_equal_slowdowns_have_equal_quantiles_whatever_their_rounding(factor: float) -> None:
    found = at_median(UNDISTURBED, [even(factor)] * 12).slowdown
    assert found is not None
    assert found.low == pytest.approx(factor) == found.high
    assert all(one.low == pytest.approx(factor) == one.high for one in found.windows)


def test_a_slice_is_as_slow_as_its_slowest_device_and_so_is_each_part() -> None:
    quick, late = [(1.0, 1.0)] * 16, [(1.0, 1.0)] * 8 + [(3.0, 1.0)] * 8
    found = slice_slowdown([quick, late])
    assert (found.whole, found.seconds) == (2.0, 32.0)
    assert found.parts[2] == (1.0, 3.0)
    assert found.parts[8] == (1.0,) * 4 + (3.0,) * 4


def test_a_part_within_a_long_action_has_no_slowdown_of_its_own() -> None:
    found = slice_slowdown([[(16.0, 8.0), (1.0, 1.0), (1.0, 1.0)]])
    assert found.parts[1] == (1.8,)
    assert found.parts[2] == (2.0,), "less than half of the other part is known"
    assert len(found.parts[8]) == 3


def test_tiny_actions_between_long_ones_do_not_spread_times() -> None:
    actions = [pair for slow in (1.0, 20.0, 5.0, 1.0) for pair in ((0.1, 0.1), (slow * 5e-6, 5e-6))]
    found = at_median(UNDISTURBED, [slice_slowdown([actions])] * 10).slowdown
    assert found is not None
    assert all(0.99 < one.low <= one.high < 1.01 for one in found.windows)


def test_short_steps_spread_more_than_long_ones_where_disturbances_are_short() -> None:
    """Each slice of 32 actions is disturbed in every other eighth: in whole slices that averages out."""
    actions = list(chain.from_iterable([(slow * 0.01, 0.01)] * 4 for _ in range(4) for slow in (1.0, 2.0)))
    found = at_median(UNDISTURBED, [slice_slowdown([actions])] * 10).slowdown
    assert found is not None
    assert (found.low, found.median, found.high) == pytest.approx((1.5, 1.5, 1.5))
    assert [one.seconds for one in found.windows] == pytest.approx([0.06, 0.12, 0.24, 0.48])
    assert (found.windows[0].low, found.windows[0].high) == pytest.approx((1.0, 2.0))
    assert [(one.low, one.high) for one in found.windows[1:]] == [pytest.approx((1.5, 1.5))] * 3


def test_disturbances_longer_than_a_slice_spread_steps_of_all_lengths_alike() -> None:
    slices = [even(slowdown) for slowdown in chain.from_iterable(repeat(slow, 4) for slow in (1.0, 2.0, 1.0, 2.0))]
    found = at_median(UNDISTURBED, slices).slowdown
    assert found is not None
    assert [(one.low, one.high) for one in found.windows] == [pytest.approx((1.0, 2.0))] * 4


def test_lengths_of_windows_ascend() -> None:
    found = at_median(UNDISTURBED, [even(1.5)] * 9).slowdown
    assert found is not None
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found
    changed = msgspec.to_builtins(found) | {"windows": [{"seconds": 2.0, "low": 1.0, "high": 1.0}] * 2}
    with pytest.raises(msgspec.ValidationError, match="lengths of its windows ascend"):
        msgspec.convert(changed, type(found))
    with pytest.raises(ValueError, match="ascending"):
        SlowdownWindow(seconds=1.0, low=2.0, high=1.0)
