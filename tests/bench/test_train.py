"""The corpus holds each paragraph once and none of the evaluation; training falls, repeats its bits, and loads."""

from __future__ import annotations

import itertools
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train
import transformers

import sparse_marlin
from sparse_marlin.samples import sample_text

TINY = train.Setting(vocabulary=320, layers=2, width=64, heads=4, window=32, batch=8, steps=40, rate=3e-3)
WORDS = "the model reads a token and then predicts which of all others comes next in this long sentence"


def corpus(count: int = 600) -> str:
    """Sentences whose words follow one another in one of two orders."""
    words = WORDS.split()
    orders = (words, words[::-1])
    sentences = [" ".join(orders[i % 2][i % 7 :]) for i in range(count)]
    return train.SEPARATOR.join("\n\n".join(sentences[i : i + 10]) for i in range(0, count, 10))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    directory = tmp_path_factory.mktemp("model")
    return directory, train.train(corpus(), directory, TINY)


def test_corpus_is_docstrings_and_documents_each_paragraph_once(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "code.py").write_text(
        '"""Of the module."""\nclass A:\n    """Of the class.\n\n    Said twice,\n    in fact.\n    """\n'
        '    def b(self):\n        """Of the method."""\n        return "no docstring at all"\n',
        encoding="utf-8",
    )
    (tmp_path / "package" / "guide.rst").write_text(
        "Said twice, in fact.\n\nIn the guide.\n\nStands in the\nevaluation.\n\n1.5 2.5\n3.5 4.5 x\n", encoding="utf-8"
    )
    (tmp_path / "package" / "broken.py").write_text("def (:\n", encoding="utf-8")
    (tmp_path / "package" / "latin.txt").write_bytes(b"\xff\xfe not UTF-8")
    (tmp_path / "package" / "data.json").write_text("Not a document.", encoding="utf-8")
    for hidden in ("site-packages", "pydoc_data"):
        (tmp_path / hidden).mkdir()
        (tmp_path / hidden / "more.txt").write_text("Hidden.", encoding="utf-8")

    evaluation = "First.\n\nStands in\nthe evaluation.\n\nLast."
    text = train.make_corpus([tmp_path], evaluation)
    documents = text.split(train.SEPARATOR)
    assert len(documents) == 2
    paragraphs = sorted(" ".join(p.split()) for d in documents for p in d.split("\n\n"))
    assert paragraphs == [
        "In the guide.", "Of the class.", "Of the method.", "Of the module.", "Said twice, in fact.",
    ]  # fmt: skip
    assert train.make_corpus([tmp_path], evaluation, most=len(text) - 1) == documents[0]
    assert train.make_corpus([tmp_path], evaluation, most=len(text)) == text


def test_command_takes_the_installed_packages_without_the_evaluation_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    shown = next(p for p in sample_text().split("\n\n") if len(p) > 200 and p.count(" ") > 30)
    (packages / "a.md").write_text(f"{shown}\n\nSomething else.", encoding="utf-8")
    monkeypatch.setattr(train.sysconfig, "get_paths", lambda: dict.fromkeys(("stdlib", "purelib", "platlib"), packages))
    monkeypatch.setattr("sys.argv", ["train.py", "corpus", str(tmp_path / "corpus.txt.xz")])
    train.main()
    with lzma.open(tmp_path / "corpus.txt.xz", "rt", encoding="utf-8") as file:
        assert file.read() == "Something else."


def test_training_learns_and_the_directory_loads(trained: tuple[Path, float]) -> None:
    directory, loss = trained
    log = (directory / "train.log").read_text(encoding="utf-8").splitlines()
    losses = [float(line.split()[3]) for line in log if line.startswith("step")]
    assert len(losses) == 10 and losses[-1] < 0.5 * losses[0]
    assert f"held-out loss {loss:.3f}" in log[-1] and loss < 0.5 * losses[0]

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert type(model) is transformers.GPTNeoXForCausalLM
    assert model.config.use_parallel_residual and model.gpt_neox.layers[0].attention.query_key_value.bias is not None
    text = "the model reads Zebras, 42 of them:\n\n  naïve ✓"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text and max(ids) < model.config.vocab_size
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 0


def test_same_seed_same_bits(trained: tuple[Path, float], tmp_path: Path) -> None:
    """In another process, where hashes of strings are others."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "import pathlib, test_train, train\n"
        "train.train(test_train.corpus(), pathlib.Path(sys.argv[3]), test_train.TINY)"
    )
    here = Path(__file__).parent
    command = [sys.executable, "-c", code, str(here), str(Path(train.__file__).parent), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}  # on which sums depend
    subprocess.run(command, check=True, capture_output=True, env=environment)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / name).read_bytes() == (trained[0] / name).read_bytes(), name


def test_an_epoch_reads_every_window_once_and_begins_elsewhere() -> None:
    setting = train.Setting(window=4, batch=2, seed=3)
    tokens = torch.arange(4 * 6 + 3)
    epochs = train.batches(tokens, setting)
    starts = []
    for _ in range(3):
        epoch = torch.cat([*itertools.islice(epochs, 3)])
        assert torch.equal(epoch, epoch[:, :1] + torch.arange(4))
        assert len(epoch[:, 0].unique()) == 6 and len((epoch[:, 0] % 4).unique()) == 1
        starts.append(epoch[:, 0])
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(starts))  # in another order
    assert len({int(s[0] % 4) for s in starts}) > 1  # and from another token on


def test_a_short_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too short for batches of 8 windows of 32 tokens"):
        train.train(corpus(20), tmp_path, TINY)


@pytest.mark.parametrize("refit", [False, True])
def test_such_a_model_is_compressed_whole(trained: tuple[Path, float], refit: bool) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(trained[0], dtype=torch.float32)
    windows = [
        torch.randint(model.config.vocab_size, (1, 32), generator=torch.Generator().manual_seed(i)) for i in (0, 1)
    ]
    report = sparse_marlin.patch_model(model, group_size=64, calibration=windows, refit=refit, progress=False)
    done = [layer for layer in report.layers if layer.status == "compressed"]
    kinds = {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}
    assert len(done) == 4 * TINY.layers and {layer.name.rpartition(".")[2] for layer in done} == kinds
    fused = model.gpt_neox.layers[0].attention.query_key_value
    assert isinstance(fused, sparse_marlin.CompressedLinear) and fused.bias is not None
    assert torch.isfinite(model(windows[0]).logits).all()
