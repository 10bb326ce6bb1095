"""Streams of scripts that stop, on modelled accelerators: what exists keeps its values however late kernels run."""

from __future__ import annotations

from tests.unit.worker.execution.test_eager_failures import (
    rig,
    test_a_lack_of_memory_precedes_what_an_operator_writes,
    test_a_late_word_of_the_script_does_not_end_a_later_stop,
    test_a_program_that_fails_stops_the_stream,
    test_a_stream_stops_until_the_script_has_been_told,
    test_an_operator_that_is_answered_does_not_stop_the_stream,
    test_the_use_of_a_void_tensor_stops_the_stream_with_the_first_failure,
    test_views_of_what_is_there_are_made_after_a_failure,
    test_what_cannot_grow_leaves_its_other_views_as_they_were,
    test_what_follows_a_failed_operator_is_skipped,
    test_what_was_to_be_written_keeps_its_values,
)

__all__ = [
    "rig",
    "test_a_lack_of_memory_precedes_what_an_operator_writes",
    "test_a_late_word_of_the_script_does_not_end_a_later_stop",
    "test_a_program_that_fails_stops_the_stream",
    "test_a_stream_stops_until_the_script_has_been_told",
    "test_an_operator_that_is_answered_does_not_stop_the_stream",
    "test_the_use_of_a_void_tensor_stops_the_stream_with_the_first_failure",
    "test_views_of_what_is_there_are_made_after_a_failure",
    "test_what_cannot_grow_leaves_its_other_views_as_they_were",
    "test_what_follows_a_failed_operator_is_skipped",
    "test_what_was_to_be_written_keeps_its_values",
]
