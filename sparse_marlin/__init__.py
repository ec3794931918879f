"""LLM inference with 2:4-sparse and dense INT4/INT8 weights."""

from .compression import compress, patch_model
from .linear import CompressedLinear
from .scheme import Scheme

__all__ = ["CompressedLinear", "Scheme", "compress", "patch_model"]
__version__ = "0.1.0"
