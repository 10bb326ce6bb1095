"""The alias ``cuda`` of virtual devices, for scripts written for CUDA."""

from __future__ import annotations

from onebox.vgpu.cuda_alias.alias import CudaAlias, alias_cuda

__all__ = ["CudaAlias", "alias_cuda"]
