"""The library's own checkpoint: a Hugging Face directory whose compressed layers are stored in canonical form.

``config.json`` is the model's, with this block::

    "quantization_config": {
      "quant_method": "sparse_marlin",
      "format_version": 1,
      "groups": [                                   one per scheme, the most frequent first
        {
          "scheme": {"num_bits": 4, "group_size": 128, "sparsity": "2:4", "symmetric": true, "dtype": "float16"},
          "modules": ["model.layers.0.self_attn.q_proj", ...]     every compressed module is in one group, no other is
        }
      ]
    }

Each of the modules has the tensors of :mod:`sparse_marlin.packed` under its name, and ``bias`` where it has one. All
other tensors are stored as they were, tied ones once.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

from ..linear import CompressedLinear
from ..packed import TENSOR_NAMES
from ..scheme import SCALE_DTYPES, Scheme
from .files import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    CheckpointError,
    StoredTensor,
    TensorFiles,
    read_json,
    write_json,
    write_tensors,
)

QUANT_METHOD = "sparse_marlin"
FORMAT_VERSION = 1

_COMPUTE_DTYPES = {str(t).removeprefix("torch."): t for t in SCALE_DTYPES}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Keys of a config that would make transformers import, fetch or choose code.
_CODE_KEYS = (
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
)


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
    layers = {name: m for name, m in model.named_modules() if isinstance(m, CompressedLinear)}
    if not layers:
        raise ValueError("the model has no compressed layer: compress it first, or use its own save_pretrained")
    if not hasattr(model, "config"):
        raise ValueError(f"only models of transformers can be saved, got {type(model).__name__}")
    dtype = _compute_dtype(layers)
    tensors, tied = _tensors(model, layers)

    scratch = path.absolute().with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    scratch.mkdir()
    try:
        write_json(scratch / CONFIG_NAME, _config(model, layers, dtype, tied))
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.to_json_file(scratch / GENERATION_CONFIG_NAME)  # type: ignore[operator, union-attr]
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        write_tensors(scratch, tensors)
        skeleton = open_checkpoint(scratch, read_json(scratch / CONFIG_NAME)).model
        if type(skeleton) is not type(model):
            raise ValueError(
                f"this checkpoint would load as {type(skeleton).__name__}, not as {type(model).__name__}: "
                "only what AutoModelForCausalLM builds for the model's config can be saved"
            )
        old = scratch.with_suffix(".old")
        if path.exists():
            path.rename(old)
        scratch.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


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
        scales = layer.scales.detach()
        stored = scales.to(layer.scheme.dtype)
        if torch.equal(stored.to(scales.dtype), scales):
            tensors[f"{name}.scales"] = stored
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
    groups: dict[Scheme, list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault(layer.scheme, []).append(name)
    config["quantization_config"] = {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "groups": [
            {"scheme": scheme.to_dict(), "modules": names}
            for scheme, names in sorted(groups.items(), key=lambda item: -len(item[1]))
        ],
    }
    return dict(sorted(config.items()))  # as transformers has it


# ------------------------------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose config and headers have been read and checked, its weights not.

    Attributes:
        path: the directory.
        model: the model with its compressed layers, all parameters on the meta device.
        dtype: what the model computed in when it was saved.
        files: the stored tensors.
    """

    path: Path
    model: nn.Module
    dtype: torch.dtype
    files: TensorFiles

    @property
    def layers(self) -> dict[str, CompressedLinear]:
        """The compressed layers by name."""
        return {name: m for name, m in self.model.named_modules() if isinstance(m, CompressedLinear)}


