"""How well a model predicts a text, how far it has moved from a reference, and how it does at tasks."""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

_ROWS = 128  # positions whose float32 log-probabilities exist at once


@dataclass(frozen=True)
class Evaluation:
    """What :func:`evaluate` measured.

    Attributes:
        perplexity: exp of the mean negative log-likelihood per predicted token.
        tokens: number of predicted tokens.
        windows: number of windows.
        reference_perplexity: that of the reference, on the same tokens.
        kl: mean Kullback-Leibler divergence of the model from the reference, in nats per token.
        agreement: fraction of positions where both models put the same token first.
    """

    perplexity: float
    tokens: int
    windows: int
    reference_perplexity: float | None = None
    kl: float | None = None
    agreement: float | None = None


@torch.no_grad()
def evaluate(
    model: nn.Module,
    tokens: Tensor | Sequence[int],
    window: int = 512,
    *,
    max_windows: int | None = None,
    batch_size: int = 1,
    reference: nn.Module | None = None,
    progress: bool = True,
) -> Evaluation:
    """Perplexity over windows that follow one another without overlap; what does not fill the last one is left out.

    In each window the first token is context alone. Log-probabilities are taken in float32 and summed in float64.

    Args:
        model: a causal LM of transformers.
        tokens: [T] token ids.
        window: tokens per window.
        max_windows: use that many windows, from the start of the text.
        batch_size: windows per forward pass.
        reference: a model with the same vocabulary, to compare with.
        progress: show a progress bar.

    Raises:
        ValueError: if the text is shorter than a window, a token is not in the vocabulary, or the vocabularies differ.
    """
    ids = torch.as_tensor(tokens)
    if ids.dim() != 1 or ids.is_floating_point():
        raise ValueError(f"tokens must be integers [T], got {ids.dtype} {list(ids.shape)}")
    if window < 2 or batch_size < 1 or (max_windows is not None and max_windows < 1):
        raise ValueError(
            "window must be at least 2, batch_size and max_windows at least 1, "
            f"got {window}, {batch_size} and {max_windows}"
        )
    if len(ids) < window:
        raise ValueError(f"the text is too short: {len(ids)} tokens for a window of {window}; use a smaller window=")
    count = min(len(ids) // window, max_windows or len(ids))
    windows = ids[: count * window].to("cpu", torch.int64).view(count, window)
    models = [model] if reference is None else [model, reference]
    for m in models:
        _check_vocabulary(m, windows)

    was_training = [m.training for m in models]
    for m in models:
        m.eval()
    nll, reference_nll, kl, agreed = 0.0, 0.0, 0.0, 0
    try:
        with tqdm(total=count, desc="evaluating", unit="window", disable=not progress) as bar:
            for batch in torch.split(windows, batch_size):
                logits = [m(input_ids=batch.to(_device(m)), use_cache=False).logits[:, :-1] for m in models]
                for target, log_p, *log_q in _log_probabilities(batch[:, 1:], logits):
                    nll -= _sum(log_p.gather(1, target))
                    if log_q:
                        reference_nll -= _sum(log_q[0].gather(1, target))
                        kl += _sum(log_q[0].exp() * (log_q[0] - log_p))
                        agreed += int((log_q[0].argmax(1) == log_p.argmax(1)).sum())
                bar.update(len(batch))
    finally:
        for m, training in zip(models, was_training, strict=True):
            m.train(training)

    total = count * (window - 1)
    result = Evaluation(_exp(nll / total), total, count)
    if reference is None:
        return result
    return Evaluation(result.perplexity, total, count, _exp(reference_nll / total), kl / total, agreed / total)


def perplexity(
    model: nn.Module,
    tokens: Tensor | Sequence[int],
    window: int = 512,
    *,
    max_windows: int | None = None,
    batch_size: int = 1,
    progress: bool = True,
) -> float:
    """The perplexity alone; see :func:`evaluate`."""
    return evaluate(model, tokens, window, max_windows=max_windows, batch_size=batch_size, progress=progress).perplexity


def find_tasks(names: Sequence[str], task_path: str | Path | None = None) -> Any:
    """The task manager of lm-evaluation-harness, once all names are known to it.

    Args:
        names: tasks, or groups of them.
        task_path: a directory with more tasks as YAML files, which may name Python code beside them that is run.

    Raises:
        ImportError: if lm-evaluation-harness is not installed.
        FileNotFoundError: if ``task_path`` is no directory.
        ValueError: if a name is unknown.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ImportError("tasks are run by lm-evaluation-harness, which is not installed: pip install lm-eval")
    if task_path is not None and not Path(task_path).is_dir():
        raise FileNotFoundError(f"{task_path} is not a directory with tasks")
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if task_path is None else str(task_path))
    known = manager.all_tasks
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=4)
            raise ValueError(f"there is no task {name!r}; near matches: {', '.join(near) or 'none'}")
    return manager


def evaluate_tasks(
    model: nn.Module,
    tokenizer: Any,
    names: Sequence[str],
    *,
    task_path: str | Path | None = None,
    batch_size: int = 1,
) -> dict[str, dict[str, float]]:
    """Runs tasks of lm-evaluation-harness on a causal LM of transformers, compressed or not, where it is.

    Args:
        model: through the harness's own interface to transformers (``HFLM``).
        tokenizer: the model's.
        names, task_path: as for :func:`find_tasks`. Most tasks fetch their data from the Hugging Face hub.
        batch_size: sequences per forward pass.

    Returns:
        Metrics by task, and by their names in the harness, standard errors included.

    Raises:
        ImportError, FileNotFoundError, ValueError: as :func:`find_tasks`.
    """
    manager = find_tasks(names, task_path)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    was_training = model.training
    try:
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        found = simple_evaluate(lm, tasks=list(names), task_manager=manager, log_samples=False)
    finally:
        model.train(was_training)
    return {
        task: {key.removesuffix(",none"): float(x) for key, x in metrics.items() if isinstance(x, (int, float))}
        for task, metrics in found["results"].items()
    }


def _log_probabilities(targets: Tensor, logits: list[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of at most _ROWS positions: target tokens [R, 1], and log-probabilities [R, V] of every model."""
    targets = targets.reshape(-1, 1).to(logits[0].device)
    flat = [x.reshape(len(targets), -1) for x in logits]
    if flat[-1].shape != flat[0].shape:
        raise ValueError(f"the reference has {flat[-1].shape[1]} logits, the model {flat[0].shape[1]}: not comparable")
    for i in range(0, len(targets), _ROWS):
        rows = slice(i, i + _ROWS)
        yield [targets[rows], *(x[rows].to(targets.device).float().log_softmax(1) for x in flat)]


def _check_vocabulary(model: nn.Module, windows: Tensor) -> None:
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    size = embedding.weight.shape[0]
    low, high = int(windows.min()), int(windows.max())
    if low < 0 or high >= size:
        raise ValueError(f"tokens must lie in 0..{size - 1}, got {low}..{high}: is this the model's tokenizer?")


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _sum(x: Tensor) -> float:
    return float(x.sum(dtype=torch.float64))


def _exp(x: float) -> float:
    # exp overflows a float where a broken model's loss passes 709 nats.
    return math.exp(x) if x < 709 else math.inf
