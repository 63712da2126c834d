"""The model: x → encoder → flow → z → decoder, and the terms of its bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

if TYPE_CHECKING:
    from sylvester.distributions import FlowDistribution
    from sylvester.flows import Flow


class LogTerms(NamedTuple):
    """What every bound is made of: z ~ q(z|x) and three log-densities there, over samples and batch."""

    z: Tensor  # (S, B, D)
    log_px_z: Tensor  # (S, B)
    log_pz: Tensor  # (S, B)
    log_q: Tensor  # (S, B)

    @property
    def log_w(self) -> Tensor:
        """Log importance weights log p(x, z) − log q(z|x), (S, B)."""
        return self.log_px_z + self.log_pz - self.log_q


class VAE(nn.Module):
    """p(x|z) p(z), with a flow as the approximate posterior q(z|x).

    ``encoder(x)`` gives a context (B, E), ``flow(context)`` a `FlowDistribution`, and ``decoder(z)`` for z
    (*, D) a distribution over x with batch shape (*). ``prior`` is a standard normal by default; or an
    unconditional flow, whose parameters are then trained too; or any distribution with event shape (D,),
    whose tensors stay on the device where they are.

    The flow and the log-densities always run at the flow's own precision: autocast ends at the encoder and
    begins again at the decoder.
    """

    def __init__(
        self,
        encoder: nn.Module,
        flow: Flow,
        decoder: nn.Module,
        prior: Distribution | Flow | None = None,
    ) -> None:
        super().__init__()
        self.encoder, self.flow, self.decoder, self.prior = encoder, flow, decoder, prior
        # Where the model is and in what precision, as well as the mean of the default prior.
        self.register_buffer("origin", torch.zeros(flow.features), persistent=False)
        self.origin: Tensor
        event = () if prior is None else tuple(self.prior_distribution().event_shape)
        if prior is not None and event != (flow.features,):
            raise ValueError(f"Expected a prior with event shape ({flow.features},), as the flow has; got {event}")

    def posterior(self, x: Tensor) -> FlowDistribution:
        """q(z|x), with the flow's parameters made once for any number of samples."""
        context = self.encoder(x)
        with _full_precision(context):
            return self.flow(context.to(self.origin.dtype))

    def prior_distribution(self) -> Distribution:
        """p(z)."""
        if self.prior is None:
            normal = Normal(self.origin, torch.ones_like(self.origin), validate_args=False)
            return Independent(normal, 1, validate_args=False)
        return self.prior() if isinstance(self.prior, nn.Module) else self.prior

    def log_terms(
        self,
        x: Tensor,
        samples: int = 1,
        *,
        noise: Tensor | None = None,
        posterior: FlowDistribution | None = None,
    ) -> LogTerms:
        """Draw z ~ q(z|x) for each x and evaluate all log-densities there.

        ``noise`` (samples, B, D), standard normal, makes it a deterministic function. ``posterior`` is
        ``self.posterior(x)`` where the caller has it already, so that x is not encoded again.
        """
        posterior = self.posterior(x) if posterior is None else posterior
        with _full_precision(x):
            z, log_q = posterior.rsample_and_log_prob((samples,), noise=noise)
            log_pz = self.prior_distribution().log_prob(z)
        likelihood = self.decoder(z)
        with _full_precision(x):
            return LogTerms(z, likelihood.log_prob(x), log_pz, log_q)

    def forward(self, x: Tensor, samples: int = 1, *, noise: Tensor | None = None) -> LogTerms:
        return self.log_terms(x, samples, noise=noise)

    @torch.no_grad()
    def sample(self, count: int, *, mean: bool = False) -> Tensor:
        """x ~ p(x), (count, …); with ``mean`` the decoder's mean instead of a draw, which looks smoother."""
        likelihood = self.decoder(self.prior_distribution().sample(torch.Size((count,))))
        return likelihood.mean if mean else likelihood.sample()

    @torch.no_grad()
    def reconstruct(self, x: Tensor) -> Tensor:
        """E[x|z] at one z ~ q(z|x) for each x."""
        z, _ = self.posterior(x).rsample_and_log_prob()
        return self.decoder(z).mean


def _full_precision(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)
