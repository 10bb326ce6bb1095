"""PyTorch's own facilities for virtual devices: torch.vgpu, torch.accelerator, generators, events, modules,
serialization, backward passes; no operators."""
