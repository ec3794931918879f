"""vLLM serves what :func:`sparse_marlin.save` writes.

vLLM calls :func:`register` in each of its processes, through the entry point ``vllm.general_plugins``. From then on
``quant_method: sparse_marlin`` in a config.json selects :class:`SparseMarlinConfig`. vLLM cuts and fills the canonical
tensors; then each layer gets a :class:`sparse_marlin.CompressedLinear`, which checks, prepares and multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
)

from ..checkpoints import native, reading
from ..checkpoints.files import CONFIG_NAME, CheckpointError, read_json
from ..linear import CompressedLinear
from ..packed import PackedWeight
from ..quantization import QUANT_METHOD
from ..scheme import SCALE_DTYPES, Scheme

_NO_GROUP = -1  # in g_idx, until one is loaded
_HEADS = {"q": 0, "k": 1, "v": 2}  # which part vLLM's name of a shard is; it counts those of other layers


def register() -> None:
    """Makes the checkpoints of this library known to vLLM. Further calls change nothing."""
    register_quantization_config(QUANT_METHOD)(SparseMarlinConfig)


class SparseMarlinConfig(QuantizationConfig):  # type: ignore[misc]  # where vLLM is not installed, its classes are Any
    """The ``quantization_config`` of a config.json, as :mod:`sparse_marlin.checkpoints.native` describes it.

    Attributes:
        modules: the scheme of every compressed module, by its name in vLLM.
    """

    def __init__(self, modules: Mapping[str, Scheme]) -> None:
        super().__init__()
        self.modules = dict(modules)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SparseMarlinConfig:
        """Reads the block.

        Raises:
            CheckpointError: if it is of a newer version, or not as described.
            NotImplementedError: if layers have adapters.
        """
        modules = native.read_modules(config)
        if adapted := [name for name, (_, adapter) in modules.items() if adapter is not None]:
            raise NotImplementedError(
                f"{len(adapted)} modules have adapters, such as {adapted[0]}, which vLLM does not run: compress "
                "without adapter_rank, or use sparse_marlin.load"
            )
        return cls({name: scheme for name, (scheme, _) in modules.items()})

    def maybe_update_config(self, model_name: str, *_: Any, **__: Any) -> None:
        """Holds the headers of the files against the config, as ``sparse_marlin.load`` does, if the model is local.

        vLLM itself asks of a quantized model neither whether all its tensors are stored nor whether all are used.

        Raises:
            CheckpointError: if the stored tensors are not those that the config describes.
        """
        path = Path(model_name)
        if path.is_dir():
            reading.open_checkpoint(path, read_json(path / CONFIG_NAME), native.FORMAT)

    def get_name(self) -> str:
        """``quant_method`` of the config."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """What layers compute in; the kernels of a GPU do not take float32."""
        return list(SCALE_DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability of a GPU."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: everything is in config.json."""
        return []

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        """All tensors are kept; vLLM's default would drop ``g_idx``."""
        return WeightsMapper()

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """From the names of transformers to those of vLLM."""
        self.modules = hf_to_vllm_mapper.apply_dict(self.modules)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase | None:
        """How a layer of vLLM multiplies.

        Raises:
            NotImplementedError: if an embedding, an output head or experts are compressed.
        """
        if isinstance(layer, LinearBase):
            parts = self._parts(prefix)
            compressed = any(scheme is not None for scheme in parts.values())
            return SparseMarlinLinearMethod(prefix, parts) if compressed else UnquantizedLinearMethod()
        if inside := [name for name in self.modules if name == prefix or name.startswith(f"{prefix}.")]:
            raise NotImplementedError(
                f"{inside[0]} is compressed, but under vLLM it belongs to a {type(layer).__name__}, which runs only "
                "uncompressed: leave it out with skip= when compressing, or use sparse_marlin.load"
            )
        return None

    def _parts(self, prefix: str) -> dict[str, Scheme | None]:
        """The modules that a Linear of vLLM consists of, and their schemes; None for plain weights."""
        parent, dot, leaf = prefix.rpartition(".")
        leaves = [leaf] if prefix in self.modules else self.packed_modules_mapping.get(leaf, [leaf])
        return {name: self.modules.get(name) for name in (f"{parent}{dot}{one}" for one in leaves)}


