"""Which kernels multiply the layers of a model, and how fast they are: what ``sparse-marlin bench`` shows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from . import models, remembered, runtime, tuning
from .checkpoints import describe, is_checkpoint
from .compression.targets import decoder_blocks
from .dispatch import Config, Device, Kernel, Problem, choice_of, estimate, parse_plan, streamed_bytes
from .layouts import to_kernel
from .layouts.scales import KERNEL_DTYPES
from .packed import PackedWeight
from .scheme import Scheme


@dataclass(frozen=True)
class Layer:
    """A weight [N, K] and the dtype of its inputs."""

    N: int
    K: int
    scheme: Scheme
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.N}x{self.K}, {self.scheme}, {str(self.dtype).removeprefix('torch.')}"

    def problem(self, tokens: int) -> Problem:
        return Problem(tokens, self.N, self.K, self.scheme, self.dtype)

    def weight(self, gpu: torch.device) -> PackedWeight:
        """Such a weight, of random numbers."""
        return runtime.random_weight(self.N, self.K, self.scheme, gpu)


@dataclass(frozen=True)
class Choice:
    """What multiplies a number of tokens.

    Attributes:
        config: the kernel, with the time that the cost model expects.
        microseconds: the time that was measured, or None.
        gbps: bytes of weight, x and y, once each, per measured time.
    """

    tokens: int
    config: Config
    microseconds: float | None = None
    gbps: float | None = None


def layers_of(names: Iterable[str], scheme: Scheme, dtype: torch.dtype | None = None) -> Counter[Layer]:
    """The distinct layers that are meant, and how many of each there are. No weight is read.

    Args:
        names: a shape such as ``4096x14336``, or a model as :func:`sparse_marlin.models.find` takes it.
        scheme: of shapes, and of the Linears in the decoder blocks of models that are not compressed; where its groups
            do not divide in_features, the largest size that does.
        dtype: of the inputs; default: what the model computes in, float16 if that is float32, and for shapes.

    Raises:
        ValueError: for a shape that the scheme cannot hold, or a model without a layer to measure.
        FileNotFoundError: if there is no such model.
    """
    found: Counter[Layer] = Counter()
    for name in names:
        if shape := re.fullmatch(r"(\d+)x(\d+)", name):
            n, k = int(shape[1]), int(shape[2])
            if reason := scheme.fit(k).why_not(n, k):
                raise ValueError(f"{name}: {reason}")
            found[Layer(n, k, scheme.fit(k), dtype or torch.float16)] += 1
            continue
        layers, own = _stored(models.find(name), scheme)
        if not layers:
            raise ValueError(f"{name} has no layer that the kernels could multiply")
        found.update(Layer(n, k, s, dtype or (own if own in KERNEL_DTYPES else torch.float16)) for n, k, s in layers)
    return found


def _stored(source: models.Source, scheme: Scheme) -> tuple[list[tuple[int, int, Scheme]], torch.dtype]:
    """The compressed layers of a model, or those that could be, and the dtype that the model computes in."""
    if is_checkpoint(source.location):
        checkpoint = describe(source.location)
        stored = checkpoint.layers.values()
        return [(s.out_features, s.in_features, s.scheme) for s in stored if s.scheme], checkpoint.dtype
    model = source.outline()
    _, blocks = decoder_blocks(model)
    shapes = [m.weight.shape for m in blocks.modules() if type(m) is nn.Linear]
    fitted = [(n, k, scheme.fit(k)) for n, k in shapes]
    return [(n, k, s) for n, k, s in fitted if not s.why_not(n, k)], next(model.parameters()).dtype


def expected(layer: Layer, device: Device, kernels: Sequence[Kernel], tokens: Iterable[int]) -> list[Choice]:
    """What is chosen on a GPU, by its tuned plan if it has one, with the times that the cost model expects.

    Raises:
        RuntimeError: if no kernel can run the layer.
    """
    text = remembered.best_plan(layer.N, layer.K, layer.scheme, layer.dtype, device, kernels)
    if text is None:
        raise RuntimeError(f"no kernel can run {layer} on {device.name}")
    steps, table = parse_plan(text), {k.name: k for k in kernels}
    configs = {m: choice_of(steps, m) for m in tokens}
    times = {m: estimate(layer.problem(m), device, table[c.kernel], c) for m, c in configs.items()}
    return [Choice(m, replace(c, microseconds=times[m])) for m, c in configs.items()]


def measured(layer: Layer, weight: PackedWeight, choices: Sequence[Choice]) -> Iterator[Choice]:
    """The choices with their times on the GPU of the weight, measured as :func:`sparse_marlin.tuning.measure` does."""
    x = torch.randn(max(c.tokens for c in choices), layer.K, dtype=layer.dtype, device=weight.device)
    timed = tuning.measure(to_kernel(weight, layer.dtype), x, {c.tokens: [c.config] for c in choices})
    for choice, (tokens, config) in zip(choices, timed, strict=True):
        gbps = streamed_bytes(layer.problem(tokens)) / config.microseconds / 1e3
        yield replace(choice, microseconds=config.microseconds, gbps=gbps)
