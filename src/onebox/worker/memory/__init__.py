"""Memory of a worker: numbered buffers, the host's memory, and asynchronous copies between the device and the host.
Memory shared with other processes is in comm.shm."""
