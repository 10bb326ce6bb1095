"""Streams of scripts that survive the loss of workers: what was sent is logged, and played again from a snapshot."""
