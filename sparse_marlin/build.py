"""Compiles ``csrc/`` into the extension ``_C.so``: from ``setup.py``, or on first use on a machine that has a GPU.

``setup.py`` loads this file by path, before torch need be installed: it imports the standard library alone.
``python -m sparse_marlin.build`` builds the extension for this machine's GPUs now, or says what is missing.

Environment:

``SPARSE_MARLIN_BUILD``
    ``0`` never compiles, ``1`` makes it an error if the extension cannot be built. Otherwise the CPU path is used then.
``SPARSE_MARLIN_CUDA_ARCHS``
    Architectures to compile for, such as ``80;90a``.
``SPARSE_MARLIN_CACHE``
    Where extensions built on first use are kept (default ``~/.cache/sparse_marlin``).
``CUDA_HOME``, ``CXX``, ``MAX_JOBS``
    The CUDA toolkit, the C++ compiler and the number of parallel compilations, as elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
DEFAULT_ARCHS = ("80", "86", "89", "90a", "120")
DEFAULT_NVCC = Path("/usr/local/cuda/bin/nvcc")
MIN_ARCH = 80  # cp.async, mma.sp and bfloat16 came with it
MIN_NVCC = (12, 6)  # the oldest CUDA for which torch 2.10 is built
MIN_GCC = (11, 0)  # C++20
# The extension uses only LibTorch's stable ABI, as of this version: one binary serves every later torch and Python.
TORCH_TARGET_VERSION = "0x020a000000000000"
SOURCE_SUFFIXES = (".cu", ".cuh", ".cpp", ".h")

NVCC_FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas=-v", "-Xcompiler=-fPIC,-fvisibility=hidden")
CXX_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-DUSE_CUDA")


class BuildError(RuntimeError):
    """The extension cannot be built; the text says why, and what to do about it."""


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler."""

    path: Path
    root: Path  # of the toolkit: has include/
    version: tuple[int, int]


@dataclass(frozen=True)
class Toolchain:
    """Everything that a compilation needs."""

    nvcc: Nvcc
    cxx: str
    ninja: str
    torch: Path  # the installed package: has include/ and lib/
    torch_version: str

    def identity(self) -> str:
        """The versions that a binary depends on."""
        cuda = ".".join(map(str, self.nvcc.version))
        torch = ".".join(self.torch_version.split(".")[:2])
        return f"cuda {cuda}, torch {torch}, {_first_line([self.cxx, '--version'])}"


def find_toolchain() -> Toolchain:
    """Finds and checks nvcc, a C++ compiler, ninja and torch's headers.

    Raises:
        BuildError: if one is missing or too old.
    """
    nvcc = find_nvcc()
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not visible to this build: install torch, then pip install --no-build-isolation")
    return Toolchain(nvcc, find_cxx(), find_ninja(), Path(spec.origin).parent, importlib.metadata.version("torch"))


def find_nvcc() -> Nvcc:
    """The first usable nvcc of CUDA_HOME (which alone counts if it is set), PATH, pip's packages, /usr/local/cuda.

    Raises:
        BuildError: if there is none, or none is new enough.
    """
    refused = []
    for path in _nvcc_candidates():
        try:
            return _check_nvcc(path)
        except BuildError as e:
            refused.append(str(e))
    if refused:
        raise BuildError("; ".join(refused))
    raise BuildError(
        "no nvcc (the CUDA compiler) on this machine: install the CUDA toolkit and set CUDA_HOME, or pip install "
        '"nvidia-cuda-nvcc==13.0.*" "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cccl==13.0.*" "nvidia-nvvm==13.0.*" '
        '"nvidia-cuda-crt==13.0.*"'
    )


def _nvcc_candidates() -> Iterator[Path]:
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home, "bin", "nvcc")
        return
    if on_path := shutil.which("nvcc"):
        yield Path(on_path)
    if (spec := importlib.util.find_spec("nvidia")) is not None:
        for place in spec.submodule_search_locations or ():
            yield from sorted(Path(place).glob("cu*/bin/nvcc"), reverse=True)
    if DEFAULT_NVCC.exists():
        yield DEFAULT_NVCC


