"""Parts of PyTorch's own distributed training for ranks of different speed."""

from onebox.vgpu.distributed.uneven_ranks import UnevenSampler, weight_by_samples

__all__ = ["UnevenSampler", "weight_by_samples"]
