"""Makes the modules of bench/ importable, as they are for each other."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import libcusparselt
import pytest
import readme
import torch
from fakes import FakeCuda, FakeEvent, FakeGraph

FAKE_SONAME = "libcusparseLt-fake.so.0"


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
        "synchronize": lambda device=None: None,
        "device": nothing,
        "stream": nothing,
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return cuda


@pytest.fixture(scope="session")
def compiled_cusparselt(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    target = tmp_path_factory.mktemp("lib") / "fake.so"
    source = Path(__file__).with_name("cusparselt_fake.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", f"-Wl,-soname,{FAKE_SONAME}", source, "-o", target], check=True
    )
    return ctypes.CDLL(str(target))


@pytest.fixture
def fake_cusparselt(compiled_cusparselt: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """The library as torch would have loaded it: it is found by its name alone."""
    monkeypatch.setattr(libcusparselt, "SONAME", FAKE_SONAME)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0x7700000077))
    libcusparselt.library.cache_clear()
    yield compiled_cusparselt
    libcusparselt.product.cache_clear()
    libcusparselt.library.cache_clear()


@pytest.fixture
def readme_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object], str], None]:
    """Runs a program that fills the READMEs from committed results, and checks that they say so already."""

    def check(fill: Callable[[], object], hint: str) -> None:
        before = {name: getattr(readme, name).read_text(encoding="utf-8") for name in ("README", "OF_BENCHMARKS")}
        for name, text in before.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
            monkeypatch.setattr(readme, name, tmp_path / name)
        assert not fill(), "it ended with an error"
        for name, text in before.items():
            assert (tmp_path / name).read_text(encoding="utf-8") == text, f"run {hint}"

    return check


@pytest.fixture
def small_neox(tmp_path: Path) -> Path:
    """Directory of a GPT-NeoX with one block, whose tokenizer and vocabulary are its own."""
    import train

    from sparse_marlin.samples import sample_text

    directory = tmp_path / "small-neox"
    setting = train.Setting(vocabulary=300, layers=1, width=64, heads=2, window=16, batch=2, steps=1)
    train.train(sample_text()[:60_000], directory, setting)
    return directory
