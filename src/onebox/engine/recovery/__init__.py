"""Recovery of a run after the loss of workers: snapshots, the recovery manager, plans for the devices that remain."""
