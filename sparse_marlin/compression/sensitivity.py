"""What either structure of a layer, 2:4 or dense, adds to a model's loss: estimated for all layers at once.

That takes one pass forward and one backward through the original model. Forward, each block's layers are solved both
ways, with the Hessians of the original model's inputs. Backward, over the windows that are held out, labels are sampled
from the model's own distribution, and the gradient g of their loss with respect to a layer's output meets the error
dy = (W' - W) x that the solved weight makes there. To second order the loss grows by half of ``dy^T F dy`` with the
Fisher information F, the expectation of ``g g^T`` (as in WoodFisher, arXiv 2004.14340, and in mixed precision by
HAWQ-V2, 1911.03852); here ``1/2 sum (g . dy)^2`` over the tokens, divided by their number.

Both directions go a block at a time: besides the model, memory holds one block's activations, the hidden states between
the blocks for the held-out windows, and the packed weights of both structures. Swapping single layers and measuring is
the alternative; it takes a pass through half of the model per layer and structure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from ..packed import PackedWeight
from .blocks import call, capture, moved, run, without_blocks
from .hessian import NonFiniteError
from .moments import collect
from .report import Sensitivity
from .stages import solve_stage
from .store import Store
from .targets import Target, linear_at

_ROWS = 128  # positions whose float32 logits exist at once, where no gradient passes

Variants = dict[str, tuple[PackedWeight, PackedWeight]]  # 2:4 and dense


def solve_both(
    model: nn.Module,
    prefix: str,
    blocks: nn.ModuleList,
    sparse: list[Target],
    dense: list[Target],
    windows: list[Tensor],
    damping: float,
    on_nonfinite: str,
    stores: list[Store],
    device: torch.device | str | None,
    progress: bool,
) -> Variants:
    """Every target 2:4 and dense, on the CPU, each calibrated on its inputs in the original model."""
    variants: Variants = {}
    hidden, calls = capture(model, blocks, windows, device)
    for index, block in enumerate(tqdm(blocks, desc="solving both structures", unit="block", disable=not progress)):
        mine = [[t for t in targets if t.name.startswith(f"{prefix}.{index}.")] for targets in (sparse, dense)]
        with moved(block, device) as where:
            done = [store.load(index) for store in stores] or [None, None]
            if None in done:
                collected = collect(model, block, mine[0], hidden, calls[index], None, where, on_nonfinite)
                done = [solve_stage(model, targets, collected, "one-shot", damping, False) for targets in mine]
                for store, results in zip(stores, done, strict=False):
                    store.save(index, results or [])
            for pair in zip(*(results or [] for results in done), strict=True):
                packed = [result.packed for result in pair]
                assert packed[0] is not None and packed[1] is not None
                variants[pair[0].report.name] = packed[0].to("cpu"), packed[1].to("cpu")
            if index + 1 < len(blocks):
                for i, how in enumerate(calls[index]):
                    hidden[i] = run(block, hidden[i], how, where)
        calls[index].clear()
    return variants


class Fed:
    """Notes what Linears are fed and put out while a block runs."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.calls: list[tuple[str, Tensor, Tensor]] = []
        self._hooks = [
            model.get_submodule(name).register_forward_hook(
                lambda _module, args, kwargs, out, name=name: self._note(
                    name, args[0] if args else kwargs["input"], out
                ),
                with_kwargs=True,
            )
            for name in names
        ]

    def _note(self, name: str, x: Tensor, out: Tensor) -> Tensor:
        self.calls.append((name, x, out))
        return out.clone()  # what follows may change its input in place

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class Probe:
    """The held-out windows, and how the model calls its blocks for them.

    A loss is the mean over the predicted tokens, in nats; blocks are moved to ``device`` one at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        prefix: str,
        blocks: nn.ModuleList,
        windows: list[Tensor],
        device: torch.device | str | None,
        progress: bool,
    ) -> None:
        self.model, self.prefix, self.blocks, self.windows = model, prefix, blocks, windows
        self.device, self.progress = device, progress
        hidden, self.calls = capture(model, blocks, windows, device)
        self.first = [x.cpu() for x in hidden]
        self.tokens = sum(w.numel() - 1 for w in windows)
        self._tails: list[tuple[Any, ...] | None] = [None] * len(blocks)

    def loss(self, title: str, mixed: Mapping[str, PackedWeight] | None = None) -> float:
        """The model's loss, with these layers' weights in the place of its own."""
        *_, last = self._states(title, mixed or {})
        with without_blocks(self.model, self.blocks, self._tails, self.device) as logits:
            pairs = zip(self.windows, last, strict=True)
            return sum(float(_loss(logits(w, x), w[:, 1:])) for w, x in pairs) / self.tokens

    def states(self) -> list[list[Tensor]]:
        """The hidden states before each block and after the last, by block and window, on the CPU."""
        return list(self._states("running the original model", {}))

    def _states(self, title: str, mixed: Mapping[str, PackedWeight]) -> Iterator[list[Tensor]]:
        hidden = list(self.first)
        yield hidden
        for index, block in enumerate(tqdm(self.blocks, desc=title, unit="block", disable=not self.progress)):
            with moved(block, self.device) as where, self._swapped(index, mixed):
                hidden = list(hidden)
                for i, how in enumerate(self.calls[index]):
                    x, self._tails[index] = call(block, hidden[i], how, where)
                    hidden[i] = x.cpu()
            yield hidden

    @contextmanager
    def _swapped(self, index: int, mixed: Mapping[str, PackedWeight]) -> Iterator[None]:
        linears = {n: linear_at(self.model, n) for n in mixed if n.startswith(f"{self.prefix}.{index}.")}
        kept = {n: linear.weight.data for n, linear in linears.items()}
        try:
            for n, linear in linears.items():
                linear.weight.data = mixed[n].to(linear.weight.device).dequantize(linear.weight.dtype)
            yield
        finally:
            for n, linear in linears.items():
                linear.weight.data = kept[n]

    def gradients(self, last: list[Tensor], seed: int) -> tuple[float, list[Tensor]]:
        """The original model's loss, and gradients with respect to the hidden states after the last block.

        These are of the summed loss for labels that are drawn from the model's own distribution.
        """
        total = 0.0
        gradients: list[Tensor] = []
        with without_blocks(self.model, self.blocks, self._tails, self.device) as logits:
            generator: torch.Generator | None = None
            for window, hidden in zip(self.windows, last, strict=True):
                with torch.enable_grad():
                    x = hidden.detach().requires_grad_()
                    out = logits(window, x)
                    if generator is None:
                        generator = torch.Generator(out.device).manual_seed(seed)
                    total += float(_loss(out.detach(), window[:, 1:]))
                    if not math.isfinite(total):
                        raise NonFiniteError("the original model's loss on the held-out windows is not finite")
                    rows = (part.detach().float().softmax(1) for part in out[0, :-1].split(_ROWS))
                    labels = torch.cat([torch.multinomial(p, 1, generator=generator) for p in rows])
                    gradients += torch.autograd.grad(_loss(out, labels.T), x)
        return total / self.tokens, gradients


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed negative log-likelihood of labels [1, T - 1] under logits [1, T, V]."""
    parts = zip(logits[0, :-1].split(_ROWS), labels[0].to(logits.device).split(_ROWS), strict=True)
    return torch.stack([cross_entropy(z.float(), y, reduction="sum").double() for z, y in parts]).sum()


