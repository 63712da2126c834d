"""Amortized flows: ``flow(context)`` gives a :class:`~sylvester.distributions.FlowDistribution`.

>>> import torch
>>> for make in FAMILIES.values():
...     posterior = make(4, context=3, transforms=2)(torch.randn(5, 3))
...     z, log_q = posterior.rsample_and_log_prob((10,))
...     assert torch.allclose(posterior.log_prob(z.clone()), log_q, atol=1e-3)
"""

from sylvester.flows.autoregressive import IAF, MAF, NSF, AffineIAF, MeanOnlyIAF
from sylvester.flows.base import AmortizedSteps, DiagonalGaussian, Flow, compose, inverted
from sylvester.flows.coupling import NICE, CouplingNSF, RealNVP
from sylvester.flows.gaussian import Gaussian
from sylvester.flows.householder import Householder
from sylvester.flows.hypernetwork import Hypernetwork, Output
from sylvester.flows.masked import MaskedSteps
from sylvester.flows.mixture import Mixture
from sylvester.flows.planar import Planar
from sylvester.flows.radial import Radial
from sylvester.flows.support import onto
from sylvester.flows.sylvester import HouseholderSylvester, OrthogonalSylvester, TriangularSylvester

#: The families by the names of the command line (``sylvester.names.FLOWS``).
FAMILIES: dict[str, type[Flow]] = {
    "gaussian": Gaussian,
    "planar": Planar,
    "radial": Radial,
    "householder": Householder,
    "orthogonal-sylvester": OrthogonalSylvester,
    "householder-sylvester": HouseholderSylvester,
    "triangular-sylvester": TriangularSylvester,
    "iaf": IAF,
    "mean-only-iaf": MeanOnlyIAF,
    "affine-iaf": AffineIAF,
    "maf": MAF,
    "nsf": NSF,
    "nice": NICE,
    "realnvp": RealNVP,
    "coupling-nsf": CouplingNSF,
}

__all__ = [
    "FAMILIES",
    "IAF",
    "MAF",
    "NICE",
    "NSF",
    "AffineIAF",
    "AmortizedSteps",
    "CouplingNSF",
    "DiagonalGaussian",
    "Flow",
    "Gaussian",
    "Householder",
    "HouseholderSylvester",
    "Hypernetwork",
    "MaskedSteps",
    "MeanOnlyIAF",
    "Mixture",
    "OrthogonalSylvester",
    "Output",
    "Planar",
    "Radial",
    "RealNVP",
    "TriangularSylvester",
    "compose",
    "inverted",
    "onto",
]
