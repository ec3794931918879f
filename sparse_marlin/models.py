"""Finds and loads whatever a user may name as a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from . import samples
from .checkpoints import describe, is_checkpoint, load


@dataclass(frozen=True)
class Source:
    """Where a model is.

    Attributes:
        location: a local directory, or the name of a model on a hub.
        gguf_file: name of the GGUF file in that directory, for a model that is one.
    """

    location: str
    gguf_file: str | None = None

    @property
    def _options(self) -> dict[str, Any]:
        # Without an explicit no, transformers would ask on the terminal whether to run a model's own code.
        return {"trust_remote_code": False, **({"gguf_file": self.gguf_file} if self.gguf_file else {})}

    def tokenizer(self) -> Any:
        """The model's tokenizer; its own code, if it has any, is never run."""
        return AutoTokenizer.from_pretrained(self.location, **self._options)

    def model(self, device: torch.device | str | None = None) -> nn.Module:
        """The model in evaluation mode, in the dtype that it is stored in."""
        if is_checkpoint(self.location):
            return load(self.location, device=device)
        model: Any = AutoModelForCausalLM.from_pretrained(self.location, dtype="auto", **self._options)
        if self.gguf_file:
            del model.config.quantization_config  # says how the file was quantized; the weights in memory are plain
        result: nn.Module = model.to(device or "cpu").eval()
        return result

    def weight_bytes(self) -> int:
        """Bytes of the model's weights in memory, without reading them."""
        if is_checkpoint(self.location):
            return sum(t.nbytes for t in describe(self.location).files.tensors.values())
        return sum(p.nbytes for p in self.outline().parameters())

    def outline(self) -> nn.Module:
        """The model before any compression on the meta device: modules, shapes and dtype, and no weights."""
        config = AutoConfig.from_pretrained(self.location, **self._options)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
        return model


def find(name: str) -> Source:
    """Resolves a model's name.

    Args:
        name: a directory in the layout of Hugging Face (compressed or not), a ``.gguf`` file or a directory with one,
            ``smollm2`` for the model of :mod:`sparse_marlin.samples`, or else a name on the hub.

    Raises:
        FileNotFoundError: if the name is a path that does not exist or holds no model.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return Source(str(path))
        ggufs = sorted(p.name for p in path.glob("*.gguf"))
        if len(ggufs) == 1:
            return Source(str(path), ggufs[0])
        if ggufs:
            raise FileNotFoundError(f"{path} holds several models: name one of {', '.join(ggufs)}")
        raise FileNotFoundError(f"{path} holds no model: neither config.json nor a .gguf file")
    if path.is_file():
        if path.suffix == ".gguf":
            return Source(str(path.parent), path.name)
        raise FileNotFoundError(f"{path} is a file: name the model's directory, or a .gguf file")
    if name == samples.MODEL:
        return Source(str(samples.sample_model()))
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"{path} does not exist")
    return Source(name)
