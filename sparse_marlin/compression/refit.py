"""Refits a compressed block: its integers and scales are trained until its output comes close to the original model's.

The solver takes one layer at a time. It cannot weigh one layer's error against another's, nor see what attention, gates
and norms make of it. Gradient descent through the whole block can, in a few hundred steps (block-wise reconstruction as
in BRECQ, arXiv 2102.05426; after pruning, 2510.14444). Every weight is a real number in units of its scale; the forward
pass sees it rounded exactly as it will be stored, and gradients pass the rounding unchanged (straight-through,
1308.3432). Masks stay what they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear
from tqdm import tqdm

from ..linear import Adapter, CompressedLinear
from ..packed import PackedWeight, unpack_mask
from .blocks import Call, moved, run
from .solve import METHODS_24, METHODS_DENSE, PRUNE_ONLY, UNCALIBRATED
from .store import Result
from .targets import Target, blocks_of, linear_at

_TOKENS_AT_ONCE = 4096  # in one forward and backward pass, unless a single window has more
_MAX_CHANGE = math.log(2)  # of a scale's logarithm


@dataclass(frozen=True)
class Refit:
    """How a block is refitted.

    Attributes:
        steps: steps of Adam; the rates fall to zero over them as a cosine does.
        tokens: a step takes whole windows of at least so many tokens together (all, if there are fewer).
        weight_rate: step size of the weights, in units of their scales.
        scale_rate: step size of the logarithms of the scales.
        token_power: a token's squared error is divided by the squared norm of its output to this power: 1 makes errors
            relative, 0 leaves them absolute.
        ahead: how many blocks further on the error is measured, if there are so many. The blocks in between, not yet
            compressed, tell what matters to them: less error at the block's own output can make a worse model.
        beta2: Adam's second coefficient.
    """

    steps: int = 200
    tokens: int = 1024
    weight_rate: float = 0.03
    scale_rate: float = 0.002
    token_power: float = 0.5
    ahead: int = 1
    beta2: float = 0.99


SETTING = Refit()

Chain = list[tuple[nn.Module, list[Call]]]  # consecutive blocks, with how each is called per batch


class Latents:
    """Weights of layers with one scheme as real numbers, one row per group of columns, so that all are rounded at once.

    Attributes:
        latent: [groups, width] float32, in units of the scales; at first what the solver rounded. Zero where pruned.
        change: [groups, 1] float32, of the logarithms of the scales.
    """

    def __init__(self, packed: list[PackedWeight], latents: list[Tensor], dtype: torch.dtype) -> None:
        self.packed = packed
        self.dtype = dtype  # in which the model computes
        self.scheme = packed[0].scheme
        self.width = self.scheme.group_width(packed[0].in_features)
        self.low = -self.scheme.zero_code
        self.high = self.scheme.max_code - self.scheme.zero_code
        self.groups = [p.scales.numel() for p in packed]
        # Not the integers: all weights would sit in the middle between two roundings, hear nothing of one another's
        # moves, and go over the edge at the same time.
        self.latent = torch.cat([x.reshape(-1, self.width) for x in latents]).clamp_(self.low, self.high)
        self.kept = None
        if self.scheme.sparsity:
            masks = [unpack_mask(p.meta, p.in_features) for p in packed if p.meta is not None]
            self.kept = torch.cat([m.view(-1, self.width) for m in masks])
        self.start = torch.cat([p.scales.reshape(-1, 1) for p in packed]).float()
        self.change = torch.zeros_like(self.start)

    def _codes(self) -> Tensor:
        return self.latent.round().clamp_(self.low, self.high)

    def _scales(self) -> Tensor:
        grown = self.start * self.change.exp()
        return grown.clamp_max_(torch.finfo(self.scheme.dtype).max).to(self.scheme.dtype)

    def round(self) -> list[Tensor]:
        """The layers' weights [N, K] float32 with the very values that the packed weights will have."""
        self._step = self._scales().to(self.dtype).float()
        self._value = self._codes().mul_(self._step).to(self.dtype).float()
        parts = zip(self._value.split(self.groups), self.packed, strict=True)
        return [value.view(p.out_features, p.in_features) for value, p in parts]

    def set_gradients(self, gradients: list[Tensor]) -> None:
        """Sets the gradients of ``latent`` and ``change`` from those [N, K] of the weights, as if nothing was rounded.

        A pruned weight has none, and so stays zero.
        """
        g = torch.cat([x.view(-1, self.width) for x in gradients])
        self.change.grad = (g * self._value).sum(1, keepdim=True)
        self.latent.grad = g.mul_(self._step)
        if self.kept is not None:
            self.latent.grad.mul_(self.kept)

    def stay_in_range(self) -> None:
        """After a step: out of range, a weight would answer to no gradient before it had come all the way back."""
        self.latent.clamp_(self.low, self.high)
        self.change.clamp_(-_MAX_CHANGE, _MAX_CHANGE)

    def pack(self) -> list[PackedWeight]:
        codes = self._codes().add_(self.scheme.zero_code).to(torch.uint8).split(self.groups)
        scales = self._scales().split(self.groups)
        masks = [None] * len(codes) if self.kept is None else self.kept.split(self.groups)
        return [
            PackedWeight.pack(
                c.view(p.out_features, p.in_features),
                s.view(p.scales.shape),
                p.scheme,
                None if m is None else m.view(p.out_features, p.in_features),
            )
            for c, s, m, p in zip(codes, scales, masks, self.packed, strict=True)
        ]

    def is_finite(self) -> bool:
        return bool(self.latent.isfinite().all() and self.change.isfinite().all())


