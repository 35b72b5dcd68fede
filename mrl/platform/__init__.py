"""What differs between CUDA and CPU, and nothing else."""
from mrl.platform.base import Platform, get_platform

__all__ = ["Platform", "get_platform"]
