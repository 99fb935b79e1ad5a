"""The normalizer and its derivatives against mpmath: a stored table and fresh values."""

import math
import warnings
from typing import Any

import mpmath
import pytest
import torch
from conftest import golden_json
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mpf
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from compressive.distributions import bessel_table, debye, special

TABLE = golden_json("vmf_table")["table"]
POINTS = [pytest.param(row, id=f"{row['n']}-{row['kappa']:g}") for row in TABLE]

FUNCTIONS = {
    "logC": special.log_normalizer,
    "A": special.mean_resultant_length,
    "one_minus_A": special.spherical_variance,
    "dA": special.cosine_variance,
}


def relative_error(value: float, exact: str) -> float:
    with mpmath.workdps(50):
        return float(abs(mpf(value) - mpf(exact)) / abs(mpf(exact)))


def test_table_is_complete() -> None:
    assert len(TABLE) == 252


# log C grows with n and kappa, and so does its error: 1e-13 is 450 units in the last place at the
# table's worst point, a log C near 0. The others are sums of positive terms.
@pytest.mark.parametrize("row", POINTS)
def test_float64_matches_mpmath(row: dict) -> None:
    kappa = torch.tensor(row["kappa"], dtype=torch.float64)
    for name, function in FUNCTIONS.items():
        error = relative_error(function(kappa, row["n"]).item(), row[f"{name}_str"])
        assert error <= (1e-13 if name == "logC" else 1e-12), name


@pytest.mark.slow
@pytest.mark.parametrize("row", POINTS)
def test_gradients_match_mpmath(row: dict) -> None:
    """Check the first two derivatives of log C and the first of A and 1 - A, by autograd."""
    kappa = torch.tensor(row["kappa"], dtype=torch.float64, requires_grad=True)
    n = row["n"]
    (first,) = torch.autograd.grad(special.log_normalizer(kappa, n), kappa, create_graph=True)
    (second,) = torch.autograd.grad(first, kappa)
    assert relative_error(first.item(), row["dlogC_str"]) <= 1e-12
    assert relative_error(-second.item(), row["dA_str"]) <= 1e-12
    (da,) = torch.autograd.grad(special.mean_resultant_length(kappa, n), kappa)
    assert relative_error(da.item(), row["dA_str"]) <= 1e-12
    (down,) = torch.autograd.grad(special.spherical_variance(kappa, n), kappa)
    assert relative_error(-down.item(), row["dA_str"]) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("row", POINTS)
def test_float32_is_float64_rounded_once(row: dict) -> None:
    """Half a unit in the last place of float32 is 6e-8, far below 3e-6 and 5e-7."""
    kappa = torch.tensor(row["kappa"], dtype=torch.float32, requires_grad=True)
    exact = kappa.detach().double()
    for function in FUNCTIONS.values():
        value = function(kappa, row["n"])
        assert value.dtype == torch.float32
        assert value.isfinite()
        reference = function(exact, row["n"])
        assert (value.double() - reference).abs() <= 6e-8 * reference.abs()
    (slope,) = torch.autograd.grad(special.log_normalizer(kappa, row["n"]), kappa)
    reference = -special.mean_resultant_length(exact, row["n"])
    assert (slope.double() - reference).abs() <= 6e-8 * reference.abs()


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(st.integers(2, 400), st.floats(-3, 3))
def test_functions_match_mpmath_between_table_points(n: int, log10_kappa: float) -> None:
    """Draw points around the boundary of the two methods at nu^2 + kappa^2 = 32^2.

    A'' loses a factor kappa^2 to cancellation just below the boundary, hence 1e-10, not 1e-13.
    """
    k = 10**log10_kappa
    kappa = torch.tensor(k, dtype=torch.float64, requires_grad=True)
    with mpmath.workdps(40):
        nu, x = mpf(n) / 2 - 1, mpf(k)
        below, here = mpmath.besseli(nu, x), mpmath.besseli(nu + 1, x)
        a = here / below
        da = 1 - a * a - (n - 1) * a / x
        dda = -2 * a * da - (n - 1) * (da / x - a / x**2)
        log_i = mpmath.log(below)
    value = special.mean_resultant_length(kappa, n)
    (first,) = torch.autograd.grad(value, kappa, create_graph=True)
    (second,) = torch.autograd.grad(first, kappa)
    assert value.item() == pytest.approx(float(a), rel=1e-14)
    assert first.item() == pytest.approx(float(da), rel=1e-13)
    assert second.item() == pytest.approx(float(dda), rel=1e-10)
    log_bessel = special.log_bessel_i(n / 2 - 1, kappa).item()
    # log I can be near 0, unlike the terms it is a sum of; 60 allows for the recursion down from
    # order 32.
    terms = 60 + k + n * (1 + abs(math.log(k)))
    assert log_bessel == pytest.approx(float(log_i), rel=0, abs=1e-15 * terms)


