"""Communication among workers: groups, the client's rendezvous, torch.distributed. Shared memory is in
comm.shm; the instructions that use groups are in execution."""
