"""The transport from chi to the vMF angle preserves probability, by an independent integral."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exact import CosineLaw
from mpmath import diff, log, mp
from scipy import integrate, stats
from torch import Tensor, nn

from compressive import VonMisesFisher
from compressive.distributions import radial_polynomial, radial_solver, special, vmf_sampler
from compressive.distributions.radial_solver import Tail

DIMENSIONS = [2, 3, 4, 5, 8, 16, 64, 128, 256, 2048, 65536]
KAPPAS = [0.0, 1e-8, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 1024.0, 16384.0, 1e6, 1e8]
QUANTILES = np.concatenate(
    [10.0 ** np.arange(-12, -1), np.linspace(0.02, 0.98, 97), 1 - 10.0 ** np.arange(-2.0, -13, -1)]
)


def tails(r: torch.Tensor, n: int, kappa: float) -> Tail:
    k = torch.full_like(r, kappa)
    return Tail.of(r, n, k, special.log_mode_density(k, n) + special.log_area(n - 1))


def solved(r: torch.Tensor, n: int, kappa: float) -> torch.Tensor:
    return tails(r, n, kappa).solve(r)


def half_angles(r: torch.Tensor, n: int, kappa: float) -> dict[str, torch.Tensor]:
    """Return log tan(theta/2) by each method that applies."""
    column, cpu = r.unsqueeze(-1), torch.device("cpu")
    k = torch.full_like(column, kappa)
    found = {
        "fixed": vmf_sampler.turn_fixed(column, n, vmf_sampler.fixed_cells(n, kappa, cpu)),
        "table": vmf_sampler.turn(
            column, n, k, vmf_sampler.table_cells(n, cpu), differentiate=False
        )[:2],
    }
    if n == 3:
        found["closed form"] = vmf_sampler.turn_in_space(column, k, differentiate=False)[:2]
    sines = {name: (cosine, column * scale) for name, (cosine, scale) in found.items()}
    return {
        name: torch.log(torch.where(cosine > 0, sine / (1 + cosine), (1 - cosine) / sine))[:, 0]
        for name, (cosine, sine) in sines.items()
    }


def chi_quantiles(n: int) -> torch.Tensor:
    return torch.from_numpy(stats.chi(n - 1).ppf(QUANTILES))


@pytest.mark.parametrize("n", [2, 3, 5, 16, 256, 2048])
@pytest.mark.parametrize("kappa", [0.0, 0.1, 3.0, 10.0, 1024.0, 16384.0, 1e6])
def test_transport_preserves_probability(n: int, kappa: float) -> None:
    """|F(theta(r)) - F_chi(r)| <= 1e-10, where both F come from scipy and numpy.

    This bounds the error of the sampler's radial distribution in the sup norm: a Kolmogorov-Smirnov
    test would need 10^19 draws to detect it. (chi.ppf itself is accurate to about 1e-11.)
    """
    r = chi_quantiles(n)
    law = CosineLaw(n, kappa)
    angles = {name: 2 * torch.atan(g.exp()) for name, g in half_angles(r, n, kappa).items()}
    for name, theta in (angles | {"solver": solved(r, n, kappa)}).items():
        error = law.cdf_theta(theta.numpy()) - QUANTILES
        assert np.abs(error).max() <= 1e-10, name


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 8, 15, 16, 17, 39, 256, 1024, 1025, 8192, 65536])
def test_tables_match_the_solver_for_all_kappa(n: int) -> None:
    """The error of F is below 1.2e-10, at kappas and radii inside of the cells and at their edges.

    n includes both sides of each change of the number of cells.
    """
    grid = vmf_sampler.table_grid(n)
    cells = torch.linspace(0, 1, 5 * grid.size + 1, dtype=torch.float64)[1:]
    kappas = (grid.scale * (1 - cells) / cells).tolist()
    r = torch.linspace(max(grid.low, 1e-3), grid.high, 331, dtype=torch.float64)
    for kappa in kappas + KAPPAS:
        tail = tails(r, n, kappa)
        exact = tail.log_half_tangent(r)
        theta = 2 * torch.atan(exact.exp())
        density = torch.exp(tail.log_density(theta)) * torch.sin(theta)
        for name, found in half_angles(r, n, kappa).items():
            assert ((found - exact).abs() * density).max() <= 1.2e-10, (name, kappa)


@pytest.mark.parametrize("n", DIMENSIONS)
def test_solver_converges_for_all_kappa(n: int) -> None:
    """Check the solver's own residual in each tail, where the external integral is not accurate.

    It is 1e-10 relative in every tail down to 1e-12, except next to theta = pi, where a float64
    angle cannot represent pi - theta to better than 4e-16 absolute.
    """
    r = chi_quantiles(n)
    for kappa in KAPPAS:
        side = tails(r, n, kappa)
        theta = side.solve(r)
        assert theta.isfinite().all()
        assert (theta.diff() >= 0).all()
        allowed = 1e-10 * side.mass + 4.5e-16 * torch.exp(side.log_density(theta))
        assert ((side.integral(theta) - side.mass).abs() <= allowed).all(), kappa


@pytest.mark.slow
def test_steps_and_nodes_have_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """One Halley step and sixteen nodes fewer suffice for all but one angle in 5,000, to 1e-9."""
    usual = slice(8, -8)  # quantiles 1e-4 to 1 - 1e-4
    corners = [(n, kappa) for n in (2, 3, 8, 64, 2048) for kappa in KAPPAS]
    full = [solved(chi_quantiles(n), n, kappa) for n, kappa in corners]
    monkeypatch.setattr(radial_solver, "_HALLEY_STEPS", radial_solver._HALLEY_STEPS - 1)
    monkeypatch.setattr(radial_solver, "_NODES", radial_solver._NODES - 16)
    for (n, kappa), theta in zip(corners, full, strict=True):
        fewer = solved(chi_quantiles(n), n, kappa)
        torch.testing.assert_close(fewer[usual], theta[usual], rtol=1e-9, atol=1e-15)


def test_three_dimensions_match_the_closed_form() -> None:
    """n = 3: 1 - w = -log(1 - p (1 - exp(-2 kappa))) / kappa, p the probability of the angle."""
    r = chi_quantiles(3)
    for kappa in (0.5, 10.0, 1e4):
        sag = 2 * torch.sin(solved(r, 3, kappa) / 2) ** 2
        p = -torch.expm1(-r * r / 2)
        exact = -torch.log1p(p * math.expm1(-2 * kappa)) / kappa
        # near p = 1 the closed form itself loses digits to 1 - p
        torch.testing.assert_close(sag, exact, rtol=2e-3 * 2**-10, atol=1e-10 / kappa)


def slopes(r: torch.Tensor, n: int, kappa: float) -> torch.Tensor:
    """Return d log tan(theta/2) / d kappa as the sampler computes it."""
    r = r.unsqueeze(-1)
    k = torch.full_like(r, kappa)
    if n == 3:
        found = vmf_sampler.turn_in_space(r, k, differentiate=True)
    else:
        cells = vmf_sampler.table_cells(n, torch.device("cpu"))
        found = vmf_sampler.turn(r, n, k, cells, differentiate=True)
    slope = found[2]
    assert slope is not None
    return slope.squeeze(-1)


@pytest.mark.parametrize("n", [2, 3, 8, 256, 2048])
@pytest.mark.parametrize("kappa", [0.1, 10.0, 1024.0, 16384.0])
def test_derivative_in_kappa_matches_finite_differences(n: int, kappa: float) -> None:
    """Compare the derivative to central differences of the solver.

    The step 1e-3 kappa leaves an error of 1e-6 relative from the third derivative.
    """
    r = torch.from_numpy(stats.chi(n - 1).ppf(np.linspace(0.01, 0.99, 33)))
    h = 1e-3 * kappa
    above, below = (tails(r, n, k).log_half_tangent(r) for k in (kappa + h, kappa - h))
    torch.testing.assert_close(
        slopes(r, n, kappa), (above - below) / (2 * h), rtol=1e-5, atol=1e-10
    )


@pytest.mark.parametrize("n", [2, 3, 16, 256])
@pytest.mark.parametrize("kappa", [0.0, 1e-6, 1.0, 50.0])
def test_derivative_in_kappa_satisfies_its_definition(n: int, kappa: float) -> None:
    """F is constant along it: f dtheta/dkappa = -dF/dkappa = integral of (A - cos) f, by scipy."""
    p = np.linspace(0.05, 0.95, 7)
    r = torch.from_numpy(stats.chi(n - 1).ppf(p))
    theta = solved(r, n, kappa).numpy()
    law = CosineLaw(n, kappa)
    mean, _ = law.mean_and_variance()

    def density(angle: float) -> float:
        return float(np.exp(law._log_f(angle) - law.peak) / law.total)

    for angle, slope in zip(theta, slopes(r, n, kappa).tolist(), strict=True):
        below = integrate.quad(
            lambda t: (mean - np.cos(t)) * density(t), law.edges[0], angle, epsabs=1e-12
        )[0]
        assert slope * math.sin(angle) * density(angle) == pytest.approx(below, rel=3e-6, abs=1e-9)


def test_closed_form_matches_mpmath() -> None:
    """n = 3, at both poles, and for kappa on both sides of each change of formula."""
    with mp.workdps(40):
        for kappa in (1e-6, 0.1, 5.0, 19.9, 20.1, 1e3, 1e6):
            for r in (1e-8, 0.1, 1.0, 3.0, 7.0):
                arguments = (torch.tensor([[x]], dtype=torch.float64) for x in (r, kappa))
                found = vmf_sampler.turn_in_space(*arguments, differentiate=True)
                p = mp.exp(-(mp.mpf(r) ** 2) / 2)

                def sag(k, p=p):
                    return -log(p + (1 - p) * mp.exp(-2 * k)) / k

                def log_half_tangent(k, sag=sag):
                    return log(sag(k) / (2 - sag(k))) / 2

                k = mp.mpf(kappa)
                sine = mp.sqrt(sag(k) * (2 - sag(k))) / r
                slope = diff(log_half_tangent, k, h=k * mp.mpf(10) ** -12)
                exact = (float(1 - sag(k)), float(sine), float(slope))
                for value, expected, rtol in zip(found, exact, (1e-15, 1e-13, 1e-9), strict=True):
                    assert value is not None
                    assert value.item() == pytest.approx(expected, rel=rtol, abs=3e-16), (kappa, r)


def test_blocks_do_not_change_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    n, cells = 5, vmf_sampler.table_cells(5, torch.device("cpu"))
    r = torch.linspace(0.1, 5, 2 * 37, dtype=torch.float64).view(2, 37, 1)
    kappa = torch.linspace(0, 50, 37, dtype=torch.float64).view(37, 1)
    whole = vmf_sampler.turn(r, n, kappa, cells, differentiate=True)
    monkeypatch.setattr(vmf_sampler, "_ROWS_PER_BLOCK", 16)
    parts = vmf_sampler.turn(r, n, kappa, cells, differentiate=True)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-15)


def test_sums_over_the_powers_of_r_match_a_loop() -> None:
    """The processor's eager path and the one of compiled code and torch.func."""
    draw = torch.Generator().manual_seed(0)
    cells = torch.randn(9, 64, dtype=torch.float64, generator=draw)
    cell = torch.randint(9, (4, 5, 1), generator=draw)
    powers = torch.randn(4, 5, 1, 8, dtype=torch.float64, generator=draw)
    found = vmf_sampler._sum_over_x(cell, powers, cells)
    traced = torch.func.vmap(vmf_sampler._sum_over_x, (0, 0, None))(cell, powers, cells)
    for i, j in np.ndindex(4, 5):
        table = cells[cell[i, j, 0]].view(8, 8)  # power of r, power of t
        expected = sum(float(powers[i, j, 0, p]) * table[p] for p in range(8))
        # Sums of eight terms near 1; libraries add them in different orders.
        for one in (found, traced):
            torch.testing.assert_close(one[i, j, :, 0], expected, rtol=1e-13, atol=1e-13)