@register_weight_loader_v2_supported_method
class SparseMarlinLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """Holds one Linear of vLLM, which may be several of the checkpoint one below the other (q, k and v, gate and up).

    Neighbours that are stored in the same way become one weight. Others are multiplied each for itself.

    Args:
        prefix: the name of the layer in vLLM.
        parts: the modules that it consists of in the checkpoint, from the top; None for those with plain weights.
    """

    def __init__(self, prefix: str, parts: Mapping[str, Scheme | None]) -> None:
        self.prefix = prefix
        self.parts = dict(parts)
        self.in_features = 0  # on this rank
        self.rows: list[int] = []  # of each part, on this rank
        self.leaves: list[dict[str, int]] = []  # the tensors of each part, and their widths on this rank
        self.loaded: dict[str, set[int]] = {}  # of which parts each tensor has come
        # vLLM finds a compiled model again by its config, without the guards that torch would hold against the weights:
        # what is not in the config must get into a part of it that counts.
        config = get_current_vllm_config_or_none()
        self.compiled_for = None if config is None else config.additional_config

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        *,
        weight_loader: Callable[..., None],
        **_: Any,
    ) -> None:
        """Registers the canonical tensors, in classes that tell vLLM how to cut them.

        Raises:
            ValueError: if tensor parallelism would cut within a group, or within a byte; the text names possible sizes.
            NotImplementedError: if the parts of the layer are not those of the checkpoint.
        """
        if len(self.parts) not in (1, len(output_partition_sizes)):
            raise NotImplementedError(
                f"{self.prefix} has {len(output_partition_sizes)} parts, but its weights are stored as "
                f"{len(self.parts)}: {', '.join(self.parts)}"
            )
        self.rows = output_partition_sizes if len(self.parts) > 1 else [sum(output_partition_sizes)]
        self.in_features = input_size_per_partition
        n, k, count = sum(self.rows), input_size_per_partition, input_size // input_size_per_partition
        for (name, scheme), rows in zip(self.parts.items(), self.rows, strict=True):
            try:
                self.leaves.append(_widths(scheme, rows, input_size, count))
            except ValueError as e:
                raise ValueError(f"{name}, with tensor parallelism over {count} ranks: {e}") from e
        # Where parts differ, each tensor is as wide as the widest part needs, until all are loaded. Only layers that
        # are cut by rows have parts.
        widths = {leaf: max(part.get(leaf, 0) for part in self.leaves) for one in self.leaves for leaf in one}
        by_channel = all(scheme is None or scheme.group_size == -1 for scheme in self.parts.values())
        for leaf, width in widths.items():
            options: dict[str, Any] = {
                "output_dim": 0,
                "weight_loader": self._loader(leaf, weight_loader, k < input_size),
            }
            if leaf == "weight":
                weight = torch.empty(n, width, dtype=params_dtype)
                parameter = ModelWeightParameter(data=weight, input_dim=1, **options)
            elif leaf in ("qweight", "meta"):
                codes, factor = torch.empty(n, width, dtype=torch.uint8), Fraction(k, width)
                parameter = PackedvLLMParameter(data=codes, input_dim=1, packed_dim=1, packed_factor=factor, **options)
            elif leaf == "g_idx":  # one per part
                del options["output_dim"]
                groups = torch.full((len(self.parts), width), _NO_GROUP, dtype=torch.int32)
                parameter = PerTensorScaleParameter(data=groups, **options)
            else:
                values = torch.empty(n, width, dtype=params_dtype if leaf == "scales" else torch.uint8)
                if by_channel:  # every rank has all of it, also of a layer that is cut by columns
                    parameter = ChannelQuantScaleParameter(data=values, **options)
                else:
                    parameter = GroupQuantScaleParameter(data=values, input_dim=1, **options)
            layer.register_parameter(leaf, parameter)
            self.loaded[leaf] = set()

    def _loader(self, leaf: str, weight_loader: Callable[..., None], cut_by_columns: bool) -> Callable[..., None]:
        """vLLM's loader of the layer, which asserts without a text and converts what it should refuse."""

        def load(param: nn.Parameter, loaded: Tensor, *shard: Any) -> None:
            name, shape, parts = f"{self.prefix}.{leaf}", list(loaded.shape), self._parts_of(*shard)
            both_floats = loaded.is_floating_point() and param.is_floating_point()
            if not both_floats and loaded.dtype != param.dtype:
                raise CheckpointError(f"{name} must be {param.dtype}, got {loaded.dtype}")
            if leaf == "g_idx":
                if cut_by_columns:
                    raise NotImplementedError(
                        f"{self.prefix} has a g_idx (act-order), and its columns cannot be cut for tensor parallelism: "
                        "use one GPU, or pipeline parallelism"
                    )
                loaded = loaded[None]
            elif len(self.parts) > 1:
                for part in parts:
                    width = self.leaves[part].get(leaf)
                    if width is None or shape[1:] != [width]:
                        what = "no such tensor" if width is None else f"{width} columns"
                        raise CheckpointError(f"{list(self.parts)[part]} has {what}, got a {leaf} {shape}")
                loaded = nn.functional.pad(loaded, (0, param.shape[1] - loaded.shape[1]))
            try:
                weight_loader(param, loaded, *shard)
            except (AssertionError, RuntimeError) as e:
                raise CheckpointError(f"{name} is {list(param.shape)} here, and a tensor {shape} does not fit") from e
            self.loaded[leaf].update(parts)

        return load

    def _parts_of(self, shard: Any = None) -> list[int]:
        """The parts, by their place, that a tensor belongs to which vLLM loads as this shard."""
        if shard is None or len(self.parts) == 1:
            return [*range(len(self.parts))]
        shards = shard if isinstance(shard, tuple) else (shard,)
        return [one if isinstance(one, int) else _HEADS[one] for one in shards]

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Checks the tensors, and makes the modules of them that multiply.

        Raises:
            CheckpointError: if one is missing, or holds values that cannot be.
        """
        for leaf, found in self.loaded.items():
            needed = {i for i, part in enumerate(self.leaves) if leaf in part}
            if leaf != "g_idx" and (missing := needed - found):
                raise CheckpointError(f"{list(self.parts)[min(missing)]}.{leaf} is missing from the checkpoint")
        tensors: dict[str, Tensor] = {leaf: getattr(layer, leaf).data for leaf in self.loaded}
        for leaf in self.loaded:
            delattr(layer, leaf)
        g_idx = tensors.pop("g_idx", None)
        bias = self._bias(layer)
        modules, first, top = nn.ModuleList(), 0, 0
        for (scheme, _), run in groupby(self.parts, lambda name: self._stored_as(name, g_idx)):
            names = list(run)
            bottom = top + sum(self.rows[first : first + len(names)])
            own = {
                leaf: tensors[leaf][top:bottom, :width] for leaf, width in self.leaves[first].items() if leaf in tensors
            }
            if bottom - top < sum(self.rows):  # let go of the rest
                own = {leaf: t.clone(memory_format=torch.contiguous_format) for leaf, t in own.items()}
            if g_idx is not None and (columns := g_idx[first])[0] != _NO_GROUP:
                own["g_idx"] = columns.clone()
            own_bias = None if bias is None else bias[top:bottom]
            modules.append(_module(" and ".join(names), scheme, own, own_bias, self.in_features))
            first, top = first + len(names), bottom
        layer.parts = modules
        if isinstance(self.compiled_for, dict):
            self.compiled_for.setdefault(QUANT_METHOD, {})[self.prefix] = [_traced(part) for part in modules]

    def _stored_as(self, name: str, g_idx: Tensor | None) -> tuple[Scheme | None, bytes]:
        """What parts must have in common to be one weight."""
        groups = b"" if g_idx is None else g_idx[list(self.parts).index(name)].cpu().numpy().tobytes()
        return self.parts[name], groups

    def _bias(self, layer: nn.Module) -> Tensor | None:
        """The bias, if vLLM passes it to :meth:`apply`: not where it adds it later, or on another rank."""
        adds = not layer.skip_bias_add and not (isinstance(layer, RowParallelLinear) and layer.tp_rank > 0)
        bias = layer.bias if adds else None
        return bias.data if isinstance(bias, Tensor) else None

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ w.T + bias``; the bias is the one that the layer had after loading."""
        parts: Any = layer.parts
        if (bias is None) != (parts[0].bias is None):
            raise RuntimeError(f"{self.prefix} was loaded {'with' if bias is None else 'without'} a bias to add")
        outputs = [part(x) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def _widths(scheme: Scheme | None, rows: int, in_features: int, count: int) -> dict[str, int]:
    """The second dimension of each tensor of a weight, when its columns are cut into ``count`` parts."""
    if scheme is None:
        return {"weight": in_features // count}
    packed = CompressedLinear.empty(in_features, rows, scheme, bias=False).packed
    if count > 1:
        packed = packed.shard(1, 0, count)
    widths = {leaf: t.shape[1] for leaf, t in packed.tensors().items()}
    if not scheme.sparsity:
        widths["g_idx"] = packed.in_features  # the config does not say whether there is one
    return widths


def _traced(part: nn.Module) -> str:
    """What a compiled model assumes of a part, beside its shapes."""
    names = [name for name, _ in (*part.named_parameters(), *part.named_buffers())]
    return f"{part}, {', '.join(names)}, {getattr(part, '_plan', None)}"


def _module(
    name: str, scheme: Scheme | None, tensors: dict[str, Tensor], bias: Tensor | None, in_features: int
) -> nn.Module:
    if scheme is None:
        (weight,) = tensors.values()
        plain = nn.Linear(in_features, len(weight), bias=False, device="meta")
        plain.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            plain.bias = nn.Parameter(bias, requires_grad=False)
        return plain
    if not bool(torch.isfinite(tensors["scales"]).all()):
        raise CheckpointError(f"the scales of {name} hold values that are not finite in {tensors['scales'].dtype}")
    packed = PackedWeight.from_tensors(tensors, scheme, in_features)
    try:
        packed.check_indices()
    except ValueError as e:
        raise CheckpointError(f"the tensors of {name} are damaged: {e}") from e
    linear = CompressedLinear(packed, bias)
    linear.prepare()  # before vLLM compiles the model and captures graphs
    return linear
