"""Converting a checkpoint of one format into one of another, a shard at a time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from safetensors import safe_open
from torch import Tensor, nn
from tqdm import tqdm

from ..compression.solve import compress_weight, default_method, why_no_weight
from ..compression.targets import scale_dtype
from ..packed import PackedWeight
from ..quantization import FORMAT_VERSION, quantization_config
from ..scheme import Scheme
from . import compressed_tensors, native, reading
from .files import (
    CONFIG_NAME,
    CheckpointError,
    check_free,
    read_json,
    shard_names,
    write_file,
    write_index,
    write_json,
)
from .lora import write_lora
from .reading import Checkpoint
from .words import mask_24

Target = Literal["sparse-marlin", "pack-quantized"]
TARGETS: tuple[Target, ...] = get_args(Target)

_PROGRESS = "progress.json"

# What a model's directory may hold beside its weights, and a converted one should hold as well. Never code.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
)


@dataclass(frozen=True)
class Shard:
    """One file of the converted checkpoint, and what goes into it."""

    file: str
    plain: list[str]
    layers: list[str]


@dataclass(frozen=True)
class Job:
    """A conversion whose source has been checked, and of which nothing has been written yet.

    Attributes:
        scheme: how to quantize weights that are 2:4 in floating point, or None to leave them as they are.
        export: the schemes of quantized layers in pack-quantized.
        lora: where the adapters go, if there are any.
    """

    checkpoint: Checkpoint
    destination: Path
    to: Target
    scheme: Scheme | None
    shards: list[Shard]
    export: Mapping[str, Scheme]
    lora: Path | None = None

    @property
    def peak_bytes(self) -> int:
        """Memory that the conversion takes at most, about: a shard, read and converted, and the work on a layer."""
        return max((self._shard_bytes(s) for s in self.shards), default=0)

    def _shard_bytes(self, shard: Shard) -> int:
        c = self.checkpoint
        plain = sum(c.files.tensors[name].nbytes for name in shard.plain)
        layers = sum(c.layer_nbytes(name) for name in shard.layers)
        weights = [c.layers[name].out_features * c.layers[name].in_features for name in shard.layers]
        # A 2:4 weight takes at most 4/3 of its bytes as pack-quantized; integers are unpacked by the layer.
        return 2 * plain + layers * 7 // 3 + 16 * max(weights, default=0)


def convert(
    source: str | Path,
    destination: str | Path,
    to: Target = "sparse-marlin",
    *,
    bits: int | None = None,
    group_size: int = 128,
    lora: str | Path | None = None,
    progress: bool = True,
    announce: Callable[[Job], object] = lambda job: None,
) -> None:
    """Writes a checkpoint in another format; its weights are those of the source, bit for bit, unless ``bits`` is set.

    Source and headers are checked first. Everything is written beside ``destination``, and appears there whole or not
    at all. After an interruption, the same call continues with the first shard that was not finished.

    Args:
        source: directory of a checkpoint that :func:`sparse_marlin.load` can read.
        destination: directory to write; its parent must exist, and it must not, or be empty.
        to: ``"sparse-marlin"``, this library's own format, or ``"pack-quantized"``, which compressed-tensors reads, and
            with it many engines. There, 2:4 weights become dense ones with zeros.
        bits: 4 or 8, to quantize weights that are stored in floating point and are 2:4. Which ones are kept stays as it
            is; they are rounded to nearest with scales fitted to them. None refuses such a checkpoint.
        group_size: columns per scale for these.
        lora: directory to write the adapters of a checkpoint to, as a LoRA in PEFT's files, see
            :func:`~sparse_marlin.checkpoints.lora.export_lora`; ``destination`` has the weights without them.
        progress: show a progress bar on standard error.
        announce: called with the job once everything is checked, before anything is written.

    Raises:
        CheckpointError: if the source cannot be read, or its values are damaged.
        FileExistsError: if something is at ``destination``, or at ``lora``.
        ValueError: for weights that the other format cannot hold, and for adapters without ``lora``.
    """
    job = plan(source, destination, to, bits=bits, group_size=group_size, lora=lora)
    announce(job)
    run(job, progress=progress)


def plan(
    source: str | Path,
    destination: str | Path,
    to: Target,
    *,
    bits: int | None = None,
    group_size: int = 128,
    lora: str | Path | None = None,
) -> Job:
    """Checks everything that can be checked without reading weights. See :func:`convert`."""
    from . import describe

    if to not in TARGETS:
        raise ValueError(f"to must be one of {', '.join(TARGETS)}, got {to!r}")
    scheme = None if bits is None else Scheme(bits, group_size)
    destination = Path(destination)
    check_free(destination)
    checkpoint = describe(source)
    quantized = {name: layer.scheme for name, layer in checkpoint.layers.items() if layer.scheme is not None}
    if scheme is None and not quantized:
        raise ValueError(
            f"{source}: the weights are not quantized. Say how to quantize those that are 2:4 (bits=4, or --bits 4 on "
            "the command line), or prune and quantize the model: sparse-marlin compress MODEL OUT"
        )
    if scheme is not None and quantized:
        raise ValueError(
            f"{source}: the weights are quantized already, for example {next(iter(quantized))}: leave bits out"
        )
    adapters = [name for name, layer in checkpoint.layers.items() if layer.adapter is not None]
    if adapters and lora is None:
        raise ValueError(
            f"{source}: {len(adapters)} layers have low-rank adapters, for example {adapters[0]}, which a converted "
            "checkpoint does not hold. Have them written beside it as a LoRA, to be loaded with it (lora=DIR, or "
            "--lora DIR on the command line), or compress the model without: adapter_rank=0"
        )
    if lora is not None:
        if not adapters:
            raise ValueError(f"{source}: no layer has an adapter: leave lora out")
        lora = Path(lora)
        one, other = lora.absolute(), destination.absolute()
        if one.is_relative_to(other) or other.is_relative_to(one):
            raise ValueError(
                f"lora and destination must be two directories, neither inside the other: {lora}, {destination}"
            )
        check_free(lora)
    parts = [(plain, layers) for plain, layers in checkpoint.work() if plain or layers]
    names = shard_names(len(parts))
    shards = [Shard(file, *part) for file, part in zip(names, parts, strict=True)]
    columns = {name: layer.in_features for name, layer in checkpoint.layers.items()}
    export = compressed_tensors.export_schemes(quantized, columns)
    return Job(checkpoint, destination, to, scheme, shards, export, lora)


def run(job: Job, *, progress: bool = True) -> None:
    """Does a job, or the rest of it. See :func:`convert`."""
    scratch = job.destination.absolute().with_name(f".{job.destination.name}.converting")
    scratch.mkdir(exist_ok=True)
    with _locked(scratch):
        try:
            _fill(job, scratch, progress)
        except ValueError:  # it would fail again: nothing is left to continue
            shutil.rmtree(scratch)
            raise
        if job.lora is not None:
            write_lora(job.lora, job.checkpoint.read_adapters())
        scratch.rename(job.destination)


@contextmanager
def _locked(scratch: Path) -> Iterator[None]:
    lock = os.open(scratch, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FileExistsError(f"{scratch} is being written by another process: wait for it, or stop it") from None
        yield
    finally:
        os.close(lock)


def _fill(job: Job, scratch: Path, progress: bool) -> None:
    record = scratch / _PROGRESS
    fingerprint = _fingerprint(job)
    known = read_json(record) if record.is_file() else {}
    if known.get("fingerprint") != fingerprint:
        for file in scratch.iterdir():
            file.unlink()
        known = {"fingerprint": fingerprint, "shards": {}}
    done: dict[str, dict[str, Any]] = known["shards"]  # file -> layer -> scheme
    steps = sum(len(s.plain) + len(s.layers) for s in job.shards)
    with tqdm(total=steps, unit="tensor", disable=not progress, desc=f"converting to {job.to}") as bar:
        for shard in job.shards:
            if shard.file in done and (scratch / shard.file).is_file():
                bar.update(len(shard.plain) + len(shard.layers))
                continue
            tensors, schemes = _convert_shard(job, shard, bar)
            part = scratch / f"{shard.file}.part"
            write_file(part, tensors, tensors)
            _sync(part)
            part.rename(scratch / shard.file)
            done[shard.file] = {name: scheme.to_dict() for name, scheme in schemes.items()}
            write_json(part, known)
            _sync(part)
            part.rename(record)
    found = {name: Scheme.from_dict(scheme) for shard in job.shards for name, scheme in done[shard.file].items()}
    if not found:
        raise ValueError(
            f"{job.checkpoint.path}: no layer is 2:4, so there is none whose mask could be kept. To prune and quantize "
            "the model: sparse-marlin compress MODEL OUT"
        )
    _finish(job, scratch, found)
    record.unlink()


def _fingerprint(job: Job) -> str:
    """Of all that decides what is written."""
    files = sorted({t.file for t in job.checkpoint.files.tensors.values()})
    stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    scheme = None if job.scheme is None else job.scheme.to_dict()
    what = [FORMAT_VERSION, str(job.checkpoint.path.resolve()), job.checkpoint.config, stats, job.to, scheme]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _sync(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _convert_shard(job: Job, shard: Shard, bar: Any) -> tuple[dict[str, Tensor], dict[str, Scheme]]:
    """The tensors of a shard, and the schemes of its compressed layers."""
    checkpoint = job.checkpoint
    tensors: dict[str, Tensor] = {}
    schemes: dict[str, Scheme] = {}

    def add(name: str, weight: PackedWeight) -> None:
        scheme, parts = weight.scheme, weight.tensors()
        if job.to == "pack-quantized":
            scheme = job.export.get(name) or replace(scheme, sparsity=None)
            try:
                parts = compressed_tensors.to_pack_quantized(weight, scheme)
            except ValueError as e:
                raise ValueError(f"{name} cannot be stored as {job.to}: {e}") from e
        tensors.update({f"{name}.{leaf}": t for leaf, t in parts.items()})
        schemes[name] = scheme

    for name in shard.plain:
        t = checkpoint.files.get([name])[name]
        module = checkpoint.plain[name][0].removesuffix(".weight")
        packed = _quantized(job, name, t) if job.scheme is not None and _is_candidate(checkpoint, module) else None
        if packed is None:
            target = checkpoint.plain_dtype(name) if t.is_floating_point() else t.dtype
            tensors[checkpoint.plain[name][0]] = t.to(target, copy=True)
        else:
            add(module, packed)
        bar.update()
    for name in shard.layers:
        weight = checkpoint.read_layer(name, checkpoint.dtype)
        if isinstance(weight, Tensor) and job.scheme is not None:
            weight = _quantized(job, name, weight) or weight
        if isinstance(weight, Tensor):
            tensors[f"{name}.weight"] = weight.to(checkpoint.dtype)
        else:
            add(name, weight)
        bar.update()
    return tensors, schemes


def _is_candidate(checkpoint: Checkpoint, module: str) -> bool:
    """Whether a plain tensor is the weight of a Linear that may be quantized: not of the output head."""
    try:
        linear = checkpoint.model.get_submodule(module)
    except AttributeError:
        return False
    head = checkpoint.model.get_output_embeddings()  # type: ignore[operator]
    return type(linear) is nn.Linear and linear is not head


def _quantized(job: Job, name: str, weight: Tensor) -> PackedWeight | None:
    """A floating-point weight quantized under the mask that it has; None if it is not 2:4."""
    assert job.scheme is not None
    if reason := why_no_weight(weight):
        raise CheckpointError(f"{job.checkpoint.path}: {name} cannot be quantized: {reason}")
    n, k = weight.shape
    scheme = replace(job.scheme, dtype=scale_dtype(job.checkpoint.dtype)).fit(k)
    if scheme.why_not(n, k) or mask_24(weight != 0) is None:
        return None
    return compress_weight(weight, None, scheme, default_method("2:4", calibrated=False)).packed


def _finish(job: Job, scratch: Path, schemes: Mapping[str, Scheme]) -> None:
    """Writes all but the weights, and checks the whole."""
    checkpoint = job.checkpoint
    model = checkpoint.model
    config = reading.without_code(reading.without_storage(checkpoint.config))
    config.pop("torch_dtype", None)
    config.pop("_name_or_path", None)  # often a path of the machine that wrote it
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(checkpoint.dtype).removeprefix("torch.")
    ties = getattr(model, "all_tied_weights_keys", {})
    if any(name.removesuffix(".weight") in schemes for pair in ties.items() for name in pair):
        config["tie_word_embeddings"] = False
    if job.to == "pack-quantized":
        linears = [name for name, m in model.named_modules() if type(m) is nn.Linear and name not in schemes]
        block, target = compressed_tensors.quantization_config(schemes, linears), compressed_tensors.FORMAT
    else:
        stored = {name: (scheme, None) for name, scheme in schemes.items()}
        block, target = quantization_config(stored), native.FORMAT
    config["quantization_config"] = block
    write_json(scratch / CONFIG_NAME, dict(sorted(config.items())))
    for name in _COMPANIONS:
        if (checkpoint.path / name).is_file():
            shutil.copyfile(checkpoint.path / name, scratch / name)
    if len(job.shards) > 1:
        weight_map = {}
        for shard in job.shards:
            with safe_open(scratch / shard.file, framework="pt") as f:
                weight_map.update(dict.fromkeys(f.keys(), shard.file))
        total = sum((scratch / shard.file).stat().st_size for shard in job.shards)
        write_index(scratch, total, weight_map)
    reading.open_checkpoint(scratch, read_json(scratch / CONFIG_NAME), target)
