"""What is compared with what, and how much better it has to be. Data alone: no torch, nothing of the library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from benchmarks.sizes import Size

#: speedup: the other's seconds over ours · share: our GFLOP/s over the other's · cost: ours over the other's, of
#: seconds or of megabytes. A cost has to stay below its target, the others above.
Ratio = Literal["speedup", "share", "cost"]
Quantity = Literal["seconds", "megabytes"]
#: Whether the library's processes keep freed memory, as the application's do, or leave that to the system.
Allocator = Literal["kept", "system"]

MODELS = {
    "gaussian": "VAE",
    "planar": "planar",
    "iaf": "IAF",
    "orthogonal-sylvester": "O-SNF",
    "householder-sylvester": "H-SNF",
    "triangular-sylvester": "T-SNF",
}
SYLVESTER = [name for name in MODELS if name.endswith("sylvester")]

TRAINING = dict(zip(MODELS, (2.0, 2.0, 2.0, 2.5, 5.0, 2.5), strict=True))
NLL = dict(zip(MODELS, (5.0, 5.0, 3.5, 8.0, 12.0, 6.5), strict=True))


@dataclass(frozen=True)
class Job:
    """A task of one contestant, with its arguments."""

    contestant: str
    task: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    group: str
    name: str
    measures: str  # a sentence for the reader
    ours: Job
    other: Job
    target: float | None = None
    ratio: Ratio = "speedup"
    quantity: Quantity = "seconds"
    against: str | None = None  # what the other is, where it is no other contestant


def against_reference(
    group: str, name: str, measures: str, task: str, target: float | None = None, **arguments: Any
) -> Workload:
    return Workload(group, name, measures, Job("library", task, arguments), Job("reference", task, arguments), target)


def workloads(size: Size, images: str | None = None) -> list[Workload]:
    """All rows, in the order of the report; ``images`` is a file of Caltech 101's training images, where it is here."""
    return [
        *_models(size),
        *_flows(size),
        *_absolute(size),
        *_memory(size),
        *_peers(size),
        *_epochs(images),
    ]


def between_versions(size: Size, this: str, other: str) -> list[Workload]:
    """The library's own work, by two of its versions. Of the tasks, those that public names alone can do."""
    rows = [row for row in (*_models(size), *_flows(size), *_absolute(size)) if row.group in VERSION_GROUPS]
    return [
        Workload(
            row.group,
            row.name,
            row.measures,
            replace(row.ours, contestant=this),
            replace(row.ours, contestant=other),
        )
        for row in rows
    ]


def _models(size: Size) -> Iterator[Workload]:
    for flow, name in MODELS.items():
        what = f"one Adamax step on a batch of {size.batch} images: bound, gradient, update"
        yield against_reference("training", name, what, "training", TRAINING[flow], flow=flow)
    for flow, name in MODELS.items():
        what = f"log p(x) of one image from {size.samples:,} importance samples"
        yield against_reference("nll", name, what, "nll", NLL[flow], flow=flow)


def _flows(size: Size) -> Iterator[Workload]:
    for backward in (False, True):
        what = f"from {size.batch} contexts to z and log q" + (", and the gradient of all parameters" * backward)
        suffix = "forward + backward" if backward else "forward"
        for flow, name in MODELS.items():
            if flow != "gaussian":
                yield against_reference("flow", f"{name}, {suffix}", what, "flow", flow=flow, backward=backward)
    for flow in SYLVESTER:
        what = f"from one context to {size.samples:,} samples of z with log q"
        arguments = {"flow": flow, "samples": size.samples, "batch": 1}
        yield against_reference("samples", MODELS[flow], what, "flow", 50.0, **arguments)
    shape = f"{size.batch * size.transforms:,} matrices {size.features} x"
    what = f"orthonormal factors of {shape} {size.rank}, with the gradient"
    yield against_reference("linalg", "polar factor", what, "polar")
    what = f"Q tanh(Qᵀz) for {shape} {size.features}, each of {size.reflections} reflections, with the gradient"
    yield against_reference("linalg", "Householder product", what, "householder")


