"""Channel permutation: puts the columns of 2:4 layers into an order in which the masks keep more.

The columns of a layer can be in any order if the layers that produce its inputs have their rows in the same order. In a
decoder block that costs nothing at run time for the channels within an MLP, and within each head for what attention
makes of the values (Pool & Yu, "Channel Permutations for N:M Sparsity", 2021; PermLLM, arXiv 2510.10136). The model is
permuted in place before anything is compressed; it computes the same function as before but for float rounding.

With scores ``w_ij^2 sum_t x_tj^2`` over the calibration inputs (Wanda, arXiv 2306.11695), the two largest of each quad
and row, which a mask keeps, should add up to as much as possible. Columns change places between quads for that, and no
more: if those with the largest inputs came first, so that the solver could make up for their errors in more of the
others, the error would fall further on the calibration inputs, but not on others. So dense layers stay as they are.
An MLP has more to gain than attention, where only the few channels of a head can change places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .blocks import Call, Inputs, capture, moved, run
from .hessian import ROWS
from .report import LayerReport
from .store import Store
from .targets import Target, linear_at

_ROWS = 4096  # of a weight, at most, whose scores are looked at
_MEETINGS = 128  # of a quad with others, at most: with all, the time would grow with the square of the width
_GAIN = 1e-5  # of a swap, relative, at least: more than float32 sums are off by

# By the last parts of names: a consumer, and what may be next to it and have its columns as rows, once or twice over.
_MLP = {
    "down_proj": ("gate_proj", "up_proj", "gate_up_proj"),
    "fc2": ("fc1",),
    "dense_4h_to_h": ("dense_h_to_4h",),
    "w2": ("w1", "w3"),
    "c_proj": ("c_fc",),
    "fc_out": ("fc_in",),
}
# The same of attention, where the values have a layer of their own, follow all queries and keys, or the queries and the
# key of each key/value head.
_ATTENTION = ("o_proj", "out_proj", "dense", "wo")
_VALUES = ("v_proj", "wv")
_AFTER_ALL = ("qkv_proj", "Wqkv")
_AFTER_EACH = ("query_key_value", "wqkv")


@dataclass(frozen=True)
class Fold:
    """A layer whose columns can be permuted, and the layers whose rows then follow.

    Attributes:
        consumer: name of the former within the model.
        producers: names of the latter, each with the rows [heads * width] that make the consumer's channels.
        heads: sets of channels that are permuted apart from each other: key/value heads, 1 in an MLP.
        shared: how often the consumer has each set among its columns: query heads per key/value head, 1 in an MLP.
        width: channels of a set; the consumer has ``heads * shared * width`` columns.
    """

    consumer: str
    producers: tuple[tuple[str, Tensor], ...]
    heads: int
    shared: int
    width: int

    def columns(self, order: Tensor) -> Tensor:
        """The consumer's columns [K] in an order [heads, width] of the channels of each set."""
        first = self.width * torch.arange(self.heads * self.shared, device=order.device)
        return (first.view(self.heads, self.shared, 1) + order.unsqueeze(1)).flatten()

    @property
    def kind(self) -> tuple[str, ...]:
        """Last parts of the names: folds of one kind are the same part of an architecture."""
        return tuple(name.rpartition(".")[2] for name in (self.consumer, *dict(self.producers)))


Permuted = dict[str, str]  # consumer -> why it was not permuted after all; empty if it was
Writes = list[tuple[Tensor, Any, Tensor]]  # into a tensor, where, what
Batch = tuple[Tensor, Call, Tensor]  # hidden states before a block, how it is called, and what it puts out


def check_permute(permute: object, sparsity: object) -> None:
    """Raises ValueError for a permute that is no yes or no, or where no layer gets 2:4."""
    if not isinstance(permute, bool):
        raise ValueError(f"permute must be True or False, got {permute!r}")
    if permute and not (any(sparsity.values()) if isinstance(sparsity, Mapping) else sparsity):
        raise ValueError("permute=True arranges columns for 2:4 masks, and no layer gets one: use permute=False")


