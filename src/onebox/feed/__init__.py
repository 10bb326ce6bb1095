"""The feed: data sets, batches in a repeatable order, and reading ahead of compute.

Nothing here knows of devices. A data set is held as bytes; what a step needs of it is scaled where it is
used::

    data = load_dataset("digits")
    batches = Batches(split=data.train, batch_size=64, seed=0)
    with Prefetch(batches.epoch(0), depth=2) as ready:
        for images, labels in ready:
            ...
"""

from onebox.feed.batches import Batches, Position
from onebox.feed.catalog import load_dataset
from onebox.feed.dataset import DataSet, Split
from onebox.feed.prefetch import Prefetch

__all__ = ["Batches", "DataSet", "Position", "Prefetch", "Split", "load_dataset"]
