"""Autoregressive flows: IAF (Kingma et al., 2016) in this direction, MAF (Papamakarios et al., 2017) in the other.

    z'_i = f(z_i; net_i(z_{<i})),    f increasing in z_i

The Jacobian is triangular in the order of the network, so ladj is the sum of the log-slopes of f. Forward takes one
pass of the network; the inverse takes as many as there are features, each of which settles one more coordinate. So do
scores, which ask for the transposed inverse of that Jacobian; in the other direction they take one backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sylvester.linalg.opaque import with_tangent
from sylvester.transforms.base import FlowTransform
from sylvester.transforms.conditioner import Conditioner, Rebuilt, rebuildable
from sylvester.transforms.elementwise import Elementwise


class AutoregressiveTransform(FlowTransform):
    """z'_i = f(z_i; numbers_i), where the numbers of coordinate i see only what precedes it.

    Args:
        net: maps ``(*, D)`` to ``(*, elementwise.numbers, D)``, autoregressively in some order.
        elementwise: what is done to one coordinate: ``Gated()``, ``Shift()``, ``Affine()`` or one's own.
        order: the position of each coordinate in that order, where it is known: the inverse then never shows
            the network a coordinate that is not settled yet. Without it any order works.
        batch_shape: of what the network is bound to.

    The inverse is found without a graph. Its derivatives come from the implicit function theorem: with J the triangular
    Jacobian at the solution, dz = J⁻¹(dy − ∂t/∂θ dθ), solved in as many passes of the network as there are features and
    in the memory of one. That takes a ``net`` whose tensors are known: a module, or an object as
    ``transforms.conditioner`` describes. A plain function is differentiated through all the passes of its inverse.

    >>> from sylvester.transforms import Affine
    >>> def net(z):  # each coordinate sees the one before it
    ...     before = torch.nn.functional.pad(z[..., :-1], (1, 0))
    ...     return torch.stack([before, before.sin()], -2)
    >>> t = AutoregressiveTransform(net, Affine(), order=torch.arange(3))
    >>> z = torch.randn(5, 3)
    >>> torch.allclose(t.inv(t(z)), z, atol=1e-4)
    True
    """

    parameters = ("net", "elementwise")

    def __init__(
        self,
        net: Conditioner,
        elementwise: Elementwise,
        *,
        order: Tensor | None = None,
        batch_shape: Sequence[int] = (),
        validate_args: bool = False,
        cache_size: int = 0,
    ):
        self.net, self.elementwise, self.order = net, elementwise, order
        features = None if order is None else order.shape[-1]
        super().__init__(features, batch_shape, validate_args=validate_args, cache_size=cache_size)

    def _forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        y, log_slope = self.elementwise.forward(z, self.net(z))
        return y, log_slope.sum(-1)

    def _forward_and_score(self, z: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, ladj = self._forward(z)
        with torch.no_grad():
            (_, log_slope), pull, *_ = torch.func.vjp(lambda x: self.elementwise.forward(x, self.net(x)), z.detach())
            zero, slope = torch.zeros_like(z), log_slope.exp()
            right = score - pull((zero, torch.ones_like(log_slope)))[0]
            pushed = _solve_transposed(self.order, lambda x: pull((x, torch.zeros_like(log_slope)))[0], slope, right)
        return y, ladj, pushed

    def _backward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        known = rebuildable(self.net)
        if known is None:
            z = invert(self.net, self.elementwise, self.order, y)
        else:
            z = _invert(known.rebuild, self.elementwise, self.order, y, *known.tensors)
        return z, self._forward(z)[1]


def invert(net: Conditioner, elementwise: Elementwise, order: Tensor | None, y: Tensor) -> Tensor:
    """Coordinates one after another, in the network's order."""
    # Errors may grow from coordinate to coordinate without bound, as may those of coordinates that are not settled
    # yet. Far from anything a model means, they stop, so that the network never sees an infinity (0 · inf is NaN).
    far = torch.finfo(y.dtype).max ** 0.25

    def solve(z: Tensor) -> Tensor:
        return elementwise.backward(y, net(z))[0].clamp(-far, far)

    return _in_order(order, solve, torch.zeros_like(y))


