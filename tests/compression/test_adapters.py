"""Low-rank adapters: the closed form against brute force, and what whole models get from them."""

from __future__ import annotations

import copy
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from sparse_marlin import CompressedLinear, compress, patch_model
from sparse_marlin.compression.adapters import adapter_scheme, compress_with_adapters, low_rank
from sparse_marlin.compression.solve import METHODS_24, PRUNE_ONLY, compress_weight, output_error
from sparse_marlin.linear import Adapter
from sparse_marlin.scheme import AdapterScheme, Scheme

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
quiet = functools.partial(patch_model, progress=False)
SCHEME = Scheme(4, 64)
both_bits = pytest.mark.parametrize("bits", [4, 16])


def problem(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight, or an error of one, and the second moment of correlated inputs."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=g) * torch.rand(k, generator=g)
    x = torch.randn(8 * k, k, generator=g) @ mix / k**0.5
    return torch.randn(n, k, generator=g) * 0.02, x.T @ x


def cost(error: Tensor, metric: Tensor) -> float:
    error, metric = error.double(), metric.double()
    return float(((error @ metric) * error).sum())


# ------------------------------------------------------------------------------------------------------- closed form


@pytest.mark.parametrize(("n", "k"), [(48, 96), (96, 48), (64, 64), (200, 16), (1, 32), (32, 1)])
@pytest.mark.parametrize("rank", [1, 5, 16])
def test_low_rank_is_the_best_there_is(n: int, k: int, rank: int) -> None:
    """Against a truncated SVD of the error times a root of the second moment, in float64."""
    rank = min(rank, n, k)
    error, metric = problem(n, k)
    a, b = low_rank(error, metric, rank)
    assert a.shape == (rank, k) and b.shape == (n, rank)
    root = torch.linalg.cholesky(metric.double())
    u, s, v = torch.linalg.svd(error.double() @ root, full_matrices=False)
    best = (u[:, :rank] * s[:rank]) @ v[:rank] @ torch.linalg.inv(root)
    total = cost(error, metric)
    assert cost(error - b @ a, metric) == pytest.approx(cost(error.double() - best, metric), abs=1e-5 * total)
    torch.testing.assert_close((b @ a).double(), best, rtol=0, atol=2e-4 * float(best.abs().max()))
    torch.testing.assert_close(b.T @ b, torch.eye(rank), rtol=0, atol=1e-5)


def test_no_small_step_away_is_better() -> None:
    error, metric = problem(40, 56)
    a, b = low_rank(error, metric, 7)
    least = cost(error - b @ a, metric)
    g = torch.Generator().manual_seed(5)
    for step in (1e-3, 1e-2, 1e-1):
        for _ in range(20):
            da, db = (step * t.abs().mean() * torch.randn(t.shape, generator=g) for t in (a, b))
            assert cost(error - (b + db) @ (a + da), metric) > least


def test_a_solver_that_does_not_converge_is_asked_again_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    error, metric = problem(40, 56)
    expected = low_rank(error, metric, 7)
    eigh = torch.linalg.eigh

    def fussy(matrix: Tensor) -> Any:
        if matrix.dtype == FP32:
            raise torch.linalg.LinAlgError("did not converge")
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", fussy)
    a, b = low_rank(error, metric, 7)
    assert a.dtype == FP32
    torch.testing.assert_close(b @ a, expected[1] @ expected[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("n", "k"), [(24, 40), (40, 24)])
def test_full_rank_leaves_nothing(n: int, k: int) -> None:
    error, metric = problem(n, k)
    a, b = low_rank(error, metric, min(n, k))
    torch.testing.assert_close(b @ a, error, rtol=0, atol=1e-6)


def test_a_second_moment_that_is_singular() -> None:
    """Fewer inputs than columns, and columns that no input reaches."""
    error, _ = problem(48, 96)
    x = torch.randn(10, 96, generator=torch.Generator().manual_seed(1))
    x[:, 7] = 0
    a, b = low_rank(error, x.T @ x, 10)
    assert cost(error - b @ a, x.T @ x) < 1e-6 * cost(error, x.T @ x)


def test_more_rank_is_never_worse() -> None:
    error, metric = problem(48, 96)
    costs = []
    for rank in range(1, 49):
        a, b = low_rank(error, metric, rank)
        costs.append(cost(error - b @ a, metric))
    assert all(after <= before for before, after in itertools.pairwise(costs))


# ------------------------------------------------------------------------------------------- beside a compressed weight


def solved(
    w: Tensor, h: Tensor | None, rank: int, bits: int = 16, method: str = "one-shot", scheme: Scheme = SCHEME
) -> tuple[Tensor, Adapter]:
    """The compressed weight, and its adapter."""
    adapter = AdapterScheme(rank, bits)
    solution, (found,) = compress_with_adapters(w, h, scheme, method, 0.01, [(len(w), adapter)])
    assert found is not None and found.scheme == adapter
    return solution.weight, found


@both_bits
@pytest.mark.parametrize("method", METHODS_24)
def test_an_adapter_makes_the_output_better(method: str, bits: int) -> None:
    w, h = problem(64, 128)
    plain = output_error(w, compress_weight(w, h, Scheme(4, 64), method).weight, h)
    weight, adapter = solved(w, h, 16, bits, method)
    assert output_error(w, weight + adapter.dequantize(), h) < 0.7 * plain


@both_bits
def test_the_adapter_is_fitted_to_the_weight_beside_it(bits: int) -> None:
    """No other adapter of that rank would be better; INT4 keeps nine tenths of what it could gain."""
    w, h = problem(64, 128)
    weight, adapter = solved(w, h, 16, bits)
    damped = h + 0.01 * h.diagonal().mean() * torch.eye(128)
    a, b = low_rank(w - weight, damped, 16)
    without, best, left = (cost(w - weight - low, damped) for low in (torch.zeros(()), b @ a, adapter.dequantize()))
    assert best * (1 - 1e-5) <= left < best + (1e-4 if bits == 16 else 0.1) * (without - best)


def test_b_makes_up_for_the_rounding_of_a() -> None:
    """INT4 factors beat those that are rounded each for itself."""
    w, h = problem(64, 128)
    weight, adapter = solved(w, h, 32, 4)
    error = w - weight
    a, b = low_rank(error, h, 32)
    plain = [compress_weight(f, None, Scheme(4, 128, None).fit(f.shape[1]), "rtn").weight for f in (a, b)]
    ours = cost(error - adapter.dequantize(), h)
    assert ours < 0.9 * cost(error - plain[1] @ plain[0], h)


def test_solving_beside_an_adapter_beats_fitting_one_afterwards() -> None:
    w, h = problem(64, 128)
    alone = compress_weight(w, h, Scheme(4, 64), "one-shot").weight
    a, b = low_rank(w - alone, h, 16)
    weight, adapter = solved(w, h, 16)
    assert output_error(w, weight + adapter.dequantize(), h) < 0.95 * output_error(w, alone + b @ a, h)


def test_full_rank_reproduces_the_weight() -> None:
    for n, k in ((32, 64), (64, 32)):
        w, h = problem(n, k)
        weight, adapter = solved(w, h, 32, scheme=Scheme(4, 32))
        assert output_error(w, weight + adapter.dequantize(), h) < 1e-3  # float16 has 11 bits


@both_bits
def test_without_inputs_it_corrects_the_weight(bits: int) -> None:
    w, _ = problem(64, 128)
    weight, adapter = solved(w, None, 16, bits, "magnitude+rtn")
    left = (w - weight - adapter.dequantize()).norm()
    s = torch.linalg.svdvals(w - weight)
    assert left <= (1.0001 if bits == 16 else 1.03) * s[16:].norm()
    dead, _ = solved(w, torch.zeros(128, 128), 16, bits, "wanda+rtn")
    assert dead.isfinite().all()


@both_bits
@pytest.mark.parametrize("factor", [0.0, 1e-12])
def test_nothing_to_correct(bits: int, factor: float) -> None:
    """A weight that lies on the grid already, and one next to it."""
    codes = torch.randint(-7, 8, (32, 64), generator=torch.Generator().manual_seed(0)).float()
    codes[:, ::32] = 7
    w = codes / 64 + factor * torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    weight, adapter = solved(w, None, 32, bits, "rtn", Scheme(4, 32, None))
    assert adapter.dequantize().isfinite().all()
    assert (w - weight - adapter.dequantize()).norm() <= (0.002 if bits == 16 else 0.12) * w.norm()
    zero, none = solved(torch.zeros(32, 64), None, 16, bits, "rtn", Scheme(4, 32, None))
    assert not zero.any() and not none.dequantize().any()


def test_stacked_weights_get_their_own_adapters() -> None:
    w, h = problem(96, 128)
    parts = [(64, AdapterScheme(16)), (8, None), (24, AdapterScheme(8, 4))]
    solution, adapters = compress_with_adapters(w, h, Scheme(4, 64), "one-shot", 0.01, parts)
    assert [a and a.scheme for a in adapters] == [a for _, a in parts]
    alone = compress_weight(w[64:72], h, Scheme(4, 64), "one-shot").weight
    assert output_error(w[64:72], solution.weight[64:72], h) == pytest.approx(
        output_error(w[64:72], alone, h), rel=0.05
    )
    for rows, adapter in ((slice(0, 64), adapters[0]), (slice(72, 96), adapters[2])):
        assert adapter is not None
        before, after = solution.weight[rows], solution.weight[rows] + adapter.dequantize()
        assert output_error(w[rows], after, h) < 0.9 * output_error(w[rows], before, h)


# ------------------------------------------------------------------------------------------------------- rank and bits


@pytest.mark.parametrize(
    ("rank", "n", "k", "expected"),
    [
        (0.1, 576, 576, 64),
        (0.1, 192, 576, 32),
        (0.1, 4096, 14336, 416),
        (0.25, 64, 256, 16),
        (0.26, 64, 256, 32),
        (1e-9, 64, 64, 16),
        (0.999, 40, 64, 40),
        (0.5, 7, 64, 7),
        (5, 64, 64, 5),
    ],
)
def test_ranks(rank: float, n: int, k: int, expected: int) -> None:
    assert adapter_scheme(rank, 16, n, k) == AdapterScheme(expected)
    assert adapter_scheme(0, 16, n, k) is adapter_scheme(0.0, 4, n, k) is None


@pytest.mark.parametrize("rank", [-1, -0.1, 1.0, 1.5, float("nan"), float("inf"), True, "16", None, (16,)], ids=str)
def test_a_rank_that_cannot_be(rank: Any) -> None:
    model = tiny.llama()
    before = tiny.snapshot(model)
    with pytest.raises(ValueError, match=r"adapter_rank must be 0 for none.*got"):
        quiet(model, calibration=tiny.tokens(), adapter_rank=rank)
    assert tiny.unchanged(model, before)
    with pytest.raises(ValueError, match=r"adapter_rank must be"):
        compress(nn.Linear(64, 64), adapter_rank=rank)


def test_a_rank_larger_than_a_layer_names_it() -> None:
    model = tiny.llama()
    before = tiny.snapshot(model)
    with pytest.raises(
        ValueError, match=r"(?s)k_proj: an adapter of rank 40 is larger than the weight \[32, 64\].*0\.1"
    ):
        quiet(model, calibration=tiny.tokens(), adapter_rank=40)
    assert tiny.unchanged(model, before)
    quiet(model, calibration=tiny.tokens(), adapter_rank=40, skip=["k_proj", "v_proj"])
    with pytest.raises(ValueError, match="rank 65 is larger"):
        compress(nn.Linear(64, 96), adapter_rank=65)


@pytest.mark.parametrize("bits", [8, 2, 0, "4", True, None], ids=str)
def test_bits_that_cannot_be(bits: Any) -> None:
    with pytest.raises(ValueError, match="adapter_bits must be one of 4, 16"):
        quiet(tiny.llama(), calibration=tiny.tokens(), adapter_rank=8, adapter_bits=bits)


@pytest.mark.parametrize("method", PRUNE_ONLY)
def test_a_pruned_linear_cannot_have_one(method: str) -> None:
    with pytest.raises(ValueError, match=f"'{method}' leaves an nn.Linear.*adapter_rank=0"):
        quiet(tiny.llama(), calibration=tiny.tokens(), method=method, adapter_rank=8)


# --------------------------------------------------------------------------------------------------------- one layer


@both_bits
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
def test_compress_one_layer(dtype: torch.dtype, bits: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(128, 64, dtype=dtype)
    x = (torch.randn(512, 128) @ torch.randn(128, 128)).to(dtype)
    options: dict[str, Any] = {"group_size": 64, "calibration": x}
    plain, layer = compress(linear, **options), compress(linear, **options, adapter_rank=0.25, adapter_bits=bits)
    assert layer.adapter is not None and layer.adapter.scheme == AdapterScheme(16, bits)
    assert {t.dtype for t in layer.adapter.parameters() if t.is_floating_point()} == {dtype}
    assert not any(p.requires_grad for p in layer.parameters())
    true = linear.double()(x.double())
    errors = [(m(x).double() - true).norm() / true.norm() for m in (layer, plain)]
    assert errors[0] < 0.8 * errors[1]
    assert compress(linear.to(dtype)).adapter is None


# ------------------------------------------------------------------------------------------------------- whole models


@pytest.mark.parametrize(
    ("build", "bits"),
    [(tiny.llama, 4), (tiny.llama, 16), (tiny.opt, 16), (tiny.mixture, 4)],
    ids=["llama-4", "llama-16", "opt-16", "mixture-4"],
)
def test_every_layer_of_a_model_gets_one(build: Any, bits: int) -> None:
    plain, model = build(), build()
    without = quiet(plain, calibration=tiny.tokens())
    report = quiet(model, calibration=tiny.tokens(), adapter_rank=0.2, adapter_bits=bits)
    assert [line.name for line in report.layers] == [line.name for line in without.layers]
    better = 0
    for line, before in zip(report.compressed, without.compressed, strict=True):
        module = model.get_submodule(line.name)
        assert isinstance(module, CompressedLinear) and module.adapter is not None
        assert module.adapter.scheme == AdapterScheme(line.adapter_rank, bits)
        assert line.adapter_rank == min(16, *line.shape)
        floats = {n for n, t in module.state_dict().items() if t.is_floating_point() and n != "bias"}
        nbytes = sum(t.numel() * (2 if n in floats else 1) for n, t in module.state_dict().items() if n != "bias")
        assert line.bits_per_weight == pytest.approx(8 * nbytes / (line.shape[0] * line.shape[1]), rel=0.02)
        own = module.scheme.bits_per_weight(line.shape[1])
        assert line.adapter_bits_per_weight == pytest.approx(line.bits_per_weight - own)
        assert (before.adapter_rank, before.adapter_bits_per_weight) == (0, 0)
        better += line.error_after < before.error_after
    assert better == len(report.compressed)
    assert report.adapter_cost > 0 == without.adapter_cost
    assert report.bits_per_weight == pytest.approx(without.bits_per_weight * (1 + report.adapter_cost))
    assert "+ rank 16" in str(report) and f"adapters add {report.adapter_cost:.0%}" in str(report)
    assert "adapter" not in str(without)


@both_bits
@pytest.mark.parametrize("method", ["one-shot", "two-pass"])
def test_the_model_is_nearer_to_the_original(method: str, bits: int) -> None:
    original, plain, model = (tiny.llama() for _ in range(3))
    quiet(plain, calibration=tiny.tokens(), method=method)
    quiet(model, calibration=tiny.tokens(), method=method, adapter_rank=16, adapter_bits=bits)
    with torch.inference_mode():
        truth, far, near = (m(tiny.tokens(seed=5)).logits for m in (original, plain, model))
    assert (near - truth).norm() < 0.8 * (far - truth).norm()


@both_bits
def test_later_layers_see_the_corrected_outputs(bits: int) -> None:
    """The reported error of a layer is the one that it has, adapter included, on what it is fed in the end."""
    model, tokens = tiny.llama(), tiny.tokens()
    original = copy.deepcopy(model)
    report = quiet(model, calibration=tokens, method="two-pass", adapter_rank=16, adapter_bits=bits)
    seen: dict[str, Tensor] = {}
    for line in report.compressed:
        model.get_submodule(line.name).register_forward_pre_hook(
            lambda _, args, n=line.name: seen.update({n: args[0].flatten(0, -2)})
        )
    with torch.inference_mode():
        model(tokens)
        for line in report.compressed:
            if line.name.split(".")[-1] not in ("q_proj", "k_proj", "v_proj"):
                continue  # two-pass calibrates a block on what its own layers put out before they are compressed
            module, x = model.get_submodule(line.name), seen[line.name]
            truth = x @ original.get_submodule(line.name).weight.T
            error = (module(x) - truth).norm() / truth.norm()
            assert float(error) == pytest.approx(line.error_after, rel=0.01), line.name


def test_an_expert_without_tokens_gets_one_for_its_weight_alone() -> None:
    model = tiny.mixture(idle=(1,))
    original = copy.deepcopy(model)
    report = quiet(model, calibration=tiny.tokens(), adapter_rank=16)
    for line in report.compressed:
        idle = ".experts.1." in line.name
        assert ("adapter fitted to the weight alone" in line.note) == ("no calibration input" in line.note) == idle
        if idle:
            module, w = model.get_submodule(line.name), original.get_submodule(line.name).weight
            lost = w - module.packed.dequantize(FP32)
            assert (w - module.dequantize(FP32)).norm() < 1.001 * torch.linalg.svdvals(lost)[16:].norm()


@both_bits
def test_a_second_call_leaves_adapters_alone(bits: int) -> None:
    model = tiny.llama()
    options: dict[str, Any] = {"calibration": tiny.tokens(), "adapter_rank": 16, "adapter_bits": bits}
    quiet(model, **options, skip="down_proj")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    report = quiet(model, **options)
    assert {line.name.split(".")[-1] for line in report.compressed} == {"down_proj"}
    assert not any("adapter" in line.name for line in report.layers)
    after = model.state_dict()
    assert all(torch.equal(after[n], t) for n, t in before.items() if "down_proj" not in n)


@pytest.mark.parametrize(("dtype", "bits"), [(FP32, 4), (BF16, 16), (FP16, 16)], ids=str)
def test_same_bits_again_and_after_an_interruption(tmp_path: Path, dtype: torch.dtype, bits: int) -> None:
    def run(model: nn.Module) -> Any:
        options: dict[str, Any] = {"adapter_rank": 0.3, "adapter_bits": bits}
        return quiet(model, calibration=tiny.tokens(), **options, checkpoint_dir=tmp_path / "store")

    class Stop(BaseException):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    model, expected = tiny.llama(dtype), tiny.llama(dtype)
    report = quiet(expected, calibration=tiny.tokens(), adapter_rank=0.3, adapter_bits=bits)
    model.get_submodule("model.layers.1.mlp.down_proj").register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        run(model)
    for resumed in (tiny.llama(dtype), tiny.llama(dtype)):  # the first computes one block, the second none
        assert run(resumed) == report
        a, b = resumed.state_dict(), expected.state_dict()
        assert a.keys() == b.keys() and any("adapter" in n for n in a)
        assert all(tiny.same_bits(t, b[n]) for n, t in a.items())
    with pytest.raises(ValueError, match="another run"):
        quiet(tiny.llama(dtype), calibration=tiny.tokens(), checkpoint_dir=tmp_path / "store")


def test_a_store_that_lost_a_factor_is_refused(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    run = functools.partial(quiet, calibration=tiny.tokens(), adapter_rank=16, checkpoint_dir=tmp_path)
    run(tiny.llama())
    file = min(tmp_path.glob("*.safetensors"))
    with safe_open(file, "pt") as f:
        tensors, metadata = {k: f.get_tensor(k) for k in f.keys()}, f.metadata()  # noqa: SIM118
    del tensors["model.layers.0.mlp.up_proj.adapter.b"]
    save_file(tensors, file, metadata)
    with pytest.raises(ValueError, match=rf"(?s){file.name} is damaged.*delete it"):
        run(tiny.llama())


@both_bits
def test_the_memory_need_counts_them(bits: int, capsys: pytest.CaptureFixture[str]) -> None:
    patch_model(tiny.llama(), calibration=tiny.tokens(), adapter_rank=16, adapter_bits=bits)
    assert "GB = model 0.00 + adapters 0.00 + activations" in capsys.readouterr().err
    patch_model(tiny.llama(), calibration=tiny.tokens())
    assert "adapters" not in capsys.readouterr().err
