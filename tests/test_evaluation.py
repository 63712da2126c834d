"""The log-likelihood estimate on a model whose answer is known, and what must not change it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, MultivariateNormal, Normal, Poisson

from sylvester.diagnostics import KHAT_LIMIT
from sylvester.evaluation import Estimate, log_likelihood
from sylvester.flows import FAMILIES, Flow, Gaussian, TriangularSylvester
from sylvester.flows.masked import MaskedNet
from sylvester.objectives import elbo
from sylvester.vae import VAE

OPTIONS = {
    "gaussian": {},
    "iaf": {"hidden_features": 8},
    "mean-only-iaf": {"hidden_features": 8},
    "maf": {"hidden_features": 8},
    "nice": {"hidden_features": 8},
    "realnvp": {"hidden_features": 8},
    "affine-iaf": {"hidden_features": 8},
    "nsf": {"hidden_features": 8},
    "coupling-nsf": {"hidden_features": 8},
    "orthogonal-sylvester": {"rank": 1},
}
COLUMNS = ("log_px", "mc_error", "ess", "khat", "elbo")
PROPOSALS = pytest.mark.parametrize("proposal", [{}, {"anneal": 2}, {"adapt": 2}], ids=["plain", "anneal", "adapt"])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def vae() -> VAE:
    return model(TriangularSylvester(2, 3, 2, init="torch", variance_bounds=(4.0, 9.0)))


class LinearGaussianDecoder(nn.Module):
    """x = W z + m + σ ε, so that log p(x) = log N(x; m, W Wᵀ + σ² I)."""

    def __init__(self, out_features: int, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, out_features)
        self.scale = 0.8

    def forward(self, z: Tensor) -> Independent:
        return Independent(Normal(self.linear(z), self.scale), 1)

    def log_marginal(self, x: Tensor) -> Tensor:
        w = self.linear.weight
        covariance = w @ w.T + self.scale**2 * torch.eye(len(w), dtype=w.dtype)
        return MultivariateNormal(self.linear.bias, covariance).log_prob(x)


def model(flow: Flow) -> VAE:
    return VAE(nn.Identity(), flow, LinearGaussianDecoder(flow.context, flow.features)).double()


def wide(name: str, features: int = 2) -> Flow:
    """A flow with torch's initial steps, which are far from the identity, on a base twice as wide as p(z)."""
    steps = {} if name == "gaussian" else {"transforms": 2, "init": "torch"}
    flow = FAMILIES[name](features, 3, variance_bounds=(4.0, 9.0), **steps, **OPTIONS.get(name, {}))
    for module in flow.modules():
        if isinstance(module, MaskedNet):  # these start so steep that they would fold the base up
            with torch.no_grad():
                module.layers[-1].weight.mul_(0.1)
    return flow


