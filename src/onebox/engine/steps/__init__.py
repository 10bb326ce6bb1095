"""Execution of steps: launch, observers, overlap, results, traces, evaluation, the check of the loss reduction."""
