"""Trains a small GPT-NeoX on text that is at hand without a model hub: a second architecture to measure accuracy on.

    python bench/train.py corpus corpus.txt.xz                       the text, from the packages of the running Python
    python bench/train.py model corpus.txt.xz DIRECTORY              the model, on the GPU if there is one
    python bench/accuracy.py --model DIRECTORY                       what compressing it costs

GPT-NeoX has what SmolLM2, a Llama, has not: LayerNorm, biases, one fused projection for query, key and value, GELU, and
attention and MLP in parallel. The model is that of Pythia in shape, 8 blocks of width 512; it is not worth keeping, so
that the repository keeps how it is made.

The corpus is a file of its own, since packages differ from machine to machine: the docstrings and the documentation
(.rst, .md, .txt) of the standard library and of the installed packages, every paragraph once, none that also stands in
the text of bench/accuracy.py. The last 1 % of its tokens is held out, and the loss on them is printed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import lzma
import math
import os
import re
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch import Tensor
from tqdm import tqdm

from sparse_marlin.evaluate import perplexity
from sparse_marlin.samples import sample_text

DOCUMENTS = (".py", ".rst", ".md", ".txt")
LONGEST = 500_000  # characters of a document; what is longer is data, or generated
LETTERS = 0.5  # least share of letters in a paragraph: tables of numbers are no text
SEPARATOR = "\f"  # between the documents of a corpus, where the tokens have END
END = "<|endoftext|>"
HELD_OUT = 0.01
CORPUS_BYTES = 45 << 20


@dataclass(frozen=True)
class Setting:
    """What is trained, and how.

    Attributes:
        vocabulary: of the byte-level BPE tokenizer.
        layers, width, heads: of the model; its MLPs are four times as wide.
        window: tokens of a sequence.
        batch: sequences per step.
        steps: in all. The default is for some minutes of an H200.
        rate: of AdamW, after the first twentieth of the steps; from there a cosine leads to a tenth of it.
        dropout: the corpus is read several times, and would be learnt by heart without.
        seed: of the weights, the dropout and the order of the windows.
    """

    vocabulary: int = 8192
    layers: int = 8
    width: int = 512
    heads: int = 8
    window: int = 512
    batch: int = 64
    steps: int = 2000
    rate: float = 1e-3
    dropout: float = 0.1
    seed: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    corpus = commands.add_parser("corpus", help="writes the text to train on")
    corpus.add_argument("file", type=Path, help="compressed if it ends in .xz")
    model = commands.add_parser("model", help="trains on such a text")
    model.add_argument("file", type=Path, help="what `corpus` has written")
    model.add_argument("directory", type=Path, help="for the model, its tokenizer and train.log")
    model.add_argument("--steps", type=int, default=Setting.steps)
    model.add_argument("--seed", type=int, default=Setting.seed)
    model.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.what == "corpus":
        paths = sysconfig.get_paths()
        roots = [Path(p) for p in dict.fromkeys([paths["stdlib"], paths["purelib"], paths["platlib"]])]
        text = make_corpus(roots, sample_text())
        with _opened(args.file, "wt") as file:
            file.write(text)
        print(f"{len(text.encode()) / 1e6:.1f} MB, {args.file.stat().st_size / 1e6:.1f} MB on disk")
    else:
        if args.steps < 1:
            parser.error(f"--steps must be at least 1, got {args.steps}")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS need not repeat its bits
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # for debugging only
        with _opened(args.file, "rt") as file:
            train(file.read(), args.directory, Setting(steps=args.steps, seed=args.seed), args.device)


def make_corpus(roots: list[Path], evaluation: str, most: int = CORPUS_BYTES) -> str:
    """The documents below some directories of packages, each paragraph once, ``SEPARATOR`` between documents.

    Documents come in an order that is random, but the same for the same files, so that the last ones are like the rest.

    Args:
        roots: directories. A site-packages below one of them counts only if it is one itself.
        evaluation: no paragraph of this text, however it is broken into lines, gets into the corpus.
        most: bytes of UTF-8; what goes beyond them is left out.
    """
    names = {p.relative_to(root).as_posix(): p for root in roots for p in _documents(root)}
    order = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    seen = {_key(p) for p in _paragraphs(evaluation)}
    documents: list[str] = []
    size = 0
    for name in tqdm(order, "reading", unit="document"):
        paragraphs = []
        for paragraph in _paragraphs(read_document(names[name])):
            key = _key(paragraph)
            if key not in seen and sum(map(str.isalpha, key)) >= LETTERS * len(key):
                seen.add(key)
                paragraphs.append(paragraph)
        if paragraphs:
            document = "\n\n".join(paragraphs)
            size += len(document.encode()) + bool(documents)
            if size > most:
                break
            documents.append(document)
    return SEPARATOR.join(documents)


def _documents(root: Path) -> Iterator[Path]:
    for path in root.rglob("*"):
        inside = path.relative_to(root).parts
        if path.suffix in DOCUMENTS and not {"site-packages", "dist-packages", "pydoc_data"} & {*inside}:
            yield path


def read_document(path: Path) -> str:
    """The text of a document; of Python, its docstrings, in order. Nothing of a file that cannot be read as such."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            with warnings.catch_warnings():  # of invalid escapes
                warnings.simplefilter("ignore")
                tree = ast.parse(text)
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            nodes = [n for n in ast.walk(tree) if isinstance(n, documented)]
            nodes.sort(key=lambda n: getattr(n, "lineno", 0))
            text = "\n\n".join(filter(None, map(ast.get_docstring, nodes)))
        return text.encode("utf-8", "replace").decode("utf-8") if len(text) <= LONGEST else ""
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return ""