def assert_same(actual: Estimate, expected: Estimate, tolerance: float = 1e-9) -> None:
    for name in COLUMNS:
        torch.testing.assert_close(
            getattr(actual, name), getattr(expected, name), rtol=tolerance, atol=tolerance, equal_nan=True
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_linear_gaussian_model_has_its_known_likelihood(name: str) -> None:
    vae = model(wide(name))
    x = vae.sample(20)
    estimate = log_likelihood(vae, x, 4000)
    summary = estimate.summary()
    exact = vae.decoder.log_marginal(x)
    assert summary["khat_share"] <= 0.2  # q is wider than the posterior
    assert abs(summary["log_px"] - exact.mean().item()) < 4 * summary["mc_error"] < 0.1
    assert ((estimate.log_px - exact).abs() < 6 * estimate.mc_error).all()
    assert (estimate.elbo < exact).all()


def test_the_exact_posterior_has_equal_weights_and_no_error() -> None:
    vae = model(Gaussian(1, 3))
    with torch.no_grad():
        vae.decoder.linear.weight.zero_()  # then the posterior is the prior, N(0, 1)
    vae.flow = model(Gaussian(1, 3, variance_bounds=(1.0, 1.0))).flow
    with torch.no_grad():
        for parameter in vae.flow.parameters():
            parameter.zero_()
    x = torch.randn(4, 3).double()
    estimate = log_likelihood(vae, x, 100)
    torch.testing.assert_close(estimate.log_px, vae.decoder.log_marginal(x))
    torch.testing.assert_close(estimate.elbo, estimate.log_px)
    torch.testing.assert_close(estimate.ess, torch.full((4,), 100.0).double())
    assert estimate.mc_error.max() < 1e-12


def test_one_sample_is_the_elbo() -> None:
    vae = model(wide("triangular-sylvester"))
    x = vae.sample(500)
    estimate = log_likelihood(vae, x, 1)
    torch.testing.assert_close(estimate.log_px, estimate.elbo)
    assert estimate.mc_error.isnan().all()
    assert estimate.khat.isnan().all()
    summary = estimate.summary()
    assert summary["mc_error"] is None
    assert summary["khat_share"] is None
    assert "unknown" in summary["warning"]
    drawn = elbo(vae.log_terms(x, 2000)).mean().item()
    assert abs(summary["log_px"] - drawn) < 4 * (elbo(vae.log_terms(x, 1)).std() / math.sqrt(500)).item()


def test_the_estimate_grows_with_the_samples_towards_the_truth() -> None:
    vae = model(wide("planar"))
    x = vae.sample(2000)
    means = [log_likelihood(vae, x, samples).log_px.mean().item() for samples in (1, 3, 10, 100)]
    exact = vae.decoder.log_marginal(x).mean().item()
    assert means == sorted(means)
    assert means[0] < exact - 0.5
    assert exact - 0.15 < means[-1] < exact + 0.02


@PROPOSALS
@pytest.mark.parametrize("chunk", [1, 7, 64, 128, 1000, 10_000])
def test_neither_chunk_nor_grouping_changes_the_answer(chunk: int, proposal: dict[str, int]) -> None:
    vae = model(wide("triangular-sylvester"))
    x = vae.sample(5)
    for samples in (3, 259):  # 259: no chunk divides it, and blocks of noise end within chunks
        expected = log_likelihood(vae, x, samples, **proposal)
        assert_same(log_likelihood(vae, x, samples, chunk=chunk, **proposal), expected)


def joined(parts: list[Estimate]) -> Estimate:
    columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in COLUMNS}
    return Estimate(**columns, samples=parts[0].samples)


@PROPOSALS
@pytest.mark.parametrize("chunk", [7, None])
def test_fewer_samples_are_the_first_of_more(chunk: int | None, proposal: dict[str, int]) -> None:
    vae = model(wide("triangular-sylvester"))
    x = vae.sample(3)
    whole = log_likelihood(vae, x, 60, fewer=(40, 1), chunk=chunk, **proposal)
    assert_same(whole, log_likelihood(vae, x, 60, chunk=chunk, **proposal), 0.0)
    for part, samples in zip(whole.fewer, (40, 1), strict=True):
        assert (part.samples, part.fewer) == (samples, ())
        assert_same(part, log_likelihood(vae, x, samples, **proposal))


@PROPOSALS
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_parts_evaluated_apart_are_the_whole(size: int, proposal: dict[str, int]) -> None:
    vae = model(wide("triangular-sylvester"))
    x = vae.sample(6)
    # To the bit where images are decoded one by one, and else to rounding, as other images share their batch.
    for chunk, tolerance in ((40, 0.0), (80, 1e-9), (None, 1e-9)):
        whole = log_likelihood(vae, x, 40, chunk=chunk, **proposal)
        parts = [
            log_likelihood(vae, part, 40, chunk=chunk, first=size * number, **proposal)
            for number, part in enumerate(x.split(size))
        ]
        assert_same(joined(parts), whole, tolerance)


