"""The feed: data sources, batches in a repeatable order, and their preparation ahead of compute.

Nothing here knows of devices. A :class:`Feed` reads samples, decodes and transforms them, makes batches of them and
hands these on, all while its user computes on earlier ones::

    feed = Feed(source, batch_size=64, seed=0)
    for inputs, targets in feed.epoch(0):
        ...
"""

from onebox.feed.adapt import as_source
from onebox.feed.batches import Batches
from onebox.feed.catalog import load_dataset
from onebox.feed.dataset import DataSet, Split
from onebox.feed.feed import Feed
from onebox.feed.order import Position
from onebox.feed.prefetch import Prefetch
from onebox.feed.source import Source, Stream

__all__ = [
    "Batches",
    "DataSet",
    "Feed",
    "Position",
    "Prefetch",
    "Source",
    "Split",
    "Stream",
    "as_source",
    "load_dataset",
]
