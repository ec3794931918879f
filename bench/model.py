"""Prefill and decoding of a whole model of real size, with random weights: python bench/model.py --model llama3-8b

python bench/model.py --model llama3-8b --json bench/results/h200/model-llama3-8b.json --resume --time-limit 300
python bench/model.py --model tiny                a few seconds on a CPU, to see that it works
python bench/model.py --readme bench/results/h200/model-llama3-8b.json      puts the table into README.md

What is multiplied does not change how long it takes, so nothing is downloaded and nothing is calibrated: weights are
normally distributed, and rounded to nearest where they are compressed. The model is made on the device layer by layer;
it is never there in another form as well. Modes: eager (a cache that grows), graph (a static cache, one CUDA graph for
a step), compile (a static cache, torch.compile with its CUDA graphs).
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import peers
import readme
import results
import torch
import transformers
from compare import DTYPES, digits, suggest
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import sparse_marlin
from sparse_marlin import CompressedLinear, Scheme

# Sizes of the Llama-shaped models.
MODELS: dict[str, dict[str, int]] = {
    "llama3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama3-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    },
}
WEIGHTS = ("16-bit", "dense", "2:4")
MODES = ("eager", "graph", "compile")
LONG_S = 1.0  # a prefill that takes longer is timed once


@dataclass(frozen=True)
class Measurement:
    """One line of the result.

    Attributes:
        weights: of the decoder blocks' linear layers: ``16-bit``, ``dense`` or ``2:4``.
        prefill_ms: the prompts of the whole batch, until the logits of their last tokens.
        decode_ms: one step: a token for each prompt of the batch, median.
        decode_tokens_per_s: of the whole batch.
        peak_gb: memory of the device, at most, cache and activations included (GB = 2**30 bytes; 0 on a CPU).
    """

    model: str
    dtype: str
    weights: str
    mode: str
    batch: int
    prompt: int
    prefill_ms: float
    prefill_tokens_per_s: float
    decode_ms: float
    decode_tokens_per_s: float
    peak_gb: float


def build(config: LlamaConfig, scheme: Scheme | None, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """A model with random weights, made on the device; its blocks' linear layers are compressed, unless scheme is None.

    A weight is made once per shape, and every layer of that shape gets its own copy.
    """
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    weights: dict[tuple[int, int], Any] = {}
    random = torch.Generator(device).manual_seed(0)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head" and scheme is not None:
            n, k = module.out_features, module.in_features
            if (n, k) not in weights:
                weights[n, k] = peers.random_weight(n, k, scheme.fit(k), device)
            layer = CompressedLinear(weights[n, k])
            # The form for the kernels is made anew for each layer; without one, which is on a CPU, layers share memory.
            if not layer.prepare(dtype) and device.type == "cuda":
                raise RuntimeError(f"no kernel takes {name} [{n}, {k}]: see the warning above")
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)
        elif module is model.model.rotary_emb:
            model.model.rotary_emb = type(module)(config).to(device)  # holds values that are computed
        elif own := dict(module.named_parameters(recurse=False)):
            for key, old in own.items():
                value = torch.empty(old.shape, dtype=dtype, device=device)
                value = value.normal_(std=0.02, generator=random) if value.dim() > 1 else value.fill_(1.0)
                setattr(module, key, nn.Parameter(value, requires_grad=False))
    return model.eval()


def weight_bytes(model: nn.Module) -> int:
    """Bytes of everything that a model keeps."""
    return sum(t.nbytes for t in [*model.parameters(), *model.buffers()])


class Decoder:
    """A model with a cache, for prompts of one length: prefill, then step by step."""

    def __init__(self, model: LlamaForCausalLM, batch: int, prompt: int, steps: int, mode: str) -> None:
        self.model, self.batch, self.prompt, self.steps, self.mode = model, batch, prompt, steps, mode
        self.device = next(model.parameters()).device
        # transformers has called the cache by two names.
        parameters = inspect.signature(LlamaForCausalLM.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._takes_position = "cache_position" in parameters
        random = torch.Generator(self.device).manual_seed(1)
        vocabulary = model.config.vocab_size
        self.tokens = torch.randint(vocabulary, (batch, prompt), generator=random, device=self.device)
        self.next = torch.randint(vocabulary, (batch, 1), generator=random, device=self.device)
        self.position = torch.full((1,), prompt, device=self.device)
        self.cache: Any = None
        self._compiled: Callable[..., Any] = model
        self._graph: Any = None

    def _call(self, function: Callable[..., Any], tokens: Tensor, position: Tensor) -> Tensor:
        options = {self._cache_name: self.cache, "use_cache": True, "logits_to_keep": 1}
        if self._takes_position:
            options["cache_position"] = position
        logits: Tensor = function(input_ids=tokens, **options).logits
        return logits

    def prefill(self) -> Tensor:
        """A new cache, filled with the prompts."""
        config = self.model.config
        if self.mode == "eager":
            self.cache = DynamicCache(config=config)
        else:
            # A few steps more than are timed: compiling and capturing take some.
            self.cache = StaticCache(config=config, max_cache_len=self.prompt + self.steps + 8)
        self.position.fill_(self.prompt)
        return self._call(self.model, self.tokens, torch.arange(self.prompt, device=self.device))

    def step(self) -> None:
        """The next token of every prompt, always the same one: which does not matter."""
        if self.mode == "compile":
            torch.compiler.cudagraph_mark_step_begin()
        self._call(self._compiled, self.next, self.position)
        self.position += 1

    def prepare(self) -> Callable[[], None]:
        """Compiles or captures the step where the mode says so; what then runs a step."""
        if self.mode == "compile":
            torch._dynamo.reset()
            self._compiled = torch.compile(self.model, mode="reduce-overhead", dynamic=False)
        if self.mode != "graph":
            for _ in range(3):
                self.step()
            return self.step
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # whatever is set up on first use
                self.step()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self.step()
        replay: Callable[[], None] = self._graph.replay
        return replay


def measure(decoder: Decoder, synchronize: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds of the prefill and of a step: medians, after a warm-up.

    A cache that grows has another length in each step, and attention may plan anew for every length that it meets
    first: all of them are visited once before they are timed.
    """
    prefills: list[float] = []
    repeats = 4 if decoder.mode == "eager" else 2  # it is the same in every mode
    while len(prefills) < repeats:
        decoder.cache = None
        prefills.append(timed(decoder.prefill, synchronize))
        if prefills[-1] > LONG_S and len(prefills) > 1:
            break
    step = decoder.prepare()
    if decoder.mode == "eager":
        for _ in range(decoder.steps):
            step()
        decoder.cache = None
        decoder.prefill()
        step = decoder.prepare()
    steps = [timed(step, synchronize) for _ in range(decoder.steps)]
    return 1e3 * statistics.median(prefills[1:]), 1e3 * statistics.median(steps)


