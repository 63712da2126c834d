"""Every hand-written derivative beside the plain expression it stands for: values, and derivatives of both modes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from cases import SCALES, Net, generator
from torch import Tensor

from sylvester.flows import hypernetwork, masked
from sylvester.flows import sylvester as sylvester_flows
from sylvester.linalg import polar, polar_factor, solve_tanh
from sylvester.transforms import Affine, autoregressive

pytestmark = pytest.mark.usefixtures("float64")

POSITION = torch.arange(3)
BLOCKS = [(slice(0, 2), 3), (slice(2, 4), 5)]


@dataclass(frozen=True)
class Handwritten:
    function: Callable[..., object]
    plain: Callable[..., object]
    shapes: tuple[tuple[int, ...], ...]
    prepare: Callable[..., list[Tensor]] = lambda *inputs: list(inputs)

    def inputs(self, name: str, scale: float) -> list[Tensor]:
        rng = generator(name, scale)
        drawn = [scale * torch.randn(shape, generator=rng) for shape in self.shapes]
        return [each.detach().requires_grad_() for each in self.prepare(*drawn)]


def _masked_blocks(weight: Tensor) -> list[Tensor]:
    mask = _mask()
    return [(weight * mask)[rows, :reach] for rows, reach in BLOCKS]


def _mask() -> Tensor:
    return (torch.arange(4)[:, None] >= torch.arange(5) - 1).double()


def _unpack(packed: Tensor, raw_diagonal: Tensor) -> tuple[Tensor, ...]:
    diagonals = [0.999 * raw.tanh() for raw in (packed.diagonal(dim1=-2, dim2=-1), raw_diagonal)]
    triangles = packed.triu(1), packed.tril(-1)
    return *(a + torch.diag_embed(d) for a, d in zip(triangles, diagonals, strict=True)), *diagonals


def _polar(a: Tensor) -> Tensor:
    """A (AᵀA)^(−1/2), by eigenvectors."""
    values, v = torch.linalg.eigh(a.mT @ a)
    return a @ v @ torch.diag_embed(values.rsqrt()) @ v.mT


def _lyapunov(p: Tensor, s: Tensor) -> Tensor:
    """vec(PX + XP) = (I ⊗ P + P ⊗ I) vec(X)."""
    identity = torch.eye(3)
    whole = torch.stack([torch.kron(identity, each) + torch.kron(each, identity) for each in p])
    return torch.linalg.solve(whole, s.flatten(1)).unflatten(1, (3, 3))


def _solve_tanh(t: Tensor, c: Tensor) -> Tensor:
    """Newton's method with its graph: a step from the root is the root, with its first and second derivatives."""
    t = t.triu()
    a = solve_tanh(t, c).detach()
    for _ in range(3):
        h = a.tanh()
        jacobian = torch.eye(3) + t * (1 - h * h).unsqueeze(-2)
        a = a - torch.linalg.solve(jacobian, a + (t @ h.unsqueeze(-1)).squeeze(-1) - c)
    return a


def _invert(y: Tensor, *weights: Tensor) -> Tensor:
    return autoregressive._invert(Net(POSITION).rebuild, Affine(), POSITION, y, *weights)


def _substitute(y: Tensor, *weights: Tensor) -> Tensor:
    """All passes of the inverse with their graph."""
    return autoregressive.invert(Net(POSITION, *weights), Affine(), POSITION, y)


def _positive(p: Tensor, *rest: Tensor) -> list[Tensor]:
    return [p @ p.mT + 0.1 * torch.eye(3), *rest]


HANDWRITTEN = {
    "linear": Handwritten(
        hypernetwork._linear,
        lambda rows, weight, bias: torch.einsum("be,koe->kbo", rows, weight) + bias.unsqueeze(1),
        ((2, 3), (2, 4, 3), (2, 4)),
    ),
    "masked blocks": Handwritten(
        lambda weight: masked._masked_blocks(weight, _mask(), BLOCKS), _masked_blocks, ((4, 5),)
    ),
    "unpack": Handwritten(sylvester_flows._unpack, _unpack, ((2, 3, 3), (2, 3))),
    "polar, tall": Handwritten(polar, _polar, ((2, 4, 3),)),
    "polar, square": Handwritten(polar, _polar, ((2, 3, 3),)),
    "lyapunov": Handwritten(
        # Symmetric as derivatives see it, too.
        lambda p, s: polar_factor._lyapunov((p + p.mT) / 2, s),
        lambda p, s: _lyapunov((p + p.mT) / 2, s),
        ((2, 3, 3), (2, 3, 3)),
        _positive,
    ),
    "solve tanh": Handwritten(
        solve_tanh,
        _solve_tanh,
        ((2, 3, 3), (4, 2, 3)),
        lambda t, c: [t.triu(1) + torch.diag_embed(0.9 * t.diagonal(dim1=-2, dim2=-1).tanh()), c],
    ),
    "invert": Handwritten(_invert, _substitute, ((2, 3), (6, 3), (6,), (6, 6), (6,))),
}

EVERY = pytest.mark.parametrize("name", HANDWRITTEN)


@EVERY
@pytest.mark.parametrize("scale", SCALES)
def test_value_and_gradients_are_those_of_the_plain_expression(name, scale):
    case = HANDWRITTEN[name]
    inputs = case.inputs(name, scale)
    outputs = [_tuple(function(*inputs)) for function in (case.function, case.plain)]
    torch.testing.assert_close(*outputs)
    cotangents = [torch.randn_like(each) for each in outputs[0]]
    torch.testing.assert_close(*(torch.autograd.grad(each, inputs, cotangents) for each in outputs))


@EVERY
@pytest.mark.parametrize("scale", SCALES)
def test_tangents_are_those_of_the_plain_expression(name, scale):
    case = HANDWRITTEN[name]
    inputs = tuple(each.detach() for each in case.inputs(name, scale))
    tangents = tuple(torch.randn_like(each) for each in inputs)
    found = [torch.func.jvp(lambda *args, f=f: _tuple(f(*args)), inputs, tangents) for f in (case.function, case.plain)]
    torch.testing.assert_close(*found)


@EVERY
def test_derivatives_of_both_modes_and_of_second_order(name):
    case = HANDWRITTEN[name]
    inputs = case.inputs(name, 1.0)
    assert torch.autograd.gradcheck(case.function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(case.function, inputs)


@EVERY
def test_forward_over_reverse_is_reverse_over_reverse(name):
    case = HANDWRITTEN[name]
    first, *rest = (each.detach() for each in case.inputs(name, 1.0))

    def loss(x: Tensor) -> Tensor:
        return sum(each.square().sum() for each in _tuple(case.function(x, *rest)))

    hessians = torch.func.hessian(loss)(first), torch.func.jacrev(torch.func.jacrev(loss))(first)
    torch.testing.assert_close(*hessians)


def _tuple(value: object) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
