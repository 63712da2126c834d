"""A run is a folder. Its files are replaced whole or not at all: a kill at any moment leaves a run to resume.

- ``config.toml``: the format's number and the resolved settings; written first, it makes the folder a run
- ``checkpoint.pt``: all that training needs to go on, the best model so far included; the truth of an unfinished run
- ``checkpoint.previous.pt``: the one before, for the case that the last is damaged
- ``metrics.jsonl``: one line an epoch
- ``model.safetensors``: the best model so far, with what it was trained on
- ``evaluation-*.safetensors``: what the evaluation found for each test image
- ``result.json``: the final figures; a run that has it is finished, with or without its weights

Every one of them carries a checksum, which is compared when it is read. ``docs/run-folder.md`` describes them one
by one. From Python::

    from sylvester.app.runs import Run

    run = Run.open("runs/digits-triangular-sylvester-1")
    z = run.model().posterior(run.data().test).sample()  # the latents of the test images
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from sylvester.app import checksums
from sylvester.app.checksums import Damage, Missing
from sylvester.app.config import RUN_FORMAT, Config, ConfigError, parse, take_format, tomllib
from sylvester.app.paths import PathError, destination, folder

if TYPE_CHECKING:
    import numpy as np
    import torch

    from sylvester.app.data import Dataset
    from sylvester.vae import VAE

__all__ = ["FORMAT", "DamagedRun", "Run", "RunError", "RunFailure", "data_of", "replacing", "write_json", "write_text"]

# What this version writes. It reads all formats up to it; format 0 had neither a number nor checksums.
FORMAT = RUN_FORMAT

_EVALUATE_AGAIN = "delete both files of that evaluation, and sylvester evaluate makes them again"


class RunError(ValueError):
    """A folder that cannot be used as a run, in one sentence."""


class DamagedRun(RunError):
    """A run with a file that is not what was written; the sentence names it and says what to do."""


class RunFailure(RuntimeError):
    """A run that cannot go on, in one sentence; its last checkpoint is intact."""


@contextmanager
def replacing(path: Path, *, keep: Path | None = None) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path``, durably, if the block succeeds; if not, nothing happened.

    With ``keep``, the file that was there moves to that name.
    """
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
        if keep is not None and path.exists():
            os.replace(path, keep)
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
    """Write a file whole or not at all: see `replacing`."""
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """The same for a value of JSON, which has neither NaN nor infinity."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@dataclass(frozen=True)
class Run:
    """A run's folder: its ``config``, and what else it holds. Made by :meth:`open` or :meth:`create`."""

    path: Path
    config: Config
    format: int = FORMAT

    @classmethod
    def create(cls, path: Path, config: Config) -> Run:
        """A new run in a new or empty folder."""
        cls.require_free(path)
        path.mkdir(parents=True, exist_ok=True)
        run = cls(path, config)
        with run.locked():  # of two that found the folder empty, one creates the run and the other is refused
            cls.require_free(path)
            run.write_config()
        return run

    @classmethod
    def create_next(cls, folder: Path, stem: str, config: Config) -> Run:
        """A new run in the first free one of ``folder/stem-1``, ``folder/stem-2``, …, whoever else looks for one."""
        folder.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            run = cls(folder / f"{stem}-{number}", config)
            try:
                run.path.mkdir()
            except FileExistsError:
                number += 1
            else:
                run.write_config()
                return run

    def write_config(self) -> None:
        """For a process that holds the lock, or that just made the folder."""
        with replacing(self.path / "config.toml") as file:
            file.write(checksums.signed(f"format = {self.format}\n{self.config.to_toml()}".encode()))

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The run in a folder, whether it is new, half done or finished."""
        path = Path(path)
        file = path / "config.toml"
        if not file.is_file():
            raise RunError(f"Expected the folder of a run, with a config.toml; got {path}")
        content = file.read_bytes()
        settings = _parsed(content)
        start = "sylvester train --out NEW with the settings you want"
        if settings and settings.keys() != {"format"}:
            start = f"sylvester train --config {file} --out NEW, if its settings are those you want"
        try:
            body = checksums.verified(content, required=False)
            if settings is None:
                raise Damage("is not TOML")
            if settings.get("format", 0) != 0 and body is content:
                raise Damage("does not end in its checksum")
        except Damage as damage:
            raise DamagedRun(_sentence(file, damage, f"restore it from a copy, or start over with {start}")) from None
        try:
            number = take_format(settings, path)
        except ConfigError as error:
            raise RunError(str(error)) from None
        try:
            return cls(path, parse(settings), number)
        except ConfigError as error:
            raise RunError(f"{error}, in {file}") from None

    @staticmethod
    def require_free(path: Path) -> None:
        """Refuse a folder that holds anything; a killed process's unfinished first write does not count."""
        try:
            folder(path)
        except PathError as error:
            raise RunError(f"Expected a folder for the run; got {error}") from None
        if (path / "config.toml").exists():
            raise RunError(f"Expected a new folder; got {path}, which holds a run: sylvester resume {path}")
        if path.exists() and any(entry.name not in (".config.toml.tmp", ".run.lock") for entry in path.iterdir()):
            raise RunError(f"Expected a new or empty folder for the run; got {path}, which holds other files")

    @contextmanager
    def locked(self, purpose: str = "run") -> Iterator[int]:
        """Keep other processes out, and give the lock's file descriptor.

        The kernel drops the lock with the last process that has the descriptor, however that ends.
        """
        import fcntl  # POSIX only; loading a trained model must work without it

        with open(self.path / f".{purpose}.lock", "a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(
                    f"Expected a run that no other process works on; got {self.path}, which is in use"
                ) from None
            yield file.fileno()

    @property
    def result(self) -> dict[str, Any] | None:
        """What ``result.json`` says, or None for a run that is not finished."""
        file = self.path / "result.json"
        if not file.is_file():
            return None
        with self.naming(file):
            result = checksums.parse_json(file.read_bytes())
            if not isinstance(result, dict):
                raise Damage("is not a JSON object")
            figures = {key: value for key, value in result.items() if key != "timing"}
            for part in (figures, result.get("timing")):
                checksums.unsealed(part, required=self.format > 0)
        return result

    def write_result(self, figures: Mapping[str, Any], timing: Mapping[str, Any]) -> dict[str, Any]:
        """Finish the run. What differs between equal runs is apart, so that equal figures have equal checksums."""
        result = {**checksums.sealed(figures), "timing": checksums.sealed(timing)}
        write_json(self.path / "result.json", result)
        return result

    @property
    def metrics(self) -> list[dict[str, float]]:
        """What each epoch came to, by name; of a finished run, of all its epochs."""
        file, result = self.path / "metrics.jsonl", self.result
        with self.naming(file):
            lines = self._read_metrics()
            if result is not None:
                if not file.is_file():
                    raise Missing
                epochs, best = result["epochs"], result["best_epoch"]
                if len(lines) != epochs or lines[best - 1]["valid_neg_elbo"] != result["valid_neg_elbo"]:
                    raise Damage("is not the one that result.json was made from")
        return lines

    def _read_metrics(self) -> list[dict[str, float]]:
        file = self.path / "metrics.jsonl"
        if not file.is_file():
            return []
        lines = []
        for number, line in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                break  # a kill in the midst of writing it
            try:
                metrics = checksums.unsealed(checksums.parse_json(line), required=self.format > 0)
            except Damage as damage:
                raise Damage(f"has a line {number} that {damage}") from None
            if metrics.get("epoch") != number:
                raise Damage(f"has a line {number} that is not of epoch {number}")
            lines.append(metrics)
        return lines

    def write_metrics(self, history: Sequence[Mapping[str, float]]) -> None:
        """Make the file agree with a checkpoint's history: later lines are dropped, lost ones restored."""
        write_text(self.path / "metrics.jsonl", "".join(map(_line, history)))

    def append_metrics(self, line: Mapping[str, float]) -> None:
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(_line(line))

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Replace the last checkpoint, which becomes the previous one."""
        import torch

        try:
            with replacing(self._checkpoint, keep=self._previous) as file:
                writer = checksums.SigningWriter(file)
                torch.save(dict(state), writer)  # type: ignore[arg-type]
                writer.sign()
        except RuntimeError as error:
            # A write that fails, as on a full disk, or that Ctrl-C ends, upsets torch's archive writer, which then
            # hides the reason.
            reason = error.__context__
            hidden = reason is not None and (isinstance(reason, OSError) or not isinstance(reason, Exception))
            raise reason if hidden else error from None  # type: ignore[misc]

    def load_checkpoint(self, device: torch.device | str = "cpu") -> dict[str, Any] | None:
        """The last checkpoint; :meth:`repair` puts the previous one in its place where it is damaged."""
        import torch

        file = self._checkpoint
        if not file.is_file():
            return None
        with self.naming(file, f"delete it, and sylvester resume {self.path} goes on without it"):
            body = checksums.verified(file.read_bytes(), required=self.format > 0)
            try:
                return torch.load(io.BytesIO(body), map_location=device, weights_only=True)
            except Exception:  # of many kinds, some with advice to load what is unsafe
                raise Damage("is not a whole checkpoint") from None

    @property
    def _checkpoint(self) -> Path:
        return self.path / "checkpoint.pt"

    @property
    def _previous(self) -> Path:
        return self.path / "checkpoint.previous.pt"

    def save_model(self, weights: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
        """Keep the best model so far: ``about`` has at least the ``shape`` and the ``likelihood`` of its images."""
        content = checksums.sealed_tensors(weights, about)
        with replacing(self.path / "model.safetensors") as file:
            file.write(content)

    def require_model(self) -> None:
        if (self.path / "model.safetensors").is_file():
            return
        remedy = f"sylvester resume {self.path}"
        if (self.path / "result.json").is_file() and not self._checkpoint.is_file():  # kept without weights
            remedy = f"sylvester train --config {self.path / 'config.toml'}"
        raise RunError(f"Expected a run with a trained model; got {self.path}: {remedy}")

    def about_model(self) -> dict[str, Any]:
        """Shape and likelihood of the model's images and, from format 1 on, its epoch, data and checksum."""
        return self._read_model()[0]

    def _read_model(self) -> tuple[dict[str, Any], bytes]:
        self.require_model()
        file = self.path / "model.safetensors"
        with self.naming(file):
            content = file.read_bytes()
            try:
                return checksums.about_tensors(content), content
            except Damage:
                if self.format > 0:
                    raise
            from safetensors import SafetensorError, safe_open

            try:
                with safe_open(file, framework="pt") as stored:
                    about = json.loads(stored.metadata()["images"])
                    return {**about, "checksum": hashlib.sha256(content).hexdigest()}, content
            except (SafetensorError, KeyError, TypeError, ValueError):
                raise Damage("is not a whole model") from None

    def weights(self) -> dict[str, torch.Tensor]:
        """The best model's parameters by name."""
        from safetensors.torch import load

        return load(self._read_model()[1])

    def model(self, device: torch.device | str = "cpu") -> VAE:
        """The best model so far, in eval mode."""
        import torch
        from safetensors.torch import load

        from sylvester.app.models import build

        about, content = self._read_model()
        vae = build(self.config, about["shape"], about["likelihood"])
        vae.to(device, torch.float64 if self.config.precision == "64-true" else None)
        try:
            vae.load_state_dict(load(content))
        except RuntimeError:
            raise RunError(
                f"Expected the model that the settings in {self.path / 'config.toml'} describe; "
                f"got one of other sizes in {self.path / 'model.safetensors'}: restore the settings it was trained with"
            ) from None
        return vae.eval()

    def data(self, data_dir: Path | None = None) -> Dataset:
        """The images that the run was trained and tested with."""
        data = data_of(self.config, data_dir)
        self.require_data(data)
        return data

    def require_data(self, data: Dataset) -> None:
        """Refuse images that are not those of the trained model or, where the weights are absent, of the result."""
        if (self.path / "model.safetensors").is_file():
            known = self.about_model().get("data", data.sha256)
        else:
            result = self.result
            known = data.sha256 if result is None else result["dataset"]["sha256"]
        if known != data.sha256:
            raise RunError(f"Expected the data that {self.path} was started with; got other files by that name")

    def scores(self) -> dict[str, np.ndarray]:
        """Of a finished run, what its evaluation found for each test image.

        In nats: ``log_px`` and its Monte Carlo error ``mc_error``, ``elbo``; and ``ess`` and ``khat``.
        """
        result = self.result
        evaluation = None if result is None else result.get("evaluation")
        if evaluation is None or evaluation["file"] is None:
            raise RunError(f"Expected a finished run with figures of each test image; got {self.path}")
        return self._read_scores(evaluation, "result.json")

    def evaluations(self) -> list[str]:
        """The names, as in ``evaluation-NAME.json``, of what `sylvester evaluate` found beside the run's own result."""
        return sorted(file.stem.removeprefix("evaluation-") for file in self.path.glob("evaluation-*.json"))

    def evaluation(self, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """One of them, of a finished run: its figures, and its ``scores``."""
        file = self.path / f"evaluation-{name}.json"
        result = self.result
        assert result is not None, "unfinished runs have no best model yet"
        with self.naming(file, _EVALUATE_AGAIN):
            figures = checksums.unsealed(checksums.parse_json(file.read_bytes()))
            found = figures["evaluation"]["model"]
            if result.get("evaluation", {}).get("model", found) != found:  # the oldest results do not say
                raise Damage("is of another model than result.json")
        return figures, self._read_scores(figures["evaluation"], file.name, _EVALUATE_AGAIN)

    def _read_scores(
        self, evaluation: Mapping[str, Any], summary: str, advice: str | None = None
    ) -> dict[str, np.ndarray]:
        from safetensors.numpy import load

        file = self.path / evaluation["file"]
        with self.naming(file, advice):
            if not file.is_file():
                raise Missing
            content = file.read_bytes()
            if checksums.about_tensors(content)["checksum"] != evaluation["checksum"]:
                raise Damage(f"is not the one that {summary} was made from")
        return load(content)

    def verify(self) -> None:
        """Read every file that is there, and name the first that is damaged or that the others belie."""
        result, _ = self.result, self.metrics
        evaluation = {} if result is None else result.get("evaluation", {})
        if evaluation.get("file"):
            self.scores()
        for file in (self._checkpoint, self._previous):
            if (damage := self._damage_of(file)) is not None:
                advice = "delete it: a finished run does not need it" if result is not None else None
                with self.naming(file, advice):
                    raise damage
        file = self.path / "model.safetensors"
        with self.naming(file):
            if file.is_file():
                checksum = self.about_model()["checksum"]
                if evaluation.get("model", checksum) != checksum:
                    raise Damage("is not the one that result.json was made from")
            elif self._checkpoint.is_file():
                raise Missing

    def _damage_of(self, checkpoint: Path) -> Damage | None:
        if not checkpoint.is_file():
            return None
        with open(checkpoint, "rb") as file:
            try:
                checksums.verify_file(file, required=self.format > 0)
            except Damage as damage:
                return damage
        return None

    def repair(self) -> list[str]:
        """Make what is damaged again from what is not, for a process that holds the lock; say what was done."""
        notes = self._repair_checkpoints()
        checks: dict[str, Callable[[], object]] = {
            "metrics.jsonl": lambda: self.metrics,
            "model.safetensors": self.about_model,
        }
        for name, check in checks.items():
            try:
                check()
            except RunError as error:
                checkpoint = self.load_checkpoint()
                if checkpoint is None:
                    continue
                if name == "metrics.jsonl":
                    self.write_metrics(checkpoint["history"])
                elif "best" in checkpoint:
                    self.save_model(best_weights(checkpoint), checkpoint["best"]["about"])
                else:
                    continue
                what = "was damaged" if isinstance(error, DamagedRun) else "was missing"
                notes.append(f"{self.path / name} {what}; restored from the checkpoint.")
        return notes

    def _repair_checkpoints(self) -> list[str]:
        last, previous = self._checkpoint, self._previous
        damage, other = self._damage_of(last), self._damage_of(previous)
        if damage is None and last.is_file():
            if other is None:
                return []
            previous.unlink()
            return [f"{previous} {other}; removed, as {last.name} is intact."]
        problem = f"{last} {'is missing' if damage is None else damage}"
        if previous.is_file() and other is None:
            os.replace(previous, last)
            return [f"{problem}; going on from the checkpoint before it."]
        if damage is not None or other is not None:
            broken = " and ".join(file.name for file in (last, previous) if file.is_file())
            raise DamagedRun(
                f"Expected an intact checkpoint in {self.path}; got none: {problem}, and there is no intact one "
                f"before it. Delete {broken}, and sylvester resume {self.path} starts over"
            )
        if (self.path / "metrics.jsonl").is_file() and (self.path / "metrics.jsonl").stat().st_size and not self.result:
            return [f"{problem}; training starts over."]
        return []

    @contextmanager
    def naming(self, file: Path, advice: str | None = None) -> Iterator[None]:
        """Turn damage that is found in the block into a sentence that names the file and says what to do."""
        try:
            yield
        except Damage as damage:
            raise DamagedRun(_sentence(file, damage, advice or self._remedy(file, damage))) from None

    def _remedy(self, file: Path, damage: Damage) -> str:
        resume, missing = f"sylvester resume {self.path}", isinstance(damage, Missing)
        alone, both = "" if missing else "delete it, and ", f"delete {'' if missing else 'it and '}result.json, and "
        finished = (self.path / "result.json").is_file() and file.name != "result.json"
        if finished and not self._checkpoint.is_file():
            return f"restore it from a copy, or {both}{resume} does the run again"
        if finished and file.name.startswith("evaluation-"):  # of which the checkpoint has nothing
            return f"{both}{resume} makes both again"
        return f"{alone}{resume} makes it again"


def data_of(config: Config, data_dir: Path | None = None, *, progress: bool = False) -> Dataset:
    """The images that settings name; ``data_dir`` where they have moved."""
    from sylvester.app.data import load

    return load(
        config.dataset,
        data_dir=data_dir or config.data_dir,
        seed=config.seed,
        likelihood=config.likelihood,
        progress=progress,
    )


def _parsed(content: bytes) -> dict[str, Any] | None:
    """Settings, believed or not; None where the content is no TOML."""
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError):  # not only the parser's: a number of too many digits
        return None


def _sentence(file: Path, damage: Damage, advice: str) -> str:
    got = "none" if isinstance(damage, Missing) else f"a file that {damage}"
    return f"Expected {file} as it was written; got {got}: {advice}"


def _line(metrics: Mapping[str, float]) -> str:
    return json.dumps(checksums.sealed(metrics)) + "\n"


def best_weights(checkpoint: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    """Stored apart only where they are not those of the last epoch."""
    weights = checkpoint["best"]["weights"]
    return checkpoint["model"] if weights is None else weights
