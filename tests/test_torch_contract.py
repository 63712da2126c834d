"""What torch asks of its own transforms and distributions, asked of every step and every flow, in both directions."""

from __future__ import annotations

import copy
import io
import math
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from cases import FLOWS, SCALES, STEPS, redraw
from torch.autograd.functional import jacobian
from torch.distributions import (
    AffineTransform,
    Categorical,
    CatTransform,
    ComposeTransform,
    ExpTransform,
    Independent,
    IndependentTransform,
    MixtureSameFamily,
    Normal,
    ReshapeTransform,
    StackTransform,
    TransformedDistribution,
    constraints,
    kl_divergence,
)

from sylvester.distributions import FlowDistribution

pytestmark = pytest.mark.usefixtures("float64")

FEATURES, CONTEXT = 3, 2
EVERY_STEP = pytest.mark.parametrize("name", STEPS)
BATCHED_STEPS = pytest.mark.parametrize("name", [name for name, case in STEPS.items() if case.batched])
EVERY_FLOW = pytest.mark.parametrize("name", FLOWS)
EVERY_SCALE = pytest.mark.parametrize("scale", SCALES)
DIRECTIONS = pytest.mark.parametrize("direction", ["forward", "inverse"])


def make_step(name, direction="forward", *, features=FEATURES, batch=(2,), scale=1.0):
    """A step or its inverse, and points where it can be tried."""
    case = STEPS[name]
    step = case.build(*case.leaves(name, features, batch, scale))
    z = torch.randn(4, *batch, features)
    return (step, z) if direction == "forward" else (step.inv, step(z))


def make_flow(name, batch=(4,), *, features=FEATURES, scale=1.0, context=CONTEXT, transforms=2):
    """A flow, and a context for it."""
    flow = redraw(FLOWS[name](features, context, transforms), scale, name)
    return flow, (torch.randn(*batch, context) if context else None)


def standard_normal(*shape):
    return Independent(Normal(torch.zeros(shape), torch.ones(shape)), 1)


# Transforms


@EVERY_STEP
@DIRECTIONS
@pytest.mark.parametrize("cache_size", [0, 1])
def test_the_inverse_of_the_inverse_is_the_step_itself(name, direction, cache_size):
    step = make_step(name, direction)[0].with_cache(cache_size)
    assert step.inv.inv == step
    assert direction == "inverse" or step.inv.inv is step
    assert step.inv != step
    assert step.inv == step.inv


def test_steps_are_equal_to_themselves_alone():
    steps = [make_step(name, direction)[0] for name in STEPS for direction in ("forward", "inverse")]
    for i, one in enumerate(steps):
        for j, other in enumerate(steps):
            assert (one == other) == (i == j), (one, other)
            assert (one != other) == (i != j), (one, other)


@BATCHED_STEPS
@DIRECTIONS
def test_steps_of_equal_parameters_are_equal(name, direction):
    step, again = make_step(name, direction)[0], make_step(name, direction)[0]
    assert step == again
    assert step != make_step(name, direction, scale=0.1)[0]
    assert step != make_step(name, direction, batch=())[0]


@EVERY_STEP
@DIRECTIONS
def test_is_a_bijection_of_real_vectors(name, direction):
    step, _ = make_step(name, direction)
    assert step.bijective
    assert step.event_dim == step.domain.event_dim == step.codomain.event_dim == 1
    assert step.domain is constraints.real_vector
    assert step.codomain is constraints.real_vector
    assert step.features == FEATURES or step.features is None
    assert step.batch_shape == ((2,) if STEPS[name].batched else ())


@EVERY_STEP
@DIRECTIONS
def test_a_cache_remembers_the_last_pair(name, direction):
    step, z = make_step(name, direction)
    assert step(z) is not step(z)
    assert step.with_cache(0) is step
    cached = step.with_cache()
    assert cached == step
    assert cached.with_cache(1) is cached
    z = z.requires_grad_()
    y = cached(z)
    torch.testing.assert_close(y, step(z))
    assert cached(z) is y
    assert cached.inv(y) is z
    assert cached.inv.inv(z) is y
    assert step(z) is not y  # the step it was made from still remembers nothing
    assert cached.with_cache(0)(z) is not y


