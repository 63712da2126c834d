from __future__ import annotations

import pytest
import torch

from sylvester.optim import Adamax

SHAPES = [(), (7,), (300, 400), (8, 4, 5, 5)]


def parameters():
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    made[-1].data = made[-1].data.to(memory_format=torch.channels_last)
    return made


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"betas": (0.8, 0.99)}], ids=str)
def test_is_torchs_adamax(options):
    ours, theirs = parameters(), parameters()
    optimizers = [Adamax(ours, lr=0.01, eps=1e-7, **options), torch.optim.Adamax(theirs, lr=0.01, eps=1e-7, **options)]
    for step in range(5):
        for a, b in zip(ours, theirs, strict=True):
            grad = torch.randn(a.shape)
            # Gradients need not come in their parameter's layout, nor come at all.
            a.grad = grad.clone() if step % 2 else grad.clone(memory_format=torch.preserve_format).contiguous()
            b.grad = grad.clone()
        ours[1].grad = theirs[1].grad = None
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    mine, other = (optimizer.state_dict()["state"] for optimizer in optimizers)
    torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_state_goes_both_ways():
    ours, theirs = parameters(), parameters()
    first, second = Adamax(ours), torch.optim.Adamax(theirs)
    for p in ours:
        p.grad = torch.ones_like(p)
    first.step()
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        for a, b in zip(ours, theirs, strict=True):
            b.copy_(a)
            b.grad = torch.ones_like(b)
    first.load_state_dict(second.state_dict())
    first.step()
    second.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_closure():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = Adamax([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert optimizer.step(closure).item() < 3.0
