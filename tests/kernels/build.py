"""Compile test drivers that run the kernels' own source on the CPU.

A driver is a C++ program that includes kernels from `csrc/` and launches them through the emulator. Each driver is
compiled three times, because each build finds faults that the others cannot see (see `emulator/README.md`):
plain, with AddressSanitizer, and with every plain load and store reported to the race checker.

Outputs live in `build/kernels` at the repository root. An object is compiled again when its command, its source or a
header that it included last time has changed.

    python tests/kernels/build.py ops --run         # build and run drivers/ops.cpp in all three builds
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EMULATOR = HERE / "emulator"
OUTPUT = ROOT / "build" / "kernels"
BUILDS = ("plain", "asan", "race")
JOBS = min(2, os.cpu_count() or 1)  # a kernel instance with AddressSanitizer takes several 100 MB to compile

CXX = os.environ.get("CXX", "g++")
# The emulator comes first in the include path: its cuda_runtime.h and common/ptx.cuh shadow the real ones.
COMMON_FLAGS = (
    *("-std=c++20", "-g1", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-fno-strict-aliasing"),
    *(f"-I{EMULATOR}", f"-I{ROOT / 'csrc'}", f"-I{HERE}"),
)
DRIVER_FLAGS = {
    "plain": ("-O2",),
    "asan": ("-O1", "-fsanitize=address", "-fno-omit-frame-pointer"),
    # Its runtime, plain_accesses.cpp, knows plain accesses alone: not the atomic guards of static variables.
    "race": ("-O1", "-fsanitize=thread", "-fno-threadsafe-statics"),
}
# What a driver is linked with: sources that are kernels' own.
KERNELS = sorted((ROOT / "csrc").glob("**/*.cu"))
LINKED = {"gemm": KERNELS}
# The emulator itself is never instrumented: it looks at kernel memory on purpose while that is poisoned.
EMULATOR_FLAGS = ("-O3", "-mavx2", "-mf16c")


class BuildError(RuntimeError):
    """The compiler or the linker failed; the message holds the command and what it printed."""


def build(drivers: Iterable[Path | str], builds: Sequence[str] = BUILDS) -> dict[tuple[str, str], Path]:
    """Compile and link `drivers` (paths, or names within `drivers/`); returns {(driver name, build): executable}."""
    sources = [_driver_path(d) for d in drivers]
    OUTPUT.mkdir(parents=True, exist_ok=True)
    # The workers of a parallel test run build one after the other, and find what the first one built.
    with (OUTPUT / "lock").open("w") as lock, ThreadPoolExecutor(JOBS) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        emulator = {s: pool.submit(_compile, s, "emulator", EMULATOR_FLAGS) for s in sorted(EMULATOR.glob("*.cpp"))}
        objects = {
            (s, b): [pool.submit(_compile, f, b, DRIVER_FLAGS[b]) for f in (s, *LINKED.get(s.stem, ()))]
            for s in sources
            for b in builds
        }
        runtime = {s.stem: future.result() for s, future in emulator.items()}
        return {(s.stem, b): _link([o.result() for o in done], b, runtime) for (s, b), done in objects.items()}


def run(executable: Path, *arguments: str | int | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a driver; its output is text and is never mixed with that of the sanitizer's leak checker."""
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    command = [str(executable), *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout, env=environment)


def _driver_path(driver: Path | str) -> Path:
    path = Path(driver)
    return path if path.suffix else HERE / "drivers" / f"{path}.cpp"


def _compile(source: Path, label: str, flags: Sequence[str]) -> Path:
    output = OUTPUT / f"{source.parent.name}-{source.stem}.{label}.o"
    dependencies, stamp = output.with_suffix(".d"), output.with_suffix(".stamp")
    files = ["-x", "c++", "-c", str(source), "-o", str(output), "-MMD", "-MF", str(dependencies)]
    command = [CXX, *COMMON_FLAGS, *flags, *files]
    if output.exists() and stamp.exists() and stamp.read_text() == _fingerprint(command, dependencies):
        return output
    _check_call(command)
    stamp.write_text(_fingerprint(command, dependencies))
    return output


def _fingerprint(command: Sequence[str], dependencies: Path) -> str:
    digest = hashlib.sha256(shlex.join(command).encode())
    listed = dependencies.read_text().replace("\\\n", " ").partition(":")[2].split()
    for name in listed:
        path = Path(name)
        digest.update(path.read_bytes() if path.exists() else b"gone")
    return digest.hexdigest()


def _link(driver: Sequence[Path], build: str, runtime: dict[str, Path]) -> Path:
    # The race build's runtime is our own plain_accesses.cpp, so it links without -fsanitize=thread.
    objects = [*driver, *(path for name, path in runtime.items() if name != "plain_accesses" or build == "race")]
    output = driver[0].with_suffix("")
    if output.exists() and all(path.stat().st_mtime <= output.stat().st_mtime for path in objects):
        return output
    sanitizer = ["-fsanitize=address"] if build == "asan" else []
    _check_call([CXX, *map(str, objects), *sanitizer, "-o", str(output)])
    return output


def _check_call(command: Sequence[str]) -> None:
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"{shlex.join(command)}\n{result.stdout}{result.stderr}")


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drivers", nargs="+", help="a name within drivers/ or a path to a .cpp file")
    parser.add_argument("--builds", nargs="+", choices=BUILDS, default=BUILDS)
    parser.add_argument("--run", action="store_true", help="run what was built, without arguments")
    options = parser.parse_args()
    failures = 0
    for (name, kind), executable in build(options.drivers, options.builds).items():
        print(executable)
        if options.run:
            result = run(executable)
            print(f"{name} ({kind}): exit {result.returncode}\n{result.stdout}{result.stderr}", end="")
            failures += result.returncode != 0
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(_main())
