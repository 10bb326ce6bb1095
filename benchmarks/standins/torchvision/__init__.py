"""A small stand-in for torchvision, for scripts that need a few names of it and are not to be changed."""

from torchvision import datasets, models, ops, transforms, utils

__all__ = ["datasets", "models", "ops", "transforms", "utils"]
