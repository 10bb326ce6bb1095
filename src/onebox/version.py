"""The version of onebox, for every package: the one of the code that runs, whatever was installed last."""

__version__ = "0.1.0"
