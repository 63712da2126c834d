"""The settings that a recipe is made of: each does what it says, and a run with it resumes exactly."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sylvester.app import data, models, results, training
from sylvester.app.averages import OWN, Averages
from sylvester.app.config import RECIPE, Config, resolve
from sylvester.app.optimizers import make_optimizer, set_learning_rate
from sylvester.app.runs import Run
from sylvester.app.schedules import Stage, kl_weight, learning_rate
from sylvester.app.selection import History, best_epoch, choose, is_validated, next_stage
from sylvester.app.state import State
from sylvester.app.training import draw, shard_loss
from sylvester.objectives import elbo
from tests.app.commands import sylvester
from tests.app.conftest import Stop, assert_identical, stop_at, without_seconds

ALL: dict[str, Any] = {
    "optimizer": "adamw",
    "beta2": 0.99,
    "weight_decay": 0.05,
    "flow_rate": 0.1,
    "schedule": "cosine",
    "warmup_steps": 4,
    "clip": 5.0,
    "warmup_by": "step",
    "beta_start": 0.1,
    "validate_every": 2,
    "smooth": 2,
    "averages": (0.5, 0.9),
    "dropout": 0.1,
    "flip": 0.05,
    "shift": 0.5,
    "mirror": 0.25,
    "refine_epochs": 3,
    "refine_rate": 1e-3,
}


@pytest.fixture
def with_settings(tiny: Config) -> Callable[..., Config]:
    def make(**settings: Any) -> Config:
        return resolve(tiny.model_dump(exclude_none=True) | settings)

    return make


def build(config: Config) -> models.VAE:
    torch.manual_seed(0)
    return models.build(config, (1, 4, 4), "bernoulli")


def test_cosine_is_torchs_after_a_linear_warmup(with_settings: Callable[..., Config]) -> None:
    epochs, steps, warmup, rate = 4, 7, 5, 0.3
    config = with_settings(schedule="cosine", warmup_steps=warmup, learning_rate=rate)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps - warmup)
    expected = [rate * (step + 1) / warmup for step in range(warmup)]
    for _ in range(epochs * steps - warmup):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr()[0] == pytest.approx(0, abs=1e-12)  # after the last step
    places = [(Stage(epoch, epochs), step, steps) for epoch in range(1, epochs + 1) for step in range(1, steps + 1)]
    assert [learning_rate(config, *place) for place in places] == pytest.approx(expected)
    refining = config.model_copy(update={"refine_rate": 0.03})
    halfway = [learning_rate(refining, Stage(4, 6, refining=refine), 3, 7) for refine in (False, True)]
    assert halfway[1] == pytest.approx(halfway[0] / 10)
    constant = config.model_copy(update={"schedule": "constant"})
    assert [learning_rate(constant, *place) for place in places[warmup:]] == [rate] * (epochs * steps - warmup)


def test_the_kl_term_grows_by_steps_from_its_start_and_stays_whole_in_refinement(
    with_settings: Callable[..., Config],
) -> None:
    config = with_settings(warmup=2, warmup_by="step", beta_start=0.1)
    weights = [kl_weight(config, Stage(epoch, 9), step, 5) for epoch in (1, 2, 3) for step in range(1, 6)]
    assert weights == pytest.approx([0.1 + 0.9 * min(step / 10, 1) for step in range(1, 16)])
    by_epoch = config.model_copy(update={"warmup_by": "epoch"})
    assert [kl_weight(by_epoch, Stage(1, 9), step, 5) for step in (1, 5)] == pytest.approx([0.55, 0.55])
    assert kl_weight(config, Stage(1, 3, refining=True), 1, 5) == 1


@pytest.mark.parametrize("name", ["adamax", "adam", "adamw"])
def test_optimizers_are_torchs(name: str, with_settings: Callable[..., Config]) -> None:
    config = with_settings(optimizer=name, beta1=0.8, beta2=0.95, learning_rate=0.01)
    ours, theirs = build(config).double(), build(config).double()
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamax": lambda parameters, **options: torch.optim.Adamax(parameters, eps=1e-7, **options),
        "adam": torch.optim.Adam,
        "adamw": lambda parameters, **options: torch.optim.AdamW(parameters, weight_decay=0.0, **options),
    }
    optimizers = make_optimizer(ours, config), kinds[name](theirs.parameters(), lr=0.02, betas=(0.8, 0.95))
    set_learning_rate(optimizers[0], 0.02)
    for _ in range(5):
        for vae, optimizer in zip((ours, theirs), optimizers, strict=True):
            torch.manual_seed(1)
            vae.zero_grad()
            (-elbo(vae.log_terms(torch.ones(3, 1, 4, 4).double()))).mean().backward()
            optimizer.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_weights_of_the_inference_network_alone_decay(with_settings: Callable[..., Config]) -> None:
    config = with_settings(optimizer="adamw", weight_decay=0.5, learning_rate=0.1)
    vae = build(config)
    with torch.no_grad():
        for parameter in vae.parameters():
            parameter.normal_()  # biases start at zero, where decay would not show
    before = {name: value.detach().clone() for name, value in vae.named_parameters()}
    for parameter in vae.parameters():
        parameter.grad = torch.zeros_like(parameter)
    make_optimizer(vae, config).step()
    decayed = {name for name, value in vae.named_parameters() if not torch.equal(value, before[name])}
    assert decayed == {name for name, value in before.items() if value.dim() > 1 and not name.startswith("decoder")}
    assert {name.partition(".")[0] for name in decayed} == {"encoder", "flow"}
    for name in decayed:
        torch.testing.assert_close(vae.get_parameter(name), before[name] * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("name", ["adamax", "adam", "adamw"])
@pytest.mark.parametrize("refining", [False, True])
def test_the_flows_steps_have_a_learning_rate_of_their_own(
    name: str, refining: bool, with_settings: Callable[..., Config]
) -> None:
    """The first step of all three optimizers is the learning rate, against the gradient's sign."""
    vae = build(with_settings())
    before = {key: value.detach().clone() for key, value in vae.named_parameters()}
    for parameter in vae.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = make_optimizer(vae, with_settings(optimizer=name, flow_rate=0.1), refining=refining)
    set_learning_rate(optimizer, 0.02)
    optimizer.step()
    for key, value in vae.named_parameters():
        step = 0.0 if refining and key.startswith("decoder") else 0.002 if key.startswith("flow.steps") else 0.02
        torch.testing.assert_close(before[key] - value, torch.full_like(value, step), rtol=1e-3, atol=1e-6)