def timed(function: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    """Seconds of a call, the device's work included."""
    synchronize()
    begin = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - begin


def run(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    synchronize = (lambda: torch.cuda.synchronize(device)) if cuda else (lambda: None)
    dtype = DTYPES[args.dtype]
    length = max(args.prompt) + args.steps + 8
    config = LlamaConfig(**MODELS[args.model], max_position_embeddings=max(8192, length), tie_word_embeddings=False)
    deadline = None if args.time_limit is None else time.monotonic() + args.time_limit
    meta: dict[str, Any] = {
        **about("bench/model.py", args.argv, device),
        "model": args.model,
        "dtype": args.dtype,
        "bits": args.bits,
        "group_size": args.group_size,
        "steps": args.steps,
        "weights_gb": {},
        "failed": [],
    }
    rows: list[Measurement] = []

    def save() -> None:
        if not args.json:
            return
        with results.locked(args.json):  # several runs, of other settings each, may go on with one file
            if args.resume and args.json.exists():
                rows[:] = merged(earlier_rows(args.json, meta), rows)
                measured = {setting_of(r) for r in rows}
                meta["failed"] = [f for f in meta["failed"] if tuple(f.values())[:4] not in measured]
            results.write_json(args.json, meta, [asdict(r) for r in rows])

    if args.resume:
        save()
    known = {setting_of(r) for r in rows}

    for kind in args.weights:
        todo = [
            (mode, batch, prompt)
            for mode in args.modes
            for batch in args.batch
            for prompt in args.prompt
            if (kind, mode, batch, prompt) not in known
        ]
        if not todo:
            continue
        scheme = (
            None
            if kind == "16-bit"
            else Scheme(args.bits, args.group_size, "2:4" if kind == "2:4" else None, dtype=dtype)
        )
        began = time.perf_counter()
        with torch.no_grad():
            model = build(config, scheme, dtype, device)
        synchronize()
        meta["weights_gb"][kind] = digits(weight_bytes(model) / 2**30)
        seconds = time.perf_counter() - began
        print(f"{args.model} {kind}: {meta['weights_gb'][kind]:.2f} GB of weights, made in {seconds:.1f} s", flush=True)
        for mode, batch, prompt in todo:
            if deadline is not None and time.monotonic() >= deadline:
                print(f"stopped at the time limit\n{summary(rows)}")
                save()
                return
            if cuda:
                torch.cuda.reset_peak_memory_stats(device)
            try:
                with torch.no_grad():
                    prefill, step = measure(Decoder(model, batch, prompt, args.steps, mode), synchronize)
            except Exception as e:  # out of memory, most of all: the smaller ones are still of interest
                reason = f"{type(e).__name__}: {peers.first_line(e)}"
                del e
                meta["failed"].append(
                    {"weights": kind, "mode": mode, "batch": batch, "prompt": prompt, "reason": reason}
                )
                print(f"  {mode} batch {batch} prompt {prompt}: {reason}", flush=True)
                release(cuda)
                continue
            peak = torch.cuda.max_memory_allocated(device) / 2**30 if cuda else 0.0
            row = Measurement(
                args.model,
                args.dtype,
                kind,
                mode,
                batch,
                prompt,
                digits(prefill),
                digits(1e3 * batch * prompt / prefill),
                digits(step),
                digits(1e3 * batch / step),
                digits(peak),
            )
            rows.append(row)
            print(
                f"  {mode:8} batch {batch:3} prompt {prompt:5}: prefill {row.prefill_ms:9.2f} ms, step "
                f"{row.decode_ms:8.3f} ms, {row.decode_tokens_per_s:9.1f} tokens/s, peak {peak:6.2f} GB",
                flush=True,
            )
            release(cuda)
            save()
        del model
        release(cuda)
        save()
    print(summary(rows))


def about(script: str, argv: Sequence[str], device: torch.device) -> dict[str, Any]:
    """What a file says of a run with a model of transformers, on a GPU or without."""
    return {
        **results.about(script, argv),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "sparse_marlin": sparse_marlin.__version__,
        },
    }


def setting_of(row: Measurement) -> tuple[str, str, int, int]:
    return row.weights, row.mode, row.batch, row.prompt


def merged(old: Sequence[Measurement], new: Sequence[Measurement]) -> list[Measurement]:
    """The rows of both, in the order in which one run measures them; what both have is that of ``new``."""
    rows = {setting_of(r): r for r in [*old, *new]}
    return sorted(rows.values(), key=lambda r: (WEIGHTS.index(r.weights), MODES.index(r.mode), r.batch, r.prompt))


def earlier_rows(path: Path, meta: dict[str, Any]) -> list[Measurement]:
    """The rows of a file, whose weights' sizes and failures are added to ``meta``.

    Raises:
        results.ResultError: if it cannot be read, is of another commit or GPU, or was measured with other options.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [Measurement(**row) for row in found["rows"]]
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise results.ResultError(f"{path} holds no results of this program: {type(e).__name__}: {e}") from e
    for name in ("commit", "gpu", "model", "dtype", "bits", "group_size", "steps"):
        if found["meta"].get(name) != meta[name]:
            raise results.ResultError(
                f"{path} holds results of {name} {found['meta'].get(name)!r}, this run is {meta[name]!r}: "
                "write them to a file of their own"
            )
    meta["weights_gb"] |= found["meta"]["weights_gb"]
    meta["failed"] += [f for f in found["meta"]["failed"] if f not in meta["failed"]]
    return rows


def release(cuda: bool) -> None:
    """Gives memory back between measurements."""
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()


def side_by_side(rows: Sequence[Measurement]) -> dict[tuple[str, int, int], dict[str, Measurement]]:
    """By mode, batch and prompt, and then by weights."""
    cells: dict[tuple[str, int, int], dict[str, Measurement]] = {}
    for r in rows:
        cells.setdefault((r.mode, r.batch, r.prompt), {})[r.weights] = r
    return cells


def summary(rows: Sequence[Measurement]) -> str:
    """Steps of the compressed models beside those of the original."""
    lines = []
    for (mode, batch, prompt), found in side_by_side(rows).items():
        base = found.get(WEIGHTS[0])
        line = [mode, str(batch), str(prompt)]
        for kind in WEIGHTS:
            r = found.get(kind)
            speed = f" ({base.decode_ms / r.decode_ms:.2f}x)" if r and base and kind != WEIGHTS[0] else ""
            line.append(f"{r.decode_ms:.3f}{speed}" if r else "-")
        for kind in WEIGHTS:
            r = found.get(kind)
            speed = f" ({base.prefill_ms / r.prefill_ms:.2f}x)" if r and base and kind != WEIGHTS[0] else ""
            line.append(f"{r.prefill_ms:.2f}{speed}" if r else "-")
        lines.append(line)
    columns = ["mode", "batch", "prompt", *(f"step ms {k}" for k in WEIGHTS), *(f"prefill ms {k}" for k in WEIGHTS)]
    return "\n" + results.table(columns, lines)


def text_of(found: dict[str, Any]) -> str:
    """What README.md says of a file that ``--json`` has written."""
    meta, rows = found["meta"], [Measurement(**row) for row in found["rows"]]
    lines = [
        [
            *map(str, setting),
            *(f"{of_setting[k].decode_ms:.2f}" if k in of_setting else "" for k in WEIGHTS),
            *(f"{of_setting[k].prefill_ms:.1f}" if k in of_setting else "" for k in WEIGHTS),
        ]
        for setting, of_setting in side_by_side(rows).items()
    ]
    columns = ["mode", "batch", "prompt", *(f"step, {k}" for k in WEIGHTS), *(f"prefill, {k}" for k in WEIGHTS)]
    sizes = ", ".join(f"{kind} {meta['weights_gb'][kind]:.1f}" for kind in WEIGHTS if kind in meta["weights_gb"])
    versions = meta["versions"]
    return (
        f"{readme.table(columns, lines)}\n\nMilliseconds of {meta['model']} with random weights: a step of the whole "
        f"batch, and the prefill of its prompts. GiB of weights, embeddings and head included: {sizes}. "
        f"{meta['gpu']}, {meta['dtype']}, INT{meta['bits']} group {meta['group_size']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, commit {meta['commit']}, {meta['date'][:10]}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b", help=f"one of {', '.join(MODELS)} (default: llama3-8b)")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--prompt", nargs="+", type=int, default=[128, 2048])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager", "compile"])
    parser.add_argument("--steps", type=int, default=16, help="tokens that are decoded and timed (default: 16)")
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8))
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--dtype", default="float16", choices=DTYPES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="leave out what FILE has, and add the rest to it")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="only put a finished run's table into README.md")
    args = parser.parse_args(arguments)
    if args.readme:
        readme.replace_text("model", text_of(json.loads(args.readme.read_text(encoding="utf-8"))))
        return 0
    args.argv = sys.argv[1:] if arguments is None else list(arguments)
    if args.model not in MODELS:
        parser.error(f"no model {args.model!r}: {suggest(args.model, MODELS)}")
    for name in ("batch", "prompt"):
        if min(getattr(args, name)) < 1:
            parser.error(f"--{name} must be 1 or more, got {min(getattr(args, name))}")
    if args.steps < 1:
        parser.error(f"--steps must be 1 or more, got {args.steps}")
    if "graph" in args.modes and not args.device.startswith("cuda"):
        parser.error("--modes graph needs a GPU: CUDA graphs exist on nothing else")
    if args.model != "tiny" and not args.device.startswith("cuda"):
        parser.error(f"{args.model} needs a GPU; --model tiny runs on a CPU")
    if args.resume and args.json is None:
        parser.error("--resume needs --json FILE: the file that holds what was measured")
    try:
        run(args)
    except results.ResultError as e:
        parser.error(str(e))
    return 0


if __name__ == "__main__":
    sys.exit(main())
