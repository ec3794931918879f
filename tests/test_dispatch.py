"""The dispatcher on tables of kernels and devices that are written down here: no GPU, no extension."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_marlin import Scheme
from sparse_marlin.dispatch import (
    PLAN_TOKENS,
    RECORDED,
    RECORDED_KERNELS,
    Config,
    Device,
    Kernel,
    Problem,
    Refusal,
    choice_of,
    choose,
    configurations,
    cost,
    estimate,
    explain,
    parse_plan,
    plan,
    plan_text,
    recorded_us,
    schedules,
    why_not,
)

H200 = RECORDED["h200"]
A100 = Device("A100", 80, 108, 166912, 167936, 1.41, 2039)
RTX_4090 = Device("RTX 4090", 89, 128, 101376, 102400, 2.52, 1008)
T4 = Device("T4", 75, 40, 65536, 65536, 1.59, 320)

KERNELS = (
    Kernel("sm80_n16", 80, 0, 16, 128, 64, 48 << 10, 2),
    Kernel("sm80_n64", 80, 0, 64, 128, 64, 64 << 10, 1),
    Kernel("sm80_n128", 80, 0, 128, 128, 64, 96 << 10, 1),
    Kernel("sm90_n8", 90, 90, 8, 128, 256, 104 << 10, 2),
    Kernel("sm90_n64", 90, 90, 64, 128, 128, 160 << 10, 1),
    Kernel("sm90_n256", 90, 90, 256, 128, 128, 220 << 10, 1),
)
SPARSE, DENSE = Scheme(4, 128, "2:4"), Scheme(4, 128, None)


def problem(
    M: int, N: int = 4096, K: int = 4096, scheme: Scheme = SPARSE, dtype: torch.dtype = torch.float16
) -> Problem:
    return Problem(M, N, K, scheme, dtype)


def chosen(p: Problem, device: Device) -> str:
    config = choose(p, device, KERNELS)
    assert config is not None
    return config.kernel


def test_token_tile_grows_with_the_tokens() -> None:
    assert [chosen(problem(m, 8192, 28672), H200) for m in (1, 8, 64, 4096)] == [
        "sm90_n8",
        "sm90_n8",
        "sm90_n64",
        "sm90_n256",
    ]
    assert [chosen(problem(m, 8192, 28672), A100) for m in (1, 16, 4096)] == ["sm80_n16", "sm80_n16", "sm80_n128"]


def test_other_architectures_kernels_are_refused_with_the_reason() -> None:
    refused = {r.kernel: r.reason for r in configurations(problem(16), A100, KERNELS) if isinstance(r, Refusal)}
    assert refused == dict.fromkeys(("sm90_n8", "sm90_n64", "sm90_n256"), "it is for compute capability 9.0 to 9.0")
    small = replace(RTX_4090, shared_bytes_per_block=50 << 10)
    refused = {r.kernel: r.reason for r in configurations(problem(16), small, KERNELS) if isinstance(r, Refusal)}
    assert refused["sm80_n64"] == "it needs 65536 bytes of shared memory, of at most 51200"
    assert "sm80_n16" not in refused


def test_kernel_that_a_scheme_lacks_is_refused_with_its_own_words() -> None:
    table = [replace(KERNELS[0], refusal="no zero points with INT8"), KERNELS[1]]
    assert Refusal("sm80_n16", "no zero points with INT8") in configurations(problem(1), A100, table)
    assert choose(problem(1), A100, table).kernel == "sm80_n64"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("device", "dtype", "text"),
    [
        (T4, torch.float16, "T4 has compute capability 7.5, the kernels need 8.0 or newer"),
        (H200, torch.float32, "compute in float16 and bfloat16, not float32"),
    ],
)
def test_what_no_kernel_can_run(device: Device, dtype: torch.dtype, text: str) -> None:
    p = problem(16, dtype=dtype)
    assert text in (why_not(p.scheme, dtype, device) or "")
    assert choose(p, device, KERNELS) is None
    assert plan(p.N, p.K, p.scheme, dtype, device, KERNELS) is None
    assert "canonical path" in explain(p, device, KERNELS)
    assert text in explain(p, device, KERNELS)


def test_explanation_names_every_kernel_and_marks_the_choice() -> None:
    text = explain(problem(8), H200, KERNELS)
    first, *others = text.splitlines()
    assert first == "M=8 N=4096 K=4096, 2:4 INT4 group 128, float16 on NVIDIA H200 (compute capability 9.0):"
    assert [line.startswith("->") for line in others] == [True] + [False] * (len(KERNELS) - 1)
    assert all(sum(k.name in line for line in others) == 1 for k in KERNELS)
    assert re.search(r"-> sm90_n8 in \d+ blocks, about \d+\.\d us", text)


def test_no_more_blocks_than_work_and_residency() -> None:
    config = choose(problem(1, 128, 256), H200, KERNELS[3:4])
    assert config is not None
    assert config.blocks == 1
    config = choose(problem(1, 1 << 16, 1 << 14), H200, KERNELS[3:4])
    assert config is not None
    assert config.blocks in (132, 264)


def test_plan_covers_every_number_of_tokens_in_order() -> None:
    text = plan(4096, 14336, SPARSE, torch.float16, H200, KERNELS)
    assert text is not None
    steps = [re.fullmatch(r"(\d+|\*):(\w+)@(\d+)(?:/(\d))?", step) for step in text.split(" ")]
    assert all(steps)
    limits = [s[1] for s in steps if s]
    assert limits[-1] == "*"
    assert [int(x) for x in limits[:-1]] == sorted({int(x) for x in limits[:-1]})
    for tokens in PLAN_TOKENS:
        config = choose(problem(tokens, 4096, 14336), H200, KERNELS)
        step = next(s for s in steps if s and (s[1] == "*" or tokens <= int(s[1])))
        assert config is not None
        assert (step[2], int(step[3]), int(step[4] or 0)) == (config.kernel, config.blocks, config.split)


@given(
    m=st.integers(1, 10000),
    n=st.integers(1, 70000),
    k=st.integers(1, 250).map(lambda i: 128 * i),
    scheme=st.sampled_from([SPARSE, DENSE, Scheme(8, 64, None, False), Scheme(8, -1, "2:4")]),
    device=st.sampled_from([H200, A100, RTX_4090]),
    seed=st.permutations(range(len(KERNELS))),
)
def test_choice_is_valid_and_independent_of_the_order_of_the_table(
    m: int, n: int, k: int, scheme: Scheme, device: Device, seed: list[int]
) -> None:
    p = problem(m, n, k, scheme)
    config = choose(p, device, KERNELS)
    assert config is not None
    kernel = next(x for x in KERNELS if x.name == config.kernel)
    assert kernel.min_capability <= device.capability
    assert kernel.shared_bytes <= device.shared_bytes_per_block
    assert 1 <= config.blocks <= 2 * device.multiprocessors
    assert choose(p, device, [KERNELS[i] for i in seed]) == config
    configs = [c for c in configurations(p, device, KERNELS) if isinstance(c, Config)]
    made_for_it = [c for c in configs if c.kernel.startswith("sm90") == config.kernel.startswith("sm90")]
    assert config.microseconds == min(c.microseconds for c in made_for_it)
    if config.split > 1:
        assert config.blocks % config.split == 0
        assert config.blocks // config.split <= device.clusters[config.split - 2]


def test_kernels_made_for_an_architecture_go_before_older_ones() -> None:
    names = [c.kernel for c in configurations(problem(16), H200, KERNELS) if isinstance(c, Config)]
    assert [n[:4] for n in names] == sorted((n[:4] for n in names), reverse=True)


def test_few_tiles_are_split_between_the_blocks_of_clusters_that_fit() -> None:
    kernel = Kernel("sm90_128x64", 90, 90, 64, 128, 256, 220 << 10, 1)
    found = schedules(problem(64), H200, kernel)  # 32 tiles of 16 tiles of K
    assert Config("sm90_128x64", 132) in found  # stream-K
    assert Config("sm90_128x64", 32, 1) in found  # whole tiles
    assert {(c.split, c.blocks) for c in found if c.split > 1} == {
        (2, 64),
        (3, 96),
    }  # 32 clusters: no more than 30 of 4
    assert not [c for c in schedules(problem(64), replace(H200, clusters=()), kernel) if c.split > 1]
    two_per_sm = replace(kernel, shared_bytes=100 << 10, blocks_per_multiprocessor=2)
    assert not [c for c in schedules(problem(64), H200, two_per_sm) if c.split > 1]


def test_small_token_tiles_leave_many_tokens_to_larger_ones() -> None:
    refused = [r.kernel for r in configurations(problem(300), H200, KERNELS) if isinstance(r, Refusal)]
    assert refused == ["sm90_n8", "sm90_n64"]
    alone = choose(problem(300), H200, KERNELS[3:5])
    assert alone is not None, "they are right for every number of tokens"
    assert alone.kernel == "sm90_n64"


def test_tiles_that_would_be_padding_are_refused() -> None:
    reasons = {r.kernel: r.reason for r in configurations(problem(8), H200, KERNELS) if isinstance(r, Refusal)}
    assert set(reasons) == {"sm90_n64", "sm90_n256"}
    assert reasons["sm90_n64"] == "it is for 32 tokens or more, most of its tile would be padding"
    assert chosen(problem(1), H200) == "sm90_n8"
    alone = choose(problem(1), H200, KERNELS[4:5])
    assert alone is not None, "it is right for one token as well"


def test_room_for_the_next_launch_is_worth_a_little_time() -> None:
    """In chains, a block on each multiprocessor is faster, beside which one of the next launch finds room."""
    kernel = next(k for k in RECORDED_KERNELS if k.name == "sm90_128x8")

    def fastest(p: Problem) -> Config:
        return min(
            (replace(c, microseconds=estimate(p, H200, kernel, c)) for c in schedules(p, H200, kernel)),
            key=lambda c: c.microseconds,
        )

    def taken(p: Problem) -> Config:
        config = choose(p, H200, [kernel])
        assert config is not None
        return config

    gate_up = problem(1, 28672, 4096, DENSE)
    assert fastest(gate_up).step == "sm90_128x8@224/1"
    assert taken(gate_up).step == "sm90_128x8@132"
    assert taken(gate_up).microseconds < fastest(gate_up).microseconds + 4
    streams_long = problem(1, 28672, 8192, DENSE)
    assert taken(streams_long) == fastest(streams_long)
    more_than_a_tile = replace(gate_up, M=16)
    assert taken(more_than_a_tile) == fastest(more_than_a_tile)
    room = replace(fastest(gate_up), blocks=132, split=0, microseconds=4.0)
    assert cost(gate_up, H200, kernel, room) == 3.0, "a quarter at most"


def test_choices_are_near_the_fastest_that_were_measured() -> None:
    """On the H200 that the committed calibration is of, to which the constants were not fitted."""
    results = Path(__file__).parents[1] / "bench" / "results" / "h200" / "calibration.json"
    data = json.loads(results.read_text(encoding="utf-8"))
    device = Device(**{**data["meta"]["device"], "clusters": tuple(data["meta"]["device"]["clusters"])})
    tables = {s: {k["name"]: Kernel(**k) for k in table} for s, table in data["meta"]["kernels"].items()}
    measured: dict[Problem, list[tuple[float, float]]] = {}
    for r in data["rows"]:
        p, config = (
            problem(r["M"], r["N"], r["K"], SPARSE if r["sparsity"] == "2:4" else DENSE),
            Config.parse(r["step"]),
        )
        expected = estimate(p, device, tables[r["sparsity"]][config.kernel], config)
        measured.setdefault(p, []).append((expected, r["us"]))
    losses = [min(of)[1] / min(us for _, us in of) - 1 for of in measured.values()]
    assert len(losses) > 200
    assert sum(losses) / len(losses) < 0.01 and max(losses) < 0.15


# Tiles of y that were the fastest of all on an H200, group 128, float16, in the runs that the constants are fitted to.
@pytest.mark.parametrize(
    ("m", "n", "k", "scheme", "tile"),
    [
        (16, 28672, 8192, SPARSE, "128x16"),
        (64, 28672, 8192, DENSE, "256x64"),
        (32, 28672, 8192, DENSE, "256x32"),
        (32, 8192, 28672, SPARSE, "128x32"),
        (64, 4096, 4096, SPARSE, "128x32"),
        (128, 28672, 8192, SPARSE, "128x128"),
        (4096, 28672, 8192, SPARSE, "128x256"),
    ],
)
def test_measured_choices(m: int, n: int, k: int, scheme: Scheme, tile: str) -> None:
    config = choose(problem(m, n, k, scheme), H200, RECORDED_KERNELS)
    assert config is not None
    assert config.kernel == f"sm90_{tile}"


def test_plan_text_joins_equal_neighbours() -> None:
    a, b = Config("sm90_256x8", 112, 1), Config("sm90_128x64", 96, 3)
    assert plan_text({8: a, 16: a, 64: b, 128: Config("sm80_128x64", 132)}) == (
        "16:sm90_256x8@112/1 64:sm90_128x64@96/3 *:sm80_128x64@132"
    )


def test_a_plan_is_read_as_it_was_written() -> None:
    a, b, c = Config("sm90_256x8", 112, 1), Config("sm90_128x64", 96, 3), Config("sm80_128x64", 132)
    steps = parse_plan(plan_text({8: a, 16: a, 64: b, 128: c}))
    assert [choice_of(steps, m) for m in (1, 16, 17, 64, 65, 10**6)] == [a, a, b, b, c, c]


@pytest.mark.parametrize(
    "text", ["", "*", "*:", "*:a", "*:a@", "*:a@0", "*:a@1/0", "8:a@1", "0:a@1 *:a@1", "16:a@1 8:a@1 *:a@1", "*:a@1 "]
)
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="plan"):
        parse_plan(text)


def test_reads_what_the_extension_tells() -> None:
    assert Kernel.parse("sm90_n8 90 90 8 128 256 106496 2 ") == KERNELS[3]
    assert Kernel.parse("a 80 0 0 0 0 0 0 no such group size") == Kernel(
        "a", 80, 0, 0, 0, 0, 0, 0, "no such group size"
    )
    device = Device.parse("H200", [90, 132, 232448, 233472, 1980000, 3201000, 6016, 66, 39, 30, 22, 17, 15, 15])
    assert replace(device, name=H200.name) == H200


def test_recorded_times_are_near_those_that_were_measured() -> None:
    """Of one decoding step on an H200, without one."""
    results = Path(__file__).parents[1] / "bench" / "results" / "h200" / "compare.json"
    errors = []
    for row in json.loads(results.read_text(encoding="utf-8"))["rows"]:
        if row["impl"] == "sparse_marlin" and row["dtype"] == "float16" and row["M"] in (1, 16):
            scheme = Scheme(row["bits"], row["group_size"], None if row["sparsity"] == "none" else "2:4")
            errors.append(log(recorded_us(row["M"], row["N"], row["K"], scheme) / row["us"]))
    assert len(errors) >= 36
    assert abs(sum(errors) / len(errors)) < 0.05
    assert max(map(abs, errors)) < 0.4


def test_recorded_times_know_every_scheme() -> None:
    for bits, group in [(4, 32), (4, -1), (8, 128)]:
        dense, sparse = (recorded_us(1, 8192, 8192, Scheme(bits, group, s)) for s in (None, "2:4"))
        assert 0 < sparse < dense