def test_long_gradients_are_shortened(with_settings: Callable[..., Config], halves: data.Dataset) -> None:
    norms = []
    for clip in (None, 0.01):
        config = with_settings(clip=clip, batch_size=25) if clip else with_settings(batch_size=25)
        state = State.start(training.make_fabric(config), config, build(config))
        trained = training.train_epoch(state, Stage(1, 3), halves, training.ignore)
        norms.append(torch.stack([p.grad.norm() for p in state.vae.parameters() if p.grad is not None]).norm().item())
    assert norms[0] > 1
    assert norms[1] == pytest.approx(0.01, rel=1e-3)
    assert trained["gradient_norm"] == pytest.approx(norms[0], rel=1e-5)


def test_the_rate_of_a_step_is_the_schedules(with_settings: Callable[..., Config], halves: data.Dataset) -> None:
    """Adam's first step moves every weight by the learning rate."""
    config = with_settings(optimizer="adam", warmup_steps=10, learning_rate=0.01, batch_size=25)
    state = State.start(training.make_fabric(config), config, build(config))
    before = [p.detach().clone() for p in state.vae.parameters()]
    training.train_epoch(state, Stage(1, 3), halves, training.ignore)
    moved = max((p - q).abs().max().item() for p, q in zip(state.vae.parameters(), before, strict=True))
    assert moved == pytest.approx(0.001, rel=1e-3)


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_averages_are_weighted_sums_over_the_steps(scale: float) -> None:
    model = torch.nn.Linear(3, 2).double()
    averages = Averages(model, (0.5, 0.999))
    seen = []
    for _ in range(20):
        with torch.no_grad():
            model.weight.copy_(scale * torch.randn(2, 3).double())
        seen.append(model.weight.detach().clone())
        averages.update()
    assert averages.candidates == (OWN, 0.5, 0.999)
    for decay in (0.5, 0.999):
        weights = torch.tensor([decay ** (19 - step) for step in range(20)], dtype=torch.float64)
        expected = torch.einsum("s,sij->ij", weights / weights.sum(), torch.stack(seen))
        with averages.applied(decay):
            torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-12, atol=1e-14)
        assert torch.equal(model.weight, seen[-1])
    with averages.applied(OWN):
        assert torch.equal(model.weight, seen[-1])