def permute_channels(
    model: nn.Module,
    prefix: str,
    blocks: nn.ModuleList,
    targets: list[Target],
    windows: list[Tensor],
    store: Store | None,
    device: torch.device | str | None,
    progress: bool,
) -> Permuted:
    """Permutes the channels of a whole uncompressed model in place, block after block.

    It needs less memory than solving the layers does.

    The folds of a kind are checked together, on the first batch that each of them takes part in: where a block's output
    changes by more than float rounding, because the channels are not what their names suggest, they are undone. When
    interrupted, so are those not checked yet.

    Args:
        targets: the layers that will be compressed. Of those that get 2:4, columns are permuted; of any ``nn.Linear``
            that makes their inputs, rows.
        store: keeps the orders of every block, and has those that an interrupted run chose.

    Returns:
        Every target that was permuted or looked as if it could be.
    """
    found: Permuted = {}
    targets = [t for t in targets if t.scheme.sparsity]
    all_folds, all_notes = folds_of(model, targets)  # before blocks move, and no longer share memory with others
    stored = [None if store is None else store.load_orders(i) for i in range(len(blocks))]
    unknown = max((i for i, s in enumerate(stored) if s is None), default=-1)  # blocks after it need not run
    hidden, calls = capture(model, blocks, windows, device) if unknown >= 0 else ([], [])
    for index, block in enumerate(tqdm(blocks, desc="permuting channels", unit="block", disable=not progress)):
        folds = [f for f in all_folds if f.consumer.startswith(f"{prefix}.{index}.")]
        with moved(block, device) as where:
            known = stored[index]
            outputs: list[Tensor] = []
            if known is None:
                watched = [t for t in targets if t.name in {f.consumer for f in folds}]
                moments, first, outputs = _run(model, block, watched, hidden, calls[index], where)
                orders: dict[str, Tensor] = {}
                notes = {n: why for n, why in all_notes.items() if n.startswith(f"{prefix}.{index}.")}
                for f in folds:
                    if f.consumer not in moments:
                        notes[f.consumer] = "not permuted: saw no calibration input"
                    elif not moments[f.consumer].isfinite().all():
                        notes[f.consumer] = "not permuted: inputs not finite"
                    else:
                        orders[f.consumer] = choose(linear_at(model, f.consumer).weight, moments[f.consumer], f)
                folds = [f for f in folds if f.consumer in orders]
                for kind in dict.fromkeys(f.kind for f in folds):
                    same = [f for f in folds if f.kind == kind]
                    batches = [
                        (hidden[i], calls[index][i], outputs[i]) for i in sorted({first[f.consumer] for f in same})
                    ]
                    why = ""
                    if not all(output.isfinite().all() for _, _, output in batches):
                        why = "not permuted: the block's output is not finite"
                    elif not _apply(model, block, same, orders, batches, where):
                        why = "not permuted: that would change what the block puts out"
                    for f in same if why else []:
                        del orders[f.consumer]
                        notes[f.consumer] = why
                if store is not None:
                    store.save_orders(index, orders, notes)
            else:
                if index < unknown:  # before it is permuted, as in the run that was interrupted
                    outputs = [run(block, x, call, where) for x, call in zip(hidden, calls[index], strict=True)]
                orders, notes = known
                _apply(model, block, [f for f in folds if f.consumer in orders], orders, [], where)
        if calls:
            calls[index].clear()
        hidden = outputs
        found |= dict.fromkeys(orders, "") | notes
    return found


def annotated(layers: list[LayerReport], found: Permuted) -> list[LayerReport]:
    """Report lines that say which layers were permuted, or why one was not."""
    return [
        replace(
            layer,
            permuted=found.get(layer.name) == "",
            note="; ".join(filter(None, [layer.note, found.get(layer.name, "")])),
        )
        for layer in layers
    ]


