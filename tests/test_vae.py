"""The model: parts against hand-written ones, any image size, any prior, one set of terms."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, Laplace, MultivariateNormal, Normal
from torch.nn.functional import conv2d, conv_transpose2d

from sylvester.flows import Flow, Gaussian, Planar, TriangularSylvester
from sylvester.vae import (
    VAE,
    GatedConvDecoder,
    GatedConvEncoder,
    MLPDecoder,
    MLPEncoder,
    PixelLevels,
)
from sylvester.vae.convolutional import Gated, GatedCollapse, GatedConv, GatedSpread

SHAPES = [(1, 8, 8), (1, 28, 20), (3, 32, 32)]
LIKELIHOODS = ["bernoulli", "categorical", "gaussian"]
UPSAMPLE = {"padding": 2, "stride": 2, "output_padding": 1}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def draw_images(likelihood: str, *shape: int) -> Tensor:
    if likelihood == "gaussian":
        return torch.randn(shape)
    levels = 2 if likelihood == "bernoulli" else 256
    return torch.randint(levels, shape) / (levels - 1)


def small_vae(**options: object) -> VAE:
    flow = TriangularSylvester(3, 8, 2, init="torch")
    return VAE(MLPEncoder(5, 8), flow, MLPDecoder(5, 3, hidden_features=(16,)), **options)


@pytest.mark.parametrize(
    ("architecture", "parameters"),
    # 2 (in · out · k² + out) each: 1→32, 32→32, 32→64, three or two times 64→64, and 64→256 with k = 7.
    [
        ("paper", 1_664 + 51_264 + 102_528 + 3 * 204_928 + 1_606_144),
        ("released", 1_664 + 51_264 + 102_528 + 2 * 204_928 + 1_606_144),
    ],
)
def test_encoder_has_the_parameters_of_the_paper(architecture: str, parameters: int) -> None:
    assert count(GatedConvEncoder((1, 28, 28), architecture=architecture)) == parameters


@pytest.mark.parametrize(
    ("shape", "likelihood", "head", "kernel"),
    [
        ((1, 28, 28), "bernoulli", 32 + 1, 49),
        ((1, 28, 28), "gaussian", 32 + 1 + 1, 49),
        ((1, 28, 20), "categorical", (32 * 256 * 25 + 256) + (256 * 256 + 256), 35),
        ((3, 32, 32), "bernoulli", 3 * (32 + 1), 64),
    ],
)
def test_decoder_has_the_parameters_of_the_paper(
    shape: tuple[int, ...], likelihood: str, head: int, kernel: int
) -> None:
    # 64→64 over the whole map, 64→64, 64→32 and three times 32→32, all gated, then the head.
    body = 2 * (64 * 64 * kernel + 64) + 204_928 + 102_464 + 3 * 51_264
    assert count(GatedConvDecoder(shape, likelihood=likelihood)) == body + head


@pytest.mark.parametrize(
    ("layer", "sides", "convolve", "options"),
    [
        (lambda: GatedConv(nn.Conv2d, 3, 4, 5, padding=2), (6, 7), conv2d, {"padding": 2}),
        (
            lambda: GatedConv(nn.Conv2d, 3, 4, 5, padding=2, stride=2),
            (6, 7),
            conv2d,
            {"padding": 2, "stride": 2},
        ),
        (lambda: GatedConv(nn.ConvTranspose2d, 3, 4, 5, **UPSAMPLE), (6, 7), conv_transpose2d, UPSAMPLE),
        (lambda: GatedCollapse(3, 4, (6, 7)), (6, 7), conv2d, {}),
        (lambda: GatedSpread(3, 4, (6, 7)), (1, 1), conv_transpose2d, {}),
    ],
)
def test_a_gated_layer_is_two_convolutions(
    layer: Callable[[], Gated],
    sides: tuple[int, int],
    convolve: Callable[..., Tensor],
    options: dict[str, int],
) -> None:
    gated = layer().double()
    weight, bias = gated.convolution.weight, gated.convolution.bias
    w, v = weight.chunk(2, 1 if gated.convolution.transposed else 0)
    b, c = bias.chunk(2)
    x = torch.randn(2, 3, *sides, dtype=torch.float64, requires_grad=True)
    expected = convolve(x, w, b, **options) * torch.sigmoid(convolve(x, v, c, **options))
    actual = gated(x)
    torch.testing.assert_close(actual, expected)
    cotangent = torch.randn_like(expected)
    leaves = (x, weight, bias)
    torch.testing.assert_close(
        torch.autograd.grad(actual, leaves, cotangent), torch.autograd.grad(expected, leaves, cotangent)
    )


@pytest.mark.parametrize("part", [GatedConvEncoder, GatedConvDecoder])
def test_each_half_of_a_gate_starts_as_torch_would_start_it_alone(part: Callable[..., nn.Module]) -> None:
    for layer in part((1, 28, 28)).layers:
        if not isinstance(layer, Gated):
            continue
        kind, weight = type(layer.convolution), layer.convolution.weight
        alone = kind(layer.convolution.in_channels, layer.convolution.out_channels // 2, weight.shape[2:])
        bound = alone.weight.abs().max().item()
        for half in weight.chunk(2, 1 if layer.convolution.transposed else 0):
            assert half.abs().max().item() == pytest.approx(bound, rel=0.02)
            assert half.std().item() == pytest.approx(alone.weight.std().item(), rel=0.1)
        # Torch bounds weights and biases alike.
        assert bound / 2 < layer.convolution.bias.abs().max().item() <= bound * 1.02


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_layers_work_in_channels_last_forwards_and_backwards(part: str) -> None:
    encoder, decoder = GatedConvEncoder((1, 8, 8)), GatedConvDecoder((1, 8, 8))
    layers = (encoder if part == "encoder" else decoder).layers
    convolutions = [layer.convolution for layer in layers if isinstance(layer, GatedConv)]
    strides: list[bool] = []

    def look(x: Tensor) -> None:
        strides.append(x.is_contiguous(memory_format=torch.channels_last))

    for convolution in convolutions:
        convolution.register_forward_hook(lambda _module, _inputs, output: look(output))
        convolution.register_full_backward_hook(lambda _module, _inputs, outputs: look(outputs[0]))
    x = torch.rand(2, 1, 8, 8, requires_grad=True)
    decoder(encoder(x)[:, :64]).log_prob(torch.ones(1, 8, 8)).sum().backward()
    assert len(strides) == 2 * len(convolutions)
    assert all(strides)
    for layer in layers:
        if isinstance(layer, Gated):
            assert layer.convolution.weight.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_any_image_size_channels_and_likelihood(shape: tuple[int, int, int], likelihood: str) -> None:
    encoder = GatedConvEncoder(shape, 16)
    vae = VAE(encoder, Planar(6, 16, 2), GatedConvDecoder(shape, 6, likelihood=likelihood))
    x = draw_images(likelihood, 2, *shape)
    terms = vae.log_terms(x, 3)
    assert terms.z.shape == (3, 2, 6)
    assert terms.log_px_z.shape == terms.log_pz.shape == terms.log_q.shape == (3, 2)
    terms.log_w.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in vae.parameters())
    # Samples and the batch are decoded together as they would be one by one.
    alone = vae.decoder(terms.z[1, 1]).log_prob(x[1])
    torch.testing.assert_close(terms.log_px_z[1, 1], alone, rtol=1e-5, atol=1e-3)
    assert vae.reconstruct(x).shape == x.shape
    drawn = vae.sample(4)
    assert drawn.shape == (4, *shape)
    assert vae.sample(4, mean=True).shape == (4, *shape)
    if likelihood != "gaussian":
        levels = 1 if likelihood == "bernoulli" else 255
        torch.testing.assert_close((drawn * levels).round() / levels, drawn, rtol=0, atol=1e-6)
        assert drawn.min() >= 0
        assert drawn.max() <= 1


@pytest.mark.parametrize("shape", [5, (5,), (2, 3, 5)])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_dense_layers_see_vectors_and_images_alike(shape: int | tuple[int, ...], likelihood: str) -> None:
    sizes = (shape,) if isinstance(shape, int) else shape
    if likelihood == "categorical" and len(sizes) == 1:
        with pytest.raises(ValueError, match=r"Expected images .* got the shape \(5,\)"):
            MLPDecoder(shape, 3, likelihood=likelihood)
        return
    encoder, decoder = MLPEncoder(shape, 8).double(), MLPDecoder(shape, 3, likelihood=likelihood).double()
    x, z = draw_images(likelihood, 4, *sizes).double(), torch.randn(2, 4, 3).double()
    torch.testing.assert_close(encoder(x), encoder.layers(x.reshape(4, -1)))
    assert encoder(x[0]).shape == (8,)
    if likelihood == "gaussian":
        assert decoder.head.log_scale.shape == (sizes[0], *(1 for _ in sizes[1:]))
        torch.nn.init.normal_(decoder.head.log_scale)
    found = decoder(z)
    assert found.batch_shape == (2, 4)
    assert found.event_shape == sizes
    numbers = decoder.layers(z)
    if likelihood == "bernoulli":
        expected = Bernoulli(logits=numbers.unflatten(-1, sizes)).log_prob(x)
    elif likelihood == "gaussian":
        expected = Normal(numbers.unflatten(-1, sizes), decoder.head.log_scale.exp()).log_prob(x)
    else:
        expected = Categorical(logits=numbers.unflatten(-1, (*sizes, 256))).log_prob((255 * x).round())
    torch.testing.assert_close(found.log_prob(x), expected.flatten(2).sum(-1))


@pytest.mark.parametrize("shape", [(1, 28, 27), (1, 30, 28), (28, 28), (0, 28, 28), (1, 0, 4)])
@pytest.mark.parametrize("part", [GatedConvEncoder, GatedConvDecoder])
def test_other_sides_are_refused(part: Callable[..., nn.Module], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="multiples of 4"):
        part(shape)


@pytest.mark.parametrize(
    "build",
    [
        lambda: GatedConvEncoder((1, 8, 8), architecture="deep"),
        lambda: GatedConvDecoder((1, 8, 8), likelihood="poisson"),
        lambda: MLPDecoder(3, 2, likelihood="categorical"),
        lambda: MLPDecoder((1, 4, 4), 2, likelihood="poisson"),
        lambda: MLPEncoder(3, hidden_features=(0,)),
        lambda: MLPEncoder((3, 0)),
        lambda: MLPEncoder((1, 4, 4))(torch.zeros(2, 16)),
        lambda: GatedConvEncoder((1, 8, 8))(torch.zeros(2, 1, 8, 12)),
        lambda: GatedConvDecoder((1, 8, 8), 4)(torch.zeros(2, 5)),
        lambda: PixelLevels(torch.zeros(8, 8, 256)),
        lambda: small_vae(prior=Normal(torch.zeros(3), 1.0)),
        lambda: small_vae(prior=Gaussian(4)),
        lambda: small_vae(prior=Independent(Normal(torch.zeros(2, 3), 1.0), 1)),
    ],
)
def test_bad_input_is_refused(build: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"Expected .*; got"):
        build()


def test_pixel_levels_are_a_categorical_for_each_pixel() -> None:
    logits = torch.randn(2, 3, 1, 4, 2, 256, dtype=torch.float64) * 3
    pixels = PixelLevels(logits)
    assert pixels.batch_shape == (2, 3)
    assert pixels.event_shape == (1, 4, 2)
    level = torch.randint(256, (3, 1, 4, 2))
    expected = Independent(Categorical(logits=logits), 3).log_prob(level)
    torch.testing.assert_close(pixels.log_prob(level / 255), expected)
    torch.testing.assert_close(pixels.expand((5, 2, 3)).log_prob(level / 255), expected.expand(5, 2, 3))
    every_level = (torch.arange(256) / 255).reshape(256, 1, 1, 1)  # in float32: k/255 is met exactly
    one_pixel = PixelLevels(logits[0, 0, :, :1, :1])
    probability = one_pixel.log_prob(every_level).exp()
    torch.testing.assert_close(probability, logits[0, 0, 0, 0, 0].softmax(0))
    torch.testing.assert_close(one_pixel.mean.squeeze(), (probability * every_level.squeeze()).sum())


def test_pixel_levels_draw_what_they_say() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0]).repeat(2, 1, 1, 3, 1)
    logits[1] = logits[1].flip(-1)
    drawn = PixelLevels(logits).sample((20_000,))
    assert drawn.shape == (20_000, 2, 1, 1, 3)
    for level in range(4):
        share = (drawn * 3 == level).double().mean(0)
        expected = logits.softmax(-1)[..., level].double()
        assert ((share - expected).abs() < 4.5 * (expected * (1 - expected) / 20_000).sqrt()).all()


def test_bernoulli_is_exact_at_saturated_logits() -> None:
    decoder = MLPDecoder(1, 1, hidden_features=(), likelihood="bernoulli")
    with torch.no_grad():
        decoder.layers[0].weight.fill_(1.0)
        decoder.layers[0].bias.zero_()
    log_p = decoder(torch.tensor([[200.0], [-200.0]])).log_prob(torch.ones(1))
    torch.testing.assert_close(log_p, torch.tensor([0.0, -200.0]))


def test_log_terms_are_the_densities_at_the_sample() -> None:
    vae = small_vae().double()
    x, noise = torch.randn(4, 5).double(), torch.randn(6, 4, 3).double()
    terms = vae.log_terms(x, 6, noise=noise)
    torch.testing.assert_close(terms.log_q, vae.posterior(x).log_prob(terms.z))
    torch.testing.assert_close(terms.log_pz, -0.5 * (terms.z**2 + math.log(2 * math.pi)).sum(-1))
    torch.testing.assert_close(terms.log_px_z, vae.decoder(terms.z).log_prob(x))
    torch.testing.assert_close(terms.log_w, terms.log_px_z + terms.log_pz - terms.log_q)
    for same in (vae(x, 6, noise=noise), vae.log_terms(x, 6, noise=noise, posterior=vae.posterior(x))):
        torch.testing.assert_close(same, terms)


def test_the_encoder_can_be_shown_something_else() -> None:
    vae = small_vae().double()
    x, seen = torch.randn(2, 4, 5).double()
    noise, mask = torch.randn(6, 4, 3).double(), 2.0 * (torch.rand(4, 8) < 0.5).double()
    posterior = vae.flow(mask * vae.encoder(seen))
    expected = vae.log_terms(x, 6, noise=noise, posterior=posterior)
    torch.testing.assert_close(vae.log_terms(x, 6, noise=noise, seen=seen, context_mask=mask), expected)
    torch.testing.assert_close(expected.log_px_z, vae.decoder(expected.z).log_prob(x))
    with pytest.raises(ValueError, match=r"Expected context_mask of shape \(4, 8\), .*; got \(4, 1\)"):
        vae.log_terms(x, 6, noise=noise, context_mask=mask[:, :1])
    with pytest.raises(ValueError, match=r"Expected x of shape \(3, 5\), .*; got \(4, 5\)"):
        vae.log_terms(x, seen=seen[:3])
    for given in ({"seen": seen}, {"context_mask": mask}):
        with pytest.raises(ValueError, match=r"Expected a posterior, or .*; got both"):
            vae.log_terms(x, 6, noise=noise, posterior=posterior, **given)


@pytest.mark.parametrize(
    "prior",
    [
        Independent(Laplace(torch.ones(3), 2.0), 1),
        MultivariateNormal(torch.ones(3), torch.eye(3) + 0.5),
    ],
)
def test_any_distribution_is_a_prior(prior: Independent) -> None:
    vae = small_vae(prior=prior)
    terms = vae.log_terms(torch.randn(4, 5), 2)
    torch.testing.assert_close(terms.log_pz, prior.log_prob(terms.z))
    assert vae.sample(7).shape == (7, 5)


def test_a_flow_is_a_prior_that_trains() -> None:
    vae = small_vae(prior=Planar(3, transforms=2))
    terms = vae.log_terms(torch.randn(4, 5), 2)
    torch.testing.assert_close(terms.log_pz, vae.prior().log_prob(terms.z))
    terms.log_w.mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in vae.prior.parameters())
    assert vae.sample(7).shape == (7, 5)


@pytest.mark.usefixtures("bf16")
def test_autocast_stays_out_of_the_flow() -> None:
    flow, decoder = TriangularSylvester(3, 5, 2, init="torch"), MLPDecoder(5, 3)
    vae = VAE(nn.Identity(), flow, decoder)
    x, noise = torch.randn(4, 5), torch.randn(6, 4, 3)
    expected = vae.log_terms(x, 6, noise=noise)
    with torch.autocast("cpu", torch.bfloat16):
        actual = vae.log_terms(x, 6, noise=noise)
    assert {term.dtype for term in actual if term is not None} == {torch.float32}
    for name in ("z", "log_pz", "log_q"):
        assert torch.equal(getattr(actual, name), getattr(expected, name))
    assert not torch.equal(actual.log_px_z, expected.log_px_z)  # the decoder did run in bfloat16
    torch.testing.assert_close(actual.log_px_z, expected.log_px_z, rtol=0.02, atol=0.2)


def test_autocast_stays_out_of_a_prior_that_is_a_flow_and_out_of_reconstructions() -> None:
    vae = VAE(nn.Identity(), TriangularSylvester(3, 5, init="torch"), MLPDecoder(5, 3), Planar(3, init="torch"))
    dtypes: list[torch.dtype] = []
    vae.decoder.register_forward_hook(lambda _module, inputs, _output: dtypes.append(inputs[0].dtype))
    x = torch.randn(4, 5)
    torch.manual_seed(1)
    z = vae.posterior(x).rsample()
    with torch.autocast("cpu", torch.bfloat16):
        vae.sample(4)
        torch.manual_seed(1)
        again = vae.reconstruct(x)
        torch.testing.assert_close(again, vae.decoder(z).mean, rtol=0, atol=0)
    assert set(dtypes) == {torch.float32}


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_our_decoders_give_full_precision_under_autocast(likelihood: str) -> None:
    decoder = GatedConvDecoder((1, 8, 8), 3, likelihood=likelihood)
    vae = VAE(GatedConvEncoder((1, 8, 8), 8), Planar(3, 8, 2), decoder)
    with torch.autocast("cpu", torch.bfloat16):
        assert vae.log_terms(draw_images(likelihood, 2, 1, 8, 8)).log_w.dtype == torch.float32


class Decoder(nn.Linear):
    """A user's own decoder, whose distribution the user chooses."""

    def __init__(self, make: Callable[[Tensor], object]) -> None:
        super().__init__(3, 64)
        self.make = make

    def forward(self, z: Tensor) -> object:
        return self.make(super().forward(z))


