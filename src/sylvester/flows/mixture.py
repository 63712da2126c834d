"""Mixtures of flows, with weights that may depend on the context: q(z|h) = Σ_k π_k(h) q_k(z|h)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from sylvester.distributions import MixtureDistribution
from sylvester.flows.base import Flow, check_flows, constraint_of, localized
from sylvester.flows.hypernetwork import Hypernetwork, LocalParameters, Output
from sylvester.linalg.precision import full_precision


class Mixture(nn.Module):
    """K flows and their weights: ``mixture(context)`` gives a :class:`~sylvester.distributions.MixtureDistribution`.

    For densities with several modes, which one flow of a Gaussian can only reach through thin bridges. The flows must
    start apart where they are to end apart: equal ones get equal gradients. `inference.fit` and `VAE` take a mixture
    where they take a flow, and maximise the stratified bound

        Σ_k π_k E_{q_k}[log p(z) − log Σ_j π_j q_j(z)],

    whose every part is reparameterized, and which is differentiable in π. S draws of each component cost K² S
    densities, all but K S of them through the inverse: cheap for Sylvester, planar and coupling flows and for MAF, D
    passes for an IAF.

    Args:
        flows: of the same features and the same context, families mixed as one likes.
        hyper_features: hidden widths of the hypernetwork that makes the weights; none for a single linear layer.

    >>> import torch
    >>> from sylvester.flows import Planar, TriangularSylvester
    >>> mixture = Mixture([Planar(2, context=3), TriangularSylvester(2, context=3)])
    >>> q = mixture(torch.zeros(5, 3))
    >>> q
    MixtureDistribution(batch_shape=(5,), event_shape=(2,), components=2)
    >>> z, log_q, log_share = q.stratified(4)
    >>> z.shape, log_q.shape
    (torch.Size([8, 5, 2]), torch.Size([8, 5]))
    """

    hypernetwork: Hypernetwork | LocalParameters

    def __init__(self, flows: Iterable[Flow], *, hyper_features: Sequence[int] = ()):
        super().__init__()
        if not isinstance(flows, Iterable):
            raise ValueError(f"Expected flows to mix, in a list; got {type(flows).__name__}")
        flows = list(flows)
        check_flows(flows, "to mix")
        supports = {str(constraint_of(flow.steps[-1]) if flow.steps else None) for flow in flows}
        if len(supports) > 1:
            raise ValueError(f"Expected flows onto one and the same support; got {', '.join(sorted(supports))}")
        self.flows = nn.ModuleList(flows)
        self.features = flows[0].features
        # Nearly even weights at the start: differences are learned.
        table = {"logits": Output((len(flows),), spread=0.01)}
        self.hypernetwork = Hypernetwork(flows[0].context, table, hyper_features=hyper_features, init="identity")

    @property
    def context(self) -> int:
        return self.hypernetwork.context

    @full_precision
    def forward(self, context: Tensor | None = None) -> MixtureDistribution:
        components = [flow(context) for flow in self.flows]  # they refuse a context that does not fit
        logits = self.hypernetwork(context)["logits"].squeeze(-2)
        return MixtureDistribution(components, logits, validate_args=False)

    @full_precision
    def local(self, context: Tensor) -> Mixture:
        """Without context, with free parameters for each row of it: see `Flow.local`."""
        free: dict[int, nn.Module] = {id(flow): localized(flow, context) for flow in self.flows}
        assert isinstance(self.hypernetwork, Hypernetwork)
        return copy.deepcopy(self, free | {id(self.hypernetwork): self.hypernetwork.local(context)})

    @property
    def event_shape(self) -> torch.Size:
        """Of its distributions."""
        shape = self.flows[0].event_shape
        assert isinstance(shape, torch.Size)
        return shape

    def extra_repr(self) -> str:
        return f"features={self.features}, context={self.context}"
