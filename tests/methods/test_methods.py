"""Match the official steps of four methods; check what all methods must satisfy."""

import math
from pathlib import Path
from typing import Any

import compiled_methods
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import golden_arrays, golden_json
from official_variables import variables_in_order
from processes import printed
from torch import Tensor, nn

from compressive.config import (
    METHODS,
    Bottleneck,
    Config,
    Decoder,
    Network,
    Views,
    is_compressed,
    override,
)
from compressive.distributions.vmf import VonMisesFisher
from compressive.methods import Bootstrap, Contrastive, Step, build
from compressive.objectives import byol_loss, cbyol_loss
from compressive.optim import LARS, parameter_groups

# Reduced from the official files: the images that all four steps share are stored once, and
# variable names once per step. Values that no test reads (layer outputs, most flags) are omitted.
STEPS = golden_json("train_step")
ARRAYS = golden_arrays("train_step")

COMPRESSED = [name for name in METHODS if name.startswith("c-")]
BATCH = 6


class OfficialSample:
    """Map given noise to z as TFP does, by a reflection that takes the first axis to mu."""

    def __init__(self, name: str) -> None:
        keys = [(f"{name}/noise_w{i}", f"{name}/noise_v{i}") for i in (0, 1)]
        self.noise = iter([(ARRAYS[w], ARRAYS[v]) for w, v in keys])

    def __call__(self, e: VonMisesFisher) -> Tensor:
        w, v = next(self.noise)
        s = torch.cat([w[:, None], (1 - w**2).sqrt()[:, None] * v], dim=-1)
        first = torch.eye(e.dim, dtype=torch.float64)[0]
        u = F.normalize(first - e.mean_direction, dim=-1)
        return s - 2 * (s * u).sum(-1, keepdim=True) * u


def official_method(case: dict[str, Any]) -> Any:
    flags, name = case["flags"], case["name"]
    methods: Any = {"simclr": "simclr", "csimclr": "c-simclr", "byol": "byol", "cbyol": "c-byol"}
    network = Network(
        name="resnet18",
        stem="cifar",
        variant="official",
        hidden_dim=flags["proj_head_hidden_dim"],
        projection_dim=flags["proj_out_dim"],
    )
    config = Config(
        method=methods[name],
        network=network,
        bottleneck=Bottleneck(kappa_e=flags["kappa_e"], kappa_b=flags["kappa_b"]),
        decoder=Decoder(kappa_d=2 * flags["byol_loss_weight"]),
    )
    with torch.device("meta"):  # the golden rule fills in all values
        method = build(config, biased_variance=True).double()
    method.to_empty(device="cpu")
    if is_compressed(config):
        assert method.channel is not None
        method.channel = method.channel._replace(sample=OfficialSample(name))
    return method


def head_variables(head: Any, *more: nn.Linear) -> list[Any]:
    """Return all trainable variables, then the moving statistics."""
    first, norm, _, last = head
    trained = [first.weight, norm.weight, norm.bias, last.weight, *(each.weight for each in more)]
    return [*trained, norm.running_mean, norm.running_var]


def official_order(method: Any, supervised: nn.Linear) -> list[Tensor]:
    """Return the tensors of `variables_in_rule_order`."""
    encoder, projection = variables_in_order(method.encoder), head_variables(method.projection)
    last = [supervised.weight, supervised.bias]
    if isinstance(method, Contrastive):
        return [*encoder, *projection, *last]
    slow, slow_projection = method.target.network
    compressed = method.decoder is not None
    predictor = head_variables(method.predictor, *([method.decoder] if compressed else []))
    m = head_variables(method.backward_encoder) if compressed else []
    heads = [*projection, *predictor, *head_variables(slow_projection), *m]
    return [*variables_in_order(slow), *encoder, *heads, *last]


def ruled(i: int, name: str, shape: list[int]) -> np.ndarray:
    """Return variable i of the golden rule, in TensorFlow's layout."""
    noise = np.random.RandomState(1000 + i).randn(*shape)
    if "kernel" in name:
        return noise * math.sqrt(1.6 / math.prod(shape[:-1]))
    if "gamma" in name:
        return 1 + 0.1 * noise
    return 1 + 0.2 * np.abs(noise) if "moving_variance" in name else 0.1 * noise


