"""Instructions that follow backward: gradient sums, clipping, the optimizer's step, shared statistics, windows of
overlapping steps."""
