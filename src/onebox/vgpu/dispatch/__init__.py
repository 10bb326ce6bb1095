"""From an operator that is new to the device to a call on a worker: its meaning, copies, host tensors, synchronous
calls."""
