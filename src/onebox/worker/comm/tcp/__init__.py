"""Groups of the workers of several hosts, over TCP with TLS or without: connections, byte streams, messages filed by
channel, and the group."""
