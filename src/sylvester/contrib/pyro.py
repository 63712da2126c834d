"""Flows in Pyro: as an automatic guide, as the distribution of a sample statement, and as a transform.

    guide = AutoFlow(model, partial(TriangularSylvester, transforms=8))   # for any model with continuous latents

    flow = as_pyro(TriangularSylvester(2, context=64, transforms=8))      # in an amortized guide of one's own
    pyro.sample("z", flow(h))

    AutoNormalizingFlow(model, lambda features: PyroFlowTransform(Planar(features)))

The log-density of a fresh sample comes from the draw in all three: no step is inverted. `log_density` makes a function
of a model, for `sylvester.diagnostics.diagnose` and `sylvester.inference.fit`.

Needs Pyro: ``pip install "sylvester[pyro]"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn
from torch.distributions import IndependentTransform, Transform, biject_to, constraints

from sylvester.diagnostics import LogDensity
from sylvester.distributions import FlowDistribution
from sylvester.flows import Flow
from sylvester.flows.affine import AffineStep
from sylvester.flows.base import constraint_of
from sylvester.random import stream
from sylvester.transforms import call_and_ladj

try:
    import pyro
    import pyro.distributions as dist
    from pyro import poutine
    from pyro.distributions import TransformModule
    from pyro.distributions.torch_distribution import TorchDistributionMixin
    from pyro.infer.autoguide import AutoContinuous
    from pyro.infer.autoguide.initialization import init_to_median
    from pyro.poutine.util import prune_subsample_sites
except ModuleNotFoundError as error:
    if error.name != "pyro":
        raise
    raise ModuleNotFoundError(
        'sylvester.contrib.pyro needs pyro-ppl, which is not installed: pip install "sylvester[pyro]"', name="pyro"
    ) from error

__all__ = ["AutoFlow", "PyroFlow", "PyroFlowDistribution", "PyroFlowTransform", "as_pyro", "log_density"]

Affine = Literal["triangular", "diagonal"]

#: A Pyro model, and a function of the latent variables' number that makes a flow over so many.
Model = Callable[..., Any]
MakeFlow = Callable[[int], Flow]


class PyroFlowDistribution(FlowDistribution, TorchDistributionMixin):  # type: ignore[misc, override]
    """A flow's distribution with what Pyro asks of one: ``to_event``, ``mask``, ``expand_by``, sample statements."""


class PyroFlow(Flow):
    """A flow whose distributions are Pyro's, too. It shares the modules of the flow that it is made of."""

    def __init__(self, flow: Flow):
        super().__init__(flow.base, flow.steps)

    def forward(self, context: Tensor | None = None) -> PyroFlowDistribution:
        return as_pyro(super().forward(context))


@overload
def as_pyro(flow: Flow) -> PyroFlow: ...


@overload
def as_pyro(flow: FlowDistribution) -> PyroFlowDistribution: ...


def as_pyro(flow: Flow | FlowDistribution) -> PyroFlow | PyroFlowDistribution:
    """The same flow, or what it gave, for ``pyro.sample("z", flow(h))``.

    Parameters, and their names in ``state_dict``, are the flow's own; in a guide, ``pyro.module("flow", flow)`` or a
    `PyroModule` that has the flow for an attribute makes them known to Pyro.

    >>> from sylvester.flows import Planar
    >>> flow = as_pyro(Planar(2, context=3, transforms=4))
    >>> with pyro.plate("data", 5):
    ...     z = pyro.sample("z", flow(torch.zeros(5, 3)))
    >>> z.shape
    torch.Size([5, 2])
    """
    if isinstance(flow, FlowDistribution):
        return PyroFlowDistribution(flow.base_dist, flow.transforms, validate_args=flow._validate_args)
    if isinstance(flow, Flow):
        return PyroFlow(flow)
    raise ValueError(f"Expected a flow or a flow's distribution; got {type(flow).__name__}")


