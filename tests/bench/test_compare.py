"""The comparison itself: its command line, what it checks, what it writes, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compare
import peers
import pytest
import results
import timing
import torch
from compare import Benchmark, Job
from cusparselt import Outcome, Search
from fakes import FakeCuda, FakeCudaTimer, make_row
from peers import Function, Peer, Prepared
from results import Limits, Results
from torch import Tensor

from sparse_marlin.packed import PackedWeight

LIMITS = Limits(bandwidth_gbs=1000.0, tflops={"float16": 100.0, "bfloat16": 100.0})
JOB = Job(((64, 128), (128, 64)), (1, 16, 200), ("float16",), ("none", "2:4"), 4, 32)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SPARSE_MARLIN_COMMIT", "c0ffee")


class Stub(Peer):
    """An implementation that multiplies rightly, and notes which copies are read; then something is made wrong."""

    def __init__(
        self, name: str, cuda: FakeCuda | None = None, spoil: Callable[[Tensor], Tensor] | None = None, **options: Any
    ) -> None:
        super().__init__(name, **options)
        self.cuda, self.spoil, self.prepared = cuda, spoil, 0

    def prepare(self, packed: PackedWeight, dtype: torch.dtype) -> Prepared:
        self.prepared += 1
        weight = packed.dequantize(dtype)

        def make() -> Function:
            mine = object()

            def call(x: Tensor) -> Tensor:
                if self.cuda is not None:
                    self.cuda.note(mine)
                y = (x.float() @ weight.float().t()).to(dtype)
                return y if self.spoil is None else self.spoil(y)

            return call

        return Prepared(make, packed.scheme.bits_per_weight(packed.in_features))


def base(cuda: FakeCuda | None = None) -> Stub:
    return Stub(results.BASE, cuda, bits=16)


def ours(cuda: FakeCuda | None = None) -> Stub:
    return Stub("sparse_marlin", cuda, sparsities=("none", "2:4"))


def run(
    found: list[Peer], timer: timing.Timer | None = None, job: Job = JOB, **options: Any
) -> tuple[Benchmark, list[results.Row]]:
    settings: dict[str, Any] = {"path": None, "old": None, "deadline": None, **options}
    meta = {"commit": "c", "gpu": None}
    bench = Benchmark(job, peers.Found(found), timer or timing.CpuTimer(), LIMITS, meta, **settings)
    bench.run()
    return bench, bench.rows


def test_rows(fake_cuda: FakeCuda) -> None:
    timer = FakeCudaTimer(rotate_bytes=20_000.0)
    bench, rows = run([base(fake_cuda), ours(fake_cuda)], timer)
    assert bench.done == 6
    assert len(rows) == 2 * 3 * 3
    assert {(r.impl, r.sparsity, r.bits) for r in rows} == {
        ("cublas", "none", 16),
        ("sparse_marlin", "none", 4),
        ("sparse_marlin", "2:4", 4),
    }
    for r in rows:
        bits = {"none": 4.5, "2:4": 3.5}[r.sparsity]
        assert r.us == pytest.approx(10.0)  # what a call takes on the fake GPU
        assert r.us_spread == 0
        assert r.speedup_vs_fp16 == 1
        moved = 64 * 128 * bits / 8 + 2 * r.M * (64 + 128)
        assert r.gbps == pytest.approx(moved / 10 / 1e3, rel=1e-3)
        assert r.tflops == pytest.approx(2 * r.M * 64 * 128 / 10 / 1e6, rel=1e-3)
        assert r.roofline_pct == pytest.approx(100 * (moved / 1e6) / 10, rel=1e-3)  # the memory is their limit
        assert 0 < r.max_rel_err < 1e-3
    assert {(e["impl"], e["sparsity"], e["M"]) for e in bench.notes.host_us} == {
        ("cublas", "none", 1),
        ("sparse_marlin", "none", 1),
        ("sparse_marlin", "2:4", 1),
    }


def test_weights_rotate(fake_cuda: FakeCuda) -> None:
    """The copies that a graph reads, with x and y, are as large as what has to pass through the cache."""
    timer = FakeCudaTimer(rotate_bytes=20_000.0)
    job = replace(JOB, shapes=((64, 128),), sparsities=("none",))
    run([base(fake_cuda), ours(fake_cuda)], timer, job)
    weight = 64 * 128 * 4.5 / 8
    graphs = [g for g in fake_cuda.captures if g.copies]
    assert len(graphs) == 6  # two implementations, three M
    for graph, m in zip(graphs, (1, 1, 16, 16, 200, 200), strict=True):
        distinct = len(set(graph.copies))
        activations = 2 * m * (64 + 128)
        assert distinct == max(1, -(-(20_000 - activations) // weight))
        assert graph.copies[distinct : 2 * distinct] == graph.copies[:distinct]  # in turn
        assert len(graph.copies) == timing.MAX_CALLS
    assert fake_cuda.emptied == 1


def test_slow_hosts_are_timed_as_often(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes the host long before the GPU begins says nothing about the graph of such calls."""

    def slow(y: Tensor) -> Tensor:
        if fake_cuda.capturing is None:
            fake_cuda.now_us += 300e3
        return y

    def interleave(runners: dict[str, timing.Runner], rounds: dict[str, int], *_: Any) -> dict[str, timing.Timing]:
        planned.append({name: (runners[name].calls, count) for name, count in rounds.items()})
        return {}

    planned: list[dict[str, tuple[int, int]]] = []
    monkeypatch.setattr(timing, "interleave", interleave)
    job = replace(JOB, shapes=((64, 128),), tokens=(1,), sparsities=("none",))
    for us in (10.0, 60e3):  # in a graph
        fake_cuda.call_us = us
        run([base(fake_cuda), Stub("humming", fake_cuda, slow)], FakeCudaTimer(20_000.0), job)
    copies = timing.copies_needed(64 * 128 * 4.5 / 8, 2 * (64 + 128), 20_000)
    assert [p["humming"] for p in planned] == [(50, timing.MAX_ROUNDS), (copies, 2)]


