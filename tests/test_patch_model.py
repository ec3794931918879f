"""patch_model(): whole models, block by block; resumable, reproducible, and honest about every layer."""

from __future__ import annotations

import copy
import functools
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from naive import max_nonzeros_per_quad
from torch import Tensor, nn

from sparse_marlin import CompressedLinear, patch_model
from sparse_marlin.compression import NonFiniteError, Report

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
quiet = functools.partial(patch_model, progress=False)


def linears(model: nn.Module) -> dict[str, nn.Linear | CompressedLinear]:
    found = model.named_modules(remove_duplicate=False)
    return {n: m for n, m in found if isinstance(m, (nn.Linear, CompressedLinear))}


def inputs_of(model: nn.Module, names: list[str], tokens: Tensor) -> dict[str, Tensor]:
    """What the named modules are fed when the model reads the tokens, [rows, K]."""
    seen: dict[str, Tensor] = {}
    hooks = [
        model.get_submodule(n).register_forward_pre_hook(lambda _, args, n=n: seen.update({n: args[0].flatten(0, -2)}))
        for n in names
    ]
    with torch.inference_mode():
        model(input_ids=tokens)
    for hook in hooks:
        hook.remove()
    return seen


def same_state(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(x[n].dtype == y[n].dtype and torch.equal(x[n], y[n]) for n in x)


def layer(report: Report, name: str) -> Any:
    (found,) = [line for line in report.layers if line.name == name]
    return found


# ---------------------------------------------------------------------------------------------------- what comes out

SETTINGS = [
    {},
    {"group_size": 32},
    {"bits": 8, "group_size": -1},
    {"sparsity": None},
    {"sparsity": None, "bits": 8, "group_size": 32},
    {"method": "two-pass"},
    {"method": "one-loop"},
    {"method": "wanda+rtn"},
    {"method": "magnitude+rtn"},
    {"sparsity": None, "method": "gptq"},
    {"sparsity": None, "method": "rtn"},
]


MODELS = [(tiny.llama, s) for s in SETTINGS] + [(m, s) for m in (tiny.opt, tiny.mixture) for s in SETTINGS[:4:3]]


@pytest.mark.parametrize(("build", "setting"), MODELS, ids=[f"{m.__name__}-{s}" for m, s in MODELS])
def test_every_layer_of_the_blocks_is_compressed(build: Callable[[], nn.Module], setting: dict[str, Any]) -> None:
    model = build()
    original = copy.deepcopy(model)
    report = quiet(model, **setting, calibration=tiny.tokens())
    blocks, inside = tiny.blocks_of(model), 0
    for module in blocks.modules():
        assert type(module) is not nn.Linear
        if isinstance(module, CompressedLinear):
            inside += 1
            module.packed.check_indices()
            assert module.dequantize().isfinite().all()
            if setting.get("sparsity", "2:4") == "2:4":
                assert max_nonzeros_per_quad(module.dequantize()) <= 2
    names = list(linears(original))
    assert [line.name for line in report.layers if line.kind == "Linear"] == names
    assert len(report.compressed) == inside == len(names) - 1  # all but the head
    for line in report.layers:
        was = original.get_submodule(line.name)
        assert line.kind == type(was).__name__ and line.shape == tuple(was.weight.shape)
        if line.status == "compressed":
            now = model.get_submodule(line.name)
            assert isinstance(now, CompressedLinear)
            assert line.scheme == str(now.scheme) and line.bits_per_weight == now.scheme.bits_per_weight(
                now.in_features
            )
            assert line.error_before is not None and line.error_after is not None and 0 <= line.error_after < 1
        else:
            assert line.status == "skipped" and line.note
    with torch.inference_mode():
        assert not same_state(model, original)
        for name, t in original.state_dict().items():
            if not name.endswith("weight") or name.rsplit(".", 1)[0] not in {line.name for line in report.compressed}:
                assert torch.equal(model.state_dict()[name], t), name  # biases, norms, embeddings, head


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
def test_the_model_computes_as_with_its_dequantized_weights(dtype: torch.dtype) -> None:
    model = tiny.llama(dtype, attention_bias=True, mlp_bias=True)
    quiet(model, calibration=tiny.tokens())
    dense, exact = copy.deepcopy(model), copy.deepcopy(model)
    for name, module in linears(model).items():
        if isinstance(module, CompressedLinear):
            assert module.scales.dtype == dtype
            for other in (dense, exact):
                plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, dtype=dtype)
                plain.load_state_dict(
                    {"weight": module.dequantize(), **({} if module.bias is None else {"bias": module.bias})}
                )
                other.set_submodule(name, plain)
    exact.double()
    with torch.inference_mode():
        out, plain_out, truth = (m(tiny.tokens(seed=5)).logits for m in (model, dense, exact))
    assert out.dtype == dtype
    assert (out.double() - truth).norm() <= 2 * (plain_out.double() - truth).norm()


