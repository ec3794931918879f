"""Refit: blocks come closer to the original model's, and what was trained is what is stored."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from naive import max_nonzeros_per_quad
from torch import Tensor, nn

from sparse_marlin import CompressedLinear, patch_model
from sparse_marlin.compression import Report, refit
from sparse_marlin.compression.blocks import capture, record, run
from sparse_marlin.compression.refit import Latents, Refit
from sparse_marlin.packed import PackedWeight
from sparse_marlin.scheme import SCALE_DTYPES, Scheme

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
STEPS = 16
quiet = functools.partial(patch_model, progress=False, calibration=tiny.tokens())


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refit, "SETTING", Refit(steps=STEPS, tokens=128, weight_rate=0.05, scale_rate=0.002))


def compressed(model: nn.Module) -> dict[str, CompressedLinear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, CompressedLinear)}


def relative_error(model: nn.Module, original: nn.Module, tokens: Tensor) -> float:
    """Mean over tokens of the squared relative error of what leaves the last block."""
    seen: list[Tensor] = []
    for m in (model, original):
        hook = tiny.blocks_of(m)[-1].register_forward_hook(
            lambda _module, _args, out: seen.append((out[0] if isinstance(out, tuple) else out).float())
        )
        with torch.no_grad():
            m(input_ids=tokens)
        hook.remove()
    got, wanted = seen
    return float(((got - wanted).square().sum(-1) / wanted.square().sum(-1)).mean())


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(tiny.same_bits(x[n], y[n]) for n in x)


# ------------------------------------------------------------------------------------------------------- whole models

MODELS: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (tiny.llama, {}),
    (tiny.llama, {"sparsity": None}),
    (tiny.llama, {"sparsity": None, "method": "gptq", "bits": 8, "group_size": 32}),
    (tiny.llama, {"method": "two-pass", "group_size": -1}),
    (lambda: tiny.llama(FP16), {}),
    (lambda: tiny.llama(BF16), {}),
    (lambda: tiny.llama(BF16), {"dtype": FP16}),
    (tiny.opt, {}),
    (tiny.qwen_moe, {}),
    (functools.partial(tiny.mixture, idle=()), {}),
]


@pytest.mark.parametrize(("build", "options"), MODELS, ids=[f"{i}-{o}" for i, (_, o) in enumerate(MODELS)])
def test_the_model_comes_closer_and_stays_what_it_was(
    build: Callable[[], nn.Module], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[tuple[float, float]] = []
    train = refit._train

    def noted(*args: Any) -> tuple[float, float]:
        errors.append(train(*args))
        return errors[-1]

    monkeypatch.setattr(refit, "_train", noted)
    original, plain, model = build(), build(), build()
    frozen = {n: p for n, p in original.state_dict().items() if not n.endswith("weight")}
    before, report = quiet(plain, refit=False, **options), quiet(model, refit=True, **options)
    assert len(errors) == 2 and all(after < start for start, after in errors)
    assert relative_error(model, original, tiny.tokens()) < relative_error(plain, original, tiny.tokens())
    assert compressed(model).keys() == compressed(plain).keys()
    for name, layer in compressed(model).items():
        was = compressed(plain)[name]
        (line,) = [x for x in report.compressed if x.name == name]
        (line_before,) = [x for x in before.compressed if x.name == name]
        assert line.method == line_before.method + "+refit" and line.note == line_before.note
        assert line.error_before == pytest.approx(line_before.error_before, rel=0.5)
        layer.packed.check_indices()
        assert layer.scheme == was.scheme and layer.scales.dtype == was.scales.dtype
        assert not torch.equal(layer.qweight, was.qweight) and not torch.equal(layer.scales, was.scales)
        assert tiny.same_bits(layer.scales.to(layer.scheme.dtype).to(layer.scales.dtype), layer.scales)
        assert layer.dequantize().isfinite().all()
        if layer.scheme.sparsity:
            assert max_nonzeros_per_quad(layer.dequantize()) <= 2
            if name.startswith(("model.layers.0.self_attn.q", "blocks.0.mix")):  # solved before anything was refitted
                assert torch.equal(layer.meta, was.meta)
    for name, p in frozen.items():
        assert torch.equal(model.state_dict()[name], p), name
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and "forward" not in vars(module)
        assert all(p.grad is None for p in module.parameters(recurse=False))


def test_what_is_trained_is_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that training ended with is that of the packed block, in the model's own forward."""
    monkeypatch.setattr(refit, "SETTING", replace(refit.SETTING, token_power=1.0))
    ends = []
    train = refit._train
    monkeypatch.setattr(refit, "_train", lambda *args: ends.append(train(*args)) or ends[-1])
    for bias in (True, False):
        original = tiny.llama(attention_bias=bias, mlp_bias=bias)
        model = copy.deepcopy(original)
        quiet(model, refit=True)
        assert relative_error(model, original, tiny.tokens()) == pytest.approx(ends[-1][1], rel=1e-5)


