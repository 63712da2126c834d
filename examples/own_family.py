"""A family of one's own: z' = sinh(δ asinh(z) + ε) for each coordinate, skewed by ε and heavy-tailed for small δ.

Jones & Pewsey's transformation (2009). With u = asinh(z) and v = δu + ε, ∂z'/∂z = δ cosh(v) / cosh(u).
"""

import torch

from sylvester.flows import AmortizedSteps, DiagonalGaussian, Flow, Output
from sylvester.transforms import FlowTransform


class SinhArcsinhTransform(FlowTransform):
    parameters = ("delta", "epsilon")

    def __init__(self, delta, epsilon):  # (*, D) each, delta > 0
        self.delta, self.epsilon = delta, epsilon
        super().__init__(delta.shape[-1], delta.shape[:-1])

    def _forward(self, z):
        u = torch.asinh(z)
        return torch.sinh(self.delta * u + self.epsilon), self._ladj(u)

    def _backward(self, y):
        u = (torch.asinh(y) - self.epsilon) / self.delta
        return torch.sinh(u), self._ladj(u)

    def _ladj(self, u):
        v = self.delta * u + self.epsilon
        return (self.delta.log() + v.cosh().log() - u.cosh().log()).sum(-1)


def bind(raw):
    steps = zip(raw["log_delta"].exp().unbind(-2), raw["epsilon"].unbind(-2), strict=True)
    return [SinhArcsinhTransform(*step) for step in steps]


class SinhArcsinh(Flow):
    def __init__(self, features, context=0, transforms=1):
        table = {name: Output((features,), spread=1e-4) for name in ("log_delta", "epsilon")}
        super().__init__(DiagonalGaussian(features, context), [AmortizedSteps(context, transforms, table, bind)])
