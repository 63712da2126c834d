"""The linear algebra under the flows.

- :func:`polar`: the nearest matrix with orthonormal columns, with an implicit gradient;
- :class:`HouseholderProduct` (compact WY), :class:`Reversal`, :class:`Identity`, :class:`Dense`: matrices with
  orthonormal columns as operators;
- :func:`solve_tanh`: the triangular tanh equation whose solution inverts planar and Sylvester steps alike;
- :func:`solve_tanh_transposed`: the triangular system that takes scores through a Sylvester step.
"""

from sylvester.linalg.operators import (
    Dense,
    HouseholderProduct,
    Identity,
    OrthonormalOperator,
    Reversal,
    as_operator,
    matvec,
)
from sylvester.linalg.polar_factor import polar
from sylvester.linalg.tanh import solve_tanh, solve_tanh_transposed

__all__ = [
    "Dense",
    "HouseholderProduct",
    "Identity",
    "OrthonormalOperator",
    "Reversal",
    "as_operator",
    "matvec",
    "polar",
    "solve_tanh",
    "solve_tanh_transposed",
]
