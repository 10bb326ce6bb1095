"""Sources of workers: this machine, agents on other hosts, a Ray cluster, behind one interface; not the sockets to the
workers (client)."""