def test_reported_errors_are_those_of_the_final_weights() -> None:
    original = tiny.llama()
    model = copy.deepcopy(original)
    report = quiet(model, refit=True)
    inputs: list[dict[str, Tensor]] = []
    for m in (original, model):
        seen: dict[str, Tensor] = {}
        for name in compressed(model):
            m.get_submodule(name).register_forward_pre_hook(
                lambda _module, args, seen=seen, name=name: seen.update({name: args[0].flatten(0, -2)})
            )
        with torch.no_grad():
            m(input_ids=tiny.tokens())
        inputs.append(seen)
    for line in report.compressed:
        wanted = inputs[0][line.name] @ original.get_submodule(line.name).weight.detach().T
        got = inputs[1][line.name] @ model.get_submodule(line.name).dequantize().T
        assert line.error_after == pytest.approx(float((got - wanted).norm() / wanted.norm()), rel=1e-2)


@pytest.mark.parametrize("empty_calls", [False, True])
def test_an_expert_without_tokens_is_left_alone(empty_calls: bool) -> None:
    plain, model = (tiny.mixture(idle=(1,), empty_calls=empty_calls) for _ in range(2))
    quiet(plain, refit=False)
    report = quiet(model, refit=True)
    for line in report.compressed:
        idle = ".experts.1." in line.name
        assert line.method == ("magnitude+rtn" if idle else "one-shot+refit")
        layers = [m.get_submodule(line.name).state_dict() for m in (plain, model)]
        assert all(torch.equal(layers[0][n], layers[1][n]) for n in layers[0]) == idle


def test_layers_that_are_not_compressed_stay_and_compressed_ones_are_passed() -> None:
    """Gradients of a first layer go through later ones, compressed by an earlier call or left out."""
    model = tiny.llama()
    quiet(model, only="down_proj", refit=False)
    before = {n: t.clone() for n, t in model.state_dict().items() if "down_proj" in n or "up_proj" in n}
    report = quiet(model, skip="up_proj", refit=True)
    assert {x.method for x in report.compressed} == {"one-shot+refit"}
    assert all(tiny.same_bits(model.state_dict()[n], t) for n, t in before.items())


def test_wrapped_forwards_and_training_mode() -> None:
    model, expected = tiny.llama(attention_dropout=0.5).train(), tiny.llama()
    for block in tiny.blocks_of(model):
        block.forward = functools.partial(block.forward)
    quiet(model, refit=True)
    quiet(expected, refit=True)
    assert same_bits(model, expected)
    assert all(m.training for m in model.modules())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_grad_mode_does_not_matter(mode: Callable[[], Any]) -> None:
    model, expected = tiny.llama(), tiny.llama()
    with mode():
        quiet(model, refit=True)
    quiet(expected, refit=True)
    assert same_bits(model, expected)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def test_off_by_default() -> None:
    assert {x.method for x in quiet(tiny.llama()).compressed} == {"one-shot"}


# --------------------------------------------------------------------------------------------------- same, and resumed