@EVERY_STEP
@DIRECTIONS
def test_a_cache_never_answers_for_other_points(name, direction):
    step, z = make_step(name, direction)
    cached, other = step.with_cache(), z.flip(0).clone()
    first, second = cached(z), cached(other)
    torch.testing.assert_close(second, step(other))
    assert cached(z) is not second
    torch.testing.assert_close(cached.log_abs_det_jacobian(z, first), step.log_abs_det_jacobian(z, first))
    torch.testing.assert_close(cached.log_abs_det_jacobian(other, second), step.log_abs_det_jacobian(other, second))
    torch.testing.assert_close(cached.call_and_ladj(z), step.call_and_ladj(z))
    torch.testing.assert_close(cached.inv(first.clone()), z)


@EVERY_STEP
@DIRECTIONS
def test_values_with_and_without_ladj_are_the_same(name, direction):
    step, z = make_step(name, direction)
    before = z.clone()
    y, ladj = step.call_and_ladj(z)
    torch.testing.assert_close(step(z), y)
    torch.testing.assert_close(step.log_abs_det_jacobian(z, y), ladj)
    torch.testing.assert_close(step.inv.log_abs_det_jacobian(y, z), -ladj)
    torch.testing.assert_close(step.inv.call_and_ladj(y), (z, -ladj))
    assert torch.equal(z, before)  # what is given stays as it is


@EVERY_STEP
@DIRECTIONS
@pytest.mark.parametrize("shape", [(), (2,), (1,), (5, 2), (5, 1), (0, 2)], ids=str)
def test_shapes_are_known_beforehand(name, direction, shape):
    step, _ = make_step(name, direction)
    z = torch.randn(*shape, FEATURES)
    y, ladj = step.call_and_ladj(z)
    assert y.shape == step.forward_shape(z.shape) == step.inverse_shape(z.shape)
    assert ladj.shape == y.shape[:-1]
    assert step.log_abs_det_jacobian(z, y).shape == y.shape[:-1]
    assert y.shape == torch.broadcast_shapes(z.shape, (*step.batch_shape, FEATURES))


@BATCHED_STEPS
@DIRECTIONS
def test_shapes_that_do_not_fit_are_refused(name, direction):
    step, _ = make_step(name, direction)
    for shape in ((), (4,), (2, 4)):
        for method in (step.forward_shape, step.inverse_shape):
            with pytest.raises(ValueError, match="Expected"):
                method(shape)
        with pytest.raises(ValueError, match="Expected"):
            step(torch.zeros(shape))


def differences(function, z, step=1e-6):
    """The Jacobian at one point, by central differences."""
    moves = step * torch.eye(len(z))
    return torch.stack([(function(z + move) - function(z - move)) / (2 * step) for move in moves], -1)


JACOBIANS = {
    "reverse": jacobian,
    "jacrev": lambda f, z: torch.func.jacrev(f)(z),
    "jacfwd": lambda f, z: torch.func.jacfwd(f)(z),
    "differences": differences,
}


@EVERY_STEP
@DIRECTIONS
@pytest.mark.parametrize("kind", JACOBIANS)
def test_ladj_is_that_of_the_jacobian_of_every_kind(name, direction, kind):
    for scale in SCALES if kind != "differences" else (0.1, 1.0):
        step, z = make_step(name, direction, batch=(), scale=scale)
        matrix = JACOBIANS[kind](step, z[0])
        tolerance = 1e-5 if kind == "differences" else 1e-12 * (10 + torch.linalg.cond(matrix).item())
        expected = torch.linalg.slogdet(matrix).logabsdet
        torch.testing.assert_close(step.call_and_ladj(z[0])[1], expected, rtol=tolerance, atol=tolerance)
        back = JACOBIANS[kind](step.inv, step(z[0]))
        torch.testing.assert_close(
            matrix @ back, torch.eye(FEATURES), rtol=0, atol=1e-4 if kind == "differences" else 100 * tolerance
        )