def estimate(probe: Probe, variants: Variants, names: list[str], seed: int) -> tuple[float, list[Sensitivity]]:
    """The original model's loss, and what either structure adds to it for each set of layers.

    Args:
        probe: of the original model.
        variants: all layers both ways.
        names: of the layers, in order.
        seed: for the labels.
    """
    states = probe.states()
    loss, gradients = probe.gradients(states.pop(), seed)
    squares: dict[tuple[str, ...], Tensor] = {}
    for index in tqdm(range(len(states) - 1, -1, -1), desc="measuring sensitivities", disable=not probe.progress):
        squares |= _squares(probe, variants, index, states.pop(), gradients)
    groups = []
    for together in _together(names, squares):
        sparse, dense = sum(
            (s for n, s in squares.items() if n[0] in together), torch.zeros(2, dtype=torch.float64)
        ).tolist()
        groups.append(Sensitivity(together, sparse / 2 / probe.tokens, dense / 2 / probe.tokens))
    return loss, groups


def _squares(
    probe: Probe, variants: Variants, index: int, inputs: list[Tensor], gradients: list[Tensor]
) -> dict[tuple[str, ...], Tensor]:
    """Sums of squares of g . dy, 2:4 and dense, [2] float64, of the layers of a block that were fed the same tensors.

    ``gradients`` are with respect to the block's outputs, and then to its inputs.
    """
    names = [n for n in variants if n.startswith(f"{probe.prefix}.{index}.")]
    squares: dict[tuple[str, ...], Tensor] = {}
    block = probe.blocks[index]
    with moved(block, probe.device) as where, closing(Fed(probe.model, names)) as fed:
        errors = {}
        for name in names:
            weight = linear_at(probe.model, name).weight.detach().float()
            errors[name] = [p.to(where).dequantize(torch.float32).sub_(weight) for p in variants[name]]
        for i, how in enumerate(probe.calls[index]):
            # The backward passes of other attention kernels may add in any order.
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                x = inputs[i].to(where).detach().requires_grad_()
                out = run(block, x, how, where)
                calls, fed.calls = fed.calls, []
                gradients[i], *gs = torch.autograd.grad(
                    out, [x, *(y for _, _, y in calls)], gradients[i].to(where), allow_unused=True
                )
            gradients[i] = gradients[i].cpu()
            found: dict[tuple[int, str], tuple[list[str], list[Tensor]]] = {}  # by tensor and module around
            for (name, fed_with, _), g in zip(calls, gs, strict=True):
                if g is None:  # what it put out was not used
                    continue
                rows, g = fed_with.detach().flatten(0, -2).float(), g.flatten(0, -2).float()
                dot = torch.stack([((rows @ e.T) * g).sum(1) for e in errors[name]])
                group, dots = found.setdefault((id(fed_with), name.rpartition(".")[0]), ([], []))
                group.append(name)
                dots.append(dot)
            for group, dots in found.values():
                square = sum(dots[1:], dots[0]).double().square().sum(1).cpu()
                squares[tuple(group)] = squares.get(tuple(group), torch.zeros_like(square)) + square
    return squares


def _together(names: list[str], seen: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """All layers in order, those that were seen together in one set.

    Layers of one module that saw no token at all are one set, so that no two of them which an engine fuses differ.
    """
    of: dict[str, set[str]] = {}
    for group in seen:
        merged = set(group).union(*(of.get(n, ()) for n in group))
        of.update(dict.fromkeys(merged, merged))
    for name in names:
        if name not in of:
            of[name] = {n for n in names if n not in of and n.rpartition(".")[0] == name.rpartition(".")[0]}
            of.update(dict.fromkeys(of[name], of[name]))
    return list(dict.fromkeys(tuple(n for n in names if n in of[name]) for name in names))
