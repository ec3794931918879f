"""Makes the modules of bench/ importable, as they are for each other."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import pytest
import torch
from fakes import FakeCuda, FakeEvent, FakeGraph


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()

    def new_pool() -> int:
        cuda.pools += 1
        return cuda.pools

    def empty_cache() -> None:
        cuda.emptied += 1

    @contextlib.contextmanager
    def nothing(_: object) -> Iterator[None]:
        yield

    replacements: dict[str, Callable[..., Any]] = {
        "Event": lambda enable_timing: FakeEvent(cuda),
        "CUDAGraph": lambda: FakeGraph(cuda),
        "graph_pool_handle": new_pool,
        "empty_cache": empty_cache,
        "synchronize": lambda device: None,
        "device": nothing,
        "stream": nothing,
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return cuda


@pytest.fixture
def small_neox(tmp_path: Path) -> Path:
    """Directory of a GPT-NeoX with one block, whose tokenizer and vocabulary are its own."""
    import train

    from sparse_marlin.samples import sample_text

    directory = tmp_path / "small-neox"
    setting = train.Setting(vocabulary=300, layers=1, width=64, heads=2, window=16, batch=2, steps=1)
    train.train(sample_text()[:60_000], directory, setting)
    return directory
