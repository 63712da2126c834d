"""How the paper's experiments were run, written plainly: what the library has to agree with and to beat.

Two convolutions a gate in the default memory layout; reflections multiplied out as D x D matrices; orthogonalization
iterated and back-propagated through; R and R̃ from a full matrix and two diagonals; masks multiplied into the weights at
every call; probabilities rather than logits; and for importance sampling every image repeated, so that the encoder and
all parameters of the flow are computed anew for every sample. The constants that keep float32 finite are the library's,
so that both compute the same function. Imports torch alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, elu, linear, softplus

DIAGONAL_BOUND = 0.999
GATE_FLOOR = 1e-3


class Terms(NamedTuple):
    """One sample for each row of the batch."""

    z: Tensor  # (B, D)
    log_px_z: Tensor  # (B,)
    log_pz: Tensor  # (B,)
    log_q: Tensor  # (B,)


class GatedLayer(nn.Module):
    """(W * x + b) ⊙ σ(V * x + c), by two convolutions."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.value, self.gate = make(), make()

    def forward(self, x: Tensor) -> Tensor:
        return self.value(x) * torch.sigmoid(self.gate(x))


def gated(kind: type[nn.Module], *sizes: int, **options: int) -> GatedLayer:
    return GatedLayer(lambda: kind(*sizes, **options))


