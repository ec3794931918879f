"""Adds the CUDA extension to what pyproject.toml declares.

Where nvcc, g++, ninja and torch are there (``pip install --no-build-isolation``), the kernels are compiled now, for
every architecture in ``SPARSE_MARLIN_CUDA_ARCHS``. Otherwise the package is installed with their sources, and builds
them on first use on a machine with a GPU and nvcc; without those it runs its CPU path.
"""

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def load_builder() -> Any:
    """sparse_marlin/build.py by its path: importing the package needs torch, which an isolated build does not have."""
    spec = importlib.util.spec_from_file_location("sparse_marlin_build", ROOT / "sparse_marlin" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


builder = load_builder()


def note(reason: object) -> None:
    print(
        f"\nsparse_marlin: installing without CUDA kernels: {reason}\n"
        "sparse_marlin: the CPU path works. On a machine with a GPU the kernels are built on first use, or by\n"
        "sparse_marlin: python -m sparse_marlin.build, which says what is missing.\n",
        file=sys.stderr,
    )


def find_toolchain() -> Any:
    """The toolchain, or None (after a note that says why) if the package is to be installed without the extension."""
    mode = builder.mode()
    if mode == "0":
        return None
    try:
        return builder.find_toolchain()
    except builder.BuildError as e:
        if mode == "1":
            raise SystemExit(f"sparse_marlin: SPARSE_MARLIN_BUILD=1, but {e}") from None
        note(e)
        return None


class BuildPackage(build_py):
    """Starts from nothing, and puts the kernels' sources into the package, to be built on first use."""

    def run(self) -> None:
        package = Path(self.build_lib, "sparse_marlin")
        if not self.editable_mode:  # files that an earlier build left here would be packed too
            shutil.rmtree(package, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            for source, target in self._csrc():
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *(str(target) for _, target in self._csrc())]

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *(str(source.relative_to(ROOT)) for source, _ in self._csrc())]

    def _csrc(self) -> list[tuple[Path, Path]]:
        csrc, target = builder.sources(), Path(self.build_lib, "sparse_marlin", "csrc")
        return [(file, target / file.relative_to(csrc)) for file in builder.source_files()]


class BuildExtension(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        # Without the tag of Python's ABI, which the extension does not use.
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Any) -> None:
        try:
            archs = builder.select_archs(toolchain.nvcc)
            print(f"sparse_marlin: compiling the CUDA kernels for {', '.join(archs)}", file=sys.stderr)
            output = Path(self.get_ext_fullpath(ext.name))
            output.parent.mkdir(parents=True, exist_ok=True)
            builder.compile_extension(toolchain, archs, output, Path(self.build_temp).resolve())
        except builder.BuildError as e:
            if builder.mode() == "1":
                raise SystemExit(f"sparse_marlin: {e}") from None
            note(e)


class BuildWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        return "py3", "none", platform  # the extension is bound to the platform alone


toolchain = find_toolchain()
setup(
    # optional: an editable install looks for the file only if it was built.
    ext_modules=[Extension("sparse_marlin._C", sources=[], optional=True)] if toolchain else [],
    cmdclass={"build_py": BuildPackage, "build_ext": BuildExtension, "bdist_wheel": BuildWheel},
)
