"""The agent: the process on a host that leases its devices to clients and starts a worker for each leased device."""

from onebox.agent.admission import ClientLimits, Offered
from onebox.agent.host_devices import offered_devices
from onebox.agent.server import Agent, check_clients

__all__ = ["Agent", "ClientLimits", "Offered", "check_clients", "offered_devices"]
