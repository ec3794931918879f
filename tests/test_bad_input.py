"""Input that cannot work: refused with a text that helps, before anything is touched."""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from sparse_marlin import CompressedLinear, Scheme, compress, patch_model
from sparse_marlin.compression import Hessian

quiet = functools.partial(patch_model, progress=False)


def refused(model: nn.Module, match: str, error: type[Exception] = ValueError, **arguments: Any) -> str:
    """Calls patch_model, which must raise and leave the model as it was; returns the message."""
    before = tiny.snapshot(model)
    state = torch.get_rng_state()
    with pytest.raises(error, match=match) as raised:
        quiet(model, **{"calibration": tiny.tokens(), **arguments})
    assert tiny.unchanged(model, before)
    assert torch.equal(torch.get_rng_state(), state)
    return str(raised.value)


# -------------------------------------------------------------------------------------------------------- settings

BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"sparsity": "4:8"}, "sparsity must be one of None, 2:4, got '4:8'"),
    ({"sparsity": "1:2"}, "sparsity"),
    ({"sparsity": 0.5}, "sparsity"),
    ({"sparsity": True}, "sparsity"),
    ({"sparsity": ""}, "sparsity"),
    ({"bits": 3}, "bits must be one of 4, 8, got 3"),
    ({"bits": 16}, "bits"),
    ({"bits": 4.0}, "bits"),
    ({"bits": "4"}, "bits"),
    ({"bits": True}, "bits"),
    ({"group_size": 0}, "group_size must be one of -1, 32, 64, 128, got 0"),
    ({"group_size": 48}, "group_size"),
    ({"group_size": 256}, "group_size"),
    ({"group_size": None}, "group_size"),
    ({"group_size": "128"}, "group_size"),
    ({"method": "awq"}, "method must be one of auto, .*two-pass.*got 'awq'"),
    ({"method": "gptq"}, "method.*2:4"),
    ({"sparsity": None, "method": "two-pass"}, "method.*gptq.*None"),
    ({"sparsity": None, "method": "sparsegpt"}, "method"),
    ({"method": ""}, "method"),
    ({"method": None}, "method"),
    ({"dtype": torch.float64}, "dtype"),
    ({"dtype": torch.int8}, "dtype"),
    ({"dtype": "float16"}, "dtype"),
    ({"damping": -0.01}, "damping"),
    ({"damping": float("nan")}, "damping"),
    ({"damping": float("inf")}, "damping"),
    ({"damping": -float("inf")}, "damping"),
]
each_bad_setting = pytest.mark.parametrize(("setting", "match"), BAD_SETTINGS, ids=[str(s) for s, _ in BAD_SETTINGS])


@each_bad_setting
def test_patch_model_refuses_settings(setting: dict[str, Any], match: str) -> None:
    refused(tiny.llama(), match, **setting)


@each_bad_setting
def test_compress_refuses_settings(setting: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        compress(nn.Linear(128, 16), calibration=torch.randn(300, 128), **setting)


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be 'raise' or 'fallback', got 'ignore'"),
        ({"on_nonfinite": None}, "on_nonfinite"),
        ({"num_samples": 0}, "num_samples.*0"),
        ({"num_samples": -1}, "num_samples"),
        ({"sequence_length": 0}, "sequence_length"),
        ({"sequence_length": 1}, "sequence_length"),
    ],
    ids=str,
)
def test_patch_model_refuses_settings_of_its_own(setting: dict[str, Any], match: str) -> None:
    refused(tiny.llama(), match, **setting)
    refused(tiny.llama(), match, **setting, calibration=None)


def test_an_unknown_argument_is_refused() -> None:
    refused(tiny.llama(), "groupsize", TypeError, groupsize=128)


@pytest.mark.parametrize("method", ["one-shot", "two-pass", "one-loop", "wanda+rtn"])
def test_methods_that_need_calibration_say_so(method: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(method)}.*needs calibration"):
        compress(nn.Linear(128, 16), method=method)
    with pytest.raises(ValueError, match=r"gptq.*needs calibration"):
        compress(nn.Linear(128, 16), None, method="gptq")


@pytest.mark.parametrize("method", ["sparsegpt", "wanda", "magnitude"])
def test_compress_refuses_methods_that_only_prune(method: str) -> None:
    with pytest.raises(ValueError, match="method"):
        compress(nn.Linear(128, 16), method=method, calibration=torch.randn(300, 128))