def test_biases_are_kept_and_their_absence_too() -> None:
    for bias in (True, False):
        model = tiny.llama(attention_bias=bias, mlp_bias=bias)
        for p in (p for n, p in model.named_parameters() if n.endswith("bias")):
            nn.init.normal_(p)
        original = copy.deepcopy(model)
        quiet(model, calibration=tiny.tokens())
        for name, module in linears(model).items():
            was = original.get_submodule(name).bias
            assert (module.bias is None) == (was is None) == (not bias or name == "lm_head")
            assert was is None or torch.equal(module.bias, was)


def test_it_still_generates() -> None:
    model = tiny.llama()
    quiet(model, calibration=tiny.tokens())
    out = model.generate(tiny.tokens(1, 4), max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 12)


@pytest.mark.parametrize("training", [True, False])
def test_nothing_else_of_the_model_changes(training: bool) -> None:
    """Training mode, hooks, forwards, and the configuration but for how layers are stored; dropout is off meanwhile."""
    model = tiny.llama(attention_dropout=0.5).train(training)
    expected = tiny.llama()
    config = model.config.to_dict()
    quiet(model, calibration=tiny.tokens())
    quiet(expected, calibration=tiny.tokens())
    assert same_state(model, expected)
    after = model.config.to_dict()
    assert after.pop("quantization_config")["quant_method"] == "sparse_marlin"
    assert after == config
    for module in model.modules():
        assert module.training == training
        assert not module._forward_pre_hooks and not module._forward_hooks and "forward" not in vars(module)


