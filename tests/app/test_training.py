from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric

import sylvester
from sylvester.app import data, models, results, training
from sylvester.app.config import Config, resolve
from sylvester.app.runs import Run, RunFailure
from sylvester.app.selection import History, best_epoch, next_stage
from sylvester.app.training import draw, shard_loss
from sylvester.objectives import dreg, elbo, iwae, renyi
from sylvester.random import stream
from tests.app.conftest import Stop, assert_identical, stop_at


@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_the_parts_of_a_batch_are_the_batch(count: int) -> None:
    grey = torch.rand(count, 1, 4, 4)
    settings = {"binarize": True, "flip": 0.3, "dropout": 0.3, "shift": 0.5, "mirror": 0.5}
    whole = draw(grey, (0, "train", 1, 1), 3, **settings)
    parts = [draw(grey, (0, "train", 1, 1), 3, **settings, rank=rank, world=3) for rank in range(3)]
    counted = [part.weight.bool() for part in parts]
    assert all(part.total == count for part in parts)
    for name in ("x", "seen", "context_mask"):
        joined = torch.cat([getattr(part, name)[rows] for part, rows in zip(parts, counted, strict=True)])
        assert torch.equal(joined, getattr(whole, name))
    joined = torch.cat([part.noise[:, rows] for part, rows in zip(parts, counted, strict=True)], 1)
    assert torch.equal(joined, whole.noise)


def test_grey_images_are_binarized_afresh_with_their_own_probabilities() -> None:
    grey = torch.tensor([0.0, 0.25, 1.0, 0.75]).repeat(4000, 1, 1, 1)
    first, second = (draw(grey, (0, "train", epoch, 1), 1, binarize=True).x for epoch in (1, 2))
    assert first.unique().tolist() == [0.0, 1.0]
    assert not torch.equal(first, second)
    torch.testing.assert_close(first.mean(0), grey[0], rtol=0, atol=4 * (0.1875 / 4000) ** 0.5)


def gradients(config: Config, counts: list[int], fabric: Fabric, send: Callable[[Any], None]) -> list[Any]:
    """What one training step leaves in the parameters, for global batches of several sizes."""
    torch.manual_seed(0)
    vae = models.build(config, (1, 4, 4), "bernoulli")
    model = fabric.setup(vae)
    model.mark_forward_method("log_terms")
    results = []
    for count in counts:
        vae.zero_grad()
        x = (torch.rand(count, 1, 4, 4, generator=stream(count)) < 0.5).double()
        part = {"rank": fabric.global_rank, "world": fabric.world_size}
        loss, sums = shard_loss(fabric, model, draw(x, (count,), config.latent, binarize=False, **part), 0.7)
        fabric.backward(loss)
        results.append(([p.grad.clone() for p in vae.parameters() if p.grad is not None], sums))
    return results


@pytest.mark.parametrize("flow", ["triangular-sylvester", pytest.param("iaf", marks=pytest.mark.slow)])
def test_two_processes_give_the_gradients_of_one(flow: str, tiny: Config) -> None:
    settings = tiny.model_dump(exclude_none=True) | {"flow": flow, "precision": "64-true"}
    config = resolve(settings | ({"hidden": 8} if flow == "iaf" else {}))
    counts = [8, 7, 1]  # even, uneven, and one process without an image
    results = []
    for devices in (1, 2):
        launched = config.model_copy(update={"devices": devices})
        results.append(training.launch(launched, partial(gradients, config, counts)))
    for (one, sums), (two, other_sums) in zip(*results, strict=True):
        assert len(one) == len(two) > 0
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(sums, other_sums, rtol=1e-12, atol=0)