def load(
    path: Path, config: Mapping[str, Any], *, dtype: torch.dtype | None, device: torch.device | str | None
) -> nn.Module:
    """Loads a checkpoint of this format. See :func:`sparse_marlin.checkpoints.load`."""
    if dtype is not None and dtype not in SCALE_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_COMPUTE_DTYPES)}, got {dtype}")
    device = torch.device(device or "cpu")
    checkpoint = open_checkpoint(path, config, dtype)
    model, stored = checkpoint.model, checkpoint.files.tensors
    compute = dtype or checkpoint.dtype
    scales = {f"{name}.scales" for name in checkpoint.layers}
    groups = {names[0]: names for names in _tied_names(model, stored)}
    for name, t in checkpoint.files.read():
        # Scales may be stored more precisely or less than the model computes; what else differs from the model's
        # dtype was kept apart from it on purpose.
        cast = name in scales or t.dtype == checkpoint.dtype
        value = t.to(device, compute if cast else t.dtype, copy=True)
        if name in scales and not bool(torch.isfinite(value).all()):
            raise CheckpointError(f"{stored[name].file}: tensor {name} holds values that are not finite in {compute}")
        _assign(model, groups[name], value)
    for name, layer in checkpoint.layers.items():
        try:
            layer.packed.check_indices()
        except ValueError as e:
            raise CheckpointError(f"{stored[f'{name}.qweight'].file}: the tensors of {name} are damaged: {e}") from e
    return model.to(device).eval()  # for the buffers that no checkpoint stores


def open_checkpoint(path: Path, config: Mapping[str, Any], dtype: torch.dtype | None = None) -> Checkpoint:
    """Reads and checks the config and the headers of a checkpoint.

    Args:
        path: the directory.
        config: its config.json.
        dtype: what the model is to compute in; default: what it computed in when saved.

    Raises:
        CheckpointError: if the config is not one of this format, or does not describe the stored tensors.
    """
    file = path / CONFIG_NAME
    try:
        schemes = read_schemes(config["quantization_config"])
    except CheckpointError as e:
        raise CheckpointError(f"{file}: {e}") from e
    name = config.get("dtype")
    if not isinstance(name, str) or name not in _COMPUTE_DTYPES:
        raise CheckpointError(f"{file}: dtype must be one of {', '.join(_COMPUTE_DTYPES)}, got {name!r}")
    saved_dtype = _COMPUTE_DTYPES[name]
    files = TensorFiles(path)
    model = _skeleton(file, config, dtype or saved_dtype)
    if (generation := path / GENERATION_CONFIG_NAME).exists():
        model.generation_config = GenerationConfig.from_dict(read_json(generation))  # type: ignore[assignment]
    for name, scheme in schemes.items():
        _swap(file, model, name, scheme, has_g_idx=f"{name}.g_idx" in files.tensors)
    checkpoint = Checkpoint(path, model, saved_dtype, files)
    _check_tensors(checkpoint)
    return checkpoint


def read_schemes(quantization: Mapping[str, Any]) -> dict[str, Scheme]:
    """The scheme of every compressed module, from ``quantization_config``.

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
    schemes: dict[str, Scheme] = {}
    for group in groups:
        _require_keys("a group of quantization_config", group, {"scheme", "modules"})
        modules = group["modules"]
        if not isinstance(modules, list) or not all(isinstance(m, str) for m in modules):
            raise CheckpointError(f"the modules of a group must be a list of names, got {modules!r:.80}")
        if twice := [m for m, count in Counter([*schemes, *modules]).items() if count > 1]:
            raise CheckpointError(f"quantization_config lists modules twice: {', '.join(twice[:4])}")
        try:
            schemes.update(dict.fromkeys(modules, Scheme.from_dict(group["scheme"])))
        except ValueError as e:
            raise CheckpointError(f"quantization_config: {e}") from e
    return schemes


def _require_keys(what: str, value: Any, keys: set[str]) -> None:
    if not isinstance(value, Mapping) or set(value) != keys:
        raise CheckpointError(f"{what} must have exactly the keys {', '.join(sorted(keys))}, got {value!r:.80}")


def _skeleton(file: Path, config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """The uncompressed model that a config describes, parameters on the meta device, buffers computed."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise CheckpointError(f"{file}: the installed transformers does not know the model_type {model_type!r}")
    try:
        # From the dictionary, not through AutoConfig, which would look for code of the checkpoint's own.
        parsed = CONFIG_MAPPING[model_type].from_dict(_without_code(config))
        with _parameters_on_meta():
            model: nn.Module = AutoModelForCausalLM.from_config(parsed, dtype=dtype)
    except Exception as e:  # whatever a config's values make of transformers, the config is at fault
        raise CheckpointError(f"{file} does not describe a causal LM: {e}") from e
    return model


