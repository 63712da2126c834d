"""FlowDistribution: a diagonal Gaussian pushed through a chain of steps.

z_0 = μ + σ ε,    z_k = t_k(z_{k−1}),    log q(z_K) = log N(z_0; μ, σ²) − Σ_k ladj_k
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal, Transform, TransformedDistribution

from sylvester.transforms import call_and_ladj


class FlowDistribution(TransformedDistribution):
    """The distribution of t_K(… t_1(z_0)) for a diagonal Gaussian z_0.

    Args:
        base: ``Independent(Normal(loc, scale), 1)``. It is expanded to the batch shape of the steps' parameters, so
            that no two rows share noise.
        transforms: the steps, first to last; any bijective torch transforms of vectors.

    A torch distribution like any other, with two additions: :meth:`rsample_and_log_prob`, which needs no inverse,
    and :meth:`trajectory`, which shows the chain at work. ``log_prob`` takes any point, through the inverse; the
    sample drawn last, it knows.
    """

    arg_constraints = {}  # noqa: RUF012
    base_dist: Independent

    def __init__(self, base: Independent, transforms: Sequence[Transform], *, validate_args: bool | None = None):
        if not (isinstance(base, Independent) and isinstance(base.base_dist, Normal) and len(base.event_shape) == 1):
            raise ValueError(f"Expected base Independent(Normal(loc, scale), 1); got {base}")
        self._drawn: tuple[Tensor, Tensor, bool] | None = None
        super().__init__(base, list(transforms), validate_args=validate_args)

    def trajectory(
        self, sample_shape: Sequence[int] = (), *, noise: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(z_k, log q_k(z_k)) for k = 0, …, K: the base's sample, then one pair after every step."""
        normal = self.base_dist.base_dist
        shape = self._extended_shape(torch.Size(sample_shape))
        if noise is None:
            noise = torch.randn(shape, dtype=normal.loc.dtype, device=normal.loc.device)
        elif noise.shape[noise.dim() - len(self._extended_shape()) :] != self._extended_shape():
            raise ValueError(f"Expected noise that ends in {tuple(self._extended_shape())}; got {tuple(noise.shape)}")
        log_normalizer = normal.scale.log().sum(-1) + 0.5 * math.log(2 * math.pi) * shape[-1]
        z = normal.loc + normal.scale * noise
        log_q = -0.5 * (noise * noise).sum(-1) - log_normalizer
        yield z, log_q
        for transform in self.transforms:
            z, ladj = call_and_ladj(transform, z)
            log_q = log_q - ladj
            yield z, log_q

    def rsample_and_log_prob(
        self, sample_shape: Sequence[int] = (), *, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """A reparameterized sample ``(*sample, *batch, D)`` and its log-density ``(*sample, *batch)``.

        Given standard-normal ``noise`` of the sample's shape, it is a deterministic function of it (and
        ``sample_shape`` is not used).
        """
        for z, log_q in self.trajectory(sample_shape, noise=noise):  # noqa: B007
            pass
        self._drawn = z, log_q, torch.is_grad_enabled()
        return z, log_q

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        return self.rsample_and_log_prob(sample_shape)[0]

    def sample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        with torch.no_grad():
            return self.rsample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """The log-density at any point, with gradients for the point and all parameters."""
        if self._drawn is not None:
            z, log_q, with_grad = self._drawn
            # A sample drawn without a graph is a constant: its log-density's gradient needs the inverse.
            if value is z and (with_grad or not torch.is_grad_enabled()):
                return log_q
        if self._validate_args:
            self._validate_sample(value)
        ladj_inverse: Tensor | float = 0.0
        for transform in reversed(self.transforms):
            value, ladj = call_and_ladj(transform.inv, value)
            ladj_inverse = ladj_inverse + ladj
        return self.base_dist.log_prob(value) + ladj_inverse

    def entropy(self, samples: int = 1000) -> Tensor:
        """−E[log q], by Monte Carlo over ``samples`` reparameterized draws."""
        return -self.rsample_and_log_prob((samples,))[1].mean(0)

    def expand(self, batch_shape: Sequence[int], _instance: Distribution | None = None) -> FlowDistribution:
        base = self.base_dist.expand(torch.Size(batch_shape))
        return FlowDistribution(base, self.transforms, validate_args=self._validate_args)
