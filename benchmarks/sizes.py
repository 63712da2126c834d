"""The sizes of the workloads: the paper's, and tiny ones that only show that everything runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    features: int = 64  # D
    context: int = 256  # E
    transforms: int = 16  # K
    rank: int = 32  # M of O-SNF
    reflections: int = 8  # H of H-SNF
    hidden: int = 1280  # width of masked and coupling networks
    batch: int = 100  # B
    side: int = 28  # of the images
    samples: int = 1000  # S, of importance sampling
    product: int = 2048  # side of the matrices whose product stands for what the machine can do


SIZES = {
    "paper": Size(),
    "tiny": Size(
        features=8,
        transforms=4,
        rank=4,
        reflections=2,
        hidden=16,
        batch=4,
        side=8,
        samples=20,
        product=64,
    ),
}
