"""Convolution by Fourier transforms against torch's convolutions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, conv_transpose2d

from sylvester.vae import GatedConvDecoder, GatedConvEncoder
from sylvester.vae.convolutional import GatedSame, SameConv
from sylvester.vae.spectral import SameConvolution, applies, batched_first, batched_last, pays

SIDES = [(1, 1), (2, 3), (7, 5), (4, 9), (14, 14), (28, 20)]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def directly(x: Tensor, kernel: Tensor, *, correlate: bool) -> Tensor:
    """x (H, W, B, C), kernel (k, k, C, C')."""
    padding = kernel.shape[0] // 2
    if correlate:
        y = conv2d(batched_first(x), kernel.permute(3, 2, 0, 1), padding=padding)
    else:
        y = conv_transpose2d(batched_first(x), kernel.permute(2, 3, 0, 1), padding=padding)
    return batched_last(y)


@pytest.mark.parametrize("correlate", [True, False])
@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
@pytest.mark.parametrize("sides", SIDES)
def test_it_is_torchs_convolution_with_its_gradients(
    sides: tuple[int, int], kernel: int, correlate: bool, float64: None
) -> None:
    same = SameConvolution(sides, kernel, correlate=correlate)
    x, weight = torch.randn(*sides, 3, 2, requires_grad=True), torch.randn(kernel, kernel, 2, 4, requires_grad=True)
    actual, expected = same(x, weight), directly(x, weight, correlate=correlate)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    cotangent = torch.randn_like(expected)
    gradients = [torch.autograd.grad(y, (x, weight), cotangent) for y in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)


def test_second_derivatives(float64: None) -> None:
    same = SameConvolution((3, 2), 3, correlate=True)
    x, weight = torch.randn(3, 2, 2, 2, requires_grad=True), torch.randn(3, 3, 2, 1, requires_grad=True)
    assert torch.autograd.gradgradcheck(same, (x, weight))


@pytest.mark.parametrize(("side", "channels"), [(28, (32, 64)), (14, (32, 128)), (7, (64, 128))])
def test_float32_is_as_accurate_as_the_direct_sum(side: int, channels: tuple[int, int]) -> None:
    same = SameConvolution((side, side), 5, correlate=True)
    x, weight = torch.randn(side, side, 20, channels[0]), torch.randn(5, 5, *channels)
    exact = directly(x.double(), weight.double(), correlate=True)
    errors = [(y - exact).norm() / exact.norm() for y in (same(x, weight), directly(x, weight, correlate=True))]
    assert errors[0] < errors[1] < 1e-6


def test_a_model_that_becomes_float64_is_exact() -> None:
    same = SameConvolution((7, 7), 5, correlate=True).double()
    x, weight = torch.randn(7, 7, 2, 3).double(), torch.randn(5, 5, 3, 2).double()
    torch.testing.assert_close(same(x, weight), directly(x, weight, correlate=True), rtol=0, atol=1e-12)


def test_nothing_of_it_is_saved() -> None:
    assert not SameConvolution((7, 7), 5, correlate=True).state_dict()


def test_kernels_need_a_centre() -> None:
    with pytest.raises(ValueError, match="odd size; got 4"):
        SameConvolution((7, 7), 4, correlate=True)


def test_it_serves_the_large_layers_and_not_the_first() -> None:
    assert not pays(1, 64, (28, 28), 5)
    assert not pays(32, 64, (28, 28), 1)
    for channels, side in (((32, 64), 28), ((32, 64), 14), ((32, 128), 14), ((64, 128), 7)):
        assert pays(*channels, (side, side), 5)


def test_where_it_applies() -> None:
    x = torch.zeros(16, 1, 2, 2)
    assert applies(x)
    assert not applies(x[:15])
    assert not applies(x.bfloat16())
    assert not applies(x.to("meta"))
    with torch.autocast("cpu"):
        assert not applies(x)


@pytest.mark.parametrize("likelihood", ["bernoulli", "categorical"])
def test_a_batch_is_what_its_images_are_one_by_one(likelihood: str, float64: None) -> None:
    """Few images are convolved directly, many by way of their spectra."""
    shape = (1, 12, 8)
    encoder, decoder = GatedConvEncoder(shape, 16), GatedConvDecoder(shape, 6, likelihood=likelihood)
    spectral = [layer for part in (encoder, decoder) for layer in part.layers if getattr(layer, "same", None)]
    assert any(isinstance(layer, GatedSame) for layer in spectral)
    assert (likelihood == "categorical") == any(isinstance(layer, SameConv) for layer in spectral)
    x, z = torch.rand(17, *shape), torch.randn(17, 6)
    torch.testing.assert_close(encoder(x), torch.cat([encoder(one) for one in x.split(1)]))
    value = torch.ones(shape)
    torch.testing.assert_close(
        decoder(z).log_prob(value), torch.cat([decoder(one).log_prob(value) for one in z.split(1)])
    )


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_compiled_it_agrees(kind: type[nn.Module], float64: None) -> None:
    layer = GatedSame(kind, 16, 16, 5, (7, 7))
    assert layer.same is not None
    x = torch.randn(16, 16, 7, 7, requires_grad=True)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    torch.testing.assert_close(*(torch.autograd.grad(f(x).square().sum(), x) for f in (compiled, layer)))
