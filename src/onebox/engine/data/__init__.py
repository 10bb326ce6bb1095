"""Transfer of batches to the workers: ahead of their steps, compressed, or from a cache of samples; sample order and
reading are in ``feed``."""
