"""Devices at run time: the context of a pool, a command queue for each device, messages in flight, the cache of
batches."""