def test_the_same_call_gives_the_same_bits_and_another_seed_others() -> None:
    models = [tiny.llama() for _ in range(3)]
    windows = [tiny.tokens()[i : i + 1] for i in range(8)]
    reports = []
    for model, seed in zip(models, (0, 0, 1), strict=True):
        torch.manual_seed(id(model) % 1000)
        reports.append(quiet(model, calibration=windows, seed=seed, refit=True))
    assert same_bits(models[0], models[1]) and not same_bits(models[0], models[2])
    assert reports[0] == reports[1]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_an_interrupted_run_resumes_to_the_same_bits(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of training: the model is whole, and the next run ends as one that was not stopped."""
    expected = tiny.llama(dtype, layers=3)
    report = quiet(expected, refit=True)
    model = tiny.llama(dtype, layers=3)
    dtypes = {n: p.dtype for n, p in model.named_parameters() if "layernorm" in n}
    gradients = Latents.set_gradients
    calls = []

    def stop(self: Latents, found: list[Tensor]) -> None:
        calls.append(1)
        if len(calls) > 3 * STEPS:  # two per step, one for each width of groups: midway in the second block
            raise KeyboardInterrupt
        gradients(self, found)

    with monkeypatch.context() as patch:
        patch.setattr(Latents, "set_gradients", stop)
        with pytest.raises(KeyboardInterrupt):
            quiet(model, refit=True, checkpoint_dir=tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert {n: p.dtype for n, p in model.named_parameters() if "layernorm" in n} == dtypes
    kinds = {type(m) for m in model.modules() if hasattr(m, "weight") or hasattr(m, "qweight")}
    assert not any("refit" in kind.__module__ for kind in kinds)
    with torch.no_grad():
        assert model(tiny.tokens()).logits.isfinite().all()
    resumed = tiny.llama(dtype, layers=3)
    assert quiet(resumed, refit=True, checkpoint_dir=tmp_path) == report
    assert same_bits(resumed, expected)
    with pytest.raises(ValueError, match="another run"):
        quiet(tiny.llama(dtype, layers=3), refit=False, checkpoint_dir=tmp_path)


# ----------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("when", [0, STEPS // 2])
def test_an_error_that_is_not_finite_leaves_the_block_as_it_was(when: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = tiny.llama(), tiny.llama()
    before = quiet(plain, refit=False)
    error, calls = refit._Windows.error, []

    def broken(self: Any, indices: list[int]) -> Tensor:
        calls.append(1)
        return error(self, indices) * (float("nan") if len(calls) > when else 1.0)

    monkeypatch.setattr(refit._Windows, "error", broken)
    report = quiet(model, refit=True)
    assert same_bits(model, plain)
    for line, was in zip(report.compressed, before.compressed, strict=True):
        assert line.method == "one-shot" and "not finite" in line.note
        assert line.error_after == pytest.approx(was.error_after, rel=1e-3)


def test_training_that_does_not_help_leaves_the_block_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = tiny.llama(), tiny.llama()
    quiet(plain, refit=False)
    monkeypatch.setattr(refit, "SETTING", Refit(steps=1, tokens=128, weight_rate=1e4))
    report = quiet(model, refit=True)
    assert same_bits(model, plain)
    assert all("no improvement" in line.note and line.method == "one-shot" for line in report.compressed)


def test_inputs_that_are_not_finite() -> None:
    """A block is trained as long as no broken one lies within the blocks that its error passes."""
    model = tiny.llama(layers=2 + refit.SETTING.ahead)
    last = tiny.blocks_of(model)[-1]
    last.input_layernorm.weight.data[3] = float("nan")
    report = quiet(model, refit=True, on_nonfinite="fallback")
    for line in report.compressed:
        index = int(line.name.split(".")[2])
        if index == 0:
            assert line.method == "one-shot+refit" and "not refitted" not in line.note
        elif index <= refit.SETTING.ahead:
            assert line.method == "one-shot" and "not refitted: its error is not finite" in line.note
        else:
            assert line.method == "magnitude+rtn" and "not refitted" not in line.note
        assert model.get_submodule(line.name).dequantize().isfinite().all()


@pytest.mark.parametrize("method", ["magnitude+rtn", "magnitude", "wanda", "sparsegpt"])
def test_methods_that_it_cannot_follow_are_refused(method: str) -> None:
    model = tiny.llama()
    before = tiny.snapshot(model)
    with pytest.raises(ValueError, match=f"refit=True .*{method.split('+')[0]}.*one-shot"):
        quiet(model, refit=True, method=method)
    with pytest.raises(ValueError, match=r"refit=True .*'rtn'"):
        quiet(model, refit=True, sparsity=None, method="rtn")
    assert tiny.unchanged(model, before)


def test_without_a_word_it_happens_on_a_gpu_wherever_it_can() -> None:
    model = tiny.llama()
    blocks: Any = model.model.layers
    assert not refit.by_default(model, blocks, "auto", None)  # which are on a CPU
    assert not refit.by_default(model, blocks, "auto", "cpu")
    assert refit.by_default(model, blocks, "auto", "cuda:0")
    assert refit.by_default(model, blocks, "gptq", torch.device("cuda"))
    assert not refit.by_default(model, blocks, "magnitude+rtn", "cuda")
    assert not refit.by_default(model, blocks, "wanda", "cuda")
    somewhere = [SimpleNamespace(device=torch.device(d)) for d in ("cuda:0", "cuda:1", "cpu")]
    assert refit.by_default(model, SimpleNamespace(parameters=lambda: somewhere[:2]), "auto", None)  # type: ignore[arg-type]
    assert not refit.by_default(model, SimpleNamespace(parameters=lambda: somewhere), "auto", None)  # type: ignore[arg-type]
    model.config._attn_implementation = "flash_attention_2"
    assert not refit.by_default(model, blocks, "auto", "cuda")


def test_without_a_word_a_model_on_a_cpu_is_not_refitted() -> None:
    report = quiet(tiny.llama())
    assert report.settings["refit"] is None and {x.method for x in report.compressed} == {"one-shot"}


@pytest.mark.parametrize("value", ["yes", 1, 0, 2.0, Refit()], ids=str)
def test_other_values_are_refused(value: Any) -> None:
    model = tiny.llama()
    before = tiny.snapshot(model)
    with pytest.raises(ValueError, match="refit must be True, False or None"):
        quiet(model, refit=value)
    assert tiny.unchanged(model, before)


def test_attention_that_does_not_compute_in_float32_is_refused() -> None:
    model = tiny.llama()
    before = tiny.snapshot(model)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"attn_implementation='sdpa'"):
        quiet(model, refit=True)
    assert tiny.unchanged(model, before)


def test_frozen_experts_that_some_windows_do_not_reach() -> None:
    model = tiny.mixture(idle=()).requires_grad_(False)
    windows = [tiny.tokens()[i : i + 1, :n] for i, n in enumerate((1, 4, 30))]
    report = quiet(model, calibration=windows, only="experts.1.*", refit=True)
    assert report.compressed and not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("options", [{"adapter_rank": 8}, {"adapter_rank": 8, "adapter_bits": 4}], ids=str)
def test_adapters_stay_and_the_run_resumes(options: dict[str, Any], tmp_path: Path) -> None:
    first, resumed, plain, original = (tiny.llama() for _ in range(4))
    report = quiet(first, refit=True, checkpoint_dir=tmp_path, **options)
    (tmp_path / "block-00001.safetensors").unlink()
    assert quiet(resumed, refit=True, checkpoint_dir=tmp_path, **options) == report
    assert same_bits(first, resumed)
    quiet(plain, refit=False, **options)
    layer, other = (m.model.layers[0].self_attn.q_proj for m in (first, plain))
    assert torch.equal(layer.adapter.dequantize(), other.adapter.dequantize())  # it is not trained
    assert relative_error(first, original, tiny.tokens()) < relative_error(plain, original, tiny.tokens())


def test_no_window_is_twice_in_a_step() -> None:
    windows = refit._Windows.__new__(refit._Windows)
    windows.hidden, windows.rows = [torch.zeros(1, 4, 2)] * 5, [4] * 5
    steps = windows.steps(12, torch.Generator().manual_seed(0))
    found = [next(steps) for _ in range(60)]
    assert all(len(set(step)) == 3 for step in found)
    counts = [sum(i in step for step in found) for i in range(5)]
    assert min(counts) > 25  # of 36 on average


# ------------------------------------------------------------------------------------------------------------- latents


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(8, 32, None), Scheme(4, -1, None)], ids=str)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
def test_the_rounded_weights_are_those_of_the_packed_ones(
    scheme: Scheme, scale_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    scheme = replace(scheme, dtype=scale_dtype)
    packed = [random_packed(n, 64, scheme) for n in (8, 20)]
    latents = started(packed, dtype)
    for again, p in zip(latents.pack(), packed, strict=True):
        assert all(tiny.same_bits(t, again.tensors()[n]) for n, t in p.tensors().items())
    latents.latent += 3 * torch.randn_like(latents.latent) * (1 if latents.kept is None else latents.kept)
    latents.change += 0.1 * torch.randn_like(latents.change)
    for w, p in zip(latents.round(), latents.pack(), strict=True):
        layer = CompressedLinear(replace(p, scales=p.scales.to(dtype)))
        assert torch.equal(w.to(dtype), layer.dequantize()) and torch.equal(w.to(dtype).float(), w)


def test_gradients_pass_the_rounding() -> None:
    """They are those of latent * scale * exp(change) at the rounded values, and none of a pruned weight."""
    latents = started([random_packed(n, 64, Scheme(4, 32, dtype=FP32)) for n in (8, 4)], FP32)
    weights = latents.round()
    gradients = [torch.randn_like(w) for w in weights]
    latents.set_gradients(gradients)
    codes, change = latents.latent.round().requires_grad_(), torch.zeros_like(latents.change, requires_grad=True)
    value = codes * latents.start * change.exp()
    total = (value * torch.cat([g.view(-1, 32) for g in gradients])).sum()
    expected = torch.autograd.grad(total, [codes, change])
    assert torch.allclose(latents.latent.grad, expected[0] * latents.kept)
    assert torch.allclose(latents.change.grad, expected[1], rtol=1e-4, atol=1e-5)


def started(packed: list[PackedWeight], dtype: torch.dtype) -> Latents:
    """Latents anywhere within what rounds to the packed integers, and beyond the range at its ends."""
    latents = []
    for p in packed:
        codes, mask = p.unpack()
        latent = codes.float() - p.scheme.zero_code + 0.98 * (torch.rand(codes.shape) - 0.5)
        latent[codes == p.scheme.max_code] += 3
        latents.append(latent if mask is None else latent * mask)
    return Latents(packed, latents, dtype)


def random_packed(n: int, k: int, scheme: Scheme) -> PackedWeight:
    codes = torch.randint(0, scheme.max_code + 1, (n, k), dtype=torch.uint8)
    mask = None
    if scheme.sparsity:
        mask = torch.rand(n, k // 4, 4).argsort(2).ge(2).flatten(1)
    return PackedWeight.pack(codes, torch.rand(n, scheme.num_groups(k)) + 0.01, scheme, mask)


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "change",
    [{"token_power": 1.0}, {"ahead": 0}],
    ids=str,
)
def test_settings(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    original, plain, base, model = (tiny.llama() for _ in range(4))
    quiet(plain, refit=False)
    quiet(base, refit=True)
    monkeypatch.setattr(refit, "SETTING", replace(refit.SETTING, **change))
    report = quiet(model, refit=True)
    assert isinstance(report, Report) and {x.method for x in report.compressed} == {"one-shot+refit"}
    assert not same_bits(model, base)
    assert relative_error(model, original, tiny.tokens()) < relative_error(plain, original, tiny.tokens())


def test_windows_go_together_only_where_that_changes_nothing() -> None:
    windows = [tiny.tokens()[i : i + 1] for i in range(8)]

    def together(model: nn.Module, windows: list[Tensor]) -> bool:
        blocks = tiny.blocks_of(model)
        with torch.no_grad():
            hidden, calls = capture(model, blocks, windows, None)
            _, goals = record(model, blocks[0], [], hidden, calls[0], torch.device("cpu"))
            data = refit._Windows([(blocks[0], calls[0])], hidden, goals, torch.device("cpu"), Refit())
        if data.together:
            assert list(data.pieces([0, 3, 5])) == [[0, 3, 5]]
            with torch.no_grad():
                single = torch.cat([run(blocks[0], hidden[i], calls[0][i], torch.device("cpu")) for i in (0, 3, 5)])
                assert torch.allclose(data.forward([0, 3, 5]), single, atol=1e-5)
        else:
            assert list(data.pieces([0, 3])) == [[0], [3]]
        return data.together

    for build in (tiny.llama, tiny.opt, tiny.qwen_moe):
        assert together(build(), windows)
        assert not together(build(), [windows[0], tiny.tokens(1, 9)])
        assert not together(build(), [tiny.tokens(2), tiny.tokens(2, seed=4)])
    assert not together(Positional(), windows)


class Positional(tiny.PlainModel):
    """Treats the rows of a batch differently."""

    def __init__(self) -> None:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mix = nn.Linear(64, 64)

            def forward(self, hidden_states: Tensor) -> Tensor:
                rows = torch.arange(1, len(hidden_states) + 1).view(-1, 1, 1)
                return hidden_states + rows * self.mix(hidden_states)

        super().__init__([Block(), Block()])