def _check_nvcc(path: Path) -> Nvcc:
    try:
        found = re.search(r"release (\d+)\.(\d+)", _output([str(path), "--version"]))
        # nvcc may be a wrapper somewhere else: only the compiler itself knows where its toolkit is.
        top = re.search(r"^#\$ TOP=(.+)$", _output([str(path), "--dryrun", "-E", "-x", "cu", os.devnull]), re.MULTILINE)
    except (OSError, subprocess.SubprocessError) as e:
        raise BuildError(f"{path} does not run ({e}): set CUDA_HOME to a CUDA toolkit") from e
    if found is None or top is None:
        raise BuildError(f"{path} does not answer as nvcc does: set CUDA_HOME to a CUDA toolkit")
    version = int(found[1]), int(found[2])
    if version < MIN_NVCC:
        raise BuildError(
            f"{path} is CUDA {_dotted(version)}, at least {_dotted(MIN_NVCC)} is needed: set CUDA_HOME to one"
        )
    # That torch was built with another CUDA does not matter, since ours is linked statically; the driver does.
    driver = driver_cuda_version()
    if driver is not None and driver[0] < version[0]:
        raise BuildError(
            f"{path} is CUDA {_dotted(version)}, but this machine's driver runs programs up to CUDA {_dotted(driver)}: "
            f"update the driver, or set CUDA_HOME to a CUDA {driver[0]} toolkit"
        )
    return Nvcc(path, Path(top[1].strip()).resolve(), version)


def driver_cuda_version() -> tuple[int, int] | None:
    """The newest CUDA that the installed driver supports; None without a driver."""
    try:
        driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return None
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def find_cxx() -> str:
    """The C++ compiler: ``CXX``, else g++.

    Raises:
        BuildError: if it is missing or too old.
    """
    cxx = os.environ.get("CXX", "g++")
    if shutil.which(cxx) is None:
        raise BuildError(f"no C++ compiler {cxx!r}: install g++ {MIN_GCC[0]} or newer, or set CXX")
    macros = _output([cxx, "-dM", "-E", "-x", "c++", os.devnull])
    major, minor = (re.search(rf"#define __GNUC{part}__ (\d+)", macros) for part in ("", "_MINOR"))
    version = (int(major[1]), int(minor[1])) if major and minor else None
    # clang says that it is GCC 4.2; nvcc itself refuses the releases of clang that it cannot use.
    if "__clang__" not in macros and (version is None or version < MIN_GCC):
        raise BuildError(
            f"{cxx} is version {_dotted(version) if version else 'unknown'}, but C++20 needs g++ {MIN_GCC[0]} or newer"
            ": install one, and set CXX to it"
        )
    return cxx


def find_ninja() -> str:
    """The ninja on PATH, else the one that pip installed for this Python.

    Raises:
        BuildError: if there is none.
    """
    if on_path := shutil.which("ninja"):
        return on_path
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("ninja") or ():
            if file.name == "ninja" and (path := Path(str(file.locate()))).is_file():
                return str(path)
    raise BuildError("ninja is missing: pip install ninja")


def select_archs(nvcc: Nvcc) -> list[str]:
    """Architectures to compile for ahead of time: SPARSE_MARLIN_CUDA_ARCHS, else those of the defaults that nvcc knows.

    Raises:
        BuildError: for a name that is none, or that this nvcc or these kernels do not support.
    """
    known = _known_archs(nvcc)
    if (wanted := os.environ.get("SPARSE_MARLIN_CUDA_ARCHS")) is None:
        return [a for a in DEFAULT_ARCHS if _number(a) in known]
    archs = [a for a in re.split(r"[;,\s]+", wanted) if a]
    if not archs:
        raise BuildError('SPARSE_MARLIN_CUDA_ARCHS is empty: name architectures such as "80;90a", or unset it')
    for arch in archs:
        _check_arch(arch, nvcc, known)
    return archs