def found(**bounds: float) -> dict[float, dict[str, float]]:
    return {float(key) if key != "own" else OWN: {"neg_elbo": value, "kl": 1.0} for key, value in bounds.items()}


def test_a_validation_takes_the_candidate_with_the_lowest_mean_of_the_last_ones() -> None:
    assert choose([], found(own=3.0), 1) == {"valid_neg_elbo": 3.0, "valid_kl": 1.0}
    history: History = []
    for own, slow in ((9.0, 5.0), (1.0, 4.0), (6.0, 4.5)):
        line = choose(history, found(own=own) | {0.9: {"neg_elbo": slow, "kl": 2.0}}, 2)
        history += [line, {"train_kl": 0.0}]  # an epoch without validation
    first, second, third = history[::2]
    assert (first["average"], first["valid_smoothed"], first["valid_neg_elbo"]) == (0.9, 5.0, 5.0)
    assert (second["average"], second["valid_smoothed"], second["valid_neg_elbo"]) == (0.9, 4.5, 4.0)
    assert (third["average"], third["valid_smoothed"], third["valid_kl"]) == (OWN, 3.5, 1.0)
    assert (second["valid_neg_elbo_0"], second["valid_neg_elbo_0.9"]) == (1.0, 4.0)
    assert best_epoch(history) == 5
    assert best_epoch([{"valid_neg_elbo": 2.0}, {}, {"valid_neg_elbo": 1.0}, {"valid_neg_elbo": 1.0}]) == 3


def test_patience_is_looked_at_where_there_is_a_validation(with_settings: Callable[..., Config]) -> None:
    config = with_settings(epochs=20, warmup=0, patience=3, validate_every=2, refine_epochs=2)
    assert [epoch for epoch in range(1, 21) if is_validated(Stage(epoch, 20), config)] == list(range(2, 21, 2))
    assert is_validated(Stage(7, 7), config)
    none, one = {"train_kl": 0.0}, {"valid_neg_elbo": 1.0}
    history = [none, {"valid_neg_elbo": 0.0}, none, one]
    assert next_stage(history, config) == Stage(5, 20)
    assert next_stage([*history, none], config) == Stage(6, 20)  # three epochs without a better one, but not known
    history += [none, one]
    assert next_stage(history, config) == Stage(1, 2, refining=True)
    assert next_stage([*history, {"refine": 1}], config) == Stage(2, 2, refining=True)
    assert next_stage([*history, {"refine": 1}, {"refine": 2, "valid_neg_elbo": 0.5}], config) is None
    assert next_stage([none] * 19 + [one], config.model_copy(update={"refine_epochs": 0})) is None


