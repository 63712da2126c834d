"""What users of Pyro, zuko, normflows, nflows and flowjax do with a flow, done with every flow here.

Where a package changes torch when it is imported, or a kernel may end the process, the check runs in a process of its
own, which reports one verdict for each name.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import warnings

import pytest
import torch
from cases import FLOWS, SCALES, STEPS, redraw
from torch import nn
from torch.distributions import AffineTransform, Bernoulli, Independent, Normal, TransformedDistribution
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from sylvester import flows
from sylvester.distributions import FlowDistribution
from sylvester.evaluation import log_likelihood
from sylvester.vae import VAE

pytestmark = pytest.mark.usefixtures("float64")

CONTEXT = 2
EVERY_FLOW = pytest.mark.parametrize("name", FLOWS)
EVERY_STEP = pytest.mark.parametrize("name", STEPS)
SIZES = pytest.mark.parametrize("features", [1, 3])


def make(name, features=3, *, scale=0.5, batch=(4,), context=CONTEXT, transforms=2):
    flow = redraw(FLOWS[name](features, context, transforms), scale, name)
    return flow, (torch.randn(*batch, context) if context else None)


def both_directions(posterior, noise, z):
    """A sample with its log-density, and the log-density of a point: all that a flow is asked for."""
    return *posterior.rsample_and_log_prob(noise=noise), posterior.log_prob(z)


# Modules


@EVERY_FLOW
@SIZES
@pytest.mark.parametrize("context", [0, CONTEXT])
def test_functional_call_binds_the_weights_it_is_given(name, features, context):
    flow, h = make(name, features, context=context)
    other = redraw(copy.deepcopy(flow), 1.0, "other")
    noise, z = torch.randn(2, 4, features)
    expected, own = both_directions(other(h), noise, z), both_directions(flow(h), noise, z)
    args = () if h is None else (h,)
    posterior = functional_call(flow, dict(other.named_parameters()), args)
    assert_close(both_directions(posterior, noise, z), expected)
    assert_close(both_directions(flow(*args), noise, z), own)
    assert not torch.equal(expected[2], own[2])


@EVERY_FLOW
@SIZES
def test_weights_given_to_functional_call_receive_the_gradient(name, features):
    flow, h = make(name, features)
    noise, z = torch.randn(2, 4, features)
    own = dict(flow.named_parameters())
    given = {key: value.detach().clone().requires_grad_() for key, value in own.items()}

    def loss(posterior):
        return sum(each.sum() for each in both_directions(posterior, noise, z))

    expected = torch.autograd.grad(loss(flow(h)), list(own.values()), allow_unused=True)
    found = torch.autograd.grad(loss(functional_call(flow, given, (h,))), list(given.values()), allow_unused=True)
    assert_close(found, expected)


@EVERY_FLOW
@SIZES
def test_an_ensemble_is_one_vectorized_call(name, features):
    members = [make(name, features)[0], redraw(make(name, features)[0], 1.0, "other")]
    h, noise, z = torch.randn(4, CONTEXT), *torch.randn(2, 4, features)
    weights, buffers = stack_module_state(members)

    def run(weights, buffers):
        return both_directions(functional_call(members[0], (weights, buffers), (h,)), noise, z)

    together = vmap(run)(weights, buffers)
    for i, member in enumerate(members):
        assert_close(tuple(each[i] for each in together), both_directions(member(h), noise, z))


@EVERY_FLOW
def test_a_bound_distribution_keeps_its_weights_when_others_are_assigned(name):
    flow, h = make(name, 1)
    posterior, noise, z = flow(h), *torch.randn(2, 4, 1)
    expected = both_directions(posterior, noise, z)
    other = redraw(copy.deepcopy(flow), 1.0, "other")
    flow.load_state_dict(other.state_dict(), assign=True)
    assert_close(both_directions(posterior, noise, z), expected)
    assert_close(both_directions(flow(h), noise, z), both_directions(other(h), noise, z))


@EVERY_FLOW
@SIZES
@pytest.mark.parametrize("how", ["assign", "to_empty"])
def test_a_flow_without_storage_becomes_the_one_it_loads(name, features, how):
    flow, h = make(name, features)
    noise, z = torch.randn(2, 4, features)
    with torch.device("meta"):
        other = FLOWS[name](features, CONTEXT, 2)
    assert {parameter.device.type for parameter in other.parameters()} == {"meta"}
    if how == "to_empty":
        other = other.to_empty(device="cpu")
        with torch.no_grad():  # what empty memory may hold
            for parameter in other.parameters():
                parameter.fill_(torch.nan)
    other.load_state_dict(flow.state_dict(), assign=how == "assign")
    assert_close(both_directions(other(h), noise, z), both_directions(flow(h), noise, z))


@EVERY_FLOW
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_flow_is_another_flow(name, how):
    flow, h = make(name)
    noise, z = torch.randn(2, 4, 3)
    expected = both_directions(flow(h), noise, z)
    other = copy.deepcopy(flow) if how == "deepcopy" else pickle.loads(pickle.dumps(flow))
    redraw(flow, 3.0, "changed")
    assert_close(both_directions(other(h), noise, z), expected)
    assert list(other.state_dict()) == list(flow.state_dict())


@EVERY_FLOW
def test_the_mode_and_the_default_precision_change_nothing(name):
    flow, h = make(name)
    noise, z = torch.randn(2, 4, 3)
    expected = both_directions(flow(h), noise, z)
    assert_close(both_directions(flow.eval()(h), noise, z), expected)
    torch.set_default_dtype(torch.float32)  # the fixture sets it back
    assert_close(both_directions(flow(h), noise, z), expected)
    assert flow(h).sample().dtype == torch.float64
    assert flow.float()(h.float()).sample().dtype == torch.float32


@EVERY_FLOW
@pytest.mark.parametrize("direction", ["sample", "log_prob"])
def test_every_parameter_learns_in_either_direction(name, direction):
    flow, h = make(name)
    if direction == "sample":
        z, log_q = flow(h).rsample_and_log_prob((5,))
        ((z**3).sum() + log_q.sum()).backward()
    else:
        flow(h).log_prob(torch.randn(5, 4, 3)).sum().backward()
    for key, parameter in flow.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0, key


@EVERY_FLOW
def test_a_module_may_get_another_metaclass(name):
    """As a framework's module class with a metaclass of its own, Pyro's for one, does to every part of a model."""

    class Meta(type):
        pass

    class Framework(nn.Module, metaclass=Meta):
        pass

    flow, h = make(name)
    noise, z = torch.randn(2, 4, 3)
    expected = both_directions(flow(h), noise, z)
    for module in flow.modules():
        module.__class__ = Meta(type(module).__name__, (type(module), Framework), {})
    assert_close(both_directions(flow(h), noise, z), expected)


# Shapes


@EVERY_FLOW
@pytest.mark.parametrize("scale", SCALES)
def test_directions_undo_each_other_and_their_determinants_cancel(name, scale):
    flow, h = make(name, scale=scale)
    for step in flow(h).transforms:
        z = torch.randn(5, 4, 3)
        for forward in (step, step.inv):
            y, ladj = forward.call_and_ladj(z)
            back, ladj_back = forward.inv.call_and_ladj(y)
            assert ladj.shape == ladj_back.shape == (5, 4)
            assert y.dtype == ladj.dtype == z.dtype
            # How much of a point its image can tell: points do not mix, so sums over them keep each Jacobian apart.
            matrix = torch.stack([vjp(forward, z)[1](row.expand_as(z))[0] for row in torch.eye(3)], -2)
            spread = 1e-12 * torch.linalg.cond(matrix) * (1 + y.abs().amax(-1) + z.abs().amax(-1))
            assert ((back - z).abs().amax(-1) <= spread).all()
            assert ((ladj + ladj_back).abs() <= 10 * spread).all()


@EVERY_FLOW
@pytest.mark.parametrize("points", [(3,), (4, 3), (2, 1, 3), (5, 1, 1, 3), (5, 2, 4, 3)], ids=str)
def test_points_meet_contexts_by_broadcasting(name, points):
    flow, h = make(name, batch=(2, 4))
    z = torch.randn(points)
    posterior = flow(h)
    log_q = posterior.log_prob(z)
    full = torch.broadcast_shapes(z.shape[:-1], (2, 4))
    assert log_q.shape == full
    assert_close(log_q, posterior.log_prob(z.expand(*full, 3)))
    strided = z.expand(*full, 3).transpose(0, -1).contiguous().transpose(0, -1)
    assert_close(log_q, posterior.log_prob(strided))
    before = z.clone()
    posterior.log_prob(z)
    assert torch.equal(z, before)


@EVERY_FLOW
def test_contexts_are_vectorized_as_they_are_batched(name):
    flow, h = make(name)
    noise, z = torch.randn(2, 4, 3)

    def one(h, noise, z):
        return both_directions(flow(h), noise, z)

    assert_close(vmap(one)(h, noise, z), one(h, noise, z))
    assert_close(vmap(one, in_dims=(None, 0, 0))(h[0], noise, z), one(h[0].expand(4, -1), noise, z))
    assert_close(vmap(vmap(one))(h[None], noise[None], z[None])[2][0], one(h, noise, z)[2])


@EVERY_FLOW
def test_gradients_of_each_example(name):
    flow, h = make(name, 2)
    z = torch.randn(4, 2)
    weights = {key: value.detach() for key, value in flow.named_parameters()}

    def loss(weights, h, z):
        return functional_call(flow, weights, (h,)).log_prob(z)

    each = vmap(torch.func.grad(loss), (None, 0, 0))(weights, h, z)
    for i in range(4):
        expected = torch.autograd.grad(flow(h[i]).log_prob(z[i]), list(flow.parameters()), allow_unused=True)
        for found, wanted in zip(each.values(), expected, strict=True):
            assert_close(found[i], torch.zeros_like(found[i]) if wanted is None else wanted)


# Derivatives


@EVERY_FLOW
def test_forward_mode_agrees_with_reverse_mode(name):
    flow, h = make(name)
    noise, z = torch.randn(2, 4, 3)

    def run(h, noise, z):
        return both_directions(flow(h), noise, z)

    along = torch.randn_like(h), torch.randn_like(noise), torch.randn_like(z)
    out, forward = jvp(run, (h, noise, z), along)
    assert_close(out, run(h, noise, z))
    weights = tuple(torch.randn_like(each) for each in out)
    reverse = vjp(run, h, noise, z)[1](weights)
    assert_close(
        sum((w * t).sum() for w, t in zip(weights, forward, strict=True)),
        sum((g * a).sum() for g, a in zip(reverse, along, strict=True)),
    )


@EVERY_FLOW
def test_forward_mode_in_the_weights(name):
    """A Jacobian-vector product of the log-density: Gauss–Newton methods and linearized predictions ask for it."""
    flow, h = make(name)
    z = torch.randn(4, 3)
    weights = {key: value.detach() for key, value in flow.named_parameters()}
    along = {key: torch.randn_like(value) for key, value in weights.items()}

    def run(weights):
        return functional_call(flow, weights, (h,)).log_prob(z)

    _, forward = jvp(run, (weights,), (along,))
    (reverse,) = vjp(run, weights)[1](torch.ones(4))
    assert_close(forward.sum(), sum((reverse[key] * along[key]).sum() for key in weights))


@EVERY_FLOW
@pytest.mark.parametrize("of", ["point", "context"])
def test_hessians_of_the_log_density(name, of):
    flow, h = make(name, 2, batch=())
    z = torch.randn(2)

    def log_prob(point):
        return flow(h).log_prob(point) if of == "point" else flow(point).log_prob(z)

    point = z if of == "point" else h
    expected = torch.autograd.functional.hessian(log_prob, point)
    assert_close(expected, expected.mT)  # as it is not where a hand-written backward forgets one of its inputs
    assert_close(jacfwd(log_prob)(point), jacrev(log_prob)(point))
    assert_close(jacrev(jacrev(log_prob))(point), expected)
    assert_close(hessian(log_prob)(point), expected)  # forward over reverse


@EVERY_FLOW
def test_first_and_second_derivatives_of_a_sample_reach_the_context(name):
    flow, h = make(name, 2, batch=())
    h.requires_grad_()
    noise = torch.randn(2)

    def run(h):
        return flow(h).rsample_and_log_prob(noise=noise)

    assert torch.autograd.gradcheck(run, (h,))
    assert torch.autograd.gradgradcheck(run, (h,))


@EVERY_FLOW
@pytest.mark.parametrize("direction", ["sample", "log_prob"])
def test_activations_may_be_recomputed(name, direction):
    flow, h = make(name)
    h.requires_grad_()
    points = torch.randn(5, 4, 3)

    def run(h, points):
        if direction == "log_prob":
            return flow(h).log_prob(points)
        z, log_q = flow(h).rsample_and_log_prob(noise=points)
        return (z**3).sum(-1) + log_q

    inputs = [h, *flow.parameters()]
    plain = run(h, points)
    recomputed = checkpoint(run, h, points, use_reentrant=False)
    assert_close(recomputed, plain)
    assert_close(
        torch.autograd.grad(recomputed.sum(), inputs, allow_unused=True),
        torch.autograd.grad(plain.sum(), inputs, allow_unused=True),
    )


class BothDirections(nn.Module):
    """What a service would be given: samples from noise, and the log-density of points."""

    def __init__(self, flow):
        super().__init__()
        self.flow = flow

    def forward(self, h, noise, z):
        return both_directions(self.flow(h), noise, z)


@pytest.mark.parametrize("name", flows.FAMILIES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_exports(name):
    flow, h = make(name, transforms=1)
    noise, z = torch.randn(2, 4, 3)
    program = torch.export.export(BothDirections(flow), (h, noise, z)).module()
    for _ in range(2):
        assert_close(program(h, noise, z), both_directions(flow(h), noise, z))
        h, noise, z = h + 1, noise.flip(0), z - 1


# Precision of the inverse


def hostile(name, features, context=0):
    """Networks so steep that substitution, coordinate after coordinate, ends nowhere near the point it came from."""
    torch.manual_seed(0)
    flow = FLOWS[name](features, context, 4).float()
    with torch.no_grad():
        for parameter in flow.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.4)
    return flow


@pytest.mark.parametrize(("name", "features"), [("iaf", 64), ("maf", 16), ("inverted-iaf", 64)])
def test_an_inverse_that_fails_is_refused_where_arguments_are_checked(name, features):
    flow = hostile(name, features)
    with torch.no_grad():
        posterior = flow()
        checked = FlowDistribution(posterior.base_dist, posterior.transforms, validate_args=True)
        with pytest.raises(ValueError, match=r"Expected .*(inverse|residual)"):
            checked.log_prob(checked.rsample((5,)).clone())


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_an_inverse_that_holds_is_not_refused(name, scale):
    flow, h = make(name, 5, scale=scale)
    posterior = flow(h)
    checked = FlowDistribution(posterior.base_dist, posterior.transforms, validate_args=True)
    z, log_q = checked.rsample_and_log_prob((20,))
    assert_close(checked.log_prob(z.clone()), log_q, rtol=1e-6, atol=1e-6)


def test_an_evaluation_whose_samples_cannot_be_trusted_warns_once():
    torch.set_default_dtype(torch.float32)
    vae = VAE(nn.Linear(6, CONTEXT), hostile("maf", 16, CONTEXT), PixelDecoder(16, 6))
    x = torch.randint(2, (3, 6)).float()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log_likelihood(vae, x, samples=20, chunk=10)
    told = [str(each.message) for each in caught if "maf" in str(each.message).lower()]
    assert len(told) == 1
    assert "16" in told[0]


class PixelDecoder(nn.Module):
    def __init__(self, features, pixels):
        super().__init__()
        self.linear = nn.Linear(features, pixels)

    def forward(self, z):
        return Independent(Bernoulli(logits=self.linear(torch.tanh(z))), 1)


# Where the released code starts


@pytest.mark.parametrize("family", [flows.IAF, flows.MeanOnlyIAF, flows.MAF], ids=lambda family: family.__name__)
def test_masked_networks_start_as_the_released_code(family):
    """Weights N(0, 2/outputs), where mean and gate are layers of their own, and zero biases but for the gate's 1."""
    features, width = 16, 320
    torch.manual_seed(0)
    flow = family(features, 0, 4, hidden_features=(width, width), init="torch")
    of_the_base = {id(parameter) for parameter in flow.base.parameters()}
    networks = [parameter for parameter in flow.parameters() if id(parameter) not in of_the_base]
    weights, biases = ([each for each in networks if each.dim() == axes] for axes in (2, 1))
    assert len(weights) == len(biases) == 4 * 3
    for weight in weights:
        outputs = width if len(weight) == width else features
        assert weight[weight != 0].std().item() == pytest.approx((2 / outputs) ** 0.5, rel=0.1)
    assert all(not bias.any() for bias in biases if len(bias) == width)
    last = [sorted(bias.tolist()) for bias in biases if len(bias) != width]
    gates = features if family is flows.IAF else 0
    zeros = features if family is flows.MeanOnlyIAF else 2 * features - gates
    assert last == [[0.0] * zeros + [1.0] * gates] * 4


