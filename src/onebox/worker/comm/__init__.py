"""Communication among workers: groups, the client's rendezvous, torch.distributed, emulated links. Shared memory is in
comm.shm; the instructions that use groups are in execution."""
