"""The command ``sparse-marlin``: compress, inspect, convert, evaluate, generate, bench."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import __version__, bench, checkpoints, models, remembered, runtime, samples, tuning
from .compression import patch_model
from .compression.adapters import check_adapter
from .compression.permutation import check_permute
from .compression.refit import check_refit
from .compression.solve import METHODS_24, METHODS_DENSE, check_damping, check_method
from .compression.structure import check_settings
from .dispatch import PLAN_TOKENS, RECORDED, Device, choice_of, explain, parse_plan
from .evaluate import evaluate, evaluate_tasks, find_tasks
from .scheme import ADAPTER_BITS, GROUP_SIZES, NUM_BITS, Scheme, Sparsity

# A table that goes into a file or a pipe need not fit the 80 columns that are assumed there.
_out = Console(width=None if sys.stdout.isatty() else 140)
_err = Console(stderr=True, highlight=False)

_MODEL_HELP = f"local directory, .gguf file, {samples.MODEL!r} ({samples.MODEL_TITLE}), or a name on the hub"
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_BENCH_TOKENS = (1, 16, 64, 256, 1024, 4096)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0, or 1 if the job failed, or 130 if it was interrupted.

    Raises:
        SystemExit: with 2 for a command line that cannot be understood.
    """
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except KeyboardInterrupt:
        _err.print("interrupted")
        return 130
    except Exception as e:
        if args.debug:
            traceback.print_exc()
        else:
            # A message that was written for users stands alone; any other needs its type to make sense.
            ours = isinstance(e, (ValueError, OSError, ImportError, RuntimeError)) and str(e)
            text = str(e) if ours else f"{type(e).__name__}: {e} (--debug shows where it happened)"
            _err.print(f"[red]error:[/red] {escape(text)}", soft_wrap=True)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparse-marlin", description="2:4-sparse and dense INT4/INT8 weights for LLMs."
    )
    parser.add_argument("--version", action="version", version=f"sparse-marlin {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        sub.set_defaults(run=run)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return sub

    p = command("compress", _compress, "Compress a model and save it.")
    p.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    p.add_argument("out", metavar="OUT", type=Path, help="directory to write")
    _scheme(p, auto="; auto: the layers that 2:4 hurts most stay dense, with one of the next two options")
    p.add_argument("--target-bits", type=float, metavar="X", help="stored bits per weight at most, scales included")
    p.add_argument(
        "--max-loss-increase",
        type=float,
        metavar="Y",
        help="by how much the loss may grow, in nats per token, on the last quarter of the calibration windows",
    )
    p.add_argument(
        "--calibration",
        default="self",
        metavar="FILE|self",
        help="text to calibrate on, or what the model writes itself",
    )
    p.add_argument("--samples", type=_positive, default=128, metavar="N", help="calibration windows")
    p.add_argument("--sequence-length", type=_positive, default=512, metavar="N", help="tokens per calibration window")
    p.add_argument(
        "--method", choices=("auto", *METHODS_24, *METHODS_DENSE), default="auto", help="how to prune and quantize"
    )
    p.add_argument(
        "--refit",
        action=argparse.BooleanOptionalAction,
        help="train each block to put out what it does in the original model (default: with --device cuda)",
    )
    p.add_argument(
        "--permute",
        action="store_true",
        help="put channels into an order in which 2:4 masks keep more; costs nothing at run time",
    )
    p.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="layers to leave out; repeatable")
    p.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="layers to take, no others; repeatable"
    )
    p.add_argument("--dtype", choices=tuple(_DTYPES), help="precision of the scales; default: by the layer's own")
    p.add_argument(
        "--adapter-rank",
        type=_rank,
        default=0,
        metavar="R",
        help="low-rank adapters that correct each layer: their rank, or a fraction of it, such as 0.1; 0: none",
    )
    p.add_argument("--adapter-bits", type=int, choices=ADAPTER_BITS, default=16, help="how adapters are stored")
    p.add_argument("--damping", type=float, default=0.01, help="share of the Hessian's mean diagonal added to it")
    p.add_argument(
        "--on-nonfinite", choices=("raise", "fallback"), default="raise", help="for inputs with NaN or infinity"
    )
    p.add_argument(
        "--checkpoint-dir", type=Path, metavar="DIR", help="keep finished blocks there, and resume from them"
    )
    p.add_argument("--report", type=Path, metavar="FILE", help="write the report of all layers there, as JSON")
    p.add_argument("--overwrite", action="store_true", help="replace a compressed model at OUT")
    _common(p)

    p = command("inspect", _inspect, "Show how a model is stored, in whichever format, without reading its weights.")
    p.add_argument("path", metavar="PATH", type=Path, help="directory of a model")
    p.add_argument("--layers", action="store_true", help="list every layer by itself")

    p = command("convert", _convert, "Convert a model between formats; its weights stay what they are.")
    p.add_argument("source", metavar="SRC", type=Path, help="directory of a model, in any format that inspect knows")
    p.add_argument("out", metavar="DST", type=Path, help="directory to write")
    p.add_argument("--to", choices=checkpoints.TARGETS, default=checkpoints.TARGETS[0], help="format to write")
    p.add_argument("--bits", type=int, choices=NUM_BITS, help="quantize weights that are 2:4 in floating point")
    p.add_argument("--group-size", type=int, choices=GROUP_SIZES, default=128, help="columns per scale for these")
    p.add_argument(
        "--lora", type=Path, metavar="DIR", help="write low-rank adapters there, as a LoRA in the files of PEFT"
    )

    p = command("evaluate", _evaluate, "Measure the perplexity of a model on a text, or how it does at tasks.")
    p.add_argument("model", metavar="PATH", help=_MODEL_HELP)
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", type=Path, metavar="FILE", help="text, UTF-8")
    what.add_argument("--tasks", nargs="+", metavar="NAME", help="tasks of lm-evaluation-harness (pip install lm-eval)")
    p.add_argument("--task-path", type=Path, metavar="DIR", help="directory of more tasks, as YAML files")
    p.add_argument("--reference", metavar="MODEL", help="model to compare with")
    p.add_argument("--window", type=_positive, metavar="N", help="tokens per window; default: 512")
    p.add_argument("--max-windows", type=_positive, metavar="N", help="windows to evaluate; default: all")
    p.add_argument("--batch-size", type=_positive, default=1, metavar="N", help="windows or sequences per pass")
    p.add_argument("--report", type=Path, metavar="FILE", help="write the numbers there, as JSON")
    p.add_argument("--device", type=_device, help="where to compute, for example cuda; default: the CPU")

    p = command("generate", _generate, "Continue a prompt.")
    p.add_argument("model", metavar="PATH", help=_MODEL_HELP)
    p.add_argument("--prompt", required=True, help="text to continue")
    p.add_argument("--chat", action="store_true", help="treat the prompt as a user's message, with the chat template")
    p.add_argument("--max-new-tokens", type=_positive, default=64, metavar="N", help="tokens to write at most")
    p.add_argument("--temperature", type=float, default=0.0, help="0 always takes the likeliest token")
    _common(p)

    p = command("bench", _bench, "Show which kernels multiply the layers of a model on a GPU, and measure them.")
    p.add_argument(
        "layers",
        metavar="MODEL|NxK",
        nargs="+",
        help=f"out_features x in_features, as 4096x14336, or a model: {_MODEL_HELP}",
    )
    _scheme(p)
    p.add_argument("--dtype", choices=tuple(_DTYPES), help="of the inputs; default: the model's, or float16")
    p.add_argument(
        "--tokens",
        type=_token_counts,
        metavar="M,M,...",
        help=f"numbers of tokens; default: {','.join(map(str, _BENCH_TOKENS))}, to tune those of a whole plan",
    )
    what = p.add_mutually_exclusive_group()
    what.add_argument("--tune", action="store_true", help="measure all candidates, and remember the best ones")
    what.add_argument("--explain", type=_positive, metavar="M", help="only say what is chosen for M tokens, and why")
    p.add_argument(
        "--device",
        type=_bench_device,
        help=f"GPU, for example cuda:1, or one whose choices need no GPU to be shown: {', '.join(RECORDED)}",
    )
    return parser


