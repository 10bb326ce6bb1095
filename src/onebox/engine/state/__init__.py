"""The training state on the workers: where each part lies, how it is read, written, moved and saved; the steps that
change it are in ``steps``."""