class ReferenceVAE(nn.Module):
    """The released encoder, one of the six posteriors, and the decoder, for binary images of one channel."""

    def __init__(
        self,
        flow: str,
        *,
        features: int = 64,
        context: int = 256,
        transforms: int = 16,
        rank: int = 32,
        reflections: int = 8,
        hidden: int = 1280,
        side: int = 28,
        tolerance: float = 1e-6,
    ) -> None:
        super().__init__()
        self.features, self.quarter = features, side // 4
        up = {"padding": 2, "stride": 2, "output_padding": 1}
        conv, transposed = nn.Conv2d, nn.ConvTranspose2d
        self.encoder = nn.Sequential(
            gated(conv, 1, 32, 5, padding=2),
            gated(conv, 32, 32, 5, padding=2, stride=2),
            gated(conv, 32, 64, 5, padding=2),
            gated(conv, 64, 64, 5, padding=2, stride=2),
            gated(conv, 64, 64, 5, padding=2),
            gated(conv, 64, context, self.quarter),
        )
        self.mean, self.variance = nn.Linear(context, features), nn.Linear(context, features)
        steps: dict[str, Callable[[], nn.Module]] = {
            "gaussian": Identity,
            "planar": lambda: Planar(features, context, transforms),
            "iaf": lambda: IAF(features, context, transforms, hidden),
            "orthogonal-sylvester": lambda: Orthogonal(features, context, transforms, rank, tolerance),
            "householder-sylvester": lambda: Householder(features, context, transforms, reflections),
            "triangular-sylvester": lambda: Triangular(features, context, transforms),
        }
        self.steps = steps[flow]()
        self.decoder = nn.Sequential(
            gated(transposed, features, 64, self.quarter),
            gated(transposed, 64, 64, 5, padding=2),
            gated(transposed, 64, 32, 5, **up),
            gated(transposed, 32, 32, 5, padding=2),
            gated(transposed, 32, 32, 5, **up),
            gated(transposed, 32, 32, 5, padding=2),
            nn.Conv2d(32, 1, 1),
            nn.Sigmoid(),
        )

    def posterior(self, h: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """From contexts h (B, E) to one sample z (B, D) each, and its log-density (B,)."""
        mean, variance = self.mean(h), softplus(self.variance(h)) + 1e-8
        z_0 = mean + variance.sqrt() * noise
        z, ladj = self.steps(h, z_0)
        return z, log_normal(z_0, mean, variance) - ladj

    def forward(self, x: Tensor, noise: Tensor) -> Terms:
        z, log_q = self.posterior(self.encoder(x).flatten(1), noise)
        probabilities = self.decoder(z[:, :, None, None])
        log_px_z = -binary_cross_entropy(probabilities, x, reduction="none").flatten(1).sum(1)
        return Terms(z, log_px_z, log_normal(z, torch.zeros_like(z), torch.ones_like(z)), log_q)


def log_normal(z: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return (-0.5 * (math.log(2 * math.pi) + variance.log() + (z - mean) ** 2 / variance)).sum(1)


def log_likelihood(model: ReferenceVAE, x: Tensor, samples: int, *, chunk: int = 500) -> Tensor:
    """log p(x) of one image x (1, 1, H, W), importance-sampled: a batch of copies, run through the whole model."""
    log_w = []
    with torch.no_grad():
        for start in range(0, samples, chunk):
            count = min(chunk, samples - start)
            terms = model(x.repeat(count, 1, 1, 1), torch.randn(count, model.features))
            log_w.append(terms.log_px_z + terms.log_pz - terms.log_q)
    return torch.cat(log_w).logsumexp(0) - math.log(samples)


class Identity(nn.Module):
    def forward(self, h: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return z, z.new_zeros(len(z))


class Planar(nn.Module):
    """z' = z + û tanh(w·z + b)."""

    def __init__(self, features: int, context: int, transforms: int) -> None:
        super().__init__()
        self.shape = (transforms, features)
        self.u, self.w = (nn.Linear(context, transforms * features) for _ in range(2))
        self.b = nn.Linear(context, transforms)

    def forward(self, h: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        u, w = (layer(h).unflatten(1, self.shape).unsqueeze(-1) for layer in (self.u, self.w))  # (B, K, D, 1)
        b = self.b(h)
        ladj = z.new_zeros(len(z))
        for k in range(self.shape[0]):
            wt = w[:, k].transpose(1, 2)
            wu = torch.bmm(wt, u[:, k])
            bounded = DIAGONAL_BOUND * (softplus(wu) - 1)
            u_hat = u[:, k] + (bounded - wu) * w[:, k] / (w[:, k] ** 2).sum(1, keepdim=True)
            a = torch.bmm(wt, z.unsqueeze(2)) + b[:, k, None, None]
            z = z + (u_hat * torch.tanh(a)).squeeze(2)
            psi = w[:, k] * (1 - torch.tanh(a) ** 2)
            ladj = ladj + torch.log(torch.abs(1 + torch.bmm(psi.transpose(1, 2), u_hat))).flatten()
        return z, ladj


class Sylvester(nn.Module, ABC):
    """z' = z + Q R tanh(R̃ Qᵀ z + b): what the three variants have in common.

    R takes the strict upper triangle of a full M x M output, R̃ the transposed strict lower one; the diagonals come from
    outputs of their own through tanh. QR and R̃Qᵀ are formed for every step of every sample.
    """

    upper: Tensor

    def __init__(self, rank: int, context: int, transforms: int) -> None:
        super().__init__()
        self.transforms, self.rank = transforms, rank
        self.full = nn.Linear(context, transforms * rank * rank)
        self.diagonal, self.diagonal_tilde, self.b = (nn.Linear(context, transforms * rank) for _ in range(3))
        self.register_buffer("upper", torch.ones(rank, rank).triu(1))

    @abstractmethod
    def orthonormal(self, h: Tensor) -> Tensor | None:
        """The matrices Q, (B, K, D, M); None where they alternate between the identity and the reversal."""

    def forward(self, h: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        each = (self.transforms, self.rank)
        full = self.full(h).unflatten(1, (*each, self.rank))  # (B, K, M, M)
        diagonal = DIAGONAL_BOUND * torch.tanh(self.diagonal(h).unflatten(1, each))
        diagonal_tilde = DIAGONAL_BOUND * torch.tanh(self.diagonal_tilde(h).unflatten(1, each))
        r = full * self.upper + torch.diag_embed(diagonal)
        r_tilde = full.transpose(2, 3) * self.upper + torch.diag_embed(diagonal_tilde)
        b, product, q = self.b(h).unflatten(1, each), diagonal * diagonal_tilde, self.orthonormal(h)
        ladj = z.new_zeros(len(z))
        for k in range(self.transforms):
            if q is None:
                turned = z.flip(1) if k % 2 else z
                change, log_scale = residual(turned, r[:, k], r_tilde[:, k], b[:, k], product[:, k])
                change = change.flip(1) if k % 2 else change
            else:
                outwards, inwards = torch.bmm(q[:, k], r[:, k]), torch.bmm(r_tilde[:, k], q[:, k].transpose(1, 2))
                change, log_scale = residual(z, outwards, inwards, b[:, k], product[:, k])
            z, ladj = z + change, ladj + log_scale
        return z, ladj


def residual(z: Tensor, outwards: Tensor, inwards: Tensor, b: Tensor, product: Tensor) -> tuple[Tensor, Tensor]:
    """What a step adds to z, QR tanh(R̃Qᵀ z + b), and its log-determinant."""
    h = torch.tanh(torch.bmm(inwards, z.unsqueeze(2)).squeeze(2) + b)
    return torch.bmm(outwards, h.unsqueeze(2)).squeeze(2), torch.log(torch.abs(1 + (1 - h**2) * product)).sum(1)


class Triangular(Sylvester):
    """Q needs no matrix."""

    def __init__(self, features: int, context: int, transforms: int) -> None:
        super().__init__(features, context, transforms)

    def orthonormal(self, h: Tensor) -> None:
        return None


class Orthogonal(Sylvester):
    """Q by iteration, all steps of the flow in one batch."""

    def __init__(self, features: int, context: int, transforms: int, rank: int, tolerance: float) -> None:
        super().__init__(rank, context, transforms)
        self.tolerance, self.shape = tolerance, (transforms, features, rank)
        self.q = nn.Linear(context, math.prod(self.shape))

    def orthonormal(self, h: Tensor) -> Tensor:
        q = self.q(h).reshape(-1, *self.shape[1:])
        return orthogonalize(q, self.tolerance).unflatten(0, (-1, self.transforms))


def orthogonalize(q: Tensor, tolerance: float = 1e-6, limit: int = 100) -> Tensor:
    """Q ← Q (I + ½ (I − QᵀQ)) from q over its Frobenius norm, until no entry of QᵀQ − I exceeds the tolerance."""
    eye = torch.eye(q.shape[-1], dtype=q.dtype)
    q = q / torch.linalg.matrix_norm(q, keepdim=True)
    for _ in range(limit):
        defect = eye - torch.bmm(q.transpose(1, 2), q)
        if defect.abs().max() <= tolerance:
            break
        q = torch.bmm(q, eye + 0.5 * defect)
    return q


class Householder(Sylvester):
    """Q = H_H ··· H_1, every reflection a matrix."""

    def __init__(self, features: int, context: int, transforms: int, reflections: int) -> None:
        super().__init__(features, context, transforms)
        self.shape = (transforms, reflections, features)
        self.v = nn.Linear(context, math.prod(self.shape))

    def orthonormal(self, h: Tensor) -> Tensor:
        v = self.v(h).reshape(-1, *self.shape[1:])
        return reflections_multiplied(v).unflatten(0, (-1, self.transforms))


def reflections_multiplied(v: Tensor) -> Tensor:
    """The products H_H ··· H_1 (N, D, D) of the reflections along v (N, H, D)."""
    eye = torch.eye(v.shape[-1], dtype=v.dtype)
    unit = v / torch.linalg.vector_norm(v, dim=2, keepdim=True)
    reflections = eye - 2 * unit.unsqueeze(3) * unit.unsqueeze(2)  # (N, H, D, D)
    q = reflections[:, 0]
    for i in range(1, v.shape[1]):
        q = torch.bmm(reflections[:, i], q)
    return q


class MaskedLinear(nn.Linear):
    """Its mask is multiplied into the weights at every call."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask.to(self.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight * self.mask, self.bias)


class AutoregressiveStep(nn.Module):
    """z' = g z + (1 − g) μ in the natural order, mean and gate by layers of their own."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        position, degree = torch.arange(features), torch.arange(hidden) % features
        self.first = MaskedLinear(degree[:, None] > position)
        self.second = MaskedLinear(degree[:, None] >= degree)
        self.mean, self.gate = (MaskedLinear(position[:, None] >= degree) for _ in range(2))
        nn.init.constant_(self.gate.bias, 1.0)

    def forward(self, z: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        h = elu(self.second(elu(self.first(z)) + context))
        gate = GATE_FLOOR + (1 - GATE_FLOOR) * torch.sigmoid(self.gate(h))
        return gate * z + (1 - gate) * self.mean(h), torch.log(gate).sum(1)


class IAF(nn.Module):
    """z is flipped before every second step and not flipped back."""

    def __init__(self, features: int, context: int, transforms: int, hidden: int) -> None:
        super().__init__()
        if transforms // 2 % 2:
            raise ValueError(f"Expected an even number of flips, so that z ends as it began; got {transforms} steps")
        self.context = nn.Linear(context, hidden)
        self.steps = nn.ModuleList(AutoregressiveStep(features, hidden) for _ in range(transforms))

    def forward(self, h: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        context, ladj = self.context(h), z.new_zeros(len(z))
        for k, each in enumerate(self.steps):
            z, change = each(z.flip(1) if k % 2 else z, context)
            ladj = ladj + change
        return z, ladj