def _without_code(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_code(v) for k, v in value.items() if k not in _CODE_KEYS}
    return value


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built inside have their parameters on the meta device, but real buffers.

    A model built under ``torch.device("meta")`` would lose the buffers that it computes and no checkpoint stores, such
    as the rotary frequencies. Here one parameter exists at a time, for the moment before it is registered.
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _swap(file: Path, model: nn.Module, name: str, scheme: Scheme, *, has_g_idx: bool) -> None:
    try:
        linear = model.get_submodule(name)
    except AttributeError:
        linear = None
    if type(linear) is not nn.Linear:
        what = "does not exist" if linear is None else f"is a {type(linear).__name__}, not a Linear,"
        raise CheckpointError(f"{file}: modules lists {name}, which {what} in {type(model).__name__}")
    try:
        layer = CompressedLinear.empty(
            linear.in_features, linear.out_features, scheme, bias=linear.bias is not None, g_idx=has_g_idx
        )
    except ValueError as e:
        raise CheckpointError(f"{file}: {name} cannot be stored as {scheme}: {e}") from e
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)


def _tied_names(model: nn.Module, stored: Mapping[str, StoredTensor]) -> list[list[str]]:
    """Names of each tensor of the model that a checkpoint stores, the one that is stored first."""
    groups: dict[int, list[str]] = {}
    for name, t in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(t), []).append(name)
    return [sorted(names, key=lambda n: n not in stored) for names in groups.values()]


def _check_tensors(checkpoint: Checkpoint) -> None:
    """Compares the headers with what the model needs, both ways."""
    stored = checkpoint.files.tensors
    expected = {names[0]: t for names, t in _expected(checkpoint)}
    problems = [f"missing: {name} {list(t.shape)}" for name, t in expected.items() if name not in stored]
    for name, header in stored.items():
        if (t := expected.get(name)) is None:
            problems.append(f"unexpected in {header.file.name}: {name}{_why_unexpected(checkpoint, name)}")
            continue
        allowed = _FLOATS if t.is_floating_point() else (t.dtype,)
        if header.shape != tuple(t.shape) or header.dtype not in allowed:
            problems.append(
                f"wrong in {header.file.name}: {name} must be {t.dtype} {list(t.shape)}, "
                f"got {header.dtype} {list(header.shape)}"
            )
    if problems:
        shown = "\n  ".join(problems[:8]) + (f"\n  and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CheckpointError(
            f"{checkpoint.path}: the stored tensors are not those that {CONFIG_NAME} describes\n  {shown}"
        )


def _expected(checkpoint: Checkpoint) -> Iterator[tuple[list[str], Tensor]]:
    tensors = checkpoint.model.state_dict(keep_vars=True)
    for names in _tied_names(checkpoint.model, checkpoint.files.tensors):
        yield names, tensors[names[0]]


def _why_unexpected(checkpoint: Checkpoint, name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if leaf in TENSOR_NAMES and module not in checkpoint.layers:
        return f" ({module} is not among the modules of quantization_config)"
    return ""


def _assign(model: nn.Module, names: list[str], value: Tensor) -> None:
    """Puts one tensor where the model has it, as one object under all its names."""
    parameter: nn.Parameter | None = None
    for name in names:
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        if leaf in module._parameters:
            if parameter is None:
                old = module._parameters[leaf]
                parameter = nn.Parameter(value, requires_grad=old is not None and old.requires_grad)
            module._parameters[leaf] = parameter
        else:
            module._buffers[leaf] = value