def folds_of(model: nn.Module, targets: list[Target]) -> tuple[list[Fold], Permuted]:
    """The folds whose consumers are among the targets, going by names, and why others that look alike are none."""
    shared = _sharing_memory(model)
    folds, notes = [], {}
    for t in targets:
        around, _, leaf = t.name.rpartition(".")
        parent = model.get_submodule(around)
        names = _MLP.get(leaf, (*_VALUES, *_AFTER_ALL, *_AFTER_EACH) if leaf in _ATTENTION else ())
        beside = {n: m for n in names if isinstance(m := getattr(parent, n, None), nn.Module)}
        if not beside:
            continue
        written = {leaf: ["weight"], **{n: [p for p, _ in m.named_parameters()] for n, m in beside.items()}}
        sharing = [n for n, own in written.items() if any(f"{around}.{n}.{p}" in shared for p in own)]
        linears = {
            f"{around}.{n}": m
            for n, m in beside.items()
            if type(m) is nn.Linear and m.weight.device.type != "meta" and n not in sharing
        }
        fold = None
        if len(linears) == len(beside):
            fold = (_mlp if leaf in _MLP else _attention)(model, t.name, parent, linears)
        if sharing:
            notes[t.name] = f"not permuted: others share the memory of {', '.join(sharing)}"
        elif fold is None or fold.width % 4:
            notes[t.name] = f"not permuted: {', '.join(beside)} cannot be permuted with it"
        else:
            folds.append(fold)
    return folds, notes


def _sharing_memory(model: nn.Module) -> set[str]:
    """Names of tensors that reach into the memory of another of the model's, or have elements at the same place.

    What counts is the range from the first element to the last, not the storage, which whole files can have in common.
    """
    found: set[str] = set()
    ranges: dict[torch.device, list[tuple[int, int, str]]] = defaultdict(list)
    for name, t in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        if type(t.data) is not Tensor or t.layout != torch.strided or t.is_meta or not t.numel():
            continue
        reach = 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
        if reach < t.numel():  # expanded
            found.add(name)
        ranges[t.device].append((t.data_ptr(), t.data_ptr() + reach * t.element_size(), name))
    for of_device in ranges.values():
        last_end, last = 0, ""  # of those that begin earlier, the one that ends last
        for begin, end, name in sorted(of_device):
            if begin < last_end:
                found |= {name, last}
            if end > last_end:
                last_end, last = end, name
    return found


def _mlp(model: nn.Module, consumer: str, _parent: nn.Module, linears: dict[str, nn.Linear]) -> Fold | None:
    k = linear_at(model, consumer).in_features
    if any(m.out_features not in (k, 2 * k) for m in linears.values()):
        return None
    producers = [(n, rows) for n, m in linears.items() for rows in torch.arange(m.out_features).split(k)]
    return Fold(consumer, tuple(producers), 1, 1, k)


