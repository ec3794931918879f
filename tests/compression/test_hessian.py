"""The Hessian and its inverse factor, also where it is singular."""

import logging

import pytest
import torch

from sparse_marlin.compression.hessian import Hessian, NonFiniteError, inverse_factor


def test_sum_over_calls_is_the_second_moment() -> None:
    x = torch.randn(3, 70, 12)
    h = Hessian(12)
    h.add(x[:2])
    h.add(x[2].half().float())
    rows = torch.cat([x[:2].reshape(-1, 12), x[2].half().float()]).double()
    torch.testing.assert_close(h.matrix.double(), rows.T @ rows, rtol=1e-5, atol=1e-4)
    assert h.rows == 210


def test_half_inputs_do_not_overflow() -> None:
    h = Hessian(4)
    h.add(torch.full((100, 4), 60000.0, dtype=torch.float16))
    assert torch.isfinite(h.matrix).all()
    assert float(h.matrix[0, 0]) == pytest.approx(100 * 60000.0**2, rel=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_inputs_add_nothing(bad: float) -> None:
    h = Hessian(4)
    x = torch.ones(3, 4)
    x[1, 2] = bad
    with pytest.raises(NonFiniteError):
        h.add(x)
    assert h.rows == 0
    assert not h.matrix.any()


def test_factor_inverts_the_damped_matrix() -> None:
    x = torch.randn(200, 24)
    h = x.T @ x
    f = inverse_factor(h, 0.01)
    damped = h.double() + 0.01 * h.diagonal().double().mean() * torch.eye(24, dtype=torch.float64)
    torch.testing.assert_close(
        f.upper.T.double() @ f.upper.double() @ damped, torch.eye(24).double(), atol=1e-3, rtol=0
    )
    assert torch.equal(f.upper, f.upper.triu())
    assert f.damping == 0.01


@pytest.mark.parametrize("damping", [0.0, 0.01])
@pytest.mark.parametrize("kind", ["rank one", "duplicated columns", "dead columns", "nothing"])
def test_singular_matrices_damp_themselves(kind: str, damping: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sparse_marlin")
    x = torch.randn(64, 16)
    if kind == "rank one":
        x = torch.outer(x[:, 0], x[0])
    elif kind == "duplicated columns":
        x[:, 8:] = x[:, :8]
    elif kind == "dead columns":
        x[:, 3:7] = 0
    else:
        x.zero_()
    f = inverse_factor(x.T @ x, damping)
    assert torch.isfinite(f.upper).all()
    assert (f.upper.diagonal() > 0).all()
    if kind in ("dead columns", "nothing"):
        assert "always zero" in caplog.text
    elif damping == 0:
        assert f.damping > 0
        assert "damping was raised" in caplog.text


def test_hopeless_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be inverted"):
        inverse_factor(torch.full((4, 4), float("nan")), 0.01)
