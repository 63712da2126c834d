"""The steps and flows that every property is tested on, with parameters drawn where the code could break.

Parameters are never the initializer's. At scale s: off-diagonals N(0, (2s)²/M), diagonals 0.999 tanh(s N), network
weights s/√fan-in, everything else N(0, s²).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from sylvester import flows
from sylvester.flows.base import InvertedSteps
from sylvester.flows.hypernetwork import Hypernetwork
from sylvester.flows.masked import MaskedLinear
from sylvester.linalg import HouseholderProduct, Reversal, polar
from sylvester.transforms import (
    Affine,
    AutoregressiveTransform,
    CouplingTransform,
    Elementwise,
    FlowTransform,
    Gated,
    HouseholderTransform,
    PlanarTransform,
    RadialTransform,
    RationalQuadratic,
    Shift,
    SylvesterTransform,
    TriangularAffineTransform,
)

SCALES = (0.1, 1.0, 3.0)
FEATURES = (1, 2, 5, 64)
BATCHES = ((), (3,), (4, 3))


def generator(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(repr(key))) % 2**31)


@dataclass(frozen=True)
class Case:
    """A step as a function of unconstrained tensors, so that derivatives are taken on the manifold."""

    draw: Callable[..., list[Tensor]]  # (randn, features, batch, scale)
    build: Callable[..., FlowTransform]
    batched: bool = True  # whether the parameters have a batch shape

    def leaves(
        self, name: str, features: int, batch: tuple[int, ...], scale: float, dtype=torch.float64
    ) -> list[Tensor]:
        rng = generator(name, features, batch, scale)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, dtype=torch.float64)

        return [leaf.to(dtype) for leaf in self.draw(randn, features, batch if self.batched else (), scale)]


def _planar(u: Tensor, w: Tensor, b: Tensor) -> PlanarTransform:
    wu = (w * u).sum(-1, keepdim=True)
    return PlanarTransform(u + (0.999 * (softplus(wu) - 1) - wu) * w / (w * w).sum(-1, keepdim=True), w, b)


def _radial(center: Tensor, alpha: Tensor, beta: Tensor) -> RadialTransform:
    alpha = softplus(alpha) + 1e-3
    return RadialTransform(center, alpha, 0.999 * (softplus(beta) - alpha))


def _triangular_affine(off_diagonal: Tensor, log_diagonal: Tensor, loc: Tensor) -> TriangularAffineTransform:
    return TriangularAffineTransform(off_diagonal.tril(-1) + torch.diag_embed(log_diagonal.exp()), loc)


def _triangular(off_diagonal: Tensor, diagonal: Tensor) -> Tensor:
    return off_diagonal.triu(1) + torch.diag_embed(0.999 * torch.tanh(diagonal))


def _sylvester(make_q: Callable) -> Callable[..., SylvesterTransform]:
    def build(r, r_diagonal, r_tilde, r_tilde_diagonal, b, *for_q):
        return SylvesterTransform(make_q(*for_q), _triangular(r, r_diagonal), _triangular(r_tilde, r_tilde_diagonal), b)

    return build


def _free_sylvester(r, c, r_tilde, s, b):
    """Diagonals e^s and ρ e^−s with ρ = 0.999 (softplus(c) − 1)."""
    rho, diagonal = 0.999 * (softplus(c) - 1), s.exp()
    return SylvesterTransform(
        None, r.triu(1) + torch.diag_embed(rho / diagonal), r_tilde.triu(1) + torch.diag_embed(diagonal), b
    )


def _draw_sylvester(rank: Callable[[int], int], for_q: Callable[[int], tuple[int, ...]] | None = None):
    def draw(randn, features, batch, scale):
        m = rank(features)
        matrix, vector = (*batch, m, m), (*batch, m)
        leaves = [2 * scale / math.sqrt(m) * randn(*matrix), scale * randn(*vector)]
        leaves += [2 * scale / math.sqrt(m) * randn(*matrix), scale * randn(*vector), scale * randn(*vector)]
        return leaves + ([randn(*batch, *for_q(features))] if for_q else [])

    return draw


def _draw_net(numbers: int):
    def draw(randn, features, batch, scale):
        hidden = 2 * features
        return [
            scale / math.sqrt(features) * randn(hidden, features),
            scale * randn(hidden),
            scale / math.sqrt(hidden) * randn(numbers * features, hidden),
            scale * randn(numbers * features),
        ]

    return draw


class Net:
    """A small network that lists its tensors: unit j sees the coordinates before position j mod D, output i the units
    up to its own. Without positions everything sees everything."""

    def __init__(self, position: Tensor | None, *weights: Tensor) -> None:
        self.position, self.tensors = position, weights

    def rebuild(self, tensors) -> Net:
        return Net(self.position, *tensors)

    def __call__(self, z: Tensor) -> Tensor:
        w1, b1, w2, b2 = self.tensors
        if self.position is not None:
            degree = torch.arange(w1.shape[0]) % len(self.position)
            w1 = w1 * (degree[:, None] > self.position)
            w2 = w2 * (self.position.repeat(len(w2) // len(self.position))[:, None] >= degree)
        return (torch.tanh(z @ w1.mT + b1) @ w2.mT + b2).unflatten(-1, (-1, w1.shape[1]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Net) and all(map(torch.equal, self.tensors, other.tensors))

    __hash__ = None


def _autoregressive(elementwise: Elementwise, *, turned: bool = False, tell_order: bool = True, plain: bool = False):
    def build(*weights):
        position = torch.arange(weights[0].shape[1])
        position = position.flip(0) if turned else position
        net = Net(position, *weights)
        return AutoregressiveTransform(
            (lambda z: net(z)) if plain else net, elementwise, order=position if tell_order else None
        )

    return build


def _coupling(elementwise: Elementwise):
    def build(*weights):
        mask = torch.arange(weights[0].shape[1]) % 2 == 1
        return CouplingTransform(Net(None, *weights), mask, elementwise)

    return build


def _same(features: int) -> int:
    return features


def _half(features: int) -> int:
    return (features + 1) // 2


STEPS: dict[str, Case] = {
    "planar": Case(lambda n, d, batch, s: [s * n(*batch, d), s * n(*batch, d), s * n(*batch)], _planar),
    "radial": Case(lambda n, d, batch, s: [s * n(*batch, d), s * n(*batch), s * n(*batch)], _radial),
    "triangular-affine": Case(
        lambda n, d, batch, s: [2 * s * n(*batch, d, d) / d, torch.tanh(s * n(*batch, d)), s * n(*batch, d)],
        _triangular_affine,
    ),
    "householder": Case(lambda n, d, batch, s: [s * n(*batch, 3, d)], HouseholderTransform),
    "orthogonal-sylvester": Case(_draw_sylvester(_half, lambda d: (d, _half(d))), _sylvester(polar)),
    "square-sylvester": Case(_draw_sylvester(_same, lambda d: (d, d)), _sylvester(polar)),
    "householder-sylvester": Case(_draw_sylvester(_same, lambda d: (min(d, 4), d)), _sylvester(HouseholderProduct)),
    "triangular-sylvester": Case(_draw_sylvester(_same), _sylvester(lambda: None)),
    "reversed-sylvester": Case(_draw_sylvester(_same), _sylvester(Reversal)),
    "free-sylvester": Case(_draw_sylvester(_same), _free_sylvester),
    "gated": Case(_draw_net(2), _autoregressive(Gated()), batched=False),
    "shift": Case(_draw_net(1), _autoregressive(Shift(), turned=True), batched=False),
    "affine": Case(_draw_net(2), _autoregressive(Affine()), batched=False),
    "affine-unknown-order": Case(_draw_net(2), _autoregressive(Affine(), turned=True, tell_order=False), batched=False),
    "affine-plain-function": Case(_draw_net(2), _autoregressive(Affine(), plain=True), batched=False),
    "additive-coupling": Case(_draw_net(1), _coupling(Shift()), batched=False),
    "affine-coupling": Case(_draw_net(2), _coupling(Affine()), batched=False),
    "spline": Case(_draw_net(5), _autoregressive(RationalQuadratic(bins=2, bound=3.0)), batched=False),
    "spline-coupling": Case(_draw_net(8), _coupling(RationalQuadratic(bins=3)), batched=False),
    "gated-coupling": Case(_draw_net(2), _coupling(Gated()), batched=False),
}

#: Families as (features, context, transforms) -> flow, at sizes that show their own options at work.
FLOWS: dict[str, Callable[[int, int, int], flows.Flow]] = {
    **flows.FAMILIES,
    "inverted-triangular": lambda d, c, k: flows.inverted(flows.TriangularSylvester(d, c, k)),
    "inverted-iaf": lambda d, c, k: flows.inverted(flows.IAF(d, c, k, order="alternating")),
    "composed": lambda d, c, k: flows.compose(flows.Planar(d, c, k), flows.HouseholderSylvester(d, c, 1)),
    "free-sylvester": lambda d, c, k: flows.OrthogonalSylvester(d, c, k, diagonals="free"),
    "deep-hypernetwork": lambda d, c, k: flows.OrthogonalSylvester(d, c, k, rank=d, hyper_features=(7,)),
}


@torch.no_grad()
def redraw(flow: flows.Flow, scale: float, *key: object) -> flows.Flow:
    """All of a flow's parameters, drawn anew at a scale. The hypernetwork's weights add a tenth for unit contexts."""
    turned = any(isinstance(module, InvertedSteps) for module in flow.steps)
    rng = generator("Inverted" if turned else type(flow).__name__, scale, *key)

    def randn(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=rng, dtype=torch.float64).to(like.dtype)

    for module in flow.modules():
        if isinstance(module, MaskedLinear):
            module.weight.copy_(scale / math.sqrt(module.in_features) * randn(module.weight))
            module.bias.copy_(scale * randn(module.bias))
        elif isinstance(module, Hypernetwork):
            spread = torch.cat([_spread(name, row.shape, scale).flatten() for name, row in module.table.items()])
            spread = spread.to(module.bias.dtype).repeat(module.transforms)
            module.bias.copy_(spread * randn(module.bias))
            if module.weight is not None:
                fan_in = module.weight.shape[1]
                module.weight.copy_(0.1 * spread[:, None] / math.sqrt(fan_in) * randn(module.weight))
        elif isinstance(module, nn.Linear):
            module.weight.copy_(randn(module.weight) / math.sqrt(module.in_features))
    return flow


def _spread(name: str, shape: tuple[int, ...], scale: float) -> Tensor:
    if name == "packed":
        m = shape[-1]
        off_diagonal = torch.full(shape, 2 * scale / math.sqrt(m), dtype=torch.float64)
        return off_diagonal.fill_diagonal_(scale)
    return torch.full(shape, scale, dtype=torch.float64)