def test_weights_are_made_once_per_shape() -> None:
    mine = ours()
    run([base(), mine])
    assert mine.prepared == 2 * 2  # shapes and sparsities, not M


@pytest.mark.parametrize(
    "spoil",
    [
        lambda y: y * 1.02,
        lambda y: y.index_fill(1, torch.tensor([7]), 0),
        lambda y: torch.where(torch.arange(y.shape[1]) == 3, torch.nan, y),
        lambda y: y.index_fill(0, torch.tensor([y.shape[0] - 1]), 0),  # the last token
        torch.zeros_like,
    ],
)
def test_wrong_is_said_and_not_timed(spoil: Any, fake_cuda: FakeCuda, capsys: pytest.CaptureFixture[str]) -> None:
    peer = Stub("humming", fake_cuda, spoil)
    bench, rows = run([base(fake_cuda), ours(fake_cuda), peer], FakeCudaTimer(20_000.0))
    assert not any(r.impl == "humming" for r in rows)
    assert sorted((e["N"], e["M"]) for e in bench.notes.wrong if e["impl"] == "humming") == [
        (n, m) for n in (64, 128) for m in JOB.tokens
    ]
    assert len(rows) == 18
    assert "WRONG: humming: largest error" in capsys.readouterr().out
    json.dumps(bench.results().meta, allow_nan=False)  # not even where the error is a NaN


def test_rounding_is_not_wrong() -> None:
    def rounds(y: Tensor) -> Tensor:
        return (y.float() * (1 + 2**-12)).half()

    _, rows = run([base(), Stub("humming", spoil=rounds)], job=replace(JOB, sparsities=("none",)))
    assert any(r.impl == "humming" for r in rows)


def test_failures_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(y: Tensor) -> Tensor:
        if y.shape[0] == 16:
            raise RuntimeError("no kernel for 16 tokens\nand a long stack")
        return y

    bench, rows = run([base(), ours(), Stub("humming", spoil=fails)])
    assert {r.M for r in rows if r.impl == "humming"} == {1, 200}
    assert {r.M for r in rows if r.impl == "sparse_marlin"} == {1, 16, 200}
    assert [e["reason"] for e in bench.notes.failed] == ["RuntimeError: no kernel for 16 tokens"] * 2
    assert "not timed: humming: RuntimeError: no kernel for 16 tokens (M = 16)" in capsys.readouterr().out


