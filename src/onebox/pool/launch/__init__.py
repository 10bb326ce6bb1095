"""Starting worker processes on this machine: environment, user, CPU affinity, zygotes; used by the local backend,
by agents and by Ray actors."""