# ---------------------------------------------------------------------------------------------------- not a linear


@pytest.mark.parametrize(
    "thing",
    [
        nn.Conv2d(4, 8, 3),
        nn.Conv1d(4, 8, 1),
        nn.Embedding(16, 64),
        nn.Bilinear(4, 4, 4),
        nn.LayerNorm(64),
        nn.Sequential(nn.Linear(64, 64)),
        nn.Parameter(torch.zeros(64, 64)),
        torch.zeros(64, 64),
        None,
        "model.layers.0.mlp.up_proj",
        tiny.gpt2().transformer.h[0].mlp.c_fc,
    ],
    ids=lambda t: type(t).__name__,
)
def test_compress_takes_linears_only(thing: Any) -> None:
    with pytest.raises(TypeError, match=f"nn.Linear, got {type(thing).__name__}"):
        compress(thing)


def test_compress_refuses_what_is_compressed_already() -> None:
    with pytest.raises(TypeError, match="CompressedLinear"):
        compress(compress(nn.Linear(64, 8)))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_compress_refuses_other_dtypes(dtype: torch.dtype) -> None:
    linear = nn.Linear(64, 8)
    linear.weight = nn.Parameter(linear.weight.detach().to(dtype), requires_grad=False)
    with pytest.raises(ValueError, match=f"float16, bfloat16 or float32, got {dtype}"):
        compress(linear)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 126, 4098])
