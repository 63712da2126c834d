"""FlowDistribution: a diagonal Gaussian pushed through a chain of steps. MixtureDistribution: some of them, weighted.

z_0 = μ + σ ε,    z_k = t_k(z_{k−1}),    log q(z_K) = log N(z_0; μ, σ²) − Σ_k ladj_k
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal, Transform, TransformedDistribution

from sylvester.linalg.precision import full_precision
from sylvester.transforms import FlowTransform, Inverse, call_and_ladj, call_ladj_and_score
from sylvester.transforms.base import found, inverse_tolerance
from sylvester.transforms.support import SupportTransform

__all__ = ["FlowDistribution", "MixtureDistribution", "Strata"]


class FlowDistribution(TransformedDistribution):
    """The distribution of t_K(… t_1(z_0)) for a diagonal Gaussian z_0.

    Args:
        base: ``Independent(Normal(loc, scale), 1)``. It is expanded to the batch shape of the steps' parameters, so
            that no two rows share noise.
        transforms: the steps, first to last; any bijective torch transforms of vectors or of single coordinates. The
            last one may lead to events of another size, as onto a simplex.

    A torch distribution like any other, with three additions: :meth:`rsample_and_log_prob`, which needs no inverse,
    :meth:`trajectory`, which shows the chain at work, and :meth:`residual`, which says how exact its inverses are.
    ``log_prob`` takes any point, through the inverse; of the sample drawn last, it knows what the draw came to. That
    has the derivatives of the draw, for all parameters; for one in z itself, ask at ``z.clone()``.

    >>> from sylvester.transforms import PlanarTransform
    >>> base = Independent(Normal(torch.zeros(2), torch.ones(2)), 1)
    >>> step = PlanarTransform(u=torch.ones(2), w=torch.ones(2), b=torch.tensor(0.0))
    >>> q = FlowDistribution(base, [step])
    >>> z, log_q = q.rsample_and_log_prob((100,))
    >>> torch.allclose(q.log_prob(z.clone()), log_q, atol=1e-4)
    True
    """

    arg_constraints = {}  # noqa: RUF012
    base_dist: Independent

    def __init__(self, base: Independent, transforms: Sequence[Transform], *, validate_args: bool | None = None):
        if not (isinstance(base, Independent) and isinstance(base.base_dist, Normal) and len(base.event_shape) == 1):
            raise ValueError(f"Expected base Independent(Normal(loc, scale), 1); got {base}")
        self._drawn: _Drawn | None = None
        super().__init__(base, list(transforms), validate_args=validate_args)

    def trajectory(
        self, sample_shape: Sequence[int] = (), *, noise: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(z_k, log q_k(z_k)) for k = 0, …, K: the base's sample, then one pair after every step."""
        z, log_q = self._from_noise(self._noise(sample_shape, noise))
        yield z, log_q
        for transform in self.transforms:
            z, ladj = call_and_ladj(transform, z)
            log_q = log_q - ladj
            yield z, log_q

    def _noise(self, sample_shape: Sequence[int], noise: Tensor | None) -> Tensor:
        """The noise that is given, if it fits, or fresh one."""
        loc = self.base_dist.base_dist.loc
        if noise is None:
            shape = self.base_dist._extended_shape(torch.Size(sample_shape))
            return torch.randn(shape, dtype=loc.dtype, device=loc.device)
        whole = self.base_dist._extended_shape()
        _check_tensor("noise", noise, loc.dtype)
        if noise.shape[max(0, noise.dim() - len(whole)) :] != whole:
            raise ValueError(f"Expected noise that ends in {tuple(whole)}; got {tuple(noise.shape)}")
        return noise

    def _from_noise(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """z_0 and its log-density."""
        normal = self.base_dist.base_dist
        log_normalizer = normal.scale.log().sum(-1) + 0.5 * math.log(2 * math.pi) * noise.shape[-1]
        return normal.loc + normal.scale * noise, -0.5 * (noise * noise).sum(-1) - log_normalizer

    @full_precision
    def rsample_and_log_prob(
        self, sample_shape: Sequence[int] = (), *, noise: Tensor | None = None, path_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """A reparameterized sample ``(*sample, *batch, D)`` and its log-density ``(*sample, *batch)``.

        Given standard-normal ``noise`` of the base's shape, it is a deterministic function of it (and
        ``sample_shape`` is not used).

        With ``path_gradient``, the log-density has the same value, and its gradient is that of the path alone
        ("sticking the landing", Roeder et al., 2017): through z, with the parameters of the density held,

            ∂/∂φ log q(z(ε, φ); φ) = δ ∂z/∂φ + ∂log q(z; φ)/∂φ,    δ = ∂log q/∂z.

        The second term, which has mean zero, is left out. Where q is the target, every sample's gradient is then zero.
        That is right where the log-density enters an objective linearly, as in the ELBO, and in `objectives.dreg`. No
        inverse is taken: δ goes along the chain, δ_0 = −ε/σ, δ_k = J_k⁻ᵀ(δ_{k−1} − ∂ladj_k/∂z_{k−1}), without a graph.
        So the gradient has no gradient of its own, and ``log_prob`` does not answer with this log-density.
        """
        noise = self._noise(sample_shape, noise)
        if self._validate_args:
            self._check_exact(self.residual(noise=noise))
        if path_gradient:
            return self._rsample_along_path(noise)
        for z, log_q in self.trajectory(noise=noise):  # noqa: B007
            pass
        self._drawn = _Drawn.of(z, log_q)
        return z, log_q

    def _rsample_along_path(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        z, log_q = self._from_noise(noise)
        with torch.no_grad():
            score = -noise / self.base_dist.base_dist.scale
        for transform in self.transforms:
            z, ladj, score = call_ladj_and_score(transform, z, score)
            log_q = log_q - ladj
        self._drawn = None
        return z, along_path(log_q, score, z)

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        return self.rsample_and_log_prob(sample_shape)[0]

    def sample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        with torch.no_grad():
            return self.rsample(sample_shape)

    @full_precision
    def log_prob(self, value: Tensor) -> Tensor:
        """The log-density at any point, with gradients for the point and all parameters; −∞ outside the support."""
        if self._drawn is not None and self._drawn.answers(value):
            return self._drawn.log_q
        self._check_points(value)
        if self._validate_args:
            self._validate_sample(value)
            self._check_exact(self.residual(value))
        if not (self.transforms and isinstance(last := self.transforms[-1], SupportTransform)):
            return self._log_prob_through_inverse(value)
        inside = last.contains(value)
        # A point inside stands in for those outside, whose inverses and gradients would be nothing.
        origin = last(self.base_dist.base_dist.loc.new_zeros(self.base_dist.event_shape))
        value = torch.where(inside[(..., *[None] * len(self.event_shape))], value, origin)
        return torch.where(inside, self._log_prob_through_inverse(value), -math.inf)

    def _log_prob_through_inverse(self, value: Tensor) -> Tensor:
        ladj_inverse: Tensor | float = 0.0
        for transform in reversed(self.transforms):
            value, ladj = call_and_ladj(transform.inv, value)
            ladj_inverse = ladj_inverse + ladj
        return self.base_dist.base_dist.log_prob(value).sum(-1) + ladj_inverse

    def _check_points(self, value: Tensor) -> None:
        _check_tensor("points", value, self.base_dist.base_dist.loc.dtype)
        whole = (*self.batch_shape, *self.event_shape)
        events = len(self.event_shape)
        fits = value.dim() >= events and value.shape[value.dim() - events :] == self.event_shape
        sizes = zip(reversed(value.shape[: value.dim() - events]), reversed(self.batch_shape), strict=False)
        if not (fits and all(a == b or 1 in (a, b) for a, b in sizes)):
            raise ValueError(
                f"Expected points of shape (*, {', '.join(map(str, whole))}), or one that broadcasts to it; "
                f"got {tuple(value.shape)}"
            )

    @torch.no_grad()
    @full_precision
    def residual(self, value: Tensor | None = None, *, noise: Tensor | None = None) -> Tensor:
        """How far the inverses on the way are from exact, the worst of the steps, relative to 1 + |z|: ``(*, *batch)``.

        On the way of ``log_prob(value)``, or of a sample, from ``noise`` or a fresh one, where no value is given.
        Rounding for most flows; where a sequential inverse (``log_prob`` of an IAF, samples of a MAF) meets a map too
        steep for the precision, as much as 1 and more, and the log-density is not to be trusted.
        """
        inverses: list[tuple[FlowTransform, Tensor, Tensor]] = []
        if value is None:
            points = [z for z, _ in self.trajectory(noise=noise)]
            start = points[0]
            for step, z, y in zip(self.transforms, points, points[1:], strict=False):
                if isinstance(step, Inverse):
                    inverses.append((step, z, y))
        else:
            points = [value]
            for step in reversed(self.transforms):
                z, y = call_and_ladj(step.inv, points[-1])[0], points[-1]
                points.append(z)
                if isinstance(step, FlowTransform) and not isinstance(step, Inverse):
                    inverses.append((step, z, y))
            start = points[-1]
        worst = start.new_zeros(start.shape[:-1])
        for step, z, y in inverses:
            worst = torch.maximum(worst, step.residual(z, y).nan_to_num(nan=torch.inf))
        return worst

    def _check_exact(self, residual: Tensor) -> None:
        tolerance = inverse_tolerance(residual.dtype)
        if found(residual > tolerance):
            raise ValueError(
                f"Expected inverses that are exact to {tolerance:.1g} in {residual.dtype}; got a residual of "
                f"{residual.max().item():.3g} from {self}: its steps are too steep for this precision"
            )

    def entropy(self, samples: int = 1000) -> Tensor:
        """−E[log q], by Monte Carlo over ``samples`` reparameterized draws."""
        return -self.rsample_and_log_prob((samples,))[1].mean(0)

    def expand(self, batch_shape: Sequence[int], _instance: Distribution | None = None) -> FlowDistribution:
        new = self._get_checked_instance(FlowDistribution, _instance)
        new._drawn, new.transforms = None, self.transforms
        new.base_dist = self.base_dist.expand(torch.Size(batch_shape))
        Distribution.__init__(new, torch.Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_drawn": None}

    def __repr__(self) -> str:
        kinds = [f"{len(list(same))} x {name}" for name, same in groupby(map(_name, self.transforms))]
        shapes = f"batch_shape={tuple(self.batch_shape)}, event_shape={tuple(self.event_shape)}"
        return f"{type(self).__name__}({shapes}, transforms=[{', '.join(kinds)}])"


def _check_tensor(name: str, value: object, dtype: torch.dtype) -> None:
    if not isinstance(value, Tensor) or value.dtype != dtype:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"Expected {name} as a tensor of {dtype}, as the flow has; got {got}")


def along_path(value: Tensor, score: Tensor, z: Tensor) -> Tensor:
    """The ``value`` (*batch) as a function of z (*batch, *event) alone, whose gradient is the ``score``."""
    return value.detach() + (score * (z - z.detach())).flatten(value.dim()).sum(-1)


def _name(step: Transform) -> str:
    return f"{type(step.inv).__name__}.inv" if isinstance(step, Inverse) else type(step).__name__


class _Drawn:
    """The last sample and its log-density, while both are what they were."""

    def __init__(self, z: Tensor, log_q: Tensor):
        self.z, self.log_q, self.versions = z, log_q, (z._version, log_q._version)
        self.with_grad, self.requires_grad = torch.is_grad_enabled(), z.requires_grad

    @classmethod
    def of(cls, z: Tensor, log_q: Tensor) -> _Drawn | None:
        # Tensors of inference mode do not count their changes, and compiled code does not remember.
        return None if torch.compiler.is_compiling() or z.is_inference() else cls(z, log_q)

    def answers(self, value: Tensor) -> bool:
        # A sample drawn without a graph, or taken out of it, is a constant or a variable of its own: the gradient of
        # its log-density needs the inverse.
        as_drawn = value is self.z and value.requires_grad == self.requires_grad and value.is_leaf != self.requires_grad
        known = as_drawn and (self.with_grad or not torch.is_grad_enabled())
        return known and self.versions == (self.z._version, self.log_q._version)


class Strata(NamedTuple):
    """Draws of a mixture, as many from each component, and what each of them counts."""

    z: Tensor  # (K S, *batch, D), those of the first component first
    log_q: Tensor  # (K S, *batch), of the mixture
    log_share: Tensor  # (K S, *batch): log π_k/S, so that the shares of all draws sum to one


class MixtureDistribution(Distribution):
    """q(z) = Σ_k π_k q_k(z).

    Args:
        components: K flow distributions of one batch shape and one event shape.
        logits: ``(*batch, K)``, the unnormalized log π.

    ``sample`` draws a component, then a point. Which component it was is discrete, so there is no ``rsample``: no
    derivative of such a draw knows π. But expectations are sums over the components, Σ_k π_k E_{q_k}[f(z)], whose every
    part is reparameterized: :meth:`stratified` draws from all of them, with shares that are differentiable in π. A
    density costs K densities, one of each component; S stratified draws from each cost K² S, of which all but K S are
    at points of other components, through the inverse.
    """

    arg_constraints = {}  # noqa: RUF012
    has_rsample = False

    def __init__(
        self, components: Sequence[FlowDistribution], logits: Tensor, *, validate_args: bool | None = None
    ) -> None:
        first = components[0]
        shapes = {(component.batch_shape, component.event_shape) for component in components}
        if len(shapes) > 1:
            raise ValueError(f"Expected components of one batch shape and one event shape; got {list(components)}")
        if logits.shape != (*first.batch_shape, len(components)):
            raise ValueError(
                f"Expected logits of shape {(*first.batch_shape, len(components))}, one for each component; "
                f"got {tuple(logits.shape)}"
            )
        self.components, self.logits = tuple(components), logits
        super().__init__(first.batch_shape, first.event_shape, validate_args=validate_args)

    @property
    def support(self) -> Any:
        return self.components[0].support

    @property
    def log_weights(self) -> Tensor:
        """log π, ``(*batch, K)``."""
        return self.logits.log_softmax(-1)

    @full_precision
    def log_prob(self, value: Tensor) -> Tensor:
        """log Σ_k π_k q_k(z), with gradients for the point and all parameters."""
        return self._combined([component.log_prob(value) for component in self.components])

    def _combined(self, log_q: Sequence[Tensor]) -> Tensor:
        return torch.logsumexp(torch.stack(tuple(log_q), -1) + self.log_weights, -1)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        shape = torch.Size(sample_shape)
        chosen = torch.distributions.Categorical(logits=self.logits).sample(shape)
        draws = torch.stack([component.sample(shape) for component in self.components])  # (K, *sample, *batch, *event)
        index = chosen.reshape(1, *chosen.shape, *[1] * len(self.event_shape)).expand(1, *draws.shape[1:])
        return draws.gather(0, index).squeeze(0)

    @full_precision
    def stratified(self, samples: int = 1, *, noise: Tensor | None = None, path_gradient: bool = False) -> Strata:
        """``samples`` reparameterized draws of each component, with the mixture's log-density.

        Σ_s share_s f(z_s) estimates E_q[f(z)] without bias, gradients for all parameters and for π included; with
        f = log p − log q it is the stratified bound, Σ_k π_k E_{q_k}[log p(z) − log Σ_j π_j q_j(z)]. Given
        standard-normal ``noise`` ``(K S, *batch, D)``, it is a deterministic function of it. ``path_gradient`` holds
        the parameters, π included, in the log-density, as for `FlowDistribution.rsample_and_log_prob`: what is left
        out has mean zero over all components together. First derivatives only.
        """
        count = len(self.components)
        if samples < 1:
            raise ValueError(f"Expected at least one sample of each component; got {samples}")
        parts: Sequence[Tensor | None] = [None] * count
        if noise is not None:
            if len(noise) != count * samples:
                raise ValueError(
                    f"Expected noise for {samples} samples of each of {count} components, {count * samples} rows; "
                    f"got {len(noise)}"
                )
            parts = noise.chunk(count)
        drawn = [
            component.rsample_and_log_prob((samples,), noise=part)
            for component, part in zip(self.components, parts, strict=True)
        ]
        z = torch.cat([points for points, _ in drawn])
        log_share = torch.cat([each.expand(samples, *self.batch_shape) for each in self.log_weights.unbind(-1)])
        log_share = log_share - math.log(samples)
        if path_gradient:
            log_q, score = self._value_and_score(z.detach())
            return Strata(z, along_path(log_q, score, z), log_share)
        log_q_each = []
        for k, (component, (_, own)) in enumerate(zip(self.components, drawn, strict=True)):
            if count == 1:
                log_q_each.append(own)
                continue
            # Its own draws, it knows; those of the others in one go.
            others = component.log_prob(torch.cat([z[: k * samples], z[(k + 1) * samples :]]))
            log_q_each.append(torch.cat([others[: k * samples], own, others[k * samples :]]))
        return Strata(z, self._combined(log_q_each), log_share)

    def _value_and_score(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """log q and ∂log q/∂z, without a graph."""
        with torch.enable_grad():
            z = z.requires_grad_(True)
            log_q = self.log_prob(z)
            (score,) = torch.autograd.grad(log_q.sum(), z)
        return log_q.detach(), score

    def entropy(self, samples: int = 1000) -> Tensor:
        """−E[log q], by Monte Carlo over ``samples`` draws of each component."""
        strata = self.stratified(samples)
        return -(strata.log_share.exp() * strata.log_q).sum(0)

    def expand(self, batch_shape: Sequence[int], _instance: Distribution | None = None) -> MixtureDistribution:
        shape = torch.Size(batch_shape)
        components = [component.expand(shape) for component in self.components]
        return MixtureDistribution(components, self.logits.expand(*shape, len(components)), validate_args=False)

    def __repr__(self) -> str:
        shapes = f"batch_shape={tuple(self.batch_shape)}, event_shape={tuple(self.event_shape)}"
        return f"{type(self).__name__}({shapes}, components={len(self.components)})"