def test_functions_are_continuous_across_the_two_methods() -> None:
    """Two methods meet at nu^2 + kappa^2 = 32^2; A'' has the largest jump."""
    for n in (2, 3, 10, 40, 65):
        nu = n / 2 - 1
        seam = math.sqrt(32.0**2 - nu**2)
        for name, tolerance in {"M": 1e-14, "A": 1e-15, "1-A": 1e-13, "A'": 1e-13}.items():
            kappa = torch.tensor(seam, dtype=torch.float64)
            upper, lower = debye._debye(kappa, nu, name), debye._descend(kappa, nu, name)
            torch.testing.assert_close(upper, lower, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("nu", [0.0, 0.3, 0.5, 1.0, 7.0, 18.5, 31.99])
def test_table_matches_the_functions_without_a_table(nu: float) -> None:
    """At kappas between the nodes, at the ends of cells, and beyond the last node."""
    edges = torch.linspace(0, 1, bessel_table._CELLS + 1, dtype=torch.float64)[1:]
    kappa = torch.cat([torch.logspace(-8, 12, 5000).double(), (nu + 3.5) * (1 - edges) / edges])
    for which in ("log C", "M", "A", "1-A", "A'", "A''"):
        found = bessel_table.look_up(kappa, nu, which)
        exact = debye.evaluate_directly(kappa, nu, which)
        # Without a table, 1 - A, A' and A'' lose some digits next to s = 32.
        loose = 2e-13 if which in ("1-A", "A'", "A''") else 1e-14
        torch.testing.assert_close(
            found, exact, rtol=loose, atol=1e-13 if which in ("M", "log C") else 0
        )


def test_table_has_no_invalid_index() -> None:
    """On a GPU, an index outside of the table would stop the process."""
    kappa = torch.tensor([math.nan, -1e9, math.inf], dtype=torch.float64)
    assert special.log_mode_density(kappa, 4)[0].isnan()


@pytest.mark.parametrize("which", ["log C", "M", "A", "1-A", "A'", "A''"])
@pytest.mark.parametrize("n", [2, 3, 17, 64])
def test_functions_of_negative_kappa(n: int, which: str) -> None:
    """log C and A' are even, A and A'' are odd; a learned kappa can come back."""
    kappa = torch.tensor([0.5, 3.0, 40.0, 5000.0], dtype=torch.float64)
    found = bessel_table.look_up(-kappa, n / 2 - 1, which)
    value = debye.evaluate_directly(kappa, n / 2 - 1, which)
    odd, even = -value, value
    a = debye.evaluate_directly(kappa, n / 2 - 1, "A")
    expected = {"A": odd, "A''": odd, "M": value - 2 * kappa, "1-A": 1 + a}.get(which, even)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def density(n: int) -> nn.Module:
    class Density(nn.Module):
        def forward(self, kappa: Tensor) -> Tensor:
            return special.log_mode_density(kappa, n)

    return Density()


@pytest.mark.parametrize("trace", ["export", "fake", "jit"])
def test_tracing_does_not_change_later_results(trace: str) -> None:
    """Tensors without values must not be kept in a table."""
    n = {"export": 11, "fake": 13, "jit": 15}[trace]  # no table yet
    kappa = torch.tensor([0.0, 3.0, 700.0], dtype=torch.float64)
    expected = debye.evaluate_directly(kappa, n / 2 - 1, "M")
    module = density(n)
    if trace == "export":
        traced: Any = torch.export.export(module, (kappa,), strict=False).module()
    elif trace == "jit":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(module, (kappa,))
    else:
        with FakeTensorMode() as mode:
            assert module(mode.from_tensor(kappa)).shape == (3,)
        traced = module
    for found in (traced(kappa), module(kappa)):
        assert type(found) is Tensor
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_only_whole_dimensions_have_tables() -> None:
    before = bessel_table.bessel_table.cache_info().currsize
    for nu in (0.1, 0.2, 0.3):
        special.log_bessel_i(nu, torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert bessel_table.bessel_table.cache_info().currsize == before


@pytest.mark.parametrize("n", [2, 3, 256])
def test_kappa_zero_is_the_uniform_distribution(n: int) -> None:
    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    log_c = special.log_normalizer(zero, n)
    assert log_c.item() == pytest.approx(-special.log_area(n), rel=1e-14)
    assert special.mean_resultant_length(zero, n).item() == 0
    assert special.cosine_variance(zero, n).item() == pytest.approx(1 / n, rel=1e-14)
    (slope,) = torch.autograd.grad(log_c, zero)
    assert slope.item() == 0


def test_log_area_of_circle_and_sphere() -> None:
    assert special.log_area(2) == pytest.approx(math.log(2 * math.pi), rel=1e-15)
    assert special.log_area(3) == pytest.approx(math.log(4 * math.pi), rel=1e-15)


def test_bessel_function_of_any_real_order() -> None:
    kappa = torch.tensor([1e-3, 0.7, 5.0, 80.0], dtype=torch.float64, requires_grad=True)
    for nu in (0.0, 0.3, 2.75, 40.1):
        ours = special.log_bessel_i(nu, kappa)
        (slope,) = torch.autograd.grad(ours.sum(), kappa)
        for i, k in enumerate(kappa.tolist()):
            with mpmath.workdps(40):
                value = mpmath.besseli(nu, k)
                exact_slope = mpmath.besseli(nu, k, derivative=1) / value
                assert ours[i].item() == pytest.approx(float(mpmath.log(value)), rel=1e-13)
            assert slope[i].item() == pytest.approx(float(exact_slope), rel=1e-13)
    with pytest.raises(ValueError, match=r"^nu .* -0\.5"):
        special.log_bessel_i(-0.5, kappa)


def test_fourth_derivative_is_not_supported() -> None:
    kappa = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    value = special.log_normalizer(kappa, 8)
    for _ in range(3):
        (value,) = torch.autograd.grad(value, kappa, create_graph=True)
    with pytest.raises(NotImplementedError, match="third order"):
        torch.autograd.grad(value, kappa)


def test_gradcheck_twice() -> None:
    kappa = torch.tensor([0.01, 2.0, 31.0, 33.0, 500.0], dtype=torch.float64, requires_grad=True)
    for function in FUNCTIONS.values():
        assert torch.autograd.gradcheck(lambda k, f=function: f(k, 7), kappa)
    assert torch.autograd.gradgradcheck(lambda k: special.log_normalizer(k, 7), kappa)


def test_narrow_floats_are_widened() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        kappa = torch.tensor(10.0, dtype=dtype)
        assert special.mean_resultant_length(kappa, 256).dtype == torch.float32


def test_constants_match_the_functions() -> None:
    """The digits come from mpmath."""
    assert special.constants(10.0, 256).mean_resultant_length == pytest.approx(
        0.0390035345, abs=5e-11
    )
    assert special.constants(16384.0, 256).log_normalizer == pytest.approx(
        -15380.569385722, abs=5e-10
    )
    first = special.constants(1024.0, 256)
    assert special.constants(1024.0, 256) is first
    kappa = torch.tensor(1024.0, dtype=torch.float64)
    for name in first._fields:
        assert getattr(first, name) == getattr(special, name)(kappa, 256).item()
