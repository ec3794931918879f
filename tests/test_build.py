"""Building the extension: what is found, what is refused and with which words, and that a real build loads."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from sparse_marlin import build
from sparse_marlin.build import BuildError, Nvcc, Toolchain

ROOT = Path(__file__).resolve().parents[1]
NVCC = Nvcc(Path("nvcc"), Path("/cuda"), (13, 0))


def real_toolchain() -> Toolchain | str:
    try:
        return build.find_toolchain()
    except BuildError as e:
        return str(e)


TOOLCHAIN = real_toolchain()
needs_nvcc = pytest.mark.skipif(isinstance(TOOLCHAIN, str), reason=str(TOOLCHAIN))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CXX", "SPARSE_MARLIN_BUILD", "SPARSE_MARLIN_CUDA_ARCHS", "SPARSE_MARLIN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(build, "driver_cuda_version", lambda: None)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{textwrap.dedent(text)}")
    path.chmod(0o755)
    return path


def fake_nvcc(root: Path, release: str) -> Path:
    return script(
        root / "bin" / "nvcc",
        f"""
        case $1 in
          --version) echo "Cuda compilation tools, release {release}, V{release}.1" ;;
          --list-gpu-code) printf 'sm_80\\nsm_86\\nsm_90\\n' ;;
          *) echo "#$ TOP={root}/bin/.." ;;
        esac
        """,
    )


def test_nvcc_of_cuda_home_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvcc(tmp_path / "on path", "12.9")
    fake_nvcc(tmp_path / "home", "13.1")
    monkeypatch.setenv("PATH", f"{tmp_path}/on path/bin:{os.environ['PATH']}")
    assert build.find_nvcc() == Nvcc(tmp_path / "on path/bin/nvcc", tmp_path / "on path", (12, 9))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert build.find_nvcc() == Nvcc(tmp_path / "home/bin/nvcc", tmp_path / "home", (13, 1))


def test_toolkit_of_a_wrapper_is_the_real_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fake_nvcc(tmp_path / "cuda", "13.0")
    script(tmp_path / "bin" / "nvcc", f'exec "{real}" "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    assert build.find_nvcc().root == tmp_path / "cuda"


def test_old_nvcc_on_path_gives_way_to_that_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvcc(tmp_path / "old", "11.8")
    fake_nvcc(tmp_path / "site" / "nvidia" / "cu13", "13.0")
    monkeypatch.setenv("PATH", f"{tmp_path}/old/bin:{os.environ['PATH']}")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert build.find_nvcc().path == tmp_path / "site/nvidia/cu13/bin/nvcc"


def test_no_nvcc_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_nvcc_candidates", lambda: iter(()))
    with pytest.raises(BuildError, match=r"no nvcc.*CUDA_HOME.*nvidia-cuda-nvcc==13"):
        build.find_nvcc()


@pytest.mark.parametrize(
    ("release", "driver", "text"),
    [
        ("12.4", None, "is CUDA 12.4, at least 12.6 is needed"),
        (
            "13.0",
            (12, 8),
            "driver runs programs up to CUDA 12.8: update the driver, or set CUDA_HOME to a CUDA 12 toolkit",
        ),
    ],
)
def test_nvcc_of_the_wrong_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, driver: tuple[int, int] | None, text: str
) -> None:
    fake_nvcc(tmp_path, release)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(build, "driver_cuda_version", lambda: driver)
    with pytest.raises(BuildError, match=re.escape(text)):
        build.find_nvcc()


def test_cuda_home_without_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildError, match=r"bin/nvcc does not run .* set CUDA_HOME"):
        build.find_nvcc()


def test_cxx_too_old_or_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "CXX", str(script(tmp_path / "g++", "echo '#define __GNUC__ 9'; echo '#define __GNUC_MINOR__ 4'"))
    )
    with pytest.raises(BuildError, match=r"version 9\.4, but C\+\+20 needs g\+\+ 11"):
        build.find_cxx()
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler .*install g\+\+"):
        build.find_cxx()


def test_ninja_off_path_is_found_where_pip_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert os.access(build.find_ninja(), os.X_OK)
    monkeypatch.setattr(build.importlib.metadata, "files", lambda _: None)
    with pytest.raises(BuildError, match="pip install ninja"):
        build.find_ninja()


def test_archs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = Nvcc(fake_nvcc(tmp_path, "13.0"), tmp_path, (13, 0))
    assert build.select_archs(nvcc) == ["80", "86", "90a"]  # those of the defaults that this nvcc knows
    monkeypatch.setenv("SPARSE_MARLIN_CUDA_ARCHS", "80; 90a")
    assert build.select_archs(nvcc) == ["80", "90a"]
    for value, text in {
        "": "is empty",
        "hopper": "'hopper' is no CUDA architecture",
        "75": "sm_75 is too old",
        "80;120": "nvcc 13.0 does not know sm_120: set CUDA_HOME to a newer CUDA",
    }.items():
        monkeypatch.setenv("SPARSE_MARLIN_CUDA_ARCHS", value)
        with pytest.raises(BuildError, match=text):
            build.select_archs(nvcc)


def test_unknown_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_MARLIN_BUILD", "yes")
    with pytest.raises(BuildError, match="must be 0"):
        build.mode()


def test_forbidden_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PACKAGE", tmp_path)
    monkeypatch.setenv("SPARSE_MARLIN_BUILD", "0")
    with pytest.raises(BuildError, match="SPARSE_MARLIN_BUILD=0 forbids"):
        build.extension_path()
    (tmp_path / "_C.so").touch()
    assert build.extension_path() == tmp_path / "_C.so"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Builds on first use, with a compiler that only counts how often it was called; returns the log of the calls."""
    package, log = tmp_path / "package", tmp_path / "log"
    (package / "csrc").mkdir(parents=True)
    (package / "csrc" / "kernel.cu").write_text("// one")
    log.touch()
    toolchain = Toolchain(NVCC, "g++", "ninja", Path("/torch"), "2.13.0")

    def compile_extension(_: Toolchain, archs: list[str], output: Path, build_dir: Path) -> str:
        with log.open("a") as f:
            f.write("compiled\n")
        output.write_text(" ".join(archs))
        return ""

    monkeypatch.setattr(build, "PACKAGE", package)
    monkeypatch.setattr(build, "find_toolchain", lambda: toolchain)
    monkeypatch.setattr(build, "gpu_archs", lambda _: ["90a"])
    monkeypatch.setattr(build, "compile_extension", compile_extension)
    monkeypatch.setenv("SPARSE_MARLIN_CACHE", str(tmp_path / "cache"))
    return log


