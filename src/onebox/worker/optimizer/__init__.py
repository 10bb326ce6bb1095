"""Optimizers of torch.optim over buffers: on the device or on the host, versions of parameters, and corrections for
late gradients."""
