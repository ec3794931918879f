"""Which kernel multiplies a problem, in how many thread blocks, and why: pure functions that need no GPU.

A cost model estimates each kernel's time from the bytes and multiplications that its busiest multiprocessor gets. It
only has to rank kernels. Its constants are of an H200, measured in isolation for the kernels of sm_80 and fitted to
runs of those of sm_90a, and carried to other GPUs by their clocks and counts. :mod:`.tuning` measures instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, inf

import torch

from .scheme import Scheme

# ---- kernels for sm_80: rates of their parts, measured on an H200 in isolation
# Multiply-adds per clock and multiprocessor of mma.sync and mma.sp (dense-equivalent), by compute capability; others
# are taken for GeForce chips.
_MMA = {80: (1024, 2048), 90: (1355, 2028), 100: (1355, 2028)}
_MMA_GEFORCE = (512, 1024)
_DEQUANTIZED_PER_CLOCK = 70  # stored weights per clock and multiprocessor, turned into floating point
_STEP_CLOCKS = 50  # barriers and addresses, per tile of K
_EXCHANGE_US, _EXCHANGE_TOKEN_US = 1.0, 0.03  # a reduction across blocks; per token of the tile and block
_LAUNCH_US = 2.0
_BANDWIDTH_SHARE = 0.966  # of the memory's nominal bandwidth, streaming
_ALONE = 0.85  # of its speed, a block that has a multiprocessor to itself
_LOADED_CLOCK_SHARE = 0.8  # of the maximal clock, with the tensor cores busy
_L2_BYTES_PER_CLOCK = 60  # per multiprocessor


# ---- kernels for sm_90: fitted by bench/kernels/calibrate.py to runs of them on an H200
@dataclass(frozen=True)
class _Hopper:
    """Microseconds and shares of one tile of y, dense and 2:4."""

    k_tile: int
    step: tuple[float, float]  # a tile of K
    piece: tuple[float, float]  # the rest of a tile of y
    cut: tuple[float, float]  # share by which steps take longer where tiles are cut: blocks are not in step then
    many: tuple[float, float]  # share by which they do where a block has many whole tiles


_HOPPER = {  # by rows and tokens of the tile
    (128, 8): _Hopper(256, (0.4177, 0.2761), (1.0608, 0.8303), (0.1069, 0.1532), (0.3734, 0.2136)),
    (128, 16): _Hopper(256, (0.4697, 0.2974), (1.1611, 1.0272), (0.1073, 0.0625), (0.4137, 0.2598)),
    (128, 32): _Hopper(256, (0.6462, 0.3945), (0.6840, 0.7635), (0.0835, 0.0949), (0.1803, 0.1245)),
    (128, 64): _Hopper(256, (0.8386, 0.5373), (0.4968, 0.9791), (0.1402, 0.1169), (0.1459, 0.1054)),
    (128, 128): _Hopper(128, (0.7245, 0.4579), (1.1080, 1.1467), (0.1233, 0.1567), (0.1214, 0.1202)),
    (128, 256): _Hopper(128, (1.4508, 0.8907), (0.5845, 1.6268), (0.1219, 0.1501), (0.1130, 0.0935)),
    (256, 8): _Hopper(256, (0.8228, 0.4710), (1.4863, 1.1541), (0.0020, 0.2242), (0.2596, 0.4443)),
    (256, 32): _Hopper(256, (1.1380, 0.6945), (1.2227, 1.4217), (-0.0177, 0.0401), (0.1806, 0.2377)),
    (256, 64): _Hopper(256, (1.6181, 1.0036), (1.0614, 1.4398), (0.0421, 0.1362), (0.1000, 0.1000)),
}
_HOPPER_LAUNCH_US = 1.1444  # until the first bytes are there, and the last stores out
_HOPPER_BANDWIDTH_SHARE = 1.0743  # of the memory's nominal bandwidth; what adds to it is counted apart
_HOPPER_CLOCK_GHZ = 1.98  # of the H200: steps scale with the clock
_HOPPER_STREAM_K_US = 0.8059, 0.0233  # to add up a tile that blocks share; per KB of sums and block
_HOPPER_CLUSTER_US = 1.2352, 0.0036  # the same in a cluster
_HOPPER_LARGE = 128  # tokens of a tile: smaller ones take part for up to twice their tokens, and all from half of them
_SMALLEST_TILE = 8
_MANY = 4  # whole tiles of a block
_HOPPER_EARLY_US = 0.5372  # that a launch saves where its blocks find room beside those of the launch before
_HOPPER_TOGETHER = 0.1343  # of the share for tiles that are cut, where two blocks fill each other's gaps
_IDLE_EXPONENT = 0.3840  # few blocks still draw much of the bandwidth
# In the chain of a decoding step, behind a launch that leaves room for one block of the next on each multiprocessor,
# that one's weights arrive early: in chains of a Llama-3-8B block's products (bench/chain.py) such grids were the
# fastest wherever they were at most so much slower when timed alone, in those of a Llama-3-70B block all were alike. Of
# small layers it is worth a share of their time.
_ROOM_US, _ROOM_SHARE = 4.0, 0.25
_ROOM_UP_TO_US = 16.0  # of streaming

# ---- both
# Numbers of tokens for which a choice is made; in between, the next larger one's is taken.
PLAN_TOKENS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)


@dataclass(frozen=True)
class Device:
    """The properties of a GPU that a choice depends on."""

    name: str
    capability: int  # 90 for compute capability 9.0
    multiprocessors: int
    shared_bytes_per_block: int
    shared_bytes_per_multiprocessor: int
    clock_ghz: float
    bandwidth_gbs: float
    clusters: tuple[int, ...] = ()  # of 2, 3, ... blocks that run at once, with one block per multiprocessor

    @classmethod
    def parse(cls, name: str, attributes: Sequence[int]) -> Device:
        """Reads the answer of the operator ``device_attributes``; its clocks are in kHz, the bus is in bits."""
        capability, multiprocessors, per_block, per_sm, clock, memory_clock, bus, *clusters = attributes
        # Memory transfers twice per clock.
        bandwidth = 2 * memory_clock * bus / 8 / 1e6
        return cls(name, capability, multiprocessors, per_block, per_sm, clock / 1e6, bandwidth, tuple(clusters))


# GPUs that a choice can be explained for where they are not: what the extension says there.
RECORDED = {"h200": Device("NVIDIA H200", 90, 132, 232448, 233472, 1.98, 4814.304, (66, 39, 30, 22, 17, 15, 15))}


@dataclass(frozen=True)
class Kernel:
    """What one block of a compiled kernel does and needs, for one scheme; the extension tells it.

    Attributes:
        refusal: why the kernel does not exist for the scheme; the other numbers mean nothing then.
    """

    name: str
    min_capability: int
    max_capability: int  # 0: no limit
    token_tile: int = 0
    row_tile: int = 0
    k_tile: int = 0
    shared_bytes: int = 0
    blocks_per_multiprocessor: int = 1
    refusal: str = ""

    @classmethod
    def parse(cls, line: str) -> Kernel:
        """Reads a line of the answer of the operator ``kernels``: a name, seven numbers, and a refusal or nothing."""
        name, lowest, highest, tokens, rows, k, shared, blocks, refusal = line.split(" ", 8)
        return cls(name, int(lowest), int(highest), int(tokens), int(rows), int(k), int(shared), int(blocks), refusal)


@dataclass(frozen=True)
class Problem:
    """``y[M, N] = x[M, K] @ w[N, K].T`` with x, y and scales in ``dtype``."""

    M: int
    N: int
    K: int
    scheme: Scheme
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"M={self.M} N={self.N} K={self.K}, {self.scheme}, {str(self.dtype).removeprefix('torch.')}"


# The INT4 kernels of sm_90 that _HOPPER is fitted to, as csrc/common/instances_sm90.cuh has them.
RECORDED_KERNELS = tuple(
    Kernel(f"sm90_{rows}x{tokens}", 90, 90, tokens, rows, rates.k_tile, (220 << 10) // blocks, blocks)
    for (rows, tokens), rates in _HOPPER.items()
    for blocks in [2 if rows == 128 and tokens <= 16 else 1]
)


STREAM_K, WHOLE = 0, 1  # csrc/gemm.h


@dataclass(frozen=True)
class Config:
    """A kernel, how its blocks share the work, and the time that the model expects or that was measured.

    Attributes:
        blocks: thread blocks of a launch.
        split: :data:`STREAM_K`: equal shares, which may cut tiles. :data:`WHOLE`: no tile is cut. From 2 on: the blocks
            that form a cluster and share a tile.
    """

    kernel: str
    blocks: int
    split: int = STREAM_K
    microseconds: float = 0.0

    @property
    def step(self) -> str:
        """As an entry of a plan spells it."""
        return f"{self.kernel}@{self.blocks}" + (f"/{self.split}" if self.split else "")

    @classmethod
    def parse(cls, step: str) -> Config:
        """The inverse of :attr:`step`, without the time.

        Raises:
            ValueError: if it is no such text.
        """
        found = re.fullmatch(r"(\w+)@([1-9]\d*)(?:/([1-9]\d*))?", step, re.ASCII)
        if not found:
            raise ValueError(f"an entry of a plan is kernel@blocks or kernel@blocks/split, got {step!r}")
        return cls(found[1], int(found[2]), int(found[3] or STREAM_K))

    @property
    def schedule(self) -> str:
        """How the work is shared, in words."""
        how = {STREAM_K: "", WHOLE: " of whole tiles"}.get(self.split, f", clusters of {self.split}")
        return f"{self.blocks} blocks{how}"

    def __str__(self) -> str:
        return f"{self.kernel} in {self.schedule}, about {self.microseconds:.1f} us"


@dataclass(frozen=True)
class Refusal:
    """Why a kernel cannot run a problem."""

    kernel: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kernel} cannot: {self.reason}"


def why_not(scheme: Scheme, dtype: torch.dtype, device: Device) -> str | None:
    """Why no kernel at all can run this on a GPU, or None: the canonical path has to be taken then."""
    if device.capability < 80:
        return f"{device.name} has compute capability {device.capability / 10}, the kernels need 8.0 or newer"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the kernels compute in float16 and bfloat16, not {str(dtype).removeprefix('torch.')}: call .to(dtype)"
    return None


def configurations(problem: Problem, device: Device, kernels: Sequence[Kernel]) -> list[Config | Refusal]:
    """Every kernel's best configuration, or why it cannot run.

    The configurations come first, the best (see :func:`cost`) at their head: those of kernels made for the device's
    architecture, then those of older ones.
    """
    if reason := why_not(problem.scheme, problem.dtype, device):
        return [Refusal("every kernel", reason)]
    found = [_configure(problem, device, k) for k in kernels]
    if not any(isinstance(c, Config) for c in found):
        found = [_configure(problem, device, k, at_any_cost=True) for k in kernels]
    # The kernels made for an architecture are faster there than older ones, and the models of the two not comparable to
    # the last microsecond. Names decide ties, so that the order of the table does not matter.
    table = {k.name: k for k in kernels}
    configs = [c for c in found if isinstance(c, Config)]
    configs.sort(key=lambda c: (-table[c.kernel].min_capability, cost(problem, device, table[c.kernel], c), c.kernel))
    return [*configs, *(r for r in found if isinstance(r, Refusal))]


def choose(problem: Problem, device: Device, kernels: Sequence[Kernel]) -> Config | None:
    """The best configuration, or None if no kernel can run the problem."""
    first = next(iter(configurations(problem, device, kernels)), None)
    return first if isinstance(first, Config) else None


@cache
def recorded_us(tokens: int, N: int, K: int, scheme: Scheme, device: str = "h200") -> float:
    """Microseconds that a float16 product with a weight [N, K] should take on a recorded GPU, by its best kernel.

    Needs neither a GPU nor the extension: kernels are those of :data:`RECORDED_KERNELS`. INT8 has fewer of them: its
    times are a guess.
    """
    config = choose(Problem(tokens, N, K, scheme, torch.float16), RECORDED[device], RECORDED_KERNELS)
    assert config is not None
    return config.microseconds


def explain(problem: Problem, device: Device, kernels: Sequence[Kernel]) -> str:
    """Text for people: the choice first, then every other kernel with its expected time or the reason against it."""
    found = configurations(problem, device, kernels)
    lines = [f"{problem} on {device.name} (compute capability {device.capability / 10}):"]
    if not found or isinstance(found[0], Refusal):
        lines.append("  the canonical path, since no kernel can run this")
    for i, item in enumerate(found):
        lines.append(f"{'->' if i == 0 and isinstance(item, Config) else '  '} {item}")
    return "\n".join(lines)


def plan(N: int, K: int, scheme: Scheme, dtype: torch.dtype, device: Device, kernels: Sequence[Kernel]) -> str | None:
    """The choices for every M, as ``csrc/bindings.cpp`` reads them: ``"16:kernel@blocks 64:kernel@blocks/split ..."``.

    Returns:
        None if no kernel can run the layer.
    """
    chosen: dict[int, Config] = {}
    for tokens in PLAN_TOKENS:
        config = choose(Problem(tokens, N, K, scheme, dtype), device, kernels)
        if config is None:
            return None
        chosen[tokens] = config
    return plan_text(chosen)


def plan_text(chosen: Mapping[int, Config]) -> str:
    """A plan from the choice for each number of tokens, ascending; the last also serves all larger ones."""
    steps: list[tuple[int, str]] = []
    for tokens, config in chosen.items():
        if steps and steps[-1][1] == config.step:
            steps.pop()
        steps.append((tokens, config.step))
    last = steps[-1][0]
    return " ".join(f"{'*' if tokens == last else tokens}:{step}" for tokens, step in steps)


def parse_plan(text: str) -> dict[float, Config]:
    """The choices of a plan by the largest number of tokens that they serve, without the times.

    Raises:
        ValueError: if the text is no plan.
    """
    steps: dict[float, Config] = {}
    for entry in text.split(" "):
        tokens, _, step = entry.partition(":")
        if tokens != "*" and not re.fullmatch(r"[1-9]\d*", tokens, re.ASCII):
            raise ValueError(f"an entry of a plan begins with a number of tokens or *, got {entry!r}")
        steps[inf if tokens == "*" else int(tokens)] = Config.parse(step)
    if list(steps) != sorted(steps) or inf not in steps:
        raise ValueError(f"the numbers of tokens of a plan must ascend and end with *, got {text!r}")
    return steps


def choice_of(steps: Mapping[float, Config], tokens: int) -> Config:
    """What a plan, as :func:`parse_plan` returns it, takes for a number of tokens."""
    return next(config for limit, config in steps.items() if tokens <= limit)


def _configure(p: Problem, device: Device, kernel: Kernel, at_any_cost: bool = False) -> Config | Refusal:
    if reason := _refusal(device, kernel):
        return Refusal(kernel.name, reason)
    if kernel.min_capability == 90 and not at_any_cost:
        tile = kernel.token_tile
        if tile < _HOPPER_LARGE and 2 * tile < p.M:
            return Refusal(kernel.name, f"it is for up to {2 * tile} tokens, larger tiles read x less often")
        if tile > 2 * max(p.M, _SMALLEST_TILE):
            return Refusal(kernel.name, f"it is for {tile // 2} tokens or more, most of its tile would be padding")
    return min(
        (replace(c, microseconds=estimate(p, device, kernel, c)) for c in schedules(p, device, kernel)),
        key=lambda c: (cost(p, device, kernel, c), c.blocks, c.split),
    )


def _refusal(device: Device, kernel: Kernel) -> str | None:
    if kernel.refusal:
        return kernel.refusal
    if device.capability < kernel.min_capability or 0 < kernel.max_capability < device.capability:
        limit = f" to {kernel.max_capability / 10}" if kernel.max_capability else " or newer"
        return f"it is for compute capability {kernel.min_capability / 10}{limit}"
    if kernel.shared_bytes > device.shared_bytes_per_block:
        return f"it needs {kernel.shared_bytes} bytes of shared memory, of at most {device.shared_bytes_per_block}"
    return None


def schedules(p: Problem, device: Device, kernel: Kernel) -> list[Config]:
    """The ways to run a kernel that may be the fastest: with all blocks resident at once, or in full waves of them."""
    if _refusal(device, kernel):
        return []
    resident = _resident(device, kernel)
    tiles = ceil(p.M / kernel.token_tile) * ceil(p.N / kernel.row_tile)
    k_tiles = ceil(p.K / kernel.k_tile)
    counts = [n * device.multiprocessors for n in range(1, resident + 1)]
    found = {Config(kernel.name, min(n, tiles * k_tiles)) for n in counts}
    hopper = kernel.min_capability == 90
    if not hopper or resident == 1 or tiles >= device.multiprocessors:  # few small blocks ask for too little at a time
        found |= {Config(kernel.name, min(n, tiles), WHOLE) for n in counts}
    if hopper and resident == 1:  # two clusters on a multiprocessor get in each other's way
        for split, at_once in enumerate(device.clusters, 2):
            if split <= k_tiles and tiles <= at_once:
                found.add(Config(kernel.name, tiles * split, split))
    return sorted(found, key=lambda c: (c.split, c.blocks))


def _resident(device: Device, kernel: Kernel) -> int:
    """Blocks of a kernel that a multiprocessor has at once."""
    reserved = 1024  # the system's, per block
    fit = device.shared_bytes_per_multiprocessor // (kernel.shared_bytes + reserved)
    return max(1, min(kernel.blocks_per_multiprocessor, fit))


def cost(p: Problem, device: Device, kernel: Kernel, config: Config) -> float:
    """What a configuration with its time is chosen by, in microseconds: less where it leaves room for the next."""
    one_each = config.blocks == device.multiprocessors and config.split == STREAM_K
    room = kernel.min_capability == 90 and one_each and _resident(device, kernel) > 1
    matters = kernel.token_tile >= p.M and streamed_bytes(p) / (device.bandwidth_gbs * 1e3) < _ROOM_UP_TO_US
    return config.microseconds - (min(_ROOM_US, _ROOM_SHARE * config.microseconds) if room and matters else 0.0)


def estimate(p: Problem, device: Device, kernel: Kernel, config: Config) -> float:
    """The time that a configuration should take, in microseconds."""
    return (_hopper_us if kernel.min_capability == 90 else _sm80_us)(p, device, kernel, config)


def _hopper_us(p: Problem, device: Device, kernel: Kernel, config: Config) -> float:
    sparse, blocks, split = p.scheme.sparsity is not None, config.blocks, config.split
    nearest = min(_HOPPER, key=lambda t: (abs(t[1] - kernel.token_tile), abs(t[0] - kernel.row_tile)))
    rates = _HOPPER[nearest]
    scale = kernel.row_tile * kernel.k_tile / (nearest[0] * rates.k_tile)
    scale *= _HOPPER_CLOCK_GHZ / device.clock_ghz
    tiles, k_tiles = ceil(p.N / kernel.row_tile) * ceil(p.M / kernel.token_tile), ceil(p.K / kernel.k_tile)
    cut = split == STREAM_K and tiles % blocks != 0
    pieces = ceil(tiles / blocks) if split != STREAM_K else ceil(tiles / blocks) + cut
    by_split = {STREAM_K: ceil(tiles * k_tiles / blocks), WHOLE: pieces * k_tiles}
    steps = by_split.get(split, ceil(k_tiles / max(split, 1)))
    slower = 1.0 + (split == WHOLE and pieces >= _MANY) * rates.many[sparse]
    together = ceil(blocks / device.multiprocessors)  # blocks on the busiest multiprocessor
    slower += cut * rates.cut[sparse] * (_HOPPER_TOGETHER if together > 1 else 1.0)
    busy = together * steps * scale * rates.step[sparse] * slower
    busy += pieces * rates.piece[sparse]
    used = min(1.0, blocks / device.multiprocessors) ** _IDLE_EXPONENT
    memory = streamed_bytes(p) / (device.bandwidth_gbs * _HOPPER_BANDWIDTH_SHARE * used * 1e3)
    sums = kernel.row_tile * min(kernel.token_tile, ceil(p.M / _SMALLEST_TILE) * _SMALLEST_TILE) * 4 / 1024
    exchange = 0.0
    if cut:
        base, per_kb = _HOPPER_STREAM_K_US
        exchange = base + per_kb * sums * max(1.0, min(blocks / tiles, k_tiles))
    elif split > WHOLE:
        base, per_kb = _HOPPER_CLUSTER_US
        exchange = base + per_kb * sums * split
    early = _HOPPER_EARLY_US if _resident(device, kernel) > together else 0.0
    return float(_HOPPER_LAUNCH_US - early + (busy**4 + memory**4) ** 0.25 + exchange)


def _sm80_us(p: Problem, device: Device, kernel: Kernel, config: Config) -> float:
    sparse = p.scheme.sparsity is not None
    rows, tokens = ceil(p.N / kernel.row_tile), ceil(p.M / kernel.token_tile)
    k_tiles = ceil(p.K / kernel.k_tile)
    blocks = config.blocks
    tiles = rows * tokens
    steps = ceil(tiles / blocks) * k_tiles if config.split == WHOLE else ceil(tiles * k_tiles / blocks)  # of a block
    per_sm = ceil(blocks / device.multiprocessors) * steps  # of the busiest multiprocessor
    # The clocks that a step keeps the tensor cores, the ALUs (dequantization) and the port to the L2 busy.
    weights = kernel.row_tile * kernel.k_tile
    tensor = weights * kernel.token_tile / _MMA.get(device.capability, _MMA_GEFORCE)[sparse]
    alu = weights / (2 if sparse else 1) / _DEQUANTIZED_PER_CLOCK
    stored_bits = p.scheme.bits_per_weight(p.K)
    l2 = (kernel.token_tile * kernel.k_tile * 2 + weights * stored_bits / 8) / _L2_BYTES_PER_CLOCK
    compute_us = per_sm * (max(tensor, alu, l2) + _STEP_CLOCKS) / (device.clock_ghz * _LOADED_CLOCK_SHARE * 1e3)
    # Few blocks cannot ask for all of the bandwidth.
    idle = min(1.0, blocks / device.multiprocessors)
    memory_us = streamed_bytes(p) / (device.bandwidth_gbs * _BANDWIDTH_SHARE * idle * 1e3)
    alone = blocks <= device.multiprocessors  # no other block on a multiprocessor works while one waits
    cut = config.split != WHOLE and steps % k_tiles != 0  # a block's run ends within a tile: another has the rest
    exchange_us = _EXCHANGE_US + _EXCHANGE_TOKEN_US * min(p.M, kernel.token_tile) * max(1.0, blocks / tiles)
    return _LAUNCH_US + max(compute_us, memory_us) / (_ALONE if alone else 1.0) + (exchange_us if cut else 0.0)


def streamed_bytes(p: Problem) -> float:
    """Bytes of the weight as it is stored, of x and of y, once each: token tiles of the same rows share the L2."""
    return p.N * p.K * p.scheme.bits_per_weight(p.K) / 8 + 2 * p.M * (p.N + p.K)
