"""The training loop: annealed bound, validation with a checkpoint, early stopping; then, if wanted, refinement.

Everything random (order, binarization, which images are moved or mirrored, noise of the posterior, what the encoder is
not shown) is a function of (seed, epoch, step), for the global batch, so that a resumed run and one on several devices
see what one uninterrupted process would.

Refinement (Zhang et al., 2022, "Generalization gap in amortized inference") trains the inference network, encoder and
flow, on images that the finished model draws: it can see any number of them, and cannot learn any by heart.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import LightningEnvironment
from torch import Tensor, nn

from sylvester.allocator import keep_freed_memory
from sylvester.app import models, processes
from sylvester.app.averages import OWN
from sylvester.app.config import Config
from sylvester.app.optimizers import set_learning_rate
from sylvester.app.processes import Send
from sylvester.app.runs import Run, RunFailure
from sylvester.app.schedules import Stage, kl_weight, learning_rate
from sylvester.app.selection import History, choose, is_validated, next_stage
from sylvester.app.state import State
from sylvester.diagnostics import warn_if_inexact
from sylvester.objectives import dreg, elbo, iwae, renyi
from sylvester.random import stream
from sylvester.vae import VAE

if TYPE_CHECKING:
    from sylvester.app.data import Dataset

# Its banner about processes would break into the progress bar.
logging.getLogger("lightning_fabric").setLevel(logging.WARNING)


@dataclass(frozen=True)
class Progress:
    """Where training stands: averages over the data points of this epoch so far."""

    epoch: int
    epochs: int
    batch: int
    batches: int
    figures: Mapping[str, float]
    valid: Mapping[str, float] | None = None  # at the end of an epoch with a validation


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
    seen: Tensor | None = None  # (b, C, H, W), by the encoder, where that is not x
    context_mask: Tensor | None = None  # (b, context)


def draw(
    images: Tensor,
    key: tuple[int | str, ...],
    latent: int,
    *,
    binarize: bool,
    samples: int = 1,
    flip: float = 0.0,
    dropout: float = 0.0,
    shift: float = 0.0,
    mirror: float = 0.0,
    rank: int = 0,
    world: int = 1,
) -> Shard:
    """Part ``rank`` of ``world`` of a global batch, and its share of the randomness of ``key``.

    ``flip`` is the share of pixels that the encoder sees inverted, ``dropout`` that of its outputs which are lost; the
    others are scaled so that their mean stays. ``shift`` and ``mirror`` are the shares of images that stand for others.
    """
    total = len(images)
    if shift:
        images = shifted(images, shift, stream(*key, "shift"))
    if mirror:
        chosen = torch.rand(total, 1, 1, 1, generator=stream(*key, "mirror")) < mirror
        images = images.flip(-1).where(chosen, images)
    noise = torch.randn(samples, total, latent, generator=stream(*key, "noise"))
    if binarize:
        images = (torch.rand(images.shape, generator=stream(*key, "binarize")) < images).to(images.dtype)
    seen = context_mask = None
    if flip:
        seen = images.where(torch.rand(images.shape, generator=stream(*key, "flip")) >= flip, 1 - images)
    if dropout:
        kept = torch.rand(total, models.CONTEXT, generator=stream(*key, "dropout")) >= dropout
        context_mask = kept / (1 - dropout)
    rows = torch.arange(total).tensor_split(world)[rank]
    weight = torch.ones(len(rows))
    if len(rows) == 0:  # every process must take part in the step's communication
        rows, weight = torch.zeros(1, dtype=torch.long), torch.zeros(1)
    seen, context_mask = (None if each is None else each[rows] for each in (seen, context_mask))
    return Shard(images[rows], noise[:, rows], weight, total, seen, context_mask)


def shifted(images: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Images (B, C, H, W), a ``share`` of them moved by one pixel towards one of its eight neighbours.

    What moves in over the border is the border itself.
    """
    count, _, height, width = images.shape
    neighbours = torch.tensor([(y, x) for y in (0, 1, 2) for x in (0, 1, 2) if (y, x) != (1, 1)])
    offsets = neighbours[torch.randint(8, (count,), generator=generator)]  # (B, 2)
    offsets[torch.rand(count, generator=generator) >= share] = 1
    rows, columns = (offsets[:, [axis]] + torch.arange(side) for axis, side in enumerate((height, width)))
    padded = nn.functional.pad(images, (1, 1, 1, 1), mode="replicate").movedim(1, -1)
    return padded[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


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
    seen, context_mask = (None if t is None else t.to(fabric.device, dtype) for t in (shard.seen, shard.context_mask))
    with fabric.autocast():
        terms = model.log_terms(
            x, len(noise), noise=noise, path_gradient=path_gradient, seen=seen, context_mask=context_mask
        )
    kl = (terms.log_q - terms.log_pz).mean(0)
    reconstruction = -terms.log_px_z.mean(0)
    loss = -bound(terms, beta=beta)
    local = torch.stack([(weight * t).sum() for t in (loss, reconstruction + kl, reconstruction, kl)])
    sums = fabric.all_reduce(local.detach().double(), reduce_op="sum")
    assert isinstance(sums, Tensor)
    return local[0] * (fabric.world_size / shard.total), sums.cpu()


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
        state = State.start(fabric, config, vae)
        if config.compile:
            vae.log_terms = torch.compile(vae.log_terms)  # type: ignore[method-assign]
        if (checkpoint := run.load_checkpoint()) is not None:
            state.restore(checkpoint, run, data)
        history = state.history
        if first:
            state.agree(run)

        warned = False  # that samples are not exact
        with tensorboard(run, len(history)) if first else nullcontext(ignore_line) as log:
            while (stage := next_stage(history, config)) is not None:
                started = time.perf_counter()
                if stage.refining and stage.epoch == 1:
                    state.begin_refinement()
                trained = train_epoch(state, stage, data, report if first else ignore)
                line = describe(stage, config, len(history) + 1, trained)
                valid = None
                if is_validated(stage, config):
                    found = validate_each(state, data.valid)
                    if first and not warned:
                        with torch.no_grad():
                            warned = warn_if_inexact(vae.flow, vae.posterior(data.valid[:8].to(vae.origin)))
                    if not all(math.isfinite(figures["neg_elbo"]) for figures in found.values()):
                        raise RunFailure(f"The loss on the validation images is not finite after epoch {line['epoch']}")
                    line |= choose(history, found, config.smooth)
                    valid = found[line.get("average", OWN)]
                history.append(line | {"seconds": time.perf_counter() - started, "threads": torch.get_num_threads()})
                if valid is not None:
                    state.keep_best(data)
                if first:
                    if valid is not None:
                        run.save_checkpoint(state.checkpoint(data))
                        if state.is_best:
                            run.save_model(state.best["weights"], state.best["about"])
                    run.append_metrics(history[-1])
                    log(history[-1])
                    report(Progress(len(history), config.epochs_at_most, 1, 1, trained, valid))
        return history


def describe(stage: Stage, config: Config, epoch: int, trained: Mapping[str, float]) -> dict[str, float]:
    """An epoch's line of the metrics, as far as training goes."""
    line = {"epoch": epoch} | ({"refine": stage.epoch} if stage.refining else {})
    beta = kl_weight(config, stage, 1, 1)  # at the end of the epoch
    return line | {"beta": beta} | {f"train_{key}": value for key, value in trained.items()}


def train_epoch(state: State, stage: Stage, data: Dataset, report: Report) -> dict[str, float]:
    fabric, config, optimizer = state.fabric, state.config, state.optimizer
    epoch = len(state.history) + 1
    order = torch.randperm(len(data.train), generator=stream(config.seed, "order", epoch))
    batches = order.split(config.batch_size)
    sums, seen = torch.zeros(4, dtype=torch.float64), 0
    norms: list[Tensor] = []  # of the gradients, before they are clipped
    bound, path_gradient = training_bound(config)
    for step, rows in enumerate(batches, start=1):
        shard = training_shard(state, stage, data, rows, (config.seed, "train", epoch, step))
        beta = kl_weight(config, stage, step, len(batches))
        loss, batch_sums = shard_loss(fabric, state.model, shard, beta, bound=bound, path_gradient=path_gradient)
        if not batch_sums.isfinite().all():
            raise RunFailure(
                f"The loss is not finite in epoch {epoch}, batch {step} of {len(batches)}: "
                "take a smaller --learning-rate, or --clip"
            )
        state.vae.zero_grad()
        fabric.backward(loss)
        if config.clip is not None:
            norm = fabric.clip_gradients(state.model, optimizer, max_norm=config.clip, error_if_nonfinite=False)
            norms += [] if norm is None else [norm]
        set_learning_rate(optimizer, learning_rate(config, stage, step, len(batches)))
        optimizer.step()
        state.averages.update()
        sums, seen = sums + batch_sums, seen + shard.total
        report(Progress(epoch, config.epochs_at_most, step, len(batches), per_image(sums, seen)))
    trained = per_image(sums, seen)
    return trained | ({"gradient_norm": torch.stack(norms).mean().item()} if norms else {})


def training_shard(state: State, stage: Stage, data: Dataset, rows: Tensor, key: tuple[int | str, ...]) -> Shard:
    """This process's part of a step's batch: of training images, or of as many that the model has drawn.

    Those cannot be overfitted, and the encoder sees them as they are.
    """
    config, fabric = state.config, state.fabric
    part = {"rank": fabric.global_rank, "world": fabric.world_size}
    if stage.refining:
        images = own_images(state.vae, len(rows), key)
        return draw(images, key, config.latent, binarize=False, samples=config.samples, **part)
    return draw(
        data.train[rows],
        key,
        config.latent,
        binarize=data.dynamic,
        samples=config.samples,
        flip=config.flip,
        dropout=config.dropout,
        shift=config.shift,
        mirror=config.mirror,
        **part,
    )


def own_images(vae: VAE, count: int, key: tuple[int | str, ...]) -> Tensor:
    """Images that the model draws, a function of its weights and the ``key``."""
    device = vae.origin.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(stream(*key, "images").initial_seed())
        return vae.sample(count).cpu()


def validate_each(state: State, images: Tensor) -> dict[float, dict[str, float]]:
    """What the weights and each of their averages come to, by decay."""
    found = {}
    for candidate in state.averages.candidates:
        with state.averages.applied(candidate):
            found[candidate] = validate(state.fabric, state.model, images, state.config)
    return found


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
    figures = per_image(sums, len(images))
    del figures["loss"]  # at β = 1 it is −ELBO
    return figures


def per_image(sums: Tensor, count: int) -> dict[str, float]:
    return dict(zip(("loss", "neg_elbo", "reconstruction", "kl"), (sums / count).tolist(), strict=True))


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