MISTAKES: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "tensor": (lambda y: y, r"to be a distribution over x, .*; got a tensor of shape \(2, 64, 64\)"),
    "tuple": (lambda y: (y, y), r"to be a distribution over x, .*; got tuple"),
    "pixels as a batch": (
        lambda y: Bernoulli(logits=y),
        r"with batch shape \(2, 64\), .*; got batch shape \(2, 64, 64\) and event shape \(\): Independent",
    ),
    "all one event": (
        lambda y: Independent(Bernoulli(logits=y), 2),
        r"with batch shape \(2, 64\), .*; got batch shape \(2,\) and event shape \(64, 64\)",
    ),
    "another size": (
        lambda y: Independent(Bernoulli(logits=y[..., :1]), 1),
        r"x of shape \(64, 1\), a batch of the decoder's events; got \(64, 64\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_decoder_that_gives_something_else_is_told_so(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    vae = VAE(nn.Identity(), Planar(3, 64), Decoder(make))
    with pytest.raises(ValueError, match=f"Expected .*{message}"):
        vae.log_terms(torch.zeros(64, 64), 2)  # as many images as pixels: shapes that would broadcast


@pytest.mark.parametrize("make", [lambda y: Bernoulli(logits=y), lambda y: Normal(y.float(), y.sigmoid())])
def test_coarse_likelihoods_are_refused(make: Callable[[Tensor], Distribution]) -> None:
    vae = VAE(nn.Identity(), Planar(3, 64), Decoder(lambda y: Independent(make(y), 1)))
    vae.log_terms(torch.zeros(4, 64))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"Expected .*\.to\(z\.dtype\); got"):
        vae.log_terms(torch.zeros(4, 64))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(5), r"x with a batch axis, .* \(B, 8\); got x of shape \(5,\) and encoder\(x\) .* \(8,\)"),
        (torch.zeros(2, 3, 5), r"x with a batch axis, .*; got x of shape \(2, 3, 5\)"),
        (
            torch.zeros(2, 5, dtype=torch.uint8),
            r"x as floating-point .*; got a tensor .* and torch.uint8",
        ),
        (
            torch.zeros(2, 5, dtype=torch.long),
            r"x as floating-point .*; got a tensor .* and torch.int64",
        ),
        (torch.zeros(2, 5).numpy(), r"x as a tensor of floating-point numbers, .*; got numpy.ndarray"),
    ],
)
def test_other_data_is_refused(x: Tensor, message: str) -> None:
    vae = small_vae()
    for use in (vae.log_terms, vae.posterior, vae.reconstruct, vae):
        with pytest.raises(ValueError, match=f"Expected {message}"):
            use(x)
    with pytest.raises(ValueError, match="Expected"):
        vae.log_terms(x, posterior=vae.posterior(torch.zeros(2, 5)))


