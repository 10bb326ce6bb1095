"""Links of a pool: measured (profile, link benchmark, client bandwidth), emulated, and the transport paths that tensors
may take."""