def _attention(model: nn.Module, consumer: str, parent: nn.Module, linears: dict[str, nn.Linear]) -> Fold | None:
    k = linear_at(model, consumer).in_features
    (name, linear), *_ = linears.items()
    leaf = name.rpartition(".")[2]
    width = getattr(parent, "head_dim", getattr(parent, "head_size", None))
    channels = linear.out_features if leaf in _VALUES else (linear.out_features - k) // 2
    if not isinstance(width, int) or width < 1 or channels < 1 or channels % width or k % channels:
        return None
    if leaf not in _VALUES and linear.out_features != k + 2 * channels:
        return None
    heads, queries = channels // width, k // width
    rows = torch.arange(linear.out_features)
    if leaf in _AFTER_EACH:
        rows = rows.view(heads, queries // heads + 2, width)[:, -1].flatten()
    return Fold(consumer, ((name, rows[-channels:]),), heads, queries // heads, width)


def _run(
    model: nn.Module,
    block: nn.Module,
    targets: list[Target],
    hidden: list[Tensor],
    calls: list[Call],
    where: torch.device,
) -> tuple[dict[str, Tensor], dict[str, int], list[Tensor]]:
    """Sums of squares [K] float64 of the inputs of layers that see any, the first batch of each, and block outputs."""
    moments: dict[str, Tensor] = {}
    first: dict[str, int] = {}
    outputs = []
    with closing(Inputs(model, targets)) as inputs:
        for i, (x, call) in enumerate(zip(hidden, calls, strict=True)):
            outputs.append(run(block, x, call, where))
            for tensor, names in inputs.take():
                if not tensor.numel():
                    continue
                squares = [part.float().square().sum(0).double() for part in tensor.flatten(0, -2).split(ROWS)]
                for name in names:
                    moments[name] = sum(squares, moments.get(name, torch.zeros_like(squares[0])))
                    first.setdefault(name, i)
    return moments, first, outputs


def _apply(
    model: nn.Module,
    block: nn.Module,
    folds: list[Fold],
    orders: dict[str, Tensor],
    batches: list[Batch],
    where: torch.device,
) -> bool:
    """Puts the channels of folds of a block into their orders [heads, width], unless that changes what it puts out.

    Says whether it did. All are done or none, also when interrupted.
    """
    # How each is undone. To hold that for one at a time is enough: of those done, it follows from the order.
    begun: list[tuple[Fold, Writes | None]] = []
    try:
        for f in folds:
            there, back = _writes(model, f, orders[f.consumer])
            begun.append((f, back))
            _write(there)
            begun[-1] = (f, None)
        fine = all(_unchanged(block, hidden, call, before, where) for hidden, call, before in batches)
        if not fine:
            _undo(model, begun, orders)
    except BaseException:
        _undo(model, begun, orders)
        raise
    return fine


def _undo(model: nn.Module, begun: list[tuple[Fold, Writes | None]], orders: dict[str, Tensor]) -> None:
    """Undoes folds, the last first; when interrupted, it can go on, as writing the same again does no harm."""
    while begun:
        f, back = begun[-1]
        if back is None:
            back, _ = _writes(model, f, orders[f.consumer].argsort(1))
            begun[-1] = (f, back)
        _write(back)
        begun.pop()


def _writes(model: nn.Module, fold: Fold, order: Tensor) -> tuple[Writes, Writes]:
    """What puts the channels of each set into an order [heads, width] on both sides, and what undoes that.

    The latter also does if the former was written in part or not at all.
    """
    weight = linear_at(model, fold.consumer).weight.data
    columns = (slice(None), fold.columns(order).to(weight.device))
    changes: list[tuple[Tensor, Any, Any, Tensor]] = [(weight, ..., columns, weight[columns])]
    for name, rows in fold.producers:
        source = rows.view(order.shape).gather(1, order.to(rows.device)).flatten()
        tensors = [p.data for p in linear_at(model, name).parameters()]
        changes += [(t, rows.to(t.device), source.to(t.device), t[source.to(t.device)]) for t in tensors]
    return [(t, to, new) for t, to, _, new in changes], [(t, origin, new) for t, _, origin, new in changes]


def _write(writes: Writes) -> None:
    for tensor, index, new in writes:
        tensor[index] = new


def _unchanged(block: nn.Module, hidden: Tensor, call: Call, before: Tensor, where: torch.device) -> bool:
    """Whether the block still puts out what it did, relative to what it adds to its inputs."""
    after, before = run(block, hidden, call, where).float(), before.float()
    added = before - hidden.to(before) if hidden.shape == before.shape else before
    scale = added.norm(dim=-1)
    scale = scale.clamp_min(1e-3 * scale.median() + torch.finfo(scale.dtype).tiny)
    difference = ((after - before).norm(dim=-1) / scale).mean()
    return bool(difference <= 1e-4 + torch.finfo(hidden.dtype).eps)


# ---------------------------------------------------------------------------------------------------------- the order


def choose(weight: Tensor, moment: Tensor, fold: Fold) -> Tensor:
    """The order [heads, width] of the channels of each set, int64: those of a quad come together.

    Args:
        weight: [N, K] of the consumer.
        moment: [K] sums of squares of its inputs.
        fold: which columns are permuted together.
    """
    w = weight.detach()[:: -(-weight.shape[0] // _ROWS)].float()
    scores = w.square().mul_(moment.to(w)).view(-1, fold.heads, fold.shared, fold.width)
    scores = scores.permute(1, 3, 0, 2).flatten(2)
    present = torch.arange(fold.width, device=w.device).view(1, -1, 4).expand(fold.heads, -1, 4)
    return best_quads(scores, present).flatten(1)


def best_quads(scores: Tensor, start: Tensor) -> Tensor:
    """Quads [heads, width / 4, 4] of channels, int64, of which masks keep more than of those in ``start``, or as much.

    A tournament: every quad meets others, each once at most, and all pairs of a round make their best swap at the same
    time.

    Args:
        scores: [heads, width, rows] float32, not negative.
        start: in the shape of the result.
    """
    quads = start.clone()
    for left, right in islice(_rounds(quads.shape[1], quads.device), _MEETINGS):
        a, b = quads[:, left], quads[:, right]
        x, y = _scores_of(scores, a), _scores_of(scores, b)
        (x_first, x_second), (y_first, y_second) = _others(x), _others(y)
        # Without channel i, the quad a has first >= second on top: with y_j instead, it keeps first + max(second, y_j).
        # The maximum is half of sum and distance: all 16 swaps of a pair at once, without a tensor for each.
        keeps = _sum_of_maxima(x_second, y) + x_first.sum(3, keepdim=True)
        keeps += (_sum_of_maxima(y_second, x) + y_first.sum(3, keepdim=True)).mT
        now = kept(x) + kept(y)
        keeps = keeps.flatten(2)
        best = keeps.argmax(2, keepdim=True)
        better = keeps.gather(2, best) > (1 + _GAIN) * now.unsqueeze(2)
        i, j = best // 4, best % 4
        mine, other = a.gather(2, i), b.gather(2, j)
        quads[:, left] = a.scatter(2, i, torch.where(better, other, mine))
        quads[:, right] = b.scatter(2, j, torch.where(better, mine, other))
    return quads


def _rounds(count: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of players, so that each meets each other one once: the circle method."""
    if count < 2:
        return
    ring = torch.arange(count - 1 + count % 2, device=device)
    half = len(ring) // 2
    for _ in range(len(ring)):
        left, right = ring[1 : half + 1], ring[half + 1 :].flip(0)  # the first has nobody in the ring
        if count % 2 == 0:
            left, right = torch.cat([ring[:1], left]), torch.cat([ring.new_tensor([count - 1]), right])
        yield left, right
        ring = ring.roll(1)


def kept(x: Tensor) -> Tensor:
    """What masks keep [...] of the scores of quads, x [..., 4, rows]: the two largest of each row, added up."""
    a, b, c, d = x.unbind(-2)
    return torch.maximum(torch.maximum(a, b) + torch.maximum(c, d), torch.maximum(a + b, c + d)).sum(-1)


def _scores_of(scores: Tensor, quads: Tensor) -> Tensor:
    """[heads, quads, 4, rows]."""
    return scores[torch.arange(len(scores), device=scores.device).view(-1, 1, 1), quads]


def _others(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the second largest of the three others, for each of four: both like x [..., 4, rows]."""
    a, b, c, d = x.unbind(-2)
    high_ab, low_ab, high_cd, low_cd = (
        torch.maximum(a, b),
        torch.minimum(a, b),
        torch.maximum(c, d),
        torch.minimum(c, d),
    )
    triples = ((high_cd, low_cd, b), (high_cd, low_cd, a), (high_ab, low_ab, d), (high_ab, low_ab, c))
    first = torch.stack([torch.maximum(high, z) for high, _, z in triples], -2)
    second = torch.stack([torch.maximum(low, torch.minimum(high, z)) for high, low, z in triples], -2)
    return first, second


def _sum_of_maxima(x: Tensor, y: Tensor) -> Tensor:
    """[..., i, j]: sum over rows of max(x_i, y_j), for x and y [..., 4, rows]."""
    return (x.sum(-1).unsqueeze(-1) + y.sum(-1).unsqueeze(-2) + torch.cdist(x, y, p=1)) / 2
