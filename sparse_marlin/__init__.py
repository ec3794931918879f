"""LLM inference with 2:4-sparse and dense INT4/INT8 weights."""

from .checkpoints import convert, load, save
from .compression import compress, patch_model
from .integrations import transformers as _transformers  # noqa: F401  registers the format there
from .linear import CompressedLinear
from .scheme import Scheme

__all__ = ["CompressedLinear", "Scheme", "compress", "convert", "load", "patch_model", "save"]
__version__ = "0.1.0"
