"""The training loop: annealed bound, early stopping on validation −ELBO, a checkpoint an epoch.

Everything random (order, binarization, noise of the posterior) is a function of (seed, epoch, step), for the
global batch, so that a resumed run and a run on several devices see what one uninterrupted process would.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import LightningEnvironment
from torch import Tensor

from sylvester.allocator import keep_freed_memory
from sylvester.app import models, processes
from sylvester.app.config import Config
from sylvester.app.processes import Send
from sylvester.app.runs import Run, RunError, RunFailure, best_weights
from sylvester.diagnostics import warn_if_inexact
from sylvester.objectives import dreg, elbo, iwae, linear_beta, renyi
from sylvester.optim import Adamax
from sylvester.random import stream

if TYPE_CHECKING:
    from sylvester.app.data import Dataset

# Its banner about processes would break into the progress bar.
logging.getLogger("lightning_fabric").setLevel(logging.WARNING)

History = list[dict[str, float]]


@dataclass(frozen=True)
class Progress:
    """Where training stands: averages over the data points of this epoch so far."""

    epoch: int
    epochs: int
    batch: int
    batches: int
    figures: Mapping[str, float]
    valid: Mapping[str, float] | None = None  # at the end of the epoch


Report = Callable[[Progress], None]
#: (terms, beta=…) -> one value per data point.
Bound = Callable[..., Tensor]


def ignore(said: object) -> None:
    """Report to nobody."""


SILENT = nullcontext(ignore)


@dataclass(frozen=True)
class Shard:
    """One process's part of a global batch of ``total`` images."""

    x: Tensor  # (b, C, H, W)
    noise: Tensor  # (samples, b, D)
    weight: Tensor  # (b,), zero for the image that stands in for an empty part
    total: int


def draw(
    images: Tensor,
    key: tuple[int | str, ...],
    latent: int,
    *,
    binarize: bool,
    samples: int = 1,
    rank: int = 0,
    world: int = 1,
) -> Shard:
    """Part ``rank`` of ``world`` of a global batch, and its share of the randomness of ``key``."""
    total = len(images)
    noise = torch.randn(samples, total, latent, generator=stream(*key, "noise"))
    if binarize:
        images = (torch.rand(images.shape, generator=stream(*key, "binarize")) < images).to(images.dtype)
    rows = torch.arange(total).tensor_split(world)[rank]
    weight = torch.ones(len(rows))
    if len(rows) == 0:  # every process must take part in the step's communication
        rows, weight = torch.zeros(1, dtype=torch.long), torch.zeros(1)
    return Shard(images[rows], noise[:, rows], weight, total)


def training_bound(config: Config) -> tuple[Bound, bool]:
    """The bound of the settings, and whether it takes path gradients."""
    alpha = config.alpha or 0.0
    bounds: dict[str, Bound] = {
        "elbo": elbo,
        "iwae": iwae,
        "dreg": partial(dreg, alpha=alpha),
        "renyi": partial(renyi, alpha=alpha),
    }
    return bounds[config.objective], config.path_gradient or config.objective == "dreg"


