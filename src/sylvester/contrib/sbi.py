"""Flows as density estimators for sbi, the toolkit for simulation-based inference.

    from sbi.inference import NPE
    from sylvester.contrib.sbi import density_estimator
    from sylvester.flows import NSF

    inference = NPE(prior, density_estimator=density_estimator(partial(NSF, transforms=5)))
    inference.append_simulations(theta, x).train()
    posterior = inference.build_posterior()

Needs sbi: ``pip install "sylvester[sbi]"``. It imports zuko, which changes torch: see `sylvester.contrib.zuko`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from sylvester.flows import Flow
from sylvester.inference import standardized

try:
    from sbi.neural_nets.estimators.base import ConditionalDensityEstimator
except ModuleNotFoundError as error:
    if error.name != "sbi":
        raise
    raise ModuleNotFoundError(
        'sylvester.contrib.sbi needs sbi, which is not installed: pip install "sylvester[sbi]"', name="sbi"
    ) from error

__all__ = ["FlowEstimator", "density_estimator"]

Target = Literal["posterior", "likelihood"]

#: From the features and the size of the context to a flow, as a family or a partial of one is.
MakeFlow = Callable[[int, int], Flow]


class FlowEstimator(ConditionalDensityEstimator):
    """q(input | condition) by a flow of the embedded condition, as sbi asks for it.

    Args:
        flow: with as many features as the input has, and as much context as the embedding gives.
        embedding: conditions ``(N, *condition_shape)`` to ``(N, flow.context)``.
        condition_shape: of one condition.

    Many samples of one condition cost one pass of the embedding and one set of the flow's parameters.
    """

    def __init__(self, flow: Flow, embedding: nn.Module, condition_shape: Sequence[int]):
        super().__init__(flow, torch.Size((flow.features,)), torch.Size(condition_shape))
        self._embedding = embedding

    @property
    def embedding_net(self) -> nn.Module:
        return self._embedding

    def _given(self, condition: Tensor) -> Any:
        self._check_condition_shape(condition)
        batch = condition.shape[: condition.dim() - len(self.condition_shape)]
        embedded = self._embedding(condition.reshape(-1, *self.condition_shape))
        return self.net(embedded.reshape(*batch, -1))

    def log_prob(self, input: Tensor, condition: Tensor, **unused: Any) -> Tensor:
        """``(sample, batch)``, for inputs ``(sample, batch, D)`` or ``(batch, D)`` and conditions ``(batch, *)``."""
        self._check_input_shape(input)
        return self._given(condition).log_prob(input if input.dim() > 2 else input.unsqueeze(0))

    def loss(self, input: Tensor, condition: Tensor, **unused: Any) -> Tensor:
        """−log q, ``(batch,)``."""
        return -self.log_prob(input.unsqueeze(0), condition)[0]

    def sample(self, sample_shape: Sequence[int], condition: Tensor, **unused: Any) -> Tensor:
        """``(*sample_shape, batch, D)``."""
        return self._given(condition).sample(sample_shape)

    def sample_and_log_prob(
        self, sample_shape: Sequence[int], condition: Tensor, **unused: Any
    ) -> tuple[Tensor, Tensor]:
        """Without an inverse."""
        return self._given(condition).rsample_and_log_prob(sample_shape)


class _Standardize(nn.Module):
    """Conditions less the mean of some, over their standard deviation, entry by entry."""

    loc: Tensor
    scale: Tensor

    def __init__(self, conditions: Tensor):
        super().__init__()
        scale = conditions.std(0)
        self.register_buffer("loc", conditions.mean(0))
        self.register_buffer("scale", torch.where(scale > 0, scale, 1.0))

    def forward(self, condition: Tensor) -> Tensor:
        return (condition - self.loc) / self.scale


def density_estimator(
    make: MakeFlow,
    *,
    target: Target = "posterior",
    embedding_net: nn.Module | None = None,
    standardize: bool = True,
) -> Callable[[Tensor, Tensor], FlowEstimator]:
    """What sbi's trainers take as ``density_estimator``: a function of some parameters and their simulations.

    Args:
        make: (features, context) -> flow, such as ``partial(NSF, transforms=5)``. sbi trains by ``log_prob``: families
            whose ``log_prob`` takes one pass (MAF, NSF and couplings) are the fast ones.
        target: "posterior" for NPE, which estimates θ given x; "likelihood" for NLE, x given θ.
        embedding_net: from conditions ``(N, *shape)`` to ``(N, context)``; without one they are flattened.
        standardize: inputs and conditions by the moments of the data that the estimator is made for.

    >>> from functools import partial
    >>> from sylvester.flows import MAF
    >>> build = density_estimator(partial(MAF, transforms=2))
    >>> estimator = build(torch.randn(100, 3), torch.randn(100, 5))
    >>> estimator.sample((7,), torch.zeros(2, 5)).shape
    torch.Size([7, 2, 3])
    """
    if target not in get_args(Target):
        raise ValueError(f"Expected target in {get_args(Target)}; got {target!r}")

    def build(theta: Tensor, x: Tensor) -> FlowEstimator:
        inputs, conditions = (theta, x) if target == "posterior" else (x, theta)
        if inputs.dim() != 2:
            raise ValueError(f"Expected {target} estimates of vectors, (N, D); got shape {tuple(inputs.shape)}")
        layers: list[nn.Module] = [_Standardize(conditions)] if standardize else []
        embedding = nn.Sequential(*layers, nn.Flatten() if embedding_net is None else embedding_net)
        with torch.no_grad():
            context = embedding(conditions[:2]).shape[-1]
        flow = make(inputs.shape[-1], context)
        return FlowEstimator(standardized(flow, inputs) if standardize else flow, embedding, conditions.shape[1:])

    return build
