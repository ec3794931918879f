"""Channel permutation: the model computes what it did, and the order is better for masks."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from sparse_marlin import CompressedLinear, patch_model
from sparse_marlin.compression import NonFiniteError, Report, permutation, refit
from sparse_marlin.compression.permutation import Fold, best_quads, choose, kept, permute_channels
from sparse_marlin.compression.refit import Refit
from sparse_marlin.compression.solve import magnitude_mask
from sparse_marlin.compression.store import Store
from sparse_marlin.compression.targets import choose_targets, decoder_blocks
from sparse_marlin.scheme import Scheme

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
quiet = functools.partial(patch_model, progress=False, calibration=tiny.tokens(), permute=True)


class Mlp(nn.Module):
    """With gate, and if asked for a norm between its halves."""

    def __init__(self, width: int = 64, inner: int = 96, norm: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner) for _ in range(2))
        self.down_proj = nn.Linear(inner, width)
        self.norm = nn.LayerNorm(inner) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.norm(torch.relu(self.gate_proj(x)) * self.up_proj(x)))


class Block(nn.Module):
    """A residual MLP, or three of which each token takes one."""

    def __init__(self, mlps: int = 1, norm: bool = False) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp(norm=norm) for _ in range(mlps))

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.flatten(0, -2)
        out = torch.zeros_like(x)
        for i, mlp in enumerate(self.experts):
            rows = (torch.arange(len(x)) % len(self.experts) == i).nonzero().squeeze(1)
            out[rows] = mlp(x[rows])
        return hidden_states + out.view_as(hidden_states)


def experts() -> tiny.PlainModel:
    torch.manual_seed(7)
    return tiny.PlainModel([Block(mlps=3) for _ in range(2)]).eval()


def with_inner_norm() -> tiny.PlainModel:
    torch.manual_seed(7)
    model = tiny.PlainModel([Block(norm=i == 0) for i in range(2)]).eval()
    nn.init.uniform_(model.blocks[0].experts[0].norm.weight)
    return model


def llama_of_w() -> tiny.LlamaForCausalLM:
    """With the names of Meta's own code."""
    model = tiny.llama()
    for block in model.model.layers:
        attention, block.mlp = block.self_attn, Gated(block.mlp)
        for letter in "qkvo":
            setattr(attention, f"w{letter}", getattr(attention, f"{letter}_proj"))
            delattr(attention, f"{letter}_proj")
        attention.forward = functools.partial(_attention_of_w, attention)
    return model


