"""Perplexity of compression methods on one model, calibrated on the first half of a text and evaluated on the second.

    python bench/accuracy.py                                 the library's default, and what it is compared with
    python bench/accuracy.py --methods two-pass one-loop     these only
    python bench/accuracy.py --json bench/results/accuracy.json    rows of other methods, measured alike, stay there
    python bench/accuracy.py --readme bench/results/accuracy.json  puts the table of a finished run into README.md

Setting: 24 windows of 512 tokens drawn from the first half for calibration, the first 24 windows of the second half for
evaluation, float32, symmetric INT4, group 64, damping 1 %, blocks in sequence; "+refit" also trains them. auto-3.75 is
calibrated on the same windows, and measures its losses on 8 more.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import resource
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import readme
import results
import torch
import transformers

import sparse_marlin
from sparse_marlin.compression.solve import PRUNE_ONLY
from sparse_marlin.compression.structure import HELD_OUT
from sparse_marlin.evaluate import evaluate
from sparse_marlin.samples import sample_model, sample_text

TARGET_BITS = 3.75  # halfway between 2:4 and dense INT4, group 64
# Name of a row -> arguments of patch_model; None: the original model.
METHODS: dict[str, dict[str, Any] | None] = {
    "fp": None,
    **{m: {"sparsity": None, "method": m} for m in ("rtn", "gptq")},
    "gptq+refit": {"sparsity": None, "method": "gptq", "refit": True},
    "one-shot-dense": {"sparsity": None},
    "one-shot-dense+refit": {"sparsity": None, "refit": True},
    **{
        m: {"method": m}
        for m in ("magnitude", "wanda", "sparsegpt", "magnitude+rtn", "wanda+rtn", "one-loop", "two-pass", "one-shot")
    },
    "one-shot+refit": {"method": "one-shot", "refit": True},
    "one-shot+permutation": {"permute": True},
    "one-shot+permutation+refit": {"permute": True, "refit": True},
    "one-shot+adapters": {"adapter_rank": 0.1},
    "one-shot+adapters4": {"adapter_rank": 0.1, "adapter_bits": 4},
    "one-shot+refit+adapters4": {"refit": True, "adapter_rank": 0.1, "adapter_bits": 4},
    f"auto-{TARGET_BITS}": {"sparsity": "auto", "target_bits": TARGET_BITS},
}
DEFAULT = ("fp", "gptq", "one-shot-dense", "magnitude+rtn", "two-pass", "one-shot", "one-shot+refit")
WINDOW = 512
KINDS = {"none": "", "2:4": "2:4 ", "auto": "2:4 and dense "}  # of weights, as the table says


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=DEFAULT, metavar="METHOD")
    parser.add_argument("--model", help="path of a Hugging Face model (default: the embedded SmolLM2-135M)")
    parser.add_argument("--text", type=Path, help="a UTF-8 text (default: the language reference that CPython ships)")
    parser.add_argument("--calibration-windows", type=int, default=24)
    parser.add_argument("--evaluation-windows", type=int, default=24)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the rows there, to those that a run alike has left in it")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="only put a finished run's table into README.md")
    args = parser.parse_args()
    if args.readme:
        readme.replace("accuracy", *table_of(json.loads(args.readme.read_text(encoding="utf-8"))))
        return

    path = args.model or sample_model()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(args.device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    text = args.text.read_text(encoding="utf-8") if args.text else sample_text()
    half = len(text) // 2
    first, second = (torch.tensor(tokenizer(t)["input_ids"]) for t in (text[:half], text[half:]))
    generator = torch.Generator().manual_seed(args.seed)
    calibration, held_out = (
        [first[s : s + WINDOW].unsqueeze(0) for s in torch.randint(0, len(first) - WINDOW, (n,), generator=generator)]
        for n in (args.calibration_windows, args.calibration_windows // (HELD_OUT - 1))
    )

    rows: list[dict[str, Any]] = []
    for name in args.methods:
        subject = copy.deepcopy(model)
        if args.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        how = METHODS[name]
        bits: float = 32
        if how is not None:
            report = sparse_marlin.patch_model(
                subject,
                group_size=args.group_size,
                calibration=[*calibration, *held_out] if how.get("sparsity") == "auto" else calibration,
                **how,
            )
            bits = 32 if how.get("method") in PRUNE_ONLY else report.bits_per_weight
        minutes = (time.perf_counter() - began) / 60
        found = evaluate(
            subject, second, WINDOW, max_windows=args.evaluation_windows, reference=None if how is None else model
        )
        rows.append(
            {
                "model": Path(path).name,
                "method": name,
                "perplexity": found.perplexity,
                "kl": found.kl or 0.0,
                "agreement": 1.0 if found.agreement is None else found.agreement,
                "minutes": minutes,
                "peak_gb": _peak_gb(args.device),
                "bits": bits,
                "sparsity": (how or {"sparsity": None}).get("sparsity", "2:4") or "none",
                "calibration_windows": args.calibration_windows,
                "commit": results.commit(),
            }
        )
        print(
            f"{name:18} perplexity {found.perplexity:8.3f}   KL {rows[-1]['kl']:6.3f}   {bits:6.3f} bits per weight   "
            f"{minutes:5.2f} minutes",
            flush=True,
        )
        if args.json:  # after every row, so that an interrupted run keeps what it has
            rows = _write(args, rows)


def table_of(found: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]], str]:
    """Columns, rows and caption for README.md, from what ``--json`` has written.

    Not the minutes: the file does not say what else ran on the machine.
    """
    meta, rows = found["meta"], rows_of(found)
    columns = (
        "method",
        "calibration windows",
        "weights",
        "bits per weight",
        "perplexity",
        "KL to the original",
        "same likeliest token",
    )
    cells = [
        (
            "original" if r["method"] == "fp" else f"`{r['method']}`",
            "" if r["method"] == "fp" else str(r["calibration_windows"]),
            f"{KINDS[r['sparsity']]}{'float32' if r['bits'] == 32 else 'INT4'}",
            f"{r['bits']:.2f}",
            f"{r['perplexity']:.2f}",
            f"{r['kl']:.3f}",
            f"{r['agreement']:.1%}",
        )
        for r in rows
    ]
    caption = (
        f"{rows[0]['model']}, group {meta['group_size']}, float32; calibrated on windows of {meta['window']} tokens "
        f"of the first half of {meta['text']}, evaluated on {meta['evaluation_windows']} of the second, seed "
        f"{meta['seed']}. {meta['device']}, torch {meta['torch']}, transformers {meta['transformers']}, "
        f"{meta['date'][:10]}."
    )
    return columns, cells, caption


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file; what all of them have in common may be in its meta."""
    shared = {k: found["meta"][k] for k in ("calibration_windows", "commit") if k in found["meta"]}
    return [shared | r for r in found["rows"]]


def _write(args: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Writes the file anew; the rows in it, which may have come from several runs."""
    setting = {
        "device": _device(args.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sparse_marlin": sparse_marlin.__version__,
        "python": platform.python_version(),
        "text": args.text.name if args.text else "pydoc_data.topics",
        "group_size": args.group_size,
        "evaluation_windows": args.evaluation_windows,
        "window": WINDOW,
        "seed": args.seed,
    }
    if args.json.exists():
        before = json.loads(args.json.read_text(encoding="utf-8"))
        if setting.items() <= before["meta"].items():
            rows = [*rows_of(before), *rows]
    merged = {(r["method"], r["calibration_windows"]): r for r in rows}
    order = {name: i for i, name in enumerate(METHODS)}  # what is no longer measured comes last
    rows = [merged[key] for key in sorted(merged, key=lambda key: (order.get(key[0], len(order)), key))]
    command = results.command("bench/accuracy.py", sys.argv[1:])
    run = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "command": command}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    part = args.json.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"meta": setting | run, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    part.replace(args.json)
    return rows


def _device(device: str) -> str:
    return f"{platform.machine()} CPU" if device == "cpu" else torch.cuda.get_device_name()


def _peak_gb(device: str) -> float:
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
