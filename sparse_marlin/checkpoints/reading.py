"""Reading a checkpoint of any format: what a format has to say of it, and all that is the same for every format.

A format is a module with a ``FORMAT``: it recognises its config.json and makes a :class:`Layout` of it, which says for
each Linear of the model as which tensors it is stored, with a pure function from these to the canonical weight.
Everything else is here: the model, the headers, the values, the errors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

from ..linear import Adapter, CompressedLinear
from ..packed import TENSOR_NAMES, PackedWeight
from ..scheme import SCALE_DTYPES, AdapterScheme, Scheme
from .files import CONFIG_NAME, GENERATION_CONFIG_NAME, CheckpointError, StoredTensor, TensorFiles, read_json
from .words import keep_24

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPUTE_DTYPES = {str(t).removeprefix("torch."): t for t in SCALE_DTYPES}

# What tools put into a config about how weights are stored; none of it belongs to the model.
STORAGE_KEYS = ("quantization_config", "compression_config", "sparsity_config")

# Keys of a config that would make transformers import, fetch or choose code.
_CODE_KEYS = (
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
)

# Tensors that models compute by themselves, and that older versions of transformers stored nevertheless: rotary
# frequencies [D / 2], causal masks [1, 1, T, T] and what these put in place of a score.
_COMPUTED = {
    re.compile(r"(^|\.)rotary_emb\.inv_freq$"): 1,
    re.compile(r"(^|\.)(attn|attention)\.bias$"): 4,
    re.compile(r"(^|\.)(attn|attention)\.masked_bias$"): 0,
}


@dataclass(frozen=True)
class Slot:
    """A Linear of the model [out_features, in_features], and what is stored under its name, by the last name part."""

    name: str
    out_features: int
    in_features: int
    stored: Mapping[str, StoredTensor]

    def has(self, *leaves: str) -> bool:
        """Whether any of these is stored."""
        return any(leaf in self.stored for leaf in leaves)

    def float_dtype(self, leaf: str) -> torch.dtype:
        """Precision of the scales that are stored as ``leaf``; float16 where they are missing, or no scales."""
        header = self.stored.get(leaf)
        return header.dtype if header is not None and header.dtype in SCALE_DTYPES else torch.float16


@dataclass(frozen=True)
class Expected:
    """What the header of one tensor has to say."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    def __str__(self) -> str:
        return f"{self.dtypes[0]} {list(self.shape)}"


@dataclass(frozen=True)
class StoredLayer:
    """How one Linear is stored, if not as a plain weight.

    Attributes:
        scheme: that of the weight as :attr:`decode` returns it; None for floating-point weights.
        tensors: the tensors that it needs, by what follows the layer's name in theirs; those of an adapter begin with
            ``adapter.``.
        decode: from these tensors, which it leaves as they are, to the canonical weight, or to a floating-point weight
            [out_features, in_features]. Raises ValueError for values that cannot be.
        adapter: how the layer's adapter is stored, or None if it has none.
    """

    out_features: int
    in_features: int
    scheme: Scheme | None
    tensors: Mapping[str, Expected]
    decode: Callable[[Mapping[str, Tensor]], PackedWeight | Tensor]
    adapter: AdapterScheme | None = None


@dataclass(frozen=True)
class Layout:
    """What a config says of how the weights are stored.

    Attributes:
        layer: the storage of a Linear, or None if it is stored as a plain weight. Raises ValueError for what this
            library cannot hold.
        modules: Linears that the config names, and that therefore have to exist.
        ours: written by this library: nothing is tolerated, and floating-point tensors keep their own precision.
    """

    layer: Callable[[Slot], StoredLayer | None]
    modules: Collection[str] = ()
    ours: bool = False


