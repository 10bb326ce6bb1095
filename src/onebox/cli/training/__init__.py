"""A training run of ``onebox train``: model, data and trainer, the loop, its page, and the files that it leaves."""
