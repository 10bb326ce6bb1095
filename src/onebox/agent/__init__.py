"""The agent: the process on a host that leases its devices to clients and starts a worker for each that is leased."""

__all__: list[str] = []