class Gated(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = mlp.gate_proj, mlp.down_proj, mlp.up_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


def _attention_of_w(attention: nn.Module, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Without positions, which do not matter here."""
    x = hidden_states
    q, k, v = (
        getattr(attention, f"w{letter}")(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for letter in "qkv"
    )
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attention.wo(out.transpose(1, 2).flatten(2)), None


class Routed(nn.Module):
    """Two experts; the second, with a scale for each channel inside, takes the tokens whose first channel is large."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Mlp() for _ in range(2))
        self.scale = nn.Parameter(torch.rand(96) + 0.5)

    def forward(self, hidden_states: Tensor) -> Tensor:
        rare = hidden_states[..., 0] > 2.2
        out = torch.empty_like(hidden_states)
        for rows, mlp, scale in zip((~rare, rare), self.experts, (1, self.scale), strict=True):
            if rows.any():
                x = hidden_states[rows]
                out[rows] = x + mlp.down_proj(scale * torch.relu(mlp.gate_proj(x)) * mlp.up_proj(x))
        return out


def permute(model: nn.Module, checkpoints: Path | None = None, batch: int = 8) -> permutation.Permuted:
    """Only the permutation of what :func:`patch_model` would compress."""
    prefix, blocks = decoder_blocks(model)
    targets, _ = choose_targets(model, prefix, [], [], Scheme(4, 32, "2:4"), None)
    windows = list(tiny.tokens().split(batch))
    store = None if checkpoints is None else Store(checkpoints, {}, model, targets, windows)
    with torch.no_grad():
        return permute_channels(model, prefix, blocks, targets, windows, store, None, False)


def folds_of(model: nn.Module) -> tuple[list[Fold], permutation.Permuted]:
    targets, _ = choose_targets(model, decoder_blocks(model)[0], [], [], Scheme(4, 32, "2:4"), None)
    return permutation.folds_of(model, targets)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    out = model(tiny.tokens())
    return getattr(out, "logits", out).float()


def same_bits(a: nn.Module, b: nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(tiny.same_bits(x[n], y[n]) for n in x)


def error(report: Report, leaf: str) -> float:
    errors = [x.error_after or 0.0 for x in report.compressed if x.name.endswith(leaf)]
    return sum(errors) / len(errors)


# -------------------------------------------------------------------------------------------------------- same function

MODELS: list[tuple[Callable[[], nn.Module], tuple[str, ...], tuple[str, ...]]] = [
    (tiny.llama, ("self_attn.o_proj", "mlp.down_proj"), ("v_proj", "up_proj", "gate_proj")),
    (functools.partial(tiny.llama, BF16), ("self_attn.o_proj", "mlp.down_proj"), ("v_proj", "up_proj", "gate_proj")),
    (functools.partial(tiny.llama, FP16), ("self_attn.o_proj", "mlp.down_proj"), ("v_proj", "up_proj", "gate_proj")),
    (tiny.opt, ("self_attn.out_proj", "fc2"), ("v_proj", "fc1")),
    (tiny.neox, ("attention.dense", "mlp.dense_4h_to_h"), ("query_key_value", "dense_h_to_4h")),
    (tiny.phi3, ("self_attn.o_proj", "mlp.down_proj"), ("qkv_proj", "gate_up_proj")),
    (tiny.qwen_moe, ("self_attn.o_proj",), ("v_proj",)),
    (llama_of_w, ("self_attn.wo", "mlp.w2"), ("wv", "w1", "w3")),
    (experts, tuple(f"experts.{i}.down_proj" for i in range(3)), ("up_proj", "gate_proj")),
]


@pytest.mark.parametrize(("build", "consumers", "producers"), MODELS, ids=range(len(MODELS)))
def test_the_model_computes_what_it_did(
    build: Callable[[], nn.Module], consumers: tuple[str, ...], producers: tuple[str, ...]
) -> None:
    original, model = build(), build()
    found = permute(model)
    assert sorted(found) == sorted(f"{decoder_blocks(model)[0]}.{i}.{c}" for i in range(2) for c in consumers)
    assert not any(found.values())
    dtype = next(model.parameters()).dtype
    torch.testing.assert_close(logits(model), logits(original), rtol=0, atol=2e-5 if dtype == FP32 else 0.1)
    before = original.state_dict()
    for name, t in model.state_dict().items():
        around, _, kind = name.rpartition(".")
        if around in found and kind == "weight":
            assert not torch.equal(t, before[name]) and torch.equal(t.sort(1).values, before[name].sort(1).values)
        elif around.endswith(producers):
            assert not torch.equal(t, before[name]) and torch.equal(t.sort(0).values, before[name].sort(0).values)
        else:
            assert torch.equal(t, before[name])


def test_heads_keep_their_channels_and_queries() -> None:
    original, model = tiny.llama(), tiny.llama()
    permute(model)
    for block, was in zip(model.model.layers, original.model.layers, strict=True):
        attention, before = block.self_attn, was.self_attn
        for head in range(4):  # of 16 channels, two to each of v_proj
            columns = slice(16 * head, 16 * head + 16)
            v = slice(16 * (head // 2), 16 * (head // 2) + 16)
            product = attention.o_proj.weight[:, columns] @ attention.v_proj.weight[v]
            expected = before.o_proj.weight[:, columns] @ before.v_proj.weight[v]
            torch.testing.assert_close(product, expected, rtol=0, atol=1e-5)


def test_layers_left_out_are_permuted_with_the_others() -> None:
    original, model = tiny.llama(), tiny.llama()
    report = quiet(model, skip=("gate_proj", "v_proj"))
    assert {x.name.rpartition(".")[2] for x in report.layers if x.permuted} == {"down_proj", "o_proj"}
    for name in ("mlp.gate_proj", "self_attn.v_proj"):
        weights = [m.model.layers[0].get_submodule(name).weight for m in (model, original)]
        assert not torch.equal(*weights) and torch.equal(*(w.sort(0).values for w in weights))
    other = tiny.llama()
    report = quiet(other, skip=("down_proj", "o_proj"))
    assert not any(x.permuted for x in report.layers)
    unpermuted = tiny.llama()
    quiet(unpermuted, skip=("down_proj", "o_proj"), permute=False)
    assert same_bits(other, unpermuted)


@pytest.mark.parametrize("failing", ["inner norm", "check"])
def test_a_fold_that_changes_the_function_is_undone(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = with_inner_norm if failing == "inner norm" else tiny.llama
    if failing == "check":
        monkeypatch.setattr(permutation, "_unchanged", lambda *_: False)
    original, model = build(), build()
    found = permute(model)
    undone = {name for name, why in found.items() if why}
    assert all(why == "not permuted: that would change what the block puts out" for why in found.values() if why)
    if failing == "check":
        assert len(found) == len(undone) == 4
        assert same_bits(model, original)
    else:
        assert undone == {"blocks.0.experts.0.down_proj"} and len(found) == 2
        assert same_bits(model.blocks[0], original.blocks[0]) and not same_bits(model.blocks[1], original.blocks[1])
    torch.testing.assert_close(logits(model), logits(original), rtol=0, atol=2e-5)
    report = quiet(build())
    assert {x.name: x.note for x in report.compressed if "not permuted" in x.note}.keys() == undone
    assert {x.name for x in report.layers if x.permuted} == found.keys() - undone


def test_what_cannot_be_permuted_is_noted() -> None:
    model = tiny.llama()
    quiet(model, only="up_proj", permute=False)
    shared = nn.Parameter(model.model.layers[0].self_attn.v_proj.weight.data)
    for block in model.model.layers:
        block.self_attn.v_proj.weight = shared
    report = quiet(model, only=("down_proj", "o_proj"))
    for line in report.compressed:
        why = (
            "gate_proj, up_proj cannot be permuted with it"
            if "down" in line.name
            else "others share the memory of v_proj"
        )
        assert line.note.endswith(f"not permuted: {why}") and not line.permuted


@pytest.mark.parametrize("names", ["v_proj", "gate_proj, up_proj", "down_proj", "down_proj, gate_proj"])
def test_layers_that_share_memory_stay(names: str) -> None:
    """By another Parameter of the same memory, or a part of it."""
    model = tiny.llama()
    first, second = model.model.layers
    for name in names.split(", "):
        path = f"self_attn.{name}" if name == "v_proj" else f"mlp.{name}"
        second.get_submodule(path).weight.data = first.get_submodule(path).weight.data[:]
    before = logits(model)
    found = permute(model)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=2e-5)
    consumer = "o_proj" if names == "v_proj" else "down_proj"
    assert {n: why for n, why in found.items() if why} == {
        n: f"not permuted: others share the memory of {names}" for n in found if n.endswith(consumer)
    }
    assert len(found) == 4


def test_memory_of_which_one_layer_has_the_end_and_another_the_beginning() -> None:
    model = tiny.llama()
    memory = torch.randn(4 * 32 * 64)
    values = [block.self_attn.v_proj for block in model.model.layers]
    for at, refused in ((32 * 64, 0), (32 * 64 - 1, 2)):  # a file's weights lie side by side
        for v, begin in zip(values, (0, at), strict=True):
            v.weight.data = memory[begin : begin + 32 * 64].view(32, 64)
        assert len(folds_of(model)[1]) == refused
    before = logits(model)
    assert len([why for why in permute(model).values() if why]) == 2
    torch.testing.assert_close(logits(model), before, rtol=0, atol=2e-5)


def test_memory_that_a_buffer_or_a_later_range_shares() -> None:
    """One range holds two others that are apart; a buffer; a bias of one element for all channels."""
    model = tiny.opt()
    memory = torch.randn(3 * 64 * 64)
    blocks = model.model.decoder.layers
    blocks[0].self_attn.v_proj.weight.data = memory[4096:8192].view(64, 64)
    blocks[1].self_attn.v_proj.weight.data = memory[8192:].view(64, 64)
    model.register_buffer("all", memory, persistent=False)
    assert [n.rpartition(".")[2] for n in folds_of(model)[1]] == ["out_proj"] * 2
    del model.all
    assert not folds_of(model)[1]
    blocks[1].fc1.bias = nn.Parameter(torch.zeros(1).expand(96))
    assert folds_of(model)[1] == {"model.decoder.layers.1.fc2": "not permuted: others share the memory of fc1"}


def test_experts_that_the_first_batch_does_not_reach_are_checked() -> None:
    torch.manual_seed(0)
    model = tiny.PlainModel([Routed()]).eval()
    rare = (model.embed(tiny.tokens())[..., 0] > 2.2).any(1)
    assert not rare[0] and rare.any()
    before = logits(model)
    found = permute(model, batch=1)
    torch.testing.assert_close(logits(model), before, rtol=0, atol=2e-5)
    why = "not permuted: that would change what the block puts out"
    assert found == {f"blocks.0.experts.{i}.down_proj": why for i in range(2)}


@pytest.mark.parametrize("width", [None, 0, -16, 3, 5, 24, 48], ids=str)
def test_sizes_of_heads_that_do_not_fit(width: int | None) -> None:
    model = tiny.llama(layers=1)
    model.model.layers[0].self_attn.head_dim = width
    folds, notes = folds_of(model)
    assert [f.consumer for f in folds] == ["model.layers.0.mlp.down_proj"]
    assert notes == {"model.layers.0.self_attn.o_proj": "not permuted: v_proj cannot be permuted with it"}


@pytest.mark.parametrize("rows", [191, 193, 63, 64, 96])
@pytest.mark.parametrize("name", ["qkv_proj", "query_key_value"])
def test_layers_of_queries_keys_and_values_that_do_not_fit(name: str, rows: int) -> None:
    model = tiny.llama(layers=1, head_dim=16)
    attention = model.model.layers[0].self_attn
    del attention.v_proj
    setattr(attention, name, nn.Linear(64, rows))
    attention.head_dim = 16
    folds, notes = folds_of(model)
    fits = rows == 96  # one key/value head
    assert ("model.layers.0.self_attn.o_proj" in {f.consumer for f in folds}) == fits != bool(notes)


# ------------------------------------------------------------------------------------------------------------ the order


def naive_kept(scores: Tensor, quads: Tensor) -> float:
    """Of scores [width, rows]."""
    return float(sum(scores[q].sort(0).values[2:].double().sum() for q in quads))


@pytest.mark.parametrize("seed", range(20))
def test_two_quads_make_their_best_swap(seed: int) -> None:
    scores = torch.rand(8, 5, generator=torch.Generator().manual_seed(seed)).pow(3)
    start = torch.arange(8).view(2, 4)
    swaps = [start.clone() for _ in range(17)]
    for quads, (i, j) in zip(swaps[1:], itertools.product(range(4), range(4)), strict=True):
        quads[0, i], quads[1, j] = start[1, j], start[0, i]
    best = best_quads(scores[None], start[None])
    assert naive_kept(scores, best[0]) == pytest.approx(max(naive_kept(scores, q) for q in swaps))
    assert float(kept(scores[best[0]]).sum()) == pytest.approx(naive_kept(scores, best[0]))


@pytest.mark.parametrize("count", range(1, 10))
def test_everyone_meets_everyone_once(count: int) -> None:
    rounds = [(left.tolist(), right.tolist()) for left, right in permutation._rounds(count, torch.device("cpu"))]
    pairs = [frozenset(p) for left, right in rounds for p in zip(left, right, strict=True)]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
    assert all(len(set(left + right)) == 2 * (count // 2) for left, right in rounds)


@pytest.mark.parametrize(("heads", "width", "rows"), [(1, 4, 7), (1, 12, 1), (3, 16, 20), (2, 64, 33), (1, 256, 64)])
def test_the_search_never_makes_it_worse(heads: int, width: int, rows: int) -> None:
    scores = torch.randn(heads, width, rows).pow(4)
    scores[0, :2] = 0
    start = torch.rand(heads, width).argsort(1).view(heads, -1, 4)
    found = best_quads(scores, start)
    assert torch.equal(found.flatten(1).sort(1).values, torch.arange(width).expand(heads, -1))
    before, after = (torch.stack([kept(s[q]).sum() for s, q in zip(scores, qs, strict=True)]) for qs in (start, found))
    assert (after >= before).all() and (width < 16 or (after > 1.005 * before).all())
    assert torch.equal(found, best_quads(scores, start))
    apart = torch.cat([best_quads(scores[i : i + 1], start[i : i + 1]) for i in range(heads)])
    assert torch.equal(found, apart)


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_order_is_found(seed: int) -> None:
    """A weight that was 2:4 before its columns were shuffled is 2:4 again, in all rows or nearly."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(256, 64, generator=g)
    weight *= magnitude_mask(weight)
    shuffled = weight[:, torch.randperm(64, generator=g)]
    order = choose(shuffled, torch.ones(64), Fold("", (), 1, 1, 64))
    found = shuffled[:, order[0]]

    def lost(w: Tensor) -> float:
        return float((w * ~magnitude_mask(w)).square().sum() / w.square().sum())

    assert lost(shuffled) > 0.03 and lost(found) < 0.5 * lost(shuffled)


def test_a_weight_that_is_2_4_already_stays() -> None:
    weight = torch.randn(64, 96)
    weight *= magnitude_mask(weight)
    assert torch.equal(choose(weight, torch.rand(96), Fold("", (), 1, 1, 96))[0], torch.arange(96))


@pytest.mark.parametrize("rows", [50, 5000])
def test_channels_of_a_head_move_together(rows: int) -> None:
    """One order for all queries that share values, and another for each key/value head."""
    fold = Fold("", (), 2, 3, 16)
    weight, moment = torch.randn(rows, 96), torch.rand(96, dtype=torch.float64)
    order = choose(weight, moment, fold)
    columns = fold.columns(order)
    assert torch.equal(columns.view(2, 3, 16) % 16, order.unsqueeze(1).expand(2, 3, 16))
    assert torch.equal(columns.view(6, 16) // 16, torch.arange(6).unsqueeze(1).expand(6, 16))
    assert not torch.equal(order[0], order[1])
    score = weight.square() * moment
    before, after = (float((s * magnitude_mask(s)).sum()) for s in (score, score[:, columns]))
    assert after > 1.005 * before


# --------------------------------------------------------------------------------------------------------- whole models


@pytest.mark.parametrize("method", ["two-pass", "wanda+rtn"])
def test_less_is_lost(method: str) -> None:
    """With methods that aim at the same layers either way; ``one-shot`` also makes up for what comes before them."""
    plain, permuted = (quiet(tiny.opt(), method=method, permute=p) for p in (False, True))
    for leaf in ("fc2", "out_proj"):
        assert error(permuted, leaf) < 0.97 * error(plain, leaf)
    assert permuted.settings["permute"] and not plain.settings["permute"]


OPTIONS: list[dict[str, Any]] = [
    {"device": "cpu", "on_nonfinite": "fallback"},
    {"method": "sparsegpt"},
    {"refit": True, "adapter_rank": 8},
    {"sparsity": "auto", "target_bits": 3.9},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_with_other_options_again_and_resumed(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refit, "SETTING", Refit(steps=4, tokens=128))
    original, first, again = (tiny.llama() for _ in range(3))
    report = quiet(first, **options)
    names = {f"model.layers.{i}.{x}" for i in range(2) for x in ("self_attn.o_proj", "mlp.down_proj")}
    assert {x.name for x in report.layers if x.permuted} == names
    relative = (logits(first) - logits(original)).norm() / logits(original).norm()
    assert relative < 1.2  # random weights: a wrong order would be another model
    quiet(again, checkpoint_dir=tmp_path, **options)
    assert same_bits(first, again)
    for file in tmp_path.rglob("*00001.safetensors"):
        file.unlink()
    resumed = tiny.llama()
    assert quiet(resumed, checkpoint_dir=tmp_path, **options) == report
    assert same_bits(first, resumed)
    with pytest.raises(ValueError, match="another run"):
        quiet(tiny.llama(), checkpoint_dir=tmp_path, **{**options, "permute": False})


def test_a_mapping_of_sparsities() -> None:
    model = tiny.llama()
    prefix, _ = decoder_blocks(model)
    targets, _ = choose_targets(model, prefix, [], [], Scheme(4, 32, "2:4"), None)
    mapping = {t.name: None if t.name.endswith(("0.mlp.down_proj", "v_proj")) else "2:4" for t in targets}
    report = quiet(model, mapping)
    names = [x.name for x in report.layers if x.permuted]
    assert sorted(x.rpartition(".")[2] for x in names) == ["down_proj", "o_proj", "o_proj"]
    assert "model.layers.1.mlp.down_proj" in names  # the other one is dense


def stop_at(line: int, run: Callable[[], object]) -> int:
    """Raises KeyboardInterrupt before a line of those that write, of all that are executed; returns their number."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != permutation.__file__ or frame.f_code.co_name not in (
            "_apply",
            "_undo",
            "_write",
        ):
            return None
        if event == "line":
            count += 1
            if count == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(tracing)
    return count


@pytest.mark.parametrize("check", [True, False], ids=["fine", "undone"])
def test_interrupted_before_any_line(check: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model computes what it did, and the next run ends as one that was not stopped."""
    monkeypatch.setattr(permutation, "_MEETINGS", 4)
    unchecked = permutation._unchanged
    monkeypatch.setattr(permutation, "_unchanged", lambda *args: check and unchecked(*args))
    original, expected = experts(), experts()
    lines = stop_at(0, lambda: permute(expected, tmp_path / "whole"))
    assert lines > 100 and same_bits(expected, original) != check
    for line in range(1, lines + 1, 5):
        model, resumed = experts(), experts()
        checkpoints = tmp_path / str(line)
        with pytest.raises(KeyboardInterrupt):
            stop_at(line, functools.partial(permute, model, checkpoints))
        torch.testing.assert_close(logits(model), logits(original), rtol=0, atol=2e-5)
        permute(resumed, checkpoints)
        assert same_bits(resumed, expected)


def test_interrupted_while_it_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "_MEETINGS", 4)
    original = experts()
    permute(experts(), tmp_path)
    lines = stop_at(0, lambda: permute(experts(), tmp_path))
    for line in range(1, lines + 1, 5):
        model = experts()
        with pytest.raises(KeyboardInterrupt):
            stop_at(line, functools.partial(permute, model, tmp_path))
        torch.testing.assert_close(logits(model), logits(original), rtol=0, atol=2e-5)


def test_interrupted_while_a_fold_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    original, model = tiny.llama(), tiny.llama()

    def stop(*_: Any) -> bool:
        assert not same_bits(model, original)
        raise KeyboardInterrupt

    monkeypatch.setattr(permutation, "_unchanged", stop)
    with pytest.raises(KeyboardInterrupt):
        quiet(model)
    assert same_bits(model, original)


def test_a_finished_permutation_is_not_searched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tiny.llama(), tiny.llama()
    quiet(first, checkpoint_dir=tmp_path)
    monkeypatch.setattr(permutation, "choose", lambda *_: pytest.fail("searched"))
    monkeypatch.setattr(permutation, "capture", lambda *_: pytest.fail("ran the model"))
    quiet(second, checkpoint_dir=tmp_path)
    assert same_bits(first, second)


def test_damaged_orders(tmp_path: Path) -> None:
    quiet(tiny.llama(), checkpoint_dir=tmp_path)
    model = tiny.llama()
    before = tiny.snapshot(model)
    file = tmp_path / "permutation-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-200] + bytes(200))
    with pytest.raises(ValueError, match=r"permutation-00001.* is damaged .*no order"):
        quiet(model, checkpoint_dir=tmp_path)
    assert tiny.unchanged(model, before)


def test_inputs_that_are_not_finite() -> None:
    model = tiny.llama()
    model.model.layers[1].post_attention_layernorm.weight.data[3] = float("nan")
    report = quiet(model, on_nonfinite="fallback")
    lines = {x.name.removeprefix("model.layers."): x for x in report.compressed}
    assert [n for n, x in lines.items() if x.permuted] == ["0.self_attn.o_proj", "0.mlp.down_proj"]
    assert lines["1.mlp.down_proj"].note.endswith("not permuted: inputs not finite")
    assert lines["1.self_attn.o_proj"].note.endswith("not permuted: the block's output is not finite")
    model = tiny.llama()
    model.model.layers[1].post_attention_layernorm.weight.data[3] = float("nan")
    with pytest.raises(NonFiniteError):
        quiet(model)


def test_an_expert_that_saw_no_token() -> None:
    model = experts()
    for block in model.blocks:
        block.forward = functools.partial(_first_two, block)
    report = quiet(model)
    lines = [x for x in report.compressed if "down" in x.name]
    assert [x.permuted for x in lines] == [True, True, False] * 2
    assert all(x.permuted or x.note.endswith("not permuted: saw no calibration input") for x in lines)


def _first_two(block: Block, hidden_states: Tensor) -> Tensor:
    return hidden_states + block.experts[0](hidden_states) + block.experts[1](hidden_states)


@pytest.mark.parametrize("value", ["yes", 1, 0, None], ids=str)
def test_other_values_are_refused(value: Any) -> None:
    model = tiny.llama()
    before = tiny.snapshot(model)
    with pytest.raises(ValueError, match="permute must be True or False"):
        quiet(model, permute=value)
    assert tiny.unchanged(model, before)


@pytest.mark.parametrize("mapping", [False, True])
def test_without_2_4_there_is_nothing_to_permute(mapping: bool) -> None:
    model = tiny.llama()
    before = tiny.snapshot(model)
    targets, _ = choose_targets(model, decoder_blocks(model)[0], [], [], Scheme(4, 32, None), None)
    with pytest.raises(ValueError, match=r"permute=True .* no layer gets one"):
        quiet(model, dict.fromkeys(t.name for t in targets) if mapping else None)
    assert tiny.unchanged(model, before)


def test_off_by_default() -> None:
    models = tiny.llama(), tiny.llama()
    report = patch_model(models[0], calibration=tiny.tokens(), progress=False)
    quiet(models[1], permute=False)
    assert same_bits(*models) and not any(x.permuted for x in report.layers)
    assert any(isinstance(m, CompressedLinear) for m in models[0].modules())
