"""Runs a model block by block: how the model calls each block, and what the Linears inside are fed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .targets import Target


@dataclass(frozen=True)
class Call:
    """How the model calls a block for one batch: everything but the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Captured(Exception):
    """Ends a forward pass once its last block has been called."""


def capture(
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
                with moved(block, device) as where:
                    out = original(to_device(x, where), *to_device(args, where), **to_device(kwargs, where))
                tails[type(block)] = tuple(out[1:]) if isinstance(out, tuple) else None
            tail = tails[type(block)]
            return x if tail is None else (x, *tail)

        return forward

    with _replaced(blocks, stand_in):
        where = next(model.parameters()).device
        for window in windows:
            try:
                model(input_ids=window.to(where), use_cache=False)
            except _Captured:
                continue
            raise ValueError(f"{type(model).__name__} did not call all of its {len(blocks)} blocks")
    return hidden, calls


@contextmanager
def _replaced(blocks: nn.ModuleList, stand_in: Callable[[int, nn.Module], Callable[..., Any]]) -> Iterator[None]:
    """Has stand-ins for the blocks' forwards for a while."""
    wrapped = [vars(block).get("forward") for block in blocks]  # accelerate, for one, puts its hooks there
    for index, block in enumerate(blocks):
        block.forward = stand_in(index, block)
    try:
        yield
    finally:
        for block, forward in zip(blocks, wrapped, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward


@contextmanager
def without_blocks(
    model: nn.Module, blocks: nn.ModuleList, tails: list[tuple[Any, ...] | None], device: torch.device | str | None
) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """Yields a function from a window [B, T] and the last block's hidden states to the logits [B, T, V].

    That runs the model's own forward without its blocks: whatever it does after them, final norm and head. All of the
    model that is outside the blocks is on ``device`` meanwhile.

    Args:
        tails: what each block returns after the hidden states; None where it returns no tuple.
    """
    last: list[Tensor] = []

    def stand_in(index: int, _block: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            if index + 1 == len(blocks):
                x = last[0]
            tail = tails[index]
            return x if tail is None else (x, *tail)

        return forward

    def logits(window: Tensor, hidden: Tensor) -> Tensor:
        where = next(iter(outside)).device
        last[:] = [hidden.to(where)]
        out = model(input_ids=window.to(where), use_cache=False)
        result: Tensor = getattr(out, "logits", out)
        return result

    inside = {id(t) for t in (*blocks.parameters(), *blocks.buffers())}
    outside = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in inside]
    homes = [t.data for t in outside]
    with _replaced(blocks, stand_in):
        try:
            for t in outside if device is not None else []:
                t.data = t.data.to(device)
            yield logits
        finally:
            for t, home in zip(outside, homes, strict=True):
                t.data = home


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


def to_device(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """With all tensors in it on the device, and those of floating point in ``dtype``, if one is given."""
    if isinstance(value, Tensor):
        return value.to(device, dtype) if dtype is not None and value.is_floating_point() else value.to(device)
    if type(value) is tuple or type(value) is list:
        return type(value)(to_device(v, device, dtype) for v in value)
    if isinstance(value, dict):
        return {k: to_device(v, device, dtype) for k, v in value.items()}
    return value


@contextmanager
def moved(block: nn.Module, device: torch.device | str | None) -> Iterator[torch.device]:
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


def call(
    block: nn.Module, hidden: Tensor, how: Call, where: torch.device, dtype: torch.dtype | None = None
) -> tuple[Tensor, tuple[Any, ...] | None]:
    """The block's hidden states, and what it returns after them; None if it returns no tuple.

    With ``dtype``, everything of floating point that it is fed is cast to that.
    """
    args, kwargs = to_device(how.args, where, dtype), to_device(how.kwargs, where, dtype)
    out = block(to_device(hidden, where, dtype), *args, **kwargs)
    return (out[0], tuple(out[1:])) if isinstance(out, tuple) else (out, None)


def run(block: nn.Module, hidden: Tensor, how: Call, where: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    return call(block, hidden, how, where, dtype)[0]


class Inputs:
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


def record(
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
    with closing(Inputs(model, targets)) as inputs:
        for x, call in zip(hidden, calls, strict=True):
            outputs.append(run(block, x, call, where))
            recorded.append(inputs.take())
    return recorded, outputs