def test_gives_up_on_what_never_works() -> None:
    class Broken(Peer):
        tries = 0

        def prepare(self, packed: PackedWeight, dtype: torch.dtype) -> Prepared:
            self.tries += 1
            raise RuntimeError("cannot compile")

    broken = Broken("humming")
    job = replace(JOB, shapes=((64, 128), (128, 64), (64, 64), (32, 64)), tokens=(1,))
    bench, _ = run([base(), ours(), broken], job=job)
    assert broken.tries == 2
    assert [e["reason"] for e in bench.notes.failed] == ["RuntimeError: cannot compile"] * 2 + [
        "given up, see before"
    ] * 2


def test_capture_is_tried_once(fake_cuda: FakeCuda) -> None:
    """What cannot be captured is left out from then on, and does not keep others from being timed."""
    attempts = 0

    def fails(y: Tensor) -> Tensor:
        nonlocal attempts
        if fake_cuda.capturing is not None:
            attempts += 1
            raise RuntimeError("operation not permitted when stream is capturing")
        return y

    found: list[Peer] = [base(fake_cuda), ours(fake_cuda), Stub("gemlite", fake_cuda, fails)]
    bench, rows = run(found, FakeCudaTimer(20_000.0))
    assert attempts == 1 and len(rows) == 18
    assert [e["reason"] for e in bench.notes.failed] == [
        "CaptureError: operation not permitted when stream is capturing",
        "given up, see before",
    ]


def test_out_of_memory_is_not_the_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    original = peers.random_weight

    def make(n: int, *rest: Any) -> PackedWeight:
        if n == 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return original(n, *rest)

    monkeypatch.setattr(peers, "random_weight", make)
    bench, rows = run([base(), ours()])
    assert {r.N for r in rows} == {128} and bench.done == 3
    assert "not timed: everything: OutOfMemoryError: CUDA out of memory" in capsys.readouterr().out


def test_refusal_is_noted() -> None:
    bench, rows = run([base(), ours(), Stub("torch_int4", dtypes=(torch.bfloat16,))])
    assert not any(r.impl == "torch_int4" for r in rows)
    assert {e["reason"] for e in bench.notes.failed} == {"only for bfloat16"}


def test_other_weights_are_compared_with_their_own() -> None:
    """An implementation that rounds weights otherwise is right if it multiplies by what it says."""

    class Nf4(Stub):
        def prepare(self, packed: PackedWeight, dtype: torch.dtype) -> Prepared:
            weight = (packed.dequantize(torch.float32) * 1.3).to(dtype)
            return Prepared(lambda: lambda x: (x.float() @ weight.float().t()).to(dtype), 4.5, weight, 64)

    _, rows = run([base(), ours(), Nf4("bitsandbytes", bits=4)])
    found = [r for r in rows if r.impl == "bitsandbytes"]
    assert len(found) == 6 and {r.group_size for r in found} == {64}


def test_sparse_alone_has_its_base() -> None:
    _, rows = run([base(), ours(), Stub("humming")], job=replace(JOB, sparsities=("2:4",)))
    assert {(r.impl, r.sparsity) for r in rows} == {("cublas", "none"), ("sparse_marlin", "2:4")}


