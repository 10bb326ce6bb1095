"""The commands' options: frozen dataclasses from which the command line is made; nothing here imports PyTorch."""
