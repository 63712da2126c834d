"""Path gradients: scores that go along the chain against those through the inverse, and what they are right for."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from cases import FLOWS, STEPS, redraw
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, constraints

from sylvester import flows
from sylvester.distributions import FlowDistribution
from sylvester.linalg import solve_tanh_transposed
from sylvester.objectives import dreg, elbo, free_bits, iwae, log_mean_exp, renyi
from sylvester.transforms import call_and_ladj, call_ladj_and_score
from sylvester.vae import VAE, LogTerms, MLPDecoder, MLPEncoder, PathTerms

pytestmark = pytest.mark.usefixtures("float64")

EVERY_STEP = pytest.mark.parametrize("name", STEPS)
EVERY_FLOW = pytest.mark.parametrize("name", FLOWS)
SCALES = pytest.mark.parametrize("scale", [0.1, 1.0])


def assert_near(got, expected, tolerance=1e-8):
    """Relative to the largest entry of a tensor, or of several together."""
    size = max(each.abs().max() for each in expected)
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() <= tolerance * size


def score_through_inverse(step, y, score):
    """∂/∂y of log q(t⁻¹(y)) + log|det ∂t⁻¹/∂y|, where ∂log q/∂z is the score."""
    y = y.detach().requires_grad_()
    z, ladj = call_and_ladj(step.inv, y)
    return torch.autograd.grad((z * score).sum() + ladj.sum(), y)


@EVERY_STEP
@SCALES
@pytest.mark.parametrize("features", [1, 2, 5, 40])
@pytest.mark.parametrize("inverse", [False, True])
def test_a_step_pushes_scores_as_its_inverse_does(name, features, scale, inverse):
    case = STEPS[name]
    leaves = [leaf.requires_grad_() for leaf in case.leaves(name, features, (3,), scale)]
    step = case.build(*leaves)
    step = step.inv if inverse else step
    z, score = torch.randn(2, 2, 3, features)
    expected_y, expected_ladj = step.call_and_ladj(z)
    y, ladj, pushed = step.call_ladj_and_score(z, score)
    torch.testing.assert_close((y, ladj), (expected_y, expected_ladj), rtol=0, atol=0)
    assert not pushed.requires_grad
    assert_near([pushed], score_through_inverse(step, y, score))


@pytest.mark.parametrize("step", [AffineTransform(0.3, -2.0), TanhTransform(), TanhTransform(cache_size=1).inv])
def test_foreign_steps_push_scores_through_their_inverse(step):
    z, score = 0.9 * torch.rand(2, 4, 3)
    y, ladj, pushed = call_ladj_and_score(step, z, score)
    torch.testing.assert_close((y, ladj), call_and_ladj(step, z))
    assert_near([pushed], score_through_inverse(step, y, score))


def test_the_center_of_a_radial_step_has_a_finite_score():
    step = STEPS["radial"].build(torch.zeros(3), torch.tensor(0.5), torch.tensor(0.7))
    _, _, pushed = step.call_ladj_and_score(torch.zeros(3), torch.ones(3))
    assert pushed.isfinite().all()


@pytest.mark.parametrize("rank", [1, 31, 32, 33, 70])
def test_the_transposed_system_is_solved(rank):
    r, r_tilde = (torch.randn(2, 3, rank, rank) / rank**0.5).triu()
    slope, c = torch.rand(4, 3, rank), torch.randn(4, 3, rank)
    x = solve_tanh_transposed(r, r_tilde, slope, c)
    matrix = torch.eye(rank) + r_tilde.mT @ torch.diag_embed(slope) @ r.mT
    torch.testing.assert_close((matrix @ x.unsqueeze(-1)).squeeze(-1), c, rtol=1e-9, atol=1e-9)


def make(name, features, scale, *, context=3, transforms=3):
    flow = redraw(FLOWS[name](features, context, transforms), scale, name, features)
    return flow, torch.randn(4, context)


def frozen(flow):
    return copy.deepcopy(flow).requires_grad_(False)


@EVERY_FLOW
@SCALES
@pytest.mark.parametrize("features", [1, 2, 5])
def test_gradients_are_those_through_the_inverse_with_the_parameters_held(name, features, scale):
    flow, h = make(name, features, scale)
    noise, weight = torch.randn(2, 4, features), torch.randn(2, 4)
    parameters = list(flow.parameters())
    z, log_q = flow(h).rsample_and_log_prob(noise=noise)
    held = frozen(flow)(h).log_prob(z)
    expected = torch.autograd.grad((weight * held).sum(), parameters, materialize_grads=True, retain_graph=True)
    posterior = flow(h)
    z_path, log_q_path = posterior.rsample_and_log_prob(noise=noise, path_gradient=True)
    torch.testing.assert_close((z_path, log_q_path), (z, log_q), rtol=0, atol=0)
    got = torch.autograd.grad((weight * log_q_path).sum(), parameters, materialize_grads=True, retain_graph=True)
    assert_near(got, expected)
    assert posterior.log_prob(z_path) is not log_q_path
    total = torch.autograd.grad((weight * posterior.log_prob(z_path)).sum(), parameters, materialize_grads=True)
    ordinary = torch.autograd.grad((weight * log_q).sum(), parameters, materialize_grads=True)
    assert_near(total, ordinary, tolerance=1e-6)


@EVERY_FLOW
def test_where_the_target_is_the_posterior_no_sample_has_a_gradient(name):
    flow, h = make(name, 3, 1.0)
    target, parameters = frozen(flow)(h), list(flow.parameters())
    z, log_q = flow(h).rsample_and_log_prob((2,), path_gradient=True)
    log_w = target.log_prob(z) - log_q
    sizes = torch.autograd.grad(log_q.sum(), parameters, materialize_grads=True, retain_graph=True)
    largest = max(size.abs().max() for size in sizes)
    for one in log_w.flatten():
        grads = torch.autograd.grad(one, parameters, materialize_grads=True, retain_graph=True)
        assert max(grad.abs().max() for grad in grads) <= 1e-8 * largest


def test_a_chain_with_foreign_steps():
    loc, scale = torch.tensor([0.2, -0.4], requires_grad=True), torch.tensor([0.5, 1.5], requires_grad=True)
    base = Independent(Normal(loc, scale), 1)
    steps = [AffineTransform(0.3, -2.0), *flows.Planar(2, transforms=2)().transforms]
    noise = torch.randn(5, 2)
    z, _ = FlowDistribution(base, steps).rsample_and_log_prob(noise=noise)
    held = FlowDistribution(Independent(Normal(loc.detach(), scale.detach()), 1), steps)
    expected = torch.autograd.grad(held.log_prob(z).sum(), [loc, scale])
    _, log_q = FlowDistribution(base, steps).rsample_and_log_prob(noise=noise, path_gradient=True)
    assert_near(torch.autograd.grad(log_q.sum(), [loc, scale]), expected)


def test_without_gradients_the_values_are_the_same():
    flow, h = make("triangular-sylvester", 5, 1.0)
    noise = torch.randn(2, 4, 5)
    expected = flow(h).rsample_and_log_prob(noise=noise)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(flow(h).rsample_and_log_prob(noise=noise, path_gradient=True), expected)


class Replicas:
    """A linear-Gaussian model and a Sylvester posterior far from its own, in many copies with parameters of their own:
    the gradients of their bounds are independent draws of one gradient."""

    def __init__(self, count):
        case = STEPS["triangular-sylvester"]
        leaves = [*case.leaves("replicas", 2, (), 1.0), torch.tensor([0.3, -0.5]), torch.tensor([-0.4, 0.2])]
        self.leaves = [leaf.expand(count, *leaf.shape).clone().requires_grad_() for leaf in leaves]
        self.loading = torch.tensor([1.0, -2.0]).expand(count, 2).clone().requires_grad_()
        self.build, self.noise = case.build, torch.randn(3, count, 2)

    def terms(self, path_gradient):
        *leaves, loc, log_scale = self.leaves
        base = Independent(Normal(loc, log_scale.exp()), 1)
        q = FlowDistribution(base, [self.build(*leaves)])
        z, log_q = q.rsample_and_log_prob(noise=self.noise, path_gradient=path_gradient)
        log_px_z = Normal((self.loading * z).sum(-1), 0.7).log_prob(torch.tensor(1.5))
        kind = PathTerms if path_gradient else LogTerms
        return kind(z, log_px_z, Normal(0.0, 1.0).log_prob(z).sum(-1), log_q)

    def gradients(self, objective, path_gradient):
        """Of every copy: (count, numbers)."""
        bound = objective(self.terms(path_gradient))
        grads = torch.autograd.grad(bound.sum(), [*self.leaves, self.loading], materialize_grads=True)
        return bound.detach(), torch.cat([grad.flatten(1) for grad in grads], 1)


def largest_bias(objective, path_objective, count=40_000):
    """Of the mean difference of their gradients, in standard errors; their values are the same."""
    replicas = Replicas(count)
    (bound, ordinary), (path_bound, path) = (
        replicas.gradients(each, path_gradient) for each, path_gradient in ((objective, False), (path_objective, True))
    )
    torch.testing.assert_close(path_bound, bound, rtol=1e-12, atol=1e-12)
    difference = path - ordinary
    moving = difference.abs().amax(0) > 1e-12  # the model's gradients are the same
    assert 0 < moving.sum() < len(moving)
    difference = difference[:, moving]
    return (difference.mean(0) / (difference.std(0) / count**0.5)).abs().max()


@pytest.mark.parametrize(
    ("objective", "path_objective"),
    [
        (elbo, elbo),
        (partial(elbo, beta=0.3), partial(elbo, beta=0.3)),
        (iwae, dreg),
        (partial(iwae, beta=0.3), partial(dreg, beta=0.3)),
        (partial(renyi, alpha=0.5), partial(dreg, alpha=0.5)),
        (partial(renyi, alpha=1.0), partial(dreg, alpha=1.0)),
        (partial(renyi, alpha=2.0), partial(dreg, alpha=2.0)),
    ],
    ids=["elbo", "beta-elbo", "dreg", "beta-dreg", "renyi-half", "renyi-one", "renyi-two"],
)
def test_path_gradients_have_the_mean_of_ordinary_ones(objective, path_objective):
    assert largest_bias(objective, path_objective) < 4.5


def test_path_gradients_in_the_importance_weighted_bound_are_biased():
    assert largest_bias(iwae, lambda terms: log_mean_exp(terms.log_w)) > 20


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_the_mean_of_path_gradients_is_the_gradient_of_a_bound_in_closed_form(beta):
    """q = N(μ, diag σ²), p(x|z) = N(a·z, s²): E log p(x|z) = log N(x; a·μ, s²) − a²·σ²/2s²."""
    count, noise_scale, x = 100_000, 0.7, torch.tensor(1.5)
    loading = torch.tensor([1.0, -2.0])
    start = torch.tensor([0.3, -0.5]), torch.tensor([-0.4, 0.2])
    loc, log_scale = (each.expand(count, 2).clone().requires_grad_() for each in start)
    q = FlowDistribution(Independent(Normal(loc, log_scale.exp()), 1), [])
    z, log_q = q.rsample_and_log_prob(path_gradient=True)
    log_px_z = Normal((loading * z).sum(-1), noise_scale).log_prob(x)
    terms = PathTerms(*(t.unsqueeze(0) for t in (z, log_px_z, Normal(0.0, 1.0).log_prob(z).sum(-1), log_q)))
    drawn = torch.cat(torch.autograd.grad(elbo(terms, beta).sum(), [loc, log_scale]), 1)

    mean, log_std = (each.clone().requires_grad_() for each in start)
    variance = (2 * log_std).exp()
    fit = Normal((loading * mean).sum(), noise_scale).log_prob(x)
    fit = fit - (loading**2 * variance).sum() / (2 * noise_scale**2)
    divergence = 0.5 * (variance + mean**2 - 1 - 2 * log_std).sum()
    exact = torch.cat(torch.autograd.grad(fit - beta * divergence, [mean, log_std]))
    assert ((drawn.mean(0) - exact) / (drawn.std(0) / count**0.5)).abs().max() < 4.5


@pytest.mark.parametrize("objective", [iwae, partial(renyi, alpha=0.5), partial(free_bits, floor=1.0)])
def test_objectives_that_would_be_biased_refuse_path_gradients(objective):
    with pytest.raises(ValueError, match=r"Expected terms with ordinary gradients .*; got path gradients"):
        objective(Replicas(2).terms(True))


def test_double_reparameterization_asks_for_path_gradients():
    with pytest.raises(ValueError, match=r"Expected terms with path gradients.*; got ordinary"):
        dreg(Replicas(2).terms(False))


@pytest.mark.parametrize("alpha", [-0.1, float("nan"), float("inf")])
def test_impossible_orders_are_refused(alpha):
    with pytest.raises(ValueError, match=r"Expected a finite alpha >= 0; got"):
        renyi(Replicas(2).terms(False), alpha)


def test_double_reparameterization_has_the_stated_weights():
    replicas, alpha = Replicas(5), 0.4
    terms = replicas.terms(True)
    v = torch.softmax((1 - alpha) * terms.log_w, 0).detach()
    (score,) = torch.autograd.grad(terms.log_w.sum(), terms.z, retain_graph=True)
    weighted = (alpha * v + (1 - alpha) * v**2).unsqueeze(-1) * score
    of_posterior = torch.autograd.grad(terms.z, replicas.leaves, weighted, materialize_grads=True, retain_graph=True)
    (of_model,) = torch.autograd.grad((v * replicas.terms(True).log_w).sum(), replicas.loading)
    got = torch.autograd.grad(dreg(terms, alpha).sum(), [*replicas.leaves, replicas.loading], materialize_grads=True)
    assert_near(got, [*of_posterior, of_model], tolerance=1e-12)


def test_without_gradients_double_reparameterization_is_the_bound():
    replicas = Replicas(3)
    with torch.no_grad():
        torch.testing.assert_close(dreg(replicas.terms(True)), iwae(replicas.terms(False)))


def test_a_frozen_posterior_leaves_the_models_gradient():
    replicas = Replicas(3)
    replicas.leaves = [leaf.detach() for leaf in replicas.leaves]
    got, expected = (
        torch.autograd.grad(objective(replicas.terms(path)).sum(), replicas.loading)
        for objective, path in ((dreg, True), (iwae, False))
    )
    assert_near(got, expected, tolerance=1e-12)


def small_vae():
    flow = redraw(flows.TriangularSylvester(3, 8, 2), 1.0)
    return VAE(MLPEncoder(5, 8), flow, MLPDecoder(5, 3, hidden_features=(16,)))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_vae_gives_path_terms_with_the_values_of_ordinary_ones(compiled):
    vae, x, noise = small_vae(), torch.rand(4, 5).round(), torch.randn(6, 4, 3)
    log_terms = torch.compile(vae.log_terms, backend="aot_eager", fullgraph=True) if compiled else vae.log_terms
    terms, expected = log_terms(x, 6, noise=noise, path_gradient=True), vae.log_terms(x, 6, noise=noise)
    assert isinstance(terms, PathTerms)
    assert not isinstance(expected, PathTerms)
    torch.testing.assert_close(tuple(terms), tuple(expected))
    held = copy.deepcopy(vae).requires_grad_(False).posterior(x).log_prob(expected.z)
    parameters = list(vae.parameters())
    got, through_inverse = (
        torch.autograd.grad(bound.sum(), parameters, retain_graph=True)
        for bound in (elbo(terms), elbo(expected._replace(log_q=held)))
    )
    assert_near(got, through_inverse)


def test_double_reparameterization_of_a_vae_leaves_the_models_gradient():
    vae, x, noise = small_vae(), torch.rand(4, 5).round(), torch.randn(6, 4, 3)
    bounds = dreg(vae.log_terms(x, 6, noise=noise, path_gradient=True)), iwae(vae.log_terms(x, 6, noise=noise))
    torch.testing.assert_close(*bounds)
    of_decoder = (torch.autograd.grad(bound.sum(), list(vae.decoder.parameters())) for bound in bounds)
    assert_near(*of_decoder, tolerance=1e-12)


def test_double_reparameterization_needs_terms_that_depend_on_their_z():
    terms = Replicas(2).terms(True)
    with pytest.raises(ValueError, match=r"Expected terms for dreg .* functions of their z; got others"):
        dreg(terms._replace(z=terms.z.clone()))


@pytest.mark.parametrize("shape", [(), (3,), (4,), (2, 4)])
def test_events_of_two_axes(shape):
    flow = redraw(flows.Planar(3, transforms=2), 1.0, "planar", 3)
    q = flows.onto(flow, constraints.corr_cholesky)()  # (3, 3)
    noise = torch.randn(*shape, 3)
    z, expected = q.rsample_and_log_prob(noise=noise)
    path_z, log_q = q.rsample_and_log_prob(noise=noise, path_gradient=True)
    torch.testing.assert_close((path_z, log_q), (z, expected))
    # The density of the three free numbers: what is added by the way onto the matrices has no parameters.
    _, below = flow().rsample_and_log_prob(noise=noise, path_gradient=True)
    step = q.transforms[-1]
    free = flow().rsample_and_log_prob(noise=noise)[0]
    onto = -step.log_abs_det_jacobian(free, step(free))
    parameters = list(flow.parameters())
    got = torch.autograd.grad(log_q.sum(), parameters)
    assert_near(got, torch.autograd.grad((below + onto).sum(), parameters))


def test_a_mixture_of_events_of_two_axes():
    mixture = flows.Mixture([flows.onto(flows.Planar(3, transforms=2), constraints.corr_cholesky) for _ in range(2)])()
    noise = torch.randn(4, 3)
    plain, path = (mixture.stratified(2, noise=noise, path_gradient=path) for path in (False, True))
    torch.testing.assert_close(path.log_q, plain.log_q)