# Processes of their own


def report(name, check):
    """One verdict: nothing, or what went wrong."""
    try:
        check()
        verdict = ""
    except Exception as error:
        verdict = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps([name, verdict]) + "\n")
    sys.stdout.flush()


def verdicts(function, module="test_peer_contract", **environment):
    """What a function of this file, or of another one, reports from a process of its own."""
    path = os.pathsep.join(map(os.path.abspath, [os.path.dirname(__file__), *sys.path]))
    with tempfile.TemporaryDirectory() as folder:  # where libraries leave their logs
        process = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", f"import {module}; {module}.{function}()"],
            env={**os.environ, **environment, "PYTHONPATH": path},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
        )
    found = dict(json.loads(line) for line in process.stdout.splitlines())
    ended = f"the process ended with {process.returncode} before it came here: {process.stderr[-500:]}"
    return lambda name: found.get(name, ended)


@pytest.fixture(scope="module")
def apart():
    # Some machines advertise instructions for bfloat16 that they do not grant.
    return verdicts("memory_and_low_precision", ONEDNN_MAX_CPU_ISA="AVX512_CORE_FP16")


def memory_and_low_precision():
    # The memory comes first: what is counted is the most that the process ever had.
    before, after = (most_memory_for(points) for points in (10, 2000))
    report("memory", lambda: check_memory(after - before))
    for name in FLOWS:
        flow, h = make(name, 5, scale=1.0)
        report(f"autocast {name}", lambda flow=flow, h=h: check_autocast(flow, h))
        report(f"gradients {name}", lambda flow=flow, h=h: check_autocast_gradients(flow, h))
        report(f"low context {name}", lambda flow=flow, h=h: check_low_context(flow, h))
    for name in STEPS:
        report(f"step {name}", lambda name=name: check_autocast_of_a_step(name))
    for name in FLOWS:
        for dtype in (torch.float16, torch.bfloat16):
            report(f"{dtype} {name}", lambda name=name, dtype=dtype: check_refused(name, dtype))


