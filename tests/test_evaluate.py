"""Perplexity, divergence and agreement against formulas written out plainly."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import saved
import torch

from sparse_marlin.evaluate import evaluate, evaluate_tasks, perplexity


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, saved.VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def log_probabilities(model: Any, window: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(window.unsqueeze(0)).logits[0, :-1].double().log_softmax(1)


def test_agrees_with_the_definition() -> None:
    torch.manual_seed(0)
    model, reference = saved.llama(), saved.llama()
    text = tokens(100)
    losses, reference_losses, kl, same = [], [], [], []
    for i in (0, 32, 64):  # the last four tokens fill no window
        window = text[i : i + 32]
        p, q = log_probabilities(model, window), log_probabilities(reference, window)
        for row in range(31):
            losses.append(-p[row, window[row + 1]])
            reference_losses.append(-q[row, window[row + 1]])
            kl.append((q[row].exp() * (q[row] - p[row])).sum())
            same.append(float(p[row].argmax() == q[row].argmax()))
    got = evaluate(model, text, 32, reference=reference, progress=False)
    assert (got.tokens, got.windows) == (93, 3)
    assert got.perplexity == pytest.approx(math.exp(torch.stack(losses).mean()), rel=1e-5)
    assert got.reference_perplexity == pytest.approx(math.exp(torch.stack(reference_losses).mean()), rel=1e-5)
    assert got.kl == pytest.approx(float(torch.stack(kl).mean()), rel=1e-4)
    assert got.agreement == pytest.approx(sum(same) / 93)
    assert perplexity(model, text, 32, progress=False) == got.perplexity


def test_batches_and_long_windows_change_nothing() -> None:
    model, text = saved.llama(), tokens(600)
    one = evaluate(model, text, 200, progress=False)
    assert evaluate(model, text.tolist(), 200, progress=False) == one
    assert evaluate(model, text, 200, batch_size=2, progress=False).perplexity == pytest.approx(
        one.perplexity, rel=1e-6
    )
    assert evaluate(model, text[:400], 200, progress=False) == evaluate(model, text, 200, max_windows=2, progress=False)


def test_a_model_compared_with_itself() -> None:
    model = saved.llama(torch.bfloat16)
    got = evaluate(model, tokens(64), 32, reference=model, progress=False)
    assert (got.kl, got.agreement) == (0.0, 1.0)
    assert got.reference_perplexity == got.perplexity


def test_a_model_that_knows_nothing() -> None:
    model = saved.llama()
    model.lm_head.weight.data.zero_()
    assert perplexity(model, tokens(64), 32, progress=False) == pytest.approx(saved.VOCABULARY, rel=1e-6)


def test_a_broken_model_has_infinite_perplexity() -> None:
    model = saved.llama()
    model.lm_head.weight.data.mul_(1e6)
    assert perplexity(model, tokens(64), 32, progress=False) == math.inf


def test_training_mode_comes_back() -> None:
    model = saved.llama().train()
    perplexity(model, tokens(64), 32, progress=False)
    assert model.training


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (tokens(31), {}, "too short: 31 tokens for a window of 32"),
        (torch.tensor([3] * 31 + [saved.VOCABULARY]), {}, r"0\.\.95, got 3\.\.96"),
        (torch.tensor([3] * 31 + [-1]), {}, r"0\.\.95, got -1\.\.3"),
        (tokens(64).view(2, 32), {}, r"integers \[T\], got torch.int64 \[2, 32\]"),
        (tokens(64).float(), {}, r"integers \[T\], got torch.float32"),
        (tokens(64), {"window": 1}, "window must be at least 2"),
        (tokens(64), {"batch_size": 0}, "at least 1"),
        (tokens(64), {"max_windows": 0}, "at least 1"),
    ],
)
def test_refusals(text: torch.Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(saved.llama(), text, **{"window": 32, **options}, progress=False)


def test_vocabularies_must_agree() -> None:
    with pytest.raises(ValueError, match="the reference has 128 logits, the model 96"):
        evaluate(saved.llama(), tokens(64), 32, reference=saved.llama(vocab_size=128), progress=False)


TASK = """
task: next_letter
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/questions.jsonl}}
  cache_dir: {folder}/cache
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def next_letter(tmp_path: Path) -> list[dict[str, Any]]:
    """A task of multiple choice in a folder, and its questions."""
    questions = [
        {"question": "abcd"[i:] + "efgh"[: i + 1], "choices": ["ij", "zz", "A"], "answer": i % 3} for i in range(4)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    (tmp_path / "next_letter.yaml").write_text(TASK.format(folder=tmp_path))
    return questions


def test_tasks_of_the_harness(next_letter: list[dict[str, Any]], tmp_path: Path) -> None:
    """On a compressed model; the likeliest choice counts, by the sum of its tokens' log-probabilities."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install lm-eval")
    model, tokenizer = saved.compress_blocks(saved.llama()), saved.tokenizer()
    tokenizer.eos_token = tokenizer.unk_token  # the harness wants a token that ends a text
    right = 0
    for q in next_letter:
        scores = []
        for choice in q["choices"]:
            ids = torch.tensor(tokenizer(q["question"] + choice)["input_ids"])
            rows = range(len(ids) - len(choice) - 1, len(ids) - 1)
            log_p = log_probabilities(model, ids)
            scores.append(sum(float(log_p[row, ids[row + 1]]) for row in rows))
        right += scores.index(max(scores)) == q["answer"]
    found = evaluate_tasks(model, tokenizer, ["next_letter"], task_path=tmp_path)
    assert found["next_letter"]["acc"] == right / 4
    with pytest.raises(ValueError, match=r"no task 'next_leter'; near matches: .*next_letter"):
        evaluate_tasks(model, tokenizer, ["next_leter"], task_path=tmp_path)
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        evaluate_tasks(model, tokenizer, ["next_letter"], task_path=tmp_path / "missing")


def test_tasks_without_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="pip install lm-eval"):
        evaluate_tasks(saved.llama(), saved.tokenizer(), ["arc_easy"])