@PROPOSALS
def test_nothing_is_left_behind(proposal: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    vae = model(wide("gaussian"))
    before, state = torch.get_rng_state(), {name: value.clone() for name, value in vae.state_dict().items()}
    x = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    estimate = log_likelihood(vae, x, 30, **proposal)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(vae.state_dict(), state, rtol=0, atol=0)
    assert not estimate.log_px.requires_grad
    assert all(parameter.grad is None for parameter in vae.parameters())


@PROPOSALS
def test_a_function_that_weighs_as_a_vae_does_gets_the_same_estimate(proposal: dict[str, int]) -> None:
    vae = model(wide("triangular-sylvester"))
    x = vae.sample(5)

    def log_weights(x: Tensor, samples: int, noise: Tensor) -> Tensor:
        return vae.log_terms(x, samples, noise=noise).log_w

    for chunk in (100, 25):
        settings = {"chunk": chunk, "seed": 3, **proposal}
        assert_same(log_likelihood(log_weights, x, 40, features=2, **settings), log_likelihood(vae, x, 40, **settings))


def test_a_function_is_asked_for_groups_of_images_and_chunks_of_samples() -> None:
    vae = model(wide("triangular-sylvester"))
    seen: list[tuple[torch.Size, int, torch.Size, torch.dtype]] = []

    def log_weights(x: Tensor, samples: int, noise: Tensor) -> Tensor:
        seen.append((x.shape, samples, noise.shape, noise.dtype))
        return vae.log_terms(x, samples, noise=noise).log_w

    for chunk in (100, 25):
        log_likelihood(log_weights, vae.sample(5), 40, features=2, chunk=chunk)
    assert seen[0] == ((2, 3), 40, (40, 2, 2), torch.float64)
    assert seen[-1] == ((1, 3), 15, (15, 1, 2), torch.float64)


def test_a_module_of_ones_own_with_a_known_likelihood() -> None:
    class Mixture(nn.Module):
        """x ~ Poisson(rate_z), with z one of four, equally likely, by the signs of the noise. Counts are integers."""

        def __init__(self) -> None:
            super().__init__()
            self.rate = nn.Parameter(torch.tensor([1.0, 2.0, 4.0, 8.0]).double())
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor, samples: int, noise: Tensor) -> Tensor:
            z = 2 * (noise[..., 0] > 0).long() + (noise[..., 1] > 0).long()
            return Poisson(self.dropout(self.rate)[z]).log_prob(x)

    mixture, x = Mixture(), torch.tensor([0, 1, 5, 9])
    estimate = log_likelihood(mixture, x, 2000, features=2)
    exact = Poisson(mixture.rate).log_prob(x.unsqueeze(1)).logsumexp(1) - math.log(4)
    assert ((estimate.log_px - exact).abs() < 4 * estimate.mc_error).all()
    assert estimate.mc_error.max() < 0.05
    assert mixture.dropout.training


def test_a_compiled_vae_is_a_vae() -> None:
    vae = model(wide("gaussian"))
    x = vae.sample(3)
    assert_same(log_likelihood(torch.compile(vae), x, 30), log_likelihood(vae, x, 30))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": lambda x, samples, noise: noise.sum(-1)}, "features, the size of the noise .*; got None"),
        ({"model": lambda x, samples, noise: noise, "features": 2}, r"\(40, 2\), \(S, B\); got shape \(40, 2, 2\)"),
        ({"model": lambda x, samples, noise: 0.0, "features": 2}, r"\(40, 2\), \(S, B\); got type float"),
        ({"model": lambda x, samples, noise: noise, "features": 2, "x": [1.0]}, r"a tensor with a batch .* type list"),
        ({"model": 3}, r"a VAE or a function \(x, samples, noise\) -> log weights; got 3"),
        ({"features": 2}, "features for a function only.*; got 2"),
        ({"x": torch.zeros(3)}, r"a batch axis, \(N, …\); got shape \(3,\)"),
        ({"x": torch.zeros(2, 3).numpy()}, "as a tensor of floating-point .*; got numpy.ndarray"),
        ({"x": torch.zeros(2, 3, dtype=torch.uint8)}, "floating-point .*; got .* torch.uint8"),
        ({"x": torch.zeros(0, 3)}, r"at least one image.*; got x of shape \(0, 3\)"),
        ({"samples": 0}, "one sample .*samples=0"),
        ({"fewer": (10, 40)}, "fewer of the 40 samples, but at least one; got 10, 40"),
        ({"fewer": (0,)}, "fewer of the 40 samples, but at least one; got 0"),
        ({"chunk": 0}, "a chunk of at least one.*chunk=0"),
        ({"seed": 0.5}, "a key of integers and strings; got 0.5"),
    ],
)
def test_bad_input_is_refused(vae: VAE, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"Expected .*{message}"):
        log_likelihood(**{"model": vae, "x": torch.zeros(2, 3), "samples": 40, **arguments})


def test_noise_differs_between_seeds_images_and_samples() -> None:
    vae = model(wide("gaussian"))
    x = vae.sample(1).expand(3, -1)
    several = log_likelihood(vae, x, 40).log_px
    assert len({*several.tolist(), *log_likelihood(vae, x, 40, seed=1).log_px.tolist()}) == 6
    # A block of noise drawn twice would leave twice the error.
    estimate = log_likelihood(vae, x[:1].expand(200, -1), 512)
    assert estimate.log_px.std().item() == pytest.approx(estimate.mc_error.mean().item(), rel=0.2)


