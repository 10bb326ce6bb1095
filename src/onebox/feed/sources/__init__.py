"""What the feed can read: data files in their usual layouts, and the data sets and loaders of other libraries."""

from onebox.feed.sources.iterables import IterableStream, MadeStream, OneShotStream
from onebox.feed.sources.pytorch import DatasetSource, IterableDatasetStream, LoaderStream, NodeStream

__all__ = [
    "DatasetSource",
    "IterableDatasetStream",
    "IterableStream",
    "LoaderStream",
    "MadeStream",
    "NodeStream",
    "OneShotStream",
]