def test_the_encoder_alone_sees_flipped_pixels_and_loses_outputs() -> None:
    x = (torch.rand(4000, 1, 4, 4) < 0.3).float()
    shard = draw(x, (0, "train", 1, 1), 2, binarize=False, flip=0.1, dropout=0.25)
    plain = draw(x, (0, "train", 1, 1), 2, binarize=False)
    assert plain.seen is None
    assert plain.context_mask is None
    assert torch.equal(shard.x, x)
    assert torch.equal(shard.noise, plain.noise)
    assert shard.seen is not None
    assert shard.context_mask is not None
    flipped = shard.seen != x
    assert torch.equal(shard.seen[flipped], 1 - x[flipped])
    assert flipped.float().mean().item() == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / x.numel()))
    assert shard.context_mask.unique().tolist() == pytest.approx([0.0, 4 / 3])
    count = shard.context_mask.numel()
    assert (shard.context_mask == 0).float().mean().item() == pytest.approx(0.25, abs=4 * math.sqrt(0.1875 / count))


def test_a_share_of_the_images_is_moved_by_one_pixel_evenly_in_eight_directions() -> None:
    x = torch.zeros(4000, 2, 5, 6)
    x[:, 0, 2, 3], x[:, 1, 2, 1] = 1.0, 0.5
    moved = draw(x, (0, "train", 1, 1), 2, binarize=False, shift=0.4).x
    places = [(2 + dy, 3 + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
    counts = {place: (moved[:, 0, place[0], place[1]] == 1).sum().item() for place in places}
    assert sum(counts.values()) == len(x)
    for place, count in counts.items():
        share = 0.6 if place == (2, 3) else 0.05
        assert count / len(x) == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / len(x)))
    # Channels move together.
    assert torch.equal(moved[:, 0, 1:4, 2:5], 2 * moved[:, 1, 1:4, 0:3])


def test_what_moves_in_over_the_border_is_the_border() -> None:
    x = torch.arange(12.0).reshape(1, 1, 3, 4).expand(200, -1, -1, -1)
    rows, columns = ([max(i + d, 0) if d < 0 else min(i + d, n - 1) for i in range(n)] for n, d in ((3, -1), (4, 1)))
    expected = x[0, 0][rows][:, columns]
    moved = draw(x, (0, "train", 1, 1), 2, binarize=False, shift=1.0).x
    assert any(torch.equal(image, expected) for image in moved[:, 0])
    assert not any(torch.equal(image, x[0, 0]) for image in moved[:, 0])


def test_a_share_of_the_images_is_mirrored() -> None:
    x = torch.rand(4000, 1, 3, 4)
    mirrored = draw(x, (0, "train", 1, 1), 2, binarize=False, mirror=0.25).x
    chosen = (mirrored != x).flatten(1).any(1)
    assert torch.equal(mirrored[chosen], x[chosen].flip(-1))
    assert chosen.float().mean().item() == pytest.approx(0.25, abs=4 * math.sqrt(0.1875 / len(x)))


def test_corrupted_images_are_bounded_by_the_posterior_of_what_was_seen(tiny: Config) -> None:
    vae = build(tiny)
    x = (torch.rand(5, 1, 4, 4) < 0.5).float()
    shard = draw(x, (0, "train"), tiny.latent, binarize=False, flip=0.4, dropout=0.5)
    loss, _ = shard_loss(training.make_fabric(tiny), vae, shard, 0.7)
    assert shard.seen is not None
    posterior = vae.flow(vae.encoder(shard.seen) * shard.context_mask)
    expected = -elbo(vae.log_terms(x, noise=shard.noise, posterior=posterior), beta=0.7).mean()
    torch.testing.assert_close(loss, expected)
    assert loss.item() != pytest.approx(
        shard_loss(training.make_fabric(tiny), vae, replace(shard, seen=None), 0.7)[0].item()
    )


def test_validation_sees_whole_images(with_settings: Callable[..., Config], halves: data.Dataset) -> None:
    config = with_settings(dropout=0.5, flip=0.5, shift=1.0, mirror=1.0)
    vae, fabric = build(config), training.make_fabric(config)
    plain = with_settings()
    assert training.validate(fabric, vae, halves.valid, config) == training.validate(fabric, vae, halves.valid, plain)