@dataclass(frozen=True)
class Format:
    """A checkpoint format.

    Attributes:
        name: what users call it.
        recognise: whether a config.json belongs to this format.
        read_config: checks what a config says of the storage; raises ValueError.
    """

    name: str
    recognise: Callable[[Mapping[str, Any]], bool]
    read_config: Callable[[Mapping[str, Any]], Layout]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose config and headers have been read and checked, its weights not.

    Attributes:
        path: the directory.
        format: name of the format.
        config: its config.json.
        model: the uncompressed model, all parameters on the meta device.
        dtype: what the model computes in.
        files: the stored tensors.
        layers: how each Linear that is not stored plainly is stored.
        plain: the names in the model of each other tensor, by the name under which it is stored.
        zeros: biases that the model does not have, which some tools store as zeros.
        ours: see :class:`Layout`.
    """

    path: Path
    format: str
    config: Mapping[str, Any]
    model: nn.Module
    dtype: torch.dtype
    files: TensorFiles
    layers: Mapping[str, StoredLayer]
    plain: Mapping[str, list[str]] = field(default_factory=dict)
    zeros: Collection[str] = ()
    ours: bool = False

    def work(self) -> list[tuple[list[str], list[str]]]:
        """Plain tensors and layers in the order in which they are read: a pair of lists for each file.

        A layer belongs to the file with the first of its tensors.
        """
        by_file: dict[Path, tuple[list[str], list[str]]] = {}
        tensors = self.files.tensors
        for name in self.plain:
            by_file.setdefault(tensors[name].file, ([], []))[0].append(name)
        for name, layer in self.layers.items():
            first = tensors[f"{name}.{next(iter(layer.tensors))}"].file
            by_file.setdefault(first, ([], []))[1].append(name)
        return [by_file[file] for file in sorted(by_file)]

    def layer_nbytes(self, name: str) -> int:
        """Stored bytes of a layer's weight, adapter included."""
        return sum(self.files.tensors[f"{name}.{leaf}"].nbytes for leaf in self.layers[name].tensors)

    def read_layer(self, name: str, compute: torch.dtype) -> PackedWeight | Tensor:
        """The weight of a layer, in its own precision and with its own memory.

        Raises:
            CheckpointError: if its values are damaged, or some are not finite in ``compute``.
        """
        layer = self.layers[name]
        stored = {leaf: self.files.tensors[f"{name}.{leaf}"] for leaf in layer.tensors}
        values = self.files.get(f"{name}.{leaf}" for leaf in layer.tensors)
        tensors = {leaf: values[f"{name}.{leaf}"] for leaf in layer.tensors}
        for leaf, t in tensors.items():
            if t.is_floating_point() and not bool(torch.isfinite(t.to(compute)).all()):
                raise CheckpointError(
                    f"{stored[leaf].file}: tensor {name}.{leaf} holds values that are not finite in {compute}"
                )
        if (bias := f"{name}.bias") in self.zeros and bool(self.files.get([bias])[bias].count_nonzero()):
            raise CheckpointError(
                f"{self.files.tensors[bias].file}: tensor {bias} is not zero, but this layer of "
                f"{type(self.model).__name__} has no bias: {CONFIG_NAME} does not belong to these weights"
            )
        try:
            weight = layer.decode(tensors)
            if isinstance(weight, PackedWeight):
                weight.check_indices()
        except ValueError as e:
            file = next(iter(stored.values())).file
            raise CheckpointError(f"{file}: the tensors of {name} are damaged: {e}") from e
        if not isinstance(weight, PackedWeight):
            return weight.clone()
        weight = weight if self.ours else keep_24(weight)
        copies = {n: t.clone() for n, t in weight.tensors().items()}
        return PackedWeight.from_tensors(copies, weight.scheme, weight.in_features)

    def read_adapter(self, name: str) -> Adapter | None:
        """The adapter of a layer, as it is stored; :meth:`read_layer` checks its values."""
        layer = self.layers[name]
        if layer.adapter is None:
            return None
        assert layer.scheme is not None
        prefix = f"{name}.adapter."
        stored = self.files.get(f"{name}.{leaf}" for leaf in layer.tensors if leaf.startswith("adapter."))
        adapter = Adapter.empty(layer.in_features, layer.out_features, layer.adapter, layer.scheme.dtype)
        adapter.load_state_dict({n.removeprefix(prefix): t.clone() for n, t in stored.items()}, assign=True)
        return adapter

    def read_adapters(self) -> dict[str, tuple[Adapter, torch.dtype]]:
        """Every layer's adapter, and the precision of the layer's scheme."""
        found = {name: (self.read_adapter(name), layer.scheme) for name, layer in self.layers.items()}
        return {
            name: (adapter, scheme.dtype)
            for name, (adapter, scheme) in found.items()
            if adapter is not None and scheme is not None
        }

    def plain_dtype(self, name: str, dtype: torch.dtype | None = None) -> torch.dtype:
        """The dtype that a plain tensor gets in a model that computes in ``dtype``."""
        stored = self.files.tensors[name].dtype
        if self.ours:  # what differs from the model's dtype was kept apart from it on purpose
            return dtype if dtype is not None and stored == self.dtype else stored
        module, _, leaf = self.plain[name][0].rpartition(".")
        in_model: torch.dtype = getattr(self.model.get_submodule(module), leaf).dtype
        return dtype if dtype is not None and in_model == self.dtype else in_model


