"""Programs, kernels and blocks made ready to run on one device: checked, resolved, and interpreted. Buffers by number
are in memory; instructions are in execution."""
