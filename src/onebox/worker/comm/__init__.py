"""Communication among workers: groups, over shared memory (comm.shm), TCP (comm.tcp) or NCCL, and the client's
rendezvous. The instructions that use groups are in execution."""
