"""Numbers that the library gave once, kept in golden.json, so that a change of its inside shows where it changes them.

One entry per flow and initialization ("iaf/torch") and per architecture and likelihood ("paper/bernoulli"):

    state    shapes of the parameters by their keys, and three numbers of each after torch.manual_seed(0)
    z, …     samples, their log-density and the log-density of given points, in float64, from weights drawn by key
    losses   of three steps of Adamax from the seeded initialization, and after them, on one batch with one noise

A number that changes on purpose is recorded anew, all of them or single entries, and the difference read line by line:

    python tests/test_golden.py [ENTRY …]
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sylvester.app import models
from sylvester.app.config import resolve
from sylvester.flows import FAMILIES
from sylvester.objectives import elbo
from sylvester.optim import Adamax
from sylvester.vae import VAE, MLPDecoder, MLPEncoder

GOLDEN = Path(__file__).with_name("golden.json")

FEATURES, CONTEXT, TRANSFORMS, BATCH, PIXELS = 6, 5, 3, 4, 10
SHAPE = (1, 8, 12)
INITS = ("identity", "torch")
OPTIONS: dict[str, dict[str, Any]] = {
    "orthogonal-sylvester": {"rank": 4},
    "householder-sylvester": {"reflections": 3},
    **{family: {"hidden_features": 8} for family in ("iaf", "mean-only-iaf", "affine-iaf", "maf", "nice", "realnvp")},
    **{family: {"hidden_features": 8, "bins": 5} for family in ("nsf", "coupling-nsf")},
}
FLOWS = [f"{family}/{init}" for family in FAMILIES for init in INITS]
ARCHITECTURES, LIKELIHOODS = ("mlp", "paper", "released"), ("bernoulli", "categorical")
MODELS = [f"{architecture}/{likelihood}" for architecture in ARCHITECTURES for likelihood in LIKELIHOODS]

#: Keys that have other names than in golden.json: (pattern of today's, name there), as re.sub takes them.
RENAMED: tuple[tuple[str, str], ...] = ()


def make_flow(name: str) -> nn.Module:
    family, init = name.split("/")
    make: Callable[..., nn.Module] = FAMILIES[family]
    options = OPTIONS.get(family, {})
    if init == "torch" and "hidden_features" in options:
        options = options | {"activation": "elu"}  # as in the paper's experiments
    return make(FEATURES, context=CONTEXT, transforms=TRANSFORMS, init=init, **options)


def make_vae(name: str) -> VAE:
    """Of a flow with small dense parts, or as the application builds it; seeded."""
    torch.manual_seed(0)
    if name in FLOWS:
        encoder = MLPEncoder(PIXELS, CONTEXT, hidden_features=(7,))
        decoder = MLPDecoder(PIXELS, FEATURES, hidden_features=(7,), likelihood="bernoulli")
        return VAE(encoder, make_flow(name), decoder)
    architecture, likelihood = name.split("/")
    settings = {"architecture": architecture, "latent": FEATURES, "transforms": TRANSFORMS}
    return models.build(resolve(settings), SHAPE, likelihood)


def numbers(name: str, *shape: int) -> Tensor:
    """Uniform on [-1, 1], in float64, a function of the name: Python keeps this stream the same for ever."""
    draw = random.Random(name).random
    return torch.tensor([2 * draw() - 1 for _ in range(torch.Size(shape).numel())], dtype=torch.float64).reshape(shape)


def data(name: str) -> Tensor:
    """A batch that suits the likelihood: zeros and ones, or the 256 levels from 0 to 1."""
    x = numbers("x", BATCH, *((PIXELS,) if name in FLOWS else SHAPE))
    return ((x + 1) * 127.5).round() / 255 if name.endswith("categorical") else (x > 0).double()


def recorded_key(key: str) -> str:
    for pattern, name in RENAMED:
        key = re.sub(pattern, name, key)
    return key


def state(module: nn.Module) -> dict[str, Any]:
    found = {}
    for key, tensor in module.state_dict().items():
        flat = tensor.flatten().tolist()
        seeded = [flat[i] for i in (0, len(flat) // 2, -1)] if flat else []
        found[recorded_key(key)] = {"shape": list(tensor.shape), "seeded": seeded}
    return found


def densities(name: str) -> dict[str, Any]:
    flow = make_flow(name).double()
    weights = {
        # Standard deviation 0.3: z and log q move by about one, and the inverses stay well conditioned.
        key: 0.3 * 3**0.5 * numbers(recorded_key(key), *tensor.shape)
        for key, tensor in flow.state_dict().items()
    }
    flow.load_state_dict(weights)
    context, noise = numbers("context", BATCH, CONTEXT), 2 * numbers("noise", 2, BATCH, FEATURES)
    with torch.no_grad():
        posterior = flow(context)
        z, log_q = posterior.rsample_and_log_prob((2,), noise=noise)
        log_prob = posterior.log_prob(numbers("points", BATCH, FEATURES))
    return {"z": z.tolist(), "log_q": log_q.tolist(), "log_prob": log_prob.tolist()}


def losses(vae: VAE, x: Tensor) -> list[float]:
    dtype = next(vae.parameters()).dtype
    x, noise = x.to(dtype), 2 * numbers("noise", 1, BATCH, FEATURES).to(dtype)
    optimizer = Adamax(vae.parameters(), lr=5e-3, eps=1e-7)
    found = []
    for step in range(4):
        loss = -elbo(vae.log_terms(x, noise=noise)).mean()
        found.append(loss.item())
        if step < 3:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return found


def entry(name: str) -> dict[str, Any]:
    """What golden.json holds under this name."""
    found: dict[str, Any] = {"losses": losses(make_vae(name), data(name))}
    if name in FLOWS:
        torch.manual_seed(0)
        return found | {"state": state(make_flow(name))} | densities(name)
    return found | {"state": state(make_vae(name))}


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


def assert_close(found: Any, recorded: Any, *, rtol: float, atol: float) -> None:
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), torch.tensor(recorded, dtype=torch.float64), rtol=rtol, atol=atol
    )


def test_every_flow_and_architecture_is_recorded(golden):
    assert sorted(golden) == sorted(FLOWS + MODELS)


@pytest.mark.parametrize("name", FLOWS + MODELS)
def test_keys_shapes_and_seeded_weights(name, golden):
    torch.manual_seed(0)
    found, recorded = state(make_flow(name) if name in FLOWS else make_vae(name)), golden[name]["state"]
    assert {key: each["shape"] for key, each in found.items()} == {key: each["shape"] for key, each in recorded.items()}
    for key, each in found.items():
        assert_close(each["seeded"], recorded[key]["seeded"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", FLOWS)
def test_samples_and_densities(name, golden):
    for what, found in densities(name).items():
        assert_close(found, golden[name][what], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", FLOWS + MODELS)
def test_training_losses(name, golden):
    assert_close(losses(make_vae(name), data(name)), golden[name]["losses"], rtol=1e-4, atol=0)


def lines(value: Any, indent: str = "") -> Iterator[str]:
    """JSON with a line per list, so that a difference shows what changed; numbers to twelve digits."""
    if not isinstance(value, dict):
        yield json.dumps(rounded(value))
        return
    yield "{"
    for i, key in enumerate(sorted(value)):
        first, *rest = lines(value[key], indent + "  ")
        *rest, last = [f"{indent}  {json.dumps(key)}: {first}", *rest]
        yield from rest
        yield last + "," * (i < len(value) - 1)
    yield indent + "}"


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value


def record(names: list[str]) -> None:
    """Write these entries anew, or all, and drop those that nothing makes any more."""
    if unknown := set(names) - set(FLOWS + MODELS):
        raise SystemExit(f"Expected entries among {', '.join(FLOWS + MODELS)}; got {', '.join(sorted(unknown))}")
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    new = {
        name: entry(name) if not names or name in names or name not in known else known[name] for name in FLOWS + MODELS
    }
    GOLDEN.write_text("\n".join(lines(new)) + "\n")


if __name__ == "__main__":
    record(sys.argv[1:])
