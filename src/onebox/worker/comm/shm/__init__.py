"""Messages between the workers of one host through shared memory: memory, message layout, senders and receivers,
rendezvous, and the carrier of a group."""
