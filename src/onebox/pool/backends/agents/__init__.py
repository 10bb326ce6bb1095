"""Devices of other machines, leased from their agents."""
