"""The distribution's density, moments, samples and gradients, and its torch interface."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import golden_json, unit_vectors
from exact import CosineLaw, ratio
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.distributions import kl_divergence

from compressive import HypersphericalUniform, VonMisesFisher
from compressive.distributions import special

TABLE = {(row["n"], row["kappa"]): row for row in golden_json("vmf_table")["table"]}


def vmf(n: int, kappa: float, *batch: int, dtype: torch.dtype = torch.float64) -> VonMisesFisher:
    return VonMisesFisher(unit_vectors(*batch, n, dtype=dtype), kappa)


# Density and moments


def test_log_prob_matches_scipy() -> None:
    for n, kappa in ((2, 0.3), (3, 5.0), (16, 100.0), (256, 1024.0)):
        p = vmf(n, kappa)
        z = unit_vectors(50, n, seed=1)
        mu: Any = p.mean_direction.numpy()
        scipy = stats.vonmises_fisher.logpdf(z.numpy(), mu, kappa)  # pyright: ignore
        # scipy computes log C + kappa mu.z, numbers of size kappa
        np.testing.assert_allclose(p.log_prob(z).numpy(), scipy, rtol=0, atol=3e-14 * (kappa + 10))


@settings(deadline=None, max_examples=30)
@given(st.floats(0, 200))
def test_density_integrates_to_one_on_the_circle(kappa: float) -> None:
    """The trapezoidal rule is exact for periodic entire functions of this bandwidth."""
    angle = torch.arange(400, dtype=torch.float64) * (2 * math.pi / 400)
    z = torch.stack([angle.cos(), angle.sin()], dim=-1)
    total = vmf(2, kappa).log_prob(z).exp().sum() * (2 * math.pi / 400)
    assert total.item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("n", "kappa"), list(TABLE))
def test_entropy_matches_mpmath(n: int, kappa: float) -> None:
    """-log C - kappa A loses all digits at kappa = 1e8; M and 1 - A do not."""
    exact = TABLE[n, kappa]["entropy"]
    for p in (
        vmf(n, kappa),
        VonMisesFisher(unit_vectors(n), torch.tensor(kappa, dtype=torch.float64)),
    ):
        assert p.entropy().item() == pytest.approx(exact, rel=2e-13, abs=2e-13)


def test_named_properties_match_the_table() -> None:
    row = TABLE[256, 1024.0]
    for kappa in (1024.0, torch.tensor(1024.0, dtype=torch.float64)):
        p = VonMisesFisher(unit_vectors(2, 256), kappa)
        assert p.log_normalizer.tolist() == pytest.approx([row["logC"]] * 2, rel=1e-13)
        assert p.mean_resultant_length.tolist() == pytest.approx([row["A"]] * 2, rel=1e-13)
        assert p.spherical_variance.tolist() == pytest.approx([row["one_minus_A"]] * 2, rel=1e-13)
        assert p.concentration.tolist() == [1024.0, 1024.0]
        torch.testing.assert_close(p.mean, row["A"] * p.mean_direction, rtol=1e-13, atol=0)
        assert p.mode is p.mean_direction


@pytest.mark.parametrize(("n", "kappa"), [(2, 0.0), (2, 3.0), (5, 0.0), (5, 20.0), (300, 100.0)])
def test_variance_of_each_coordinate(n: int, kappa: float) -> None:
    """E[z z'] = (A/kappa) (I - mu mu') + (A' + A^2) mu mu', with A and A' by integration."""
    mean, spread = CosineLaw(n, kappa).mean_and_variance()
    across = (1 - mean**2 - spread) / (n - 1)
    for k in (kappa, torch.tensor(kappa, dtype=torch.float64)):
        p = VonMisesFisher(unit_vectors(n), k)
        squared = p.mean_direction**2
        exact = across * (1 - squared) + spread * squared
        torch.testing.assert_close(p.variance, exact, rtol=1e-10, atol=1e-12)
        assert p.stddev.shape == (n,)


# float32: the reason for |z - mu|^2 and for disabling autocast


def test_float32_log_prob_is_accurate_at_the_papers_largest_kappa() -> None:
    """At kappa_e = 16384 it is within 2e-4 nats of float64. log C + kappa mu.z is off by 1e-3."""
    p = vmf(256, 16384.0, 512, dtype=torch.float32)
    z = p.sample()
    wide = VonMisesFisher(F.normalize(p.mean_direction.double(), dim=-1), 16384.0)
    exact = wide.log_prob(F.normalize(z.double(), dim=-1))
    assert (p.log_prob(z).double() - exact).abs().max() <= 2e-4
    naive = p.log_normalizer + 16384.0 * (p.mean_direction * z).sum(-1)
    assert (naive.double() - exact).abs().max() >= 1e-3


def test_autocast_has_no_effect() -> None:
    mu, other = unit_vectors(2, 64, 256, dtype=torch.float32)
    plain = VonMisesFisher(mu, 16384.0)
    torch.manual_seed(1)
    z = plain.rsample()
    reference = plain.log_prob(z), kl_divergence(plain, VonMisesFisher(other, 10.0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(1)
        p = VonMisesFisher(mu, 16384.0)
        again = p.rsample()
        inside = p.log_prob(again), kl_divergence(p, VonMisesFisher(other, 10.0))
    assert torch.equal(again, z)
    assert all(torch.equal(a, b) for a, b in zip(inside, reference, strict=True))


def test_half_precision_inputs_are_widened() -> None:
    mu = F.one_hot(torch.arange(3), 8).to(torch.bfloat16)
    p = VonMisesFisher(mu, torch.tensor(5.0, dtype=torch.float16))
    assert p.rsample().dtype == p.log_prob(mu).dtype == p.entropy().dtype == torch.float32


# Samples


KS_GRID = [
    (n, kappa) for n in (2, 3, 16, 256, 2048) for kappa in (0.0, 0.1, 10.0, 1024.0, 16384.0, 1e6)
]


def angles(p: VonMisesFisher, z: torch.Tensor) -> np.ndarray:
    """Return the angle to the mean, accurate at both poles."""
    mu = p.mean_direction
    near = torch.linalg.vector_norm(z - mu, dim=-1)
    far = torch.linalg.vector_norm(z + mu, dim=-1)
    return (2 * torch.atan2(near, far)).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("learned", [False, True])
def test_samples_have_the_exact_radial_distribution(learned: bool, dtype: torch.dtype) -> None:
    """Kolmogorov-Smirnov over the whole grid, Bonferroni-corrected (10^7 draws: benchmarks)."""
    p_values = {}
    for n, kappa in KS_GRID:
        draws = 10_000 if n <= 256 else 2_000
        k = torch.tensor(kappa, dtype=dtype) if learned else kappa
        p = VonMisesFisher(unit_vectors(n, dtype=dtype), k)
        p_values[n, kappa] = CosineLaw(n, kappa).ks(angles(p, p.sample((draws,))).astype(float))
    worst = min(p_values, key=p_values.__getitem__)
    assert p_values[worst] * len(p_values) > 0.001, worst


@pytest.mark.parametrize(
    ("n", "kappa"), [(256, 16384.0), (2048, 10.0), (2048, 1e6), (3, 1e6), (16, 0.1)]
)
@pytest.mark.parametrize("learned", [False, True])
def test_float32_samples_have_the_exact_radial_distribution(
    n: int, kappa: float, learned: bool
) -> None:
    """Bound sup |F - F_exact| over given radii, using a float32 distribution throughout.

    float32 holds cos and sin(theta) to 6e-8, a few 1e-7 in F. A float32 normalizer would show as
    2e-5 at n = 256, kappa = 16384 and 3e-5 at n = 2048, kappa = 10.
    """
    k = torch.tensor(kappa) if learned else kappa
    p = VonMisesFisher(unit_vectors(n, dtype=torch.float32), k).expand((500,))
    r = torch.from_numpy(stats.chi(n - 1).ppf(np.linspace(0.001, 0.999, 500))).float()
    cosine, scale, _ = p._turn(r.unsqueeze(-1))
    theta = torch.atan2((scale.squeeze(-1) * r).double(), cosine.squeeze(-1).double())
    exact = stats.chi(n - 1).cdf(r.double().numpy())
    error = np.abs(CosineLaw(n, kappa).cdf_theta(theta.numpy()) - exact).max()
    assert error < 5e-6


def test_gradient_in_float32_kappa_matches_float64() -> None:
    for n in (2, 3, 8):
        slopes = []
        for dtype in (torch.float32, torch.float64):
            kappa = torch.full((50,), 1e6, dtype=dtype, requires_grad=True)
            p = VonMisesFisher(unit_vectors(n, dtype=dtype).expand(50, n), kappa)
            _, _, slope = p._turn(torch.linspace(0.1, 4, 50, dtype=dtype).unsqueeze(-1))
            assert slope is not None
            slopes.append(slope)
        torch.testing.assert_close(slopes[0], slopes[1], rtol=2e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "kappa"), [(2, 1.0), (3, 10.0), (16, 0.0), (16, 50.0), (256, 1024.0)]
)
def test_sample_moments_are_correct(n: int, kappa: float) -> None:
    """First and second moments of all coordinates are within five standard errors."""
    p = vmf(n, kappa)
    z = p.sample((40_000,))
    torch.testing.assert_close(
        torch.linalg.vector_norm(z, dim=-1), torch.ones(40_000).double(), rtol=0, atol=1e-14
    )
    error = (z.mean(0) - p.mean).abs() / (p.stddev / math.sqrt(40_000))
    assert error.max() < 5
    centered = z - z.mean(0)
    covariance = centered.T @ centered / 40_000
    a, mu = ratio(n, kappa) if kappa else 0.0, p.mean_direction
    across = a / kappa if kappa else 1 / n
    exact = across * torch.eye(n) + (1 - n * across - a * a) * torch.outer(mu, mu)
    assert (covariance - exact).abs().max() < 5 * p.variance.max() * math.sqrt(2 / 40_000)


def test_fixed_and_learned_concentration_give_the_same_samples() -> None:
    """The polynomial and the solver map the same normals to the same z."""
    for n, kappa in ((64, 100.0), (256, 1024.0), (256, 16384.0), (2048, 10.0)):
        mu = unit_vectors(100, n)
        draws = []
        for k in (kappa, torch.tensor(kappa, dtype=torch.float64)):
            torch.manual_seed(3)
            draws.append(VonMisesFisher(mu, k).sample())
        torch.testing.assert_close(*draws, rtol=0, atol=1e-10)


@pytest.mark.parametrize("n", [2, 3, 256])
@pytest.mark.parametrize("kappa", [0.0, 10.0, 1e8])
@pytest.mark.parametrize("sign", [1, -1])
def test_basis_vectors_and_their_negatives_are_supported(n: int, kappa: float, sign: int) -> None:
    for dtype in (torch.float32, torch.float64):
        mu = (sign * torch.eye(n, dtype=dtype)).requires_grad_()
        p = VonMisesFisher(mu, kappa)
        z = p.rsample((20,))
        (grad,) = torch.autograd.grad(z.square().mul(torch.arange(1.0, n + 1)).sum(), mu)
        assert z.isfinite().all()
        assert grad.isfinite().all()
        norm = torch.linalg.vector_norm(z, dim=-1)
        torch.testing.assert_close(norm, torch.ones_like(norm), rtol=0, atol=1e-6)


@pytest.mark.parametrize("n", [2, 3, 65_536])
def test_extreme_concentrations(n: int) -> None:
    for kappa in (0.0, 1e-8, 1e8):
        for k in (kappa, torch.tensor(kappa)):
            p = VonMisesFisher(unit_vectors(n, dtype=torch.float32), k)
            z = p.sample((3,))
            for value in (z, p.log_prob(z), p.entropy(), p.mean, p.variance):
                assert value.isfinite().all()


def test_s_vae_pytorch_sampler_is_biased() -> None:
    """s-vae-pytorch replaces Wood's b = (sqrt(4 k^2 + m^2) - 2 k) / m, m = n - 1, by m / (4 k).

    Wood proposes w = (1 - (1 + b) e) / (1 - (1 - b) e), e ~ Beta(m/2, m/2), and accepts with
    probability exp(m log t - t + d), t = a (1 + b) (1 - x w), x = (1 - b) / (1 + b), a = (m + 2 k +
    sqrt(4 k^2 + m^2)) / 4. The accepted distribution is f(w) only with the true b. The one below is
    proposal times acceptance, by formula: its mean at kappa = 15 has the wrong sign.
    """
    n = 256
    m = n - 1

    def accepted(kappa: float, b: float) -> tuple[float, float]:
        w = np.linspace(-1, 1, 400_001)[1:-1]
        a = (m + 2 * kappa + math.sqrt(4 * kappa**2 + m**2)) / 4
        stretch = 1 + b - w * (1 - b)
        proposal = stats.beta.logpdf((1 - w) / stretch, m / 2, m / 2) - 2 * np.log(stretch)
        t = a * stretch
        accept = m * np.log(t) - t + 4 * a * b / (1 + b) - m * math.log(m)
        law = np.exp(proposal + np.minimum(accept, 0))
        law /= law.sum()
        mean = float((law * w).sum())
        return mean, float((law * (w - mean) ** 2).sum())

    for kappa, mean, variance in ((15.0, -0.617, None), (1024.0, None, 1.42)):
        right = CosineLaw(n, kappa).mean_and_variance()
        true_b = (math.sqrt(4 * kappa**2 + m**2) - 2 * kappa) / m
        assert accepted(kappa, true_b) == pytest.approx(right, rel=1e-6)
        wrong = accepted(kappa, m / (4 * kappa))
        if mean is not None:
            assert wrong[0] == pytest.approx(mean, abs=0.002)
        if variance is not None:
            assert wrong[1] / right[1] == pytest.approx(variance, abs=0.01)
    p = vmf(n, 15.0)
    ours = (p.sample((20_000,)) * p.mean_direction).sum(-1).mean().item()
    assert ours == pytest.approx(ratio(n, 15.0), abs=5 / math.sqrt(n * 20_000))


# Gradients of samples


@pytest.mark.slow
@pytest.mark.parametrize(("n", "kappa"), [(2, 2.0), (3, 5.0), (8, 10.0), (256, 1024.0)])
def test_pathwise_gradient_in_mu_is_unbiased(n: int, kappa: float) -> None:
    """E[z] = A mu, so the mean pathwise gradient of a.z is A times the tangent part of a."""
    r = (3 * unit_vectors(n)).requires_grad_()
    a = unit_vectors(n, seed=7)
    draws = 40_000
    noise = torch.randn(draws, n, dtype=torch.float64)
    # one gradient per draw; their spread gives the tolerance of the mean
    copies = r.detach().expand(draws, n).clone().requires_grad_()
    z = VonMisesFisher(F.normalize(copies, dim=-1), kappa).from_noise(noise)
    (each,) = torch.autograd.grad((z * a).sum(), copies)
    (exact,) = torch.autograd.grad(ratio(n, kappa) * (F.normalize(r, dim=-1) * a).sum(), r)
    error = (each.mean(0) - exact).abs() / (each.std(0) / math.sqrt(draws) + 1e-15)
    assert error.max() < 5


@pytest.mark.slow
def test_pathwise_gradients_of_a_quadratic_are_unbiased() -> None:
    """E[(a.z)^2] = across + (1 - n across) (a.mu)^2, across = A/kappa, in mu and in kappa."""
    n, draws = 8, 200_000
    a = unit_vectors(n, seed=7)
    mu = unit_vectors(n)
    r = mu.clone().requires_grad_()
    kappa = torch.tensor(10.0, dtype=torch.float64, requires_grad=True)
    across = special.mean_resultant_length(kappa, n) / kappa
    cosine = (a * F.normalize(r, dim=-1)).sum()
    exact = torch.autograd.grad(across + (1 - n * across) * cosine**2, (r, kappa))
    copies = mu.expand(draws, n).clone().requires_grad_()
    kappas = torch.full((draws,), 10.0, dtype=torch.float64, requires_grad=True)
    z = VonMisesFisher(F.normalize(copies, dim=-1), kappas).rsample()
    each = torch.autograd.grad(((z * a).sum(-1) ** 2).sum(), (copies, kappas))
    for sample, expected in zip(each, exact, strict=True):
        error = (sample.mean(0) - expected).abs() / (sample.std(0) / math.sqrt(draws) + 1e-15)
        assert error.max() < 5


@pytest.mark.slow
@pytest.mark.parametrize(("n", "kappa"), [(2, 0.5), (8, 10.0), (256, 1024.0)])
def test_pathwise_gradient_in_kappa_is_unbiased(n: int, kappa: float) -> None:
    """d E[mu.z] / d kappa = A'; TensorFlow Probability's is 8 % low at n = 8, kappa = 10."""
    draws = 25_000
    kappas = torch.full((draws,), kappa, dtype=torch.float64, requires_grad=True)
    mu = unit_vectors(n)
    z = VonMisesFisher(mu.expand(draws, n), kappas).rsample()
    (each,) = torch.autograd.grad((z * mu).sum(), kappas)
    exact = CosineLaw(n, kappa).mean_and_variance()[1]
    error = (each.mean() - exact).abs() / (each.std() / math.sqrt(draws))
    assert error < 5
    assert (each.std() / math.sqrt(draws)) < 0.01 * exact, "the test must be able to fail"


def test_gradient_in_mu_is_bounded_next_to_the_first_axis() -> None:
    """At distance 1e-6 from e_1, the Householder map has per-sample gradients of size 8e4."""
    n, kappa = 256, 1024.0
    mu = F.normalize(torch.eye(n, dtype=torch.float64)[0] + 1e-6 * unit_vectors(n), dim=-1)
    a = unit_vectors(n, seed=3)
    copies = mu.expand(1000, n).clone().requires_grad_()
    z = VonMisesFisher(copies, kappa).rsample()
    (each,) = torch.autograd.grad((z * a).sum(), copies)
    assert torch.linalg.vector_norm(each, dim=-1).max() <= 2


def test_log_prob_of_own_sample_has_no_gradient_in_mu() -> None:
    """The sample moves with mu, so its density depends on kappa only."""
    r = unit_vectors(64, 256, dtype=torch.float64).mul(4).requires_grad_()
    p = VonMisesFisher(F.normalize(r, dim=-1), 16384.0)
    (grad,) = torch.autograd.grad(p.log_prob(p.rsample()).sum(), r)
    assert grad.abs().max() <= 16384 * 1e-15


def test_log_prob_gradient_matches_the_linear_form() -> None:
    mu = unit_vectors(5, 16).requires_grad_()
    z = unit_vectors(5, 16, seed=1).requires_grad_()
    ours = VonMisesFisher(mu, 30.0).log_prob(z)
    grads = torch.autograd.grad(ours.sum(), (mu, z), create_graph=True)
    torch.testing.assert_close(grads[0], 30 * z, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(grads[1], 30 * mu, rtol=1e-15, atol=1e-15)
    (mixed,) = torch.autograd.grad(grads[1].sum(), mu)
    torch.testing.assert_close(mixed, torch.full_like(mixed, 30.0))


# Divergences


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([2, 3, 16, 256]),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
    st.integers(0, 100),
)
def test_kl_is_never_negative_and_zero_at_equality(n, kappa_p, kappa_q, seed) -> None:
    p = VonMisesFisher(unit_vectors(n, seed=seed), kappa_p)
    q = VonMisesFisher(unit_vectors(n, seed=seed + 1), kappa_q)
    assert kl_divergence(p, q) >= -1e-12 * (1 + kappa_p + kappa_q)
    assert kl_divergence(p, p) == 0


@pytest.mark.parametrize(("n", "kappa_p", "kappa_q"), [(2048, 10.0, 11.0), (65536, 1e8, 1.001e8)])
def test_float32_divergences_match_float64(n, kappa_p, kappa_q) -> None:
    """Divergences are differences of numbers of 1e4 and more, so rounding errors would be large."""
    mu = unit_vectors(n)
    wide = kl_divergence(VonMisesFisher(mu, kappa_p), VonMisesFisher(mu, kappa_q))
    narrow = mu.float()
    for k in (float, torch.tensor):
        p, q = VonMisesFisher(narrow, k(kappa_p)), VonMisesFisher(narrow, k(kappa_q))
        assert kl_divergence(p, q).item() == pytest.approx(wide.item(), rel=3e-7)
        assert kl_divergence(p, p) == 0
        exact = VonMisesFisher(mu, kappa_p).entropy().item()
        assert p.entropy().item() == pytest.approx(exact, rel=1e-7)
        against = kl_divergence(p, HypersphericalUniform(n)).item()
        exact = HypersphericalUniform(n, dtype=torch.float64).entropy().item() - exact
        assert against == pytest.approx(exact, rel=1e-6, abs=1e-9)


# From mpmath, confirmed there by 400,000 samples each.
KL = [
    (256, 1024, 10, 1.0, 184.6841),
    (256, 1024, 10, 0.5, 189.0999),
    (256, 16384, 10, 0.8, 524.3452),
    (256, 1024, 1024, 0.9, 90.4353),
    (256, 10, 1024, 0.9, 675.2816),
    (256, 10, 20, 1.0, 0.193703),
    (128, 256, 3, 0.3, 59.5856),
    (16, 20, 10, 0.5, 4.2845),
    (3, 3, 1, 0.2, 0.8363),
]


def at_cosine(n: int, cosine: float) -> tuple[torch.Tensor, torch.Tensor]:
    mu = torch.eye(n, dtype=torch.float64)
    return mu[0], cosine * mu[0] + math.sqrt(1 - cosine**2) * mu[1]


@pytest.mark.parametrize(("n", "kappa_p", "kappa_q", "cosine", "value"), KL)
def test_kl_matches_mpmath_and_samples(n, kappa_p, kappa_q, cosine, value) -> None:
    mu_p, mu_q = at_cosine(n, cosine)
    p, q = VonMisesFisher(mu_p, float(kappa_p)), VonMisesFisher(mu_q, float(kappa_q))
    assert kl_divergence(p, q).item() == pytest.approx(value, abs=6e-5)
    z = p.sample((20_000,))
    each = p.log_prob(z) - q.log_prob(z)
    assert (each.mean() - value).abs() < 5 * each.std() / math.sqrt(20_000) + 6e-5


def test_kl_to_the_uniform_distribution() -> None:
    for kappa in (0.0, 3.0, 1024.0):
        p, u = vmf(16, kappa), HypersphericalUniform(16, dtype=torch.float64)
        flat = VonMisesFisher(p.mean_direction, 0.0)
        torch.testing.assert_close(
            kl_divergence(p, u), kl_divergence(p, flat), rtol=1e-13, atol=1e-13
        )
        torch.testing.assert_close(
            kl_divergence(u, p), kl_divergence(flat, p), rtol=1e-13, atol=1e-12
        )
    assert kl_divergence(u, HypersphericalUniform(16)) == 0
    several = HypersphericalUniform(16, (5,), dtype=torch.float64)
    one = vmf(16, 3.0)
    assert torch.equal(kl_divergence(one, several), kl_divergence(one, u).expand(5))
    assert torch.equal(kl_divergence(several, one), kl_divergence(u, one).expand(5))


@pytest.mark.slow
def test_kl_is_differentiable_in_all_parameters() -> None:
    mu_p, mu_q = (unit_vectors(3, 5, seed=s).requires_grad_() for s in (0, 1))
    kappa_p, kappa_q = (
        torch.tensor([0.5, 3.0, 40.0], dtype=torch.float64, requires_grad=True) for _ in "pq"
    )

    def kl(mu_p, mu_q, kappa_p, kappa_q):
        p = VonMisesFisher(F.normalize(mu_p, dim=-1), kappa_p)
        return kl_divergence(p, VonMisesFisher(F.normalize(mu_q, dim=-1), kappa_q))

    assert torch.autograd.gradcheck(kl, (mu_p, mu_q, kappa_p, kappa_q))


# The torch interface


def test_torch_func_works_on_densities() -> None:
    mu, z = unit_vectors(2, 4, 6)
    kappa = torch.tensor([1.0, 20.0, 50.0, 300.0], dtype=torch.float64)

    def log_prob(mu, kappa, z):
        return VonMisesFisher(mu, kappa, validate_args=False).log_prob(z)

    torch.testing.assert_close(torch.func.vmap(log_prob)(mu, kappa, z), log_prob(mu, kappa, z))
    slope = torch.func.vmap(torch.func.grad(log_prob, argnums=1))(mu, kappa, z)
    exact = (mu * z).sum(-1) - special.mean_resultant_length(kappa, 6)
    torch.testing.assert_close(slope, exact, rtol=1e-12, atol=1e-12)
    gradient = torch.func.grad(lambda k: VonMisesFisher(mu[0], k, validate_args=False).entropy())
    torch.testing.assert_close(gradient(kappa[1]), -kappa[1] * special.cosine_variance(kappa[1], 6))


def test_uniform_distribution() -> None:
    u = HypersphericalUniform(3, (2,), dtype=torch.float64)
    assert u.entropy().tolist() == pytest.approx([math.log(4 * math.pi)] * 2)
    z = u.rsample((20_000,))
    assert z.shape == (20_000, 2, 3)
    assert u.log_prob(z).shape == (20_000, 2)
    assert u.log_prob(z)[0].tolist() == pytest.approx([-math.log(4 * math.pi)] * 2)
    assert z.mean(0).abs().max() < 5 / math.sqrt(3 * 20_000)
    assert u.mean.shape == u.variance.shape == (2, 3)
    wide = u.expand((4, 2))
    assert wide.rsample().shape == (4, 2, 3)
    assert wide.entropy().shape == (4, 2)
    assert HypersphericalUniform(3, dtype=torch.bfloat16).rsample().dtype == torch.float32
    for dim in (1, 3.0):
        with pytest.raises(ValueError, match=f"^dim .* {dim}"):
            HypersphericalUniform(dim)  # pyright: ignore
    with pytest.raises(ValueError, match=r"dtype .*floating-point"):
        HypersphericalUniform(3, dtype=torch.int64)


def test_shapes_broadcast_as_in_torch() -> None:
    mu = unit_vectors(4, 1, 5)
    p = VonMisesFisher(mu, torch.rand(3, dtype=torch.float64))
    assert p.batch_shape == (4, 3)
    assert p.event_shape == (5,)
    assert p.mean_direction.shape == (4, 3, 5)
    assert p.concentration.shape == (4, 3)
    assert p.rsample((7,)).shape == (7, 4, 3, 5)
    assert p.log_prob(unit_vectors(5)).shape == (4, 3)
    assert p.log_prob(unit_vectors(6, 4, 3, 5)).shape == (6, 4, 3)
    assert p.entropy().shape == p.mean_resultant_length.shape == (4, 3)
    assert p.variance.shape == (4, 3, 5)
    assert kl_divergence(p, VonMisesFisher(unit_vectors(3, 5), 2.0)).shape == (4, 3)
    assert "VonMisesFisher" in repr(p)


@pytest.mark.parametrize("kappa", [20.0, torch.tensor([20.0, 30.0])])
def test_expand_keeps_the_distribution(kappa) -> None:
    p = VonMisesFisher(unit_vectors(2, 6, dtype=torch.float32), kappa)
    wide = p.expand((3, 2))
    assert wide.batch_shape == (3, 2)
    z = unit_vectors(3, 2, 6, dtype=torch.float32)
    assert torch.equal(wide.log_prob(z), p.log_prob(z))
    assert torch.equal(wide.entropy(), p.entropy().expand(3, 2))
    assert wide.rsample((4,)).shape == (4, 3, 2, 6)
    independent = torch.distributions.Independent(p, 1)
    assert independent.log_prob(z).shape == (3,)


def test_batched_concentrations_match_single_ones() -> None:
    mu = unit_vectors(5, 16)
    kappas = torch.tensor([0.0, 0.3, 10.0, 500.0, 1e6], dtype=torch.float64)
    joint = VonMisesFisher(mu, kappas)
    z = unit_vectors(5, 16, seed=2)
    for i, kappa in enumerate(kappas.tolist()):
        single = VonMisesFisher(mu[i], kappa)
        torch.testing.assert_close(joint.log_prob(z)[i], single.log_prob(z[i]))
        torch.testing.assert_close(joint.entropy()[i], single.entropy())


def test_mixed_dtypes_are_promoted() -> None:
    p = VonMisesFisher(unit_vectors(4, dtype=torch.float32), torch.tensor(3.0).double())
    assert p.rsample().dtype == torch.float64


@pytest.mark.parametrize(
    ("mu", "kappa", "message"),
    [
        (
            torch.ones(3),
            1.0,
            r"^mean_direction .*length 1\.7",
        ),
        (torch.zeros(3), 1.0, "^mean_direction .*length 0"),
        (torch.full((3,), math.nan), 1.0, "^mean_direction .*length nan"),
        (torch.ones(1), 1.0, r"^mean_direction .*shape \(1,\)"),
        (torch.tensor(1.0), 1.0, r"^mean_direction .*shape \(\)"),
        (torch.ones(3, dtype=torch.long), 1.0, "^mean_direction .*floating-point"),
        (torch.eye(3), -1.0, r"^concentration .* -1\.0"),
        (torch.eye(3), math.nan, "^concentration .* nan"),
        (torch.eye(3), math.inf, "^concentration .* inf"),
        (torch.eye(3), torch.tensor(-2.0), "^concentration .* -2"),
        (torch.eye(3), torch.tensor([1.0, 2.0]), r"^concentration .*broadcast .* \(2,\)"),
        (torch.eye(3), torch.ones(3, device="meta"), "^concentration .*device"),
        (torch.eye(3), torch.ones((), device="meta"), "^concentration .*device"),
    ],
)
def test_invalid_arguments_are_rejected(mu, kappa, message) -> None:
    with pytest.raises(ValueError, match=message):
        VonMisesFisher(mu, kappa)


def test_values_off_the_sphere_are_rejected_if_validated() -> None:
    p = vmf(4, 2.0)
    with pytest.raises(ValueError, match=r"^value .*floating-point"):
        p.log_prob(torch.eye(4).long())
    with pytest.raises(ValueError, match=r"^value .* 4.* \(4, 1\)"):
        p.log_prob(torch.ones(4, 1))
    with pytest.raises(ValueError, match="support"):
        p.log_prob(torch.ones(4))
    VonMisesFisher(torch.ones(4), 2.0, validate_args=False).log_prob(torch.ones(4))


def test_kl_rejects_different_dimensions() -> None:
    for p in (vmf(4, 2.0), HypersphericalUniform(4)):
        for q in (vmf(5, 2.0), HypersphericalUniform(5)):
            with pytest.raises(ValueError, match="4 and 5"):
                kl_divergence(p, q)