@EVERY_STEP
@DIRECTIONS
def test_forward_and_reverse_derivatives_in_the_parameters_agree(name, direction):
    case = STEPS[name]
    leaves = case.leaves(name, FEATURES, (2,), 1.0)
    _, z = make_step(name, direction)

    def run(*leaves):
        step = case.build(*leaves)
        return (step if direction == "forward" else step.inv).call_and_ladj(z)

    along = [torch.randn_like(leaf) for leaf in leaves]
    out, forward = torch.func.jvp(run, tuple(leaves), tuple(along))
    weights = [torch.randn_like(each) for each in out]
    _, pullback = torch.func.vjp(run, *leaves)
    reverse = pullback(tuple(weights))
    torch.testing.assert_close(
        sum((w * t).sum() for w, t in zip(weights, forward, strict=True)),
        sum((g * a).sum() for g, a in zip(reverse, along, strict=True)),
    )


@EVERY_STEP
@DIRECTIONS
def test_composes_with_torchs_transforms(name, direction):
    step, z = make_step(name, direction)
    affine = AffineTransform(1.0, 2.0)
    chain = ComposeTransform([step, affine, step.inv, step])
    y = step(step.inv(affine(step(z))))
    torch.testing.assert_close(chain(z), y)
    torch.testing.assert_close(chain.inv(y), z)
    expected = FEATURES * math.log(2) + step.log_abs_det_jacobian(z, step(z))
    torch.testing.assert_close(chain.log_abs_det_jacobian(z, y), expected)
    torch.testing.assert_close(chain.inv.log_abs_det_jacobian(y, z), -expected)
    assert chain.event_dim == 1
    assert chain.forward_shape((FEATURES,)) == step.forward_shape((FEATURES,))
    cached = chain.with_cache()
    assert cached(z) is cached(z)


@EVERY_STEP
@DIRECTIONS
def test_is_reinterpreted_reshaped_stacked_and_concatenated(name, direction):
    step, z = make_step(name, direction)
    y, ladj = step.call_and_ladj(z)

    independent = IndependentTransform(step, 1)
    torch.testing.assert_close(independent(z), y)
    torch.testing.assert_close(independent.inv(y), z)
    torch.testing.assert_close(independent.log_abs_det_jacobian(z, y), ladj.sum(-1))
    assert independent.event_dim == 2
    assert independent.forward_shape(z.shape) == z.shape

    shaped = ComposeTransform([ReshapeTransform((FEATURES, 1), (FEATURES,)), step])
    torch.testing.assert_close(shaped(z.unsqueeze(-1)), y)
    torch.testing.assert_close(shaped.log_abs_det_jacobian(z.unsqueeze(-1), y), ladj)
    torch.testing.assert_close(shaped.inv(y), z.unsqueeze(-1))

    points = torch.stack([z, y])
    stacked = StackTransform([step, step.inv], dim=0)
    torch.testing.assert_close(stacked(points), torch.stack([y, z]))
    torch.testing.assert_close(stacked.inv(torch.stack([y, z])), points)
    torch.testing.assert_close(stacked.log_abs_det_jacobian(points, torch.stack([y, z])), torch.stack([ladj, -ladj]))

    joined = CatTransform([step, step.inv], dim=0, lengths=[4, 4])
    torch.testing.assert_close(joined(torch.cat([z, y])), torch.cat([y, z]))
    torch.testing.assert_close(joined.inv(torch.cat([y, z])), torch.cat([z, y]))
    torch.testing.assert_close(
        joined.log_abs_det_jacobian(torch.cat([z, y]), torch.cat([y, z])), torch.cat([ladj, -ladj])
    )


