"""The model: x → encoder → flow → z → decoder, and the terms of its bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from sylvester.distributions import MixtureDistribution

if TYPE_CHECKING:
    from sylvester.distributions import FlowDistribution
    from sylvester.flows import Flow, Mixture


class LogTerms(NamedTuple):
    """What every bound is made of: z ~ q(z|x) and three log-densities there, over samples and batch."""

    z: Tensor  # (S, B, D)
    log_px_z: Tensor  # (S, B)
    log_pz: Tensor  # (S, B)
    log_q: Tensor  # (S, B)
    log_share: Tensor | None = None  # (S, B): of a mixture's draws, what each counts; without, all count the same

    @property
    def log_w(self) -> Tensor:
        """Log importance weights log p(x, z) − log q(z|x), (S, B)."""
        return self.log_px_z + self.log_pz - self.log_q


class PathTerms(LogTerms):
    """The same, where the gradient of log q is that of the path alone: not every bound can use it."""

    __slots__ = ()


class VAE(nn.Module):
    """p(x|z) p(z), with a flow as the approximate posterior q(z|x).

    ``encoder(x)`` gives a context (B, E), ``flow(context)`` a `FlowDistribution`, or the distribution of a
    `flows.Mixture`, and ``decoder(z)`` for z (*, D) a distribution with batch shape (*) whose event is all of one x.
    ``prior`` is a standard normal by default; or an unconditional flow, whose parameters are then trained too; or any
    distribution with event shape (D,), whose tensors stay on the device where they are.

    The flow and the log-densities always run at the flow's own precision, float32 or better: autocast ends at
    the encoder and begins again at the decoder, which gives its distribution parameters in z's precision
    (``.to(z.dtype)``).

    >>> from torch.distributions import Bernoulli, Independent
    >>> from sylvester.flows import TriangularSylvester
    >>> class Decoder(nn.Linear):
    ...     def forward(self, z):
    ...         return Independent(Bernoulli(logits=super().forward(z).to(z.dtype)), 1)
    >>> vae = VAE(nn.Linear(784, 32), TriangularSylvester(8, context=32), Decoder(8, 784))
    >>> vae.log_terms(torch.zeros(5, 784), samples=3).log_w.shape
    torch.Size([3, 5])
    """

    def __init__(
        self,
        encoder: nn.Module,
        flow: Flow | Mixture,
        decoder: nn.Module,
        prior: Distribution | Flow | None = None,
    ) -> None:
        super().__init__()
        self.encoder, self.flow, self.decoder, self.prior = encoder, flow, decoder, prior
        # A flow of one's own may have no event shape but its features.
        expected = tuple(getattr(flow, "event_shape", (flow.features,)))
        if prior is None and expected != (flow.features,):
            raise ValueError(f"Expected a prior with event shape {expected}, as the flow has; got none")
        if prior is not None:
            distribution = self.prior_distribution()
            if not isinstance(distribution, Distribution):
                raise ValueError(f"Expected a prior as a distribution or a flow; got {_describe(distribution)}")
            batch, event = tuple(distribution.batch_shape), tuple(distribution.event_shape)
            if batch or event != expected:
                raise ValueError(
                    f"Expected a prior with batch shape () and event shape {expected}, as the flow has; "
                    f"got {batch} and {event}"
                )

    @property
    def origin(self) -> Tensor:
        """z = 0, (D,): where the flow is and in what precision, as the mean of the default prior."""
        return next(self.flow.parameters()).new_zeros(self.flow.features)

    def posterior(self, x: Tensor, *, context_mask: Tensor | None = None) -> FlowDistribution | MixtureDistribution:
        """q(z|x), with the flow's parameters made once for any number of samples.

        ``context_mask`` (B, E) multiplies the encoder's output: dropout, with the caller's randomness.
        """
        check_data(x)
        context = self.encoder(x)
        if not isinstance(context, Tensor) or context.shape[:-1] != x.shape[:1]:
            raise ValueError(
                f"Expected x with a batch axis, (B, …), and encoder(x) as a tensor (B, {self.flow.context}); "
                f"got x of shape {tuple(x.shape)} and encoder(x) {_describe(context)}"
            )
        if context_mask is not None:
            if context_mask.shape != context.shape:
                raise ValueError(
                    f"Expected context_mask of shape {tuple(context.shape)}, as encoder(x) has; "
                    f"got {tuple(context_mask.shape)}"
                )
            context = context * context_mask
        with _full_precision(context):
            return self.flow(context.to(self.origin.dtype))

    def prior_distribution(self) -> Distribution:
        """p(z)."""
        if self.prior is None:
            origin = self.origin
            normal = Normal(origin, torch.ones_like(origin), validate_args=False)
            return Independent(normal, 1, validate_args=False)
        return self.prior() if isinstance(self.prior, nn.Module) else self.prior

    def log_terms(
        self,
        x: Tensor,
        samples: int = 1,
        *,
        noise: Tensor | None = None,
        posterior: FlowDistribution | MixtureDistribution | None = None,
        path_gradient: bool = False,
        seen: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> LogTerms:
        """Draw z ~ q(z|x) for each x and evaluate all log-densities there.

        ``noise`` (samples, B, D), standard normal, makes it a deterministic function. ``posterior`` is
        ``self.posterior(x)`` where the caller has it already, so that x is not encoded again. ``path_gradient`` leaves
        a term of mean zero out of the gradient of log q, and gives `PathTerms`: see
        `FlowDistribution.rsample_and_log_prob`.

        Where the posterior is a mixture, ``samples`` are drawn from each of its K components: S is K times as many,
        and the terms have the share of each draw, which objectives heed.

        The inference network can be trained on less than it will be given: ``seen`` is what the encoder is shown
        instead of x (a corrupted x), and ``context_mask`` multiplies its output. Both leave a bound on log p(x), that
        of another posterior.
        """
        check_data(x)
        if samples < 1 or x.dim() < 1 or not len(x):
            raise ValueError(
                f"Expected at least one sample of at least one data point; got samples={samples} and x of shape "
                f"{tuple(x.shape)}"
            )
        if posterior is not None and not (seen is None and context_mask is None):
            raise ValueError("Expected a posterior, or what it is to be made of (seen, context_mask); got both")
        if posterior is None:
            posterior = self.posterior(x if seen is None else seen, context_mask=context_mask)
        count = len(posterior.components) if isinstance(posterior, MixtureDistribution) else 1
        shape = (samples * count, *x.shape[:1], self.flow.features)
        if noise is not None and noise.shape != shape:
            raise ValueError(f"Expected noise of shape {shape}, (samples, B, D); got {tuple(noise.shape)}")
        log_share = None
        with _full_precision(x):
            if isinstance(posterior, MixtureDistribution):
                z, log_q, log_share = posterior.stratified(samples, noise=noise, path_gradient=path_gradient)
            else:
                z, log_q = posterior.rsample_and_log_prob((samples,), noise=noise, path_gradient=path_gradient)
            log_pz = self.prior_distribution().log_prob(z)
        likelihood = self._decode(z)
        if x.shape != z.shape[1:-1] + likelihood.event_shape:
            raise ValueError(
                f"Expected x of shape {tuple(z.shape[1:-1] + likelihood.event_shape)}, a batch of the decoder's "
                f"events; got {tuple(x.shape)}"
            )
        with _full_precision(x):
            terms = LogTerms(z, likelihood.log_prob(x), log_pz, log_q, log_share)
        return PathTerms(*terms) if path_gradient else terms

    def forward(self, x: Tensor, samples: int = 1, *, noise: Tensor | None = None) -> LogTerms:
        return self.log_terms(x, samples, noise=noise)

    @torch.no_grad()
    def sample(self, count: int, *, mean: bool = False) -> Tensor:
        """x ~ p(x), (count, …); with ``mean`` the decoder's mean instead of a draw, which looks smoother."""
        with _full_precision(self.origin):
            z = self.prior_distribution().sample(torch.Size((count,)))
        likelihood = self._decode(z)
        return likelihood.mean if mean else likelihood.sample()

    @torch.no_grad()
    def reconstruct(self, x: Tensor) -> Tensor:
        """E[x|z] at one z ~ q(z|x) for each x."""
        posterior = self.posterior(x)
        with _full_precision(x):
            z = posterior.sample()
        return self._decode(z).mean

    def _decode(self, z: Tensor) -> Distribution:
        """p(x|z), which has the batch shape of z; torch would broadcast any other one to a wrong answer."""
        likelihood = self.decoder(z)
        if not isinstance(likelihood, Distribution):
            raise ValueError(
                "Expected decoder(z) to be a distribution over x, as Independent(Bernoulli(logits=…), 1) is; "
                f"got {_describe(likelihood)}"
            )
        if likelihood.batch_shape != z.shape[:-1]:
            raise ValueError(
                f"Expected decoder(z) with batch shape {tuple(z.shape[:-1])}, as z has, and one whole x as its event; "
                f"got batch shape {tuple(likelihood.batch_shape)} and event shape {tuple(likelihood.event_shape)}: "
                "Independent(distribution, n) makes the last n axes part of the event"
            )
        _check_precision(likelihood)
        return likelihood


def check_data(x: Tensor) -> None:
    """Bytes, integers and arrays are no x of a VAE."""
    if not isinstance(x, Tensor):
        raise ValueError(
            "Expected x as a tensor of floating-point numbers, torch.as_tensor(x, dtype=torch.float32); "
            f"got {_describe(x)}"
        )
    if not x.is_floating_point():
        raise ValueError(
            "Expected x as floating-point numbers, in the units of the decoder's distribution (x.float() / 255 where "
            f"bytes stand for [0, 1]); got {_describe(x)}"
        )


def _check_precision(distribution: Distribution) -> None:
    for name, value in vars(distribution).items():
        if isinstance(value, Distribution):
            _check_precision(value)
        elif isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"Expected decoder(z) with parameters in float32 or better, .to(z.dtype); got {name.strip('_')} of "
                f"{type(distribution).__name__} in {value.dtype}, too coarse for a sum over all of x"
            )


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _full_precision(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)