def most_memory_for(points):
    """In megabytes, after the gradient of the direction of IAF that takes a pass for each coordinate."""
    flows.IAF(64, 0, 1)().log_prob(torch.randn(points, 64)).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def check_memory(megabytes):
    assert megabytes < 200, f"took {megabytes:.0f} MB"


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def check_autocast(flow, h):
    noise, z = torch.randn(2, 4, 5)
    expected = both_directions(flow(h), noise, z)
    with autocast():
        assert_close(both_directions(flow(h), noise, z), expected)
        posterior = flow(h)
    assert_close(both_directions(posterior, noise, z), expected)  # bound inside, used outside
    posterior = flow(h)
    with autocast():
        assert_close(both_directions(posterior, noise, z), expected)  # and the other way round
        assert posterior.entropy(3).dtype == torch.float32


def check_autocast_gradients(flow, h):
    noise, z = torch.randn(2, 4, 5)
    expected = torch.autograd.grad(
        sum(each.sum() for each in both_directions(flow(h), noise, z)), list(flow.parameters()), allow_unused=True
    )
    with autocast():
        loss = sum(each.sum() for each in both_directions(flow(h), noise, z))
    found = torch.autograd.grad(loss, list(flow.parameters()), allow_unused=True)
    assert_close(found, expected, rtol=1e-4, atol=1e-4)


