"""The implementations that are compared: ours and what else is installed, all made from one canonical weight."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcusparselt
import results
import torch
from torch import Tensor
from torch.nn.functional import linear

import sparse_marlin
from sparse_marlin import CompressedLinear, Scheme, dispatch, runtime
from sparse_marlin.packed import PackedWeight, dequantize

Function = Callable[[Tensor], Tensor]

_CHUNK = 1 << 25  # weights that are made or dequantized at a time


@dataclass(frozen=True)
class Prepared:
    """An implementation's form of one weight.

    Attributes:
        copy: makes y = f(x) with a copy of the weight of its own.
        bits_per_weight: stored, scales included, per weight of the dense matrix.
        weight: what it dequantizes to, [N, K]; None: what the canonical weight does, rounded to the dtype of x.
        group_size: columns per scale, 0 without scales; None: as in the canonical weight.
    """

    copy: Callable[[], Function]
    bits_per_weight: float
    weight: Tensor | None = None
    group_size: int | None = None


@dataclass
class Peer:
    """One implementation.

    Attributes:
        sparsities: what it makes of a 2:4 weight; one that only knows dense weights is compared on those.
        bits: that it stores, or None: those of the canonical weight.
    """

    name: str
    sparsities: tuple[str, ...] = ("none",)
    bits: int | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)

    def missing(self) -> str | None:
        """Why it cannot run on this machine, or None."""
        return None

    def version(self) -> str:
        return f"torch {torch.__version__}"

    def refuses(self, scheme: Scheme, dtype: torch.dtype, N: int, K: int) -> str | None:
        """Why it has nothing for such a weight, or None."""
        if dtype not in self.dtypes:
            return f"only for {' and '.join(str(t).removeprefix('torch.') for t in self.dtypes)}"
        return None

    def prepare(self, packed: PackedWeight, dtype: torch.dtype) -> Prepared:
        """May raise anything: the implementation is left out then, with the reason."""
        raise NotImplementedError


def dense_weight(packed: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The dequantized weight, made in parts: whole, the float32 values would need several times the memory."""
    n, k, s = packed.out_features, packed.in_features, packed.scheme
    out = torch.empty(n, k, dtype=dtype, device=packed.device)
    rows = max(1, _CHUNK // k)
    for i in range(0, n, rows):
        t = slice(i, i + rows)
        meta = None if packed.meta is None else packed.meta[t]
        out[t] = dequantize(packed.qweight[t], packed.scales[t], meta, None, None, s.num_bits, s.group_size, k, dtype)
    return out


def random_weight(N: int, K: int, scheme: Scheme, device: torch.device, seed: int = 0) -> PackedWeight:
    """Normally distributed weights, rounded to nearest; of each four the two largest are kept where it is 2:4.

    What a GPU's clocks are depends on the values, so they are distributed as those of a model are.
    """
    if reason := scheme.why_not(N, K):
        raise ValueError(reason)
    random = torch.Generator(device).manual_seed(seed)
    parts: list[Mapping[str, Tensor]] = []
    rows = max(1, _CHUNK // K)
    for i in range(0, N, rows):
        n = min(rows, N - i)
        w = torch.randn(n, K, generator=random, device=device).mul_(0.02)
        mask = None
        if scheme.sparsity:
            mask = largest_two(w)
        grouped = w.view(n, scheme.num_groups(K), -1)
        scales = (grouped.abs().amax(2) / (scheme.zero_code - 0.5)).to(scheme.dtype)
        codes = grouped.div_(scales.float().unsqueeze(2)).round_().add_(scheme.zero_code).clamp_(0, scheme.max_code)
        parts.append(PackedWeight.pack(codes.view(n, K).to(torch.uint8), scales, scheme, mask).tensors())
    tensors = {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
    return PackedWeight.from_tensors(tensors, scheme, K)


def largest_two(w: Tensor) -> Tensor:
    """[N, K] bool, true for the two of each four weights that are largest; many times faster than topk on a GPU."""
    quads = w.abs().view(torch.int32).view(w.shape[0], -1, 4)
    # Floats order as their bits do; positions in place of the last bits leave no ties.
    keys = quads.bitwise_and_(-4).bitwise_or_(torch.arange(4, dtype=torch.int32, device=w.device))
    larger = keys.unsqueeze(2) > keys.unsqueeze(3)
    return larger.sum(3, dtype=torch.uint8).lt_(2).bool().view(w.shape)


def clones(make: Callable[..., Function], *tensors: Tensor) -> Callable[[], Function]:
    """What :attr:`Prepared.copy` is for an implementation whose weight is a few tensors."""
    return lambda: make(*(t.clone() for t in tensors))


class Ours(Peer):
    """CompressedLinear, with the kernels that the dispatcher chooses, or the best of those whose names begin alike."""

    def __init__(self, prefix: str | None = None) -> None:
        super().__init__("sparse_marlin" if prefix is None else f"sparse_marlin:{prefix}", ("none", "2:4"))
        self.prefix = prefix

    def missing(self) -> str | None:
        if not torch.cuda.is_available():
            return None if self.prefix is None else "there is no GPU, and so no kernel to choose"
        if reason := runtime.extension_error():
            return f"no CUDA kernels: {reason}"
        return None

    def version(self) -> str:
        return sparse_marlin.__version__

    def plan(self, packed: PackedWeight, dtype: torch.dtype) -> str | None:
        """Of the kernels with this prefix."""
        assert self.prefix is not None
        kernels = [k for k in runtime.kernels(packed.scheme, dtype) if k.name.startswith(self.prefix)]
        device = runtime.device_properties(packed.device.index)
        return dispatch.plan(packed.out_features, packed.in_features, packed.scheme, dtype, device, kernels)

    def prepare(self, packed: PackedWeight, dtype: torch.dtype) -> Prepared:
        plan = None
        if self.prefix is not None and (plan := self.plan(packed, dtype)) is None:
            raise ValueError(f"no kernel {self.prefix}* can multiply by a {packed.scheme} weight in {dtype}")

        def make() -> Function:
            layer = CompressedLinear(packed)
            # On a GPU the fallback must never be what is timed.
            if not layer.prepare(dtype) and packed.device.type == "cuda":
                raise ValueError("no kernel takes this weight: see the warning above")
            if plan is not None:
                layer._plan = plan  # there is no public way: nobody but a benchmark forces kernels
            return layer

        return Prepared(make, packed.scheme.bits_per_weight(packed.in_features))


class Cublas(Peer):
    """torch's own product with the dequantized weight: what speedups are relative to."""

    def __init__(self) -> None:
        super().__init__(results.BASE, bits=16)

    def version(self) -> str:
        return super().version() + ("" if torch.cuda.is_available() else ", on the CPU: stands for cuBLAS here")

    def prepare(self, packed: PackedWeight, dtype: torch.dtype) -> Prepared:
        make = clones(lambda w: lambda x: linear(x, w), dense_weight(packed, dtype))
        return Prepared(make, 16, group_size=0)


class TorchInt4(Peer):
    """``_weight_int4pack_mm`` of torch, "tinygemm"."""

    def __init__(self) -> None:
        super().__init__("torch_int4", dtypes=(torch.bfloat16,))

    def missing(self) -> str | None:
        return no_gpu()

    def refuses(self, scheme: Scheme, dtype: torch.dtype, N: int, K: int) -> str | None:
        if scheme.num_bits != 4:
            return "only for 4 bits"
        if scheme.group_size not in (32, 64, 128):
            return "only for groups of 32, 64, 128 or 256"
        if N % 8 or K % 128:
            return "only for N that are multiples of 8 and K of 128"
        return super().refuses(scheme, dtype, N, K)

    def tensors(self, packed: PackedWeight) -> tuple[Tensor, Tensor]:
        """The operator's weight, and its scales with zeros: weight = (integer - 8) * scale + zero."""
        q = packed.qweight
        swapped = q << 4 | q >> 4  # it takes the first integer from the high nibble
        weight = torch.ops.aten._convert_weight_to_int4pack(swapped, 8)
        scales = packed.scales.to(torch.bfloat16).t()
        return weight, torch.stack([scales, torch.zeros_like(scales)], 2).contiguous()

    def prepare(self, packed: PackedWeight, dtype: torch.dtype) -> Prepared:
        group = packed.scheme.group_size

        def make(weight: Tensor, scales: Tensor) -> Function:
            return lambda x: torch.ops.aten._weight_int4pack_mm(x, weight, group, scales)

        return Prepared(clones(make, *self.tensors(packed)), 4 + 32 / group)


class Torchao(TorchInt4):
    """The tile-packed tensor of torchao: the kernel of torch_int4, called as torchao does."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "torchao"

    def missing(self) -> str | None:
        return super().missing() or not_importable("torchao.quantization")

    def version(self) -> str:
        return package_version("torchao")

    def prepare(self, packed: PackedWeight, dtype: torch.dtype) -> Prepared:
        tensor_type = importlib.import_module("torchao.quantization").Int4TilePackedTo4dTensor
        group, shape = packed.scheme.group_size, torch.Size((packed.out_features, packed.in_features))

        def make(weight: Tensor, scales: Tensor) -> Function:
            w = tensor_type(weight, scales, [1, group], shape)
            return lambda x: linear(x, w)

        return Prepared(clones(make, *self.tensors(packed)), 4 + 32 / group)


NOT_SEARCHED = "not all of its algorithms have been tried for this M"


class Cusparselt(Peer):
    """NVIDIA's 2:4 library: 16-bit values, by its default algorithm, or the best one for each M.

    Attributes:
        algorithms: by N, K, dtype and M; :mod:`cusparselt` finds them, None where none of them works. Instead of the
            mapping None: the default.
    """

    BITS_PER_WEIGHT = 16 / 2 + 1  # half of the values, two bits of position for each

    def __init__(self, algorithms: Mapping[tuple[int, int, str, int], int | None] | None = None) -> None:
        super().__init__("cusparselt" if algorithms is None else "cusparselt:best", ("2:4",), bits=16)
        self.algorithms = algorithms

    def missing(self) -> str | None:
        if reason := no_gpu():
            return reason
        if not torch.backends.cusparselt.is_available():
            return "this torch is built without it"
        try:
            libcusparselt.library()
        except RuntimeError as e:
            return first_line(e)
        return None

    def version(self) -> str:
        return libcusparselt.library().version

    def refuses(self, scheme: Scheme, dtype: torch.dtype, N: int, K: int) -> str | None:
        if N % 16 or K % 16:
            return "only for N and K that are multiples of 16"
        return super().refuses(scheme, dtype, N, K)

    def prepare(self, packed: PackedWeight, dtype: torch.dtype) -> Prepared:
        weight = dense_weight(packed, dtype)
        n, k = weight.shape
        name = str(dtype).removeprefix("torch.")

        def make(w: Tensor) -> Function:
            def call(x: Tensor) -> Tensor:
                problem = n, k, name, x.shape[0]
                if self.algorithms is not None and problem not in self.algorithms:
                    raise ValueError(NOT_SEARCHED)
                algorithm = 0 if self.algorithms is None else self.algorithms[problem]
                if algorithm is None:
                    raise ValueError("none of its algorithms works for this M")
                return libcusparselt.cusparselt_linear(x, w, n, algorithm)

            return call

        return Prepared(clones(make, torch._cslt_compress(weight)), self.BITS_PER_WEIGHT, group_size=0)


class Humming(Peer):
    """The layer of humming-kernels, compiled for each layer by its own heuristics when first called."""

    def __init__(self) -> None:
        super().__init__("humming")

    def missing(self) -> str | None:
        return no_gpu() or not_importable("humming.layer")

    def version(self) -> str:
        return package_version("humming-kernels")

    def prepare(self, packed: PackedWeight, dtype: torch.dtype) -> Prepared:
        s, n, k = packed.scheme, packed.out_features, packed.in_features
        layer_type = importlib.import_module("humming.layer").HummingLayer
        config: dict[str, Any] = {"dtype": f"int{s.num_bits}", "group_size": max(s.group_size, 0)}
        with packed.device:
            layer = layer_type(n, k, config, torch_dtype=dtype)
        # Its integers are our codes, first one in the low bits; symmetric weights are offset as ours are.
        tensors = {"weight": packed.qweight.view(torch.int32), "weight_scale": packed.scales.to(dtype)}
        layer.load_from_tensors(tensors)
        layer.transform()
        return Prepared(lambda: twin(layer), s.bits_per_weight(k))


def twin(module: torch.nn.Module) -> torch.nn.Module:
    """A module that shares everything but its tensors with another one."""
    other = copy.copy(module)
    other._parameters = {
        name: None if p is None else torch.nn.Parameter(p.detach().clone(), requires_grad=False)
        for name, p in module._parameters.items()
    }
    other._buffers = {name: None if b is None else b.clone() for name, b in module._buffers.items()}
    return other


class VllmMarlin(Peer):
    """vLLM's Marlin for GPTQ weights."""

    def __init__(self, name: str = "vllm_marlin") -> None:
        super().__init__(name)

    def missing(self) -> str | None:
        return no_gpu() or not_importable("vllm._custom_ops")

    def version(self) -> str:
        return package_version("vllm")

    def prepare(self, packed: PackedWeight, dtype: torch.dtype) -> Prepared:
        ops = importlib.import_module("vllm._custom_ops")
        utils = importlib.import_module("vllm.model_executor.layers.quantization.utils.marlin_utils")
        s, n, k, device = packed.scheme, packed.out_features, packed.in_features, packed.device
        kind = vllm_type(s)
        order = utils.marlin_make_empty_g_idx(device)
        weight = ops.gptq_marlin_repack(gptq_weight(packed), order, k, n, s.num_bits)
        scales = utils.marlin_permute_scales(packed.scales.to(dtype).t().contiguous(), k, n, s.group_size)
        zeros, workspace = utils.marlin_make_empty_g_idx(device), utils.marlin_make_workspace_new(device)

        def make(w: Tensor, s: Tensor) -> Function:
            return lambda x: utils.apply_gptq_marlin_linear(x, w, s, zeros, order, order, workspace, kind, n, k, True)

        return Prepared(clones(make, weight, scales), s.bits_per_weight(k))


class VllmMachete(VllmMarlin):
    """vLLM's Machete, for Hopper."""

    def __init__(self) -> None:
        super().__init__("vllm_machete")

    def missing(self) -> str | None:
        if reason := super().missing():
            return reason
        major, minor = torch.cuda.get_device_capability()
        return None if major == 9 else f"only for compute capability 9.0, this GPU has {major}.{minor}"

    def prepare(self, packed: PackedWeight, dtype: torch.dtype) -> Prepared:
        ops = importlib.import_module("vllm._custom_ops")
        s, kind = packed.scheme, vllm_type(packed.scheme)
        by_column = gptq_weight(packed).t().contiguous().t()
        weight = ops.machete_prepack_B(by_column, dtype, kind, dtype)
        scales = packed.scales.to(dtype).t().contiguous()

        def make(w: Tensor, scales: Tensor) -> Function:
            options = {"b_group_scales": scales, "b_group_size": s.group_size}
            return lambda x: ops.machete_mm(x, w, kind, **options)

        return Prepared(clones(make, weight, scales), s.bits_per_weight(packed.in_features))


def vllm_type(scheme: Scheme) -> Any:
    types = importlib.import_module("vllm.scalar_type").scalar_types
    return types.uint4b8 if scheme.num_bits == 4 else types.uint8b128


def gptq_weight(packed: PackedWeight) -> Tensor:
    """[K * bits / 32, N] int32: the integers of a column one after the other, the first in the low bits."""
    return packed.qweight.view(torch.int32).t().contiguous()


class Bitsandbytes(Peer):
    """NF4 of bitsandbytes, blocks of 64: other values than ours, compared on its own."""

    def __init__(self) -> None:
        super().__init__("bitsandbytes", bits=4)

    def missing(self) -> str | None:
        return no_gpu() or not_importable("bitsandbytes")

    def version(self) -> str:
        return package_version("bitsandbytes")

    def refuses(self, scheme: Scheme, dtype: torch.dtype, N: int, K: int) -> str | None:
        return "only for 4 bits" if scheme.num_bits != 4 else super().refuses(scheme, dtype, N, K)

    def prepare(self, packed: PackedWeight, dtype: torch.dtype) -> Prepared:
        bnb = importlib.import_module("bitsandbytes")
        f = bnb.functional
        weight, state = f.quantize_4bit(dense_weight(packed, dtype), blocksize=64, quant_type="nf4")

        def make() -> Function:
            w, own = weight.clone().t(), copy.copy(state)
            own.absmax = state.absmax.clone()
            return lambda x: bnb.matmul_4bit(x, w, quant_state=own)

        return Prepared(make, 4 + 32 / 64, f.dequantize_4bit(weight, state).to(dtype), 64)


class Gemlite(Peer):
    """Triton kernels of gemlite, which it tunes for each number of tokens when first called: slow to start."""

    def __init__(self) -> None:
        super().__init__("gemlite")

    def missing(self) -> str | None:
        return no_gpu() or not_importable("gemlite.helper")

    def version(self) -> str:
        return package_version("gemlite")

    def refuses(self, scheme: Scheme, dtype: torch.dtype, N: int, K: int) -> str | None:
        return "only for groups" if scheme.group_size == -1 else super().refuses(scheme, dtype, N, K)

    def prepare(self, packed: PackedWeight, dtype: torch.dtype) -> Prepared:
        helper = importlib.import_module("gemlite.helper")
        kind = helper.A16W4_HQQ_INT if packed.scheme.num_bits == 4 else helper.A16W8_HQQ_INT
        codes, scales = packed.unpack()[0], packed.scales.to(dtype).reshape(-1, 1)
        zeros = torch.full_like(scales, packed.scheme.zero_code)
        layer = kind(device=str(packed.device), dtype=dtype).from_weights(codes, scales, zeros)
        return Prepared(lambda: no_grad(copy.deepcopy(layer)), packed.scheme.bits_per_weight(packed.in_features))


def no_grad(function: Function) -> Function:
    """Modules of others may hold parameters that ask for gradients."""
    if isinstance(function, torch.nn.Module):
        function.requires_grad_(False)
    return function


def no_gpu() -> str | None:
    return None if torch.cuda.is_available() else "there is no GPU"


def not_importable(module: str) -> str | None:
    """Why a package cannot be used, or None."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name and e.name.split(".")[0] == module.split(".")[0]:
            return "not installed"
        return f"its import fails: {e}"
    except Exception as e:  # whatever foreign code does at import
        return f"its import fails: {type(e).__name__}: {first_line(e)}"
    return None


def package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@dataclass
class Found:
    """What of the peers asked for is there, and why others are not."""

    peers: list[Peer] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


PEERS: dict[str, Callable[[], Peer]] = {
    "torch_int4": TorchInt4,
    "cusparselt": Cusparselt,
    "cusparselt:best": lambda: Cusparselt({}),
    "humming": Humming,
    "vllm_marlin": VllmMarlin,
    "vllm_machete": VllmMachete,
    "torchao": Torchao,
    "bitsandbytes": Bitsandbytes,
    "gemlite": Gemlite,
}


def find(names: Sequence[str], prefixes: Sequence[str]) -> Found:
    """cuBLAS, ours, ours limited to kernels with these prefixes, and the named peers: as far as they are there."""
    found = Found()
    for peer in [Cublas(), Ours(), *map(Ours, prefixes), *(PEERS[n]() for n in names)]:
        try:
            reason = peer.missing()
        except Exception as e:  # one that cannot even say so must not keep the others from running
            reason = f"{type(e).__name__}: {first_line(e)}"
        if reason:
            found.skipped[peer.name] = reason
        else:
            found.peers.append(peer)
    return found
