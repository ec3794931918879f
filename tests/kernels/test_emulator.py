"""The emulator itself: instructions mean what the PTX ISA says, right kernels pass, and planted faults are found.

A fault that goes unnoticed would make every other kernel test worthless, and so would an emulator that reports faults
where there are none: each driver's programs without a fault run beside the others, in all builds and over seeds.
"""

from __future__ import annotations

import re
from pathlib import Path

import build
import pytest

DRIVERS = ("ops", "faults_sm80", "faults_sm90", "faults_sm90_store")
SEEDS = (0, 1, 2)  # round robin, fixed priorities, random: see emulator/emu.h
WRONG_VALUES, STOPPED = 1, 3  # exit statuses: the program's own check, and the emulator's

# Fault: the build that finds it with every seed, and what it says.
UNORDERED = r"race: [\w ]+ (of|to) (shared|global) .* is not ordered after the (read|write) by"
LANES = r"race within the warp: .* no __syncwarp between"
NEVER_WRITTEN = r"read of shared .* which nobody has written"
IN_FLIGHT = r"read of shared \S+ \(dynamic \S+\) while the asynchronous copy of thread \d+ is in flight"
CHANGED_BY_COPY = rf"{IN_FLIGHT}|race: tensor store read of shared .* without waiting for the mbarrier"
UNWAITED = r"race: [\w ]+ (of|to) shared .* without waiting for the mbarrier of the copy that wrote it"
FAULTS = {
    # single steps
    ("ops", "lanes_no_sync"): ("race", f"{LANES}|{NEVER_WRITTEN}"),
    ("ops", "last_block_no_fence_before"): ("race", UNORDERED),
    ("ops", "last_block_no_fence_after"): ("race", UNORDERED),
    ("ops", "wgmma_no_proxy_fence"): ("plain", r"wgmma read of shared .* without fence.proxy.async"),
    ("ops", "tensor_copy_no_proxy_fence"): ("plain", r"tensor store read of shared .* without fence.proxy.async"),
    ("ops", "early_never_waits"): ("plain", r"launched early ends without pdl_wait"),
    ("ops", "early_waits_late"): ("plain", r"read of global .*, which an earlier grid writes, before pdl_wait"),
    ("ops", "early_waits_elsewhere"): ("plain", r"read of global .*, which an earlier grid writes, before pdl_wait"),
    ("ops", "cluster_no_sync_before"): ("plain", r"(read of block|write to shared) .* no cluster_sync between"),
    ("ops", "cluster_no_sync_after"): ("plain", r"block ends after another block's read|which has ended"),
    ("ops", "cluster_overwritten"): ("plain", r"write to shared .* after another block's read|read of block .* no"),
    ("ops", "barrier_too_large"): ("plain", r"deadlock .*\n.*warp 0 lanes ffffffff: barrier 1"),
    ("ops", "diverge"): ("plain", r"lanes diverge: .* at (ldmatrix|__syncwarp) .* wait at (ldmatrix|__syncwarp)"),
    ("ops", "spin"): ("plain", r"deadlock .*\n.*polling loop"),
    ("ops", "no_commit"): ("plain", r"ends with a cp.async never committed"),
    ("ops", "misaligned"): ("plain", r"misaligned cp.async"),
    ("ops", "bad_metadata"): ("plain", r"metadata of row 1, group 4: indices 1 and 0 do not increase"),
    # a cp.async ring with split K
    ("faults_sm80", "no_wait"): ("plain", IN_FLIGHT),
    ("faults_sm80", "wait_one_short"): ("plain", IN_FLIGHT),
    ("faults_sm80", "scale_slot"): ("race", IN_FLIGHT),
    ("faults_sm80", "scale_race"): ("race", f"{UNORDERED}|{LANES}"),
    ("faults_sm80", "no_sync"): ("race", f"{UNORDERED}|{LANES}|{IN_FLIGHT}|{NEVER_WRITTEN}"),
    ("faults_sm80", "refill_early"): ("plain", f"{UNORDERED}|{LANES}"),
    ("faults_sm80", "shared_overrun"): ("asan", r"use-after-poison"),
    ("faults_sm80", "static_overrun"): ("race", r"write to shared memory out of bounds"),
    ("faults_sm80", "global_overrun"): ("asan", r"heap-buffer-overflow"),
    ("faults_sm80", "selector"): ("plain", r"wrong values"),
    ("faults_sm80", "skip_ticket"): ("race", UNORDERED),
    # mbarriers, bulk copies and wgmma
    ("faults_sm90", "no_final_wait"): ("asan", r"use-after-poison"),
    ("faults_sm90", "release_early"): ("plain", f"{UNORDERED}|{UNWAITED}"),
    ("faults_sm90", "weights_reused"): ("plain", r"weight registers of a wgmma in flight were changed"),
    ("faults_sm90", "expect_too_much"): ("plain", r"deadlock(.*\n)+.*mbarrier"),
    ("faults_sm90", "expect_too_little"): ("plain", rf"{UNWAITED}|deadlock(.*\n)+.*mbarrier"),
    ("faults_sm90", "no_full_wait"): ("race", f"{IN_FLIGHT}|{NEVER_WRITTEN}"),
    ("faults_sm90", "no_empty_wait"): ("plain", r"more arrivals than its count"),
    ("faults_sm90", "bulk_too_long"): ("plain", r"write to shared .* while the asynchronous copy"),
    ("faults_sm90", "selector"): ("plain", r"wrong values"),
    ("faults_sm90", "no_wgmma_fence"): ("plain", r"wgmma without wgmma.fence"),
    ("faults_sm90", "no_init_sync"): ("plain", r"no mbarrier at|without a barrier after its initialization"),
    # tensor stores out of a ring, launched early
    ("faults_sm90_store", "no_proxy_fence"): ("plain", r"tensor store read of shared .* without fence.proxy.async"),
    ("faults_sm90_store", "one_lane_fences"): ("plain", r"tensor store read of shared .* without fence.proxy.async"),
    ("faults_sm90_store", "no_syncwarp"): ("plain", UNORDERED),
    ("faults_sm90_store", "stage_early"): ("plain", UNORDERED),
    ("faults_sm90_store", "one_staged_bar"): ("plain", r"not ordered after any wait for the one before"),
    ("faults_sm90_store", "no_staged_wait"): ("race", f"{CHANGED_BY_COPY}|{NEVER_WRITTEN}"),
    ("faults_sm90_store", "release_early"): ("plain", r"is not ordered after the read by warp 9's tensor store"),
    ("faults_sm90_store", "wait_one_short"): ("plain", CHANGED_BY_COPY),
    ("faults_sm90_store", "no_empty_wait"): ("plain", r"more arrivals than its count"),
    ("faults_sm90_store", "no_commit"): ("plain", r"tensor store never committed"),
    ("faults_sm90_store", "no_final_wait"): ("plain", r"tensor store never waited for"),
    ("faults_sm90_store", "box_overrun"): ("asan", r"heap-buffer-overflow(.*\n)+.*tensor_store_2d"),
    ("faults_sm90_store", "x_before_pdl_wait"): ("race", r"read of global .* earlier grid writes, before pdl_wait"),
    ("faults_sm90_store", "no_pdl_wait"): ("plain", r"write to global .* before pdl_wait"),
    ("faults_sm90_store", "sums_before_pdl_wait"): ("race", r"write to global .* before pdl_wait"),
}