@pytest.mark.parametrize(("samples", "chunk"), [(3, 10), (7, 10), (1000, 30)])
def test_every_image_is_encoded_once_and_every_sample_decoded_in_chunks(samples: int, chunk: int) -> None:
    vae = model(wide("planar"))
    x = vae.sample(8)
    encoded: list[int] = []
    decoded: list[int] = []
    vae.encoder.register_forward_hook(lambda _module, inputs, _output: encoded.append(len(inputs[0])))
    vae.decoder.register_forward_hook(lambda _module, inputs, _output: decoded.append(inputs[0].shape[:-1].numel()))
    log_likelihood(vae, x, samples, chunk=chunk)
    assert sum(encoded) == 8
    assert sum(decoded) == 8 * samples
    assert max(decoded) <= chunk
    assert len(encoded) == math.ceil(8 / max(1, chunk // samples))


@pytest.mark.parametrize("adapt", [0, 2])
def test_single_precision_agrees_with_double(adapt: int) -> None:
    vae = model(wide("triangular-sylvester"))
    x = vae.sample(5)
    expected = log_likelihood(vae, x, 300, adapt=adapt)
    single = log_likelihood(vae.float(), x, 300, adapt=adapt)
    assert_same(single, expected, tolerance=1e-3)
    torch.testing.assert_close(single.log_px, expected.log_px, rtol=1e-4, atol=1e-3)


def test_modules_are_in_evaluation_mode_for_the_time_being() -> None:
    vae = model(wide("gaussian"))
    x = vae.sample(4)
    expected = log_likelihood(vae, x, 30)
    vae.encoder = nn.Sequential(nn.Dropout(0.5), nn.Identity())
    vae.encoder[1].eval()
    assert_same(log_likelihood(vae, x, 30), expected)
    assert vae.training
    assert vae.encoder[0].training
    assert not vae.encoder[1].training


def test_progress_is_told_after_every_group() -> None:
    vae = model(wide("gaussian"))
    calls: list[tuple[int, int]] = []
    log_likelihood(vae, vae.sample(5), 50, chunk=100, progress=lambda *call: calls.append(call))
    assert calls == [(2, 5), (4, 5), (5, 5)]


def test_the_summary_states_both_errors_and_distrusts_heavy_tails() -> None:
    estimate = Estimate(
        log_px=torch.tensor([-1.0, -2.0, -3.0, -6.0]).double(),
        mc_error=torch.tensor([0.3, 0.4, 0.0, 1.2]).double(),
        ess=torch.tensor([10.0, 20.0, 30.0, 40.0]).double(),
        khat=torch.tensor([0.2, 0.5, math.nan, 0.3]).double(),
        elbo=torch.tensor([-2.0, -3.0, -3.0, -8.0]).double(),
        samples=50,
    )
    summary = estimate.summary()
    assert summary["log_px"] == -3.0
    assert summary["elbo"] == -4.0
    assert summary["std_error"] == pytest.approx(math.sqrt((4 + 1 + 0 + 9) / 3 / 4))
    assert summary["mc_error"] == pytest.approx(1.3 / 4)
    assert summary["ess"] == 25.0
    assert summary["khat_share"] == 0.0
    assert summary["warning"] is None  # the nan belongs to equal weights
    heavy = replace(estimate, khat=torch.tensor([0.2, math.inf, math.nan, KHAT_LIMIT + 0.1]).double())
    assert heavy.summary()["khat_share"] == pytest.approx(2 / 3)
    assert "2 of 4 images" in heavy.summary()["warning"]
    few = replace(estimate, khat=torch.full((4,), math.nan).double(), samples=20)
    assert "unknown for 3 of 4 images" in few.summary()["warning"]
    rounding = replace(few, mc_error=torch.tensor([0.0, 1e-8, 3e-8, 1e-9]).double())
    assert rounding.summary()["warning"] is None
    broken = replace(estimate, log_px=torch.tensor([-1.0, math.nan, -3.0, -6.0]).double())
    assert "not finite for 1 of 4 images" in broken.summary()["warning"]
    assert broken.summary()["log_px"] is None


def test_a_narrow_posterior_is_called_out() -> None:
    vae = model(Gaussian(2, 3, variance_bounds=(0.01, 0.02)))
    summary = log_likelihood(vae, vae.sample(10), 1000).summary()
    assert summary["khat_share"] > 0.5
    assert "heavy-tailed" in summary["warning"]
