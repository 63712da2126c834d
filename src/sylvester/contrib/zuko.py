"""Flows and steps shared with zuko.

**The directions are opposite.** Here a step leads from the base to the data, as sampling goes; zuko's transforms lead
from the data to the base, as densities are evaluated. Every step is turned round where it changes sides:

    zuko.distributions.NormalizingFlow(t.inv, base)     # one of our transforms in zuko: mind the .inv
    as_zuko(flow)                                       # a whole flow, turned round for you: a zuko.flows.Flow
    Flow(base, [Steps(maf.transform)])                  # zuko's transforms in a flow of ours, turned round for you

Our transforms invert both ways, so nothing is lost but speed: what is cheap in one library's direction is cheap in the
other's ``inv``. Importing zuko changes torch (it switches the validation of all distributions off, and gives every
transform a ``call_and_ladj``); our flows give the same numbers with it and without.

Needs zuko: ``pip install zuko``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Transform

from sylvester.flows import Flow

try:
    import zuko
    from zuko.lazy import LazyDistribution, LazyTransform
    from zuko.transforms import ComposedTransform, IdentityTransform
except ModuleNotFoundError as error:
    if error.name != "zuko":
        raise
    raise ModuleNotFoundError(
        "sylvester.contrib.zuko needs zuko, which is not installed: pip install zuko", name="zuko"
    ) from error

__all__ = ["Steps", "as_zuko"]


def as_zuko(flow: Flow) -> zuko.flows.Flow:
    """The flow as one of zuko's, with the same parameters: its transform leads from the data to the base.

    >>> from sylvester.flows import TriangularSylvester
    >>> flow = TriangularSylvester(3, context=4, transforms=2)
    >>> c, x = torch.randn(5, 4), torch.randn(5, 3)
    >>> theirs = as_zuko(flow)(c)
    >>> torch.allclose(theirs.log_prob(x), flow(c).log_prob(x))
    True
    >>> theirs.rsample((2,)).shape
    torch.Size([2, 5, 3])
    """
    if not isinstance(flow, Flow):
        raise ValueError(f"Expected a flow of sylvester; got {type(flow).__name__}")
    return zuko.flows.Flow(_ToBase(flow.steps), _Base(flow.base))


class _ToBase(LazyTransform):
    """context -> the inverses of a flow's steps, last to first."""

    def __init__(self, steps: Sequence[nn.Module] | nn.ModuleList):
        super().__init__()
        self.steps = nn.ModuleList(steps)

    def forward(self, c: Tensor | None = None) -> Transform:
        inverses = [step.inv for module in reversed(self.steps) for step in reversed(module(c))]
        return _Composed(*(inverses or [IdentityTransform()]))


class _Composed(ComposedTransform):
    """Shapes are those of events alone: zuko takes them from here, and our steps add the batch of their parameters."""

    def forward_shape(self, shape: torch.Size) -> torch.Size:
        whole = super().forward_shape(shape)
        return whole[len(whole) - len(shape) :]

    def inverse_shape(self, shape: torch.Size) -> torch.Size:
        whole = super().inverse_shape(shape)
        return whole[len(whole) - len(shape) :]


class _Base(LazyDistribution):
    """context -> a flow's base."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base = base

    def forward(self, c: Tensor | None = None) -> Distribution:
        return self.base(c)


class Steps(nn.Module):
    """Transforms of zuko as steps of a flow here: turned round, so that they lead from the base to the data.

    Args:
        transform: one of zuko's lazy transforms, as ``zuko.flows.MAF(…).transform`` is, or a transform as it is,
            without parameters that learn. A whole flow's base is not taken over: the flow here has its own.

    >>> from sylvester.flows import DiagonalGaussian
    >>> maf = zuko.flows.MAF(3, 4, transforms=2)
    >>> flow = Flow(DiagonalGaussian(3, context=4), [Steps(maf.transform)])
    >>> z, log_q = flow(torch.randn(5, 4)).rsample_and_log_prob()
    >>> z.shape, log_q.shape
    (torch.Size([5, 3]), torch.Size([5]))
    """

    def __init__(self, transform: LazyTransform | Transform):
        super().__init__()
        if not isinstance(transform, LazyTransform | Transform):
            got = type(transform).__name__
            fix = ": give its transform, as in Steps(flow.transform)" if hasattr(transform, "transform") else ""
            raise ValueError(f"Expected a transform of zuko, lazy or not; got {got}{fix}")
        self.transform = transform

    def forward(self, context: Tensor | None) -> list[Transform]:
        bound = self.transform(context) if isinstance(self.transform, LazyTransform) else self.transform
        return [bound.inv]