def load(
    path: Path,
    config: Mapping[str, Any],
    checkpoint_format: Format,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> nn.Module:
    """Loads a model. See :func:`sparse_marlin.checkpoints.load`."""
    if dtype is not None and dtype not in SCALE_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(COMPUTE_DTYPES)}, got {dtype}")
    device = torch.device(device or "cpu")
    checkpoint = open_checkpoint(path, config, checkpoint_format)
    compute = dtype or checkpoint.dtype
    model = checkpoint.model
    weights: dict[str, tuple[PackedWeight, Adapter | None]] = {}
    plain_dtypes = {name: checkpoint.plain_dtype(name, dtype) for name in checkpoint.plain}
    for plain, layers in checkpoint.work():
        for name, t in checkpoint.files.get(plain).items():
            target = plain_dtypes[name] if t.is_floating_point() else t.dtype
            _assign(model, checkpoint.plain[name], t.to(device, target, copy=True))
        for name in layers:
            weight = checkpoint.read_layer(name, compute)
            if isinstance(weight, PackedWeight):
                packed = replace(weight, scales=weight.scales.to(compute)).to(device)
                weights[name] = packed, checkpoint.read_adapter(name)
            else:
                _assign(model, [f"{name}.weight"], weight.to(device, compute))
    for name, (packed, adapter) in weights.items():
        parent, _, leaf = name.rpartition(".")
        bias = model.get_submodule(name).bias
        layer = CompressedLinear(packed, bias if isinstance(bias, Tensor) else None, adapter)
        setattr(model.get_submodule(parent), leaf, layer)
    return model.to(device).eval()  # for the buffers that no checkpoint stores


def open_checkpoint(path: Path, config: Mapping[str, Any], checkpoint_format: Format) -> Checkpoint:
    """Reads and checks the config and the headers of a checkpoint.

    Raises:
        CheckpointError: if the config is not one of this format, or does not describe the stored tensors.
    """
    file = path / CONFIG_NAME
    try:
        layout = checkpoint_format.read_config(config)
    except ValueError as e:
        raise CheckpointError(f"{file}: {e}") from e
    stated = config.get("dtype", config.get("torch_dtype"))
    if (stated is not None or layout.ours) and (not isinstance(stated, str) or stated not in COMPUTE_DTYPES):
        raise CheckpointError(f"{file}: dtype must be one of {', '.join(COMPUTE_DTYPES)}, got {stated!r}")
    files = TensorFiles(path)
    dtype = COMPUTE_DTYPES[stated] if stated is not None else _most_common_float(files)
    model = _skeleton(file, without_storage(config), dtype, files)
    if (generation := path / GENERATION_CONFIG_NAME).exists():
        values = read_json(generation)
        try:
            model.generation_config = GenerationConfig.from_dict(values)  # type: ignore[assignment]
        except Exception as e:  # whatever its values make of transformers
            raise CheckpointError(f"{generation} is no generation config: {e}") from e
    checkpoint = Checkpoint(path, checkpoint_format.name, config, model, dtype, files, {}, ours=layout.ours)
    checkpoint = replace(checkpoint, layers=_layers(checkpoint, layout))
    plain, zeros = _match(checkpoint)
    return replace(checkpoint, plain=plain, zeros=zeros)


