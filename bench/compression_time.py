"""Time and memory of compressing a model of real size, with random weights and tokens.

    python bench/compression_time.py --json bench/results/h200/compression.json
    python bench/compression_time.py --blocks 2 --windows 16 --repeat      whether a second time gives the same bits
    python bench/compression_time.py --model tiny                          a few seconds on a CPU, to see that it works
    python bench/compression_time.py --readme FILE                         puts what --json has written into README.md

The model has the embeddings and the head of the real one, but only as many blocks as asked for: a block takes the same
time wherever it is, except for the last one, after which nothing is calibrated. What the whole model takes is
extrapolated from that. A very small model is compressed first, since much is loaded on first use; what then still makes
the first block slower is no part of the extrapolation from three blocks on.
2:4, INT4, bfloat16 on the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import readme
import results
import torch
from accuracy import peak_gb
from compare import digits, suggest
from model import MODELS, about, build, release, weight_bytes
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig

import sparse_marlin
from sparse_marlin.compression import pipeline

METHODS = {"one-shot": False, "one-shot+refit": True}
GROUP_SIZE = 128
WINDOW = 512
SEED = 0


@dataclass(frozen=True)
class Measurement:
    """One line of the result. GB = 2**30 bytes; memory is the device's, on a CPU the process's.

    Attributes:
        blocks: how many were compressed, of the ``layers`` of the real model.
        tokens: to calibrate on, in windows of WINDOW.
        block_s: seconds of each block.
        whole_s: extrapolated to all layers: what was measured, and the mean of all blocks but the first and the last
            (of two, the first) for each that is missing.
        weights_gb: of the model before it is compressed.
        peak_gb: at most, weights included.
        whole_peak_gb: extrapolated: the same with the weights of the missing blocks.
        bits_per_weight: of the compressed layers.
        same_bits: whether compressing it once more gave the same tensors; None if that was not asked for.
    """

    model: str
    method: str
    layers: int
    blocks: int
    tokens: int
    block_s: list[float]
    total_s: float
    whole_s: float
    weights_gb: float
    peak_gb: float
    whole_peak_gb: float
    bits_per_weight: float
    same_bits: bool | None = None


class Clock:
    """Takes the place of the progress bar over the blocks, and notes when each of them begins and the last one ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []

    def __call__(self, blocks: Iterable[nn.Module], **options: Any) -> Iterator[nn.Module]:
        for block in tqdm(blocks, **options):
            self._note()
            yield block
        self._note()

    def _note(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of each block."""
        if len(self.times) < 2:
            raise RuntimeError("patch_model shows no progress over its blocks any more: nothing was timed")
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


def measure(
    name: str, method: str, blocks: int, windows: int, device: torch.device
) -> tuple[Measurement, list[Tensor]]:
    """Compresses a model; also returns its tensors, on the CPU."""
    layers = MODELS[name]["num_hidden_layers"]
    config = LlamaConfig(**{**MODELS[name], "num_hidden_layers": blocks}, tie_word_embeddings=False)
    with torch.no_grad():
        subject = build(config, None, torch.bfloat16, device)
    generator = torch.Generator().manual_seed(SEED)
    calibration = torch.randint(config.vocab_size, (windows, WINDOW), generator=generator)
    weights = weight_bytes(subject)
    block_bytes = weight_bytes(subject.model.layers[0])
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    clock = Clock(device)
    with mock.patch.object(pipeline, "tqdm", clock):
        began = time.perf_counter()
        report = sparse_marlin.patch_model(
            subject,
            group_size=GROUP_SIZE,
            calibration=list(calibration.split(1)),
            method="one-shot",
            refit=METHODS[method],
            seed=SEED,
        )
    block_s = clock.seconds()
    total = time.perf_counter() - began
    peak = peak_gb(str(device))
    row = Measurement(
        name,
        method,
        layers,
        blocks,
        calibration.numel(),
        [digits(s) for s in block_s],
        digits(total),
        digits(total + (layers - blocks) * statistics.mean(block_s[1:-1] or block_s[:1])),
        digits(weights / 2**30),
        digits(peak),
        digits(peak + (layers - blocks) * block_bytes / 2**30),
        digits(report.bits_per_weight),
    )
    return row, [t.cpu() for t in subject.state_dict().values()]


def same_bits(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether tensors have the same shapes, dtypes and bytes."""
    return len(first) == len(second) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
        for a, b in zip(first, second, strict=True)
    )


