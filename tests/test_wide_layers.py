"""Layers that are computed in pieces from some width on: the pieces against the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import elu, linear

from sylvester.flows import Hypernetwork, Output
from sylvester.flows import hypernetwork as hypernetworks
from sylvester.flows.masked import _BLOCK, MaskedLinear, MaskedNet


def agree(actual: Tensor, expected: Tensor, *leaves: Tensor) -> None:
    """Values and gradients."""
    torch.testing.assert_close(actual, expected)
    cotangent = torch.randn_like(expected)
    gradients = [torch.autograd.grad(y, leaves, cotangent, retain_graph=True) for y in (actual, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("turned", [False, True])
def test_a_masked_layer_is_its_masked_weights(turned: bool, float64: None) -> None:
    degrees = [torch.arange(width) % 7 for width in (2 * _BLOCK + 30, 3 * _BLOCK - 50)]
    before, after = (degree.sort(descending=turned).values for degree in degrees)
    layer = MaskedLinear(before, after)
    assert len(layer.blocks) == 3
    assert (layer.blocks[0][1] < layer.in_features) != turned  # only a staircase that rises has something to skip
    x = torch.randn(2, 3, layer.in_features, requires_grad=True)
    agree(layer(x), linear(x, layer.weight * layer.mask, layer.bias), x, layer.weight, layer.bias)


def test_a_wide_masked_network_is_autoregressive(float64: None) -> None:
    net = MaskedNet(range(5), (_BLOCK + 40, 2 * _BLOCK), 2, activation=elu)
    assert [len(layer.blocks) for layer in net.layers] == [1, 2, 1]
    for jacobian in torch.autograd.functional.jacobian(net.bind(None), torch.randn(5)):
        assert not jacobian.triu().any()
        assert jacobian.tril(-1).count_nonzero() == 10


def test_masked_blocks_have_second_derivatives_and_batches_of_gradients(float64: None) -> None:
    layer, x = MaskedLinear(torch.arange(_BLOCK), torch.arange(2 * _BLOCK)), torch.randn(4, _BLOCK)
    assert len(layer.blocks) == 2

    def loss(weight: Tensor, point: Tensor, whole: bool) -> Tensor:
        if whole:
            return linear(point, weight * layer.mask, layer.bias).tanh().sum()
        return torch.func.functional_call(layer, {"weight": weight}, (point,)).tanh().sum()

    weight = layer.weight.detach()
    each = [torch.func.vmap(torch.func.grad(loss), (None, 0, None))(weight, x, whole) for whole in (True, False)]
    torch.testing.assert_close(*each)
    weight.requires_grad_()
    twice = []
    for whole in (True, False):
        (grad,) = torch.autograd.grad(loss(weight, x, whole), weight, create_graph=True)
        twice.append(torch.autograd.grad(grad.square().sum(), weight))
    torch.testing.assert_close(*twice)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_a_wide_table_is_one_linear_layer(batch: tuple[int, ...], float64: None) -> None:
    outputs = hypernetworks._WIDE
    network = Hypernetwork(4, {"wide": Output((outputs,))}, transforms=3)
    context = torch.randn(*batch, 4, requires_grad=True)
    expected = linear(context, network.weight, network.bias).unflatten(-1, (3, outputs))
    agree(network(context)["wide"], expected, context, network.weight, network.bias)


def test_the_linear_layers_of_a_wide_table_have_second_derivatives_and_batches(float64: None) -> None:
    rows, weight, bias = torch.randn(2, 3), torch.randn(2, 4, 3), torch.randn(2, 4)
    arguments = tuple(each.requires_grad_() for each in (rows, weight, bias))
    assert torch.autograd.gradcheck(hypernetworks._linear, arguments)
    assert torch.autograd.gradgradcheck(hypernetworks._linear, arguments)
    many = torch.randn(5, 2, 3)
    batched = torch.func.vmap(hypernetworks._linear, (0, None, None))(many, weight, bias)
    torch.testing.assert_close(batched, torch.stack([hypernetworks._linear(one, weight, bias) for one in many]))
