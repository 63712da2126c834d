"""What the README says of other libraries, of those that are installed here."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.autograd.functional import jacobian

from sylvester.transforms import SylvesterTransform


def _log_determinant(step: object, z: torch.Tensor) -> torch.Tensor:
    return torch.linalg.slogdet(jacobian(step, z)).logabsdet  # type: ignore[arg-type]


def test_the_log_determinant_of_pyros_sylvester_is_wrong_and_ours_is_not(float64: None) -> None:
    transforms = pytest.importorskip("pyro.distributions.transforms", reason="Pyro is not installed")
    step = transforms.Sylvester(5, count_transforms=4)
    for parameter in step.parameters():
        torch.nn.init.normal_(parameter)
    z = torch.randn(5)
    y = step(z)
    truth = _log_determinant(step, z)
    assert abs(step.log_abs_det_jacobian(z, y).sum() - truth) > 0.1
    with pytest.raises(KeyError):
        step.inv(torch.randn(5))  # of a new point, there is none

    r, r_tilde = (torch.randn(5, 5).triu(1) + torch.diag(torch.randn(5).tanh()) for _ in range(2))
    q = torch.linalg.qr(torch.randn(5, 5)).Q
    ours = SylvesterTransform(q, r, r_tilde, torch.randn(5))
    torch.testing.assert_close(ours.log_abs_det_jacobian(z, ours(z)), _log_determinant(ours, z))
    torch.testing.assert_close(ours(ours.inv(y)), y)


def test_planar_flows_of_normflows_have_no_inverse() -> None:
    normflows = pytest.importorskip("normflows", reason="normflows is not installed")
    with pytest.raises(NotImplementedError):
        normflows.flows.Planar((2,)).inverse(torch.zeros(1, 2))


@pytest.mark.parametrize("module", ["zuko.flows", "normflows.flows", "nflows.transforms"])
def test_elsewhere_there_are_no_sylvester_flows(module: str) -> None:
    # In a process of its own: zuko changes torch's distributions.
    code = f"import {module} as peer; print([name for name in dir(peer) if 'ylvester' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(f"{module} is not installed")
    assert done.stdout.strip() == "[]", done.stderr
