"""What the feed can read: data files in their usual layouts, and the data sets and loaders of other libraries."""

from onebox.feed.sources.image_folder import ImageFolder
from onebox.feed.sources.iterables import IterableStream, MadeStream, OneShotStream
from onebox.feed.sources.pytorch import DatasetSource, IterableDatasetStream, LoaderStream, NodeStream
from onebox.feed.sources.tars import Tars

__all__ = [
    "DatasetSource",
    "ImageFolder",
    "IterableDatasetStream",
    "IterableStream",
    "LoaderStream",
    "MadeStream",
    "NodeStream",
    "OneShotStream",
    "Tars",
]