def _absolute(size: Size) -> Iterator[Workload]:
    for flow in ("planar", *SYLVESTER):
        yield Workload(
            "inverse",
            MODELS[flow],
            f"log q at {size.batch} given points through the inverse of {size.transforms} steps",
            Job("library", "chain", {"flow": flow, "inverse": True}),
            Job("library", "chain", {"flow": flow}),
            15.0 if flow == "triangular-sylvester" else None,
            "cost",
            against="forward pass",
        )
    against = f"as a share of the GFLOP/s of a {size.product}³ product, counting the operations of direct convolutions"
    for contestant in ("library", "reference"):  # what the reference reaches bounds how much faster one can be
        product = Job(contestant, "product")
        tasks = (
            ("decoder, forward", f"{size.batch} latents to images", Job(contestant, "decoder"), 0.75),
            (
                "training step",
                "one Adamax step of the VAE",
                Job(contestant, "counted_training", {"flow": "gaussian"}),
                0.6,
            ),
        )
        for name, what, job, target in tasks:
            goal = target if contestant == "library" else None
            yield Workload(
                "throughput",
                f"{name}, {contestant}",
                f"{what}, {against}",
                job,
                product,
                goal,
                "share",
                against="product",
            )


def _memory(size: Size) -> Iterator[Workload]:
    for contestant in ("library", "reference"):
        few, many = (
            Job(contestant, "training", {"flow": "orthogonal-sylvester", "condition": c}) for c in (2.0, 1000.0)
        )
        what = "peak memory of training, where matrices of condition 1000 have to be orthogonalized instead of 2"
        target = 1.05 if contestant == "library" else None
        yield Workload("memory", f"O-SNF, {contestant}", what, many, few, target, "cost", "megabytes", "easier case")
    few, many = (
        Job("library", "nll", {"flow": "triangular-sylvester", "samples": factor * size.samples}) for factor in (1, 8)
    )
    what = f"peak memory of log p(x) with {8 * size.samples:,} samples instead of {size.samples:,}"
    yield Workload("memory", "NLL, T-SNF", what, many, few, 1.05, "cost", "megabytes", "easier case")


#: The names that the peers have on PyPI.
PEERS = {"pyro": "pyro-ppl", "normflows": "normflows", "zuko": "zuko", "nflows": "nflows"}
#: Peer, flow, whether both are conditional, and whether the density of given points is asked rather than a sample.
PEER_FLOWS = [
    *[("pyro", flow, True, False) for flow in ("planar", "radial", "householder", "iaf")],
    *[("normflows", flow, False, False) for flow in ("planar", "radial")],
    *[("zuko", flow, True, False) for flow in ("nice", "realnvp")],
    *[("zuko", "maf", True, density) for density in (True, False)],
    *[("nflows", "maf", False, density) for density in (True, False)],
]


def _peers(size: Size) -> Iterator[Workload]:
    for peer, flow, conditional, density in PEER_FLOWS:
        # Sampling from MAF takes D passes a step, of which a peer keeps every masked weight: gigabytes of graph.
        slow = flow == "maf" and not density
        for backward in (False,) if slow else (False, True):
            given = f"given {size.batch} contexts" if conditional else "unconditional"
            what = f"the density of {size.batch} points" if density else f"{size.batch} samples with their log-density"
            suffix = "forward + backward" if backward else "forward"
            direction = (", density" if density else ", sampling") if flow == "maf" else ""
            arguments = {"flow": flow, "conditional": conditional, "density": density, "backward": backward}
            yield Workload(
                "peers",
                f"{peer}: {flow}{direction}, {suffix}",
                f"{what}, {given}, {size.transforms} steps" + (", and the gradient of all parameters" * backward),
                Job("library", "family", arguments),
                Job(peer, "family", arguments),
                1.0,
            )


def _epochs(images: str | None) -> Iterator[Workload]:
    if images is not None:
        what = "one epoch on the training images of Caltech 101"
        yield against_reference("epoch", "T-SNF", what, "epoch", flow="triangular-sylvester", data=images)


GROUPS = ("training", "nll", "flow", "samples", "linalg", "inverse", "throughput", "memory", "peers", "epoch")
#: With how cost grows, which is no row.
ALL_GROUPS = (*GROUPS, "scaling")
#: The groups that two versions of the library can be compared by.
VERSION_GROUPS = ("training", "nll", "flow", "samples", "inverse")
