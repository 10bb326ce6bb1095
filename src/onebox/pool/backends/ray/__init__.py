"""Devices of a Ray cluster: Ray starts and monitors the workers."""