def test_other_noise_and_other_contexts_are_refused() -> None:
    vae = small_vae()
    for shape in ((4, 3), (1, 4, 2), (2, 4, 3), (1, 3, 3)):
        with pytest.raises(ValueError, match=r"Expected noise of shape \(1, 4, 3\), .*; got"):
            vae.log_terms(torch.zeros(4, 5), noise=torch.zeros(shape))
    vae.encoder = nn.LSTM(5, 8)
    with pytest.raises(ValueError, match=r"encoder\(x\) as a tensor \(B, 8\); got .* encoder\(x\) tuple"):
        vae.log_terms(torch.zeros(4, 5))


@pytest.mark.parametrize("prior", [None, Planar, TriangularSylvester])
def test_a_model_built_without_memory_takes_its_weights_from_a_file(prior: type[Flow] | None) -> None:
    def build() -> VAE:
        flow = TriangularSylvester(3, 8, 2, init="torch")
        return VAE(MLPEncoder(5, 8), flow, MLPDecoder(5, 3), prior=prior and prior(3, transforms=2))

    vae = build().double()
    with torch.device("meta"):
        other = build()
    assert other.origin.device.type == "meta"
    other.load_state_dict(vae.state_dict(), assign=True)
    assert other.origin.device.type == "cpu"
    assert other.origin.dtype == torch.float64
    x, noise = torch.randn(4, 5).double(), torch.randn(2, 4, 3).double()
    torch.testing.assert_close(other.log_terms(x, 2, noise=noise), vae.log_terms(x, 2, noise=noise))


def test_state_dict_holds_the_parameters_and_keeps_the_layout() -> None:
    vae, other = (VAE(GatedConvEncoder((1, 8, 8), 8), Planar(3, 8), GatedConvDecoder((1, 8, 8), 3)) for _ in range(2))
    state = {name: tensor.contiguous() for name, tensor in vae.state_dict().items()}
    assert set(state) >= {name for name, _ in vae.named_parameters()}
    other.load_state_dict(state)
    x, noise = draw_images("bernoulli", 2, 1, 8, 8), torch.randn(1, 2, 3)
    torch.testing.assert_close(other.log_terms(x, noise=noise), vae.log_terms(x, noise=noise))
    weight = other.decoder.layers[1].convolution.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_the_model_compiles_without_a_graph_break() -> None:
    vae = VAE(GatedConvEncoder((1, 8, 8), 8), Planar(3, 8, 2), GatedConvDecoder((1, 8, 8), 3))
    x, noise = draw_images("bernoulli", 2, 1, 8, 8), torch.randn(5, 2, 3)
    compiled = torch.compile(
        lambda x, noise: vae.log_terms(x, 5, noise=noise).log_w, backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(x, noise), vae.log_terms(x, 5, noise=noise).log_w)