def _scheme(p: argparse.ArgumentParser, auto: str = "") -> None:
    p.add_argument(
        "--sparsity",
        choices=("2:4", "none", *(["auto"] if auto else [])),
        default="2:4",
        help=f"keep two of every four weights, or all{auto}",
    )
    p.add_argument("--bits", type=int, choices=NUM_BITS, default=4, help="bits per kept weight")
    p.add_argument(
        "--group-size", type=int, choices=GROUP_SIZES, default=128, help="columns per scale; -1: one scale per channel"
    )


def _common(p: argparse.ArgumentParser) -> None:
    p.add_argument("--device", type=_device, help="where to compute, for example cuda; default: the CPU")
    p.add_argument("--seed", type=int, default=0, help="for everything that is random")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _rank(text: str) -> int | float:
    return int(text) if text.isdecimal() else float(text)


def _token_counts(text: str) -> list[int]:
    return sorted({_positive(part) for part in text.split(",")})


def _bench_device(text: str) -> torch.device | Device:
    return RECORDED.get(text) or _device(text)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError as e:
        raise argparse.ArgumentTypeError(f"{text!r} is no device: cpu, cuda or cuda:1, for example") from e
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(
            f"there is no {text} here: torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return device


# ------------------------------------------------------------------------------------------------------------ commands


def _compress(args: argparse.Namespace) -> None:
    # Everything that could refuse is asked before the hours of work.
    sparsity: Sparsity | Literal["auto"] | None = None if args.sparsity == "none" else args.sparsity
    if sparsity == "auto":
        check_settings(args.method, args.target_bits, args.max_loss_increase)
    elif args.target_bits is not None or args.max_loss_increase is not None:
        raise ValueError("--target-bits and --max-loss-increase need --sparsity auto")
    elif args.method != "auto":
        check_method(args.method, sparsity, allow_prune_only=False)
    check_refit(args.refit, args.method)
    check_permute(args.permute, sparsity)
    check_damping(args.damping)
    check_adapter(args.adapter_rank, args.adapter_bits, args.method)
    if args.adapter_rank and sparsity == "auto":
        raise ValueError("--adapter-rank does not go with --sparsity auto")
    try:
        checkpoints.check_destination(args.out, overwrite=args.overwrite)
    except FileExistsError as e:
        raise FileExistsError(str(e).replace("overwrite=True", "--overwrite")) from None
    _check_report(args.report)
    calibration = None if args.calibration == "self" else [_read_text(Path(args.calibration))]
    source = _find(args.model)
    tokenizer = source.tokenizer()
    model = source.model()
    start = time.perf_counter()
    report = patch_model(
        model,
        sparsity,
        args.bits,
        args.group_size,
        target_bits=args.target_bits,
        max_loss_increase=args.max_loss_increase,
        calibration=calibration,
        tokenizer=tokenizer,
        method=args.method,
        refit=args.refit,
        permute=args.permute,
        skip=args.skip,
        only=args.only,
        dtype=_DTYPES.get(args.dtype),
        damping=args.damping,
        num_samples=args.samples,
        sequence_length=args.sequence_length,
        seed=args.seed,
        device=args.device,
        checkpoint_dir=args.checkpoint_dir,
        on_nonfinite=args.on_nonfinite,
        adapter_rank=args.adapter_rank,
        adapter_bits=args.adapter_bits,
    )
    _out.print(report.table())
    if report.structure:
        _out.print(report.structure.table())
    if args.report:
        report.save(args.report)
    checkpoints.save(model, args.out, tokenizer=tokenizer, overwrite=args.overwrite)
    size = sum(t.nbytes for t in checkpoints.describe(args.out).files.tensors.values())
    _out.print(
        f"{args.out}: {size / 1e6:.1f} MB of weights, {report.bits_per_weight:.2f} bits per compressed weight, "
        f"{time.perf_counter() - start:.0f} s"
    )


def _inspect(args: argparse.Namespace) -> None:
    checkpoint = checkpoints.describe(args.path)
    stored = checkpoint.files.tensors
    groups: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for name, layer in checkpoint.layers.items():
        shown = name if args.layers else re.sub(r"\.\d+\.", ".*.", name)
        shape = f"{layer.out_features} × {layer.in_features}"
        weights = layer.out_features * layer.in_features
        scheme = str(layer.scheme or "2:4 floating point") + (f" + {layer.adapter}" if layer.adapter else "")
        groups.setdefault((shown, shape, scheme), []).append((weights, checkpoint.layer_nbytes(name)))
    table = Table(title=f"{type(checkpoint.model).__name__} in {args.path}, format {checkpoint.format}")
    for title in ("layers", "out × in", "scheme", "count", "MB", "bits/weight"):
        left = title in ("layers", "scheme")
        table.add_column(title, justify="left" if left else "right", overflow="fold")
    for key, sizes in groups.items():
        weights, nbytes = (sum(column) for column in zip(*sizes, strict=True))
        table.add_row(*key, str(len(sizes)), f"{nbytes / 1e6:.2f}", f"{8 * nbytes / weights:.3f}")
    if groups:
        _out.print(table)
    sizes = [size for part in groups.values() for size in part]
    weights, nbytes = sum(w for w, _ in sizes), sum(b for _, b in sizes)
    total = sum(t.nbytes for t in stored.values())
    rows = {
        "format": checkpoint.format,
        "compressed layers": f"{len(checkpoint.layers)}, {weights / 1e6:.1f} M weights, {nbytes / 1e6:.1f} MB",
        "bits per compressed weight": f"{8 * nbytes / weights:.3f}" if weights else "none is compressed",
        "everything else": f"{(total - nbytes) / 1e6:.1f} MB",
        "all tensors": f"{total / 1e6:.1f} MB in {len({t.file for t in stored.values()})} file(s)",
        "computes in": str(checkpoint.dtype).removeprefix("torch."),
    }
    for title, value in rows.items():
        _out.print(f"{title}: {value}")


def _convert(args: argparse.Namespace) -> None:
    def announce(job: checkpoints.Job) -> None:
        _err.print(
            f"{args.source}: {job.checkpoint.format}, {len(job.checkpoint.layers)} compressed layers; "
            f"{len(job.shards)} file(s) to write, about {job.peak_bytes / 1e9:.2f} GB of memory",
            soft_wrap=True,
        )

    options = {"bits": args.bits, "group_size": args.group_size, "lora": args.lora, "announce": announce}
    checkpoints.convert(args.source, args.out, args.to, progress=sys.stderr.isatty(), **options)
    _out.print(f"{args.out}: written" + (f", and its adapters in {args.lora}" if args.lora else ""))


def _check_report(report: Path | None) -> None:
    if report and not report.absolute().parent.is_dir():
        raise FileNotFoundError(f"cannot write {report}: its directory does not exist")


def _evaluate(args: argparse.Namespace) -> None:
    _check_report(args.report)
    if args.tasks and (args.reference or args.window or args.max_windows):
        raise ValueError("--reference, --window and --max-windows go with --text, not with --tasks")
    if args.text and args.task_path:
        raise ValueError("--task-path goes with --tasks, not with --text")
    numbers = _evaluate_tasks(args) if args.tasks else _evaluate_text(args)
    if args.report:
        args.report.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def _evaluate_text(args: argparse.Namespace) -> dict[str, Any]:
    text = _read_text(args.text)
    source = _find(args.model)
    tokens = source.tokenizer()(text)["input_ids"]
    model = source.model(args.device)
    reference = _find(args.reference).model(args.device) if args.reference else None
    result = evaluate(
        model,
        tokens,
        args.window or 512,
        max_windows=args.max_windows,
        batch_size=args.batch_size,
        reference=reference,
    )
    table = Table(title=f"{args.model} on {args.text.name}: {result.tokens} tokens in {result.windows} windows")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("perplexity", f"{result.perplexity:.3f}")
    if result.reference_perplexity is not None:
        table.add_row(f"perplexity of {args.reference}", f"{result.reference_perplexity:.3f}")
        table.add_row("KL divergence from it, nats per token", f"{result.kl:.4f}")
        table.add_row("same likeliest token", f"{result.agreement:.1%}")
    _out.print(table)
    return asdict(result)


def _evaluate_tasks(args: argparse.Namespace) -> dict[str, Any]:
    find_tasks(args.tasks, args.task_path)  # before the weights are read
    source = _find(args.model)
    tokenizer = source.tokenizer()
    model = source.model(args.device)
    found = evaluate_tasks(model, tokenizer, args.tasks, task_path=args.task_path, batch_size=args.batch_size)
    table = Table(title=f"{args.model} at tasks of lm-evaluation-harness")
    for title in ("task", "metric", "value"):
        table.add_column(title, justify="right" if title == "value" else "left")
    for task, metrics in found.items():
        for metric, value in metrics.items():
            table.add_row(task, metric, f"{value:.4f}")
    _out.print(table)
    return found


def _generate(args: argparse.Namespace) -> None:
    from transformers import TextStreamer

    if args.temperature < 0:
        raise ValueError(f"--temperature must not be negative, got {args.temperature}")
    source = _find(args.model)
    tokenizer = source.tokenizer()
    model: Any = source.model(args.device)
    if args.chat:
        message = [{"role": "user", "content": args.prompt}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(args.prompt, return_tensors="pt")
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError("the prompt holds no token")
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    torch.manual_seed(args.seed)
    start = time.perf_counter()
    ids = model.generate(
        **inputs.to(model.device),
        **sampling,
        max_new_tokens=args.max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=args.chat, skip_special_tokens=True),
    )
    seconds = time.perf_counter() - start
    count = ids.shape[1] - inputs["input_ids"].shape[1]
    _err.print(f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s", style="dim")


def _bench(args: argparse.Namespace) -> None:
    sparsity: Sparsity | None = None if args.sparsity == "none" else "2:4"
    gpu, device = _gpu_of(args)
    layers = bench.layers_of(args.layers, Scheme(args.bits, args.group_size, sparsity), _DTYPES.get(args.dtype))
    for layer, count in layers.items():
        kernels = runtime.kernels(layer.scheme, layer.dtype)
        tuned = (layer.N, layer.K, layer.scheme, layer.dtype, device, kernels)
        if args.explain:
            _out.print(explain(layer.problem(args.explain), device, kernels), markup=False, soft_wrap=True)
            if plan := remembered.tuned_plan(*tuned):
                config = choice_of(parse_plan(plan), args.explain)
                _out.print(f"instead, as it was tuned here: {config.kernel} in {config.schedule}")
            continue
        weight = None if gpu is None else layer.weight(gpu)
        if weight is not None and (reason := runtime.why_no_kernel(weight, layer.dtype)):
            raise RuntimeError(f"{layer}: {reason}")
        if weight is not None and args.tune:
            tuning.tune(weight, layer.dtype, args.tokens or PLAN_TOKENS, progress=sys.stderr.isatty())
        choices = bench.expected(layer, device, kernels, args.tokens or _BENCH_TOKENS)
        if weight is not None:
            choices = list(bench.measured(layer, weight, choices))
        table = Table(
            title=f"{layer}{f', {count} layers' if count > 1 else ''}, {device.name}"
            f"{', tuned' if remembered.tuned_plan(*tuned) else ''}"
        )
        for title in ("tokens", "kernel", "schedule", "expected us", *(("measured us", "GB/s") if gpu else ())):
            table.add_column(title, justify="left" if title in ("kernel", "schedule") else "right")
        for c in choices:
            times = () if c.microseconds is None else (f"{c.microseconds:.1f}", f"{c.gbps:.0f}")
            table.add_row(str(c.tokens), c.config.kernel, c.config.schedule, f"{c.config.microseconds:.1f}", *times)
        _out.print(table)
    if args.tune:
        _out.print(f"{remembered.tuned_file()}: the plans that were found; later runs take them", soft_wrap=True)


def _gpu_of(args: argparse.Namespace) -> tuple[torch.device | None, Device]:
    """The GPU to measure on, or None for one that is only recorded, and its properties."""
    recorded = args.device if isinstance(args.device, Device) else None
    gpu = args.device or torch.device("cuda")
    if recorded and args.tune:
        raise ValueError(f"--tune measures on a GPU that is here: an {recorded.name} is only recorded")
    if recorded is None and not (gpu.type == "cuda" and torch.cuda.is_available()):
        found = "torch sees none here" if gpu.type == "cuda" else f"{gpu} is none"
        raise RuntimeError(
            f"bench measures the kernels, which needs an NVIDIA GPU, and {found}. "
            "--device h200 shows what an H200 would run"
        )
    if reason := runtime.extension_error():
        advice = "; SPARSE_MARLIN_CUDA_ARCHS=90a pip install --no-build-isolation . compiles them, with nvcc and no GPU"
        raise RuntimeError(f"the compiled kernels are not here: {reason}{advice if recorded else ''}")
    if recorded:
        return None, recorded
    gpu = torch.device("cuda", torch.cuda.current_device() if gpu.index is None else gpu.index)
    return gpu, runtime.device_properties(gpu.index)


# ------------------------------------------------------------------------------------------------------------- helpers


def _find(name: str) -> models.Source:
    """Finds a model and says how much memory its weights will take, before they are read."""
    source = models.find(name)
    free = _free_memory()
    _err.print(
        f"{name}: {source.weight_bytes() / 1e9:.2f} GB of memory for the weights"
        + (f", {free / 1e9:.1f} GB are free" if free else ""),
        soft_wrap=True,
    )
    return source


def _free_memory() -> int | None:
    """Bytes that the system could hand out, where it says so."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _read_text(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as e:
        raise OSError(f"cannot read {file}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ValueError(f"{file} is not UTF-8 text: {e}") from e
    if not text.strip():
        raise ValueError(f"{file} holds no text")
    return text


if __name__ == "__main__":
    sys.exit(main())