def check_low_context(flow, h):
    """What an encoder under autocast gives."""
    noise, z = torch.randn(2, 4, 5)
    h = h.bfloat16()
    expected = both_directions(flow(h.float()), noise, z)
    with autocast():
        assert_close(both_directions(flow(h), noise, z), expected)


def check_autocast_of_a_step(name):
    case = STEPS[name]
    step = case.build(*case.leaves(name, 5, (4,), 1.0, torch.float32))
    z = torch.randn(3, 4, 5)
    expected = step.call_and_ladj(z), step.inv.call_and_ladj(z)
    with autocast():
        assert_close((step.call_and_ladj(z), step.inv.call_and_ladj(z)), expected)
        assert_close((step(z), step.inv(z)), (expected[0][0], expected[1][0]))


def check_refused(name, dtype):
    model = nn.ModuleDict({"encoder": nn.Linear(CONTEXT, CONTEXT), "flow": FLOWS[name](5, CONTEXT, 1)})
    try:
        model.to(dtype)["flow"](torch.randn(4, CONTEXT, dtype=dtype)).rsample_and_log_prob()
    except (TypeError, ValueError) as error:
        if "Expected" in str(error) and "float32" in str(error):
            return
        raise
    raise AssertionError("a sample, and no sentence")


@EVERY_FLOW
@pytest.mark.parametrize("what", ["autocast", "gradients", "low context"])
def test_autocast_ends_at_the_flow(name, what, apart):
    assert apart(f"{what} {name}") == ""


