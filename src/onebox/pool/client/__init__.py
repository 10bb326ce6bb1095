"""The client's end of the connections to workers: the thread that owns the sockets, pending replies, group services,
relayed connections; not the workers' processes (backends)."""