def test_two_processes_train_as_one_does(tiny: Config, halves: data.Dataset, tmp_path: Path) -> None:
    histories = []
    for devices in (1, 2):
        config = tiny.model_copy(update={"devices": devices, "precision": "64-true", "epochs": 2})
        histories.append(training.train(Run.create(tmp_path / str(devices), config), halves))
    for one, two in zip(*histories, strict=True):
        assert one.keys() == two.keys()
        for key in one.keys() - {"seconds"}:
            assert two[key] == pytest.approx(one[key], rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "bound", "path_gradient"),
    [
        ({"path_gradient": True}, elbo, True),
        ({"objective": "iwae"}, iwae, False),
        ({"objective": "dreg"}, dreg, True),
        ({"objective": "dreg", "alpha": 0.5}, partial(dreg, alpha=0.5), True),
        ({"objective": "renyi", "alpha": 0.5}, partial(renyi, alpha=0.5), False),
    ],
)
def test_the_loss_is_the_objective_of_the_settings(
    settings: dict[str, Any], bound: training.Bound, path_gradient: bool, tiny: Config
) -> None:
    config = resolve(tiny.model_dump(exclude_none=True) | {"samples": 3} | settings)
    fabric = training.make_fabric(config)
    vae = models.build(config, (1, 4, 4), "bernoulli")
    model = fabric.setup(vae)
    model.mark_forward_method("log_terms")
    shard = draw(torch.rand(5, 1, 4, 4), (0, "train"), config.latent, binarize=True, samples=config.samples)
    chosen, along_path = training.training_bound(config)
    loss, _ = shard_loss(fabric, model, shard, 0.7, bound=chosen, path_gradient=along_path)
    expected = -bound(vae.log_terms(shard.x, 3, noise=shard.noise, path_gradient=path_gradient), beta=0.7).mean()
    torch.testing.assert_close(loss, expected)
    parameters = list(vae.parameters())
    grads = [torch.autograd.grad(each, parameters, materialize_grads=True) for each in (loss, expected)]
    torch.testing.assert_close(*grads)


def history(*bounds: float) -> History:
    return [{"valid_neg_elbo": value} for value in bounds]


def test_patience_counts_from_the_end_of_the_warmup(tiny: Config) -> None:
    config = tiny.model_copy(update={"epochs": 20, "warmup": 4, "patience": 3})
    assert next_stage([], config) is not None
    assert next_stage(history(1, 2, 2, 2, 2), config) is not None  # epochs 4 and 5 were no better: two
    assert next_stage(history(1, 2, 2, 2, 2, 2), config) is None
    assert next_stage(history(1, 2, 2, 2, 2, 0), config) is not None
    assert next_stage(history(1, 2, 2, 2, 2, 0, 2, 2), config) is not None
    assert next_stage(history(1, 2, 2, 2, 2, 0, 2, 2, 2), config) is None
    assert next_stage(history(*[1.0] * 20), config.model_copy(update={"patience": 0})) is None
    assert next_stage(history(*[1.0] * 19), config.model_copy(update={"patience": 0})) is not None
    assert best_epoch(history(3, 1, 2, 1)) == 2


def test_training_improves_and_keeps_the_best_model(tiny: Config, halves: data.Dataset, tmp_path: Path) -> None:
    config = tiny.model_copy(update={"epochs": 30, "learning_rate": 0.01})
    run = Run.create(tmp_path / "run", config)
    lines = training.train(run, halves)
    assert [line["epoch"] for line in lines] == list(range(1, 31))
    assert [line["beta"] for line in lines[:3]] == [0.5, 1.0, 1.0]
    assert min(line["valid_neg_elbo"] for line in lines) < 0.85 * 16 * 0.6931
    for line in lines:
        assert line["train_neg_elbo"] == pytest.approx(line["train_reconstruction"] + line["train_kl"])
    assert run.metrics == lines
    best = training.validate(Fabric(accelerator="cpu", devices=1), sylvester.load(run.path), halves.valid, config)
    assert best["neg_elbo"] == min(line["valid_neg_elbo"] for line in lines)


def test_an_epoch_averages_over_images_not_over_batches(tiny: Config, halves: data.Dataset) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    vae = models.build(tiny, (1, 4, 4), "bernoulli").eval()
    got = training.validate(fabric, vae, halves.valid, tiny)["neg_elbo"]  # batches of 10 and 1
    each = []
    for step, x in enumerate(halves.valid.split(10)):
        noise = draw(x, (tiny.seed, "validation", step), tiny.latent, binarize=False).noise
        with torch.no_grad():
            each.append(-vae.log_terms(x, noise=noise).log_w[0])
    assert got == pytest.approx(torch.cat(each).double().mean().item(), rel=1e-6)


