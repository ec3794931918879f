"""What every checkpoint format shares: a directory with config.json and safetensors files, read with suspicion."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SUFFIX = ".safetensors"
MAX_SHARD_BYTES = 5_000_000_000

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the text names the file and, where there is one, the tensor."""


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: if the file is missing, or holds something else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise CheckpointError(f"cannot read {file}: {e.strerror}") from e
    except ValueError as e:
        raise CheckpointError(f"{file} is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, got a {type(value).__name__}")
    return value


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def check_free(destination: Path) -> None:
    """Raises FileExistsError or FileNotFoundError unless a directory can be made at ``destination``."""
    if not destination.absolute().parent.is_dir():
        raise FileNotFoundError(f"cannot write {destination}: {destination.absolute().parent} is not a directory")
    if destination.is_symlink() or destination.is_file() or (destination.is_dir() and any(destination.iterdir())):
        raise FileExistsError(f"{destination} exists already: choose another path, or remove it first")


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """A new directory to fill. It takes the place of ``path``, and of what was there, once all went well."""
    scratch = path.absolute().with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    scratch.mkdir()
    try:
        yield scratch
        old = scratch.with_suffix(".old")
        if path.exists():
            path.rename(old)
        scratch.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@dataclass(frozen=True)
class StoredTensor:
    """What a file's header says of one tensor."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class TensorFiles:
    """The safetensors files of a directory: one file, ``model.safetensors`` by default, or shards with their index.

    Construction reads the headers alone, and checks that they agree with the files' sizes and with the index.

    Attributes:
        tensors: every stored tensor by name.

    Raises:
        CheckpointError: for a missing, truncated or tampered file, or an index that does not match its shards.
    """

    def __init__(self, directory: Path) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        index = directory / INDEX_NAME
        if not index.exists():
            self._add(_only_file(directory), None)
            return
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index} has no weight_map")
        shards: dict[str, set[str]] = {}
        for name, shard in weight_map.items():
            # A name from the index must not lead out of the directory.
            if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(SUFFIX):
                raise CheckpointError(f"{index}: tensor {name} is said to be in {shard!r}, which is no shard's name")
            shards.setdefault(shard, set()).add(name)
        for shard, names in sorted(shards.items()):
            self._add(directory / shard, names)

    def _add(self, file: Path, expected: set[str] | None) -> None:
        with _open(file) as f:
            names = set(f.keys())
            if expected is not None and names != expected:
                raise CheckpointError(
                    f"{file} does not hold what {INDEX_NAME} says: "
                    f"missing {sorted(expected - names)[:4]}, unexpected {sorted(names - expected)[:4]}"
                )
            for name in sorted(names):
                header = f.get_slice(name)
                dtype = header.get_dtype()
                if dtype not in _DTYPES:
                    raise CheckpointError(f"{file}: tensor {name} has the dtype {dtype}, which no layer uses")
                self.tensors[name] = StoredTensor(file, _DTYPES[dtype], tuple(header.get_shape()))

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, file by file. Its memory belongs to the file: copy what is to be kept."""
        for file in sorted({t.file for t in self.tensors.values()}):
            with _open(file) as f:
                for name in f.keys():  # noqa: SIM118  safe_open is no dict
                    yield name, f.get_tensor(name)

    def get(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Some tensors. Their memory belongs to the files: copy what is to be kept."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        found = {}
        for file, wanted in by_file.items():
            with _open(file) as f:
                found.update({name: f.get_tensor(name) for name in wanted})
        return found


def _only_file(directory: Path) -> Path:
    """The file with all tensors: older tools give it a name of their own."""
    file = directory / WEIGHTS_NAME
    if file.exists():
        return file
    others = sorted(p.name for p in directory.glob("*"))
    named = [name for name in others if name.endswith(SUFFIX)]
    if len(named) == 1:
        return directory / named[0]
    if pickles := [name for name in others if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]:
        raise CheckpointError(
            f"{file} is missing; {pickles[0]} is not read, since unpickling can run any code: "
            "save the checkpoint as safetensors with the tool that made it"
        )
    return file


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing")
    try:
        f = safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{file} is truncated or no valid safetensors file: {e}") from e
    with f:
        yield f


def write_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes ``model.safetensors``, or shards with an index.

    A shard has at most :data:`MAX_SHARD_BYTES`, or else a single tensor. Tensors that share memory are written once
    each; one shard's copies exist at a time.
    """
    shards: list[list[str]] = [[]]
    room = MAX_SHARD_BYTES
    for name, t in tensors.items():
        if shards[-1] and t.nbytes > room:
            shards.append([])
            room = MAX_SHARD_BYTES
        shards[-1].append(name)
        room -= t.nbytes
    weight_map = {}
    for file, names in zip(shard_names(len(shards)), shards, strict=True):
        write_file(directory / file, tensors, names)
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        write_index(directory, sum(t.nbytes for t in tensors.values()), weight_map)


def shard_names(count: int) -> list[str]:
    """What the files of a checkpoint's weights are called."""
    if count == 1:
        return [WEIGHTS_NAME]
    return [f"model-{i:05d}-of-{count:05d}{SUFFIX}" for i in range(1, count + 1)]


def write_index(directory: Path, nbytes: int, weight_map: Mapping[str, str]) -> None:
    """Writes which of several files holds which tensor."""
    write_json(directory / INDEX_NAME, {"metadata": {"total_size": nbytes}, "weight_map": weight_map})


def write_file(file: Path, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Writes one safetensors file, always with the same bytes for the same tensors."""
    shard: dict[str, Tensor] = {}
    owners: set[int] = set()
    for name in names:
        t = tensors[name].detach().cpu().contiguous()
        storage = t.untyped_storage()
        # safetensors refuses tensors that share memory, and writes no part of a larger storage.
        if storage.data_ptr() in owners or storage.nbytes() != t.nbytes:
            t = t.clone()
        owners.add(t.untyped_storage().data_ptr())
        shard[name] = t
    save_file(shard, file, metadata={"format": "pt"})
    file.chmod(file.parent.stat().st_mode & 0o666)  # safetensors makes the file its owner's alone
