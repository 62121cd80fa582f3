"""The CUDA platform: NVIDIA GPUs, the caches of vLLM's CUDA attention backends."""

from kvxfer_cuda.platform import CudaPlatform

__all__ = ["CudaPlatform"]
