"""PyTorch's own facilities for virtual devices: torch.vgpu, torch.accelerator, generators, events, printing, queues
between processes; no operators."""