def _in_order(
    order: Tensor | None, solve: Callable[[Tensor], Tensor], x: Tensor, *, last_first: bool = False
) -> Tensor:
    """The fixed point of ``solve``, in which coordinate i depends on those before it (or behind it) alone."""
    places = range(x.shape[-1])
    for i in reversed(places) if last_first else places:
        solved = solve(x)
        x = solved if order is None else torch.where(order == i, solved, x)
    return x


def _solve_transposed(order: Tensor | None, pull: Callable[[Tensor], Tensor], slope: Tensor, right: Tensor) -> Tensor:
    """The u with Jᵀu = right, given u -> Jᵀu and the diagonal of J."""

    def solve(u: Tensor) -> Tensor:
        return u + (right - pull(u)) / slope

    return _in_order(order, solve, torch.zeros_like(right), last_first=True)


class _Invert(torch.autograd.Function):
    """z with t(z; θ) = y, as a function of y and of the tensors θ of the network.

    Reverse mode solves Jᵀλ = ḡ from the last coordinate to the first and gives λ to y and −λᵀ∂t/∂θ to θ; forward mode
    solves J ż = ẏ − ∂t/∂θ θ̇ from the first to the last. With the slopes s on J's diagonal, both are fixed points of
    λ ← λ + (ḡ − Jᵀλ)/s, which settles one coordinate a pass. Both are made of differentiable operations.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        rebuild: Rebuilt, elementwise: Elementwise, order: Tensor | None, y: Tensor, *tensors: Tensor
    ) -> Tensor:
        return invert(rebuild(tensors), elementwise, order, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.rebuild, ctx.elementwise, ctx.order, y, *tensors = inputs
        ctx.y_shape = y.shape
        ctx.save_for_backward(output, *tensors)
        ctx.save_for_forward(output, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, *tensors = ctx.saved_tensors
        step = _functional(ctx)
        pull, slope = _pullback(lambda point: step(point, *tensors), z)

        adjoint = _solve_transposed(ctx.order, lambda x: pull(x)[0], slope, grad)
        grads = _pullback(lambda *theta: step(z, *theta), *tensors)[0](-adjoint) if tensors else ()
        return None, None, None, adjoint.sum_to_size(ctx.y_shape), *grads

    @staticmethod
    def tangent(ctx: Any, *tangents: Tensor | None) -> Tensor:
        z, *tensors = ctx.saved_tensors
        step = _functional(ctx)
        pull, slope = _pullback(lambda point: step(point, *tensors), z)
        right = torch.zeros_like(z) if tangents[3] is None else tangents[3].expand_as(z)
        moving = {i: dot for i, dot in enumerate(tangents[4:]) if dot is not None}
        if moving:
            pull_theta, _ = _pullback(lambda *theta: step(z, *theta), *tensors)
            dots = tuple(moving.get(i, torch.zeros_like(theta)) for i, theta in enumerate(tensors))
            right = right - _transposed(pull_theta, z)(dots)

        def solve(z_dot: Tensor) -> Tensor:
            return z_dot + (right - _transposed(pull, z)((z_dot,))) / slope

        return _in_order(ctx.order, solve, torch.zeros_like(z))


_invert = with_tangent(_Invert)


def _functional(ctx: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """(z, *θ) -> (z', log-slopes)."""

    def step(z: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        return ctx.elementwise.forward(z, ctx.rebuild(tensors)(z))

    return step


Pullback = Callable[[Tensor], tuple[Tensor, ...]]


def _pullback(step: Callable[..., tuple[Tensor, Tensor]], *primals: Tensor) -> tuple[Pullback, Tensor]:
    """u -> Jᵀu for z', and the slopes."""
    (_, log_slope), pullback, *_ = torch.func.vjp(step, *primals)
    return lambda adjoint: pullback((adjoint, torch.zeros_like(log_slope))), log_slope.exp()


def _transposed(pull: Pullback, z: Tensor) -> Callable[[tuple[Tensor, ...]], Tensor]:
    """v -> J v, the transpose of the linear map u -> Jᵀu: torch's own forward mode does not nest everywhere."""
    push: Callable[..., Any] = torch.func.vjp(pull, torch.zeros_like(z))[1]
    return lambda tangents: push(tangents)[0]
