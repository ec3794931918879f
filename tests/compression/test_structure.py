"""sparsity="auto": estimates and losses against plain computations, targets that are met, runs that resume."""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from naive import max_nonzeros_per_quad
from torch import Tensor, nn

import sparse_marlin
from sparse_marlin import CompressedLinear, patch_model
from sparse_marlin.compression import Report, pipeline, refit, sensitivity, structure
from sparse_marlin.compression.blocks import without_blocks
from sparse_marlin.compression.calibration import calibration_windows, sample_tokens
from sparse_marlin.compression.report import Sensitivity
from sparse_marlin.compression.sensitivity import Probe, Variants, solve_both
from sparse_marlin.compression.structure import Curve, Measured, Sizes, hold_out, measure, search
from sparse_marlin.compression.targets import choose_targets, decoder_blocks
from sparse_marlin.quantization import note_in_config, quantization_config, stored_as
from sparse_marlin.scheme import Scheme

auto = functools.partial(patch_model, sparsity="auto", group_size=32, progress=False)


@functools.cache
def own_windows(count: int = 16, layers: int = 2) -> list[Tensor]:
    """Written by the model itself, so that compression raises its loss."""
    model = tiny.llama(layers=layers)
    return [row for w in sample_tokens(model, count, 32, 0, False) for row in w.split(1)]


def prepared(model: nn.Module, bits: int = 4) -> tuple[Probe, Sizes, list[Tensor]]:
    """What estimates are made from, and the windows to calibrate on."""
    prefix, blocks = decoder_blocks(model)
    targets, _ = choose_targets(model, prefix, [], [], Scheme(bits, 32, "2:4"), None)
    calibrating, held_out = hold_out([tiny.tokens(16)])
    return Probe(model, prefix, blocks, held_out, None, False), Sizes(model, targets), calibrating


def both(probe: Probe, sizes: Sizes, calibrating: list[Tensor]) -> Variants:
    targets = sizes.sparse_targets, sizes.dense_targets
    return solve_both(probe.model, probe.prefix, probe.blocks, *targets, calibrating, 0.01, "raise", [], None, False)


def plain_loss(model: nn.Module, windows: list[Tensor]) -> float:
    nll = []
    for w in windows:
        out = model(input_ids=w)
        log_p = getattr(out, "logits", out)[0, :-1].double().log_softmax(1)
        nll.append(-log_p.gather(1, w[0, 1:, None]))
    return float(torch.cat(nll).mean())


