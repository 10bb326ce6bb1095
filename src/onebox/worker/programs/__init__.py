"""Programs and batches of calls made ready to run on one device: checked, resolved, and executed as tapes. Buffers by
number are in memory; instructions are in execution."""
