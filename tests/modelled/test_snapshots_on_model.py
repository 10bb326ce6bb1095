"""Snapshots on a modelled accelerator: tests of another file, with several seeds."""

from tests.unit.worker.snapshots.test_snapshots import (
    rig,
    test_a_slot_is_read_and_written_in_parts,
    test_an_optimizer_takes_anothers_place_and_remembers_what_came,
    test_there_is_no_snapshot_of_what_is_void,
    test_what_a_snapshot_holds_stays_as_it_was_and_comes_back_to_the_bit,
    test_what_cannot_be_laid_or_recalled_is_refused,
    test_what_does_not_lie_in_a_slot_cannot_be_had,
)

__all__ = [
    "rig",
    "test_a_slot_is_read_and_written_in_parts",
    "test_an_optimizer_takes_anothers_place_and_remembers_what_came",
    "test_there_is_no_snapshot_of_what_is_void",
    "test_what_a_snapshot_holds_stays_as_it_was_and_comes_back_to_the_bit",
    "test_what_cannot_be_laid_or_recalled_is_refused",
    "test_what_does_not_lie_in_a_slot_cannot_be_had",
]
