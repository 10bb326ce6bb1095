"""Devices of a Ray cluster: Ray starts and watches the workers."""
