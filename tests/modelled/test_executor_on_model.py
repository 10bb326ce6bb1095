"""Instructions on a modelled accelerator: tests of another file, with several seeds."""

from tests.unit.worker.execution.test_executor import (
    rig,
    test_a_routine_runs_with_its_bindings,
    test_a_traced_run_times_each_instruction,
    test_a_void_gradient_voids_the_parameters,
    test_an_optimizer_goes_on_from_what_is_put_where_its_parameter_lies,
    test_an_optimizer_steps_in_place_and_tells_its_state,
    test_clipping_answers_with_the_norm_and_scales_all_gradients,
    test_memory_is_accounted_for_to_the_last_byte,
    test_random_operators_depend_on_seed_step_and_micro_batch_and_on_nothing_else,
    test_rows_are_answered,
)

__all__ = [
    "rig",
    "test_a_routine_runs_with_its_bindings",
    "test_a_traced_run_times_each_instruction",
    "test_a_void_gradient_voids_the_parameters",
    "test_an_optimizer_goes_on_from_what_is_put_where_its_parameter_lies",
    "test_an_optimizer_steps_in_place_and_tells_its_state",
    "test_clipping_answers_with_the_norm_and_scales_all_gradients",
    "test_memory_is_accounted_for_to_the_last_byte",
    "test_random_operators_depend_on_seed_step_and_micro_batch_and_on_nothing_else",
    "test_rows_are_answered",
]
