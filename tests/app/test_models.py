from __future__ import annotations

import pytest
import torch

from sylvester.app import memory, models
from sylvester.app.config import Config, ConfigError, resolve
from sylvester.names import FLOWS


def test_weights_of_format_0_are_recognised(tiny: Config) -> None:
    vae, other = (models.build(tiny, (1, 4, 4), "gaussian") for _ in range(2))
    torch.nn.init.normal_(vae.decoder.head.log_scale)
    old = {
        name.replace("encoder.layers", "encoder.1.layers").replace("decoder.head.", "decoder."): value
        for name, value in vae.state_dict().items()
    }
    assert {"encoder.1.layers.0.weight", "decoder.log_scale"} <= set(old)
    other.load_state_dict(old)
    for name, value in vae.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


@pytest.mark.parametrize("flow", FLOWS)
def test_a_rehearsal_counts_and_leaves_the_generator_alone(flow: str) -> None:
    config = resolve({"flow": flow, "latent": 8})
    before = torch.get_rng_state()
    counts = models.rehearse(config, (1, 4, 4), "bernoulli")
    assert torch.equal(torch.get_rng_state(), before)
    assert counts == models.parameter_counts(models.build(config, (1, 4, 4), "bernoulli"))


def test_a_model_that_could_not_be_trained_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    total = models.rehearse(resolve({}), (1, 4, 4), "bernoulli")["total"]
    monkeypatch.setattr(memory, "available", lambda: 12 * total)  # enough for the weights and little more
    with pytest.raises(ConfigError, match=rf"can be trained with .* for {total:,} parameters"):
        models.rehearse(resolve({}), (1, 4, 4), "bernoulli")


def test_memory_that_cannot_be_had_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert memory.exhausted(caught.value)
    assert not memory.exhausted(RuntimeError("shapes cannot be multiplied"))
    assert 0 < memory.available() < 2**50


@pytest.mark.parametrize("architecture", ["paper", "released"])
def test_convolutions_alone_ask_for_multiples_of_four(architecture: str) -> None:
    with pytest.raises(ConfigError, match="got 7 x 4: pad the images to 8 x 4, or take --architecture mlp"):
        models.build(resolve({"architecture": architecture}), (1, 7, 4), "bernoulli")
    assert models.build(resolve({"architecture": "mlp"}), (1, 7, 4), "bernoulli").sample(2).shape == (2, 1, 7, 4)
