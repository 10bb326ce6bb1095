"""Execution of the client's instructions over the buffers of one device: the executor, one module for each family of
instructions, and the description of failures."""
