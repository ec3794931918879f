"""``from_pretrained`` of transformers reads what :func:`sparse_marlin.save` writes, and ``save_pretrained`` writes it.

Importing ``sparse_marlin`` registers this. transformers fills the tensors; which modules are compressed, and whether
the files hold what the config describes, is decided by the reader that :func:`sparse_marlin.load` has too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoints import native, reading
from ..checkpoints.files import CONFIG_NAME, CheckpointError, read_json
from ..linear import CompressedLinear, compressed_layers
from ..quantization import QUANT_METHOD


@register_quantization_config(QUANT_METHOD)
class SparseMarlinConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a config.json, as :mod:`sparse_marlin.checkpoints.native` describes it.

    Raises:
        CheckpointError: if it is of a newer version, or not as described there.
    """

    def __init__(self, **values: Any) -> None:
        native.read_modules(values)
        self.quant_method = QUANT_METHOD  # type: ignore[assignment]  # an enum of those in transformers itself
        self.format_version: int = values["format_version"]
        self.groups: list[dict[str, Any]] = values["groups"]


@register_quantizer(QUANT_METHOD)
class SparseMarlinQuantizer(HfQuantizer):
    """Puts :class:`CompressedLinear` in the place of the Linears that a config lists, for transformers to fill."""

    requires_calibration = True  # transformers refuses to compress what is not: patch_model does that

    def __init__(self, quantization_config: SparseMarlinConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self._compute: torch.dtype | None = None
        self._checkpoint: reading.Checkpoint | None = None

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Remembers what the model shall compute in."""
        if dtype not in reading.COMPUTE_DTYPES.values():
            raise ValueError(f"dtype must be one of {', '.join(reading.COMPUTE_DTYPES)}, got {dtype}")
        self._compute = dtype
        return dtype

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        if not checkpoint_files:
            raise ValueError("the weights must come from a directory, or a repository, that sparse_marlin.save wrote")
        # transformers itself only warns of tensors that are missing, and leaves random numbers in their place.
        path = Path(checkpoint_files[0]).parent
        checkpoint = reading.open_checkpoint(path, read_json(path / CONFIG_NAME), native.FORMAT)
        self._checkpoint = checkpoint
        for name, stored in checkpoint.layers.items():
            assert stored.scheme is not None
            layer = CompressedLinear.empty(
                stored.in_features,
                stored.out_features,
                stored.scheme,
                bias=model.get_submodule(name).bias is not None,
                g_idx="g_idx" in stored.tensors,
                adapter=stored.adapter,
            )
            model.set_submodule(name, layer.to(self._compute))  # tensors are cast to what they are filled into

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        for name, layer in compressed_layers(model).items():
            if any(type(t.data) is not Tensor for t in layer.parameters()):
                raise NotImplementedError(
                    f"{name} was cut for tensor parallelism, which compressed layers do not take part in: load the "
                    "model without tp_plan"
                )
            layer.requires_grad_(False)
            if not any(t.is_meta for t in layer.parameters()):
                _check(name, layer)
            elif self._checkpoint is not None and self._compute is not None:
                self._checkpoint.read_layer(name, self._compute)  # offloaded: what it checks is in the files alone
        self._checkpoint = None
        return model

    def is_serializable(self, **_: Any) -> bool:
        """``save_pretrained`` writes a checkpoint that this class and ``sparse_marlin.load`` read."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Compressed layers have nothing to train: Trainer shall refuse."""
        return False

    @property
    def is_compileable(self) -> bool:
        """``generate`` may compile the decoding step."""
        return True


def _check(name: str, layer: CompressedLinear) -> None:
    for leaf, t in layer.named_parameters():
        if leaf != "bias" and t.is_floating_point() and not bool(torch.isfinite(t).all()):
            raise CheckpointError(f"tensor {name}.{leaf} holds values that are not finite in {t.dtype}")
    try:
        layer.packed.check_indices()
    except ValueError as e:
        raise CheckpointError(f"the tensors of {name} are damaged: {e}") from e
