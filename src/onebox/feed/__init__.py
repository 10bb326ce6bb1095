"""The feed: data sources, batches in a repeatable order, and their preparation ahead of compute.

Nothing here depends on devices. A :class:`Feed` reads samples, decodes, transforms and collates them, all while its
consumer computes on earlier batches::

    feed = Feed(source, batch_size=64, seed=0)
    for inputs, targets in feed.epoch(0):
        ...
"""

from onebox.feed.adapt import as_source
from onebox.feed.datasets.catalog import load_dataset, open_dataset
from onebox.feed.datasets.dataset import Data, DataSet, Split
from onebox.feed.feed import Feed
from onebox.feed.order import Position
from onebox.feed.source import Source, Stream

__all__ = [
    "Data",
    "DataSet",
    "Feed",
    "Position",
    "Source",
    "Split",
    "Stream",
    "as_source",
    "load_dataset",
    "open_dataset",
]
