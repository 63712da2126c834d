"""Sylvester flows (van den Berg, Hasenclever, Tomczak & Welling, 2018).

    z' = z + Q R tanh(R̃ Qᵀ z + b)                                     (eq. 13)

Q (D x M) has orthonormal columns, R and R̃ (M x M) are upper triangular. Sylvester's identity
det(I_D + AB) = det(I_M + BA) turns the D x D Jacobian determinant into that of I + diag(tanh') R̃R, which is triangular
because QᵀQ = I drops out: its logarithm is a sum over M diagonal entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sylvester.linalg import Dense, OrthonormalOperator, as_operator, matvec, solve_tanh, solve_tanh_transposed
from sylvester.transforms.base import FlowTransform, batch_shape_of, broadcast


class SylvesterTransform(FlowTransform):
    """z' = z + Q R tanh(R̃ Qᵀ z + b), invertible where r_ii r̃_ii > −1.

    Args:
        q: ``(*, D, M)`` with orthonormal columns, or an operator (``linalg.HouseholderProduct``, ``linalg.Reversal``),
            or None for the identity.
        r, r_tilde: ``(*, M, M)``; what lies below their diagonals is ignored and gets no gradient.
        b: ``(*, M)``.

    The inverse never divides by R̃, which may be singular: with T = R̃R, solve a + T tanh(a) = R̃Qᵀz' + b for
    a = R̃Qᵀz + b (triangular and monotone), then z = z' − Q R tanh(a).

    Scores take one triangular solve. With H = diag(tanh'(a)) the Jacobian is J = I + QRHR̃Qᵀ, and ∂ladj/∂z = QR̃ᵀg for
    g = ∂ladj/∂a, g_i = −2ρ_i t_i h_i / (1 + ρ_i h_i). Outside the columns of Q, J is the identity; inside, Jᵀ is the
    lower triangular I + R̃ᵀHRᵀ. So with (I + R̃ᵀHRᵀ) x = Qᵀδ − R̃ᵀg, δ' = δ + Q(x − Qᵀδ).

    >>> q = torch.linalg.qr(torch.randn(6, 3)).Q
    >>> r, r_tilde = torch.rand(2, 3, 3).triu()
    >>> t = SylvesterTransform(q, r, r_tilde, torch.zeros(3), validate_args=True)
    >>> z = torch.randn(100, 6)
    >>> y, ladj = t.call_and_ladj(z)
    >>> torch.allclose(t.inv(y), z, atol=1e-4)
    True
    """

    parameters = ("q", "r", "r_tilde", "b")

    def __init__(
        self,
        q: Tensor | OrthonormalOperator | None,
        r: Tensor,
        r_tilde: Tensor,
        b: Tensor,
        *,
        validate_args: bool = False,
        cache_size: int = 0,
    ):
        rank = b.shape[-1] if b.dim() else 0
        if rank == 0 or r.shape[-2:] != (rank, rank) or r_tilde.shape[-2:] != (rank, rank):
            raise ValueError(
                "Expected r (*, M, M), r_tilde (*, M, M) and b (*, M); "
                f"got {tuple(r.shape)}, {tuple(r_tilde.shape)} and {tuple(b.shape)}"
            )
        if validate_args and not (_is_upper(r) and _is_upper(r_tilde)):
            raise ValueError("Expected upper triangular r and r_tilde; got nonzero entries below the diagonal")
        self._hold(q, r.triu(), r_tilde.triu(), b, r.diagonal(dim1=-2, dim2=-1) * r_tilde.diagonal(dim1=-2, dim2=-1))
        super().__init__(*self._sizes(), validate_args=validate_args, cache_size=cache_size)

    @classmethod
    def of_triangles(
        cls, q: Tensor | OrthonormalOperator | None, r: Tensor, r_tilde: Tensor, b: Tensor, rho: Tensor
    ) -> SylvesterTransform:
        """The same step from a caller who has the products ``rho`` = r_ii r̃_ii ``(*, M)`` and promises that nothing
        lies below the diagonals: that saves copies of the matrices and of their gradients."""
        step = cls.__new__(cls)
        step._hold(q, r, r_tilde, b, rho)
        FlowTransform.__init__(step, *step._sizes())
        return step

    def _hold(self, q: Tensor | OrthonormalOperator | None, r: Tensor, r_tilde: Tensor, b: Tensor, rho: Tensor) -> None:
        self.q, self.r, self.r_tilde, self.b, self._rho = as_operator(q), r, r_tilde, b, rho

    def _sizes(self) -> tuple[int, torch.Size]:
        """D, and the batch shape that all parameters share."""
        features, _ = self.q.shape(self.b.shape[-1])
        batch_shape = batch_shape_of(r=(self.r, 2), r_tilde=(self.r_tilde, 2), b=(self.b, 1))
        return features, broadcast(batch_shape, self.q.batch_shape) if self.q.batch_shape else batch_shape

    def _check_parameters(self) -> None:
        if not (self._rho > -1).all():
            raise ValueError(
                f"Expected r_ii r_tilde_ii > -1, or the step is not invertible; got {self._rho.min().item():.6g}"
            )
        if isinstance(self.q, Dense):
            gram = self.q.q.mT @ self.q.q
            error = (gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)).abs().max().item()
            if not error <= torch.finfo(gram.dtype).eps ** 0.5:
                raise ValueError(f"Expected q with orthonormal columns; got |qᵀq - I| up to {error:.3g}")

    def _forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self._project(z))  # (*, M)
        return z + self.q.matvec(matvec(self.r, h)), self._ladj(h)

    def _forward_and_score(self, z: Tensor, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self._project(z))
        with torch.no_grad():
            slope = 1 - h * h
            grad_ladj = -2 * self._rho * h * slope / (1 + self._rho * slope)
            inside = self.q.rmatvec(score)
            right = inside - matvec(self.r_tilde.mT, grad_ladj)
            pushed = score + self.q.matvec(solve_tanh_transposed(self.r, self.r_tilde, slope, right) - inside)
        return z + self.q.matvec(matvec(self.r, h)), self._ladj(h), pushed

    def _backward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(solve_tanh(self.r_tilde @ self.r, self._project(y)))
        return y - self.q.matvec(matvec(self.r, h)), self._ladj(h)

    def _project(self, z: Tensor) -> Tensor:
        """R̃ Qᵀ z + b."""
        return matvec(self.r_tilde, self.q.rmatvec(z)) + self.b

    def _ladj(self, h: Tensor) -> Tensor:
        return torch.log1p(self._rho * (1 - h * h)).sum(-1)


def _is_upper(a: Tensor) -> bool:
    return not a.tril(-1).any()
