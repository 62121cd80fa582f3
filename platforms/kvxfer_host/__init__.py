"""The host platform: vLLM's CPU build, plain host memory, no accelerator."""

from kvxfer_host.platform import HostPlatform

__all__ = ["HostPlatform"]