def test_forwards_that_were_wrapped_stay_wrapped() -> None:
    """Offloading libraries replace the forward of an instance."""
    model = tiny.llama()
    calls = []
    for block in tiny.blocks_of(model):
        original = block.forward

        def forward(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            calls.append(1)
            return original(*args, **kwargs)

        block.forward = forward
    quiet(model, calibration=tiny.tokens())
    calls.clear()
    model(tiny.tokens(1, 4))
    assert len(calls) == 2
    expected = tiny.llama()
    quiet(expected, calibration=tiny.tokens())
    assert same_state(model, expected)


def test_it_runs_on_a_named_device() -> None:
    model, expected = tiny.llama(), tiny.llama()
    quiet(model, calibration=tiny.tokens(), device="cpu")
    quiet(expected, calibration=tiny.tokens())
    assert same_state(model, expected)


# ---------------------------------------------------------------------------------------------------------- accuracy


def logits_error(model: nn.Module, original: nn.Module) -> float:
    with torch.inference_mode():
        truth = original(tiny.tokens(seed=11)).logits.double()
        return float((model(tiny.tokens(seed=11)).logits.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize(("sparsity", "bits"), [("2:4", 4), ("2:4", 8), (None, 4)])
def test_calibration_helps_the_whole_model(sparsity: str | None, bits: int) -> None:
    original = tiny.llama(initializer_range=0.08)
    calibrated, baseline = copy.deepcopy(original), copy.deepcopy(original)
    report = quiet(calibrated, sparsity, bits, calibration=tiny.tokens(64))
    quiet(baseline, sparsity, bits, method="rtn" if sparsity is None else "magnitude+rtn", calibration=tiny.tokens(2))
    assert logits_error(calibrated, original) < logits_error(baseline, original)
    for line in report.compressed:
        assert line.error_after < line.error_before


def test_reported_errors_are_true() -> None:
    """Relative output error over the calibration inputs; those of block 1 come from the compressed block 0."""
    original = tiny.llama()
    model = copy.deepcopy(original)
    report = quiet(model, calibration=tiny.tokens(), method="two-pass")
    names = [line.name for line in report.compressed]
    # An input depends on the blocks before, compressed, and on its own block, still dense when it was calibrated.
    for index in range(2):
        mixed = copy.deepcopy(model)
        tiny.blocks_of(mixed)[index] = copy.deepcopy(tiny.blocks_of(original)[index])
        mine = [n for n in names if f"layers.{index}." in n]
        assert len(mine) == 7
        for name, x in inputs_of(mixed, mine, tiny.tokens()).items():
            w = original.get_submodule(name).weight.detach().double()
            wrong = x.double() @ (model.get_submodule(name).dequantize().double() - w).T
            true_error = float(wrong.norm() / (x.double() @ w.T).norm())
            assert layer(report, name).error_after == pytest.approx(true_error, rel=1e-3), name
            assert layer(report, name).rows == tiny.tokens().numel()


def test_one_shot_reports_the_distance_to_the_original_model() -> None:
    original = tiny.llama()
    model = copy.deepcopy(original)
    report = quiet(model, calibration=tiny.tokens())
    names = [line.name for line in report.compressed]
    before, after = inputs_of(original, names, tiny.tokens()), inputs_of(model, names, tiny.tokens())
    for name in names:
        wanted = before[name].double() @ original.get_submodule(name).weight.detach().double().T
        got = after[name].double() @ model.get_submodule(name).dequantize().double().T
        assert layer(report, name).error_after == pytest.approx(float((got - wanted).norm() / wanted.norm()), rel=1e-2)


def test_one_shot_makes_up_for_the_layers_before() -> None:
    original = tiny.llama()
    errors = {}
    for method in ("one-shot", "two-pass"):
        model = copy.deepcopy(original)
        quiet(model, calibration=tiny.tokens(), method=method)
        with torch.inference_mode():
            truth, seen = original(tiny.tokens()).logits, model(tiny.tokens()).logits
        errors[method] = float((seen - truth).norm() / truth.norm())
    assert errors["one-shot"] < 0.95 * errors["two-pass"]


def test_padding_free_windows_of_any_shape() -> None:
    """A list of tensors, one batch each; as many rows are seen as there are tokens."""
    windows = [tiny.tokens(1, 5), tiny.tokens(3, 17), tiny.tokens(1, 1)[0], tiny.tokens(2, 128).to(torch.int32)]
    report = quiet(tiny.llama(), calibration=windows)
    assert {line.rows for line in report.compressed} == {5 + 51 + 1 + 256}


# ------------------------------------------------------------------------------------------------------- calibration


def test_no_calibration_and_no_tokenizer_samples_from_the_model() -> None:
    state = torch.get_rng_state()
    first, second, other = (tiny.llama() for _ in range(3))
    torch.set_rng_state(state)
    report = quiet(first, num_samples=3, sequence_length=16)
    assert torch.equal(torch.get_rng_state(), state)
    assert {line.rows for line in report.compressed} == {48}
    torch.manual_seed(1234)
    assert quiet(second.train(), num_samples=3, sequence_length=16) == report
    assert same_state(first, second)
    quiet(other, num_samples=3, sequence_length=16, seed=1)
    assert not same_state(first, other)


def test_a_model_without_a_first_token_samples_too() -> None:
    report = quiet(tiny.llama(bos_token_id=None, eos_token_id=None), num_samples=2, sequence_length=8)
    assert {line.rows for line in report.compressed} == {16}


TEXT = "The quick brown fox jumps over the lazy dog. " * 40


@pytest.mark.parametrize(
    ("calibration", "rows"),
    [
        (TEXT, 128),
        ([TEXT[:900], TEXT[900:]], 128),
        ((t for t in [TEXT]), 128),
        ([{"text": TEXT, "other": 1}], 128),
        (["short", "texts"], 10),
        ([{"input_ids": [1, 2, 3, 4]}, {"input_ids": torch.arange(6)}], 10),
        ([[1, 2, 3], [4, 5, 6, 7]], 7),
        (tiny.tokens(2, 6), 12),
        (tiny.tokens(1, 9)[0], 9),
        ([tiny.tokens(2, 6), {"text": "mixed"}], 17),
    ],
    ids=[
        "text",
        "texts",
        "generator",
        "rows of text",
        "short texts",
        "rows of ids",
        "lists",
        "batch",
        "tokens",
        "mixed",
    ],
)
def test_forms_of_calibration(calibration: Any, rows: int) -> None:
    report = quiet(tiny.llama(), calibration=calibration, tokenizer=tiny.Tokenizer(), num_samples=4, sequence_length=32)
    assert {line.rows for line in report.compressed} == {rows}


def test_windows_of_texts_depend_on_the_seed_alone() -> None:
    models = [tiny.llama() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        torch.manual_seed(id(model) % 1000)
        quiet(model, calibration=TEXT, tokenizer=tiny.Tokenizer(), num_samples=4, sequence_length=32, seed=seed)
    assert same_state(models[0], models[1])
    assert not same_state(models[0], models[2])


def test_texts_longer_than_the_model_can_read() -> None:
    """OPT has a table of 32 positions, windows of texts default to 512 tokens."""
    report = quiet(tiny.opt(), calibration=TEXT, tokenizer=tiny.Tokenizer(), num_samples=2)
    assert {line.rows for line in report.compressed} == {64}


# ------------------------------------------------------------------------------------------------- which layers, why


def test_the_head_and_the_embedding_are_left_out() -> None:
    model = tiny.llama()
    report = quiet(model, calibration=tiny.tokens())
    assert type(model.lm_head) is nn.Linear
    head, embedding = layer(report, "lm_head"), layer(report, "model.embed_tokens")
    assert head.status == embedding.status == "skipped"
    assert "head" in head.note and "embedding" in embedding.note
    assert report.layers[0] == embedding and report.layers[-1] == head


def test_tied_embeddings_stay_tied() -> None:
    model = tiny.llama(tie_word_embeddings=True)
    quiet(model, calibration=tiny.tokens())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_weights_inside_the_blocks_stay_tied() -> None:
    model = tiny.llama()
    a, b = (block.mlp.up_proj for block in tiny.blocks_of(model))
    b.weight = a.weight
    report = quiet(model, calibration=tiny.tokens())
    assert a.weight is b.weight and tiny.blocks_of(model)[0].mlp.up_proj is a
    for index, other in ((0, 1), (1, 0)):
        line = layer(report, f"model.layers.{index}.mlp.up_proj")
        assert line.status == "skipped" and f"model.layers.{other}.mlp.up_proj" in line.note


def test_a_shared_module_stays_shared_and_is_reported_under_each_name() -> None:
    model = tiny.llama()
    first, second = tiny.blocks_of(model)
    second.mlp.up_proj = first.mlp.up_proj
    report = quiet(model, calibration=tiny.tokens())
    assert second.mlp.up_proj is first.mlp.up_proj
    assert [line.name for line in report.layers if line.kind == "Linear"] == list(linears(model))


PATTERNS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"skip": "down_proj"}, lambda n: "down_proj" not in n),
    ({"skip": ["*.mlp.*"]}, lambda n: ".mlp." not in n),
    ({"skip": ("layers.0.*", "*q_proj")}, lambda n: ".0." not in n and "q_proj" not in n),
    ({"skip": "model.layers.1.self_attn.o_proj"}, lambda n: n != "model.layers.1.self_attn.o_proj"),
    ({"only": "*.self_attn.?_proj"}, lambda n: "self_attn" in n),
    ({"only": ["gate_proj", "up_proj"]}, lambda n: "gate_proj" in n or "up_proj" in n),
    ({"only": "*.mlp.*", "skip": "layers.1.mlp.up_proj"}, lambda n: ".mlp." in n and n[13:] != "1.mlp.up_proj"),
    ({"skip": "lm_head"}, lambda n: True),
]


@pytest.mark.parametrize(("options", "chosen"), PATTERNS, ids=[str(p[0]) for p in PATTERNS])
def test_skip_and_only(options: dict[str, Any], chosen: Callable[[str], bool]) -> None:
    model = tiny.llama()
    report = quiet(model, calibration=tiny.tokens(1, 8), **options)
    for name, module in linears(model).items():
        expected = name != "lm_head" and chosen(name)
        assert isinstance(module, CompressedLinear) == expected, name
        line = layer(report, name)
        assert (line.status == "compressed") == expected
        assert expected or line.note


def test_a_group_size_that_does_not_divide_gets_smaller_and_is_reported() -> None:
    report = quiet(tiny.llama(intermediate_size=100), group_size=64, calibration=tiny.tokens())
    for line in report.compressed:
        k = line.shape[1]
        assert ("per channel" if k == 100 else "group 64") in line.scheme
        assert ("100" in line.note and "64" in line.note) == (k == 100)


def test_a_second_call_adds_what_the_first_left_out() -> None:
    model = tiny.llama()
    quiet(model, calibration=tiny.tokens(), skip="*.mlp.*")
    before = {n: t.clone() for n, t in model.state_dict().items() if ".self_attn." in n}
    report = quiet(model, bits=8, calibration=tiny.tokens())
    assert all(torch.equal(model.state_dict()[n], t) for n, t in before.items())
    for line in report.layers:
        if ".self_attn." in line.name:
            assert line.status == "skipped" and "already compressed" in line.note
        elif ".mlp." in line.name:
            assert line.status == "compressed" and "INT8" in line.scheme


def test_fused_experts_are_reported() -> None:
    """transformers keeps the experts of a mixture in one tensor: no nn.Linear, so it cannot be swapped."""
    model = tiny.qwen_moe()
    report = quiet(model, calibration=tiny.tokens())
    for index in range(2):
        mlp = f"model.layers.{index}.mlp"
        for name in (f"{mlp}.experts", f"{mlp}.gate"):
            assert layer(report, name).status == "skipped" and "no nn.Linear" in layer(report, name).note
        assert layer(report, f"model.layers.{index}.self_attn.q_proj").status == "compressed"


@pytest.mark.parametrize("empty_calls", [False, True])
@pytest.mark.parametrize(("setting", "method"), [({}, "magnitude+rtn"), ({"sparsity": None}, "rtn")], ids=str)
def test_an_expert_that_saw_no_token_is_rounded_and_reported(empty_calls: bool, setting: dict, method: str) -> None:
    model = tiny.mixture(idle=(1,), empty_calls=empty_calls)
    original = copy.deepcopy(model)
    report = quiet(model, **setting, calibration=tiny.tokens())
    for line in report.compressed:
        idle = ".experts.1." in line.name
        assert ("no calibration input" in line.note) == idle, line
        assert (line.rows == 0) == idle and (line.method == method) == idle
    nearest = copy.deepcopy(original)
    quiet(nearest, **setting, calibration=tiny.tokens(), method=method)
    for name in ("up", "down"):
        mine, other = (m.get_submodule(f"blocks.0.experts.1.{name}") for m in (model, nearest))
        assert torch.equal(mine.dequantize(), other.dequantize())


def test_experts_see_their_own_tokens() -> None:
    report = quiet(tiny.mixture(idle=()), calibration=tiny.tokens(1, 30))
    assert {line.rows for line in report.compressed if ".experts." in line.name} == {10}
    assert {line.rows for line in report.compressed if ".mix" in line.name} == {30}


def test_experts_that_get_other_tokens_once_compressed() -> None:
    """A small change of a token sends it elsewhere, so the original model's tokens do not pair with the compressed."""
    original = tiny.mixture(idle=(), by_content=True)
    model = copy.deepcopy(original)
    report = quiet(model, calibration=tiny.tokens())
    names = [f"blocks.0.experts.{i}.up" for i in range(3)]
    before, after = inputs_of(original, names, tiny.tokens()), inputs_of(model, names, tiny.tokens())
    assert any(len(before[n]) != len(after[n]) for n in names)  # or this test shows nothing
    for name in names:
        w, x = original.get_submodule(name).weight.detach().double(), after[name].double()
        line = layer(report, name)
        assert line.rows == len(x)
        wrong = x @ (model.get_submodule(name).dequantize().double() - w).T
        assert line.error_after == pytest.approx(float(wrong.norm() / (x @ w.T).norm()), rel=1e-3)
        assert line.error_after < line.error_before


@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
def test_methods_that_only_prune_leave_linears(method: str) -> None:
    model = tiny.llama()
    original = copy.deepcopy(model)
    report = quiet(model, method=method, calibration=tiny.tokens())
    assert not report.compressed
    for name, module in linears(model).items():
        assert type(module) is nn.Linear
        if name != "lm_head":
            assert max_nonzeros_per_quad(module.weight) <= 2
            assert layer(report, name).status == "pruned"
            if method != "sparsegpt":
                kept = module.weight != 0
                assert torch.equal(module.weight[kept], original.get_submodule(name).weight[kept])


# -------------------------------------------------------------------------------------------------------- the report


def test_the_report_prints_and_saves(tmp_path: Path) -> None:
    model = tiny.llama()
    report = quiet(model, calibration=tiny.tokens(), skip="o_proj")
    text = str(report)
    for name in linears(model):
        assert name in text
    assert "12 of 16" in text and "output head" in text and "skip=" in text
    report.save(tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text())
    assert [line["name"] for line in saved["layers"]] == [line.name for line in report.layers]
    assert saved["settings"]["scheme"]["num_bits"] == 4
    packed = [model.get_submodule(line.name).packed for line in report.compressed]
    # Scales have the precision of float16, and are counted so; this float32 model holds them in 32 bits.
    bits = sum(8 * (p.qweight.numel() + p.meta.numel()) + 16 * p.scales.numel() for p in packed)
    assert report.bits_per_weight == pytest.approx(bits / sum(p.out_features * p.in_features for p in packed))


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    patch_model(tiny.llama(), calibration=tiny.tokens(), progress=False)
    out = capsys.readouterr()
    assert not out.out and not out.err
    patch_model(tiny.llama(), calibration=tiny.tokens())
    out = capsys.readouterr()
    assert not out.out and "memory needed" in out.err and "GB" in out.err and "2/2" in out.err


# ------------------------------------------------------------------------------------------------ non-finite numbers


def broken_norm(model: nn.Module, value: float) -> str:
    """From the attention of block 1 on, activations are not finite."""
    tiny.blocks_of(model)[1].input_layernorm.weight.data[3] = value
    return "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
def test_activations_that_are_not_finite_name_the_layer_and_stop(value: float, dtype: torch.dtype) -> None:
    model = tiny.llama(dtype)
    name = broken_norm(model, value)
    with pytest.raises(NonFiniteError, match=name.replace(".", r"\.")):
        quiet(model, calibration=tiny.tokens())
    for module in model.modules():
        assert not module._forward_pre_hooks and "forward" not in vars(module)


def test_activations_that_are_not_finite_fall_back_when_told() -> None:
    model = tiny.llama()
    broken_norm(model, float("nan"))
    report = quiet(model, calibration=tiny.tokens(), on_nonfinite="fallback")
    assert len(report.compressed) == 14
    nearest = tiny.llama()
    quiet(nearest, calibration=tiny.tokens(), method="magnitude+rtn")
    for line in report.compressed:
        broken = ".layers.1." in line.name
        assert ("not finite" in line.note) == broken and (line.method == "magnitude+rtn") == broken
        w = model.get_submodule(line.name).dequantize()
        assert w.isfinite().all() and max_nonzeros_per_quad(w) <= 2
        assert not broken or torch.equal(w, nearest.get_submodule(line.name).dequantize())


def test_one_bad_batch_is_enough() -> None:
    """The token that overflows appears in the last window only."""
    windows = [tiny.tokens().clamp(max=200), torch.full((1, 4), 255)]
    for on_nonfinite in ("raise", "fallback"):
        model = tiny.llama()
        model.model.embed_tokens.weight.data[255] = float("inf")
        if on_nonfinite == "raise":
            with pytest.raises(NonFiniteError, match=r"layers\.0\."):
                quiet(model, calibration=windows)
        else:
            report = quiet(model, calibration=windows, on_nonfinite="fallback")
            assert all("not finite" in line.note for line in report.compressed)


# -------------------------------------------------------------------------------------------- the same, and resumed


@pytest.mark.parametrize("setting", [{}, {"sparsity": None}, {"method": "two-pass"}, {"method": "one-loop"}], ids=str)
def test_the_same_call_gives_the_same_bits(setting: dict[str, Any]) -> None:
    first, second = tiny.llama(), tiny.llama()
    report = quiet(first, **setting, calibration=tiny.tokens())
    torch.manual_seed(99)
    assert quiet(second, **setting, calibration=tiny.tokens()) == report
    assert same_state(first, second)


class Stop(BaseException):
    """Stands for control-C, an out-of-memory error, a lost machine."""


def stop_in_block(model: nn.Module, index: int) -> None:
    def stop(*_: Any) -> None:
        raise Stop

    model.get_submodule(f"model.layers.{index}.mlp.down_proj").register_forward_pre_hook(stop)


RESUMED: list[tuple[torch.dtype, dict[str, Any]]] = [
    (FP32, {}),
    (BF16, {}),
    (FP32, {"sparsity": None}),
    (FP32, {"method": "two-pass"}),
    (BF16, {"method": "wanda"}),
    (FP16, {"bits": 8, "dtype": BF16}),
]


@pytest.mark.parametrize(("dtype", "setting"), RESUMED, ids=str)
def test_an_interrupted_run_resumes_to_the_same_bits(
    tmp_path: Path, dtype: torch.dtype, setting: dict[str, Any]
) -> None:
    run = functools.partial(quiet, **setting, calibration=tiny.tokens())
    expected = tiny.llama(dtype, layers=3)
    report = run(expected)
    for index in (1, 2):
        model = tiny.llama(dtype, layers=3)
        stop_in_block(model, index)
        with pytest.raises(Stop):
            run(model, checkpoint_dir=tmp_path)
        assert len(list(tmp_path.glob("*.safetensors"))) == index
    finished = {f: f.stat().st_mtime_ns for f in tmp_path.glob("*.safetensors")}
    resumed = tiny.llama(dtype, layers=3)
    assert run(resumed, checkpoint_dir=tmp_path) == report
    assert same_state(resumed, expected)
    assert all(f.stat().st_mtime_ns == t for f, t in finished.items())
    again = tiny.llama(dtype, layers=3)
    assert run(again, checkpoint_dir=str(tmp_path)) == report
    assert same_state(again, expected)


def test_sampled_calibration_resumes_to_the_same_bits(tmp_path: Path) -> None:
    run = functools.partial(quiet, num_samples=2, sequence_length=16)
    expected, model, resumed = (tiny.llama() for _ in range(3))
    run(expected)

    def stop(*_: Any) -> None:
        if any(tmp_path.glob("*.safetensors")):  # not while tokens are sampled
            raise Stop

    model.get_submodule("model.layers.1.mlp.down_proj").register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        run(model, checkpoint_dir=tmp_path)
    run(resumed, checkpoint_dir=tmp_path)
    assert same_state(resumed, expected)


def test_an_interrupted_model_is_whole() -> None:
    """Finished blocks are compressed, the others as they were; no stand-in or hook of ours stays behind."""
    model = tiny.llama(layers=3).train()
    stop_in_block(model, 1)
    with pytest.raises(Stop):
        quiet(model, calibration=tiny.tokens())
    assert model.training
    kinds = [{type(m) for m in block.modules() if hasattr(m, "in_features")} for block in tiny.blocks_of(model)]
    assert kinds == [{CompressedLinear}, {nn.Linear}, {nn.Linear}]
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == 1  # the test's own
    assert not any("forward" in vars(m) for m in model.modules())


CHANGES: list[dict[str, Any]] = [
    {"sparsity": None},
    {"bits": 8},
    {"group_size": 32},
    {"method": "one-loop"},
    {"method": "wanda"},
    {"damping": 0.02},
    {"dtype": FP16},
    {"skip": "down_proj"},
    {"only": "down_proj"},
    {"calibration": tiny.tokens(seed=4)},
    {"calibration": tiny.tokens()[:, :31]},
    {"calibration": [tiny.tokens()[:4], tiny.tokens()[4:]]},
    {"calibration": tiny.tokens().T.contiguous()},
    {"on_nonfinite": "fallback"},
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a run, to be left as it is."""
    path = tmp_path_factory.mktemp("finished")
    quiet(tiny.llama(BF16), calibration=tiny.tokens(), checkpoint_dir=path)
    return path


@pytest.mark.parametrize("change", CHANGES, ids=[next(iter(c)) for c in CHANGES])
def test_a_checkpoint_of_other_settings_is_refused(finished: Path, change: dict[str, Any]) -> None:
    files = {f: f.read_bytes() for f in finished.iterdir()}
    model = tiny.llama(BF16)
    before = tiny.snapshot(model)
    with pytest.raises(ValueError, match="another run"):
        quiet(model, **{"calibration": tiny.tokens(), **change}, checkpoint_dir=finished)
    assert tiny.unchanged(model, before)
    assert {f: f.read_bytes() for f in finished.iterdir()} == files


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "model.layers.0.input_layernorm", "model.embed_tokens"])
def test_a_checkpoint_of_another_model_is_refused(finished: Path, name: str) -> None:
    model = tiny.llama(BF16)
    model.get_submodule(name).weight.data.flatten()[5] += 1
    with pytest.raises(ValueError, match="another run"):
        quiet(model, calibration=tiny.tokens(), checkpoint_dir=finished)


def test_a_checkpoint_of_more_layers_is_refused(finished: Path) -> None:
    with pytest.raises(ValueError, match="another run"):
        quiet(tiny.llama(BF16, layers=3), calibration=tiny.tokens(), checkpoint_dir=finished)


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="checkpoint_dir"):
        quiet(tiny.llama(), calibration=tiny.tokens(), checkpoint_dir=tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    quiet(tiny.llama(), calibration=tiny.tokens(), checkpoint_dir=tmp_path)
    damaged = min(tmp_path.glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(ValueError, match=damaged.name):
        quiet(tiny.llama(), calibration=tiny.tokens(), checkpoint_dir=tmp_path)


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_bits(tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}
import tiny, torch
from sparse_marlin import patch_model
torch.set_num_threads(1)
model = tiny.llama(layers=3)
model.model.layers[2].mlp.down_proj.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
patch_model(model, calibration=tiny.tokens(), checkpoint_dir={str(tmp_path)!r}, progress=False)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr.decode()
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    expected, resumed = tiny.llama(layers=3), tiny.llama(layers=3)
    quiet(expected, calibration=tiny.tokens())
    quiet(resumed, calibration=tiny.tokens(), checkpoint_dir=tmp_path)
    assert same_state(resumed, expected)