def test_compress_refuses_widths_that_are_no_multiple_of_four(k: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 4.*{k}.*sparsity=None"):
        compress(nn.Linear(k, 8))
    assert isinstance(compress(nn.Linear(k, 8), None), CompressedLinear)


@pytest.mark.parametrize(("n", "k"), [(0, 64), (8, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_compress_refuses_empty_weights(n: int, k: int) -> None:
    with pytest.raises(ValueError, match="at least one row and one column"):
        compress(nn.Linear(k, n))


def test_compress_refuses_the_meta_device() -> None:
    with pytest.raises(ValueError, match="meta"):
        compress(nn.Linear(64, 8, device="meta"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    linear = nn.Linear(64, 8)
    linear.weight.data[3, 5] = bad
    for calibration in (None, torch.randn(100, 64)):
        with pytest.raises(ValueError, match="finite"):
            compress(linear, calibration=calibration)
    model = tiny.llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = bad
    refused(model, r"model\.layers\.1\.mlp\.up_proj")


# ------------------------------------------------------------------------------------------- calibration of a layer


@pytest.mark.parametrize(
    ("calibration", "error", "match"),
    [
        (torch.zeros(0, 128), ValueError, "empty"),
        ([], ValueError, "empty"),
        (iter([]), ValueError, "empty"),
        ([torch.zeros(0, 128), torch.zeros(2, 0, 128)], ValueError, "empty"),
        (Hessian(128), ValueError, "empty"),
        (torch.zeros(5, 64), ValueError, r"in_features = 128, got \[5, 64\]"),
        (torch.zeros(128, 5), ValueError, "in_features = 128"),
        (torch.zeros(64), ValueError, "in_features = 128"),
        (torch.tensor(1.0), ValueError, "in_features = 128"),
        ([torch.zeros(5, 128), torch.zeros(5, 127)], ValueError, "in_features = 128"),
        (Hessian(64), ValueError, r"128, 128.*64, 64"),
        (["text"], TypeError, "str"),
        ("text", TypeError, "str"),
        ([[1.0, 2.0]], TypeError, "list"),
        (5, TypeError, "int"),
        ({"x": torch.zeros(5, 128)}, TypeError, "str|dict"),  # iterates over its keys
        (torch.zeros(5, 128, dtype=torch.int64), (TypeError, ValueError), "int64"),
        (torch.zeros(5, 128, dtype=torch.bool), (TypeError, ValueError), "bool"),
        (torch.zeros(5, 128, dtype=torch.complex64), (TypeError, ValueError), "complex"),
    ],
    ids=range(19),
)
def test_compress_refuses_calibration(calibration: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        compress(nn.Linear(128, 16), calibration=calibration)


# -------------------------------------------------------------------------------------------- calibration of a model


class NoTokens:
    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": []}


class OtherVocabulary:
    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1000] * len(text)}


BAD_CALIBRATION: list[tuple[str, Any, str]] = [
    ("no windows", [], "empty"),
    ("no text", iter(()), "empty"),
    ("an empty batch", torch.zeros(0, 8, dtype=torch.int64), "no token"),
    ("empty windows", torch.zeros(4, 0, dtype=torch.int64), "no token"),
    ("an empty list", [[]], "integer|no token"),
    ("one empty window", [tiny.tokens(), torch.zeros(1, 0, dtype=torch.int64)], "no token"),
    ("a token beyond the vocabulary", torch.tensor([[1, 2, 256]]), r"0\.\.255, got 1\.\.256"),
    ("a token far beyond", [[1, 2], [3, 10**12]], r"0\.\.255"),
    ("a negative token", torch.tensor([[1, -1, 2]]), r"0\.\.255, got -1"),
    ("the label for ignored tokens", torch.tensor([[1, -100, 2]]), r"-100"),
    ("texts without tokenizer", ["some text"], "tokenizer="),
    ("a text without tokenizer", "some text", "tokenizer="),
    ("rows of text without tokenizer", [{"text": "some text"}], "tokenizer="),
    ("floats", torch.randn(2, 8), "integers.*float32"),
    ("booleans", torch.ones(2, 8, dtype=torch.bool), "integers.*bool"),
    ("hidden states", torch.zeros(2, 8, 64, dtype=torch.int64), r"\[2, 8, 64\]"),
    ("a scalar", torch.tensor(3), "integers"),
    ("a list of numbers", [1.5, 2.5], "integers"),
    ("ragged lists", [[[1, 2], [3]]], "token tensors or texts"),
    ("a row without either", [{"content": "some text"}], "input_ids or text.*content"),
    ("a list of None", [None], "token tensors or texts"),
    ("objects", [object()], "token tensors or texts"),
]


@pytest.mark.parametrize(
    ("calibration", "match"), [c[1:] for c in BAD_CALIBRATION], ids=[c[0] for c in BAD_CALIBRATION]
)
def test_patch_model_refuses_calibration(calibration: Any, match: str) -> None:
    refused(tiny.llama(), match, calibration=calibration)


@pytest.mark.parametrize("calibration", [5, 2.5, object, True], ids=lambda c: type(c).__name__)
def test_patch_model_refuses_what_is_no_data(calibration: Any) -> None:
    refused(tiny.llama(), "calibration must be tokens, texts or a dataset", TypeError, calibration=calibration)


@pytest.mark.parametrize(
    ("tokenizer", "match"),
    [(NoTokens(), "0 tokens"), (OtherVocabulary(), r"0\.\.255.*tokenizer")],
    ids=["none", "other"],
)
def test_a_tokenizer_that_does_not_fit_is_refused(tokenizer: Any, match: str) -> None:
    refused(tiny.llama(), match, calibration=["some text"], tokenizer=tokenizer)


def test_windows_longer_than_the_models_positions_are_refused() -> None:
    """A table of 32 positions has nothing to say about the 33rd token."""
    refused(tiny.opt(), r"32.*33", calibration=tiny.tokens(2, 33))
    quiet(tiny.opt(), calibration=tiny.tokens(2, 32))


def test_sampling_from_a_model_that_cannot_generate_is_refused() -> None:
    refused(tiny.mixture(), "generate.*calibration=", calibration=None)


def test_sampling_from_a_model_that_gives_nan_is_refused() -> None:
    model = tiny.llama()
    model.model.norm.weight.data[0] = float("nan")
    refused(model, "finite|NaN", calibration=None, num_samples=2, sequence_length=8)


# --------------------------------------------------------------------------------------------------------- the model


def test_a_layer_that_two_four_cannot_have_is_named_before_any_work() -> None:
    model = tiny.llama(intermediate_size=98)
    message = refused(model, "multiple of 4")
    for index in range(2):
        assert f"model.layers.{index}.mlp.down_proj" in message
    assert "skip=" in message and "98" in message and "up_proj" not in message
    report = quiet(model, calibration=tiny.tokens(), skip="down_proj")
    assert len(report.compressed) == 12
    dense = tiny.llama(intermediate_size=98)
    assert len(quiet(dense, None, calibration=tiny.tokens()).compressed) == 14


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)),
        nn.ModuleList([nn.LayerNorm(64)]),
        nn.Linear(64, 64),
        nn.Embedding(8, 8),
    ],
    ids=lambda m: type(m).__name__,
)
def test_a_model_without_decoder_blocks_is_refused(model: nn.Module) -> None:
    refused(model, f"{type(model).__name__} has no decoder blocks.*compress")


def test_blocks_of_conv1d_are_refused() -> None:
    """GPT-2 keeps its weights in Conv1D, transposed: nothing here can be swapped."""
    refused(tiny.gpt2(), "nn.Linear")
    refused(tiny.gpt2(), "Conv1D")


@pytest.mark.parametrize("thing", [None, "llama", torch.zeros(4, 4), {"model": 1}], ids=lambda t: type(t).__name__)
def test_what_is_no_model_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match=f"nn.Module.*{type(thing).__name__}"):
        quiet(thing, calibration=tiny.tokens())