def without_storage(config: Mapping[str, Any]) -> dict[str, Any]:
    """The model's part of a config.json: nothing of how its weights are stored."""
    return {k: v for k, v in config.items() if k not in STORAGE_KEYS}


def without_code(value: Any) -> Any:
    """A config without the keys that name code."""
    if isinstance(value, Mapping):
        return {k: without_code(v) for k, v in value.items() if k not in _CODE_KEYS}
    return value


def _most_common_float(files: TensorFiles) -> torch.dtype:
    sizes: Counter[torch.dtype] = Counter()
    for t in files.tensors.values():
        if t.dtype in SCALE_DTYPES:
            sizes[t.dtype] += t.nbytes
    return sizes.most_common(1)[0][0] if sizes else torch.float16


def _skeleton(file: Path, config: Mapping[str, Any], dtype: torch.dtype, files: TensorFiles) -> nn.Module:
    """The uncompressed model that a config describes, parameters on the meta device, buffers computed."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise CheckpointError(f"{file}: the installed transformers does not know the model_type {model_type!r}")
    try:
        # From the dictionary, not through AutoConfig, which would look for code of the checkpoint's own.
        parsed = CONFIG_MAPPING[model_type].from_dict(without_code(config))
        _check_sizes(parsed.get_text_config(), files)
        with _parameters_on_meta():
            model: nn.Module = AutoModelForCausalLM.from_config(parsed, dtype=dtype)
    except Exception as e:  # whatever a config's values make of transformers, the config is at fault
        raise CheckpointError(f"{file} does not describe a causal LM: {e}") from e
    return model


def _check_sizes(config: Any, files: TensorFiles) -> None:
    """Raises ValueError for a model far larger than what is stored: building it might take all memory, or forever."""
    largest = 8 * max((d for t in files.tensors.values() for d in t.shape), default=0)  # 8: integers in a word
    limits = {"num_hidden_layers": len(files.tensors)}
    limits |= dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "head_dim"), largest)
    for key, limit in limits.items():
        value = getattr(config, key, None)
        if isinstance(value, int) and value > limit:
            raise ValueError(f"{key} is {value}, but the stored tensors leave room for {limit} at most")


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


def _layers(checkpoint: Checkpoint, layout: Layout) -> dict[str, StoredLayer]:
    file, model = checkpoint.path / CONFIG_NAME, checkpoint.model
    linears = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    for name in layout.modules:
        if name not in linears:
            found = dict(model.named_modules()).get(name)
            what = "does not exist" if found is None else f"is a {type(found).__name__}, not a Linear,"
            raise CheckpointError(f"{file}: modules lists {name}, which {what} in {type(model).__name__}")
    stored: dict[str, dict[str, StoredTensor]] = {}
    for name, header in checkpoint.files.tensors.items():
        module, _, leaf = name.rpartition(".")
        stored.setdefault(module, {})[leaf] = header
    layers = {}
    for name, m in linears.items():
        slot = Slot(name, m.out_features, m.in_features, stored.get(name, {}))
        try:
            layer = layout.layer(slot)
        except ValueError as e:
            raise CheckpointError(f"{file}: {name}: {e}") from e
        if layer is not None:
            layers[name] = layer
    return layers


def _match(checkpoint: Checkpoint) -> tuple[dict[str, list[str]], set[str]]:
    """Compares the headers with what the model needs, both ways: ``plain`` and ``zeros`` of a checkpoint."""
    stored, ours = checkpoint.files.tensors, checkpoint.ours
    weights = {f"{name}.weight" for name in checkpoint.layers}
    expected: dict[str, Expected] = {}
    plain: dict[str, list[str]] = {}
    spare: dict[str, Expected] = {}  # further names of tied tensors, under which they may be stored once more
    for names, t in _tied_tensors(checkpoint.model, weights):
        names.sort(key=lambda n: n not in stored)
        plain[names[0]] = names
        expected[names[0]] = Expected(tuple(t.shape), FLOATS if t.is_floating_point() else (t.dtype,))
        if not ours:
            spare.update({name: expected[names[0]] for name in names[1:] if name in stored})
    for name, layer in checkpoint.layers.items():
        expected.update({f"{name}.{leaf}": e for leaf, e in layer.tensors.items()})
    zeros: set[str] = set()
    problems = [f"missing: {name} {list(e.shape)}" for name, e in expected.items() if name not in stored]
    for name, header in stored.items():
        want = expected.get(name) or spare.get(name)
        module, _, leaf = name.rpartition(".")
        if want is None and not ours:
            if any(pattern.search(name) and len(header.shape) == dims for pattern, dims in _COMPUTED.items()):
                continue
            if leaf == "bias" and module in checkpoint.layers:
                zeros.add(name)
                want = Expected((checkpoint.layers[module].out_features,), FLOATS)
        if want is None:
            problems.append(f"unexpected in {header.file.name}: {name}{_why_unexpected(checkpoint, name)}")
        elif header.shape != want.shape or header.dtype not in want.dtypes:
            problems.append(
                f"wrong in {header.file.name}: {name} must be {want}, got {header.dtype} {list(header.shape)}"
            )
    if problems:
        shown = "\n  ".join(problems[:8]) + (f"\n  and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CheckpointError(
            f"{checkpoint.path}: the stored tensors are not those that {CONFIG_NAME} describes\n  {shown}"
        )
    _check_spare(checkpoint, plain, spare)
    return plain, zeros


def _check_spare(checkpoint: Checkpoint, plain: Mapping[str, list[str]], spare: Collection[str]) -> None:
    """Copies of a tied tensor have to be equal to it: else loading would drop one of the two."""
    for first, names in plain.items():
        for name in names[1:]:
            if name in spare:
                values = checkpoint.files.get([first, name])
                if not torch.equal(values[first], values[name]):
                    raise CheckpointError(
                        f"{checkpoint.files.tensors[name].file}: tensor {name} differs from {first}, but the model "
                        "ties them: set tie_word_embeddings to false in config.json if that is meant"
                    )


def _tied_tensors(model: nn.Module, without: Collection[str]) -> Iterator[tuple[list[str], Tensor]]:
    """All names of each tensor of the model's state, except those in ``without``."""
    groups: dict[int, tuple[list[str], Tensor]] = {}
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", {})  # from_pretrained ties after loading alone
    for name, t in state.items():
        if name not in without:
            groups.setdefault(id(state.get(ties.get(name, name), t)), ([], t))[0].append(name)
    yield from groups.values()


def _why_unexpected(checkpoint: Checkpoint, name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if checkpoint.ours:
        if ".adapter." in name:
            return f" (quantization_config gives {name.partition('.adapter.')[0]} no such adapter)"
        if leaf in TENSOR_NAMES and module not in checkpoint.layers:
            return f" ({module} is not among the modules of quantization_config)"
        return ""
    found = dict(checkpoint.model.named_modules()).get(module)
    if found is None:
        return f" ({type(checkpoint.model).__name__} of the installed transformers has no module {module})"
    if not isinstance(found, nn.Linear) and leaf != "weight":
        return f" ({module} is a {type(found).__name__}, not a Linear)"
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