def test_refinement_moves_the_inference_network_alone_towards_the_models_posterior(
    with_settings: Callable[..., Config], halves: data.Dataset, tmp_path: Path
) -> None:
    config = with_settings(epochs=4, learning_rate=5e-3)
    trained = Run.create(tmp_path / "trained", config)
    training.train(trained, halves)
    refined = Run.create(tmp_path / "refined", config.model_copy(update={"refine_epochs": 40, "validate_every": 40}))
    lines = training.train(refined, halves)
    assert [line.get("refine") for line in lines] == [None] * 4 + list(range(1, 41))
    checkpoint = refined.load_checkpoint()
    assert checkpoint is not None
    before, after = trained.weights(), checkpoint["model"]
    for name, weight in before.items():
        assert torch.equal(weight, after[name]) == name.startswith("decoder."), name
    vae = trained.model()
    images = training.own_images(vae, 2000, (0, "fresh"))
    bounds = []
    for weights in (before, after):
        vae.load_state_dict(weights)
        bounds.append(training.validate(training.make_fabric(config), vae, images, config)["neg_elbo"])
    assert bounds[1] < bounds[0] - 0.05


def test_own_images_are_a_function_of_weights_and_key(tiny: Config) -> None:
    vae = build(tiny)
    state = torch.get_rng_state()
    images = training.own_images(vae, 50, (0, "train", 1, 1))
    assert torch.equal(torch.get_rng_state(), state)
    torch.randn(3)
    assert torch.equal(images, training.own_images(vae, 50, (0, "train", 1, 1)))
    assert not torch.equal(images, training.own_images(vae, 50, (0, "train", 1, 2)))
    assert images.unique().tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adam", "beta2": 0.99, "schedule": "cosine", "warmup_steps": 4, "clip": 5.0},
        {"optimizer": "adamw", "weight_decay": 0.05},
        {"flow_rate": 0.1},
        {"warmup_by": "step", "beta_start": 0.1},
        {"validate_every": 2, "smooth": 2},
        {"averages": (0.5, 0.9)},
        {"dropout": 0.1, "flip": 0.05},
        {"shift": 0.5, "mirror": 0.25},
        {"refine_epochs": 2},
        ALL,
    ],
    ids=lambda settings: "all" if settings is ALL else "-".join(settings),
)
def test_a_resumed_run_is_bit_identical(
    settings: dict[str, Any], with_settings: Callable[..., Config], halves: data.Dataset, tmp_path: Path
) -> None:
    config = with_settings(epochs=4, **settings)
    whole, broken = (Run.create(tmp_path / name, config) for name in ("whole", "broken"))
    expected = training.train(whole, halves)
    assert len(expected) == config.epochs_at_most
    for epoch in range(1, config.epochs_at_most + 1):
        with pytest.raises(Stop):
            training.train(broken, halves, reporting=nullcontext(stop_at(epoch, 2)))
        torch.randn(3)  # what else the process draws must not matter
    got = training.train(broken, halves)
    assert_identical(whole, broken, expected, got)


def test_every_setting_of_the_recipe_matters(
    with_settings: Callable[..., Config], halves: data.Dataset, tmp_path: Path
) -> None:
    """A setting that nothing reads would pass for one that changes nothing."""
    assert set(ALL) | {"beta1"} == RECIPE
    needed: dict[str, dict[str, Any]] = {
        "weight_decay": {"optimizer": "adamw"},
        "refine_rate": {"refine_epochs": 3},
    }

    def train(name: str, **settings: Any) -> list[dict[str, float]]:
        return without_seconds(training.train(Run.create(tmp_path / name, with_settings(**settings)), halves))

    plain = {}
    for name, value in {**ALL, "beta1": 0.8}.items():
        extra = needed.get(name, {})
        base = "-".join(["plain", *extra])
        if base not in plain:
            plain[base] = train(base, **extra)
        assert train(name, **extra, **{name: value}) != plain[base], name