@pytest.fixture(scope="module")
def executables() -> dict[tuple[str, str], Path]:
    return build.build(DRIVERS)


@pytest.mark.parametrize("kind", build.BUILDS)
@pytest.mark.parametrize("driver", DRIVERS)
def test_right_programs_pass(driver: str, kind: str, executables: dict[tuple[str, str], Path]) -> None:
    """Every check and fault-free kernel of the driver, each over six seeds."""
    result = build.run(executables[driver, kind])
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("driver", "fault"), FAULTS)
def test_planted_fault_is_found(driver: str, fault: str, executables: dict[tuple[str, str], Path]) -> None:
    kind, message = FAULTS[driver, fault]
    for seed in SEEDS:
        result = build.run(executables[driver, kind], fault, seed)
        output = result.stdout + result.stderr
        assert result.returncode in (WRONG_VALUES, STOPPED) or "AddressSanitizer" in output, f"seed {seed}: unnoticed"
        assert re.search(message, output), f"seed {seed}: found, but for another reason\n{output}"


def test_a_reader_that_does_not_wait_is_caught_by_some_seed(executables: dict[tuple[str, str], Path]) -> None:
    """Relaxed words order nothing: only values can be wrong, and only where the schedule lets the reader go first."""
    statuses = {build.run(executables["ops", "plain"], "mailbox_no_wait", seed).returncode for seed in range(8)}
    assert WRONG_VALUES in statuses


@pytest.mark.parametrize("driver", DRIVERS[1:])
@pytest.mark.parametrize("kind", build.BUILDS)
def test_the_faulty_kernels_are_right_without_a_fault(
    driver: str, kind: str, executables: dict[tuple[str, str], Path]
) -> None:
    """The very problem that the faults run on."""
    for seed in SEEDS:
        result = build.run(executables[driver, kind], "none", seed)
        assert result.returncode == 0, result.stdout + result.stderr
