"""Compresses a model block by block, each block calibrated on the outputs of the compressed blocks before it."""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import json
import logging
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from ..linear import CompressedLinear
from ..packed import TENSOR_NAMES, PackedWeight
from ..scheme import Scheme, Sparsity
from .calibration import calibration_windows
from .hessian import ROWS, Hessian, NonFiniteError
from .report import LayerReport, Report
from .solve import (
    PRUNE_ONLY,
    UNCALIBRATED,
    check_damping,
    check_method,
    compress_weight,
    default_method,
    output_error,
    why_no_weight,
)

log = logging.getLogger("sparse_marlin")

_FORMAT = 1  # of checkpoint_dir
CORRECTION_RIDGE = 0.3  # in units of the Hessian's mean diagonal


@dataclass(frozen=True)
class Target:
    """A Linear that will be compressed."""

    name: str  # within the model
    scheme: Scheme
    note: str = ""


@torch.no_grad()
def patch_model(
    model: nn.Module,
    sparsity: Sparsity | None = "2:4",
    bits: int = 4,
    group_size: int = 128,
    *,
    calibration: Any = None,
    tokenizer: Any = None,
    method: str = "auto",
    skip: str | Sequence[str] = (),
    only: str | Sequence[str] = (),
    dtype: torch.dtype | None = None,
    damping: float = 0.01,
    num_samples: int = 128,
    sequence_length: int = 512,
    seed: int = 0,
    device: torch.device | str | None = None,
    checkpoint_dir: str | Path | None = None,
    progress: bool = True,
    on_nonfinite: Literal["raise", "fallback"] = "raise",
) -> Report:
    """Compresses every ``nn.Linear`` of a causal LM's decoder blocks, in place.

    Blocks are taken in order; each is calibrated on the outputs of the compressed blocks before it. The output head and
    the embeddings are left as they are. Everything that can be refused is refused before the first layer is touched.

    Args:
        model: a Hugging Face causal LM, or any module that takes ``input_ids`` and holds its blocks in a ModuleList.
        sparsity: ``"2:4"`` or None for dense.
        bits: 4 or 8.
        group_size: columns per scale: 32, 64, 128, or -1 for one scale per output channel. A layer whose in_features
            is no multiple of it gets the largest smaller size that fits, and the report says so.
        calibration: token tensors [B, T], texts, or a dataset with ``input_ids`` or ``text``; None samples tokens from
            the model itself. See :func:`~sparse_marlin.compression.calibration.calibration_windows`.
        tokenizer: for texts.
        method: ``auto`` means ``one-shot``, which also corrects each layer for the errors of the layers before it. For
            2:4 there are also ``two-pass``, ``one-loop``, ``wanda+rtn`` and ``magnitude+rtn``, for dense ``gptq`` and
            ``rtn`` (see :func:`~sparse_marlin.compression.solve.compress_weight`). For comparisons, ``sparsegpt``,
            ``wanda`` and ``magnitude`` prune only, and leave an ``nn.Linear``.
        skip: names or shell patterns of Linears to leave out.
        only: names or shell patterns; if given, nothing else is compressed.
        dtype: precision of the scales, float16 or bfloat16; default: the layer's own dtype, float16 for float32 layers.
        damping: fraction of the Hessian's mean diagonal added to it.
        num_samples, sequence_length: windows taken from texts or sampled from the model.
        seed: for windows and samples.
        device: where to compute; blocks are moved there one at a time. Default: where each block is.
        checkpoint_dir: keeps every finished block there; the same call resumes after an interruption, with the same
            result bit for bit.
        progress: print the memory need, and show progress bars.
        on_nonfinite: what to do where a layer's inputs are not finite: stop, or round that layer to nearest.

    Returns:
        A report of every layer.

    Raises:
        ValueError: for settings, layers or calibration data that cannot work; the model is unchanged then.
        NonFiniteError: for non-finite inputs of a layer, named, with ``on_nonfinite="raise"``.
    """
    scheme = Scheme(bits, group_size, sparsity, dtype=dtype or torch.float16)
    method = default_method(sparsity, calibrated=True) if method == "auto" else method
    check_method(method, sparsity, allow_prune_only=True)
    if on_nonfinite not in ("raise", "fallback"):
        raise ValueError(f"on_nonfinite must be 'raise' or 'fallback', got {on_nonfinite!r}")
    check_damping(damping)
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch_model takes an nn.Module, got {type(model).__name__}")
    prefix, blocks = decoder_blocks(model)
    targets, skipped = _choose(model, prefix, _patterns("skip", skip), _patterns("only", only), scheme, dtype)
    windows = calibration_windows(model, calibration, tokenizer, num_samples, sequence_length, seed, progress)
    if progress:
        print(_memory_need(model, prefix, targets, windows), file=sys.stderr)

    settings = {
        "scheme": scheme.to_dict(),
        "method": method,
        "damping": damping,
        "seed": seed,
        "windows": len(windows),
        "tokens": sum(w.numel() for w in windows),
    }
    store = None
    if checkpoint_dir is not None:
        store = _Store(Path(checkpoint_dir), {**settings, "on_nonfinite": on_nonfinite}, model, targets, windows)
    was_training = model.training
    model.eval()
    finished: list[LayerReport] = []
    try:
        hidden, calls = _capture(model, blocks, windows, device)
        correct = method == "one-shot"
        original = list(hidden)  # what the uncompressed model would have there
        for index, block in enumerate(tqdm(blocks, desc="compressing blocks", unit="block", disable=not progress)):
            mine = [t for t in targets if t.name.startswith(f"{prefix}.{index}.")]
            with _moved(block, device) as where:
                stages: list[list[Target]] = [mine]
                inputs: Recorded | None = None
                if correct:
                    inputs, original = _record(model, block, mine, original, calls[index], where)
                    stages = _stages(mine, inputs)
                done = store.load(index) if store else None
                if done is None:
                    done = []
                    for stage in stages:
                        collected = _collect(model, block, stage, hidden, calls[index], inputs, where, on_nonfinite)
                        results = _solve_stage(model, stage, collected, method, damping)
                        for result in results:
                            _install(model, result)
                        done += results
                    if store:
                        store.save(index, done)
                else:
                    for result in done:
                        _install(model, result)
                finished += [result.report for result in done]
                inputs = None  # the largest tensors here, and no longer needed
                if index + 1 < len(blocks):
                    for i, call in enumerate(calls[index]):
                        hidden[i] = _run(block, hidden[i], call, where)
            calls[index].clear()
    finally:
        model.train(was_training)
    order = {name: i for i, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    return Report(sorted(finished + skipped, key=lambda layer: order[layer.name]), settings)


# ---------------------------------------------------------------------------------------------- what to compress


def decoder_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the model's decoder blocks: the ModuleList whose Linears hold the most weights.

    Raises:
        ValueError: if no ModuleList holds a Linear.
    """
    best, size = None, 0
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            linears = [m for m in module.modules() if isinstance(m, (nn.Linear, CompressedLinear))]
            weights = sum(m.in_features * m.out_features for m in linears)
            if weights > size:  # a list inside a block holds fewer than the list of blocks around it
                best, size = (name, module), weights
    if best is None:
        held = {type(m).__name__ for _, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))}
        raise ValueError(
            f"{type(model).__name__} has no decoder blocks: no ModuleList in it holds an nn.Linear. Its weights are in "
            f"{', '.join(sorted(held)) or 'no module at all'}; use sparse_marlin.compress on single nn.Linear layers"
        )
    return best


def _patterns(option: str, value: str | Sequence[str]) -> list[str]:
    patterns = [value] if isinstance(value, str) else value
    if not isinstance(patterns, Iterable) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"{option}= takes names or shell patterns of layers, got {value!r}")
    return list(patterns)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(name, "*." + p) for p in patterns)


def _choose(
    model: nn.Module, prefix: str, skip: list[str], only: list[str], scheme: Scheme, dtype: torch.dtype | None
) -> tuple[list[Target], list[LayerReport]]:
    """Targets in order, and a report line for every other module with a weight matrix; raises before any work."""
    holders = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if any(p.dim() >= 2 for p in module.parameters(recurse=False))
    }
    for option, patterns in (("skip", skip), ("only", only)):
        for p in patterns:
            if not any(_matches(name, [p]) for name in holders):
                tails = {".".join(name.split(".")[i:]) for name in holders for i in range(name.count(".") + 1)}
                near = difflib.get_close_matches(p, sorted(tails), n=4, cutoff=0.4)
                raise ValueError(f"{option}={p!r} matches no layer; near matches: {', '.join(near) or 'none'}")
    uses: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for _, p in module.named_parameters(recurse=False):
            uses.setdefault(id(p), []).append(name)
    head = getattr(model, "get_output_embeddings", lambda: None)()

    targets, skipped, impossible = [], [], []
    for name, module in holders.items():
        inside = name.startswith(prefix + ".")
        shared = [n for n in uses[id(module.weight)] if n != name] if isinstance(module, nn.Linear) else []
        reason = ""
        if isinstance(module, CompressedLinear):
            reason = "already compressed"
        elif isinstance(module, nn.Embedding):
            reason = "embedding"
        elif module is head:
            reason = "output head, left out by default"
        elif type(module) is not nn.Linear:
            reason = f"a {type(module).__name__} is no nn.Linear"
        elif not inside:
            reason = "outside the decoder blocks"
        elif _matches(name, skip):
            reason = "skip="
        elif only and not _matches(name, only):
            reason = "not in only="
        elif shared:
            reason = f"weight tied to {shared[0]}"
        if reason:
            shape = next(tuple(p.shape) for p in module.parameters(recurse=False) if p.dim() >= 2)
            skipped.append(LayerReport(name, type(module).__name__, shape, "skipped", reason))
            continue
        weight = module.weight
        assert isinstance(weight, Tensor)
        own = replace(scheme, dtype=dtype or _scale_dtype(weight.dtype))
        fitted = own.fit(weight.shape[1])
        if why := why_no_weight(weight) or fitted.why_not(*weight.shape):
            impossible.append(f"{name}: {why}")
        note = "" if fitted == own else f"in_features {weight.shape[1]} is no multiple of {own.group_size}"
        targets.append(Target(name, fitted, note))
    if impossible:
        raise ValueError("cannot compress, use skip= to leave out:\n  " + "\n  ".join(impossible))
    if not targets:
        raise ValueError("skip= and only= leave no layer to compress")
    return targets, skipped


def _scale_dtype(weight: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if weight == torch.bfloat16 else torch.float16


def _memory_need(model: nn.Module, prefix: str, targets: list[Target], windows: list[Tensor]) -> str:
    """What compression will hold at its peak, in words."""
    gb = 1e-9
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    linears = [_linear(model, t.name) for t in targets]
    widest = max(m.in_features for m in linears)
    largest = max(m.in_features * m.out_features for m in linears)
    hidden = getattr(getattr(model, "config", None), "hidden_size", None) or widest
    tokens = sum(w.numel() for w in windows)
    blocks = {t.name.split(".", prefix.count(".") + 2)[prefix.count(".") + 1] for t in targets}
    per_block = sum(m.in_features for m in linears) // len(blocks)  # at most: Linears that share inputs count once
    activations = tokens * (3 * hidden + per_block) * next(model.parameters()).element_size()
    solver = 4 * (7 * widest * widest + 8 * largest)
    return (
        f"memory needed: {(weights + activations + solver) * gb:.2f} GB = model {weights * gb:.2f} + activations of "
        f"{tokens} tokens {activations * gb:.2f} + Hessians and solver {solver * gb:.2f}"
    )


# ---------------------------------------------------------------------------------------------- running blocks


@dataclass(frozen=True)
class Call:
    """How the model calls a block for one batch: everything but the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Captured(Exception):
    """Ends a forward pass once its last block has been called."""


def _capture(
    model: nn.Module, blocks: nn.ModuleList, windows: list[Tensor], device: torch.device | str | None
) -> tuple[list[Tensor], list[list[Call]]]:
    """Hidden states before the first block, per batch, and the other arguments of every block, [block][batch].

    The model's own forward runs with stand-ins for the blocks that only note how they are called and hand the hidden
    states on, so this costs next to nothing whatever the model does between blocks.
    """
    hidden: list[Tensor] = []
    calls: list[list[Call]] = [[] for _ in blocks]
    tails: dict[type, tuple[Any, ...] | None] = {}  # what a block returns after the hidden states; None: no tuple

    def stand_in(index: int, block: nn.Module) -> Callable[..., Any]:
        original = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if args:
                x, args = args[0], args[1:]
            else:
                x = kwargs.pop("hidden_states")
            if index == 0:
                hidden.append(x)
            call = Call(args, kwargs)
            calls[index].append(_share(call, calls[index][-1] if calls[index] else None))
            if index + 1 == len(blocks):
                raise _Captured
            if type(block) not in tails:
                with _moved(block, device) as where:
                    out = original(_to(x, where), *_to(args, where), **_to(kwargs, where))
                tails[type(block)] = tuple(out[1:]) if isinstance(out, tuple) else None
            tail = tails[type(block)]
            return x if tail is None else (x, *tail)

        return forward

    wrapped = [vars(block).get("forward") for block in blocks]  # accelerate, for one, puts its hooks there
    for index, block in enumerate(blocks):
        block.forward = stand_in(index, block)
    try:
        where = next(model.parameters()).device
        for window in windows:
            try:
                model(input_ids=window.to(where), use_cache=False)
            except _Captured:
                continue
            raise ValueError(f"{type(model).__name__} did not call all of its {len(blocks)} blocks")
    finally:
        for block, forward in zip(blocks, wrapped, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward
    return hidden, calls


def _share(new: Any, old: Any) -> Any:
    """``new`` with every tensor that equals its counterpart in ``old`` replaced by that, so that masks exist once."""
    if isinstance(new, Tensor):
        same = isinstance(old, Tensor) and old.shape == new.shape and old.dtype == new.dtype and torch.equal(old, new)
        return old if same else new
    if isinstance(new, Call):
        other = old if isinstance(old, Call) else Call((), {})
        return Call(_share(new.args, other.args), _share(new.kwargs, other.kwargs))
    if isinstance(new, tuple) and type(new) is tuple:
        return tuple(_share(v, old[i] if isinstance(old, tuple) and i < len(old) else None) for i, v in enumerate(new))
    if isinstance(new, dict):
        return {k: _share(v, old.get(k) if isinstance(old, dict) else None) for k, v in new.items()}
    return new


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) is tuple or type(value) is list:
        return type(value)(_to(v, device) for v in value)
    if isinstance(value, dict):
        return {k: _to(v, device) for k, v in value.items()}
    return value


@contextmanager
def _moved(block: nn.Module, device: torch.device | str | None) -> Iterator[torch.device]:
    """Has the block on ``device`` for a while, and says where it is."""
    home = next(block.parameters()).device
    if device is None:
        yield home
        return
    where = torch.empty(0, device=device).device  # with its index
    block.to(where)
    try:
        yield where
    finally:
        block.to(home)


def _run(block: nn.Module, hidden: Tensor, call: Call, where: torch.device) -> Tensor:
    out = block(_to(hidden, where), *_to(call.args, where), **_to(call.kwargs, where))
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


# ---------------------------------------------------------------------------------------------- one block


class _Inputs:
    """Notes the tensors that Linears are fed while a block runs, and which of them are the very same tensor."""

    def __init__(self, model: nn.Module, targets: list[Target]) -> None:
        # Tensors are held until the block has returned, so that one is never taken for another at the same address.
        self.seen: list[tuple[Tensor, list[str]]] = []
        self._hooks = [
            model.get_submodule(t.name).register_forward_pre_hook(
                lambda _module, args, kwargs, name=t.name: self._note(name, args[0] if args else kwargs["input"]),
                with_kwargs=True,
            )
            for t in targets
        ]

    def _note(self, name: str, x: Tensor) -> None:
        for tensor, names in self.seen:
            if tensor is x:
                names.append(name)
                return
        self.seen.append((x, [name]))

    def take(self) -> list[tuple[Tensor, list[str]]]:
        """What was fed since the last call: each tensor in order, with the Linears that it went to."""
        taken, self.seen = self.seen, []
        return taken

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


Recorded = list[list[tuple[Tensor, list[str]]]]  # per batch


def _record(
    model: nn.Module,
    block: nn.Module,
    targets: list[Target],
    hidden: list[Tensor],
    calls: list[Call],
    where: torch.device,
) -> tuple[Recorded, list[Tensor]]:
    """What the Linears of the still uncompressed block see in the original model, and the block's outputs there."""
    recorded: Recorded = []
    outputs = []
    with closing(_Inputs(model, targets)) as inputs:
        for x, call in zip(hidden, calls, strict=True):
            outputs.append(_run(block, x, call, where))
            recorded.append(inputs.take())
    return recorded, outputs


def _stages(targets: list[Target], inputs: Recorded) -> list[list[Target]]:
    """Targets in the order in which they are called, those that share an input (and their namesakes) together.

    Later stages are calibrated on what the compressed earlier ones put out. All experts' matrices of one kind are one
    stage, so that there are as many stages as a block is deep.
    """
    stages: list[set[str]] = []  # last parts of names
    for batch in inputs:
        for _, names in batch:
            leaves = {name.rpartition(".")[2] for name in names}
            together = [s for s in stages if s & leaves]
            if together:
                together[0].update(leaves, *together[1:])
                stages = [s for s in stages if s not in together[1:]]
            else:
                stages.append(leaves)
    leaf = {t.name: t.name.rpartition(".")[2] for t in targets}
    known = set().union(*stages)
    groups = [[t for t in targets if leaf[t.name] in stage] for stage in stages]
    rest = [t for t in targets if leaf[t.name] not in known]  # what no batch reached
    return [*groups, rest] if rest else groups


@dataclass
class Moments:
    """Second moments [K, K] of what a set of Linears was fed.

    Attributes:
        hessian: ``X^T X`` of the inputs X in the compressed model.
        cross: ``Y^T X`` with the inputs Y that the original model has in the same places; None where the rows do not
            correspond (an expert may get other tokens), or where the original is not followed.
        original: ``Y^T Y``, None like ``cross``.
    """

    hessian: Hessian
    cross: Tensor | None = None
    original: Tensor | None = None

    def pair(self, x: Tensor, y: Tensor) -> None:
        """Adds rows x [..., K] and the original model's y [..., K] to cross and original."""
        assert self.cross is not None
        assert self.original is not None
        for xs, ys in zip(x.flatten(0, -2).split(ROWS), y.flatten(0, -2).split(ROWS), strict=True):
            ys = ys.to(self.cross)
            self.cross.addmm_(ys.T, xs.to(self.cross))
            self.original.addmm_(ys.T, ys)

    def __add__(self, other: Moments) -> Moments:
        hessian = self.hessian + other.hessian
        if self.cross is None or other.cross is None or self.original is None or other.original is None:
            return Moments(hessian)
        return Moments(hessian, self.cross + other.cross, self.original + other.original)

    def error(self, weight: Tensor, approximation: Tensor) -> float:
        """Relative error of the output with ``approximation``: against the original model's, where it is followed."""
        if self.cross is None or self.original is None:
            return output_error(weight, approximation, self.hessian.matrix)
        total = (weight @ self.original).mul_(weight).sum(dtype=torch.float64)
        mixed = (weight @ self.cross).mul_(approximation).sum(dtype=torch.float64)
        own = (approximation @ self.hessian.matrix).mul_(approximation).sum(dtype=torch.float64)
        return float(((total - 2 * mixed + own).clamp_min(0) / total.clamp_min(1e-30)).sqrt())


@dataclass(frozen=True)
class Collected:
    """Moments of a stage: one for each set of Linears that were fed the very same tensors."""

    moments: dict[tuple[str, ...], Moments]
    broken: dict[str, str]  # layer -> what was wrong with its inputs

    def keys(self, name: str) -> tuple[tuple[str, ...], ...]:
        """The sets that a layer is in; layers in the same sets have the same moments."""
        return tuple(k for k in self.moments if name in k)

    def of(self, name: str) -> Moments | None:
        """The moments of a layer's inputs; None if it saw none, or bad ones."""
        parts = [self.moments[k] for k in self.keys(name)]
        if not parts or name in self.broken:
            return None
        total = sum(parts[1:], parts[0])
        return total if total.hessian.rows else None


def _collect(
    model: nn.Module,
    block: nn.Module,
    targets: list[Target],
    hidden: list[Tensor],
    calls: list[Call],
    originals: Recorded | None,
    where: torch.device,
    on_nonfinite: str,
) -> Collected:
    collected = Collected({}, {})
    with closing(_Inputs(model, targets)) as inputs:
        for i, (x, call) in enumerate(zip(hidden, calls, strict=True)):
            _run(block, x, call, where)
            for tensor, names in inputs.take():
                moments = collected.moments.get(tuple(names))
                if moments is None:
                    moments = Moments(Hessian(tensor.shape[-1], where))
                    if originals is not None:
                        moments.cross = torch.zeros_like(moments.hessian.matrix)
                        moments.original = torch.zeros_like(moments.hessian.matrix)
                    collected.moments[tuple(names)] = moments
                try:
                    moments.hessian.add(tensor)
                except NonFiniteError as e:
                    if on_nonfinite == "raise":
                        raise NonFiniteError(
                            f"the inputs of {', '.join(names)} are not finite: {e}; layers before these are "
                            "compressed already. on_nonfinite='fallback' rounds such layers to nearest"
                        ) from None
                    for name in names:
                        collected.broken[name] = "inputs not finite: rounded to nearest"
                    continue
                if originals is None or moments.cross is None:
                    continue
                before = [t for t, n in originals[i] if names[0] in n]
                # Rows correspond only where every token of the batch went through.
                if len(before) == 1 and before[0].shape == tensor.shape and _rows(tensor) == _rows(x):
                    moments.pair(tensor, before[0])
                else:
                    moments.cross = moments.original = None
    return collected


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def corrected_target(weight: Tensor, moments: Moments) -> Tensor:
    """The weight [N, K] float32 that, on the compressed model's inputs, comes closest to the original layer's output.

    Minimises ``|W' X - W X_original|^2 + ridge |W' - W|^2``, so that a layer also makes up for what the layers before
    it got wrong (the asymmetric calibration of GPTAQ, arXiv 2504.02692, in closed form).
    """
    h = moments.hessian.matrix
    if moments.cross is None:
        return weight
    damped = h.clone()
    ridge = CORRECTION_RIDGE * h.diagonal().mean()
    damped.diagonal().add_(ridge.clamp_min(torch.finfo(torch.float32).tiny))
    lower, info = torch.linalg.cholesky_ex(damped)
    if info:
        return weight
    # W' = W (cross + ridge) inv(H + ridge) = W + W (cross - H) inv(H + ridge)
    return weight + torch.cholesky_solve((weight @ (moments.cross - h)).T, lower).T


@dataclass(frozen=True)
class Result:
    """A finished layer: its compressed weight, or its pruned one after a prune-only method."""

    report: LayerReport
    packed: PackedWeight | None
    pruned: Tensor | None


def _solve_stage(
    model: nn.Module, targets: list[Target], collected: Collected, method: str, damping: float
) -> list[Result]:
    """Solves layers that share inputs and scheme together, as one tall matrix: rows do not influence each other."""
    together: dict[Any, list[Target]] = {}
    for t in targets:
        alone = collected.of(t.name) is None
        together.setdefault(t.name if alone else (collected.keys(t.name), t.scheme), []).append(t)
    results: dict[str, Result] = {}
    for group in together.values():
        moments = collected.of(group[0].name)
        hessian = None if moments is None else moments.hessian.matrix
        scheme = group[0].scheme
        weights = [_linear(model, t.name).weight.detach().float() for t in group]
        own = method if moments is not None or method in UNCALIBRATED else _uncalibrated(method, scheme)
        target = torch.cat(weights)
        if moments is not None:
            target = corrected_target(target, moments)
        solution = compress_weight(target, hessian, scheme, own, damping)
        row = 0
        for t, w in zip(group, weights, strict=True):
            rows = slice(row, row + w.shape[0])
            row += w.shape[0]
            packed = None
            if solution.packed is not None:
                tensors = {n: v[rows].contiguous() for n, v in solution.packed.tensors().items()}
                packed = PackedWeight.from_tensors(tensors, scheme, w.shape[1])
            notes = [t.note, collected.broken.get(t.name, "")]
            if moments is None and t.name not in collected.broken:
                notes.append("saw no calibration input: rounded to nearest")
            report = LayerReport(
                name=t.name,
                kind="Linear",
                shape=tuple(w.shape),
                status="pruned" if packed is None else "compressed",
                note="; ".join(filter(None, notes)),
                scheme=str(scheme),
                method=own,
                error_before=_error(w, _baseline(w, scheme), moments),
                error_after=_error(w, solution.weight[rows], moments),
                bits_per_weight=None if packed is None else scheme.bits_per_weight(w.shape[1]),
                damping=solution.damping,
                rows=0 if moments is None else moments.hessian.rows,
            )
            results[t.name] = Result(report, packed, solution.weight[rows] if packed is None else None)
    return [results[t.name] for t in targets]


def _error(weight: Tensor, approximation: Tensor, moments: Moments | None) -> float:
    return output_error(weight, approximation, None) if moments is None else moments.error(weight, approximation)


def _linear(model: nn.Module, name: str) -> nn.Linear:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear


def _uncalibrated(method: str, scheme: Scheme) -> str:
    """What stands in for ``method`` where a layer has no Hessian."""
    return "magnitude" if method in PRUNE_ONLY else default_method(scheme.sparsity, calibrated=False)


def _baseline(w: Tensor, scheme: Scheme) -> Tensor:
    """Magnitude pruning and rounding to nearest: what the report compares with."""
    return compress_weight(w, None, scheme, default_method(scheme.sparsity, calibrated=False)).weight


def _install(model: nn.Module, result: Result) -> None:
    name = result.report.name
    linear = _linear(model, name)
    if result.packed is None:
        assert result.pruned is not None
        linear.weight.data.copy_(result.pruned)
    else:
        model.set_submodule(name, compressed_layer(result.packed, linear))


def compressed_layer(packed: PackedWeight, linear: nn.Linear) -> CompressedLinear:
    """The module that takes the place of ``linear``, on its device and computing in its dtype."""
    packed = packed.to(linear.weight.device)
    bias = None if linear.bias is None else linear.bias.clone()
    layer = CompressedLinear(replace(packed, scales=packed.scales.to(linear.weight.dtype)), bias)
    return layer.train(linear.training)


# ---------------------------------------------------------------------------------------------- resuming


class _Store:
    """Finished blocks in a directory: one safetensors file each, and a manifest that says what they belong to."""

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        model: nn.Module,
        targets: list[Target],
        windows: list[Tensor],
    ) -> None:
        self.path = path
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for t in targets:
            digest.update(json.dumps([t.name, t.scheme.to_dict()]).encode())
        for name, p in model.state_dict().items():
            digest.update(f"{name} {p.dtype} {zlib.crc32(_bytes(p))}".encode())
        for w in windows:
            digest.update(_bytes(w))
        manifest = {"format": _FORMAT, "fingerprint": digest.hexdigest(), "settings": settings}
        file = path / "manifest.json"
        if file.exists():
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as e:
                raise ValueError(f"{file} is damaged ({e}): delete {path} and start again") from e
            if not isinstance(found, dict):
                raise ValueError(f"{file} is no manifest of a run: delete {path} and start again")
            if found != manifest:
                raise ValueError(
                    f"{path} holds blocks of another run (other model, settings or calibration data): "
                    f"found {found.get('settings')}, now {settings}; use another checkpoint_dir, or delete it"
                )
        elif path.exists() and any(path.iterdir()):
            raise ValueError(f"checkpoint_dir {path} is neither empty nor the checkpoint of a run")
        else:
            path.mkdir(parents=True, exist_ok=True)
            _write(file, lambda f: f.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8"))

    def _file(self, index: int) -> Path:
        return self.path / f"block-{index:05d}.safetensors"

    def save(self, index: int, results: list[Result]) -> None:
        tensors: dict[str, Tensor] = {}
        layers = []
        for r in results:
            parts = {"weight": r.pruned} if r.packed is None else r.packed.tensors()
            for name, t in parts.items():
                assert t is not None
                tensors[f"{r.report.name}.{name}"] = t.cpu().contiguous()
            layers.append({"report": asdict(r.report), "scheme": r.packed.scheme.to_dict() if r.packed else None})
        metadata = {"layers": json.dumps(layers)}
        _write(self._file(index), lambda f: save_file(tensors, f, metadata))

    def load(self, index: int) -> list[Result] | None:
        if not self._file(index).exists():
            return None
        try:
            return self._read(index)
        except (SafetensorError, KeyError, TypeError, ValueError) as e:
            raise ValueError(f"{self._file(index)} is damaged ({e}): delete it, and its block is computed again") from e

    def _read(self, index: int) -> list[Result]:
        results = []
        with safe_open(self._file(index), "pt") as f:
            for layer in json.loads(f.metadata()["layers"]):
                report = LayerReport.from_dict(layer["report"])
                prefix = report.name + "."
                tensors = {k.removeprefix(prefix): f.get_tensor(k) for k in f.keys() if k.startswith(prefix)}  # noqa: SIM118
                if layer["scheme"] is None:
                    results.append(Result(report, None, tensors["weight"]))
                else:
                    scheme = Scheme.from_dict(layer["scheme"])
                    parts = {n: tensors[n] for n in TENSOR_NAMES if n in tensors}
                    results.append(Result(report, PackedWeight.from_tensors(parts, scheme, report.shape[1]), None))
        return results


def _bytes(t: Tensor) -> memoryview:
    return t.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(-1).data


def _write(file: Path, write: Callable[[Path], object]) -> None:
    """Writes a file so that it is there whole or not at all."""
    part = file.with_name(file.name + ".part")
    write(part)
    os.replace(part, file)
