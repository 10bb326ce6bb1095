"""Sources and streams over objects of other libraries: PyTorch, torchdata, Hugging Face's datasets, plain iterables."""