class _Dense(nn.Module):
    """Stands for a compressed layer while gradients have to pass it."""

    def __init__(self, layer: CompressedLinear) -> None:
        super().__init__()
        self.weight = layer.packed.dequantize().float()
        self.adapter = None if layer.adapter is None else layer.adapter.dequantize()  # stays as it is
        self.bias = None if layer.bias is None else layer.bias.float()

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight if self.adapter is None else self.weight + self.adapter, self.bias)


class _Windows:
    """What a block is trained on: inputs, and the outputs that are aimed at with the weights of their errors."""

    def __init__(
        self, chain: Chain, hidden: list[Tensor], goals: list[Tensor], where: torch.device, setting: Refit
    ) -> None:
        self.chain = chain
        self.hidden = hidden
        self.goals = goals
        self.where = where
        self.weights = _weights(goals, setting.token_power)
        self.rows = [h.numel() // h.shape[-1] for h in hidden]
        self.together = self._alike()

    def _alike(self) -> bool:
        """Whether windows can be stacked: single rows that are called alike, and of which two give what each gives."""
        first = self.hidden[0]
        if len(self.hidden) < 2 or first.shape[0] != 1 or any(h.shape != first.shape for h in self.hidden):
            return False
        if not all(_same(call, calls[0]) for _, calls in self.chain for call in calls):
            return False
        try:
            both = self.forward([0, 1])
        except (RuntimeError, ValueError, IndexError):  # a mask or a bias made for one
            return False
        single = torch.cat([self.forward([i]) for i in (0, 1)])
        distance = (both - single).norm(dim=-1) / single.norm(dim=-1)
        return both.shape == single.shape and bool(distance.mean() < 1e-2)

    def forward(self, indices: list[int]) -> Tensor:
        x = torch.cat([self.hidden[i] for i in indices])
        for block, calls in self.chain:
            x = run(block, x, calls[indices[0]], self.where, torch.float32)
        return x

    def error(self, indices: list[int]) -> Tensor:
        """Sum of the weighted squared errors of these windows."""
        goal = torch.cat([self.goals[i] for i in indices])
        weights = torch.cat([self.weights[i] for i in indices])
        return (self.forward(indices) - goal).mul(weights).square().sum()

    def pieces(self, indices: list[int]) -> Iterator[list[int]]:
        """The windows in runs that go through the block together."""
        size = max(1, _TOKENS_AT_ONCE // self.rows[0]) if self.together else 1
        for i in range(0, len(indices), size):
            yield indices[i : i + size]

    def steps(self, tokens: int, generator: torch.Generator) -> Iterator[list[int]]:
        """Windows of step after step without end: all of them in a random order, then again in another."""
        step: list[int] = []
        while True:
            for i in torch.randperm(len(self.hidden), generator=generator).tolist():
                if i in step:  # left over from the order before
                    continue
                step.append(i)
                if sum(self.rows[j] for j in step) >= tokens or len(step) == len(self.hidden):
                    yield sorted(step)
                    step = []

    def mean_error(self) -> float:
        pieces = self.pieces(list(range(len(self.hidden))))
        return float(sum(self.error(p).double() for p in pieces)) / sum(self.rows)


def can_follow(method: str) -> bool:
    """Whether a refit can train what a method leaves."""
    return method not in PRUNE_ONLY + UNCALIBRATED


def check_refit(refit: object, method: str) -> None:
    """Raises ValueError for a refit that is neither yes nor no nor None, or after a method that it cannot follow."""
    if refit is not None and not isinstance(refit, bool):
        raise ValueError(f"refit must be True, False or None, got {refit!r}")
    if refit and not can_follow(method):
        calibrated = [m for m in dict.fromkeys(METHODS_24 + METHODS_DENSE) if m not in UNCALIBRATED]
        raise ValueError(
            f"refit=True trains what a calibrated method has quantized, and {method!r} is none: "
            f"use one of {', '.join(calibrated)}, or refit=False"
        )


def check_model(model: nn.Module) -> None:
    """Raises ValueError for a model whose attention computes in half precision alone."""
    if reason := _why_not(model):
        raise ValueError(f"refit=True {reason}, or use refit=False")


def by_default(model: nn.Module, blocks: nn.ModuleList, method: str, device: torch.device | str | None) -> bool:
    """Whether a model is refitted if nobody says so: where all of its blocks are computed on GPUs, and it can be."""
    where = {p.device.type for p in blocks.parameters()} if device is None else {torch.device(device).type}
    return where == {"cuda"} and can_follow(method) and not _why_not(model)


def _why_not(model: nn.Module) -> str | None:
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention in (None, "sdpa", "eager"):
        return None
    return (
        f"trains in float32, which attention {attention!r} does not do: load the model with attn_implementation='sdpa'"
    )


def memory_need(model: nn.Module, prefix: str, targets: list[Target], windows: list[Tensor], setting: Refit) -> int:
    """Bytes that refitting a block with its share of the targets takes at its peak, about."""
    linears, blocks = [linear_at(model, t.name) for t in targets], blocks_of(prefix, targets)
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None) or 0
    weights = sum(m.in_features * m.out_features for m in linears) // blocks
    features = sum(m.in_features + m.out_features for m in linears) // blocks
    tokens = max(_TOKENS_AT_ONCE, *(w.numel() for w in windows))
    # Of a weight: original, latent, rounded, the gradients of these two, two moments of Adam, and a temporary.
    # Of a token: what the backward pass needs, norms and activation functions included.
    # The scores of attention are kept thrice: as they are, masked, and after their softmax.
    scores = heads * tokens * max(w.shape[-1] for w in windows)
    return 4 * ((8 + setting.ahead) * weights + 3 * (1 + setting.ahead) * (tokens * features + scores))


def refit(
    model: nn.Module,
    linears: dict[str, nn.Linear],
    results: list[Result],
    chain: Chain,
    hidden: list[Tensor],
    original: list[Tensor],
    where: torch.device,
    setting: Refit,
    seed: int,
    progress: bool,
) -> list[Result]:
    """Trains the layers of a block that have been compressed; the model is left as it is.

    Args:
        model: holds the block, with a CompressedLinear in the place of every result.
        linears: the Linears that were there, by name.
        results: finished layers of the block; those that no calibration input reached are not trained.
        chain: the block, and as many after it as ``setting.ahead`` asks for.
        hidden: the block's inputs in the compressed model, [B, T, width] per batch.
        original: its outputs in the original model.
        where: device to compute on.
        setting: how.
        seed: for the order of the windows.
        progress: show a progress bar.

    Returns:
        The results with their new weights. With the old ones and a note, if the error over all windows is not smaller
        afterwards.
    """
    chosen = [r for r in results if r.latent is not None and r.report.rows]
    if not chosen:
        return results
    goals = original
    for block, calls in chain[1:]:
        with moved(block, where):
            goals = [run(block, x, call, where) for x, call in zip(goals, calls, strict=True)]
    goals = [x.to(where) for x in goals]
    together: dict[object, list[Result]] = {}
    for r in chosen:
        assert r.packed is not None
        dtype = linears[r.report.name].weight.dtype
        key = (r.packed.scheme, r.packed.scheme.group_width(r.packed.in_features), dtype)
        together.setdefault(key, []).append(r)
    names, latents = [], []
    for group in together.values():
        names.append([r.report.name for r in group])
        stored = [r.packed.to(where) for r in group if r.packed is not None]
        start = [r.latent for r in group if r.latent is not None]
        latents.append(Latents(stored, start, linears[names[-1][0]].weight.dtype))
    with _trainable(model, chain, where) as dense, _arithmetic():
        layers = [[dense[n] for n in group] for group in names]
        windows = _Windows(chain, hidden, goals, where, setting)
        before, after = _train(windows, layers, latents, setting, seed, progress)
    new: dict[str, PackedWeight] = {}
    if after < before and all(x.is_finite() for x in latents):
        for own, x in zip(names, latents, strict=True):
            new |= zip(own, x.pack(), strict=True)
    why = "no improvement" if math.isfinite(before) and math.isfinite(after) else "its error is not finite"
    refitted = []
    for r in results:
        if r.report.name in new:
            r = replace(r, packed=new[r.report.name], report=replace(r.report, method=f"{r.report.method}+refit"))
        elif any(r is c for c in chosen):
            note = "; ".join(filter(None, [r.report.note, f"not refitted: {why}"]))
            r = replace(r, report=replace(r.report, note=note))
        refitted.append(r)
    return refitted


def _train(
    windows: _Windows, layers: list[list[_Dense]], latents: list[Latents], setting: Refit, seed: int, progress: bool
) -> tuple[float, float]:
    """Mean weighted squared error per token before and after."""

    def round_all() -> list[Tensor]:
        weights = [w for x in latents for w in x.round()]
        for layer, w in zip((m for group in layers for m in group), weights, strict=True):
            layer.weight = w.requires_grad_()
        return weights

    round_all()
    before = windows.mean_error()
    if not (math.isfinite(before) and before > 0):
        return before, before
    optimizer = torch.optim.Adam(
        [
            {"params": [x.latent for x in latents], "lr": setting.weight_rate},
            {"params": [x.change for x in latents], "lr": setting.scale_rate},
        ],
        betas=(0.9, setting.beta2),
        fused=True,
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    steps = windows.steps(setting.tokens, torch.Generator().manual_seed(seed))
    for i in tqdm(range(setting.steps), desc="refitting", unit="step", leave=False, disable=not progress):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 + math.cos(math.pi * i / setting.steps)) / 2
        step = next(steps)
        weights = round_all()
        gradients: list[Tensor] = []
        for piece in windows.pieces(step):
            with torch.enable_grad():
                # In units of the error before: a gradient's size is then far from Adam's epsilon and from overflow.
                error = windows.error(piece) / (before * sum(windows.rows[j] for j in step))
            found: Sequence[Tensor | None] = [None] * len(weights)
            if error.requires_grad:  # else no weight was used
                found = torch.autograd.grad(error, weights, allow_unused=True)  # unused: an expert without a token
            new = [torch.zeros_like(w) if g is None else g for g, w in zip(found, weights, strict=True)]
            gradients = [a + b for a, b in zip(gradients, new, strict=True)] if gradients else new
        done = 0
        for x in latents:
            x.set_gradients(gradients[done : done + len(x.packed)])
            done += len(x.packed)
        optimizer.step()
        for x in latents:
            x.stay_in_range()
    round_all()
    return before, windows.mean_error()


def _weights(goals: list[Tensor], power: float) -> list[Tensor]:
    """Roots of the weights of squared errors, [B, T, 1] per batch."""
    norms = [x.float().square().sum(-1, keepdim=True) for x in goals]
    floor = 1e-3 * torch.cat([n.flatten() for n in norms]).median() + torch.finfo(torch.float32).tiny
    return [n.clamp_min(floor).pow(-power / 2) for n in norms]


def _same(a: object, b: object) -> bool:
    """Equal, and with the very same tensors."""
    if isinstance(a, Call) and isinstance(b, Call):
        return _same(a.args, b.args) and _same(a.kwargs, b.kwargs)
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return a is b or (isinstance(a, (bool, int, float, str)) and a == b)


@contextmanager
def _trainable(model: nn.Module, chain: Chain, where: torch.device) -> Iterator[dict[str, _Dense]]:
    """Has the blocks of the chain on the device, in float32, and without compressed layers; yields their stand-ins."""
    names = {id(m): n for n, m in model.named_modules()}
    with ExitStack() as stack:
        dense: dict[str, _Dense] = {}
        for block, _ in chain:
            stack.enter_context(moved(block, where))
            inside = list(block.named_modules(remove_duplicate=False))
            factors = tuple(f"{name}." for name, m in inside if isinstance(m, Adapter))
            for name, layer in inside:
                if isinstance(layer, CompressedLinear) and not name.startswith(factors):
                    stand_in = dense.setdefault(names[id(layer)], _Dense(layer))
                    block.set_submodule(name, stand_in)
                    stack.callback(block.set_submodule, name, layer)
            for p in block.parameters():
                if p.requires_grad:
                    stack.callback(p.requires_grad_, True)
                    p.requires_grad_(False)
            for t in (*block.parameters(), *block.buffers()):
                if t.is_floating_point() and t.dtype != torch.float32:
                    stack.callback(setattr, t, "data", t.data)
                    t.data = t.data.float()
        yield dense


@contextmanager
def _arithmetic() -> Iterator[None]:
    """TF32 products on a GPU, and attention whose gradients have the same bits every time."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        matmul.fp32_precision = before
