"""The equations, one family a file. Parameters are tensors, taken as given; constraints live in ``flows``."""

from sylvester.transforms.affine import TriangularAffineTransform
from sylvester.transforms.autoregressive import AutoregressiveTransform
from sylvester.transforms.base import FlowTransform, Inverse, call_and_ladj, call_ladj_and_score
from sylvester.transforms.coupling import CouplingTransform
from sylvester.transforms.elementwise import Affine, Elementwise, Gated, Shift
from sylvester.transforms.householder import HouseholderTransform
from sylvester.transforms.planar import PlanarTransform
from sylvester.transforms.radial import RadialTransform
from sylvester.transforms.spline import RationalQuadratic
from sylvester.transforms.support import SupportTransform
from sylvester.transforms.sylvester import SylvesterTransform

__all__ = [
    "Affine",
    "AutoregressiveTransform",
    "CouplingTransform",
    "Elementwise",
    "FlowTransform",
    "Gated",
    "HouseholderTransform",
    "Inverse",
    "PlanarTransform",
    "RadialTransform",
    "RationalQuadratic",
    "Shift",
    "SupportTransform",
    "SylvesterTransform",
    "TriangularAffineTransform",
    "call_and_ladj",
    "call_ladj_and_score",
]
