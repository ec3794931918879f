"""Every variant changes what it says and nothing else, and is refused where it would change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import ablation
import pytest
import readme
import tiny
import torch
from torch import Tensor

from sparse_marlin import Scheme, patch_model
from sparse_marlin.compression import solve
from sparse_marlin.compression.hessian import inverse_factor

SPARSE = Scheme(4, 32, "2:4")
DENSE = Scheme(4, 32, None)


def test_readme_shows_the_committed_results() -> None:
    results = Path(ablation.__file__).parent / "results" / "ablation.json"
    text = readme.OF_BENCHMARKS.read_text(encoding="utf-8")
    shown = text.split("<!-- begin ablation -->\n")[1].split("<!-- end ablation -->")[0]
    found = f"{ablation.text_of(json.loads(results.read_text(encoding='utf-8')))}\n" if results.exists() else ""
    assert shown == found, f"run bench/ablation.py --readme {results}"


def problem(n: int = 24, k: int = 64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(8 * k, k, generator=g) @ (torch.randn(k, k, generator=g) * torch.rand(k, generator=g))
    return torch.randn(n, k, generator=g), x.T @ x


def test_replacing_ends_with_the_block_and_must_have_been_needed() -> None:
    module = ModuleType("module")
    module.f = lambda: 1  # type: ignore[attr-defined]
    original = module.f

    def g() -> int:
        return 2

    with ablation.replaced(((module, "f", g),)):
        assert module.f() == 2
    assert module.f is original
    message = "module no longer calls f: g took its place and was never called"
    with pytest.raises(RuntimeError, match=message), ablation.replaced(((module, "f", g),)):
        pass
    assert module.f is original
    with pytest.raises(AttributeError), ablation.replaced(((module, "renamed", g),)):
        pass
    with pytest.raises(ZeroDivisionError), ablation.replaced(((module, "f", g),)):
        raise ZeroDivisionError
    assert module.f is original


def compressed(name: str, sparsity: str | None) -> list[Tensor]:
    """The packed tensors of a small model."""
    variant = ablation.VARIANTS[name]
    model = tiny.llama()
    windows = list(tiny.tokens(variant.windows, 32).split(1))
    with ablation.replaced(variant.replacements):
        patch_model(
            model,
            sparsity,  # type: ignore[arg-type]
            group_size=32,
            calibration=windows,
            method="one-shot",
            refit=False,
            progress=False,
            **variant.arguments,
        )
    return list(model.state_dict().values())


@pytest.mark.parametrize("sparsity", ["2:4", None])
def test_every_variant_is_another_solution(sparsity: str | None) -> None:
    found = {}
    for name, variant in ablation.VARIANTS.items():
        if sparsity or variant.dense:
            found[name] = torch.cat([t.flatten().double() for t in compressed(name, sparsity)])
        else:
            with pytest.raises(RuntimeError, match="never called"):
                compressed(name, sparsity)
    assert len({tuple(v.tolist()) for v in found.values()}) == len(found)
    again = torch.cat([t.flatten().double() for t in compressed(ablation.BASE, sparsity)])
    assert torch.equal(again, found[ablation.BASE])  # nothing is left exchanged


def test_masks_are_those_of_sparsegpt() -> None:
    """Against its loop: the two of a quad with the least w^2 / U_jj^2 go, column after column."""
    w, h = problem()
    upper = inverse_factor(h, 0.01).upper
    plain, mask = w.clone(), torch.ones_like(w, dtype=torch.bool)
    for j in range(w.shape[1]):
        if j % 4 == 0:
            score = (plain[:, j : j + 4] / upper.diagonal()[j : j + 4]).square()
            mask[:, j : j + 4].scatter_(1, score.argsort(1)[:, :2], False)
        error = torch.where(mask[:, j], 0, plain[:, j] / upper[j, j])
        plain[:, j:] -= torch.outer(error, upper[j, j:])
        plain[:, j] *= mask[:, j]
    pairs = ablation.ColumnPairs(upper)
    out = solve.sweep(w, upper, pairs, None)
    assert torch.equal(pairs.mask(), mask)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-5)

    diagonal = ablation.DiagonalPairs(upper)
    better = solve.sweep(w, upper, diagonal, None)
    assert torch.equal(diagonal.mask()[:, :4], mask[:, :4])  # from there on the compensation differs
    errors = [solve.output_error(w, x, h) for x in (better, out)]
    assert errors[0] < errors[1]


def test_scales() -> None:
    w, h = problem()
    largest = ablation.largest_scales(w, None, DENSE, None)
    assert torch.allclose(largest.float() * 7, w.view(24, 2, 32).abs().amax(2), rtol=1e-3)
    importance = h.diagonal()
    plain = ablation.unweighted_scales(w, None, DENSE, importance)
    assert torch.equal(plain, solve.fit_scales(w, None, DENSE, None))
    assert not torch.equal(plain, solve.fit_scales(w, None, DENSE, importance))


def test_program(
    small_neox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ablation.accuracy, "WINDOW", 16)
    path = tmp_path / "rows.json"
    arguments = ["--model", str(small_neox), "--evaluation-windows", "2", "--device", "cpu", "--json", str(path)]
    monkeypatch.setattr(
        "sys.argv", ["ablation.py", *arguments, "--variants", "damping-0.1", "diagonal-mask", "one-shot"]
    )
    ablation.main()
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [(r["sparsity"], r["variant"]) for r in rows] == [
        ("2:4", "one-shot"), ("2:4", "diagonal-mask"), ("2:4", "damping-0.1"),
        ("none", "one-shot"), ("none", "damping-0.1"),
    ]  # fmt: skip
    assert len({r["kl"] for r in rows}) == 5

    copy = tmp_path / "README.md"
    copy.write_text(readme.OF_BENCHMARKS.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(readme, "OF_BENCHMARKS", copy)
    monkeypatch.setattr("sys.argv", ["ablation.py", "--readme", str(path)])
    ablation.main()
    text = copy.read_text(encoding="utf-8")
    assert "| changed | small-neox, 2:4 | small-neox, dense |\n" in text
    sparse = f"{rows[1]['perplexity']:.2f} ({rows[1]['kl']:.3f})"
    assert f"| mask by SparseGPT's criterion | {sparse} |  |\n" in text
    assert "Perplexity (KL to the original) of small-neox, group 64, float32;" in text
