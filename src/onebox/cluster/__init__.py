"""Pools on a Ray cluster: Ray allocates devices, and starts an agent for each; all else is as with agents."""
