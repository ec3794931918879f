"""The drop-in module for ``torch.nn.Linear``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import ops, runtime
from .layouts import KERNEL_TENSOR_NAMES, KernelWeight, canonical_codes, to_kernel
from .packed import TENSOR_NAMES, PackedWeight
from .scheme import AdapterScheme, Scheme

_AUTOCAST_DEVICES = ("cpu", "cuda")  # asking torch whether a device has autocast cannot be compiled


class CompressedLinear(nn.Module):
    """``y = x @ w.T + bias`` with a compressed weight, as ``torch.nn.Linear``.

    The state dict is the canonical form (see :mod:`sparse_marlin.packed`): parameters ``qweight``, ``scales`` and,
    where they apply, ``meta``, ``zero_point``, ``g_idx`` and ``bias``. ``.to(dtype)`` casts scales and bias alone; the
    dtype of the scales is the dtype of the inputs that the layer takes.

    On a GPU the large tensors, ``qweight`` and ``meta``, are exchanged for the form that kernels read
    (:meth:`prepare`), so that the weight is not there twice. They are None then; ``packed`` and the state dict make
    them again.

    Args:
        packed: the weight [N, K].
        bias: [N] or None, cast to the dtype of the scales.
        adapter: a low-rank correction of the weight or None; copied, and cast as the bias.

    Attributes:
        adapter: ``y = x @ (w + b @ a).T + bias`` with it; parameters ``adapter.a`` and ``adapter.b`` of the state dict.
    """

    qweight: Tensor | None
    scales: Tensor
    meta: Tensor | None
    zero_point: Tensor | None
    g_idx: Tensor | None
    bias: Tensor | None
    adapter: Adapter | None

    def __init__(self, packed: PackedWeight, bias: Tensor | None = None, adapter: Adapter | None = None) -> None:
        super().__init__()
        if bias is not None and bias.shape != (packed.out_features,):
            raise ValueError(f"bias must be [{packed.out_features}], got {list(bias.shape)}")
        shape = (packed.out_features, packed.in_features)
        if adapter is not None and (adapter.out_features, adapter.in_features) != shape:
            raise ValueError(
                f"the adapter must be for a weight {list(shape)}, got one for "
                f"{[adapter.out_features, adapter.in_features]}"
            )
        self.in_features = packed.in_features
        self.out_features = packed.out_features
        self.scheme = packed.scheme
        tensors: Mapping[str, Tensor] = packed.tensors()
        for name in TENSOR_NAMES:
            self._set(name, tensors.get(name))
        self._set("bias", None if bias is None else bias.detach().to(packed.device, packed.scales.dtype))
        self.adapter = None if adapter is None else copy.deepcopy(adapter).to(packed.device, packed.scales.dtype)
        self._plan: str | None = None  # which kernels to use; None while the weight is in canonical form
        self._prepared_for: torch.dtype | None = None  # also where that came to nothing
        self._set_form(None)

    @classmethod
    def empty(
        cls,
        in_features: int,
        out_features: int,
        scheme: Scheme,
        bias: bool,
        g_idx: bool = False,
        device: str = "meta",
        adapter: AdapterScheme | None = None,
    ) -> CompressedLinear:
        """A layer whose tensors have the right shapes and no content yet, to load a state dict into."""
        if reason := scheme.why_not(out_features, in_features):
            raise ValueError(reason)
        n, k, groups = out_features, in_features, scheme.num_groups(in_features)
        stored = k // 2 if scheme.sparsity else k
        packed = PackedWeight(
            scheme,
            k,
            torch.empty(n, -(-stored * scheme.num_bits // 8), dtype=torch.uint8, device=device),
            torch.empty(n, groups, dtype=scheme.dtype, device=device),
            torch.empty(n, -(-k // 8), dtype=torch.uint8, device=device) if scheme.sparsity else None,
            None if scheme.symmetric else torch.empty(n, groups, dtype=torch.uint8, device=device),
            torch.empty(k, dtype=torch.int32, device=device) if g_idx else None,
        )
        own_bias = torch.empty(n, dtype=scheme.dtype, device=device) if bias else None
        return cls(packed, own_bias, None if adapter is None else Adapter.empty(k, n, adapter, scheme.dtype, device))

    def _set(self, name: str, t: Tensor | None) -> None:
        self.register_parameter(name, None if t is None else nn.Parameter(t, requires_grad=False))

    def _set_form(self, form: KernelWeight | None) -> None:
        # Buffers, since torch.compile with CUDA graphs copies any other tensor of a module anew for each call.
        for name in KERNEL_TENSOR_NAMES:
            self.register_buffer(f"kernel_{name}", None if form is None else getattr(form, name), persistent=False)

    def _form(self) -> KernelWeight:
        tensors = {name: getattr(self, f"kernel_{name}") for name in KERNEL_TENSOR_NAMES}
        return KernelWeight(self.scheme, self.out_features, self.in_features, **tensors)

    def prepare(self, dtype: torch.dtype | None = None) -> bool:
        """Puts the weight into the form that the kernels of its GPU read. The first forward on a GPU does so as well.

        Call it before ``torch.compile`` and before capturing a CUDA graph: neither can prepare a weight midway. Moving,
        casting and loading undo it.

        Args:
            dtype: of the inputs to come; that of the scales by default, under autocast the autocast dtype.

        Returns:
            Whether kernels are used. If not, the layer stays in canonical form; on a GPU a warning has said why.
        """
        dtype = dtype or self.scales.dtype
        if self.adapter is not None:
            self.adapter.prepare(dtype)
        if self._prepared_for == dtype:
            return self._plan is not None
        self._restore()
        self._prepared_for = dtype
        # A tensor subclass, such as a DTensor of a sharded model, cannot be rearranged here.
        if self.qweight is None or type(self.qweight.data) is not Tensor:
            return False
        packed = self.packed
        plan = runtime.plan_for(packed, dtype)
        if plan is not None:
            self._set_form(to_kernel(packed, dtype))
            self._set("qweight", None)
            self._set("meta", None)
            self._plan = plan
        return plan is not None

    def restore(self) -> None:
        """Puts the weight back into canonical form: undoes :meth:`prepare`."""
        self._restore()
        if self.adapter is not None:
            self.adapter.restore()

    def _restore(self) -> None:
        if self._plan is not None:
            qweight, meta = canonical_codes(self._form())
            self._set("qweight", qweight)
            self._set("meta", meta)
            self._plan = None
            self._set_form(None)
        self._prepared_for = None

    @property
    def packed(self) -> PackedWeight:
        """The weight in canonical form, without the adapter; shares memory with this layer, except for what has to be
        made again."""
        tensors = {n: t.data for n in TENSOR_NAMES if (t := getattr(self, n)) is not None}
        if self._plan is not None:
            qweight, meta = canonical_codes(self._form())
            tensors |= {"qweight": qweight} if meta is None else {"qweight": qweight, "meta": meta}
        return PackedWeight.from_tensors(tensors, self.scheme, self.in_features)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight [N, K] that the layer multiplies by, as a dense tensor in ``dtype`` (default: that of the scales).

        That includes the adapter; ``packed.dequantize()`` is the compressed weight alone.
        """
        if self.adapter is None:
            return self.packed.dequantize(dtype)
        return (self.packed.dequantize(torch.float32) + self.adapter.dequantize()).to(dtype or self.scales.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies.

        Args:
            x: [..., K], any strides. Under autocast it is cast as ``nn.Linear`` would cast it.

        Returns:
            [..., N] in the dtype of x (under autocast: the autocast dtype). A gradient passes to x alone, by way of the
            whole dequantized weight.

        Raises:
            ValueError: if the last dimension is not in_features, or the dtype is not the layer's outside autocast.
        """
        # A decoding step takes a GPU a few microseconds: no attribute is asked for that a module must look for.
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"the last dimension of x must be in_features = {self.in_features}, got {list(x.shape)}")
        device = "cuda" if x.is_cuda else x.device.type
        if device in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        elif x.dtype != self._parameter("scales").dtype:  # type: ignore[union-attr]
            raise ValueError(
                f"x is {x.dtype}, but this layer computes in {self.scales.dtype}: "
                "cast x, call .to(dtype) on the model, or use torch.autocast"
            )
        if device == "cuda" and self._prepared_for != x.dtype and self._may_prepare():
            self.prepare(x.dtype)
        if x.requires_grad and torch.is_grad_enabled():
            return _Product.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]
        return self._product(x)

    def _parameter(self, name: str) -> Tensor | None:
        # The replicas of nn.DataParallel have plain attributes instead.
        return self._parameters[name] if name in self._parameters else getattr(self, name)

    def _product(self, x: Tensor) -> Tensor:
        y = self._reference(x) if self._plan is None else self._multiply(x)
        return y if self.adapter is None else self.adapter(x, y)

    def _reference(self, x: Tensor) -> Tensor:
        y: Tensor = ops.linear(
            x,
            self.qweight,
            self.scales,
            self.meta,
            self.zero_point,
            self.g_idx,
            self.bias,
            self.scheme.num_bits,
            self.scheme.group_size,
        )
        return y

    def _may_prepare(self) -> bool:
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return False
        # Accelerate's offloading takes the parameters away again after each forward, and finds them by name.
        return not getattr(getattr(self, "_hf_hook", None), "offload", False)

    def _multiply(self, x: Tensor) -> Tensor:
        if x.dtype != self._prepared_for:
            raise RuntimeError(
                f"this layer was prepared for {self._prepared_for}: call prepare({x.dtype}) before compiling"
            )
        form, bias, scheme = self._buffers, self._parameter("bias"), self.scheme
        y: Tensor = ops.gemm(
            x,
            form["kernel_weights"],
            form["kernel_meta"],
            form["kernel_scales"],
            form["kernel_row_scales"],
            form["kernel_perm"],
            bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype),
            self.out_features,
            scheme.num_bits,
            scheme.group_size,
            not scheme.symmetric,
            self._plan,
        )
        return y

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CompressedLinear:
        self._restore()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._plan is not None:
            qweight, meta = canonical_codes(self._form())
            destination[f"{prefix}qweight"] = qweight
            if meta is not None:
                destination[f"{prefix}meta"] = meta

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._restore()
        super()._load_from_state_dict(*args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._restore()  # it may be on another device now

    def extra_repr(self) -> str:
        n, k = self.out_features, self.in_features
        bits = self.scheme.bits_per_weight(k)
        if self.adapter is not None:
            bits += self.adapter.scheme.bits_per_weight(n, k, self.scheme.dtype)
        sizes = f"in_features={k}, out_features={n}, bias={self.bias is not None}"
        return f"{sizes}, {self.scheme}, {bits:.3f} bits per weight"


class _Product(torch.autograd.Function):
    """What a compressed layer computes. It takes no gradient itself; what lies before it may be trained."""

    @staticmethod
    def forward(x: Tensor, layer: CompressedLinear) -> Tensor:
        return layer._product(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, CompressedLinear], output: Tensor) -> None:
        ctx.layer = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.dequantize(grad.dtype), None


class Adapter(nn.Module):
    """A low-rank correction ``b @ a`` of a weight [N, K], which stays beside it.

    Args:
        a: [R, K], in floating point or packed.
        b: [N, R], the same.

    Raises:
        ValueError: if the two do not fit together.
    """

    a: Tensor | CompressedLinear
    b: Tensor | CompressedLinear

    def __init__(self, a: Tensor | PackedWeight, b: Tensor | PackedWeight) -> None:
        super().__init__()
        (rank, self.in_features), (self.out_features, inner) = _shape(a), _shape(b)
        if rank != inner or isinstance(a, Tensor) != isinstance(b, Tensor):
            raise ValueError(
                f"the factors of an adapter must be [R, K] and [N, R], both packed or neither, got {list(_shape(a))} "
                f"and {list(_shape(b))}"
            )
        self.scheme = AdapterScheme(rank, 16 if isinstance(a, Tensor) else 4)
        for name, factor in (("a", a), ("b", b)):
            if isinstance(factor, Tensor):
                # Always the strides that it has when it is loaded: products of other strides round differently.
                self.register_parameter(name, nn.Parameter(factor.detach().contiguous(), requires_grad=False))
            else:
                self.add_module(name, CompressedLinear(factor))

    @classmethod
    def empty(
        cls, in_features: int, out_features: int, scheme: AdapterScheme, dtype: torch.dtype, device: str = "meta"
    ) -> Adapter:
        """An adapter whose tensors have the right shapes and no content yet, to load a state dict into."""
        if reason := scheme.why_not(out_features, in_features):
            raise ValueError(reason)

        def factor(rows: int, columns: int) -> Tensor | PackedWeight:
            stored = scheme.factor(columns, dtype)
            if stored is None:
                return torch.empty(rows, columns, dtype=dtype, device=device)
            return CompressedLinear.empty(columns, rows, stored, bias=False, device=device).packed

        return cls(factor(scheme.rank, in_features), factor(out_features, scheme.rank))

    def factors(self) -> tuple[Tensor, Tensor]:
        """a [R, K] and b [N, R] as dense float32 tensors."""
        a, b = (f.dequantize(torch.float32) if isinstance(f, CompressedLinear) else f.float() for f in (self.a, self.b))
        return a, b

    def dequantize(self) -> Tensor:
        """``b @ a`` [N, K] in float32."""
        a, b = self.factors()
        return b @ a

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds ``x @ (b @ a).T`` to y [..., N], in place, and returns it; x is [..., K] in the dtype of y."""
        a, b = self.a, self.b
        if isinstance(a, CompressedLinear) or isinstance(b, CompressedLinear):
            return y.add_(b(a(x)))  # type: ignore[operator]
        hidden = nn.functional.linear(x, a.to(x.dtype)).reshape(-1, self.scheme.rank)
        # In place, the sum is part of the product; autocast knows no product in place.
        y.view(-1, self.out_features).addmm_(hidden, b.to(x.dtype).T)
        return y

    def prepare(self, dtype: torch.dtype) -> None:
        """See :meth:`CompressedLinear.prepare`."""
        for factor in self.children():
            factor.prepare(dtype)  # type: ignore[operator]

    def restore(self) -> None:
        """See :meth:`CompressedLinear.restore`."""
        for factor in self.children():
            factor.restore()  # type: ignore[operator]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme}"


def _shape(factor: Tensor | PackedWeight) -> tuple[int, int]:
    if isinstance(factor, Tensor):
        rows, columns = factor.shape
        return rows, columns
    return factor.out_features, factor.in_features


def compressed_layers(model: nn.Module) -> dict[str, CompressedLinear]:
    """The compressed layers of a model by name, without those that adapters consist of."""
    factors = {id(f) for m in model.modules() if isinstance(m, Adapter) for f in m.children()}
    return {name: m for name, m in model.named_modules() if isinstance(m, CompressedLinear) and id(m) not in factors}
