"""Sources of the feed: data files in their usual layouts, and the data sets and loaders of other libraries."""

from onebox.feed.sources.arrays import Arrays
from onebox.feed.sources.cifar10 import Cifar10
from onebox.feed.sources.image_folder import ImageFolder
from onebox.feed.sources.libraries.huggingface import HuggingFace, HuggingFaceStream
from onebox.feed.sources.libraries.iterables import IterableStream, MadeStream, OneShotStream
from onebox.feed.sources.libraries.pytorch import DatasetSource, IterableDatasetStream, LoaderStream, NodeStream
from onebox.feed.sources.mnist import Mnist
from onebox.feed.sources.numpy_files import NumpyFiles
from onebox.feed.sources.opening import open_source
from onebox.feed.sources.parquet import Parquet
from onebox.feed.sources.tars import Tars
from onebox.feed.sources.tokens import Tokens

__all__ = [
    "Arrays",
    "Cifar10",
    "DatasetSource",
    "HuggingFace",
    "HuggingFaceStream",
    "ImageFolder",
    "IterableDatasetStream",
    "IterableStream",
    "LoaderStream",
    "MadeStream",
    "Mnist",
    "NodeStream",
    "NumpyFiles",
    "OneShotStream",
    "Parquet",
    "Tars",
    "Tokens",
    "open_source",
]