def shard_loss(
    fabric: Fabric, model: Any, shard: Shard, beta: float, *, bound: Bound = elbo, path_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """The loss whose average over the processes is the global batch's −bound a data point, and global sums.

    The processes average their gradients, so a part's loss is its sum times processes / total: means of
    uneven parts would count the small ones too much. The sums, equal on every process, are of the loss,
    −ELBO, −log p(x|z) and KL.
    """
    dtype = next(model.parameters()).dtype
    x, noise, weight = (t.to(fabric.device, dtype) for t in (shard.x, shard.noise, shard.weight))
    with fabric.autocast():
        terms = model.log_terms(x, len(noise), noise=noise, path_gradient=path_gradient)
    kl = (terms.log_q - terms.log_pz).mean(0)
    reconstruction = -terms.log_px_z.mean(0)
    loss = -bound(terms, beta=beta)
    local = torch.stack([(weight * t).sum() for t in (loss, reconstruction + kl, reconstruction, kl)])
    sums = fabric.all_reduce(local.detach().double(), reduce_op="sum")
    assert isinstance(sums, Tensor)
    return local[0] * (fabric.world_size / shard.total), sums.cpu()


def make_optimizer(vae: torch.nn.Module, config: Config) -> torch.optim.Optimizer:
    return Adamax(vae.parameters(), lr=config.learning_rate, eps=1e-7)


def make_fabric(config: Config) -> Fabric:
    """Of one process, which is a member of a group that :func:`launch` started where there are several."""
    several: dict[str, Any] = {"strategy": "ddp", "plugins": [LightningEnvironment()]} if config.devices > 1 else {}
    return Fabric(devices=config.devices, precision=config.precision, **several)  # type: ignore[arg-type]


def launch(
    config: Config, function: Callable[[Fabric, Send], Any], *, receive: Send = ignore, lock: int | None = None
) -> Any:
    """Call ``function(fabric, send)`` in one process a device, and return what the first one returns.

    What the first one sends goes to ``receive``, in this process. Each holds the descriptor of the ``lock``.
    """
    if config.devices == 1:
        return make_fabric(config).launch(function, receive)  # type: ignore[arg-type]
    member = partial(_member, config, LightningEnvironment().main_port, function)
    return processes.together(member, config.devices, receive=receive, hold=[] if lock is None else [lock])


def _member(config: Config, port: int, function: Callable[[Fabric, Send], Any], rank: int, send: Send) -> Any:
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return make_fabric(config).launch(function, send)  # type: ignore[arg-type]


def train(
    run: Run,
    data: Dataset,
    *,
    lock: int | None = None,
    reporting: AbstractContextManager[Report] = SILENT,
    notify: Callable[[str], object] = ignore,
) -> History:
    """Train ``run`` from its last checkpoint or the start to its end; its folder holds the best model.

    ``lock`` is the descriptor of the run's lock, where the caller holds it. ``notify`` is told what was damaged.
    """
    with nullcontext(lock) if lock is not None else run.locked() as held:
        for note in run.repair():
            notify(note)
        with reporting as report:
            try:
                return launch(run.config, partial(fit, run, data), receive=report, lock=held)
            except processes.Ended as end:
                raise RunFailure(
                    f"A process that trained {run.path} {end}; "
                    f"sylvester resume {run.path} goes on from the last checkpoint"
                ) from None


def fit(run: Run, data: Dataset, fabric: Fabric, report: Report) -> History:
    """What every process of a run does; the first one alone reports and writes."""
    if fabric.world_size > 1:
        keep_freed_memory()  # a process that was started for this run, and has nothing from its parent
    config, first = run.config, fabric.is_global_zero
    cuda = [fabric.device] if fabric.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(config.seed)  # equal initial weights on every process
        vae = models.build(config, data.train.shape[1:], data.likelihood)
        model, optimizer = fabric.setup(vae, make_optimizer(vae, config))
        model.mark_forward_method("log_terms")
        if config.compile:
            vae.log_terms = torch.compile(vae.log_terms)  # type: ignore[method-assign]

        history: History = []
        warned = False  # that samples are not exact
        best: dict[str, Any] = {}  # the weights of the best epoch, and what there is to say about them
        if (checkpoint := run.load_checkpoint()) is not None:
            if checkpoint["data"] != data.sha256:
                raise RunFailure(f"Expected the data that {run.path} was started with; got other files by that name")
            try:
                model.load_state_dict(checkpoint["model"])
            except RuntimeError:
                raise RunFailure(
                    f"Expected a checkpoint of the model that {run.path / 'config.toml'} describes; got one of other "
                    "sizes: restore the settings that the run was started with"
                ) from None
            optimizer.load_state_dict(checkpoint["optimizer"])
            fabric.strategy.precision.load_state_dict(checkpoint["precision"])
            torch.set_rng_state(checkpoint["rng"])
            history = checkpoint["history"]
            best = _best_of(run, checkpoint)
        if first:
            # The checkpoint is the truth: a kill before the next one leaves these behind it.
            run.write_metrics(history)
            if best and best["about"] != _about_model(run):
                run.save_model(best["weights"], best["about"])

        with tensorboard(run, len(history)) if first else nullcontext(ignore_line) as log:
            while not finished(history, config):
                started = time.perf_counter()
                epoch = len(history) + 1
                beta = linear_beta(epoch, config.warmup)
                trained = train_epoch(fabric, model, optimizer, data, config, epoch, beta, report if first else ignore)
                valid = validate(fabric, model, data.valid, config)
                if first and not warned:
                    with torch.no_grad():
                        warned = warn_if_inexact(vae.flow, vae.posterior(data.valid[:8].to(vae.origin)))
                if not math.isfinite(valid["neg_elbo"]):
                    raise RunFailure(f"The loss on the validation images is not finite after epoch {epoch}")
                line = {"epoch": epoch, "beta": beta}
                line |= {f"train_{key}": value for key, value in trained.items()}
                line |= {f"valid_{key}": value for key, value in valid.items()}
                history.append(line | {"seconds": time.perf_counter() - started})
                if first:
                    better = best_epoch(history) == epoch
                    if better:
                        about = {
                            "shape": list(data.image_shape),
                            "likelihood": data.likelihood,
                            "epoch": epoch,
                            "valid_neg_elbo": valid["neg_elbo"],
                            "data": data.sha256,
                        }
                        best = {"about": about, "weights": _copy(vae)}
                    run.save_checkpoint(
                        {
                            "model": model.state_dict(),
                            "best": best | ({"weights": None} if better else {}),  # None: the model itself
                            "optimizer": optimizer.state_dict(),
                            "precision": fabric.strategy.precision.state_dict(),
                            "rng": torch.get_rng_state(),
                            "history": history,
                            "data": data.sha256,
                        }
                    )
                    if better:
                        run.save_model(best["weights"], best["about"])
                    run.append_metrics(history[-1])
                    log(history[-1])
                    report(Progress(epoch, config.epochs, 1, 1, trained, valid))
        return history


def _copy(vae: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in vae.state_dict().items()}


def _best_of(run: Run, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    if "best" not in checkpoint:  # format 0 has the best model in its own file alone
        about = run.about_model()
        del about["checksum"]
        return {"about": about, "weights": run.weights()}
    return {"about": checkpoint["best"]["about"], "weights": best_weights(checkpoint)}


def _about_model(run: Run) -> dict[str, Any] | None:
    """What the model's file says of itself, without its checksum; None where there is no whole one."""
    try:
        about = run.about_model()
    except RunError:
        return None
    return {key: value for key, value in about.items() if key != "checksum"}


def train_epoch(
    fabric: Fabric,
    model: Any,
    optimizer: Any,
    data: Dataset,
    config: Config,
    epoch: int,
    beta: float,
    report: Report,
) -> dict[str, float]:
    order = torch.randperm(len(data.train), generator=stream(config.seed, "order", epoch))
    batches = order.split(config.batch_size)
    part = {"rank": fabric.global_rank, "world": fabric.world_size}
    sums, seen = torch.zeros(4, dtype=torch.float64), 0
    bound, path_gradient = training_bound(config)
    for step, rows in enumerate(batches, start=1):
        key = (config.seed, "train", epoch, step)
        shard = draw(data.train[rows], key, config.latent, binarize=data.dynamic, samples=config.samples, **part)
        loss, batch_sums = shard_loss(fabric, model, shard, beta, bound=bound, path_gradient=path_gradient)
        if not batch_sums.isfinite().all():
            raise RunFailure(f"The loss is not finite in epoch {epoch}, batch {step} of {len(batches)}")
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        sums, seen = sums + batch_sums, seen + shard.total
        report(Progress(epoch, config.epochs, step, len(batches), averages(sums, seen)))
    return averages(sums, seen)


@torch.no_grad()
def validate(fabric: Fabric, model: Any, images: Tensor, config: Config) -> dict[str, float]:
    """−ELBO at β = 1 with one sample an image; the same noise each time, so that only models differ."""
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64)
    for step, x in enumerate(images.split(config.batch_size)):
        key = (config.seed, "validation", step)
        shard = draw(x, key, config.latent, binarize=False, rank=fabric.global_rank, world=fabric.world_size)
        sums += shard_loss(fabric, model, shard, 1.0)[1]
    model.train()
    figures = averages(sums, len(images))
    del figures["loss"]  # at β = 1 it is −ELBO
    return figures


def averages(sums: Tensor, count: int) -> dict[str, float]:
    return dict(zip(("loss", "neg_elbo", "reconstruction", "kl"), (sums / count).tolist(), strict=True))


def best_epoch(history: Sequence[Mapping[str, float]]) -> int:
    """The epoch, from 1, of the lowest validation −ELBO; the earliest of equals."""
    return 1 + min(range(len(history)), key=lambda i: history[i]["valid_neg_elbo"])


def finished(history: Sequence[Mapping[str, float]], config: Config) -> bool:
    """All epochs done, or ``patience`` epochs, counted from the warmup's end on, without a better one."""
    epoch = len(history)
    if epoch == 0 or epoch >= config.epochs:
        return epoch >= config.epochs
    stale = epoch - max(best_epoch(history), config.warmup - 1)
    return 0 < config.patience <= stale


def ignore_line(line: Mapping[str, float]) -> None:
    """Log nothing."""


@contextmanager
def tensorboard(run: Run, epoch: int) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """Log each epoch's figures for TensorBoard if installed, dropping what is later than ``epoch``."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        yield ignore_line
        return
    with SummaryWriter(run.path / "tensorboard", purge_step=epoch + 1) as writer:

        def log(line: Mapping[str, float]) -> None:
            for key, value in line.items():
                writer.add_scalar(key, value, line["epoch"])
            writer.flush()

        yield log