def turned(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Permute a kernel between layouts: (3, 2, 0, 1) from TensorFlow's, (2, 3, 1, 0) to it."""
    return tensor.permute(order) if tensor.ndim == 4 else tensor.T if tensor.ndim == 2 else tensor


def assert_is(ours: Tensor, theirs: dict[str, Any], tolerance: float, name: str) -> None:
    """Compare norm, first and last entries, relative to the norm and the largest entry."""
    flat = turned(ours.detach(), (2, 3, 1, 0)).flatten()
    ends = torch.tensor([*theirs["first"], *theirs["last"]], dtype=torch.float64)
    seen = torch.cat([flat[: len(theirs["first"])], flat[len(flat) - len(theirs["last"]) :]])
    typical = max(theirs["norm"] / math.sqrt(len(flat)), float(ends.abs().max()))
    assert abs(float(flat.norm()) - theirs["norm"]) <= tolerance * theirs["norm"], name
    assert float((seen - ends).abs().max()) <= tolerance * typical, name


def assert_meters(step: Step, metrics: dict[str, float]) -> None:
    """Compare the metrics that the official contrastive step reports in both directions."""
    for ours, names in ((step.predictive, "i_y_zx i_x_zy"), (step.residual, "i_xzx_y i_yzy_x")):
        theirs = [metrics[name] for name in names.split() if name in metrics]
        if len(theirs) == 2:
            assert ours is not None
            assert ours.item() == pytest.approx(sum(theirs) / 2, rel=1e-12)


@pytest.mark.parametrize(
    "case",
    [  # a compressed step contains the uncompressed one
        pytest.param(
            case, id=case["name"], marks=() if case["name"][0] == "c" else pytest.mark.slow
        )
        for case in STEPS
    ],
)
def test_step_matches_the_official_code(case: dict[str, Any]) -> None:
    """Compare loss, gradients, and all variables after LARS, moving average and batch norms.

    The official linear probe reads the projection and has its weight decay in the loss. Ours reads
    features, so a linear layer stands in for it here. TensorFlow computes the probe's loss and the
    moving statistics in float32, hence 1e-7; the rest, in float64, agrees to 1e-11.
    """
    flags, variables = case["flags"], case["variables_in_rule_order"]
    method, supervised = official_method(case), nn.Linear(flags["proj_out_dim"], 10).double()
    held = official_order(method, supervised)
    with torch.no_grad():
        for i, (tensor, (name, shape)) in enumerate(zip(held, variables, strict=True)):
            tensor.copy_(turned(torch.from_numpy(ruled(i, name, shape)).float(), (3, 2, 0, 1)))
    by_name = dict(zip((name for name, _ in variables), held, strict=True))
    projections: list[Tensor] = []
    method.projection.register_forward_hook(lambda *seen: projections.append(seen[-1]))

    x, y = (ARRAYS[key].permute(0, 3, 1, 2).double() for key in ("x1", "x2"))
    step = method((x, y), flags["ceb_beta"])
    labels = ARRAYS["labels"].repeat(len(projections[0]) // len(x))
    probe_loss = F.cross_entropy(supervised(projections[0].detach()), labels)
    decay = flags["weight_decay"] / 2 * supervised.weight.square().sum()
    (step.loss + probe_loss + decay).backward()

    assert step.loss.item() == pytest.approx(case["contrastive_or_byol_loss"], rel=1e-12)
    assert probe_loss.item() == pytest.approx(case["supervised_loss"], rel=1e-7)
    assert_meters(step, case["metrics"])
    learned = {name for name, tensor in by_name.items() if tensor.grad is not None}
    assert learned == {theirs["name"] for theirs in case["grads"]}
    for theirs in case["grads"]:
        name, grad = theirs["name"], by_name[theirs["name"]].grad
        assert grad is not None
        assert_is(grad, theirs, 1e-7 if "head_supervised" in name else 1e-10, name)

    both = nn.ModuleDict({"method": method, "head_supervised": supervised})
    groups = parameter_groups(both, weight_decay=flags["weight_decay"], exclude=["head_supervised"])
    LARS(groups, lr=case["lr"], momentum=flags["momentum"]).step()
    if case["ema_alpha"] is not None:
        method.update_target(case["ema_alpha"])
    for (name, tensor), theirs in zip(by_name.items(), case["after"], strict=True):
        narrow = "moving" in name or "head_supervised" in name
        assert_is(tensor, theirs, 1e-7 if narrow else 1e-10, name)


def tiny(name: str, *changes: str) -> Any:
    return compiled_methods.tiny(name, *changes).double()


def views() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    both = torch.randn(2, BATCH, 3, 8, 8, dtype=torch.float64, generator=generator)
    return both.unbind()


def gradient(loss: Tensor, module: nn.Module) -> Tensor:
    """Return the gradients of all parameters of a module as one tensor."""
    params = [p for p in module.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)])