def gpu_archs(nvcc: Nvcc) -> list[str]:
    """Architectures of the GPUs that torch sees here.

    Raises:
        BuildError: if there is no GPU, or one is older than the kernels or newer than nvcc.
    """
    import torch

    if not torch.cuda.is_available():
        raise BuildError("torch sees no NVIDIA GPU on this machine")
    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    # wgmma and setmaxnreg exist only for the target that is specific to Hopper.
    archs = ["90a" if c == (9, 0) else f"{c[0]}{c[1]}" for c in sorted(capabilities)]
    usable = [a for a in archs if _number(a) >= MIN_ARCH] or archs
    known = _known_archs(nvcc)
    for arch in usable:
        _check_arch(arch, nvcc, known)
    return usable


def _known_archs(nvcc: Nvcc) -> set[int]:
    return {int(a) for a in re.findall(r"sm_(\d+)", _output([str(nvcc.path), "--list-gpu-code"]))}


def _check_arch(arch: str, nvcc: Nvcc, known: set[int]) -> None:
    if not re.fullmatch(r"\d{2,3}[af]?", arch):
        raise BuildError(f'{arch!r} is no CUDA architecture: write "80;90a", say, in SPARSE_MARLIN_CUDA_ARCHS')
    if arch == "90":
        raise BuildError("sm_90 leaves out the kernels for Hopper: write 90a in SPARSE_MARLIN_CUDA_ARCHS")
    if _number(arch) < MIN_ARCH:
        raise BuildError(f"sm_{arch} is too old: the kernels need compute capability 8.0 (Ampere) or newer")
    if _number(arch) not in known:
        raise BuildError(f"nvcc {_dotted(nvcc.version)} does not know sm_{arch}: set CUDA_HOME to a newer CUDA toolkit")


def sources() -> Path:
    """The folder ``csrc``: inside the package once installed, beside it in a checkout."""
    inside = PACKAGE / "csrc"
    return inside if inside.is_dir() else PACKAGE.parent / "csrc"


def source_files() -> list[Path]:
    """Every file that the extension is compiled from, sorted."""
    return sorted(p for p in sources().rglob("*") if p.suffix in SOURCE_SUFFIXES)


def compile_extension(
    toolchain: Toolchain, archs: Sequence[str], output: Path, build_dir: Path, files: Sequence[Path] | None = None
) -> str:
    """Compiles ``files`` (default: all of ``csrc``) in parallel and links them to ``output``.

    ``build_dir`` keeps the objects, so that a second call compiles only what changed.

    Returns:
        What nvcc printed about each source: ptxas tells of the registers and spills of each kernel.

    Raises:
        BuildError: with the compilers' output, if one fails.
    """
    files = [f for f in files or source_files() if f.suffix in (".cu", ".cpp")]
    build_dir.mkdir(parents=True, exist_ok=True)
    (build_dir / "build.ninja").write_text(_ninja_file(toolchain, archs, output.resolve(), files))
    command = [toolchain.ninja, "-C", str(build_dir)]
    if jobs := os.environ.get("MAX_JOBS"):
        command += ["-j", jobs]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise BuildError(f"compiling the CUDA kernels failed ({toolchain.identity()}):\n{done.stdout}")
    return "".join((build_dir / f"{_object(f)}.log").read_text() for f in files if f.suffix == ".cu")


