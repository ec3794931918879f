"""Reading what `record_vectors.cu` wrote, and what tensor cores do with the sums in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Section:
    input_hash: str
    words: Words


def read_sections(path: Path) -> dict[str, Section]:
    data = path.read_bytes()
    sections, at = {}, 0
    while at < len(data):
        end = data.index(b"\n", at)
        name, input_hash, count = data[at:end].decode().split()
        at = end + 1 + 4 * int(count)
        sections[name] = Section(input_hash, np.frombuffer(data[end + 1 : at], np.uint32))
    return sections


@dataclass(frozen=True)
class Sums:
    """The sums that one section computes: `start + products.sum(-1)`, products in the order of k, zeros left out."""

    start: Floats  # [sums]
    products: Floats  # [sums, 16]
    exponents: NDArray[np.int64]  # [sums, 16]: of a product, the sum of its factors' exponents


def _float16(words: Words, bf16: bool) -> Floats:
    """[..., n] words to [..., 2 n] numbers, the low half first."""
    halves = np.ascontiguousarray(words).view(np.uint16)
    if bf16:
        return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return halves.view(np.float16).astype(np.float64)


def _exponent(values: Floats) -> NDArray[np.int64]:
    """floor(log2 |v|), and a very small number for zero."""
    _, exponent = np.frexp(values)
    return np.where(values == 0, -10000, exponent - 1).astype(np.int64)


def sums_of(name: str, words: Words) -> Sums:
    """The sums behind section `name`, in the order of its outputs, from the words of its inputs.

    Fragments as in the PTX ISA, "Matrix Fragments for mma.m16n8k16" and for sparse m16n8k32; wgmma's are those of four
    warps of 16 rows, and its tokens lie in shared memory as 8 rows of 128 bytes in the 128-byte swizzle.
    """
    instruction, type_name, _ = name.split(".")
    bf16, sparse, wgmma = type_name == "bf16", "sp" in instruction, instruction.startswith("wgmma")
    k = 32 if sparse else 16
    if wgmma:
        tile, lanes = words[:256], words[256:].reshape(4, 32, 9)
        w_words, d_words, meta = lanes[..., :4], lanes[..., 4:8], lanes[..., 8]
        chunks = tile.reshape(8, 8, 4)  # [token][chunk as stored][word]
        plain = np.stack([chunks[n][np.arange(8) ^ n] for n in range(8)])
        x = np.broadcast_to(_float16(plain.reshape(8, 32), bf16)[:, :k], (4, 8, k))  # [warp][token][k]
    else:
        x_count = 4 if sparse else 2
        lanes = words.reshape(-1, 32, 13 if sparse else 10)
        w_words, x_words = lanes[..., :4], lanes[..., 4 : 4 + x_count]
        d_words, meta = lanes[..., 4 + x_count : 8 + x_count], lanes[..., -1]
        # lane 4 g + t holds token g, k = 8 j + 2 t + {0, 1} in register j
        x = _float16(x_words, bf16).reshape(-1, 8, 4, x_count, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 8, k)
    cases = len(w_words)
    # lane 4 g + t holds in register j row g + 8 (j & 1), stored column 8 (j >> 1) + 2 t + {0, 1}
    stored = _float16(w_words, bf16).reshape(cases, 8, 4, 2, 2, 2)  # [g][t][j >> 1][j & 1][half]
    w = stored.transpose(0, 4, 1, 3, 2, 5).reshape(cases, 16, 16)  # [row][stored column]
    columns = np.broadcast_to(np.arange(16), w.shape)
    if sparse:
        selector = int(instruction[-1])
        row, group = np.arange(16)[:, None], np.arange(8)[None, :]
        holder = row % 8 * 4 + 2 * selector + group // 4
        pair = meta[:, holder] >> (16 * (row // 8) + 4 * (group % 4)).astype(np.uint32) & 15
        columns = (np.stack([pair & 3, pair >> 2], -1) + 4 * group[..., None]).reshape(cases, 16, 16)
    case = np.arange(cases)[:, None, None, None]
    token = np.arange(8)[None, None, :, None]
    factors = x[case, token, columns[:, :, None, :]]  # [case][row][token][16]
    products = w[:, :, None, :] * factors
    exponents = _exponent(np.broadcast_to(w[:, :, None, :], factors.shape)) + _exponent(factors)
    # lane 4 g + t holds row g + 8 (i >> 1), token 2 t + (i & 1) in accumulator i
    lane, i = np.arange(32)[:, None], np.arange(4)[None, :]
    rows, tokens = lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2
    start = np.ascontiguousarray(d_words).view(np.float32).astype(np.float64)
    return Sums(start.ravel(), products[:, rows, tokens].reshape(-1, 16), exponents[:, rows, tokens].reshape(-1, 16))


def truncating_sum(sums: Sums, block: int, extra_bits: int) -> NDArray[np.float32]:
    """A model of tensor cores, after Fasi et al., "Numerical behavior of NVIDIA tensor cores" (PeerJ CS, 2021).

    Products of `block` terms and the running sum are aligned to the largest exponent among them, cut to
    23 + `extra_bits` fraction bits, added exactly, and the result is cut to a float.
    """
    total = sums.start
    for first in range(0, 16, block):
        terms = np.concatenate([total[:, None], sums.products[:, first : first + block]], 1)
        exponents = np.concatenate([_exponent(total)[:, None], sums.exponents[:, first : first + block]], 1)
        unit = np.ldexp(1.0, exponents.max(1) - 23 - extra_bits)
        exact = np.trunc(terms / unit[:, None]).sum(1) * unit
        rounded = exact.astype(np.float32)
        beyond = np.abs(rounded.astype(np.float64)) > np.abs(exact)
        total = np.where(beyond, np.nextafter(rounded, np.float32(0)), rounded).astype(np.float64)
    return total.astype(np.float32)


def allowed_error(sums: Sums) -> Floats:
    """What cutting 16 products and the start to the largest one's precision may lose, and the result to a float."""
    largest = np.maximum(_exponent(sums.start), sums.exponents.max(1))
    result = np.abs(sums.start + sums.products.sum(1))
    allowed: Floats = 17 * np.ldexp(1.0, largest - 23) + 2 * np.ldexp(result, -23)
    return allowed