def test_invalid_kappa_gives_nan_and_no_invalid_index() -> None:
    """On a GPU, an index outside of the table would stop the process."""
    r = torch.ones(2, 1, dtype=torch.float64)
    kappa = torch.tensor([[math.nan], [-1e9]], dtype=torch.float64)
    cells = vmf_sampler.table_cells(5, torch.device("cpu"))
    cosine, _, _ = vmf_sampler.turn(r, 5, kappa, cells, differentiate=False)
    assert cosine[0].isnan().all()


def fit(n: int, kappa: float) -> radial_polynomial.Transport | None:
    log_height = special.constants(kappa, n).log_mode_density + special.log_area(n - 1)
    return radial_polynomial.transport(n, kappa, log_height)


@pytest.mark.slow
@pytest.mark.parametrize("n", DIMENSIONS)
def test_polynomials_match_the_solver(n: int) -> None:
    """1 - cos(theta) is accurate to 1.2e-10 relative between the points of the fit.

    At the points, 1e-10 is guaranteed. In float32 it is accurate to 3e-7, five units in the last
    place.
    """
    for kappa in KAPPAS:
        if (transport := fit(n, kappa)) is None:
            assert n < 40, "large dimensions always have a short polynomial"
            continue
        low = max(transport.center - transport.width, 1e-3)
        r = torch.linspace(low, transport.center + transport.width, 997, dtype=torch.float64)
        exact = 2 * (torch.sin(solved(r, n, kappa) / 2) / r) ** 2
        torch.testing.assert_close(
            radial_polynomial.carry(transport, r), exact, rtol=1.2e-10, atol=0
        )
        narrow = radial_polynomial.carry(transport, r.float()).double()
        torch.testing.assert_close(narrow, exact, rtol=3e-7, atol=0)