def line_of(row: Measurement) -> str:
    bits = {None: "", True: ", the same bits twice", False: ", OTHER BITS THE SECOND TIME"}[row.same_bits]
    return (
        f"{row.model}, {row.method}: {row.blocks} blocks in {row.total_s:.1f} s, peak {row.peak_gb:.2f} GB{bits}; "
        f"all {row.layers}, extrapolated: {row.whole_s / 60:.1f} minutes, {row.whole_peak_gb:.1f} GB"
    )


def text_of(found: dict[str, Any]) -> str:
    """What README.md says of a file that ``--json`` has written."""
    meta, rows = found["meta"], sorted((Measurement(**r) for r in found["rows"]), key=lambda r: r.whole_s)
    lines = [[r.model, f"`{r.method}`", f"{r.whole_s / 60:.1f}", f"{r.whole_peak_gb:.1f}"] for r in rows]
    blocks = ", ".join(dict.fromkeys(f"{r.blocks} of {r.layers}" for r in rows))
    tokens = ", ".join(dict.fromkeys(str(r.tokens) for r in rows))
    same = [r.same_bits for r in rows]
    again = " Compressed once more, some gave OTHER bits." if False in same else ""
    if rows and all(same):
        again = " Compressed once more, each gave the same bits."
    return (
        f"{readme.table(['shape', 'method', 'minutes', 'GiB'], lines)}\n\n2:4 INT4 group {meta['group_size']}, random "
        f"weights, calibrated on {tokens} tokens: extrapolated from {blocks} blocks; GiB: the most that the GPU held, "
        f"model included.{again} {meta['gpu']}, torch {meta['versions']['torch']}, commit {meta['commit']}, "
        f"{meta['date'][:10]}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b", help=f"one of {', '.join(MODELS)} (default: llama3-8b)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--blocks", type=int, help="how many (default: 4, or all if there are fewer)")
    parser.add_argument("--windows", type=int, default=128, help=f"of {WINDOW} tokens, to calibrate on (default: 128)")
    parser.add_argument("--repeat", action="store_true", help="compress twice, and compare every bit")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="only put a finished run's table into README.md")
    args = parser.parse_args(arguments)
    if args.readme:
        readme.replace_text("compression", text_of(json.loads(args.readme.read_text(encoding="utf-8"))))
        return 0
    if args.model not in MODELS:
        parser.error(f"no model {args.model!r}: {suggest(args.model, MODELS)}")
    layers = MODELS[args.model]["num_hidden_layers"]
    blocks = min(4, layers) if args.blocks is None else args.blocks
    if not 2 <= blocks <= layers:
        parser.error(f"--blocks must be 2 to {layers} (one that has another after it is timed), got {blocks}")
    if args.windows < 1:
        parser.error(f"--windows must be 1 or more, got {args.windows}")
    device = torch.device(args.device)
    if args.model != "tiny" and device.type != "cuda":
        parser.error(f"{args.model} needs a GPU; --model tiny runs on a CPU")

    argv = sys.argv[1:] if arguments is None else list(arguments)
    meta = {
        **about("bench/compression_time.py", argv, device),
        "group_size": GROUP_SIZE,
        "window": WINDOW,
        "seed": SEED,
    }
    measure("tiny", "one-shot", 2, 2, device)  # loads what is loaded on first use
    rows: list[dict[str, Any]] = []

    def save() -> None:
        if args.json:
            results.write_json(args.json, meta, rows)

    for method in args.methods:
        release(device.type == "cuda")
        row, tensors = measure(args.model, method, blocks, args.windows, device)
        rows.append(asdict(row))
        save()
        if args.repeat:
            release(device.type == "cuda")
            again = measure(args.model, method, blocks, args.windows, device)[1]
            row = replace(row, same_bits=same_bits(tensors, again))
            rows[-1] = asdict(row)
            save()
        print(line_of(row), flush=True)
    return int(any(r["same_bits"] is False for r in rows))


if __name__ == "__main__":
    sys.exit(main())
