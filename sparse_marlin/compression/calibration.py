"""Turns what a user has into windows of tokens, or samples them from the model itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import GenerationConfig

from .hessian import NonFiniteError

_SAMPLE_BATCH = 32


def calibration_windows(
    model: nn.Module,
    calibration: Any,
    tokenizer: Any,
    num_samples: int,
    sequence_length: int,
    seed: int,
    progress: bool,
    hold_out: int = 0,
) -> list[Tensor]:
    """Token windows [B, T] int64, ready to be fed to the model one after the other.

    Args:
        model: gives the vocabulary's size, and the tokens where ``calibration`` is None.
        calibration: None; tokens as a tensor [T] or [B, T] or an iterable of such tensors, used as they are; texts as
            an iterable of strings; or a dataset whose rows hold ``input_ids`` or ``text``.
        tokenizer: needed for texts: called with a string, returns a mapping with ``input_ids``.
        num_samples: windows taken from texts, or sampled.
        sequence_length: length of the windows taken from texts, or sampled.
        seed: chooses the windows, and what is sampled.
        progress: show a progress bar while sampling.
        hold_out: if not 0, one window of so many from texts, the last ones, comes from the last part of the texts, as
            large a share of them, and no other window does.

    Raises:
        ValueError: if nothing is there to calibrate on, a tokenizer is missing, or a token is not in the vocabulary.
    """
    context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if num_samples < 1 or sequence_length < 2:
        raise ValueError(f"num_samples must be >= 1 and sequence_length >= 2, got {num_samples} and {sequence_length}")
    if calibration is None:
        return sample_tokens(model, num_samples, min(sequence_length, context or sequence_length), seed, progress)
    windows: list[Tensor] = []
    texts: list[str] = []
    for item in _items(calibration):
        if isinstance(item, dict):
            if "input_ids" not in item and "text" not in item:
                raise ValueError(f"a calibration row needs input_ids or text, got the keys {sorted(item)}")
            item = item["input_ids"] if "input_ids" in item else item["text"]
        if isinstance(item, str):
            texts.append(item)
        else:
            windows.append(_as_window(item))
    if texts:
        length = min(sequence_length, context or sequence_length)
        windows += _windows_of_texts(texts, tokenizer, num_samples, length, seed, hold_out)
    if not windows:
        raise ValueError("the calibration set is empty: pass token tensors or texts, or None to sample from the model")
    vocabulary = vocabulary_size(model)
    low, high = min(int(w.min()) for w in windows), max(int(w.max()) for w in windows)
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        raise ValueError(
            f"calibration tokens must lie in 0..{(vocabulary or 0) - 1}, got {low}..{high}: "
            "is this the model's tokenizer?"
        )
    longest = max(w.shape[1] for w in windows)
    if context is not None and longest > context:
        raise ValueError(
            f"calibration windows must have at most {context} tokens, as many as the model reads, got {longest}"
        )
    return windows


def _items(calibration: Any) -> Iterable[Any]:
    if isinstance(calibration, (str, dict, Tensor)):
        return [calibration]
    if not isinstance(calibration, Iterable):
        raise TypeError(f"calibration must be tokens, texts or a dataset, got {type(calibration).__name__}")
    items: Iterable[Any] = calibration
    return items


def _as_window(item: Any) -> Tensor:
    try:
        tokens = torch.as_tensor(item)
    except (TypeError, ValueError, RuntimeError) as e:
        raise ValueError(f"calibration items must be token tensors or texts, got {type(item).__name__}") from e
    if tokens.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8) or tokens.dim() not in (1, 2):
        raise ValueError(f"calibration tokens must be integers [T] or [B, T], got {tokens.dtype} {list(tokens.shape)}")
    if tokens.numel() == 0:
        raise ValueError("a calibration window holds no token")
    return tokens.to("cpu", torch.int64).reshape(-1, tokens.shape[-1])


def _windows_of_texts(
    texts: list[str], tokenizer: Any, count: int, length: int, seed: int, hold_out: int
) -> list[Tensor]:
    if tokenizer is None:
        raise ValueError("calibration texts need tokenizer=")
    ids = torch.cat([torch.as_tensor(tokenizer(t)["input_ids"], dtype=torch.int64).flatten() for t in texts])
    if len(ids) < 2:
        raise ValueError(f"the calibration texts hold only {len(ids)} tokens")
    held = max(1, count // hold_out) if hold_out else 0
    cut = len(ids) - (max(2, len(ids) // hold_out) if hold_out else 0)
    generator = torch.Generator().manual_seed(seed)
    windows = []
    for part, wanted in ((ids[:cut], count - held), (ids[cut:], held)):
        if wanted and len(part):
            size = min(length, len(part))
            starts = torch.randint(
                0, len(part) - size + 1, (min(wanted, max(1, len(part) // size)),), generator=generator
            )
            windows += [part[s : s + size].unsqueeze(0) for s in starts.tolist()]
    return windows


def vocabulary_size(model: nn.Module) -> int | None:
    """Rows of the input embedding, or None if the model does not say which module that is."""
    get = getattr(model, "get_input_embeddings", None)
    weight = getattr(get(), "weight", None) if get is not None else None
    return None if weight is None else int(weight.shape[0])


@torch.no_grad()
def sample_tokens(model: nn.Module, count: int, length: int, seed: int, progress: bool = True) -> list[Tensor]:
    """Sequences [B, T] drawn from the model's own distribution at temperature 1.

    Each starts with the model's beginning-of-sequence token, where it has one, and a token drawn uniformly from the
    vocabulary, which spreads the sequences (as in LLM-QAT, arXiv 2305.17888).
    """
    vocabulary = vocabulary_size(model)
    if vocabulary is None:
        raise ValueError("cannot sample calibration tokens: the model names no input embedding; pass calibration=")
    if not hasattr(model, "generate"):
        raise ValueError(
            f"cannot sample calibration tokens: {type(model).__name__} has no generate(); pass calibration="
        )
    device = next(model.parameters()).device
    bos = getattr(getattr(model, "config", None), "bos_token_id", None)
    start = 1 + isinstance(bos, int)
    if length <= start:
        raise ValueError(f"sequence_length must be more than {start} to sample from the model, got {length}")
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_length=length, min_length=length, pad_token_id=0
    )
    bar = tqdm(total=count * (length - start), desc="sampling calibration tokens", unit="token", disable=not progress)

    def tick(tokens: Tensor, _scores: Tensor) -> Tensor:
        bar.update(tokens.shape[0])
        return torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)

    windows = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for first in range(0, count, _SAMPLE_BATCH):
            n = min(_SAMPLE_BATCH, count - first)
            tokens = torch.randint(0, vocabulary, (n, 1))
            if isinstance(bos, int):
                tokens = torch.cat([torch.full((n, 1), bos), tokens], 1)
            tokens = tokens.to(device)
            # Checked here: generate() would fail deep inside.
            if not torch.isfinite(model(input_ids=tokens, use_cache=False).logits).all():
                raise NonFiniteError("cannot sample calibration tokens: the model's own outputs are not finite")
            tokens = model.generate(  # type: ignore[operator]
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=settings,
                stopping_criteria=[tick],
            )
            windows.append(tokens.cpu())
    bar.close()
    return windows