def same_state(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(tiny.same_bits(x[n], y[n]) for n in x)


def structures(model: nn.Module) -> dict[str, str | None]:
    return {n: m.scheme.sparsity for n, m in model.named_modules() if isinstance(m, CompressedLinear)}


# ----------------------------------------------------------------------------------------------- losses and estimates


@pytest.mark.parametrize("build", [tiny.llama, tiny.opt, tiny.mixture], ids=lambda b: b.__name__)
@torch.no_grad()
def test_losses_are_those_of_the_model(build: Callable[[], nn.Module]) -> None:
    """As it is, with swapped weights, and compressed."""
    model = build()
    before = tiny.snapshot(model)
    probe, sizes, calibrating = prepared(model)
    assert probe.loss("") == pytest.approx(plain_loss(model, probe.windows), rel=1e-6)
    variants = both(probe, sizes, calibrating)
    mixed = {name: pair[i % 2] for i, (name, pair) in enumerate(variants.items())}
    swapped = copy.deepcopy(model)
    for name, packed in mixed.items():
        swapped.get_submodule(name).weight.copy_(packed.dequantize(torch.float32))
    expected = plain_loss(swapped, probe.windows)
    assert probe.loss("", mixed) == pytest.approx(expected, rel=1e-6)
    measure(probe, variants, sizes, 0)
    assert tiny.unchanged(model, before)
    patch_model(model, group_size=32, calibration=calibrating, progress=False)
    assert probe.loss("") == pytest.approx(plain_loss(model, probe.windows), rel=1e-6)


@torch.no_grad()
def test_estimates_are_the_divergence_that_small_errors_cause() -> None:
    """Eight bits: errors are so small that the second order is all there is."""
    model = tiny.llama(layers=3)
    probe, sizes, calibrating = prepared(model, bits=8)
    probe = Probe(model, probe.prefix, probe.blocks, list(tiny.tokens(32).split(1)), None, False)
    variants = both(probe, sizes, calibrating)
    variants = {name: (dense, dense) for name, (_, dense) in variants.items()}
    exact, tokens = copy.deepcopy(model).double(), torch.cat(probe.windows)
    truth = exact(input_ids=tokens).logits[:, :-1].log_softmax(2)
    for group in measure(probe, variants, sizes, 0).groups:
        swapped = copy.deepcopy(exact)
        for name in group.layers:
            swapped.get_submodule(name).weight.copy_(variants[name][1].dequantize(torch.float32))
        moved = truth - swapped(input_ids=tokens).logits[:, :-1].log_softmax(2)
        kl = float((truth.exp() * moved).sum()) / probe.tokens
        assert group.sparse == group.dense
        assert 0.5 < group.dense / kl < 2, group


def test_gradients_are_those_of_the_whole_model() -> None:
    """Back through the blocks one by one is back through all at once."""
    model = tiny.llama(layers=3)
    with torch.no_grad():
        probe, _, _ = prepared(model)
        states = probe.states()
        _, gradients = probe.gradients(states[-1], 3)
    window = probe.windows[0]
    with without_blocks(model, probe.blocks, probe._tails, None) as logits:
        x = states[-1][0].requires_grad_()
        out = logits(window, x)
    generator = torch.Generator().manual_seed(3)
    labels = torch.multinomial(out.detach()[0, :-1].softmax(1), 1, generator=generator)
    whole = model(input_ids=window).logits
    assert torch.equal(whole, out)
    loss = torch.nn.functional.cross_entropy(out[0, :-1], labels[:, 0], reduction="sum")
    assert torch.allclose(gradients[0], torch.autograd.grad(loss, x)[0], rtol=1e-5, atol=1e-6)


def test_layers_that_share_an_input_are_together() -> None:
    names = ["a.q", "a.k", "a.o", "b.gate", "b.up", "b.down", "e.gate", "e.up", "f.x"]
    seen = [("a.q", "a.k"), ("a.o",), ("b.gate",), ("b.up", "b.gate"), ("b.down",)]
    together = sensitivity._together(names, seen)
    assert together == [("a.q", "a.k"), ("a.o",), ("b.gate", "b.up"), ("b.down",), ("e.gate", "e.up"), ("f.x",)]


def test_the_last_quarter_of_the_windows_is_held_out() -> None:
    rows = tiny.tokens(11, 6)
    rest, held = hold_out([rows[:5], rows[5:9], rows[9:]])
    assert torch.equal(torch.cat(rest), rows[:9])
    assert [w.shape for w in held] == [(1, 6)] * 2 and torch.equal(torch.cat(held), rows[9:])
    rest, held = hold_out([rows[:1], rows[1:2, :3]])
    assert (len(rest), len(held)) == (1, 1)
    for few in ([rows[:1]], [rows[:4, :1]]):
        with pytest.raises(ValueError, match="at least 2 windows of at least 2 tokens"):
            hold_out(few)


# ------------------------------------------------------------------------------------------------- meeting a target


@pytest.mark.parametrize("target", [3.5, 3.6, 3.8, 4.2, 4.5])
def test_target_bits_are_met_by_the_layers_that_matter_most(target: float) -> None:
    model = tiny.llama()
    original = copy.deepcopy(model)
    report = auto(model, target_bits=target, calibration=own_windows())
    found = report.structure
    assert found is not None and found.target == "target_bits" and found.wanted == target
    assert found.bits_per_weight == report.bits_per_weight <= target + 1e-9
    assert {n for n, s in structures(model).items() if s is None} == set(found.dense)
    for line in report.compressed:
        module = model.get_submodule(line.name)
        assert isinstance(module, CompressedLinear) and line.scheme == str(module.scheme)
        assert module.scheme.sparsity is None or max_nonzeros_per_quad(module.dequantize()) <= 2
    # Nothing that is left would fit, and what shares an input shares its structure.
    weights = {line.name: line.shape[0] * line.shape[1] for line in report.compressed}
    for group in found.sensitivities:
        dense = [name in found.dense for name in group.layers]
        assert len(set(dense)) == 1
        more = sum(weights[n] for n in group.layers) / sum(weights.values())  # a dense layer takes a bit more
        assert dense[0] or report.bits_per_weight + more > target
    assert ["q_proj" in g.layers[0] for g in found.sensitivities if len(g.layers) == 3] == [True, True]
    assert [(p.dense_layers, round(p.bits_per_weight, 6)) for p in (found.curve[0], found.curve[-1])] == [
        (0, 3.5),
        (14, 4.5),
    ]
    losses = [p.loss_increase for p in found.curve]
    assert losses == sorted(losses, reverse=True)
    assert [p.step_us[1] for p in found.curve] == sorted(p.step_us[1] for p in found.curve)
    rows = own_windows()[-4:]
    with torch.no_grad():
        assert found.original_loss == pytest.approx(plain_loss(original, rows), rel=1e-6)
        increase = plain_loss(model, rows) - plain_loss(original, rows)
    assert found.loss_increase == pytest.approx(increase, abs=1e-6)


def test_the_mix_is_better_than_the_opposite_one() -> None:
    model, opposite = tiny.llama(layers=3), tiny.llama(layers=3)
    found = auto(model, target_bits=4.0, calibration=own_windows(16, 3)).structure
    assert found is not None
    worst = [name for g in reversed(found.sensitivities) for name in g.layers][: len(found.dense)]
    mapping: dict[str, Any] = {n: None if n in worst else "2:4" for n in structures(model)}
    original = copy.deepcopy(opposite)
    calibrating, held_out = hold_out(own_windows(16, 3))
    patch_model(opposite, mapping, group_size=32, calibration=calibrating, progress=False)
    with torch.no_grad():
        losses = [plain_loss(m, held_out) for m in (original, model, opposite)]
    assert losses[1] - losses[0] < 0.8 * (losses[2] - losses[0])


def test_max_loss_increase_is_met_as_measured() -> None:
    model = tiny.llama(layers=3)
    windows = own_windows(16, 3)[-4:]
    original = copy.deepcopy(model)
    found = auto(model, max_loss_increase=0.5, calibration=own_windows(16, 3)).structure
    assert found is not None
    with torch.no_grad():
        increase = plain_loss(model, windows) - plain_loss(original, windows)
    assert found.loss_increase == pytest.approx(increase, abs=1e-6)
    assert found.measured[-1] == (len(found.dense), found.loss_increase)
    assert {n for n, s in structures(model).items() if s is None} == set(found.dense)
    if abs(increase - 0.5) > 0.025:  # then no set of layers lies between two attempts
        over = max(n for n, x in found.measured if x > 0.5)
        assert increase < 0.5 and over < len(found.dense)
        sizes = [0]
        for g in found.sensitivities:
            sizes.append(sizes[-1] + len(g.layers))
        assert sizes.index(len(found.dense)) - sizes.index(over) == 1 or len(found.measured) == structure.MAX_RUNS


def test_a_loss_that_cannot_be_kept_gives_dense_layers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sparse_marlin"):
        found = auto(model := tiny.llama(), max_loss_increase=1e-6, calibration=own_windows()).structure
    assert found is not None and len(found.dense) == 14 and set(structures(model).values()) == {None}
    assert "is not kept" in caplog.text
    dense = tiny.llama()
    calibrating, _ = hold_out(own_windows())
    patch_model(dense, None, group_size=32, calibration=calibrating, progress=False)
    assert same_state(model, dense)


class Layers(nn.Module):
    """Twenty layers with names, to search on without compressing more than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(20))
        self.found = Measured(
            2.0, [Sensitivity((f"layers.{i}",), 2.0**-i, 0.0) for i in range(20)], [(0, 1.0), (10, 0.3), (20, 0.1)]
        )
        targets, _ = choose_targets(self, "layers", [], [], Scheme(4, 32, "2:4"), None)
        self.targets = targets
        self.curve = Curve(self.found, Sizes(self, targets))

    def search(self, loss: Callable[[int], float], wanted: float) -> list[tuple[int, float]]:
        """Searches where n dense layers give a loss; checks what is left behind."""
        last = dict(self.named_modules())
        made: dict[int, nn.Module] = {}

        def compress(dense: frozenset[str]) -> tuple[Report, float]:
            for name, m in last.items():
                if isinstance(m, nn.Linear):
                    now = self.get_submodule(name)
                    assert isinstance(now, nn.Linear) and now.weight.data_ptr() == m.weight.data_ptr(), "not restored"
            group_size = 32 if len(dense) % 2 else 64
            self.set_submodule(
                "layers.0", made.setdefault(len(dense), sparse_marlin.compress(last["layers.0"], None, 4, group_size))
            )
            note_in_config(self)
            return Report(settings={"dense": len(dense)}), loss(len(dense))

        report, runs = search(self, self.targets, self.curve, wanted, compress)
        assert report.settings["dense"] == runs[-1][0]
        assert self.layers[0] is made[runs[-1][0]]
        assert self.config.quantization_config == quantization_config(stored_as({"layers.0": self.layers[0]}))
        assert len(runs) <= structure.MAX_RUNS and len({n for n, _ in runs}) == len(runs)
        return runs


LOSSES: dict[str, Callable[[int], float]] = {
    "as the curve": lambda n: Layers().curve.at(n),
    "half the curve": lambda n: 0.5 * Layers().curve.at(n),
    "twice": lambda n: 2 * Layers().curve.at(n),
    "another shape": lambda n: 0.8 * math.exp(-0.13 * n),
    "a line": lambda n: 0.9 - 0.04 * n,
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_search_ends_as_close_as_whole_layers_allow(name: str) -> None:
    loss = functools.cache(LOSSES[name])
    for wanted in (0.12, 0.2, 0.4, 0.7):
        runs = Layers().search(loss, wanted)
        n, increase = runs[-1]
        assert increase == loss(n)
        if abs(increase - wanted) > 0.0501 * wanted:
            assert increase <= wanted or n == 20
            assert n == 0 or loss(n - 1) > wanted or len(runs) == structure.MAX_RUNS


def test_the_search_keeps_the_best_where_losses_jump() -> None:
    assert Layers().search(lambda n: math.nan if n < 12 else 0.15, 0.2)[-1][0] == 12
    assert Layers().search(lambda n: 0.9, 0.2)[-1][1] == 0.9
    assert Layers().search(lambda n: 0.01, 0.2)[-1] == (0, 0.01)


# ------------------------------------------------------------------------------------------------- refusals, resuming

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "got neither"),
    ({"target_bits": 4.0, "max_loss_increase": 0.1}, "got both"),
    ({"target_bits": 3.4}, r"between 3\.500 .*and 4\.500 .*got 3\.4"),
    ({"target_bits": 4.6}, r"between 3\.500"),
    ({"target_bits": math.nan}, "finite number"),
    ({"max_loss_increase": 0.0}, "finite number > 0"),
    ({"max_loss_increase": 0.1, "method": "two-pass"}, "auto, one-shot"),
    ({"max_loss_increase": 0.1, "method": "gptq"}, "auto, one-shot"),
    ({"max_loss_increase": 0.1, "damping": -1}, "damping"),
    ({"max_loss_increase": 0.1, "on_nonfinite": "ignore"}, "on_nonfinite"),
    ({"max_loss_increase": 0.1, "skip": "attention"}, "matches no layer"),
    ({"max_loss_increase": 0.1, "calibration": tiny.tokens(1)}, "at least 2 windows"),
    ({"sparsity": "2:4", "target_bits": 4.0}, "need sparsity='auto'"),
    ({"sparsity": None, "max_loss_increase": 0.1}, "need sparsity='auto'"),
    ({"sparsity": {"model.layers.0.mlp.up_proj": "2:4"}}, "exactly the names"),
    ({"sparsity": {}}, "exactly the names"),
    ({"sparsity": {"model.layers.0.mlp.up_proj": "4:8"}}, "sparsity must be one of"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=str)
def test_what_cannot_work_is_refused_before_the_work(options: dict[str, Any], text: str) -> None:
    model = tiny.llama()
    before = tiny.snapshot(model)
    with pytest.raises(ValueError, match=text):
        auto(model, **{"calibration": tiny.tokens(), **options})
    assert tiny.unchanged(model, before)


def test_a_compressed_model_is_refused() -> None:
    model = tiny.llama()
    patch_model(model, calibration=tiny.tokens(), skip="*.mlp.*", progress=False)
    with pytest.raises(ValueError, match="nothing is compressed yet"):
        auto(model, calibration=tiny.tokens(), target_bits=4.0)


def test_an_original_whose_loss_is_not_finite_is_refused() -> None:
    model = tiny.llama()
    model.lm_head.weight.data[:] = math.nan
    with pytest.raises(sparse_marlin.compression.NonFiniteError, match="original model's loss"):
        auto(model, calibration=tiny.tokens(), target_bits=4.0)


def test_a_mapping_gives_each_layer_its_structure() -> None:
    model, sparse = tiny.llama(), tiny.llama()
    names = [n for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"]
    mapping: dict[str, Any] = {n: None if i % 3 else "2:4" for i, n in enumerate(names)}
    report = patch_model(model, mapping, calibration=tiny.tokens(), progress=False)
    assert structures(model) == mapping and report.settings["scheme"]["sparsity"] == "mixed"
    patch_model(sparse, dict.fromkeys(names, "2:4"), calibration=tiny.tokens(), progress=False)
    assert set(structures(sparse).values()) == {"2:4"}


class Stop(BaseException):
    """Stands for control-C, an out-of-memory error, a lost machine."""


STEPS = [(sensitivity, "solve_stage"), (sensitivity, "_squares"), (sensitivity, "_loss"), (pipeline, "patch_model")]


@pytest.mark.parametrize("target", [{"target_bits": 4.0}, {"max_loss_increase": 0.6}], ids=str)
def test_an_interrupted_choice_resumes_to_the_same_bits(
    target: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, again = tiny.llama(), tiny.llama()
    report = auto(expected, **target, calibration=own_windows())
    torch.manual_seed(99)
    assert auto(again, **target, calibration=own_windows()) == report and same_state(again, expected)
    for module, name in STEPS:
        calls = []
        with monkeypatch.context() as patch:
            original = getattr(module, name)

            def stopping(*args: Any, original: Any = original, calls: list[int] = calls, **kwargs: Any) -> Any:
                calls.append(1)
                if len(calls) == 2 or original is patch_model:
                    raise Stop
                return original(*args, **kwargs)

            patch.setattr(module, name, stopping)
            with pytest.raises(Stop):
                auto(tiny.llama(), checkpoint_dir=tmp_path, **target, calibration=own_windows())
    resumed = tiny.llama()
    files = {f: f.stat().st_mtime_ns for f in tmp_path.rglob("*") if f.is_file()}
    assert auto(resumed, checkpoint_dir=tmp_path, **target, calibration=own_windows()) == report
    assert same_state(resumed, expected)
    assert all(f.stat().st_mtime_ns == t for f, t in files.items())


def test_another_target_reuses_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auto(tiny.llama(), checkpoint_dir=tmp_path, target_bits=4.0, calibration=own_windows())
    expected = auto(tiny.llama(), target_bits=4.2, calibration=own_windows())
    with monkeypatch.context() as patch:
        patch.setattr(structure, "solve_both", lambda *_, **__: pytest.fail("solved again"))
        assert auto(tiny.llama(), checkpoint_dir=tmp_path, target_bits=4.2, calibration=own_windows()) == expected
    with pytest.raises(ValueError, match="another run"):
        auto(tiny.llama(), checkpoint_dir=tmp_path, target_bits=4.0, calibration=own_windows()[:15])
    (tmp_path / "structure.json").write_text('{"loss": 1}')
    with pytest.raises(ValueError, match=r"structure\.json is damaged"):
        auto(tiny.llama(), checkpoint_dir=tmp_path, target_bits=4.0, calibration=own_windows())


# ------------------------------------------------------------------------------------------------------ the result


@pytest.mark.parametrize("build", [tiny.opt, tiny.mixture], ids=lambda b: b.__name__)
@pytest.mark.parametrize("bits", [4, 8])
def test_other_models(build: Callable[[], nn.Module], bits: int) -> None:
    model = build()
    low, high = (Scheme(bits, 32, s).bits_per_weight(64) for s in ("2:4", None))
    report = auto(model.train(), bits=bits, calibration=tiny.tokens(16), target_bits=(low + high) / 2)
    assert model.training and report.bits_per_weight <= (low + high) / 2
    assert set(structures(model).values()) == {None, "2:4"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    model = tiny.llama(dtype)
    report = auto(model, calibration=tiny.tokens(16), target_bits=4.0)
    assert report.structure is not None
    assert all(math.isfinite(g.sparse) and g.sparse > g.dense > 0 for g in report.structure.sensitivities)


def test_a_named_device_changes_nothing() -> None:
    model, expected = tiny.llama(), tiny.llama()
    with torch.inference_mode():  # nor does this, though gradients are taken
        report = auto(model, calibration=tiny.tokens(16), target_bits=4.0, device="cpu")
    assert auto(expected, calibration=tiny.tokens(16), target_bits=4.0) == report
    assert same_state(model, expected)


def test_the_report_shows_and_saves_the_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = patch_model(tiny.llama(), "auto", group_size=32, calibration=tiny.tokens(16), target_bits=4.0)
    out = capsys.readouterr()
    assert not out.out and "to choose structures" in out.err and "bits/weight" in out.err
    assert out.err.index("memory needed") < out.err.index("solving both structures")
    found = report.structure
    assert found is not None
    report.save(tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text())["structure"]
    assert saved["dense"] == list(found.dense) and len(saved["curve"]) == len(found.curve)
    assert saved["curve"][0]["step_us"].keys() == {"1", "16"}
    assert report.settings["target_bits"] == 4.0 and report.settings["held_out_windows"] == 4
    assert "target_bits=4" in str(found.table().caption)


@pytest.mark.parametrize("to", ["sparse-marlin", "pack-quantized"])
def test_mixed_models_are_saved_and_converted(to: Any, tmp_path: Path) -> None:
    model = tiny.llama(intermediate_size=128)
    auto(model, calibration=tiny.tokens(16), target_bits=4.0)
    assert set(structures(model).values()) == {None, "2:4"}
    sparse_marlin.save(model, tmp_path / "saved")
    sparse_marlin.convert(tmp_path / "saved", tmp_path / "converted", to, progress=False)
    loaded = sparse_marlin.load(tmp_path / "saved")
    assert same_state(loaded, model) and structures(loaded) == structures(model)
    converted = sparse_marlin.load(tmp_path / "converted")
    for name, s in structures(model).items():
        was, now = model.get_submodule(name), converted.get_submodule(name)
        assert isinstance(was, CompressedLinear) and isinstance(now, CompressedLinear)
        assert torch.equal(was.dequantize(), now.dequantize())
        assert now.scheme.sparsity == s or to == "pack-quantized"


def test_a_refit_follows_and_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(structure, "solve_both", lambda *_: pytest.fail("the work began"))
        with pytest.raises(ValueError, match="refit must be True, False or None"):
            auto(tiny.llama(), target_bits=4.2, calibration=own_windows(), refit="yes")
    monkeypatch.setattr(refit, "SETTING", refit.Refit(steps=6, tokens=64))
    for wanted in (True, False):  # in one directory: what is solved serves both
        report = auto(
            tiny.llama(),
            target_bits=4.2,
            calibration=own_windows(),
            refit=wanted,
            checkpoint_dir=tmp_path,
        )
        assert ("one-shot+refit" in {x.method for x in report.compressed}) == wanted


def test_held_out_windows_of_texts_are_not_calibrated_on() -> None:
    class Tokenizer:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": list(range(int(text)))}

    model = nn.Module()
    windows = calibration_windows(model, ["20000"], Tokenizer(), 128, 64, 0, False, hold_out=structure.HELD_OUT)
    calibrating, held_out = hold_out(windows)
    assert len(held_out) == 32 and len(calibrating) == 96
    assert max(int(w.max()) for w in calibrating) < 15000 <= min(int(w.min()) for w in held_out)


def test_mixes_whose_loss_is_not_finite_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, sizes, calibrating = prepared(tiny.llama())
    variants = both(probe, sizes, calibrating)
    real, calls = Probe.loss, []

    def loss(self: Probe, *args: Any) -> float:
        calls.append(1)
        return math.nan if len(calls) == 2 else real(self, *args)

    monkeypatch.setattr(Probe, "loss", loss)
    with torch.no_grad():
        found = measure(probe, variants, sizes, 0)
    assert len(found.trials) >= 2 and all(math.isfinite(x) for _, x in found.trials)


def test_a_mapping_decides_what_a_layer_must_be_able_to_hold() -> None:
    model = tiny.llama(intermediate_size=66)  # no multiple of 4: down_proj can only be dense
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith("model.layers")]
    mapping = {n: None if "down_proj" in n else "2:4" for n in names}
    report = patch_model(model, mapping, group_size=32, calibration=own_windows(), progress=False)
    assert {x.scheme[:3] for x in report.compressed if "down_proj" in x.name} == {"INT"}
    assert {x.scheme[:3] for x in report.compressed if "down_proj" not in x.name} == {"2:4"}
