"""Perplexity of compression methods, calibrated on the first half of a text and evaluated on the second.

    python bench/accuracy.py                                 the library's default, and what it is compared with
    python bench/accuracy.py --methods two-pass one-loop     these only
    python bench/accuracy.py --json bench/results/accuracy.json    rows of other methods and models stay there
    python bench/accuracy.py --model DIRECTORY --json ...    another model, such as bench/train.py makes
    python bench/accuracy.py --readme bench/results/accuracy.json  puts the table of the embedded model into README.md,
                                                             those of others into bench/README.md

Setting: 24 windows of 512 tokens drawn from the first half for calibration, the first 24 windows of the second half for
evaluation, float32, symmetric INT4, group 64, damping 1 %, blocks in sequence; "+refit" also trains them. auto-3.75 is
calibrated on the same windows, and measures its losses on a third as many more.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import resource
import sys
import time
from collections.abc import Mapping, Sequence
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
from sparse_marlin.samples import MODEL, sample_model, sample_text

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
COLUMNS = (
    "method",
    "calibration windows",
    "weights",
    "bits per weight",
    "perplexity",
    "KL to the original",
    "same likeliest token",
)
KINDS = {"none": "", "2:4": "2:4 ", "auto": "2:4 and dense "}  # of weights, as the table says


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=DEFAULT, metavar="METHOD")
    parser.add_argument("--calibration-windows", type=int, default=24)
    add_options(parser, "README.md")
    args = parser.parse_args()
    if args.readme:
        found = json.loads(args.readme.read_text(encoding="utf-8"))
        first, *others = by_model(rows_of(found))
        readme.replace_text("accuracy", text_of(found, [first]))
        readme.replace_text("accuracy", text_of(found, others) if others else "", readme.OF_BENCHMARKS)
        return
    order = [*METHODS]
    try:
        kept = Kept(args, "bench/accuracy.py", ("model", "method", "calibration_windows"), {"method": order})
    except results.ResultError as e:
        parser.error(str(e))
    setting = Setting(args)
    for name in args.methods:
        how = METHODS[name]
        row = setting.measure(how, args.calibration_windows)
        print(f"{name:24} {line_of(row)}", flush=True)
        kept.add({"model": setting.name, "method": name, **row})


def add_options(parser: argparse.ArgumentParser, where: str) -> None:
    """What programs that measure accuracy have in common; ``where`` is the file that --readme writes into."""
    parser.add_argument("--model", help="path of a Hugging Face model (default: the embedded SmolLM2-135M)")
    parser.add_argument("--text", type=Path, help="a UTF-8 text (default: the language reference that CPython ships)")
    parser.add_argument("--evaluation-windows", type=int, default=24)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the rows there, to those that a run alike has left in it")
    parser.add_argument("--readme", type=Path, metavar="FILE", help=f"only put a finished run's table into {where}")


class Setting:
    """A model, and the text that it is calibrated and evaluated on."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        path = args.model or sample_model()
        self.name = Path(path).resolve().name
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(args.device)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        text = args.text.read_text(encoding="utf-8") if args.text else sample_text()
        half = len(text) // 2
        self.first, self.second = (torch.tensor(tokenizer(t)["input_ids"]) for t in (text[:half], text[half:]))

    def windows(self, count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """So many windows [1, WINDOW] to calibrate on, and a third of that to measure losses on."""
        generator = torch.Generator().manual_seed(self.args.seed)
        calibration, held_out = (
            [self.first[s : s + WINDOW].unsqueeze(0) for s in starts]
            for starts in (
                torch.randint(0, len(self.first) - WINDOW, (n,), generator=generator)
                for n in (count, count // (HELD_OUT - 1))
            )
        )
        return calibration, held_out

    def measure(self, how: dict[str, Any] | None, calibration_windows: int) -> dict[str, Any]:
        """Compresses a copy of the model and evaluates it.

        Args:
            how: arguments of ``patch_model``; None: the original model is evaluated.
            calibration_windows: how many windows of WINDOW tokens it is calibrated on.

        Returns:
            A row of a result file, without what was measured.
        """
        subject = copy.deepcopy(self.model)
        if self.args.device != "cpu":
            torch.cuda.reset_peak_memory_stats(self.args.device)
        began = time.perf_counter()
        bits: float = 32
        if how is not None:
            calibration, held_out = self.windows(calibration_windows)
            report = sparse_marlin.patch_model(
                subject,
                group_size=self.args.group_size,
                calibration=[*calibration, *held_out] if how.get("sparsity") == "auto" else calibration,
                **({"refit": False} | how),
            )
            bits = 32 if how.get("method") in PRUNE_ONLY else report.bits_per_weight
        minutes = (time.perf_counter() - began) / 60
        windows = self.args.evaluation_windows
        reference = None if how is None else self.model
        found = evaluate(subject, self.second, WINDOW, max_windows=windows, reference=reference)
        return {
            "perplexity": found.perplexity,
            "kl": found.kl or 0.0,
            "agreement": 1.0 if found.agreement is None else found.agreement,
            "minutes": minutes,
            "peak_gb": peak_gb(self.args.device),
            "bits": bits,
            "sparsity": (how or {"sparsity": None}).get("sparsity", "2:4") or "none",
            "calibration_windows": calibration_windows,
            "commit": results.commit(),
        }


class Kept:
    """The rows of a result file, written anew after each one, so that an interrupted run keeps what it has."""

    def __init__(
        self, args: argparse.Namespace, script: str, key: Sequence[str], order: Mapping[str, Sequence[str]]
    ) -> None:
        """Begins the file, or goes on with it.

        Args:
            args: of the run.
            script: the program's path in the repository.
            key: the fields that tell rows apart, by which they are sorted; a row that is measured again is replaced.
            order: fields whose values are sorted as listed, and not by themselves; what is not listed comes last.

        Raises:
            results.ResultError: if the file's rows were measured in another setting.
        """
        self.path, self.script, self.key, self.order = args.json, script, key, order
        self.setting = {
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
        if self.path:
            with results.locked(self.path):
                if not self._read():
                    self._write({})  # a run in another setting, begun meanwhile, is refused before its work

    def _read(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        """What the file has now, by key."""
        if not self.path.exists():
            return {}
        before = json.loads(self.path.read_text(encoding="utf-8"))
        for name, value in self.setting.items():
            if before["meta"].get(name) != value:
                raise results.ResultError(
                    f"{self.path} holds rows of {name} {before['meta'].get(name)!r}, this run is of {value!r}: "
                    "write them to a file of their own"
                )
        return {self._key(r): r for r in rows_of(before)}

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row, in the place of one with the same key, and writes the file; several runs may do so at once."""
        if self.path:
            with results.locked(self.path):
                self._write(self._read() | {self._key(row): row})

    def _write(self, rows: dict[tuple[Any, ...], dict[str, Any]]) -> None:
        meta = {
            **self.setting,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": results.command(self.script, sys.argv[1:]),
        }
        results.write_json(self.path, meta, [rows[key] for key in sorted(rows, key=self._place)])

    def _key(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.key)

    def _place(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        place: list[Any] = []
        for name, value in zip(self.key, key, strict=True):
            listed = self.order.get(name)
            place += [value] if listed is None else [listed.index(value) if value in listed else len(listed), value]
        return tuple(place)


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file; what all of them have in common may be in its meta."""
    shared = {k: found["meta"][k] for k in ("calibration_windows", "commit") if k in found["meta"]}
    return [shared | r for r in found["rows"]]


def line_of(row: dict[str, Any]) -> str:
    """What a run prints of a row."""
    return (
        f"perplexity {row['perplexity']:8.3f}   KL {row['kl']:6.3f}   {row['bits']:6.3f} bits per weight   "
        f"{row['minutes']:5.2f} minutes"
    )


def text_of(found: dict[str, Any], models: Sequence[str]) -> str:
    """What a README says of a file that ``--json`` has written: a table and a caption for each of these models.

    Not the minutes: the file does not say what else ran on the machine.
    """
    rows = by_model(rows_of(found))
    return "\n\n".join(
        f"{readme.table(COLUMNS, [_cells(r) for r in rows[model]])}\n\n{caption_of(found['meta'], rows[model])}"
        for model in models
    )


def by_model(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each model; first the one that this library embeds."""
    names = sorted({r["model"] for r in rows}, key=lambda name: (not name.startswith(MODEL), name))
    return {name: [r for r in rows if r["model"] == name] for name in names}


def caption_of(meta: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """Of which models, on what and where, and of which commits: below a table."""
    models = " and ".join(by_model(rows))
    commits = list(dict.fromkeys(str(r["commit"])[:9] for r in rows))
    return (
        f"{models}, group {meta['group_size']}, float32; calibrated on windows of {meta['window']} tokens of the first "
        f"half of {meta['text']}, evaluated on {meta['evaluation_windows']} of the second, seed {meta['seed']}. "
        f"{meta['device']}, torch {meta['torch']}, transformers {meta['transformers']}, "
        f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}, {meta['date'][:10]}."
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    original = row["method"] == "fp"
    return (
        "original" if original else f"`{row['method']}`",
        "" if original else str(row["calibration_windows"]),
        f"{KINDS[row['sparsity']]}{'float32' if row['bits'] == 32 else 'INT4'}",
        f"{row['bits']:.2f}",
        f"{row['perplexity']:.2f}",
        f"{row['kl']:.3f}",
        f"{row['agreement']:.1%}",
    )


def _device(device: str) -> str:
    return f"{platform.machine()} CPU" if device == "cpu" else torch.cuda.get_device_name(device)


def peak_gb(device: str) -> float:
    """The most memory that was held: of the GPU, or of the process where the device is the CPU; GB = 2**30 bytes."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
