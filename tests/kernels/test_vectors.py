"""The emulator's instructions against what an H200 made of the same inputs.

`data/h200_vectors.bin` was recorded with `record_vectors.cu`, whose head says how.
"""

from __future__ import annotations

from pathlib import Path

import build
import numpy as np
import pytest
import vectors

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "data" / "h200_vectors.bin"

TENSOR_CORE = ("mma", "mma_sp0", "mma_sp1", "wgmma", "wgmma_sp0", "wgmma_sp1")
SUMS = [f"{instruction}.{dtype}" for instruction in TENSOR_CORE for dtype in ("f16", "bf16")]
EXACT = [
    *(f"{name}.integer" for name in SUMS),
    *(f"ldmatrix{trans}_x{count}" for trans in ("", "_trans") for count in (1, 2, 4)),
    *(f"cp_async_{size}" for size in (4, 8, 16)),
    *(
        f"{name}.{dtype}"
        for name in ("arithmetic.any", "arithmetic.codes", "arithmetic.near", "intrinsics.codes", "intrinsics.near")
        for dtype in ("f16", "bf16")
    ),
    "bits",
]
ROUNDED = [f"{name}.{kind}" for name in SUMS for kind in ("narrow", "wide")]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, vectors.Section]:
    executable = build.build([HERE / "record_vectors.cu"], ["plain"])["record_vectors", "plain"]
    path = tmp_path_factory.mktemp("vectors") / "emulated.bin"
    result = build.run(executable, path, "inputs")
    assert result.returncode == 0, result.stdout + result.stderr
    return vectors.read_sections(path)


@pytest.fixture(scope="module")
def recorded(emulated: dict[str, vectors.Section]) -> dict[str, vectors.Section]:
    assert RECORDED.exists(), f"{RECORDED} is missing: record_vectors.cu says how to record it on an H200"
    sections = vectors.read_sections(RECORDED)
    for name, section in sections.items():
        assert section.input_hash == emulated[name].input_hash, f"{name} was recorded from other inputs: record again"
    return sections


def test_every_section_is_compared(recorded: dict[str, vectors.Section]) -> None:
    assert sorted(recorded) == sorted(EXACT + ROUNDED)


@pytest.mark.parametrize("name", EXACT)
def test_bit_for_bit(name: str, emulated: dict[str, vectors.Section], recorded: dict[str, vectors.Section]) -> None:
    np.testing.assert_array_equal(emulated[name].words, recorded[name].words)


@pytest.mark.parametrize("name", ROUNDED)
def test_within_truncation(
    name: str, emulated: dict[str, vectors.Section], recorded: dict[str, vectors.Section]
) -> None:
    """The emulator rounds an exact sum; tensor cores cut every term, so the two differ by what the cuts can lose."""
    sums = vectors.sums_of(name, emulated[f"{name}.in"].words)
    ours, theirs = (section[name].words.view(np.float32).astype(np.float64) for section in (emulated, recorded))
    assert np.all(np.abs(ours - theirs) <= vectors.allowed_error(sums))


@pytest.mark.parametrize("name", [f"{name}.{kind}" for name in SUMS for kind in ("integer", "narrow", "wide")])
def test_emulator_rounds_the_exact_sum(name: str, emulated: dict[str, vectors.Section]) -> None:
    """Independent of the hardware: numpy unpacks the same fragments and sums them."""
    sums = vectors.sums_of(name, emulated[f"{name}.in"].words)
    exact = (sums.start + sums.products.sum(1)).astype(np.float32)
    np.testing.assert_array_max_ulp(emulated[name].words.view(np.float32), exact, maxulp=1)


@pytest.mark.parametrize("name", ROUNDED)
def test_hopper_sums_blocks_of_16_with_two_more_bits(
    name: str, emulated: dict[str, vectors.Section], recorded: dict[str, vectors.Section]
) -> None:
    """How Hopper adds, to the bit: what the tolerance above is made of."""
    sums = vectors.sums_of(name, emulated[f"{name}.in"].words)
    theirs = recorded[name].words.view(np.float32)

    def agreement(block: int, extra_bits: int) -> float:
        return float(np.mean(vectors.truncating_sum(sums, block, extra_bits) == theirs))

    if agreement(block=16, extra_bits=2) < 1:
        others = {(block, extra): agreement(block, extra) for block in (4, 8, 16) for extra in range(4)}
        pytest.fail(f"share of sums that (block, extra bits) gives to the bit: {others}")