class PyroFlowTransform(TransformModule):
    """A flow without context as a transform of standard-normal noise, for Pyro's own guides and distributions.

        x -> t_K(… t_1(μ + σ x))

    The flow's base is its first, affine, step. A pass in either direction remembers its points and its ladj, so that
    the density of a fresh sample takes no inverse; not longer than points and parameters are what they were.

    >>> from pyro.infer.autoguide import AutoNormalizingFlow
    >>> from sylvester.flows import Planar
    >>> def model():
    ...     return pyro.sample("scale", dist.Gamma(2.0, 2.0))
    >>> guide = AutoNormalizingFlow(model, lambda features: PyroFlowTransform(Planar(features, transforms=4)))
    >>> bool(guide()["scale"] > 0)
    True
    """

    domain = constraints.real_vector
    bijective = True

    def __init__(self, flow: Flow):
        # Torch's cache knows nothing of parameters that have moved on; the memory below does.
        super().__init__(cache_size=0)
        _check_flow(flow)
        self.flow, self.features = flow, flow.features
        q = flow()
        self.codomain, self._event_shape = q.support, q.event_shape
        self._known: _Known | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._known is not None and self._known.answers(self, x=x):
            return self._known.y
        y, ladj = self._forward(x)
        self._known = _Known.of(self, x, y, ladj)
        return y

    def _inv_call(self, y: Tensor) -> Tensor:
        if self._known is not None and self._known.answers(self, y=y):
            return self._known.x
        x, ladj = self._backward(y)
        self._known = _Known.of(self, x, y, ladj)
        return x

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        if self._known is not None and self._known.answers(self, x=x, y=y):
            return self._known.ladj
        return self._forward(x)[1]

    def _call(self, x: Tensor) -> Tensor:
        return self._forward(x)[0]

    def _inverse(self, y: Tensor) -> Tensor:
        return self._backward(y)[0]

    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = self.flow()
        normal = q.base_dist.base_dist
        z, ladj = normal.loc + normal.scale * x, normal.scale.log().sum(-1)
        for transform in q.transforms:
            z, more = call_and_ladj(transform, z)
            ladj = ladj + more
        return z, ladj.expand(x.shape[:-1])

    def _backward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        q = self.flow()
        normal, ladj = q.base_dist.base_dist, q.base_dist.base_dist.scale.log().sum(-1)
        for transform in reversed(q.transforms):
            y, less = call_and_ladj(transform.inv, y)
            ladj = ladj - less
        return (y - normal.loc) / normal.scale, ladj.expand(y.shape[:-1])

    def forward_shape(self, shape: Sequence[int]) -> torch.Size:
        return _replaced(shape, torch.Size((self.features,)), self._event_shape)

    def inverse_shape(self, shape: Sequence[int]) -> torch.Size:
        return _replaced(shape, self._event_shape, torch.Size((self.features,)))

    def with_cache(self, cache_size: int = 1) -> PyroFlowTransform:
        return self

    def clear_cache(self) -> None:
        self._known = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": None, "_inv": None}


class _Known:
    """A transform's last points and ladj, while points and parameters are what they were."""

    def __init__(self, transform: PyroFlowTransform, x: Tensor, y: Tensor, ladj: Tensor):
        self.x, self.y, self.ladj = x, y, ladj
        self.state, self.with_grad = self._state(transform), torch.is_grad_enabled()

    @classmethod
    def of(cls, transform: PyroFlowTransform, x: Tensor, y: Tensor, ladj: Tensor) -> _Known | None:
        # Tensors of inference mode do not count their changes.
        return None if x.is_inference() or y.is_inference() else cls(transform, x, y, ladj)

    def answers(self, transform: PyroFlowTransform, *, x: Tensor | None = None, y: Tensor | None = None) -> bool:
        same = (x is None or x is self.x) and (y is None or y is self.y)
        # Without a graph, a point is a constant, and no answer to who wants gradients.
        usable = self.with_grad or not torch.is_grad_enabled()
        return same and usable and self.state == self._state(transform)

    def _state(self, transform: PyroFlowTransform) -> list[tuple[int, int]]:
        parameters = transform.flow.parameters()
        return [(id(tensor), tensor._version) for tensor in (self.x, self.y, *parameters)]