def test_unusable_gpu_ends_the_run(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    broken = False

    class Timer(FakeCudaTimer):
        def synchronize(self) -> None:
            if broken:
                raise RuntimeError("an illegal memory access was encountered")

    def crashes(y: Tensor) -> Tensor:
        nonlocal broken
        if y.shape == (1, 128):  # the second weight
            broken = True
            raise RuntimeError("an illegal memory access was encountered")
        return y

    path = tmp_path / "r.json"
    with pytest.raises(SystemExit, match=r"humming has left the GPU unusable.*--resume"):
        run([base(fake_cuda), ours(fake_cuda), Stub("humming", fake_cuda, crashes)], Timer(20_000.0), path=path)
    assert {r.N for r in results.read(path).rows} == {64}


def test_deadline_keeps_what_is_measured(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    path = tmp_path / "r.json"
    found = [base(fake_cuda), ours(fake_cuda)]
    bench, rows = run(found, FakeCudaTimer(20_000.0), path=path, deadline=30.0, clock=clock)
    assert 0 < bench.done < bench.total and bench.stopped
    assert sorted(r.key for r in results.read(path).rows) == sorted(r.key for r in rows)


def test_resume_measures_the_rest(fake_cuda: FakeCuda, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    job = replace(JOB, shapes=JOB.shapes[:1])
    run([base(fake_cuda), ours(fake_cuda)], FakeCudaTimer(20_000.0), job, path=path)
    mine = ours(fake_cuda)
    found = [base(fake_cuda), mine]
    old = results.read(path)
    todo = compare.missing_products(JOB, old, found)
    assert todo == {(128, 64, "float16"): [1, 16, 200]}
    bench, rows = run(found, FakeCudaTimer(20_000.0), path=path, old=old, todo=todo)
    assert mine.prepared == 2  # the second weight alone, dense and 2:4
    assert bench.done == bench.total == 3
    assert {r.N for r in rows} == {128}
    assert len(results.read(path).rows) == 18


def test_what_is_missing() -> None:
    of = {"N": 64, "K": 128, "M": 16, "group_size": 32}
    rows = [make_row(impl=i, **of) for i in ("sparse_marlin", "humming")]
    rows += [make_row(impl="cublas", **of, bits=16), make_row(impl="sparse_marlin", **{**of, "M": 1})]
    known = Results({}, rows)
    dense = replace(JOB, shapes=((64, 128),), sparsities=("none",))
    two = [base(), ours()]
    assert compare.missing_products(dense, known, two) == {(64, 128, "float16"): [1, 200]}
    assert compare.missing_products(dense, known, [*two, Stub("humming")]) == {(64, 128, "float16"): [1, 200]}
    everything = {(64, 128, "float16"): [1, 16, 200]}
    assert compare.missing_products(dense, None, two) == everything
    for other in (
        replace(dense, group_size=64),
        replace(dense, bits=8),
        replace(dense, sparsities=("none", "2:4")),  # 2:4 is not known yet
    ):
        assert compare.missing_products(other, known, two) == everything
    more = [*two, Stub("torch_int4")]
    assert compare.missing_products(dense, known, more) == everything
    note = {"impl": "torch_int4", "sparsity": "none", "N": 64, "K": 128, "dtype": "float16", "reason": "no"}
    note |= {"bits": dense.bits, "group_size": dense.group_size}
    for meta in ({"failed": [note]}, {"wrong": [{**note, "M": 16}]}):
        assert compare.missing_products(dense, Results(meta, rows), more) == {(64, 128, "float16"): [1, 200]}
    for other in ({"bits": 8}, {"reason": compare.GIVEN_UP}):  # of another scheme; it may work next time
        assert compare.missing_products(dense, Results({"failed": [note | other]}, rows), more) == everything


def test_checked_rows() -> None:
    rows = compare.checked_rows((1, 16, 8192)).tolist()
    assert rows == sorted(set(rows))
    assert rows[: compare.CHECKED_ROWS] == list(range(compare.CHECKED_ROWS))
    assert {0, 15, 8191} <= set(rows)
    assert all(any(start <= r < start + 64 for r in rows) for start in range(0, 8192, 64))
    assert len(rows) < 400
    assert compare.checked_rows((5,)).tolist() == [0, 1, 2, 3, 4]


def test_error_by_hand() -> None:
    reference = torch.tensor([[1.0, -4.0], [2.0, 3.0]], dtype=torch.float64)
    y = torch.tensor([[1.0, -4.0], [9.0, 9.0], [2.0, 2.0]])
    assert compare.max_rel_err(y, torch.tensor([0, 2]), reference, (3, 2)) == 0.25
    y[0, 0] = float("nan")
    assert compare.max_rel_err(y, torch.tensor([0, 2]), reference, (3, 2)) == float("inf")
    with pytest.raises(ValueError, match=r"y must be \[2, 2\], got \[3, 2\]"):
        compare.max_rel_err(y, torch.tensor([0]), reference, (2, 2))


def test_product_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(3, 64).half(), torch.randn(50, 64).half()
    torch.testing.assert_close(compare.multiply64(x, w), x.double() @ w.double().t(), rtol=1e-12, atol=1e-12)


# The command line.


def output(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert compare.main(arguments) == code
    return capsys.readouterr().out


def test_without_flags(capsys: pytest.CaptureFixture[str]) -> None:
    out = output([], capsys)
    assert "No GPU that torch can use" in out
    assert "humming: skipped, there is no GPU" in out
    assert "dense and 2:4 INT4 group 128, float16" in out
    assert "nothing is run without --dense, --sparse or --quick" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "lama3-8b"], "no shape 'lama3-8b': did you mean llama3-8b"),
        (["--shapes", "4096by4096"], "or write a size such as 4096x14336"),
        (["--shapes", "0x128"], "at least one row and one column, got 0x128"),
        (["--shapes", "64x100"], "in_features must be a multiple of group_size, got 100 and 128"),
        (["--sparse", "--shapes", "64x130", "--group-size", "-1"], "multiple of 4 for 2:4"),
        (["--m", "0"], "numbers of tokens, 1 or more, got 0"),
        (["--m", "16", "-3"], "1 or more, got -3"),
        (["--peers", "huming"], "no peer 'huming': did you mean humming?"),
        (["--peers", "qqqq"], "no peer 'qqqq': there are torch_int4, cusparselt"),
        (["--peers", "all", "humming"], "all and none stand alone"),
        (["--group-size", "100"], "group_size must be one of -1, 32, 64, 128, got 100"),
        (["--bits", "3"], "invalid choice: 3"),
        (["--dtype", "float32"], "invalid choice: 'float32'"),
        (["--time-limit", "0"], "--time-limit must be a positive number of seconds, got 0"),
        (["--resume"], "--resume needs --json FILE"),
    ],
)
def test_mistakes(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare.main(arguments)
    assert message in capsys.readouterr().err


def test_shape_sets() -> None:
    shapes = compare.parse_shapes(["llama3-70b", "28672x8192", "64×32", "paper"])
    assert shapes == ((8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672), (64, 32), (73728, 18432))
    for name, found in compare.SHAPES.items():
        assert found == tuple(dict.fromkeys(found)), name
        for n, k in found:
            assert n % 128 == 0 and k % 256 == 0, name


def test_peer_names() -> None:
    assert compare.parse_peers(["all"]) == list(peers.PEERS)
    assert compare.parse_peers(["none"]) == []
    assert compare.parse_peers(["humming", "torch_int4", "humming"]) == ["humming", "torch_int4"]
    assert set(compare.QUICK_PEERS) <= set(peers.PEERS)


def test_defaults_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _, job, names = compare.parse(["--dense"])
    assert job.shapes == compare.SHAPES["llama3-8b"] and job.tokens == compare.TOKENS and job.sparsities == ("none",)
    assert names == list(peers.PEERS)
    _, job, names = compare.parse(["--quick"])
    assert job.shapes == ((4096, 4096), (8192, 28672)) and job.sparsities == ("none", "2:4")
    assert names == list(compare.QUICK_PEERS)
    _, job, _ = compare.parse(["--sparse", "--m", "64", "1", "64", "--dtype", "bfloat16", "float16", "--bits", "8"])
    assert (job.tokens, job.dtypes, job.bits, job.sparsities) == ((1, 64), ("bfloat16", "float16"), 8, ("2:4",))


def test_quick_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole program as users without a GPU run it."""
    path = tmp_path / "quick.json"
    out = output(["--quick", "--json", str(path), "--shapes", "256x512", "--m", "1", "4"], capsys)
    assert "No GPU that torch can use" in out and "2 of 2 products compared" in out and "WRONG" not in out
    found = results.read(path)
    assert len(found.rows) == 2 * 3
    meta = found.meta
    assert meta["commit"] == "c0ffee" and meta["gpu"] is None and meta["sensors"] is None
    assert meta["command"].startswith("python bench/compare.py --quick --json")
    assert meta["versions"]["torch"] == torch.__version__
    assert meta["bandwidth_gbs"] == max(meta["bandwidth_ways"].values()) > 0
    assert meta["peak_tflops_sparse"]["float16"] == 2 * meta["peak_tflops"]["float16"]
    assert set(meta["skipped"]) == set(peers.PEERS)
    assert meta["wrong"] == [] and meta["failed"] == []
    for r in found.rows:
        assert r.us > 0 and r.max_rel_err < 2e-3
        assert r.speedup_vs_fp16 == pytest.approx(results.base_times(found.rows)[r.problem] / r.us, rel=1e-3)

    # Added to by another run, left alone by --resume, refused for another commit.
    arguments = ["--dense", "--json", str(path), "--shapes", "256x512", "--peers", "none"]
    assert "wrote" in output([*arguments, "--m", "2"], capsys)
    assert {r.M for r in results.read(path).rows} == {1, 2, 4}
    assert "0 of 0 products compared" in output([*arguments, "--m", "1", "2", "--resume"], capsys)
    assert len(results.read(path).meta["earlier_runs"]) == 2


def test_another_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    results.write(path, Results({"commit": "c0ffee", "gpu": "NVIDIA H200"}, [make_row()]))
    before = path.read_text()
    assert compare.main(["--quick", "--json", str(path)]) == 2
    assert "holds results of gpu 'NVIDIA H200', this run is None" in capsys.readouterr().err
    assert path.read_text() == before


def test_no_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    path.write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        compare.main(["--quick", "--json", str(path)])
    assert "must hold" in capsys.readouterr().err


def test_wrong_result_of_ours_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Stub("sparse_marlin", spoil=lambda y: y * 2, sparsities=("none", "2:4"))
    monkeypatch.setattr(peers, "find", lambda names, prefixes: peers.Found([base(), wrong]))
    arguments = ["--dense", "--shapes", "64x128", "--m", "1"]
    assert "WRONG: sparse_marlin none 64x128 M=1 float16: " in output(arguments, capsys, code=1)


def test_search_is_used(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = peers.Found([base(), ours(), peers.Cusparselt(), peers.Cusparselt({})])
    todo = compare.missing_products(JOB, None, found.peers)
    assert compare.start_search(found, replace(JOB, sparsities=("none",)), todo, {}, set()) is None
    assert compare.start_search(peers.Found([base(), peers.Cusparselt()]), JOB, todo, {}, set()) is None

    search = Search.__new__(Search)
    p = (64, 128, "float16", 1)
    outcome = Outcome(times={p: {0: 5.0, 2: 3.0}, (*p[:3], 2): {0: 1.0}}, crashed=[(p, 1)], finished={p, (*p[:3], 3)})
    monkeypatch.setattr(Search, "finish", lambda self, expired: outcome)
    meta: dict[str, Any] = {}
    earlier = {(*p[:3], 4): 9}
    compare.use_algorithms(found, search, JOB, todo, earlier, None, meta)
    best = found.peers[3]
    # Not of M = 2, for which the search did not try all.
    assert isinstance(best, peers.Cusparselt) and best.algorithms == {p: 2, (*p[:3], 3): None, **earlier}
    old = Results({**meta, "commit": "abc"}, [])
    assert compare.known_algorithms(old) == best.algorithms and compare.known_algorithms(None) == {}
    assert compare.crashed_before(old) == {("float16", 1)} and compare.crashed_before(None) == set()
    assert isinstance(found.peers[2], peers.Cusparselt) and found.peers[2].algorithms is None
    assert meta["cusparselt"]["crashed"] == [[64, 128, "float16", 1, 1]]
    assert "3 algorithms timed, 1 crashed; the best one is known of 3 products" in capsys.readouterr().out


def test_program_on_a_gpu(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The way through main() that a GPU takes, with everything that needs one replaced."""

    class Device(FakeCudaTimer):
        def __init__(self) -> None:
            super().__init__(20_000.0)

    class Found(Search):
        def __init__(self, problems: list[Any], crashed: list[Any]) -> None:
            assert crashed == [] and problems == [(64, 128, "float16", 1), (64, 128, "float16", 16)]

        def finish(self, expired: Callable[[], bool], max_crashes: int = 20) -> Outcome:
            assert not expired()
            p = (64, 128, "float16", 1)
            return Outcome(times={p: {0: 5.0, 2: 3.0}}, finished={p}, error="20 algorithms crashed")

    class Sensors:
        def __init__(self, gpu: str | None) -> None:
            assert gpu == "GPU-1234"

        def close(self) -> None:
            pass

        def summary(self) -> dict[str, list[float]]:
            return {
                "sm_mhz": [1000.0, 1500.0, 1980.0],
                "power_w": [90.0, 400.0, 700.0],
                "temperature_c": [30.0, 40.0, 50],
            }

    properties = SimpleNamespace(L2_cache_size=60 << 20, uuid="1234")
    for name, value in (("is_available", True), ("get_device_name", "NVIDIA H200"), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch, "_cslt_compress", lambda w: w)
    monkeypatch.setattr(peers.libcusparselt, "cusparselt_linear", lambda x, w, n, a: x @ w.t())
    monkeypatch.setattr(peers.libcusparselt, "library", lambda: SimpleNamespace(version="0.8.0"))
    monkeypatch.setattr(peers.Cusparselt, "missing", lambda self: None)
    monkeypatch.setattr(peers, "Cublas", lambda: base(fake_cuda))
    monkeypatch.setattr(peers, "Ours", lambda prefix=None: ours(fake_cuda))
    for module, name, replacement in (
        (timing, "CudaTimer", Device),
        (timing, "Sensors", Sensors),
        (timing, "measure_bandwidth", lambda timer: {"sum": 4000.0, "kernel": 4500.0}),
        (timing, "measure_peak", lambda timer, dtype: 750.0),
        (compare, "Search", Found),
        (compare, "driver_version", lambda: "580.1"),
    ):
        monkeypatch.setattr(module, name, replacement)
    path = tmp_path / "r.json"
    arguments = [
        "--dense",
        "--sparse",
        "--shapes",
        "64x128",
        "--m",
        "1",
        "16",
        "--peers",
        "cusparselt",
        "cusparselt:best",
    ]
    out = output([*arguments, "--json", str(path), "--time-limit", "100"], capsys)
    found = results.read(path)
    assert {(r.impl, r.sparsity, r.M) for r in found.rows} == {
        *(
            (i, s, m)
            for i, s in (("cublas", "none"), ("sparse_marlin", "none"), ("sparse_marlin", "2:4"))
            for m in (1, 16)
        ),
        *(("cusparselt", "2:4", m) for m in (1, 16)),
        ("cusparselt:best", "2:4", 1),
    }
    row = next(r for r in found.rows if r.impl == "cusparselt")
    assert (row.bits, row.group_size) == (16, 0)
    assert row.gbps == pytest.approx((64 * 128 * 9 / 8 + 2 * row.M * 192) / row.us / 1e3, rel=1e-3)
    meta = found.meta
    assert (meta["gpu"], meta["driver"], meta["l2_mb"], meta["bandwidth_gbs"]) == ("NVIDIA H200", "580.1", 60, 4500)
    assert meta["cusparselt"]["best"] == [[64, 128, "float16", 1, 2]]
    assert "NVIDIA H200" in out and "the search was given up: 20 algorithms crashed" in out
    assert "SM clock 1000 to 1980 MHz (median 1500), power up to 700 W" in out
    assert (
        "not timed: cusparselt:best 2:4: ValueError: not all of its algorithms have been tried for this M (M = 16)"
        in out
    )
    # What was not searched is tried again, and nothing else.
    old, job = results.read(path), replace(JOB, shapes=((64, 128),), tokens=(1, 16))
    again = compare.missing_products(job, old, [base(), peers.Cusparselt({})])
    assert again == {(64, 128, "float16"): [16]}
