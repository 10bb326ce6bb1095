"""The agent: the process on a host that leases its devices to clients and starts a worker for each that is leased."""

from onebox.agent.demand import Limits, Offered
from onebox.agent.host import offered_devices
from onebox.agent.server import Agent

__all__ = ["Agent", "Limits", "Offered", "offered_devices"]