class AutoFlow(AutoContinuous):
    """A guide for any model with continuous latent variables: a flow over all of them.

    Each variable is brought to the real line by torch's bijection onto its support; the flow is the joint distribution
    of all these numbers. An affine step z' = m + L z comes last, so that the guide starts at ``init_loc_fn``'s values
    with ``init_scale`` for standard deviation, and a Gaussian posterior of any covariance is within reach of any flow.

    Args:
        model: a Pyro model.
        flow: makes a flow of so many features, as ``partial(TriangularSylvester, transforms=8)`` does.
        init_loc_fn: where each variable starts: see ``pyro.infer.autoguide.initialization``.
        init_scale: the standard deviation at the start, on the real line. One is wider than Pyro's own guides start, as
            it found better posteriors of eight schools, centred or not.
        affine: L is "triangular", or "diagonal" where D² parameters are too many.
        quantile_draws: how many :meth:`quantiles` and :meth:`median` are made of.

    >>> from functools import partial
    >>> from pyro.infer import SVI, Trace_ELBO
    >>> from sylvester.flows import TriangularSylvester
    >>> def model(heads, tosses):
    ...     p = pyro.sample("p", dist.Beta(1.0, 1.0))
    ...     pyro.sample("heads", dist.Binomial(tosses, p), obs=heads)
    >>> guide = AutoFlow(model, partial(TriangularSylvester, transforms=2))
    >>> optimizer = pyro.optim.ClippedAdam({"lr": 0.02})
    >>> svi = SVI(model, guide, optimizer, Trace_ELBO(num_particles=32, vectorize_particles=True))
    >>> data = torch.tensor(7.0), torch.tensor(10.0)
    >>> losses = [svi.step(*data) for _ in range(300)]
    >>> abs(guide.median(*data)["p"] - 0.676) < 0.03  # Beta(8, 4)
    tensor(True)
    """

    def __init__(
        self,
        model: Model,
        flow: MakeFlow,
        *,
        init_loc_fn: Callable[..., Any] = init_to_median,
        init_scale: float = 1.0,
        affine: Affine = "triangular",
        quantile_draws: int = 10_000,
    ):
        if isinstance(flow, nn.Module) or not callable(flow):
            raise ValueError(
                "Expected a function that makes a flow of so many features, such as partial(TriangularSylvester, "
                f"transforms=8); got {type(flow).__name__}"
            )
        if not 0 < init_scale < math.inf:
            raise ValueError(f"Expected a finite init_scale > 0; got {init_scale}")
        if affine not in get_args(Affine):
            raise ValueError(f"Expected affine in {get_args(Affine)}; got {affine!r}")
        if quantile_draws < 2:
            raise ValueError(f"Expected quantile_draws >= 2; got {quantile_draws}")
        super().__init__(model, init_loc_fn=init_loc_fn)
        self._make_flow, self._init_scale, self._affine = flow, init_scale, affine
        self._quantile_draws = quantile_draws

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        loc = self._init_loc()
        flow = self._make_flow(self.latent_dim)
        _check_flow(flow)
        if flow.features != self.latent_dim:
            raise ValueError(f"Expected a flow of {self.latent_dim} features, the model's; got {flow.features}")
        if any(constraint_of(step) is not None for step in flow.steps):
            raise ValueError("Expected a flow of real vectors, as the guide sees to the supports; got one onto its own")
        flow.to(loc)
        with torch.no_grad():
            base = flow().base_dist.base_dist
            outer = AffineStep(loc, self._init_scale / base.scale, -base.loc, triangular=self._affine == "triangular")
        self.flow = PyroFlow(Flow(flow.base, [*flow.steps, outer]))

    def _made(self) -> PyroFlow:
        flow: PyroFlow | None = getattr(self, "flow", None)
        if flow is None:
            raise ValueError("Expected a guide that was called once, as it learns its latents from the model; got none")
        return flow

    def get_posterior(self, *args: Any, **kwargs: Any) -> PyroFlowDistribution:
        """The distribution of the latent variables on the real line, ``(latent_dim,)``."""
        return self._made()()

    def get_base_dist(self) -> Any:
        like = next(self._made().parameters())
        return dist.Normal(like.new_zeros(self.latent_dim), like.new_ones(self.latent_dim)).to_event(1)

    def get_transform(self, *args: Any, **kwargs: Any) -> PyroFlowTransform:
        """From noise to the latent variables on the real line, as ``NeuTraReparam`` wants it."""
        return PyroFlowTransform(self._made())

    @torch.no_grad()
    def quantiles(self, quantiles: Sequence[float] | Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Quantiles of each number of each latent variable, ``(len(quantiles), *shape)``, from draws.

        The draws are always made of the same noise, and of its negative, so that a symmetric posterior has its centre
        for median. Where a variable is not free in each number, as on a simplex, they are, as Pyro's are, the image of
        the quantiles on the real line, which lies in the support.
        """
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        q = self.get_posterior(*args, **kwargs)
        like = q.base_dist.base_dist.loc
        levels = torch.as_tensor(quantiles, dtype=like.dtype, device=like.device)
        if levels.dim() != 1 or not ((levels >= 0) & (levels <= 1)).all():
            raise ValueError(f"Expected a list of quantiles between 0 and 1; got {quantiles}")
        half = torch.randn(self._quantile_draws // 2, len(like), generator=stream("quantiles"), dtype=torch.float64)
        latent, _ = q.rsample_and_log_prob(noise=torch.cat([half, -half]).to(like))
        result = {}
        for site, draws in _unpacked(self, latent, max(len(site["fn"].batch_shape) for site in _sites(self))):
            bijection = biject_to(site["fn"].support)
            values = (
                _quantiles(bijection(draws), levels)
                if _elementwise(bijection)
                else bijection(_quantiles(draws, levels))
            )
            result[site["name"]] = values.reshape(len(levels), *site["value"].shape)
        return result

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The median of each number of each latent variable: see :meth:`quantiles`."""
        return {name: values[0] for name, values in self.quantiles([0.5], *args, **kwargs).items()}


def log_density(guide: AutoContinuous, *args: Any, **kwargs: Any) -> LogDensity:
    """The model of a guide at given data, as a function ``(*, D) -> (*)`` of its latent variables on the real line.

    ``guide`` is an `AutoFlow` or another of Pyro's guides for continuous latents; ``args`` and ``kwargs`` are the
    model's. The function is log p(data, latents), plus what the bijections onto the supports take, and so what
    ``guide.get_posterior()`` stands in for: `sylvester.diagnostics.diagnose` compares the two. The model is called once
    for all points, in a plate of its own, as Pyro does with ``vectorize_particles``.

    >>> from sylvester.diagnostics import diagnose
    >>> from sylvester.flows import Gaussian
    >>> def model(y):
    ...     x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> y = torch.tensor(1.0)
    >>> guide = AutoFlow(model, Gaussian, init_scale=0.5**0.5, init_loc_fn=lambda site: y / 2)
    >>> diagnosis = diagnose(log_density(guide, y), guide.get_posterior())
    >>> abs(diagnosis.log_z - dist.Normal(0.0, 2**0.5).log_prob(y)) < 1e-4
    tensor(True)
    """
    if not isinstance(guide, AutoContinuous):
        raise ValueError(f"Expected a guide of Pyro's for continuous latents; got {type(guide).__name__}")
    if guide.prototype_trace is None:
        guide(*args, **kwargs)
    with poutine.block(), torch.no_grad():
        trace = poutine.trace(guide.model).get_trace(*args, **kwargs)
    nodes = [node for node in trace.nodes.values() if node["type"] == "sample"]
    frames = [frame for node in nodes for frame in node["cond_indep_stack"] if frame.vectorized]
    # Batch axes outside of all plates are in the way of the points' own, as well.
    nesting = max([0, *(-frame.dim for frame in frames), *(len(site["fn"].batch_shape) for site in _sites(guide))])

    def evaluate(latent: Tensor) -> Tensor:
        points = latent.reshape(-1, latent.shape[-1])
        values, total = {}, points.new_zeros(len(points))
        for site, unconstrained in _unpacked(guide, points, nesting):
            bijection = biject_to(site["fn"].support)
            value = values[site["name"]] = bijection(unconstrained)
            total = total + bijection.log_abs_det_jacobian(unconstrained, value).reshape(len(points), -1).sum(-1)
        # Far points may overflow inside the model: their density is not a number then, and that is no reason to stop.
        with pyro.validation_enabled(False), poutine.block():
            with pyro.plate("_points", len(points), dim=-1 - nesting):
                trace = poutine.trace(poutine.condition(guide.model, data=values)).get_trace(*args, **kwargs)
            trace = prune_subsample_sites(trace)
            trace.compute_log_prob()
        for node in trace.nodes.values():
            if node["type"] == "sample":
                total = total + node["log_prob"].reshape(len(points), -1).sum(-1)
        return total.reshape(latent.shape[:-1])

    return evaluate


def _check_flow(flow: Any) -> None:
    if not isinstance(flow, Flow):
        raise ValueError(f"Expected a flow; got {type(flow).__name__}")
    if flow.context:
        raise ValueError(f"Expected a flow without context; got context={flow.context}")


def _replaced(shape: Sequence[int], old: torch.Size, new: torch.Size) -> torch.Size:
    shape = torch.Size(shape)
    if shape[len(shape) - len(old) :] != old:
        raise ValueError(f"Expected a shape that ends in {tuple(old)}; got {tuple(shape)}")
    return shape[: len(shape) - len(old)] + new


def _sites(guide: AutoContinuous) -> list[dict[str, Any]]:
    assert guide.prototype_trace is not None
    return [site for _, site in guide.prototype_trace.iter_stochastic_nodes()]


def _unpacked(guide: AutoContinuous, latent: Tensor, nesting: int) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Each site and its numbers on the real line, with an axis for the points (n, D) left of ``nesting`` batch axes."""
    return guide._unpack_latent(latent.reshape(len(latent), *(1 for _ in range(nesting)), -1))


def _elementwise(bijection: Transform) -> bool:
    while isinstance(bijection, IndependentTransform):
        bijection = bijection.base_transform
    return bijection.domain.event_dim == 0


def _quantiles(draws: Tensor, levels: Tensor) -> Tensor:
    """Those of axis 0, linear between order statistics. Torch's own refuse more than 16 million numbers."""
    ordered = draws.movedim(0, -1).contiguous().sort(-1).values.movedim(-1, 0)  # far faster than along axis 0
    place = levels * (len(draws) - 1)
    below = place.floor().long()
    share = (place - below).reshape(-1, *(1 for _ in draws.shape[1:]))
    return torch.lerp(ordered[below], ordered[(below + 1).clamp(max=len(draws) - 1)], share)
