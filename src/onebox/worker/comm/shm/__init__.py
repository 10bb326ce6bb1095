"""Groups of the workers of one host through shared memory: memory, message layout, senders and receivers, rendezvous,
collectives."""
