"""Starting worker processes on this machine: environment, user, CPU affinity, fork servers; used by the local backend,
by agents and by Ray actors."""
