"""What this process can run on its GPUs: the extension, its kernels, and whether they compute the right thing there."""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from . import ops
from .build import BuildError, extension_path, mode
from .dispatch import STREAM_K, WHOLE, Config, Device, Kernel, Problem, configurations, why_not
from .layouts import KernelWeight, to_kernel
from .layouts import why_not as no_kernel_form
from .packed import PackedWeight
from .remembered import best_plan
from .scheme import Scheme

# Odd sizes, so that padding is tested too, whole tiles and parts of them, and blocks that share a tile.
_TEST_ROWS, _TEST_COLUMNS, _TEST_TOKENS, _TEST_BLOCKS = 200, 896, (1, 37, 300), 5


@cache
def extension_error() -> str | None:
    """Loads the CUDA kernels, and builds them first where that is needed. None once they are there, else why not.

    Raises:
        BuildError: instead, if SPARSE_MARLIN_BUILD=1.
    """
    try:
        torch.ops.load_library(extension_path())
    except (BuildError, OSError) as e:
        if mode() == "1":
            raise
        return str(e)
    return None


@cache
def kernels(scheme: Scheme, dtype: torch.dtype) -> tuple[Kernel, ...]:
    """The kernels of the loaded extension, as they are for this scheme and dtype of the inputs."""
    sparse, zero_points = scheme.sparsity is not None, not scheme.symmetric
    text: str = torch.ops.sparse_marlin.kernels(
        scheme.num_bits, scheme.group_size, sparse, zero_points, dtype == torch.bfloat16
    )
    return tuple(Kernel.parse(line) for line in text.splitlines())


@cache
def device_properties(index: int) -> Device:
    """The properties of a CUDA device; needs the extension."""
    return Device.parse(torch.cuda.get_device_name(index), torch.ops.sparse_marlin.device_attributes(index))


def plan_for(packed: PackedWeight, dtype: torch.dtype) -> str | None:
    """Which kernels multiply this weight by inputs of ``dtype`` on its device: the ``plan`` of the operator ``gemm``.

    What :func:`sparse_marlin.tuning.tune` found for such a weight on this GPU, else what the cost model expects.

    Returns:
        None if no kernel can or may; on a CUDA device a warning says why, once per reason.
    """
    if packed.device.type != "cuda":
        return None
    if reason := why_no_kernel(packed, dtype):
        _warn(f"{reason}. The weight is dequantized in PyTorch instead, which is right but slow.")
        return None
    table, device = kernels(packed.scheme, dtype), device_properties(packed.device.index)
    return best_plan(packed.out_features, packed.in_features, packed.scheme, dtype, device, table)


def why_no_kernel(packed: PackedWeight, dtype: torch.dtype) -> str | None:
    """Why no kernel can multiply this weight by inputs of ``dtype`` where it is, or None. Tests the kernels once."""
    if packed.device.type != "cuda":
        return f"The kernels run on CUDA devices, and this weight is on {packed.device}"
    return _cannot(packed.device.index, packed.scheme, dtype) or no_kernel_form(packed, dtype)


@cache
def _cannot(index: int, scheme: Scheme, dtype: torch.dtype) -> str | None:
    if reason := extension_error():
        return f"The CUDA kernels are not available: {reason}"
    device = device_properties(index)
    return why_not(scheme, dtype, device) or self_test(torch.device("cuda", index), device, scheme, dtype)


def self_test(where: torch.device, device: Device, scheme: Scheme, dtype: torch.dtype) -> str | None:
    """Runs every kernel at a few sizes, sharing the work in every way, and compares it with the dequantized weight.

    Returns:
        Why they cannot be used, or None.
    """
    n, k = _TEST_ROWS, _TEST_COLUMNS
    packed = random_weight(n, k, scheme, where)
    weight = packed.dequantize(torch.float32).to(dtype)
    form = to_kernel(packed, dtype)
    random = torch.Generator(where).manual_seed(0)
    table = kernels(scheme, dtype)
    with_clusters = {kernel.name for kernel in table if kernel.min_capability == 90}
    xs = [torch.randn(tokens, k, generator=random, device=where).to(dtype) for tokens in _TEST_TOKENS]
    products = [(x, x.double() @ weight.double().T) for x in xs]
    tests = [
        (x, want, Config(config.kernel, _TEST_BLOCKS, split))
        for config in configurations(Problem(1, n, k, scheme, dtype), device, table)
        if isinstance(config, Config)
        for x, want in products
        for split in (STREAM_K, WHOLE, 2)
        if split < 2 or config.kernel in with_clusters
    ]
    for x, want, config in tests:
        try:
            got = multiply(form, x, f"*:{config.step}")
            error = float((got - want).norm() / want.norm())
        except RuntimeError as e:
            return f"The kernel {config.kernel} does not run on {device.name}: {e}"
        if not error < 2 * torch.finfo(dtype).eps:  # a NaN is not less either
            return f"The kernel {config.kernel} computes wrong results on {device.name} (relative error {error:.1e})"
    return None


def random_weight(N: int, K: int, scheme: Scheme, where: torch.device) -> PackedWeight:
    """A weight [N, K] of random numbers, always the same ones, to test and time kernels with.

    Its scales are small enough for products of float16 to stay finite.
    """
    random = torch.Generator(where).manual_seed(0)
    codes = torch.randint(1 << scheme.num_bits, (N, K), dtype=torch.uint8, generator=random, device=where)
    scales = torch.rand(N, scheme.num_groups(K), generator=random, device=where).add_(0.5).mul_(0.01)
    zeros = None
    if not scheme.symmetric:
        zeros = torch.randint(1 << scheme.num_bits, scales.shape, dtype=torch.uint8, generator=random, device=where)
    mask = None
    if scheme.sparsity:
        pairs = torch.combinations(torch.arange(4, device=where))  # that may be kept of a quad
        kept = torch.zeros(len(pairs), 4, dtype=torch.bool, device=where).scatter_(1, pairs, True)
        mask = kept[torch.randint(len(pairs), (N, K // 4), generator=random, device=where)].view(N, K)
    return PackedWeight.pack(codes, scales, scheme, mask, zeros)


def multiply(form: KernelWeight, x: Tensor, plan: str) -> Tensor:
    """``x @ w.T`` by the kernels that ``plan`` names (see :func:`sparse_marlin.dispatch.plan`)."""
    s = form.scheme
    y: Tensor = ops.gemm(
        x,
        form.weights,
        form.meta,
        form.scales,
        form.row_scales,
        form.perm,
        None,
        form.out_features,
        s.num_bits,
        s.group_size,
        not s.symmetric,
        plan,
    )
    return y


@cache
def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)
