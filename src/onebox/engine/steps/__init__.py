"""Execution of steps: launch, overlap, results, traces, evaluation, the check of the loss reduction."""