@pytest.mark.parametrize("flow", ["triangular-sylvester", "orthogonal-sylvester", "gaussian"])
def test_a_resumed_run_is_bit_identical(flow: str, tiny: Config, halves: data.Dataset, tmp_path: Path) -> None:
    settings = tiny.model_dump(exclude_none=True, exclude={"transforms"}) | {"flow": flow}
    config = resolve(settings | ({"rank": 2} if flow == "orthogonal-sylvester" else {}))
    grey = replace(halves, train=0.2 + 0.6 * halves.train, dynamic=True)
    whole, broken = (Run.create(tmp_path / name, config) for name in ("whole", "broken"))
    expected = training.train(whole, grey)
    for epoch, batch in ((1, 2), (2, 1), (2, 3), (3, 2)):  # the first leaves no checkpoint
        with pytest.raises(Stop):
            training.train(broken, grey, reporting=nullcontext(stop_at(epoch, batch)))
        broken.append_metrics({"epoch": 99})
        torch.randn(3)  # what else the process draws must not matter
    got = training.train(broken, grey)
    assert_identical(whole, broken, expected, got)


def test_a_result_names_the_threads_that_trained_its_model(tiny: Config, halves: data.Dataset, tmp_path: Path) -> None:
    """Whoever resumes a run may conclude it with others."""
    run, threads = Run.create(tmp_path / "run", tiny), torch.get_num_threads()
    training_threads = [threads + 1, threads + 2, threads + 1]

    def next_epoch(progress: training.Progress) -> None:
        if progress.valid is None and progress.batch == progress.batches:
            torch.set_num_threads(training_threads[progress.epoch - 1])

    try:
        lines = training.train(run, halves, reporting=nullcontext(next_epoch))
    finally:
        torch.set_num_threads(threads)
    assert [line["threads"] for line in lines] == training_threads
    assert results.conclude(run, halves, lines)["timing"]["machine"]["threads"] == threads + 1
    of_earlier_versions = [{key: value for key, value in line.items() if key != "threads"} for line in lines]
    assert results.conclude(run, halves, of_earlier_versions)["timing"]["machine"]["threads"] == threads


def test_training_leaves_the_global_generator_alone(tiny: Config, halves: data.Dataset, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    training.train(Run.create(tmp_path / "run", tiny.model_copy(update={"epochs": 1})), halves)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_non_finite_loss_stops_with_epoch_and_batch_and_keeps_the_checkpoint(
    tiny: Config, halves: data.Dataset, tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "run", tiny)
    with pytest.raises(Stop):
        training.train(run, halves, reporting=nullcontext(stop_at(2, 1)))
    good = (run.path / "checkpoint.pt").read_bytes()
    poisoned = halves.train.clone()
    poisoned[:] = float("nan")
    with pytest.raises(RunFailure, match="not finite in epoch 2, batch 1 of 3"):
        training.train(run, replace(halves, train=poisoned))
    assert (run.path / "checkpoint.pt").read_bytes() == good


def test_an_exploding_last_step_is_not_checkpointed(tiny: Config, halves: data.Dataset, tmp_path: Path) -> None:
    config = tiny.model_copy(update={"learning_rate": 1e30, "batch_size": 25})
    run = Run.create(tmp_path / "run", config)
    with pytest.raises(RunFailure, match="not finite after epoch 1"):
        training.train(run, halves)
    assert not (run.path / "checkpoint.pt").exists()


def test_other_data_is_not_taken_for_the_runs_own(tiny: Config, halves: data.Dataset, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", tiny)
    with pytest.raises(Stop):
        training.train(run, halves, reporting=nullcontext(stop_at(2, 1)))
    with pytest.raises(RunFailure, match="Expected the data that"):
        training.train(run, replace(halves, sha256={"halves.npz": "0" * 64}))


@pytest.mark.parametrize(
    "option", [pytest.param({"compile": True}, marks=pytest.mark.slow), {"precision": "bf16-mixed"}]
)
def test_compiled_and_mixed_precision_training_stay_close_to_plain(
    option: dict[str, Any], tiny: Config, halves: data.Dataset, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if "precision" in option:
        request.getfixturevalue("bf16")
    plain = training.train(Run.create(tmp_path / "plain", tiny), halves)
    other = training.train(Run.create(tmp_path / "other", tiny.model_copy(update=option)), halves)
    tolerance = 1e-4 if option == {"compile": True} else 0.05
    assert other != plain
    for one, two in zip(plain, other, strict=True):
        assert two["valid_neg_elbo"] == pytest.approx(one["valid_neg_elbo"], rel=tolerance)