@EVERY_STEP
def test_autocast_ends_at_the_step(name, apart):
    assert apart(f"step {name}") == ""


@EVERY_FLOW
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_refused_with_a_sentence(name, dtype, apart):
    assert apart(f"{dtype} {name}") == ""


def installed(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def beside_zuko():
    return verdicts("with_zuko")


def with_zuko():
    torch.set_default_dtype(torch.float64)
    before = {}
    for name in FLOWS:
        flow, h = make(name)
        noise, z = torch.randn(2, 4, 3)
        before[name] = flow, h, noise, z, both_directions(flow(h), noise, z)

    import zuko

    def unchanged(flow, h, noise, z, expected):
        assert_close(both_directions(flow(h), noise, z), expected)
        posterior = flow(h)
        foreign = FlowDistribution(posterior.base_dist, [*posterior.transforms, AffineTransform(1.0, 2.0)])
        point, log_q = foreign.rsample_and_log_prob((5,))
        assert_close(foreign.log_prob(point.clone()), log_q)
        assert_close(log_q, posterior.log_prob((point - 1) / 2) - 3 * torch.tensor(2.0).log())

    for name, case in before.items():
        report(f"beside {name}", lambda case=case: unchanged(*case))

    t = zuko.transforms
    elementwise = {
        "identity": t.IdentityTransform(),
        "softclip": t.SoftclipTransform(bound=5.0),
        "additive": t.AdditiveTransform(torch.randn(3)),
        "affine": t.MonotonicAffineTransform(torch.randn(3), torch.randn(3)),
        "power": t.SignedPowerTransform(torch.randn(3)),
        "spline": t.MonotonicRQSTransform(torch.randn(3, 8), torch.randn(3, 8), torch.randn(3, 7)),
        "dependent": t.DependentTransform(t.MonotonicAffineTransform(torch.randn(3), torch.randn(3)), 1),
        "permutation": t.PermutationTransform(torch.tensor([2, 0, 1])),
        "rotation": t.RotationTransform(torch.randn(3, 3)),
    }

    def inside_ours(foreign):
        flow, h = make("planar")
        posterior = flow(h)
        chain = [*posterior.transforms, foreign]
        ours, plain = (kind(posterior.base_dist, chain) for kind in (FlowDistribution, TransformedDistribution))
        z, log_q = ours.rsample_and_log_prob((5,))
        assert log_q.shape == (5, 4)
        assert_close(log_q, plain.log_prob(z), rtol=1e-6, atol=1e-6)
        assert_close(ours.log_prob(z.clone()), plain.log_prob(z), rtol=1e-6, atol=1e-6)

    for name, foreign in elementwise.items():
        report(f"inside ours {name}", lambda foreign=foreign: inside_ours(foreign))

    def inside_theirs(name):
        case = STEPS[name]
        step = case.build(*case.leaves(name, 3, (), 0.5))
        base = Independent(Normal(torch.zeros(3), torch.ones(3)), 1)
        x = torch.randn(5, 3)
        for each in (step, step.inv):
            theirs = zuko.distributions.NormalizingFlow(t.ComposedTransform(each, t.AdditiveTransform(0.5)), base)
            y, ladj = each.call_and_ladj(x)
            assert_close(theirs.log_prob(x), base.log_prob(y + 0.5) + ladj)
            z, log_q = theirs.rsample_and_log_prob((4,))
            assert_close(theirs.log_prob(z), log_q)

    for name in STEPS:
        report(f"inside theirs {name}", lambda name=name: inside_theirs(name))


@installed("zuko")
@EVERY_FLOW
def test_zuko_may_be_imported_beside_it(name, beside_zuko):
    assert beside_zuko(f"beside {name}") == ""


@installed("zuko")
@pytest.mark.parametrize(
    "name",
    ["identity", "softclip", "additive", "affine", "power", "spline", "dependent", "permutation", "rotation"],
)
def test_zukos_transforms_serve_in_our_distribution(name, beside_zuko):
    assert beside_zuko(f"inside ours {name}") == ""


@installed("zuko")
@EVERY_STEP
def test_our_steps_serve_in_zukos_distribution(name, beside_zuko):
    assert beside_zuko(f"inside theirs {name}") == ""


@pytest.fixture(scope="module")
def beside_pyro():
    return verdicts("with_pyro")


def with_pyro():
    import pyro
    from pyro.nn.module import PyroModule, PyroSample, to_pyro_module_

    torch.set_default_dtype(torch.float64)

    def converted(name):
        flow, h = make(name)
        noise, z = torch.randn(2, 4, 3)
        expected = both_directions(flow(h), noise, z)
        other = copy.deepcopy(flow)
        to_pyro_module_(other)
        assert all(isinstance(module, PyroModule) for module in other.modules())
        assert_close(both_directions(other(h), noise, z), expected)
        # A weight with a prior: the flow is a function of what is drawn for it.
        key, weight = next(iter(flow.named_parameters()))
        owner, _, attribute = key.rpartition(".")
        prior = pyro.distributions.Normal(torch.zeros_like(weight), 1.0).to_event(weight.dim())
        setattr(other.get_submodule(owner), attribute, PyroSample(prior))
        assert both_directions(other(h), noise, z)[1].shape == (4,)

    def registered(name):
        flow, h = make(name)
        pyro.clear_param_store()
        pyro.module("flow", flow)
        assert len(pyro.get_param_store()) == len(list(flow.parameters()))
        assert flow(h).rsample().shape == (4, 3)

    def subclassed(family):
        flow = PyroModule[family](3, CONTEXT, 2)
        assert isinstance(flow, family)
        assert isinstance(flow, PyroModule)
        assert flow(torch.randn(4, CONTEXT)).rsample((2,)).shape == (2, 4, 3)

    def step(name):
        case = STEPS[name]
        each = case.build(*case.leaves(name, 3, (), 0.5))
        base = pyro.distributions.Normal(torch.zeros(3), 1.0).to_event(1)
        for direction in (each, each.inv):
            distribution = pyro.distributions.TransformedDistribution(base, [direction])
            z = pyro.sample("z", distribution.expand([4]))
            assert z.shape == (4, 3)
            back, ladj = direction.inv.call_and_ladj(z)
            assert_close(distribution.log_prob(z.clone()), base.log_prob(back) + ladj)

    for name in FLOWS:
        report(f"converted {name}", lambda name=name: converted(name))
        report(f"registered {name}", lambda name=name: registered(name))
    for name, family in flows.FAMILIES.items():
        report(f"subclassed {name}", lambda family=family: subclassed(family))
    for name in STEPS:
        report(f"step {name}", lambda name=name: step(name))


@installed("pyro")
@EVERY_FLOW
@pytest.mark.parametrize("what", ["converted", "registered"])
def test_a_flow_becomes_a_module_of_pyro(name, what, beside_pyro):
    assert beside_pyro(f"{what} {name}") == ""


@installed("pyro")
@pytest.mark.parametrize("name", flows.FAMILIES)
def test_a_family_is_subclassed_by_pyro(name, beside_pyro):
    assert beside_pyro(f"subclassed {name}") == ""


@installed("pyro")
@EVERY_STEP
def test_a_step_serves_in_pyros_distributions(name, beside_pyro):
    assert beside_pyro(f"step {name}") == ""


@pytest.mark.skipif(sys.platform != "linux", reason="counts resident pages as Linux does")
def test_the_gradient_of_an_inverse_takes_bounded_memory(apart):
    """Two thousand points of 64 features are half a megabyte, and a network's activations for them four."""
    assert apart("memory") == ""