def assert_same(ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> None:
    assert float((ours - theirs).norm()) <= tolerance * float(theirs.norm())


def test_constructor_defaults_match_the_config() -> None:
    """Both are the paper's values."""
    made = Contrastive(nn.Identity(), nn.Identity())
    built: Any = build(Config(method="simclr", network=Network(name="test_resnet")))
    for name in ("own_view_negatives", "kappa_b", "channel"):
        assert getattr(made, name) == getattr(built, name)


@pytest.mark.parametrize(("plain", "candidates"), [("simclr", 2 * BATCH - 1), ("moco-v3", BATCH)])
def test_compression_at_beta_zero_and_the_mode_is_the_plain_method(
    plain: str, candidates: int
) -> None:
    free = ("bottleneck.stochastic=false", "bottleneck.beta=0", "bottleneck.kappa_b=7")
    method, compressed = tiny(plain, "bottleneck.kappa_b=7"), tiny(f"c-{plain}", *free)
    step, priced = method(views()), compressed(views(), 0.0)
    assert priced.loss.item() == pytest.approx(step.loss.item() - 2 * math.log(candidates))
    assert_same(gradient(priced.loss, compressed), gradient(step.loss, method))
    assert priced.nll.item() == pytest.approx(step.nll.item(), rel=1e-13)


@pytest.mark.parametrize("plain", ["byol", "simsiam"])
def test_compression_at_beta_zero_with_identity_decoder_is_the_plain_bootstrap(plain: str) -> None:
    method = tiny(plain, "decoder.kappa_d=3")
    compressed = Bootstrap(
        method.encoder,
        method.projection,
        method.predictor,
        target=method.target,
        decoder=nn.Identity(),
        backward_encoder=nn.Identity(),
        kappa_d=3.0,
        kappa_e=100.0,
        sample=lambda e: e.mode,
    )
    step, priced = method(views()), compressed(views(), 0.0)
    assert priced.loss.item() == pytest.approx(step.loss.item(), rel=1e-13)
    assert_same(gradient(priced.loss, method), gradient(step.loss, method))


def cbyol_by_hand(
    method: Any, both: Tensor, rate: Any, beta: float, sees: str, adaptive: Any
) -> Tensor:
    """Compute the paper's terms for each direction with `objectives.cbyol_loss`."""
    online, slow = nn.Sequential(method.encoder, method.projection), method.target
    total = torch.zeros((), dtype=torch.float64)
    for one, other in (both, both.flip(0)):
        own = (slow(one) if slow else online(one)).detach()
        y_prime = (slow(other) if slow else online(other)).detach()
        mu_e = F.normalize(method.predictor(online(one)), dim=-1)
        seen = own if sees == "own" else y_prime
        mu_b = method.backward_encoder(seen / seen.norm(dim=-1, keepdim=True))
        z = VonMisesFisher(mu_e, 50.0).rsample()
        y_hat = z @ method.decoder.weight.T
        pieces = {"z": z, "kappa_e": 50.0, "kappa_b": 4.0, "beta": beta, "weight": 1.5}
        how = {"residual_estimator": rate, "adaptive_weight": adaptive}
        found = cbyol_loss(mu_e, mu_b, y_hat, y_prime, **pieces, **how)
        total = total + found.loss
        if adaptive:
            floor = (found.residual - found.reducible_residual).detach()
            total = total - (found.beta * floor).mean()
    return total


def schedule(adaptive: str) -> tuple[str, ...]:
    """Return the settings of an adaptive weight; none for ""."""
    settings = ("bottleneck.schedule=adaptive", f"bottleneck.adaptive_weight={adaptive}")
    return settings if adaptive else ()


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", ["", "likelihood", "rank"])
@pytest.mark.parametrize("rate", ["sampled", "analytic"])
@pytest.mark.parametrize("sees", ["own", "other"])
@pytest.mark.parametrize("name", ["c-byol", "c-simsiam"])
def test_compressed_bootstrap_matches_its_terms(
    name: str, sees: str, rate: str, adaptive: str
) -> None:
    """Gradients match too, although the graph omits log e(z|x)."""
    kappas = ("bottleneck.kappa_e=50", "bottleneck.kappa_b=4", "decoder.kappa_d=3")
    more = (f"bottleneck.residual_estimator={rate}", f"bottleneck.backward_view={sees}")
    method = tiny(name, *kappas, *more, *schedule(adaptive))
    torch.manual_seed(5)
    step = method(views(), 0.7)
    torch.manual_seed(5)
    by_hand = cbyol_by_hand(method, torch.stack(views()), rate, 0.7, sees, adaptive or None)
    assert step.loss.item() == pytest.approx(by_hand.item(), rel=1e-13)
    assert_same(gradient(step.loss, method), gradient(by_hand, method), 1e-11)


@pytest.mark.parametrize("adaptive", ["", "likelihood"])
@pytest.mark.parametrize("rate", ["sampled", "analytic"])
def test_compressed_moco_matches_a_naive_loop(rate: str, adaptive: str) -> None:
    """Candidates are the other view's targets only, and b(z|y) is at the other view's target."""
    kappas = (
        "bottleneck.kappa_e=50",
        "bottleneck.kappa_b=4",
        f"bottleneck.residual_estimator={rate}",
    )
    method = tiny("c-moco-v3", *kappas, *schedule(adaptive))
    x, y = views()
    torch.manual_seed(5)
    step = method((x, y), 0.7)
    torch.manual_seed(5)
    total, online = (
        torch.zeros((), dtype=torch.float64),
        nn.Sequential(method.encoder, method.projection, method.predictor),
    )
    for one, other in ((x, y), (y, x)):
        mu, targets = F.normalize(online(one), dim=-1), F.normalize(method.target(other), dim=-1)
        z = VonMisesFisher(mu, 50.0).rsample()
        for i in range(BATCH):
            shares = torch.stack([(4.0 * z[i] @ target).exp() for target in targets])
            e, b = VonMisesFisher(mu[i], 50.0), VonMisesFisher(targets[i], 4.0)
            residual = e.log_prob(z[i]) - b.log_prob(z[i])
            if rate == "analytic":
                residual = torch.distributions.kl_divergence(e, b)
            nll = -(shares[i] / shares.sum()).log()
            beta = 0.7 * float((-nll.detach()).exp()) if adaptive else 0.7
            total = total + (nll - math.log(BATCH) + beta * residual) / BATCH
    if not adaptive:  # its loss omits the floor
        assert step.loss.item() == pytest.approx(total.item(), rel=1e-12)
    assert_same(gradient(step.loss, method), gradient(total, method), 1e-11)


def test_simsiam_target_gets_no_gradient() -> None:
    method = tiny("simsiam", "decoder.kappa_d=2")
    x, y = views()
    online = nn.Sequential(method.encoder, method.projection)
    fixed_x, fixed_y = online(x).detach(), online(y).detach()

    def loss(t_x: Tensor, t_y: Tensor) -> Tensor:
        q_x, q_y = method.predictor(online(x)), method.predictor(online(y))
        return byol_loss(q_x, t_y).loss + byol_loss(q_y, t_x).loss

    ours = gradient(method((x, y)).loss, method)
    assert_same(ours, gradient(loss(fixed_x, fixed_y), method))
    followed = gradient(loss(online(x), online(y)), method)
    assert float((ours - followed).norm()) > 0.01 * float(ours.norm()), (
        "the gradient through the target must differ"
    )


@pytest.mark.parametrize("name", METHODS)
def test_step_reports_detached_metrics_that_add_up_to_the_loss(name: str) -> None:
    config, method = override(Config(), f"method={name}"), tiny(name)
    x, y = views()
    step = method((x, y), torch.tensor(0.3, dtype=torch.float64))
    others = [*step.feats, *step[2:]]
    assert step.loss.requires_grad
    assert not any(each.requires_grad for each in others if each is not None)
    assert (step.predictive is not None) == (name.removeprefix("c-") in ("simclr", "moco-v3"))
    assert (
        (step.residual is not None)
        == (step.reducible_residual is not None)
        == is_compressed(config)
    )
    both = method.eval().projection(method.encoder(torch.cat([x, y])))
    step = method((x, y), 0.3)
    r_x, r_y = (both / both.norm(dim=-1, keepdim=True)).chunk(2)
    torch.testing.assert_close(step.r, r_x)
    torch.testing.assert_close(step.positive_cosine, (r_x * r_y).sum(-1).mean())
    # Both directions are summed; the metrics are means over them.
    expected = 2 * step.nll
    if step.predictive is not None:
        candidates = BATCH if "moco" in name else 2 * BATCH - 1
        torch.testing.assert_close(step.predictive, math.log(candidates) - step.nll)
    if step.residual is not None:
        expected = 2 * (step.nll if step.predictive is None else -step.predictive)
        expected = expected + 2 * 0.3 * step.residual
    if name != "vicreg":  # its other terms have no value per image
        torch.testing.assert_close(step.loss, expected)


@pytest.mark.parametrize("weight", ["likelihood", "rank"])
@pytest.mark.parametrize("name", COMPRESSED)
def test_adaptive_step_reports_effective_beta(name: str, weight: str) -> None:
    """Report mean and quantiles of beta p over images and directions; the loss omits the floor."""
    method = tiny(name, *schedule(weight))
    step = method(views(), torch.tensor(0.3, dtype=torch.float64))
    reported = [getattr(step, field) for field in Step._fields if "beta" in field]
    assert len(reported) == 4
    assert not any(each.requires_grad for each in reported)
    mean, low, middle, high = (each.item() for each in reported)
    assert 0 < low < middle < high <= 0.3
    assert low < mean < high
    if weight == "rank":  # 1 / 6 to 6 / 6 in both directions
        assert mean == pytest.approx(0.3 * 7 / 12)
        assert (low, middle, high) == pytest.approx((0.3 / 6, 0.3 * 4 / 6, 0.3))
    torch.manual_seed(5)
    step = method(views(), 0.3)
    torch.manual_seed(5)
    free = method(views(), 0.0)
    # A mean of p times the reducible part; Step has only the mean of the latter.
    assert 0 < (step.loss - free.loss).item() < 2 * 0.3 * BATCH * step.reducible_residual.item()
    assert free.effective_beta.item() == free.effective_beta_p90.item() == 0
    assert tiny(name)(views(), 0.3).effective_beta is None


@pytest.mark.parametrize("name", COMPRESSED)
def test_reducible_residual_is_the_divergence_above_its_floor(name: str) -> None:
    """With the analytic estimator: KL[e||b] minus the constant KL at equal means."""
    step = tiny(name, "bottleneck.residual_estimator=analytic")(views())
    mu = F.one_hot(torch.tensor(3), 16).double()
    e, b = VonMisesFisher(mu, 1024.0), VonMisesFisher(mu, 10.0)
    floor = torch.distributions.kl_divergence(e, b)
    torch.testing.assert_close(step.reducible_residual, step.residual - floor, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", METHODS)
def test_features_are_the_backbones_output_without_noise(name: str) -> None:
    method = tiny(name).eval()
    x, y = views()
    first, second = method((x, y)), method((x, y))
    assert torch.equal(first.feats[0], second.feats[0])
    assert torch.equal(first.feats[1], second.feats[1])
    torch.testing.assert_close(first.feats[0], method.encoder(x))
    torch.testing.assert_close(first.feats[1], method.encoder(y))
    assert first.feats[0].shape == (BATCH, 96)
    assert torch.equal(first.loss, second.loss) != (name in COMPRESSED), (
        "only compressed methods sample z"
    )


@pytest.mark.parametrize("name", METHODS)
def test_batch_norm_batches_and_target_updates(name: str) -> None:
    """SimCLR's batch norms see both views at once; an EMA target keeps its own statistics."""
    slow = "byol" in name or "moco" in name
    method = tiny(name)
    method(views())
    assert int(method.encoder[1].num_batches_tracked) == (
        1 if "simclr" in name or name == "dcl" else 2
    )
    assert (getattr(method, "target", None) is not None) == slow
    method.update_target(0.5)
    if slow:
        network = method.target.network
        assert int(network[0][1].num_batches_tracked) == 2
        assert not any(p.requires_grad for p in network.parameters())
        before, now = tiny(name).target.network[1], network[1]
        for p, q, r in zip(
            *(m.parameters() for m in (before, now, method.projection)), strict=True
        ):
            torch.testing.assert_close(q, 0.5 * (p + r))
        assert not torch.equal(before[0].weight, method.projection[0].weight), (
            "the target has its own initialization"
        )
        same = tiny(name, "target.independent=false")
        copied, own = same.target.network[1][0].weight, same.projection[0].weight
        assert torch.equal(copied, own)
        assert copied is not own


def test_settings_are_applied() -> None:
    with torch.device("meta"):
        method: Any = build(
            override(
                Config(),
                "method=c-simsiam",
                "network.name=resnet18",
                "network.stem=cifar",
                "network.head_layers=3",
                "network.head_last_norm=true",
                "bottleneck.kappa_e=9",
                "bottleneck.kappa_b=8",
                "decoder.kappa_d=6",
                "bottleneck.stochastic=false",
            ),
            biased_variance=True,
        )
        moco: Any = build(override(Config(), "method=moco-v3", "network.name=resnet18"))
        alone: Any = build(override(Config(), "method=simclr", "decoder.same_view_negatives=false"))
    assert method.encoder.conv1.kernel_size == (3, 3)
    norms = [m for m in method.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    assert {"Biased" in type(norm).__name__ for norm in norms} == {True}
    assert [type(m).__name__[:6] for m in method.projection].count("Linear") == 3
    assert isinstance(method.projection[-1], nn.BatchNorm1d)
    for head in (method.predictor, method.backward_encoder):
        assert [p.shape[0] for p in head.parameters()] == [4096, 4096, 4096, 256]
    assert (
        method.channel.kappa_e,
        method.channel.kappa_b,
        method.weight,
        method.channel.residual_estimator,
    ) == (
        9,
        8,
        3,
        "analytic",
    )
    e = VonMisesFisher(torch.eye(4), 3.0)
    assert torch.equal(method.channel.sample(e), e.mode)
    assert moco.channel is None
    assert not moco.own_view_negatives
    assert not alone.own_view_negatives
    assert alone.channel is None


def test_fixed_input_network_is_built_for_the_view_size() -> None:
    network = Network(name="vit_tiny_patch16_224", hidden_dim=32, projection_dim=16)
    method = build(Config(method="simclr", network=network, views=Views(size=48)))
    step = method(torch.randn(2, 2, 3, 48, 48).unbind())
    assert step.feats[0].shape == (2, 192)
    assert method.encoder.patch_embed.img_size == (48, 48)  # pyright: ignore


def test_incompatible_parts_are_rejected() -> None:
    parts = nn.Identity(), nn.Identity()
    with pytest.raises(ValueError, match="predictor and target"):
        Contrastive(*parts, predictor=nn.Identity())
    with pytest.raises(ValueError, match="kappa_e, decoder and backward_encoder"):
        Bootstrap(*parts, nn.Identity(), kappa_e=3.0)
    with pytest.raises(ValueError, match=r"^kappa_b .* 0"):
        Contrastive(*parts, kappa_b=0.0)
    with pytest.raises(ValueError, match=r"^kappa_d .* -1"):
        Bootstrap(*parts, nn.Identity(), kappa_d=-1.0)


@pytest.mark.slow
def test_methods_compile_into_one_graph() -> None:
    """Cover the two methods with the most parts, one with a beta per image.

    Runtime checks cannot be traced.
    """
    adaptive = "bottleneck.schedule=adaptive bottleneck.adaptive_weight=rank"
    names = ["c-byol", f"c-moco-v3 {adaptive}"]
    script = Path(__file__).parents[1] / "compiled_methods.py"
    output = printed(script.read_text(), *names, name=str(script))
    assert output.splitlines() == [f"{name} compiles into one graph" for name in names]
