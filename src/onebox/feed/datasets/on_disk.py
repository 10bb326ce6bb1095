"""Data sets whose pictures stay in their files, and are decoded on use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onebox.errors import DataError, OneboxError
from onebox.feed.datasets.dataset import channel_statistics
from onebox.feed.decode import ImageDecoder
from onebox.feed.source import Source
from onebox.feed.sources.opening import open_source

TEST_EVERY = 5
"""Without samples to test on, the fifth, tenth, ... to train on are used."""

LOOKED_AT = 128
"""Number of evenly spaced pictures for mean and standard deviation: these normalise, and need not be exact."""


class Subset:
    """Some samples of a source, as a source.

    Args:
        source: All samples.
        indices: The indices of the chosen ones.
    """

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        self.source, self.indices = source, indices

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.indices)

    def read(self, index: int) -> Any:
        """Read a sample."""
        return self.source.read(self.indices[index])

    def decode(self, raw: Any, index: int) -> Any:
        """Decode a sample."""
        return self.source.decode(raw, self.indices[index])

    def name(self, index: int) -> str:
        """Return the origin of a sample."""
        return self.source.name(self.indices[index])


class OnDiskDataSet:
    """A data set of pictures in classes, which stay in their files.

    Args:
        spec: A specification of pictures for :func:`onebox.feed.sources.open_source`: a folder, tar archives, tables.
        size: Height and width that all pictures get; ``None`` for those of the first one that is not broken.

    Attributes:
        name: The kind of its files.
        classes: Number of classes.
        train: Samples to train on.
        test: Samples to test on: those of the files, or every fifth of the others.
        shape: Channels, height and width.
        mean: Mean of each channel, scaled to [0, 1], from pictures that are evenly spaced.
        std: Standard deviation likewise; 1.0 for a channel that is constant.

    Raises:
        UsageError: The specification is wrong.
        DataError: Files are missing, have no classes, or are not pictures; or there are too few.
    """

    def __init__(self, spec: str, *, size: int | None = None) -> None:
        self.name = spec.partition(":")[0]
        side = None if size is None else (size, size)
        if side is None:
            height, width = _first(open_source(spec)[0], spec).shape[1:]
            side = int(height), int(width)
        train, test = open_source(spec, decoder=ImageDecoder(size=side))
        names = getattr(train, "classes", None)
        if not names:
            raise DataError(f"{spec} has no classes to learn; its samples need labels")
        self.classes = len(names)
        self.train, self.test = _split(train, spec) if test is None else (train, test)
        looked_at = [index * len(self.train) // LOOKED_AT for index in range(min(LOOKED_AT, len(self.train)))]
        if len(self.train) < LOOKED_AT:
            looked_at = list(range(len(self.train)))
        images, _ = self._batch(looked_at, spec)
        channels, height, width = images.shape[1:]
        self.shape = int(channels), int(height), int(width)
        self.mean, self.std = channel_statistics(images)
        self._spec = spec

    def example(self, count: int) -> tuple[Tensor, Tensor]:
        """Return images ``uint8 [B, C, H, W]`` and labels ``int64 [B]`` of the first samples that are not broken."""
        return self._batch(range(min(count, len(self.train))), self._spec)

    def _batch(self, indices: Sequence[int], spec: str) -> tuple[Tensor, Tensor]:
        samples = [found for index in indices for found in _attempt(self.train, index)]
        if not samples:
            raise DataError(f"{spec}: none of {len(indices)} samples that were looked at can be read")
        images, labels = zip(*samples, strict=True)
        return torch.stack(images), torch.tensor([int(label) for label in labels])


def _split(source: Source, spec: str) -> tuple[Subset, Subset]:
    """Split samples into those to train on and those to test on."""
    count = len(source)
    if count < TEST_EVERY:
        raise DataError(
            f"{spec}: {count} samples are too few to train and to test on; {TEST_EVERY} are needed at least"
        )
    held = range(TEST_EVERY - 1, count, TEST_EVERY)
    return Subset(source, [index for index in range(count) if index % TEST_EVERY != TEST_EVERY - 1]), Subset(
        source, held
    )


def _first(source: Source, spec: str) -> Tensor:
    """Return the first picture that is not broken."""
    for index in range(len(source)):
        for image, _ in _attempt(source, index):
            return image
    raise DataError(f"{spec}: none of {len(source)} samples can be read")


def _attempt(source: Source, index: int) -> list[tuple[Tensor, Any]]:
    """Return a sample in a list, empty if it is broken."""
    try:
        sample = source.decode(source.read(index), index)
    except (OneboxError, OSError) as error:
        if isinstance(error, DataError | OSError):
            return []
        raise
    if isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[0], Tensor) and sample[0].dim() == 3:
        return [(sample[0], sample[1])]
    raise DataError(f"{source.name(index)} is no picture with a class; such samples are needed", sample=index)