@EVERY_STEP
@DIRECTIONS
@pytest.mark.parametrize("base_batch", [(), (5, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("sample_shape", [(), (7,)], ids=str)
def test_makes_a_transformed_distribution(name, direction, base_batch, sample_shape):
    step, _ = make_step(name, direction)
    distribution = TransformedDistribution(standard_normal(*base_batch, FEATURES), [step])
    assert distribution.batch_shape == torch.broadcast_shapes(base_batch, step.batch_shape)
    assert distribution.event_shape == (FEATURES,)
    assert distribution.support.event_dim == 1
    x = distribution.sample(sample_shape)
    assert x.shape == (*sample_shape, *distribution.batch_shape, FEATURES)
    assert len(x.flatten().unique()) == x.numel()  # no two rows share noise
    assert distribution.log_prob(x).shape == (*sample_shape, *distribution.batch_shape)
    assert distribution.log_prob(torch.zeros(FEATURES)).shape == distribution.batch_shape


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda each: pickle.loads(pickle.dumps(each)),
    "save": lambda each: saved_and_loaded(each),
}


def saved_and_loaded(each):
    file = io.BytesIO()
    torch.save(each, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# The networks of the other steps are local functions here, which pickle knows nothing of.
STEP_COPIES = [(name, how) for name, case in STEPS.items() for how in (COPIES if case.batched else list(COPIES)[:2])]


@pytest.mark.parametrize(("name", "how"), STEP_COPIES)
@DIRECTIONS
def test_copies_of_a_step_are_the_step(name, how, direction):
    step, z = make_step(name, direction)
    for original in (step, step.with_cache()):
        y, ladj = original.call_and_ladj(z)
        other = COPIES[how](original)
        assert other is not original
        assert other == original
        assert other.batch_shape == original.batch_shape
        torch.testing.assert_close(other.call_and_ladj(z), (y, ladj))
        torch.testing.assert_close(other.inv(y), z)
        assert other.inv.inv == other
        assert original.inv.inv == original
        torch.testing.assert_close(original.inv(y), z)


@EVERY_STEP
@DIRECTIONS
@pytest.mark.parametrize("shape", [(0, 2), (3, 0, 2)], ids=str)
def test_no_points_have_no_images(name, direction, shape):
    case = STEPS[name]
    leaves = [leaf.requires_grad_() for leaf in case.leaves(name, FEATURES, (2,), 1.0)]
    step = case.build(*leaves)
    z = torch.randn(*shape, FEATURES, requires_grad=True)
    y, ladj = (step if direction == "forward" else step.inv).call_and_ladj(z)
    assert y.shape == z.shape
    assert ladj.shape == shape
    grads = torch.autograd.grad(y.sum() + ladj.sum(), [z, *leaves], allow_unused=True)
    assert grads[0].shape == z.shape
    assert all(grad is None or not grad.any() for grad in grads[1:])


@BATCHED_STEPS
@DIRECTIONS
def test_a_batch_of_no_parameters(name, direction):
    step, _ = make_step(name, direction, batch=(0,))
    assert step.batch_shape == (0,)
    for shape in ((0, FEATURES), (4, 0, FEATURES), (1, FEATURES), (FEATURES,)):
        y, ladj = step.call_and_ladj(torch.randn(shape))
        assert y.shape == step.forward_shape(shape)
        assert y.numel() == ladj.numel() == 0


@EVERY_STEP
def test_a_step_shows_its_name_and_not_its_weights(name):
    step, _ = make_step(name)
    shown, inverse = repr(step), repr(step.inv)
    assert type(step).__name__ in shown
    assert type(step).__name__ in inverse
    assert shown != inverse
    assert "tensor(" not in shown + inverse
    assert " at 0x" not in shown + inverse


# Distributions


@EVERY_FLOW
@pytest.mark.parametrize("batch", [(), (3, 4), (0,)], ids=str)
@pytest.mark.parametrize("sample_shape", [(), (2, 3), (0,)], ids=str)
def test_shapes_of_samples_and_densities(name, batch, sample_shape):
    flow, context = make_flow(name, batch)
    posterior = flow(context)
    assert posterior.batch_shape == batch
    assert posterior.event_shape == (FEATURES,)
    for draw in (posterior.sample, posterior.rsample):
        z = draw(torch.Size(sample_shape))
        assert z.shape == (*sample_shape, *batch, FEATURES)
        assert posterior.log_prob(z).shape == (*sample_shape, *batch)
        assert posterior.log_prob(z.clone()).shape == (*sample_shape, *batch)
    z, log_q = posterior.rsample_and_log_prob(sample_shape)
    assert z.shape == (*sample_shape, *batch, FEATURES)
    assert log_q.shape == (*sample_shape, *batch)
    # One point of the space, and points that broadcast against the batch.
    assert posterior.log_prob(torch.zeros(FEATURES)).shape == batch
    assert posterior.log_prob(torch.zeros(5, *(1 for _ in batch), FEATURES)).shape == (5, *batch)


@EVERY_FLOW
@pytest.mark.parametrize(("batch", "sample_shape"), [((0,), ()), ((2, 0), (3,)), ((4,), (0,))], ids=str)
def test_nothing_drawn_gives_no_gradient(name, batch, sample_shape):
    flow, context = make_flow(name, batch)
    context.requires_grad_()
    z, log_q = flow(context).rsample_and_log_prob(sample_shape)
    losses = [z.sum() + log_q.sum(), flow(context).log_prob(torch.zeros_like(z)).sum()]
    if 0 in batch:
        losses.append(flow(context).entropy(10).sum())
    for loss in losses:
        assert loss == 0
        for grad in torch.autograd.grad(loss, [context, *flow.parameters()], allow_unused=True):
            assert grad is None or not grad.any()


@EVERY_FLOW
def test_sample_is_detached_and_rsample_is_not(name):
    flow, context = make_flow(name)
    posterior = flow(context.requires_grad_())
    assert posterior.has_rsample
    assert not posterior.sample((2,)).requires_grad
    z = posterior.rsample((2,))
    assert z.requires_grad
    assert torch.autograd.grad(z.sum(), context)[0].abs().max() > 0
    torch.manual_seed(1)
    one = posterior.sample((2,))
    torch.manual_seed(1)
    torch.testing.assert_close(one, posterior.rsample((2,)))
    torch.manual_seed(1)
    torch.testing.assert_close(one, posterior.rsample_and_log_prob((2,))[0])


@EVERY_FLOW
def test_the_score_of_a_sample_does_not_depend_on_who_remembers_it(name):
    flow, context = make_flow(name, scale=0.5)
    posterior = flow(context)
    z = posterior.sample((3,))
    remembered = torch.autograd.grad(posterior.log_prob(z).sum(), flow.parameters(), allow_unused=True)
    fresh = torch.autograd.grad(flow(context).log_prob(z.clone()).sum(), flow.parameters(), allow_unused=True)
    torch.testing.assert_close(remembered, fresh)


@EVERY_FLOW
@pytest.mark.parametrize(
    "grad", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__
)
@pytest.mark.parametrize("draw", ["sample", "rsample_and_log_prob"])
def test_a_sample_changed_in_place_is_another_point(name, draw, grad):
    flow, context = make_flow(name, scale=0.5)
    with grad():
        posterior = flow(context)
        drawn = getattr(posterior, draw)((3,))
        z = drawn[0] if isinstance(drawn, tuple) else drawn
        before = posterior.log_prob(z).clone()
        with grad() if grad is not torch.enable_grad else torch.no_grad():
            z += 0.5
        after = posterior.log_prob(z)
        torch.testing.assert_close(after, flow(context).log_prob(z.clone()))
        assert (after != before).all()


@EVERY_FLOW
@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
def test_a_log_density_changed_in_place_is_not_remembered(name, grad):
    """As ``log_q -= log_prior`` would, in the loop of a user who then asks for ``log_prob(z)``."""
    flow, context = make_flow(name, scale=0.5)
    with grad():
        posterior = flow(context)
        z, log_q = posterior.rsample_and_log_prob((3,))
        expected = log_q.clone()
        log_q += 1
        torch.testing.assert_close(posterior.log_prob(z), expected)


@EVERY_FLOW
def test_inference_mode_gives_the_same_numbers(name):
    flow, context = make_flow(name, scale=0.5)
    noise = torch.randn(3, 4, FEATURES)
    z, log_q = flow(context).rsample_and_log_prob(noise=noise)
    with torch.inference_mode():
        posterior = flow(context)
        torch.testing.assert_close(posterior.rsample_and_log_prob(noise=noise), (z.detach(), log_q.detach()))
        torch.testing.assert_close(posterior.log_prob(z.detach().clone()), log_q.detach())


@EVERY_FLOW
def test_every_step_knows_the_batch_it_is_bound_to(name):
    flow, context = make_flow(name, (3, 4))
    posterior = flow(context)
    for step in posterior.transforms:
        assert step.batch_shape == step.inv.batch_shape == (3, 4)
        assert step.features == step.inv.features == FEATURES
        for each in (step, step.inv):
            y, ladj = each.call_and_ladj(torch.zeros(FEATURES))
            assert each.forward_shape((FEATURES,)) == each.inverse_shape((FEATURES,)) == y.shape == (3, 4, FEATURES)
            assert ladj.shape == (3, 4)
    if not posterior.transforms:
        return
    for kind in (FlowDistribution, TransformedDistribution):
        other = kind(standard_normal(FEATURES), posterior.transforms)
        assert other.batch_shape == (3, 4)
        z = other.sample()
        assert z.shape == (3, 4, FEATURES)
        assert len(z.flatten().unique()) == z.numel()
        assert other.log_prob(torch.zeros(FEATURES)).shape == (3, 4)


@EVERY_FLOW
def test_agrees_with_torchs_transformed_distribution(name):
    flow, context = make_flow(name, scale=0.5)
    posterior = flow(context)
    plain = TransformedDistribution(posterior.base_dist, posterior.transforms)
    z = torch.randn(5, 4, FEATURES)
    torch.testing.assert_close(posterior.log_prob(z), plain.log_prob(z))
    assert plain.batch_shape == posterior.batch_shape
    torch.manual_seed(1)
    one = posterior.sample((2,))
    torch.manual_seed(1)
    torch.testing.assert_close(one, plain.sample((2,)))


class Named(FlowDistribution):
    """A subclass with nothing of its own."""


class Labelled(FlowDistribution):
    """A subclass with a constructor and an ``expand`` of its own, as torch's documentation asks."""

    def __init__(self, label, *args, **options):
        self.label = label
        super().__init__(*args, **options)

    def expand(self, batch_shape, _instance=None):
        new = self._get_checked_instance(Labelled, _instance)
        new.label = self.label
        return super().expand(batch_shape, _instance=new)


class Forgetful(FlowDistribution):
    """A subclass with a constructor of its own and no ``expand``."""

    def __init__(self, label, *args):
        self.label = label
        super().__init__(*args)


@EVERY_FLOW
@pytest.mark.parametrize("shape", [(4,), (2, 5, 4), (0, 4)], ids=str)
def test_expand(name, shape):
    flow, context = make_flow(name)
    posterior = flow(context)
    last = posterior.sample()
    wide = posterior.expand(torch.Size(shape))
    assert type(wide) is type(posterior)
    assert wide.batch_shape == shape
    assert wide.event_shape == (FEATURES,)
    assert posterior.batch_shape == (4,)
    z = wide.rsample((2,))
    assert z.shape == (2, *shape, FEATURES)
    assert len(z.flatten().unique()) == z.numel()
    torch.testing.assert_close(wide.log_prob(z), posterior.log_prob(z.clone()))
    torch.testing.assert_close(wide.log_prob(last), posterior.log_prob(last).expand(shape))
    again = wide.expand((3, *shape))
    assert again.batch_shape == (3, *shape)
    torch.testing.assert_close(again.log_prob(last), posterior.log_prob(last).expand(3, *shape))


@EVERY_FLOW
def test_expand_keeps_a_subclass(name):
    flow, context = make_flow(name)
    posterior = flow(context)
    parts = posterior.base_dist, posterior.transforms
    named = Named(*parts).expand((5, 4))
    assert type(named) is Named
    assert named.batch_shape == named.rsample().shape[:-1] == (5, 4)

    labelled = Labelled("a", *parts, validate_args=True).expand((5, 4))
    assert type(labelled) is Labelled
    assert labelled.label == "a"
    assert labelled.batch_shape == (5, 4)
    assert labelled._validate_args
    z, log_q = labelled.rsample_and_log_prob((2,))
    torch.testing.assert_close(log_q, posterior.log_prob(z.clone()))

    with pytest.raises(NotImplementedError):
        Forgetful("a", *parts).expand((5, 4))


def test_expand_fills_the_instance_it_is_given():
    posterior = make_flow("planar")[0](torch.randn(4, CONTEXT))
    given = Named.__new__(Named)
    assert posterior.expand((5, 4), _instance=given) is given
    assert given.batch_shape == (5, 4)


@EVERY_FLOW
def test_expand_refuses_what_does_not_fit(name):
    posterior = make_flow(name)[0](torch.randn(4, CONTEXT))
    for shape in ((3,), (4, 3), ()):
        with pytest.raises(RuntimeError):
            posterior.expand(shape).sample()


@EVERY_FLOW
def test_entropy_is_minus_the_mean_log_density(name):
    flow, context = make_flow(name, (2,), scale=0.5)
    posterior = flow(context.requires_grad_())
    entropy = posterior.entropy(400)
    assert entropy.shape == (2,)
    with torch.no_grad():
        log_q = flow(context).log_prob(posterior.sample((400,)))
    error = (2 * log_q.var(0) / 400).sqrt()
    assert ((entropy + log_q.mean(0)).abs() < 5 * error).all()
    assert torch.autograd.grad(entropy.sum(), context)[0].abs().max() > 0


@EVERY_FLOW
def test_support_and_validation(name):
    flow, context = make_flow(name, scale=0.1)
    posterior = flow(context)
    assert posterior.support.event_dim == 1
    z = posterior.sample((2,))
    assert posterior.support.check(z).shape == (2, 4)
    assert posterior.support.check(z).all()
    assert not posterior.support.check(torch.full((FEATURES,), torch.nan))
    checked = FlowDistribution(posterior.base_dist, posterior.transforms, validate_args=True)
    torch.testing.assert_close(checked.log_prob(z), posterior.log_prob(z.clone()))
    checked.rsample_and_log_prob((2,))
    for wrong in (torch.zeros(FEATURES + 1), torch.zeros(3, FEATURES), torch.full((4, FEATURES), torch.nan)):
        with pytest.raises(ValueError, match=r"support|event_shape|broadcast|Expected"):
            checked.log_prob(wrong)
    with pytest.raises(ValueError, match="Expected points as a tensor"):
        checked.log_prob([0.0] * FEATURES)


@EVERY_FLOW
def test_a_distribution_shows_its_shapes(name):
    flow, context = make_flow(name, (7, 4))
    for posterior in (flow(context), flow(context).expand((9, 7, 4))):
        shown = repr(posterior)
        assert type(posterior).__name__ in shown
        assert str(tuple(posterior.batch_shape))[1:-1] in shown
        assert str(FEATURES) in shown
        assert "tensor(" not in shown
        assert len(shown) < 500


def bound(name, scale=0.5, batch=(4,)):
    flow, context = make_flow(name, batch, scale=scale)
    with torch.no_grad():
        return flow(context)


@EVERY_FLOW
@pytest.mark.parametrize("how", COPIES)
def test_copies_of_a_bound_distribution_are_the_distribution(name, how):
    with torch.no_grad():
        posterior = bound(name)
        noise, z = torch.randn(2, 2, 4, FEATURES).unbind()
        expected = posterior.rsample_and_log_prob(noise=noise)
        log_q = posterior.log_prob(z)
        other = COPIES[how](posterior)
        assert type(other) is type(posterior)
        assert other.batch_shape == posterior.batch_shape
        torch.testing.assert_close(other.rsample_and_log_prob(noise=noise), expected)
        torch.testing.assert_close(other.log_prob(z), log_q)
        torch.testing.assert_close(other.expand((3, 4)).log_prob(z[0]), posterior.log_prob(z[0]).expand(3, 4))
        for step, copied in zip(posterior.transforms, other.transforms, strict=True):
            torch.testing.assert_close(copied.inv.call_and_ladj(z), step.inv.call_and_ladj(z))
            inverse = COPIES[how](step.inv)
            torch.testing.assert_close(inverse.call_and_ladj(z), step.inv.call_and_ladj(z))
            torch.testing.assert_close(inverse.inv.call_and_ladj(z), step.call_and_ladj(z))


@pytest.fixture(scope="module")
def worker():
    """A process that shares nothing with this one but what is sent to it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


def log_prob_of(payload, z):
    """In the worker, so that what cannot be read there is an answer and not its end."""
    posterior = ForkingPickler.loads(payload)
    inverses = [step.inv.call_and_ladj(z)[1].numpy() for step in posterior.transforms]
    return posterior.log_prob(z).numpy(), posterior.rsample((2,)).shape, inverses


@EVERY_FLOW
def test_a_bound_distribution_is_sent_to_another_process(name, worker):
    z = torch.randn(4, FEATURES)
    with torch.no_grad():
        posterior = bound(name)
        log_q, shape, inverses = worker.submit(log_prob_of, bytes(ForkingPickler.dumps(posterior)), z).result()
        torch.testing.assert_close(torch.from_numpy(log_q), posterior.log_prob(z))
        assert shape == (2, 4, FEATURES)
        for ladj, step in zip(inverses, posterior.transforms, strict=True):
            torch.testing.assert_close(torch.from_numpy(ladj), step.inv.call_and_ladj(z)[1])


@EVERY_FLOW
def test_serves_torchs_other_distributions(name):
    flow, context = make_flow(name, scale=0.5)
    posterior = flow(context)
    z = torch.randn(4, FEATURES)
    log_q = posterior.log_prob(z)

    independent = Independent(posterior, 1)
    assert independent.event_shape == (4, FEATURES)
    torch.testing.assert_close(independent.log_prob(z), log_q.sum())
    assert independent.expand((2,)).rsample((3,)).shape == (3, 2, 4, FEATURES)

    positive = TransformedDistribution(posterior, [ExpTransform()])
    assert positive.batch_shape == (4,)
    torch.testing.assert_close(positive.log_prob(z.exp()), log_q - z.sum(-1))
    assert (positive.rsample((2,)) > 0).all()

    mixture = MixtureSameFamily(Categorical(torch.ones(4)), posterior)
    torch.testing.assert_close(mixture.log_prob(z), (posterior.log_prob(z.unsqueeze(1)) - math.log(4)).logsumexp(-1))
    assert mixture.sample((5,)).shape == (5, FEATURES)


@EVERY_FLOW
def test_divergence_does_not_change_under_the_same_steps(name):
    posterior = bound(name)
    other = FlowDistribution(standard_normal(4, FEATURES), posterior.transforms)
    expected = kl_divergence(posterior.base_dist, other.base_dist)
    torch.testing.assert_close(kl_divergence(posterior, other), expected)
    if posterior.transforms:
        with pytest.raises(NotImplementedError):
            kl_divergence(posterior, FlowDistribution(posterior.base_dist, posterior.transforms[:-1]))


@EVERY_FLOW
def test_what_has_no_formula_says_so(name):
    posterior = bound(name)
    z = torch.zeros(4, FEATURES)
    for attempt in (
        lambda: posterior.mean,
        lambda: posterior.variance,
        lambda: posterior.cdf(z),
        lambda: posterior.icdf(z),
        posterior.enumerate_support,
    ):
        with pytest.raises(NotImplementedError):
            attempt()


class PerCoordinate(AffineTransform):
    """An elementwise transform that gives both of its values at once, with one ladj for each coordinate."""

    def call_and_ladj(self, x):
        y = self(x)
        return y, self.log_abs_det_jacobian(x, y)

    @property
    def inv(self):
        return PerCoordinate(-self.loc / self.scale, 1 / self.scale)


@EVERY_FLOW
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_ladj_for_each_coordinate_is_summed(name, place):
    posterior = bound(name)
    foreign = PerCoordinate(torch.tensor([1.0, 0.0, -1.0]), torch.tensor([2.0, 0.5, 3.0]))
    known = AffineTransform(foreign.loc, foreign.scale)

    def chain(step):
        steps = [step, *posterior.transforms] if place == "first" else [*posterior.transforms, step]
        return posterior.base_dist, steps

    ours, expected = FlowDistribution(*chain(foreign)), TransformedDistribution(*chain(known))
    z, log_q = ours.rsample_and_log_prob((2,))
    assert log_q.shape == (2, 4)
    torch.testing.assert_close(log_q, expected.log_prob(z))
    torch.testing.assert_close(ours.log_prob(z.clone()), expected.log_prob(z))
    assert all(each.shape == (4,) for _, each in ours.trajectory())