def _paragraphs(text: str) -> list[str]:
    lines = (line.rstrip() for line in text.replace(SEPARATOR, "\n").split("\n"))
    return [p.strip("\n") for p in re.split(r"\n{2,}", "\n".join(lines)) if p.strip()]


def _key(paragraph: str) -> str:
    """The same for two paragraphs that only differ in white space."""
    return " ".join(paragraph.split())


def train(text: str, directory: Path, setting: Setting, device: str = "cpu") -> float:
    """Trains a tokenizer and a model, writes both to a directory that transformers loads, and a log of it beside them.

    Same text, setting and machine: same bits, on a GPU under ``torch.use_deterministic_algorithms``.

    Args:
        text: as :func:`make_corpus` returns it.
        directory: made if it does not exist.
        device: computes in bfloat16 where that is a GPU, the weights being float32.

    Returns:
        The mean loss on the held-out tokens, nats per token.

    Raises:
        ValueError: if the text is too short for a batch, or for a held-out window.
    """
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(setting.seed)
    documents = text.split(SEPARATOR)
    with (directory / "train.log").open("w", encoding="utf-8") as log:

        def say(line: str) -> None:
            tqdm.write(line)
            print(line, file=log, flush=True)

        began = time.perf_counter()
        tokenizer = train_tokenizer(documents, setting.vocabulary)
        tokens = tokenize(tokenizer, documents)
        kept = len(tokens) - int(HELD_OUT * len(tokens))
        if kept < (setting.batch + 1) * setting.window or len(tokens) - kept < setting.window:
            raise ValueError(
                f"a corpus of {len(tokens)} tokens is too short for batches of {setting.batch} windows of "
                f"{setting.window} tokens, and one window held out of each hundred: use a longer one"
            )
        held_out, tokens = tokens[kept:], tokens[:kept].to(device)
        say(f"{len(text) / 1e6:.1f} million characters, {kept / 1e6:.2f} million tokens in {_since(began)}")
        model = new_model(tokenizer, setting).to(device)
        say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters; {setting}")
        loss = _fit(model, tokens, held_out, setting, say)
    model.save_pretrained(directory)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, model_max_length=setting.window
    ).save_pretrained(directory)
    return loss


def train_tokenizer(documents: list[str], vocabulary: int) -> tokenizers.Tokenizer:
    """A byte-level BPE, END its token 0."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def tokenize(tokenizer: tokenizers.Tokenizer, documents: list[str]) -> Tensor:
    """[T] int64: the documents one after the other, END after each."""
    parts: list[Tensor] = []
    for i in tqdm(range(0, len(documents), 512), "tokenizing"):
        encodings = tokenizer.encode_batch_fast(documents[i : i + 512])
        parts.append(torch.tensor([*itertools.chain.from_iterable((*e.ids, 0) for e in encodings)]))
    return torch.cat(parts)


def new_model(tokenizer: tokenizers.Tokenizer, setting: Setting) -> transformers.GPTNeoXForCausalLM:
    config = transformers.GPTNeoXConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=setting.width,
        num_hidden_layers=setting.layers,
        num_attention_heads=setting.heads,
        intermediate_size=4 * setting.width,
        max_position_embeddings=setting.window,
        hidden_dropout=setting.dropout,
        attention_dropout=setting.dropout,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    return transformers.GPTNeoXForCausalLM(config)


def batches(tokens: Tensor, setting: Setting) -> Iterator[Tensor]:
    """[batch, window] int64 without end: epochs of windows in random order, which begin elsewhere in each epoch."""
    generator = torch.Generator().manual_seed(setting.seed)
    while True:
        shift = int(torch.randint(setting.window, (), generator=generator))
        count = (len(tokens) - shift) // setting.window
        windows = tokens[shift : shift + count * setting.window].view(count, setting.window)
        order = torch.randperm(count, generator=generator).to(tokens.device)
        for rows in order[: count - count % setting.batch].split(setting.batch):
            yield windows[rows]


def _fit(
    model: transformers.GPTNeoXForCausalLM,
    tokens: Tensor,
    held_out: Tensor,
    setting: Setting,
    say: Callable[[str], None],
) -> float:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=setting.rate, betas=(0.9, 0.95), fused=True)
    warm_up = max(1, setting.steps // 20)

    def rate(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, setting.steps - warm_up))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    model.train()
    began = time.perf_counter()
    steps = tqdm(zip(range(1, setting.steps + 1), batches(tokens, setting), strict=False), "training", setting.steps)
    recent = torch.zeros((), device=tokens.device)
    every = max(1, setting.steps // 10)
    found = math.inf
    for step, batch in steps:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.device.type == "cuda"):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        recent += loss.detach()
        if step % every == 0 or step == setting.steps:
            mean = float(recent) / ((step - 1) % every + 1)
            recent.zero_()
            found = math.log(perplexity(model, held_out, setting.window, batch_size=setting.batch, progress=False))
            say(f"step {step:5}   loss {mean:.3f}   held-out loss {found:.3f}   {_since(began)}")
    return found


def _since(began: float) -> str:
    return f"{time.perf_counter() - began:.1f} s"


def _opened(path: Path, mode: str) -> Any:
    return lzma.open(path, mode, encoding="utf-8") if path.suffix == ".xz" else path.open(mode, encoding="utf-8")


if __name__ == "__main__":
    main()
