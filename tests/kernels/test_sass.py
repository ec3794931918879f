"""What nvcc makes of the kernels, as far as no GPU is needed to see it: no spilled registers, the instructions meant.

The extension is compiled as an installation would, once per architecture, into ``build/sass``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparse_marlin import build

ROOT = Path(__file__).resolve().parents[2]
# Where the multiplications of a kernel's name show up: (sparse, dense) instructions.
MULTIPLY = {"gemm_sm80": ("HMMA.SP", "HMMA"), "gemm_sm90": ("HGMMA.SP", "HGMMA")}
MAX_SPILL_BYTES = 256  # of kernels for sm_90a, outside their main loops

try:
    TOOLCHAIN: build.Toolchain | str = build.find_toolchain()
except build.BuildError as e:
    TOOLCHAIN = str(e)

pytestmark = pytest.mark.skipif(isinstance(TOOLCHAIN, str), reason=str(TOOLCHAIN))


def compile_for(arch: str) -> tuple[Path, str]:
    folder = ROOT / "build" / "sass" / arch
    assert isinstance(TOOLCHAIN, build.Toolchain)
    return folder / "_C.so", build.compile_extension(TOOLCHAIN, [arch], folder / "_C.so", folder)


def cuobjdump() -> Path | None:
    assert isinstance(TOOLCHAIN, build.Toolchain)
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]
    candidates = [TOOLCHAIN.nvcc.root / "bin" / "cuobjdump", *(c for p in places for c in p.glob("cu*/bin/cuobjdump"))]
    return next((c for c in candidates if c.exists()), None)


def functions(sass: str) -> Iterator[tuple[str, str]]:
    """Mangled name and instructions of each kernel."""
    parts = re.split(r"^\s*Function : (\S+)$", sass, flags=re.MULTILINE)
    return zip(parts[1::2], parts[2::2], strict=True)


def check_ptxas(log: str, arch: str) -> None:
    compiled = re.findall(
        r"Compiling entry function '(\S+)' for 'sm_\w+'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers",
        log,
        re.DOTALL,
    )
    assert any("gemm" in name for name, *_ in compiled), f"no kernel was compiled for sm_{arch}"
    spilled = [
        f"{name}: {stores} + {loads} bytes"
        for name, stores, loads, _ in compiled
        if int(stores) + int(loads) > (MAX_SPILL_BYTES if "gemm_sm90" in name else 0)
    ]
    assert not spilled, f"registers spill on sm_{arch}"
    # ptxas serializes wgmma where it cannot prove the registers safe, and says so only here.
    assert "serialized" not in log


def check_sass(sass: str, arch: str) -> None:
    checked = 0
    for name, code in functions(sass):
        if "gemm_sm90" in name and arch != "90a":  # only a trap
            assert len(re.findall(r"/\*[0-9a-f]{4}\*/", code)) < 64
            continue
        # A kernel for sm_90a may look up its work in local memory before and after its main loop, never in it.
        multiplications = [m.start() for m in re.finditer(r"\bHGMMA\b", code)]
        loop = code[multiplications[0] : multiplications[-1]] if multiplications else code
        assert not re.search(r"\b(LDL|STL)\b", loop), f"{name} keeps something in local memory"
        for kernel, (sparse, dense) in MULTIPLY.items():
            if kernel in name:
                checked += 1
                is_sparse = re.search(rf"\b{re.escape(sparse)}\b", code) is not None
                assert is_sparse == ("SparseWeights" in name), f"{name}: {sparse} is {'' if is_sparse else 'not '}there"
                assert re.search(rf"\b{dense}\b", code), f"{name} has no {dense}"
    assert checked, "no kernel found in the SASS"


@pytest.mark.parametrize("arch", build.DEFAULT_ARCHS)
def test_kernels(arch: str) -> None:
    binary, log = compile_for(arch)
    check_ptxas(log, arch)
    tool = cuobjdump()
    if tool is None:
        pytest.skip("no spills, but no cuobjdump either: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    env = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}"}  # it calls nvdisasm
    done = subprocess.run([tool, "--dump-sass", binary], env=env, capture_output=True, text=True, check=True)
    check_sass(done.stdout, arch)
