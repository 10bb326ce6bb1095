"""Messages between workers over TCP, with TLS or without: connections, byte streams, messages filed by channel, and the
carrier of a group."""