def test_papers_concentrations_have_low_degree_polynomials() -> None:
    degrees = {kappa: len(fit(256, kappa).coefficients) - 1 for kappa in (1024.0, 16384.0)}  # type: ignore[union-attr]
    assert degrees == {1024.0: 6, 16384.0: 3}


def test_radii_outside_the_fit_stay_finite() -> None:
    transport = fit(256, 1024.0)
    assert transport is not None
    r = torch.tensor([0.0, 1e-30, 1e3])
    assert ((q := radial_polynomial.carry(transport, r)) > 0).all()
    assert q.isfinite().all()


@pytest.mark.parametrize(
    ("n", "kappa"),
    [
        (258, None),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((18, None), (22, 4.5), (258, 4.5))
        ),
    ],
)
def test_exported_samples_are_those_of_eager_mode(n: int, kappa: float | None) -> None:
    """Tables that are made during an export must have values, then and later."""

    class Sampler(nn.Module):
        def forward(self, mu: Tensor, kappas: Tensor) -> Tensor:
            given = kappas if kappa is None else kappa
            return VonMisesFisher(mu, given, validate_args=False).rsample()

    mu = F.normalize(torch.randn(3, n), dim=-1)
    kappas = torch.tensor([0.5, 3.0, 500.0])
    exported = torch.export.export(Sampler(), (mu, kappas), strict=False).module()
    drawn = []
    for sampler in (exported, Sampler()):
        torch.manual_seed(1)
        drawn.append(sampler(mu, kappas))
    assert type(drawn[1]) is Tensor
    # float64 sums in different orders, rounded to float32 once.
    torch.testing.assert_close(*drawn, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(drawn[1].norm(dim=-1), torch.ones(3))
