"""Stages that run at the same time ahead of the consumer, in threads or forked processes; knows nothing of samples or
batches."""
