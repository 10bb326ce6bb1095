"""Snapshots of the training state in the memory of the host: slots, their transfer between workers, and the
instructions on them."""
