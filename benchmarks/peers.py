"""The flows that other libraries have too, at the same sizes and for the same work.

Each function returns how to draw z with its log-density (or, with ``density``, how to evaluate the density of given
points) and the parameters to differentiate for. A peer is used as its documentation shows. Where it leaves something
open, it gets what the library has: networks of two hidden layers of the same width with ELU, one linear layer from the
context to the parameters, a diagonal Gaussian base with learned mean and scale. Pyro, zuko and nflows feed the context
to every masked network; the library adds one vector to its first layer, as the paper does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import elu

from benchmarks.sizes import Size
from benchmarks.tasks_reference import Task, forward_backward, without_gradient

Drawing = tuple[Callable[[], tuple[Tensor, Tensor]], list[nn.Parameter]]


class Outputs(nn.Module):
    """One linear layer whose outputs are several parameters."""

    def __init__(self, context: int, *sizes: int) -> None:
        super().__init__()
        self.linear, self.sizes = nn.Linear(context, sum(sizes)), sizes

    def forward(self, context: Tensor) -> tuple[Tensor, ...]:
        return self.linear(context).split(self.sizes, -1)


def pyro(size: Size, flow: str, conditional: bool, density: bool) -> Drawing:
    import pyro.distributions as dist
    from pyro.distributions import transforms
    from pyro.nn import ConditionalAutoRegressiveNN

    assert (conditional, density) == (True, False)
    d, e, k = size.features, size.context, size.transforms
    steps: list[nn.Module]
    if flow == "planar":
        steps = [transforms.ConditionalPlanar(Outputs(e, 1, d, d)) for _ in range(k)]
    elif flow == "radial":
        steps = [transforms.ConditionalRadial(Outputs(e, d, 1, 1)) for _ in range(k)]
    elif flow == "householder":
        steps = [transforms.ConditionalHouseholder(d, Outputs(e, *[d] * k), count_transforms=k)]
    else:
        networks = [ConditionalAutoRegressiveNN(d, e, [size.hidden] * 2, nonlinearity=nn.ELU()) for _ in range(k)]
        steps = [transforms.ConditionalAffineAutoregressive(network, stable=True) for network in networks]
    base, h = Outputs(e, d, d), torch.randn(size.batch, e)

    def draw() -> tuple[Tensor, Tensor]:
        mean, raw_variance = base(h)
        normal = dist.Normal(mean, (nn.functional.softplus(raw_variance) + 1e-8).sqrt()).to_event(1)
        q = dist.ConditionalTransformedDistribution(normal, steps).condition(h)
        z = q.rsample()
        return z, q.log_prob(z)

    return draw, [*base.parameters(), *(p for step in steps for p in step.parameters())]


def normflows(size: Size, flow: str, conditional: bool, density: bool) -> Drawing:
    import normflows as nf

    assert (conditional, density) == (False, False)
    step = {"planar": nf.flows.Planar, "radial": nf.flows.Radial}[flow]
    model = nf.NormalizingFlow(
        nf.distributions.DiagGaussian(size.features), [step((size.features,)) for _ in range(size.transforms)]
    )
    return lambda: model.sample(size.batch), list(model.parameters())


def zuko(size: Size, flow: str, conditional: bool, density: bool) -> Drawing:
    import zuko

    assert conditional
    options = {"hidden_features": (size.hidden,) * 2, "activation": nn.ELU}
    if flow == "nice":  # zuko's class of this name is affine unless told otherwise
        options |= {"univariate": zuko.transforms.AdditiveTransform, "shapes": [()]}
    family = {"maf": zuko.flows.MAF, "nice": zuko.flows.NICE, "realnvp": zuko.flows.RealNVP}[flow]
    model = family(size.features, size.context, transforms=size.transforms, **options)
    h, points = torch.randn(size.batch, size.context), torch.randn(size.batch, size.features)
    if density:
        return lambda: (points, model(h).log_prob(points)), list(model.parameters())
    return lambda: model(h).rsample_and_log_prob(), list(model.parameters())


def nflows(size: Size, flow: str, conditional: bool, density: bool) -> Drawing:
    from nflows.flows.autoregressive import MaskedAutoregressiveFlow

    assert (flow, conditional) == ("maf", False)
    # A feedforward block is one more hidden layer; its blocks take no context.
    model = MaskedAutoregressiveFlow(
        size.features,
        size.hidden,
        num_layers=size.transforms,
        num_blocks_per_layer=1,
        use_residual_blocks=False,
        activation=elu,
    )
    points = torch.randn(size.batch, size.features)
    if density:
        return lambda: (points, model.log_prob(points)), list(model.parameters())
    return lambda: model.sample_and_log_prob(size.batch), list(model.parameters())


def family(
    make: Callable[..., Drawing],
    size: Size,
    flow: str,
    conditional: bool,
    density: bool = False,
    backward: bool = False,
) -> Task:
    draw, parameters = make(size, flow, conditional, density)
    return forward_backward(draw, parameters) if backward else without_gradient(draw)


TASKS: dict[str, dict[str, Callable[..., Task]]] = {
    make.__name__: {"family": partial(family, make)} for make in (pyro, normflows, zuko, nflows)
}