@pytest.mark.slow  # each half is in the default suite: the recipe in one process, two processes without it
def test_two_processes_train_as_one_does(
    with_settings: Callable[..., Config], halves: data.Dataset, tmp_path: Path
) -> None:
    histories = []
    for devices in (1, 2):
        config = with_settings(**ALL | {"devices": devices, "precision": "64-true", "epochs": 2, "refine_epochs": 2})
        histories.append(training.train(Run.create(tmp_path / str(devices), config), halves))
    for one, two in zip(*histories, strict=True):
        assert one.keys() == two.keys()
        for key in one.keys() - {"seconds"}:
            assert two[key] == pytest.approx(one[key], rel=1e-9)


def test_the_files_of_a_run_say_which_weights_are_its_model(
    with_settings: Callable[..., Config], halves: data.Dataset, tmp_path: Path
) -> None:
    settings = {"averages": (0.5, 0.9), "validate_every": 2, "smooth": 2, "learning_rate": 0.05}
    config = with_settings(epochs=5, test="never", **settings)
    run = Run.create(tmp_path / "run", config)
    lines = training.train(run, halves)
    assert [line["epoch"] for line in lines if "valid_neg_elbo" in line] == [2, 4, 5]
    result = results.conclude(run, halves, lines)
    best = lines[result["best_epoch"] - 1]
    about = run.about_model()
    for key in ("average", "valid_neg_elbo"):
        assert result[key] == about[key] == best[key]
    assert result["valid_smoothed"] == best["valid_smoothed"] == min(line.get("valid_smoothed", 99) for line in lines)
    assert best["valid_neg_elbo"] == best[f"valid_neg_elbo_{best['average']}"]
    assert best["average"] != OWN  # so that what follows is about an average
    valid = training.validate(training.make_fabric(config), run.model(), halves.valid, config)
    assert valid["neg_elbo"] == best["valid_neg_elbo"]
    assert Run.open(run.path).metrics == lines
    run.verify()
    (run.path / "model.safetensors").unlink()
    run.repair()
    assert run.about_model() == about


def test_evaluations_outlive_settings_of_the_recipe(tiny: Config, halves: data.Dataset, tmp_path: Path) -> None:
    """As a later version adds them, and an evaluation that is there already must not be made again."""
    run = Run.create(tmp_path / "run", tiny)
    training.train(run, halves)
    figures = results.evaluate(run, halves, results.Evaluation(10))
    written = (run.path / "evaluation-10-seed0.safetensors").stat().st_mtime_ns
    later = replace(run, config=tiny.model_copy(update={"beta2": 0.99, "averages": (0.9,)}))
    assert results.evaluate(later, halves, results.Evaluation(10)) == figures
    assert (run.path / "evaluation-10-seed0.safetensors").stat().st_mtime_ns == written


@pytest.mark.slow
def test_a_search_on_the_command_line(flags: Callable[..., list[str]], archive: Path, tmp_path: Path) -> None:
    settings = {**ALL, "averages": "0.5,0.9", "test": "never"}
    trained = sylvester("train", *flags(**settings), "--out", tmp_path / "runs" / "one", "--quiet", "--json")
    assert trained.returncode == 0, trained.stderr
    result = json.loads(trained.stdout)
    assert result["epochs"] == 6
    assert result["average"] in (0, 0.5, 0.9)
    shared = flags(**{**settings, "averages": "0.9,0.5:0.9", "dropout": "0.1,0.2"})
    swept = sylvester("sweep", *shared, "--out", tmp_path / "runs" / "sweep", "--quiet", "--json")
    assert swept.returncode == 0, swept.stderr
    groups = json.loads(swept.stdout)["groups"]
    chosen = {(*group["settings"]["averages"], group["settings"]["dropout"]) for group in groups}
    assert chosen == {(0.9, 0.1), (0.9, 0.2), (0.5, 0.9, 0.1), (0.5, 0.9, 0.2)}
    same = [run for group in groups for run in group["runs"] if group["settings"]["averages"] == [0.5, 0.9]]
    assert result["valid_neg_elbo"] in {run["result"]["valid_neg_elbo"] for run in same}
    report = sylvester("report", tmp_path / "runs", "-o", tmp_path / "report.html", "--quiet")
    assert report.returncode == 0, report.stderr
