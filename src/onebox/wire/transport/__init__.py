"""Encrypted transport of messages between a client, its workers and agents: sockets, framing, and delivery across
broken connections."""
