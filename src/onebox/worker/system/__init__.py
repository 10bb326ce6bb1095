"""Facts and controls of the process and its host: processor affinity, instruction sets, network interfaces, TCP
connections. Nothing here knows of buffers or groups."""
