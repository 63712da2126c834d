"""A run is a folder. Its files are replaced whole or not at all: a kill at any moment leaves a run to resume.

- ``config.toml``: the resolved settings; written first, it makes the folder a run
- ``metrics.jsonl``: one line an epoch
- ``checkpoint.pt``: all that training needs to go on
- ``model.safetensors``: the best model so far, with the shape and the likelihood of its images
- ``result.json``: the final figures; a run that has it is finished
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sylvester.app.config import Config, parse, read_toml
from sylvester.app.paths import PathError, destination

if TYPE_CHECKING:
    import torch

    from sylvester.vae import VAE


class RunError(ValueError):
    """A folder that cannot be used as a run, in one sentence."""


class RunFailure(RuntimeError):
    """A run that cannot go on, in one sentence; its last checkpoint is intact."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path``, durably, if the block succeeds; if not, nothing happened."""
    try:
        path = destination(path)
    except PathError as error:
        raise RunError(f"Expected a file to write; got {error}") from None
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name itself must survive a power cut
    finally:
        os.close(folder)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@dataclass(frozen=True)
class Run:
    """A folder with a ``config.toml``; made by :meth:`create` or :meth:`open`."""

    path: Path
    config: Config

    @classmethod
    def create(cls, path: Path, config: Config) -> Run:
        cls.require_free(path)
        path.mkdir(parents=True, exist_ok=True)
        write_text(path / "config.toml", config.to_toml())
        return cls(path, config)

    @classmethod
    def open(cls, path: Path) -> Run:
        file = path / "config.toml"
        if not file.is_file():
            raise RunError(f"Expected the folder of a run, with a config.toml; got {path}")
        return cls(path, parse(read_toml(file)))

    @staticmethod
    def require_free(path: Path) -> None:
        """Refuse a folder that holds anything; a killed process's unfinished first write does not count."""
        if path.exists() and not path.is_dir():
            raise RunError(f"Expected a folder for the run; got the file {path}")
        if (path / "config.toml").exists():
            raise RunError(f"Expected a new folder; got {path}, which holds a run: sylvester resume {path}")
        if path.exists() and any(entry.name != ".config.toml.tmp" for entry in path.iterdir()):
            raise RunError(f"Expected a new or empty folder for the run; got {path}, which holds other files")

    @contextmanager
    def locked(self, purpose: str = "run") -> Iterator[None]:
        """Keep other processes out. The kernel drops the lock with the process, however that ends."""
        import fcntl  # POSIX only; loading a trained model must work without it

        with open(self.path / f".{purpose}.lock", "a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(
                    f"Expected a run that no other process works on; got {self.path}, which is in use"
                ) from None
            yield

    @property
    def result(self) -> dict[str, Any] | None:
        file = self.path / "result.json"
        return json.loads(file.read_text()) if file.is_file() else None

    def write_metrics(self, history: Sequence[Mapping[str, float]]) -> None:
        """Make the file agree with a checkpoint's history: later lines are dropped, lost ones restored."""
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in history))

    def read_metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def append_metrics(self, line: Mapping[str, float]) -> None:
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        import torch

        try:
            with replacing(self.path / "checkpoint.pt") as file:
                torch.save(dict(state), file)
        except RuntimeError as error:
            # A failed write, as on a full disk, upsets torch's archive writer, which then hides the reason.
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    def load_checkpoint(self, device: torch.device | str = "cpu") -> dict[str, Any] | None:
        import torch

        file = self.path / "checkpoint.pt"
        return torch.load(file, map_location=device, weights_only=True) if file.is_file() else None

    def save_model(self, vae: VAE, shape: Sequence[int], likelihood: str) -> None:
        from safetensors.torch import save

        # Weights may be channels-last; the format stores row-major tensors only.
        tensors = {name: value.detach().contiguous() for name, value in vae.state_dict().items()}
        # One entry: the format keeps several in no particular order, and equal models are to be equal files.
        metadata = {"images": json.dumps({"shape": list(shape), "likelihood": likelihood})}
        with replacing(self.path / "model.safetensors") as file:
            file.write(save(tensors, metadata))

    def require_model(self) -> None:
        if not (self.path / "model.safetensors").is_file():
            raise RunError(f"Expected a run with a trained model; got {self.path}: sylvester resume {self.path}")

    def load_model(self, device: torch.device | str = "cpu") -> VAE:
        """The best model so far, in eval mode."""
        import torch
        from safetensors import safe_open

        from sylvester.app.models import build

        self.require_model()
        with safe_open(self.path / "model.safetensors", framework="pt", device=str(device)) as stored:
            images = json.loads(stored.metadata()["images"])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  (not a mapping)
        vae = build(self.config, images["shape"], images["likelihood"])
        vae.to(device, torch.float64 if self.config.precision == "64-true" else None)
        vae.load_state_dict(tensors)
        return vae.eval()