def _ninja_file(toolchain: Toolchain, archs: Sequence[str], output: Path, files: Sequence[Path]) -> str:
    nvcc = [str(toolchain.nvcc.path), f"-ccbin={toolchain.cxx}"]
    include = f"-I{sources()}"
    gencode = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    cuda = [*nvcc, *NVCC_FLAGS, include, *gencode]
    cxx = [
        toolchain.cxx,
        *CXX_FLAGS,
        f"-ffile-prefix-map={sources()}=csrc",  # errors name the file
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
        include,
        *(f"-isystem{d / 'include'}" for d in (toolchain.torch, toolchain.nvcc.root)),
    ]
    # nvcc links cudart statically. Nothing may drop libtorch: the stream of the CUDA half is looked up through it.
    libraries = [f"-L{toolchain.torch / 'lib'}", "-Xlinker=--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    lines = ["ninja_required_version = 1.5"]
    depends = "-MMD -MF $out.d -c $in -o $out"
    # What ptxas says is kept beside each object, since ninja does not repeat it for those that are up to date.
    logged = "> $out.log 2>&1 || { cat $out.log; exit 1; }"
    lines += ["rule cuda", f"  command = {_shell(cuda)} {depends} {logged}", "  deps = gcc", "  depfile = $out.d"]
    lines += ["rule cxx", f"  command = {_shell(cxx)} {depends}", "  deps = gcc", "  depfile = $out.d"]
    lines += ["rule link", f"  command = {_shell([*nvcc, '-shared'])} $in -o $out {_shell(libraries)}"]
    for file in files:
        lines.append(f"build {_object(file)}: {'cuda' if file.suffix == '.cu' else 'cxx'} {_path(str(file))}")
    objects = " ".join(map(_object, files))
    lines += [f"build {_path(str(output))}: link {objects}", ""]
    return "\n".join(lines)


def _object(file: Path) -> str:
    name = re.sub(r"\W", "_", file.name)
    return f"{hashlib.sha256(str(file).encode()).hexdigest()[:8]}-{name}.o"  # files in two folders may have one name


def _shell(words: Sequence[str]) -> str:
    return shlex.join(words).replace("$", "$$")


def _path(path: str) -> str:
    return re.sub(r"([$ :])", r"$\1", path)


def mode() -> str:
    """SPARSE_MARLIN_BUILD: ``0``, ``1`` or ``auto``.

    Raises:
        BuildError: for another value.
    """
    value = os.environ.get("SPARSE_MARLIN_BUILD", "auto")
    if value not in ("0", "1", "auto"):
        raise BuildError(f"SPARSE_MARLIN_BUILD must be 0 (never), 1 (required) or auto, got {value!r}")
    return value


def extension_path() -> Path:
    """The extension: the one installed with the package, else one built now for this machine's GPUs, once.

    Raises:
        BuildError: if there is none and it cannot be built.
    """
    installed = PACKAGE / "_C.so"
    if installed.exists():
        return installed
    if mode() == "0":
        raise BuildError("the package has no compiled CUDA kernels, and SPARSE_MARLIN_BUILD=0 forbids building them")
    return build_for_this_machine()


def build_for_this_machine() -> Path:
    """Builds the extension for the GPUs here into the user's cache, unless it is there; returns its path.

    Raises:
        BuildError: if it cannot be built.
    """
    toolchain = find_toolchain()
    archs = gpu_archs(toolchain.nvcc)
    names = ", ".join(f"sm_{a}" for a in archs)
    key = hashlib.sha256(f"{toolchain.identity()} {names} {NVCC_FLAGS} {CXX_FLAGS} {TORCH_TARGET_VERSION}".encode())
    for file in source_files():
        key.update(f"\0{file.relative_to(sources())}\0".encode())
        key.update(file.read_bytes())
    folder = cache_dir() / key.hexdigest()[:16]
    output = folder / "_C.so"
    if output.exists():
        return output
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / "lock").open("w")
    except OSError as e:
        raise BuildError(
            f"cannot write to {folder} ({e.strerror}): set SPARSE_MARLIN_CACHE to a writable folder"
        ) from e
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other ranks of a job wait for the one that builds
        if not output.exists():
            _note(f"building the CUDA kernels for {names} ({toolchain.identity()}); takes minutes, happens once")
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                compile_extension(toolchain, archs, built := Path(scratch, "_C.so"), Path(scratch))
                built.rename(output)
            _note(f"built {output}")
    return output


def cache_dir() -> Path:
    """Where extensions that were built on first use are kept."""
    if own := os.environ.get("SPARSE_MARLIN_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "sparse_marlin")


def _note(text: str) -> None:
    print(f"sparse_marlin: {text}", file=sys.stderr, flush=True)


def _output(command: list[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=True)
    return done.stdout


def _first_line(command: list[str]) -> str:
    return _output(command).splitlines()[0]


def _number(arch: str) -> int:
    return int(arch.rstrip("af"))


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def main() -> int:
    """Entry point of ``python -m sparse_marlin.build``."""
    try:
        print(build_for_this_machine())
    except BuildError as e:
        print(f"sparse_marlin: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