def test_first_use_builds_once_until_a_source_changes(
    cached: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first = build.extension_path()
    assert "building the CUDA kernels for sm_90a" in capfd.readouterr().err
    assert first.read_text() == "90a"
    assert build.extension_path() == first
    assert cached.read_text().count("compiled") == 1
    (build.PACKAGE / "csrc" / "kernel.cu").write_text("// two")
    second = build.extension_path()
    monkeypatch.setattr(build, "gpu_archs", lambda _: ["80"])
    third = build.extension_path()
    assert len({first, second, third}) == cached.read_text().count("compiled") == 3


def test_processes_wait_for_the_one_that_builds(cached: Path) -> None:
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=build.extension_path) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert [w.exitcode for w in workers] == [0] * 4
    assert cached.read_text().count("compiled") == 1


def test_failed_build_leaves_nothing_behind(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise BuildError("ptxas died")

    monkeypatch.setattr(build, "compile_extension", fail)
    with pytest.raises(BuildError, match="ptxas died"):
        build.extension_path()
    assert [p.name for p in build.cache_dir().rglob("*") if p.is_file()] == ["lock"]


PROBE = {
    "probe.cu": """
        #include <cuda_runtime.h>
        __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }
        cudaError_t launch(float* x, int n, cudaStream_t stream) {
          twice<<<1, n, 0, stream>>>(x);
          return cudaGetLastError();
        }
    """,
    "probe.cpp": """
        #include <cuda_runtime.h>
        #include <torch/csrc/stable/library.h>
        #include <torch/csrc/stable/ops.h>
        #include <torch/csrc/stable/tensor.h>
        using torch::stable::Tensor;
        cudaError_t launch(float* x, int n, cudaStream_t stream);
        Tensor twice_cpu(Tensor x) {
          Tensor y = torch::stable::new_empty(x, x.sizes());
          for (int64_t i = 0; i < x.numel(); ++i) {
            static_cast<float*>(y.data_ptr())[i] = 2 * static_cast<const float*>(x.data_ptr())[i];
          }
          return y;
        }
        Tensor twice_cuda(Tensor x) {
          STD_TORCH_CHECK(launch(static_cast<float*>(x.data_ptr()), x.numel(), nullptr) == cudaSuccess, "launch");
          return x;
        }
        STABLE_TORCH_LIBRARY(sparse_marlin_probe, m) { m.def("twice(Tensor x) -> Tensor"); }
        STABLE_TORCH_LIBRARY_IMPL(sparse_marlin_probe, CPU, m) { m.impl("twice", TORCH_BOX(&twice_cpu)); }
        STABLE_TORCH_LIBRARY_IMPL(sparse_marlin_probe, CUDA, m) { m.impl("twice", TORCH_BOX(&twice_cuda)); }
    """,
}


@needs_nvcc
def test_compiled_extension_loads_and_computes(tmp_path: Path) -> None:
    folder = tmp_path / "a b:c"  # neither ninja nor the shell may trip over the path
    folder.mkdir()
    for name, text in PROBE.items():
        (folder / name).write_text(textwrap.dedent(text))
    output = folder / "_C.so"
    log = build.compile_extension(TOOLCHAIN, ["80", "90a"], output, folder, [folder / n for n in PROBE])
    assert re.findall(r"for '(sm_\w+)'", log) == ["sm_80", "sm_90a"]
    code = "import sys, torch; torch.ops.load_library(sys.argv[1]); "
    code += "print(torch.ops.sparse_marlin_probe.twice(torch.tensor([1.0, 2.5])).tolist())"
    done = subprocess.run([sys.executable, "-c", code, str(output)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[2.0, 5.0]", done.stderr


@needs_nvcc
def test_compiler_output_is_in_the_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.cu"
    broken.write_text("__global__ void f() { undeclared(); }")
    with pytest.raises(BuildError, match=r"compiling the CUDA kernels failed \(cuda 1(.|\n)*undeclared"):
        build.compile_extension(TOOLCHAIN, ["80"], tmp_path / "_C.so", tmp_path, [broken])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what pip needs for a build."""
    copy = tmp_path / "checkout"
    for name in (
        "setup.py",
        "pyproject.toml",
        "LICENSE",
        "sparse_marlin/__init__.py",
        "sparse_marlin/build.py",
    ):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for name in ("README.md", "csrc/dense/kernel.cu", "csrc/notes.txt", "build/lib/sparse_marlin/stale.py"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("// text")
    return copy


def pip_wheel(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-build-isolation", "--no-deps", "-w", "out", "."]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=300)


def test_wheel_without_a_toolchain_has_the_sources_and_nothing_stale(checkout: Path, tmp_path: Path) -> None:
    done = pip_wheel(checkout, CUDA_HOME=str(tmp_path / "none"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"installing without CUDA kernels: .*none/bin/nvcc does not run", done.stdout + done.stderr)
    (wheel,) = (checkout / "out").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "sparse_marlin/csrc/dense/kernel.cu" in names
    assert not [n for n in names if "stale" in n or "notes" in n or n.endswith(".so")]


def test_required_build_fails_without_a_toolchain(checkout: Path, tmp_path: Path) -> None:
    done = pip_wheel(checkout, CUDA_HOME=str(tmp_path / "none"), SPARSE_MARLIN_BUILD="1")
    assert done.returncode != 0
    assert "SPARSE_MARLIN_BUILD=1, but" in done.stdout + done.stderr


@needs_nvcc
def test_wheel_with_a_toolchain_has_the_extension(checkout: Path) -> None:
    (checkout / "csrc" / "dense" / "kernel.cu").write_text("__global__ void f(int* x) { *x = 1; }")
    done = pip_wheel(checkout, SPARSE_MARLIN_BUILD="1", SPARSE_MARLIN_CUDA_ARCHS="80")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (checkout / "out").iterdir()
    assert re.search(r"-py3-none-linux_\w+\.whl$", wheel.name)
    assert "sparse_marlin/_C.so" in zipfile.ZipFile(wheel).namelist()