def test_a_model_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = tiny.llama()
    with pytest.raises(ValueError, match="meta"):
        quiet(model, calibration=tiny.tokens())


def test_a_model_of_another_dtype_is_refused() -> None:
    refused(tiny.llama(torch.float64), r"model\.layers\.0\.self_attn\.q_proj.*float64")


def test_a_model_that_is_compressed_already_is_refused() -> None:
    model = tiny.llama()
    quiet(model, calibration=tiny.tokens())
    refused(model, "already compressed|no layer to compress")


def test_a_model_that_does_not_run_its_blocks_is_refused() -> None:
    class Lazy(tiny.PlainModel):
        def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
            return self.head(self.blocks[0](hidden_states=self.embed(input_ids)))

    refused(Lazy([tiny.ExpertBlock(64, 2, (), False) for _ in range(2)]), "Lazy.*2 blocks")


# ---------------------------------------------------------------------------------------------------------- patterns


@pytest.mark.parametrize("option", ["skip", "only"])
@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("down_prj", "down_proj"),
        ("model.layers.0.mlp.downproj", "model.layers.0.mlp.down_proj"),
        ("self_attn.qproj", "self_attn.q_proj"),
        ("lm_heads", "lm_head"),
        ("model.layers.7.mlp.up_proj", "model.layers.0.mlp.up_proj"),
    ],
)
def test_a_pattern_that_matches_nothing_names_near_matches(option: str, pattern: str, near: str) -> None:
    message = refused(tiny.llama(), f"{option}=.*{pattern}.*matches no layer", **{option: ["o_proj", pattern]})
    assert near in message


@pytest.mark.parametrize("pattern", ["zzzzzz", "", "*.nothing.*", "["])
def test_a_pattern_near_to_nothing_is_refused(pattern: str) -> None:
    refused(tiny.llama(), "matches no layer", skip=pattern)


def test_patterns_that_leave_nothing_are_refused() -> None:
    refused(tiny.llama(), "no layer", skip="*")
    refused(tiny.llama(), "no layer", only="lm_head")
    refused(tiny.llama(), "no layer", only="up_proj", skip="mlp.*")


@pytest.mark.parametrize("patterns", [5, [5], [None], {"down_proj": 1.0}.values()], ids=str)
def test_patterns_that_are_no_text_are_refused(patterns: Any) -> None:
    refused(tiny.llama(), "skip", (TypeError, ValueError), skip=patterns)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ other things


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "tpu:0"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    refused(tiny.llama(), "", (ValueError, RuntimeError, AssertionError), device=device)  # type: ignore[arg-type]


def test_a_checkpoint_dir_that_is_a_file_is_refused(tmp_path: Any) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    refused(tiny.llama(), "", (ValueError, OSError), checkpoint_dir=file)  # type: ignore[arg-type]
    assert file.read_text() == "mine"


@pytest.mark.parametrize("content", ["", "not json", "[]", "null", '{"format": 999}'])
def test_a_manifest_that_is_not_ours_is_refused(tmp_path: Any, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    refused(tiny.llama(), str(tmp_path), checkpoint_dir=tmp_path)


def test_an_error_leaves_no_log_of_success(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sparse_marlin"), pytest.raises(ValueError):
        compress(nn.Linear(128, 16), method="two-pass")
    assert not [r for r in caplog.records if "rounding to nearest" in r.getMessage()]


def test_scheme_and_layer_agree_about_what_is_possible() -> None:
    for k in (64, 66, 96, 100, 130):
        scheme = Scheme(4, 64).fit(k)
        possible = scheme.why_not(8, k) is None
        try:
            assert isinstance(compress(nn.Linear(k, 8), group_size=64), CompressedLinear)
            assert possible
        except ValueError:
            assert not possible
