"""What the README shows runs as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import saved

from sparse_marlin.checkpoints import native
from sparse_marlin.cli import main
from sparse_marlin.quantization import QUANT_METHOD

README = Path(__file__).parent.parent / "README.md"


def block(language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    saved.llama(max_position_embeddings=40).save_pretrained(tmp_path / "model")
    saved.tokenizer().save_pretrained(tmp_path / "model")
    example, count = re.subn(r"HuggingFaceTB/[\w.-]+", str(tmp_path / "model"), block("python"))
    assert count == 2
    assert len([line for line in example.splitlines() if line]) <= 9
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example, names)
    assert isinstance(names["model"].get_submodule("model.layers.0.mlp.up_proj").scheme.num_bits, int)
    assert "Hello" in capsys.readouterr().out


def test_config_block() -> None:
    quantization = json.loads("{" + block("json") + "}")["quantization_config"]
    assert quantization["quant_method"] == QUANT_METHOD
    assert set(native.read_modules(quantization)) == {"model.layers.0.self_attn.q_proj", "..."}


def test_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    commands = set(re.findall(r"^sparse-marlin (\w+)", README.read_text(encoding="utf-8"), re.MULTILINE))
    assert commands == {"compress", "inspect", "convert", "evaluate", "generate", "bench"}
    for command in commands:
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
    usage = capsys.readouterr().out
    text = re.sub(r"`python bench/[^`]*`", "", README.read_text(encoding="utf-8"))
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) - {"--help"}:
        assert option in usage, option
