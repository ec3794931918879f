"""The library's own checkpoint: a Hugging Face directory whose compressed layers are stored in canonical form.

``config.json`` is the model's, with this block::

    "quantization_config": {
      "quant_method": "sparse_marlin",
      "format_version": 1,                          2 where layers have adapters
      "groups": [                                   one per scheme, the most frequent first
        {
          "scheme": {"num_bits": 4, "group_size": 128, "sparsity": "2:4", "symmetric": true, "dtype": "float16"},
          "adapter": {"rank": 64, "num_bits": 4},                 version 2 only; null for none
          "modules": ["model.layers.0.self_attn.q_proj", ...]     every compressed module is in one group, no other is
        }
      ]
    }

Each of the modules has the tensors of :mod:`sparse_marlin.packed` under its name, and ``bias`` where it has one. Those
of an adapter are ``adapter.a`` and ``adapter.b``, or the packed tensors under these names. All other tensors are stored
as they were, tied ones once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..linear import Adapter, CompressedLinear, compressed_layers
from ..packed import TENSOR_NAMES, PackedWeight
from ..quantization import FORMAT_VERSION, QUANT_METHOD, WITHOUT_ADAPTERS, Stored, quantization_config, stored_as
from ..scheme import SCALE_DTYPES, AdapterScheme, Scheme
from . import reading
from .files import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    CheckpointError,
    read_json,
    whole_directory,
    write_json,
    write_tensors,
)
from .reading import Expected, Format, Layout, Slot, StoredLayer


def recognise(config: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to this format."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD


# ------------------------------------------------------------------------------------------------------------- saving


def save(model: nn.Module, path: str | Path, *, tokenizer: Any = None, overwrite: bool = False) -> None:
    """Writes a compressed causal LM of transformers as a directory that :func:`sparse_marlin.load` reads.

    The directory appears whole or not at all: everything is written beside it first, and read back as far as the
    headers. Scales are stored in the precision of their scheme where that loses nothing, so that a model that computes
    in float32 takes no more space, and loading gives bit-equal logits. (Buffers that no checkpoint stores are computed
    anew: where ``.to(torch.bfloat16)`` has rounded the rotary frequencies, loading brings the exact ones back.)

    Args:
        model: a transformers causal LM with at least one ``CompressedLinear``.
        path: the directory; its parent must exist.
        tokenizer: saved along with the model.
        overwrite: replace a checkpoint of this format at ``path``, with all files in it.

    Raises:
        FileExistsError: if something is at ``path`` that may not be replaced.
        ValueError: if the model is not one that can be loaded again.
    """
    path = Path(path)
    check_destination(path, overwrite=overwrite)
    layers = compressed_layers(model)
    if not layers:
        raise ValueError("the model has no compressed layer: compress it first, or use its own save_pretrained")
    if not hasattr(model, "config"):
        raise ValueError(f"only models of transformers can be saved, got {type(model).__name__}")
    dtype = _compute_dtype(layers)
    tensors, tied = _tensors(model, layers)

    with whole_directory(path) as scratch:
        write_json(scratch / CONFIG_NAME, _config(model, layers, dtype, tied))
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.to_json_file(scratch / GENERATION_CONFIG_NAME)  # type: ignore[operator, union-attr]
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        write_tensors(scratch, tensors)
        skeleton = reading.open_checkpoint(scratch, read_json(scratch / CONFIG_NAME), FORMAT).model
        if type(skeleton) is not type(model):
            raise ValueError(
                f"this checkpoint would load as {type(skeleton).__name__}, not as {type(model).__name__}: "
                "only what AutoModelForCausalLM builds for the model's config can be saved"
            )


def check_destination(path: Path, *, overwrite: bool) -> None:
    """Raises FileExistsError or FileNotFoundError if :func:`save` would refuse to write at ``path``."""
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: {path.absolute().parent} is not a directory")
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise FileExistsError(f"{path} exists and is not a directory: choose another path")
    if not path.exists() or not any(path.iterdir()):
        return
    try:
        ours = recognise(read_json(path / CONFIG_NAME))
    except CheckpointError:
        ours = False
    if not ours:
        raise FileExistsError(f"{path} holds something else than a checkpoint of this library: choose another path")
    if not overwrite:
        raise FileExistsError(f"{path} holds a checkpoint already: pass overwrite=True to replace it")


def _compute_dtype(layers: Mapping[str, CompressedLinear]) -> torch.dtype:
    dtypes = Counter(layer.scales.dtype for layer in layers.values())
    if len(dtypes) > 1:
        counts = ", ".join(f"{n} in {t}" for t, n in dtypes.most_common())
        raise ValueError(f"all compressed layers must compute in one dtype, got {counts}: call model.to(dtype)")
    return next(iter(dtypes))


def _tensors(model: nn.Module, layers: Mapping[str, CompressedLinear]) -> tuple[dict[str, Tensor], bool]:
    """What to store, and whether every weight that the model declares as tied is."""
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name, t in tensors.items():
        if not isinstance(t, Tensor) or t.is_meta:
            raise ValueError(f"{name} is not in memory: load the model whole, without offloading, before saving")
    for name, layer in layers.items():
        for leaf, t in layer.named_parameters():
            if leaf == "scales" or (leaf.startswith("adapter.") and t.is_floating_point()):
                stored = t.detach().to(layer.scheme.dtype)
                if torch.equal(stored.to(t.dtype), t):
                    tensors[f"{name}.{leaf}"] = stored
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    are_tied = {target: tensors.get(target) is tensors.get(source) for target, source in ties.items()}
    for target, is_tied in are_tied.items():
        if is_tied:
            tensors.pop(target, None)
    return tensors, all(are_tied.values())


def _config(model: nn.Module, layers: Mapping[str, CompressedLinear], dtype: torch.dtype, tied: bool) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(model.config.to_json_string())  # type: ignore[operator, union-attr]
    config.pop("_name_or_path", None)  # often a path of this machine
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(dtype).removeprefix("torch.")
    if not tied:
        config["tie_word_embeddings"] = False
    config["quantization_config"] = quantization_config(stored_as(layers))
    return dict(sorted(config.items()))  # as transformers has it


# ------------------------------------------------------------------------------------------------------------ loading


def read_config(config: Mapping[str, Any]) -> Layout:
    """How the modules that a config lists are stored."""
    modules = read_modules(config["quantization_config"])

    def layer(slot: Slot) -> StoredLayer | None:
        stored = modules.get(slot.name)
        return None if stored is None else _stored(slot, *stored)

    return Layout(layer, modules, ours=True)


def _stored(slot: Slot, scheme: Scheme, adapter: AdapterScheme | None) -> StoredLayer:
    n, k = slot.out_features, slot.in_features
    if reason := scheme.why_not(n, k):
        raise ValueError(f"cannot be stored as {scheme}: {reason}")
    codes, groups = k // 2 if scheme.sparsity else k, scheme.num_groups(k)
    tensors = {
        "qweight": Expected((n, -(-codes * scheme.num_bits // 8)), (torch.uint8,)),
        "scales": Expected((n, groups), reading.FLOATS),
    }
    if scheme.sparsity:
        tensors["meta"] = Expected((n, -(-k // 8)), (torch.uint8,))
    if not scheme.symmetric:
        tensors["zero_point"] = Expected((n, groups), (torch.uint8,))
    if "g_idx" in slot.stored:
        tensors["g_idx"] = Expected((k,), (torch.int32,))
    if adapter is not None:
        for leaf, t in Adapter.empty(k, n, adapter, scheme.dtype).state_dict().items():
            tensors[f"adapter.{leaf}"] = Expected(tuple(t.shape), SCALE_DTYPES if t.is_floating_point() else (t.dtype,))

    def decode(stored: Mapping[str, Tensor]) -> PackedWeight:
        values = {leaf: t for leaf, t in stored.items() if leaf in TENSOR_NAMES}
        if values["scales"].dtype not in SCALE_DTYPES:
            values["scales"] = values["scales"].float()
        return PackedWeight.from_tensors(values, scheme, k)

    return StoredLayer(n, k, scheme, tensors, decode, adapter)


def read_modules(quantization: Mapping[str, Any]) -> dict[str, Stored]:
    """How every compressed module is stored, from ``quantization_config``.

    Raises:
        CheckpointError: if it is from a newer version, or not as described at the head of this module.
    """
    version = quantization.get("format_version")
    if type(version) is not int or version < 1:
        raise CheckpointError(f"format_version must be a positive integer, got {version!r}")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"format_version {version} is newer than {FORMAT_VERSION}, the newest that this version of the library "
            "reads: upgrade sparse_marlin"
        )
    _require_keys("quantization_config", quantization, {"quant_method", "format_version", "groups"})
    groups = quantization["groups"]
    if not isinstance(groups, list) or not groups:
        raise CheckpointError(f"quantization_config.groups must be a list with at least one group, got {groups!r:.80}")
    found: dict[str, Stored] = {}
    keys = {"scheme", "modules"} if version == WITHOUT_ADAPTERS else {"scheme", "adapter", "modules"}
    for group in groups:
        _require_keys("a group of quantization_config", group, keys)
        modules = group["modules"]
        if not isinstance(modules, list) or not all(isinstance(m, str) for m in modules):
            raise CheckpointError(f"the modules of a group must be a list of names, got {modules!r:.80}")
        if twice := [m for m, count in Counter([*found, *modules]).items() if count > 1]:
            raise CheckpointError(f"quantization_config lists modules twice: {', '.join(twice[:4])}")
        try:
            adapter = None if group.get("adapter") is None else AdapterScheme.from_dict(group["adapter"])
            found.update(dict.fromkeys(modules, (Scheme.from_dict(group["scheme"]), adapter)))
        except ValueError as e:
            raise CheckpointError(f"quantization_config: {e}") from e
    return found


def _require_keys(what: str, value: Any, keys: set[str]) -> None:
    if not isinstance(value, Mapping) or set(value) != keys:
        raise CheckpointError(f"{what} must have exactly the keys {', '.join(sorted(keys))}, got {value!r:.80}")


FORMAT = Format(QUANT_METHOD, recognise, read_config)
