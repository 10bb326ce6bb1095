"""Versions of parameters on a modelled accelerator: tests of another file, with several seeds."""

from tests.unit.worker.optimizer.test_versions import (
    test_an_age_is_the_seed_of_an_earlier_step,
    test_an_optimizer_on_the_host_does_the_same,
    test_copies_of_a_gpus_parameters_are_stepped_where_these_come_to_lie,
    test_delays_are_what_the_calls_read,
    test_feedback_adds_the_difference_of_updates,
    test_gradients_are_applied_with_the_options_of_their_step,
    test_members_are_updated_and_no_others,
    test_predict_keeps_the_master_and_moves_what_is_ahead,
    test_previous_is_what_the_parameter_was,
    test_views_of_what_the_parameter_was_stay_as_they_are,
    test_what_is_in_the_hosts_memory_is_renamed_there,
)

__all__ = [
    "test_an_age_is_the_seed_of_an_earlier_step",
    "test_an_optimizer_on_the_host_does_the_same",
    "test_copies_of_a_gpus_parameters_are_stepped_where_these_come_to_lie",
    "test_delays_are_what_the_calls_read",
    "test_feedback_adds_the_difference_of_updates",
    "test_gradients_are_applied_with_the_options_of_their_step",
    "test_members_are_updated_and_no_others",
    "test_predict_keeps_the_master_and_moves_what_is_ahead",
    "test_previous_is_what_the_parameter_was",
    "test_views_of_what_the_parameter_was_stay_as_they_are",
    "test_what_is_in_the_hosts_memory_is_renamed_there",
]
