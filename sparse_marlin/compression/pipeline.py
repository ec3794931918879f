"""Compresses a model block by block, each block calibrated on the outputs of the compressed blocks before it.

In a block, stage after stage of Linears is solved; then a refit may train all of them together.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from tqdm import tqdm

from ..linear import Adapter, CompressedLinear
from ..packed import PackedWeight
from ..quantization import note_in_config
from ..scheme import Scheme, Sparsity
from . import refit as refitting
from .adapters import check_adapter
from .blocks import Recorded, capture, moved, record, run
from .calibration import calibration_windows
from .moments import collect
from .permutation import Permuted, annotated, check_permute, permute_channels
from .report import LayerReport, Report
from .solve import (
    check_damping,
    check_method,
    default_method,
)
from .stages import solve_stage, split_stages, with_error
from .store import Result, Store
from .structure import patch_auto
from .targets import (
    Target,
    choose_targets,
    decoder_blocks,
    linear_at,
    memory_need,
    patterns,
)


@torch.inference_mode(False)  # whose tensors no gradient could pass
@torch.no_grad()
def patch_model(
    model: nn.Module,
    sparsity: Sparsity | Literal["auto"] | Mapping[str, Sparsity | None] | None = "2:4",
    bits: int = 4,
    group_size: int = 128,
    *,
    target_bits: float | None = None,
    max_loss_increase: float | None = None,
    calibration: Any = None,
    tokenizer: Any = None,
    method: str = "auto",
    skip: str | Sequence[str] = (),
    only: str | Sequence[str] = (),
    dtype: torch.dtype | None = None,
    damping: float = 0.01,
    num_samples: int = 128,
    sequence_length: int = 512,
    seed: int = 0,
    device: torch.device | str | None = None,
    checkpoint_dir: str | Path | None = None,
    progress: bool = True,
    on_nonfinite: Literal["raise", "fallback"] = "raise",
    adapter_rank: int | float = 0,
    adapter_bits: Literal[4, 16] = 16,
    refit: bool | None = None,
    permute: bool = False,
) -> Report:
    """Compresses every ``nn.Linear`` of a causal LM's decoder blocks, in place.

    Blocks are taken in order; each is calibrated on the outputs of the compressed blocks before it. The output head and
    the embeddings are left as they are. Everything that can be refused is refused before the first layer is touched.
    Afterwards the model's config says how its layers are stored, for ``save_pretrained``.

    Args:
        model: a Hugging Face causal LM, or any module that takes ``input_ids`` and holds its blocks in a ModuleList.
        sparsity: ``"2:4"``, None for dense, a mapping from the name of every layer to either, or ``"auto"``: the layers
            that 2:4 hurts most stay dense, see :mod:`~sparse_marlin.compression.structure`.
        bits: 4 or 8.
        group_size: columns per scale: 32, 64, 128, or -1 for one scale per output channel. A layer whose in_features
            is no multiple of it gets the largest smaller size that fits, and the report says so.
        target_bits: with ``"auto"``: stored bits per weight over all compressed layers, scales included, at most.
        max_loss_increase: with ``"auto"``, instead: by how much the mean next-token loss may grow, in nats per token,
            measured on the last quarter of the calibration windows, which are held out for this.
        calibration: token tensors [B, T], texts, or a dataset with ``input_ids`` or ``text``; None samples tokens from
            the model itself. See :func:`~sparse_marlin.compression.calibration.calibration_windows`.
        tokenizer: for texts.
        method: ``auto`` means ``one-shot``, which also corrects each layer for the errors of the layers before it. For
            2:4 there are also ``two-pass``, ``one-loop``, ``wanda+rtn`` and ``magnitude+rtn``, for dense ``gptq`` and
            ``rtn`` (see :func:`~sparse_marlin.compression.solve.compress_weight`). For comparisons, ``sparsegpt``,
            ``wanda`` and ``magnitude`` prune only, and leave an ``nn.Linear``.
        skip: names or shell patterns of Linears to leave out.
        only: names or shell patterns; if given, nothing else is compressed.
        dtype: precision of the scales, float16 or bfloat16; default: the layer's own dtype, float16 for float32 layers.
        damping: fraction of the Hessian's mean diagonal added to it.
        num_samples, sequence_length: windows taken from texts or sampled from the model.
        seed: for windows and samples.
        device: where to compute; blocks are moved there one at a time. Default: where each block is.
        checkpoint_dir: keeps every finished block there; the same call resumes after an interruption, with the same
            result bit for bit.
        progress: print the memory need, and show progress bars.
        on_nonfinite: what to do where a layer's inputs are not finite: stop, or round that layer to nearest.
        adapter_rank: gives every compressed layer a low-rank adapter that corrects its output: the rank, or a fraction
            of min(N, K), rounded up to a multiple of 16; 0 for none. It costs bytes and time, which the report states.
            See :mod:`sparse_marlin.compression.adapters`.
        adapter_bits: 16 for adapters in the precision of the scales, 4 for INT4 ones.
        refit: whether each block is trained, once its layers are solved, to put out what it does in the original model:
            its integers and scales, not the masks (see :mod:`~sparse_marlin.compression.refit`). It takes a few hundred
            passes through every block. None: where all blocks are computed on GPUs, after every method that is
            calibrated, and unless attention computes in half precision alone (flash attention, for example).
        permute: whether the channels within each MLP, and within each head of attention, are first put into an order
            in which 2:4 masks keep more, see :mod:`~sparse_marlin.compression.permutation`. It costs nothing at run
            time. Layers that are left out may get their rows in another order with it.

    Returns:
        A report of every layer.

    Raises:
        ValueError: for settings, layers or calibration data that cannot work; the model is unchanged then.
        NonFiniteError: for non-finite inputs of a layer, named, with ``on_nonfinite="raise"``.
    """
    if on_nonfinite not in ("raise", "fallback"):
        raise ValueError(f"on_nonfinite must be 'raise' or 'fallback', got {on_nonfinite!r}")
    check_damping(damping)
    check_adapter(adapter_rank, adapter_bits, method)
    refitting.check_refit(refit, method)
    check_permute(permute, sparsity)
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch_model takes an nn.Module, got {type(model).__name__}")
    prefix, blocks = decoder_blocks(model)
    if refit is None:
        refit = refitting.by_default(model, blocks, method, device)
    elif refit:
        refitting.check_model(model)
    if sparsity == "auto":
        if adapter_rank:
            raise ValueError("adapter_rank does not go with sparsity='auto', which chooses by the weights' own size")
        return patch_auto(
            patch_model,
            model,
            bits,
            group_size,
            target_bits=target_bits,
            max_loss_increase=max_loss_increase,
            calibration=calibration,
            tokenizer=tokenizer,
            method=method,
            skip=skip,
            only=only,
            dtype=dtype,
            damping=damping,
            num_samples=num_samples,
            sequence_length=sequence_length,
            seed=seed,
            device=device,
            checkpoint_dir=checkpoint_dir,
            progress=progress,
            on_nonfinite=on_nonfinite,
            refit=refit,
            permute=permute,
        )
    if target_bits is not None or max_loss_increase is not None:
        raise ValueError(f"target_bits and max_loss_increase need sparsity='auto', got sparsity={sparsity!r:.80}")
    structures = ([*sparsity.values()] or [None]) if isinstance(sparsity, Mapping) else [sparsity]
    schemes = [Scheme(bits, group_size, s, dtype=dtype or torch.float16) for s in structures]
    scheme = next((s for s in schemes if s.sparsity), schemes[0])
    method = default_method(scheme.sparsity, calibrated=True) if method == "auto" else method
    for s in {s.sparsity: s for s in schemes}:
        check_method(method, s, allow_prune_only=True)
    names = patterns("skip", skip), patterns("only", only)
    mapping = sparsity if isinstance(sparsity, Mapping) else None
    targets, skipped = choose_targets(model, prefix, *names, scheme, dtype, adapter_rank, adapter_bits, mapping)
    windows = calibration_windows(model, calibration, tokenizer, num_samples, sequence_length, seed, progress)
    setting = refitting.SETTING if refit else None
    if progress:
        more = refitting.memory_need(model, prefix, targets, windows, setting) if setting else 0
        print(memory_need(model, prefix, targets, windows, more), file=sys.stderr)

    settings = {
        "scheme": {**scheme.to_dict(), "sparsity": "mixed" if len(set(structures)) > 1 else scheme.sparsity},
        "method": method,
        "damping": damping,
        "adapter_rank": adapter_rank,
        "adapter_bits": adapter_bits,
        "seed": seed,
        "windows": len(windows),
        "tokens": sum(w.numel() for w in windows),
        "refit": None if setting is None else asdict(setting),
        "permute": permute,
    }
    store = None
    if checkpoint_dir is not None:
        store = Store(Path(checkpoint_dir), {**settings, "on_nonfinite": on_nonfinite}, model, targets, windows)
    was_training = model.training
    model.eval()
    finished: list[LayerReport] = []
    permuted: Permuted = {}
    try:
        if permute:
            permuted = permute_channels(model, prefix, blocks, targets, windows, store, device, progress)
        hidden, calls = capture(model, blocks, windows, device)
        correct = method == "one-shot"
        original = list(hidden)  # what the uncompressed model would have there
        for index, block in enumerate(tqdm(blocks, desc="compressing blocks", unit="block", disable=not progress)):
            mine = [t for t in targets if t.name.startswith(f"{prefix}.{index}.")]
            with moved(block, device) as where:
                done = store.load(index) if store else None
                dense: dict[str, nn.Linear] = {}  # what was there before, if a refit will ask
                stages: list[list[Target]] = [mine]
                inputs: Recorded | None = None
                if correct or setting:
                    watched = mine if correct and done is None else []  # of a finished block, only the outputs matter
                    seen, original = record(model, block, watched, original, calls[index], where)
                    if correct:
                        inputs, stages = seen, split_stages(watched, seen)
                    del seen
                if done is None:
                    done = []
                    for stage in stages:
                        collected = collect(model, block, stage, hidden, calls[index], inputs, where, on_nonfinite)
                        results = solve_stage(model, stage, collected, method, damping, setting is not None)
                        if setting:
                            dense |= {t.name: linear_at(model, t.name) for t in stage}
                        for result in results:
                            _install(model, result, linear_at(model, result.report.name))
                        done += results
                    if setting:
                        chain = list(zip(blocks[index:], calls[index:], strict=True))[: 1 + setting.ahead]
                        if device is None:  # blocks stay where they are
                            chain = list(takewhile(lambda c: next(c[0].parameters()).device == where, chain))
                        done = refitting.refit(
                            model, dense, done, chain, hidden, original, where, setting, seed, progress
                        )
                        for result in done:
                            _install(model, result, dense[result.report.name])
                        collected = collect(model, block, mine, hidden, calls[index], inputs, where, on_nonfinite)
                        done = [with_error(r, dense[r.report.name], collected) for r in done]
                    if store:
                        store.save(index, done)
                else:
                    for result in done:
                        _install(model, result, linear_at(model, result.report.name))
                finished += [result.report for result in done]
                inputs, dense = None, {}  # the largest tensors here, and no longer needed
                if index + 1 < len(blocks):
                    for i, call in enumerate(calls[index]):
                        hidden[i] = run(block, hidden[i], call, where)
            calls[index].clear()
    finally:
        model.train(was_training)
        note_in_config(model)
    order = {name: i for i, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    layers = sorted(finished + skipped, key=lambda layer: order[layer.name])
    return Report(annotated(layers, permuted), settings)


def _install(model: nn.Module, result: Result, linear: nn.Linear) -> None:
    """Puts a result where ``linear`` is, or was."""
    if result.packed is None:
        assert result.pruned is not None
        linear.weight.data.copy_(result.pruned)
    else:
        model.set_submodule(result.report.name, compressed_layer(result.packed, linear, result.adapter))


def compressed_layer(packed: PackedWeight, linear: nn.Linear, adapter: Adapter | None = None) -> CompressedLinear:
    """The module that takes the place of ``linear``, on its device and computing in its dtype."""
    packed = packed.to(linear.weight.device)
    bias = None if linear.bias is None else linear.bias.clone()
    layer = CompressedLinear(replace(packed, scales=packed.scales.to(linear.weight.dtype)), bias, adapter)
    return layer.train(linear.training)
