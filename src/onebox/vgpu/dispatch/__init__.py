"""From an operator of PyTorch to a call on a worker: the dispatcher, the cache of operators, copies, factories,
synchronous calls."""
