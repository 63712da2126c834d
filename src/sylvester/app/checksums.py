"""Checksums that a file carries in itself, so that a kill can never part the two.

- Text and binary files (``config.toml``, ``checkpoint.pt``) end in a line ``# sha256 …`` of all that stands before.
- JSON objects (``result.json``, lines of ``metrics.jsonl`` and of partial evaluations) have an entry ``checksum``,
  of the object without it, whatever the order and the spacing of its entries.
- Tensors (``*.safetensors``) have one in their metadata, of names, shapes, values and the other metadata.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import torch

_MARK = b"# sha256 "
_LENGTH = len(_MARK) + 64 + 1  # the digest in hexadecimal, and the end of the line
_CHUNK = 1 << 20


class Damage(ValueError):
    """Content that is not what was written; the message says how that shows, as the predicate of a sentence."""


class Missing(Damage):
    """No file where there must be one."""


class SigningWriter:
    """Passes on what is written, and in the end the checksum of it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sha256 = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def sign(self) -> None:
        self.file.write(_line(self.sha256.hexdigest()))


def signed(content: bytes) -> bytes:
    return content + _line(hashlib.sha256(content).hexdigest())


def verified(content: bytes, *, required: bool = True) -> bytes:
    """What was signed; or the content itself, where it has no checksum and needs none."""
    body, line = content[:-_LENGTH], content[-_LENGTH:]
    _compare(line, len(content), lambda: hashlib.sha256(body).hexdigest(), required)
    return body if line.startswith(_MARK) else content


def verify_file(file: BinaryIO, *, required: bool = True) -> None:
    """:func:`verified` for a file of any size, which is read in pieces."""
    size = file.seek(0, 2)
    file.seek(max(0, size - _LENGTH))
    line = file.read()

    def digest() -> str:
        sha256, left = hashlib.sha256(), size - _LENGTH
        file.seek(0)
        while left > 0 and (piece := file.read(min(left, _CHUNK))):
            sha256.update(piece)
            left -= len(piece)
        return sha256.hexdigest()

    _compare(line, size, digest, required)


def _line(digest: str) -> bytes:
    return _MARK + digest.encode() + b"\n"


def _compare(line: bytes, size: int, digest: Callable[[], str], required: bool) -> None:
    if size == 0:
        raise Damage("is empty")
    if line.startswith(_MARK):
        if line != _line(digest()):
            raise Damage("does not match its checksum")
    elif required:
        raise Damage("does not end in its checksum")


def sealed(value: Mapping[str, Any], *, key: str = "") -> dict[str, Any]:
    """A JSON object with its checksum, which ``key`` binds to what the object belongs to."""
    return {**value, "checksum": fingerprint(key, value)}


def unsealed(value: Any, *, key: str = "", required: bool = True) -> dict[str, Any]:
    """The object as it was given to :func:`sealed`."""
    if not isinstance(value, dict):
        raise Damage("does not hold a JSON object")
    rest = {name: item for name, item in value.items() if name != "checksum"}
    if "checksum" not in value:
        if required:
            raise Damage("carries no checksum")
    elif value["checksum"] != fingerprint(key, rest):
        raise Damage("does not match its checksum")
    return rest


def parse_json(content: bytes) -> Any:
    if not content.strip():
        raise Damage("is empty")
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise Damage("is not JSON") from None


def fingerprint(*values: Any) -> str:
    """A short checksum of anything that JSON can hold, the same for equal values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def sealed_tensors(tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> bytes:
    """A safetensors file of the tensors, with ``about`` and the checksum of both in its metadata."""
    from safetensors.torch import save

    # Weights may be channels-last; the format stores row-major tensors only.
    stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}

    def write(about: Mapping[str, Any]) -> bytes:
        # One entry: the format keeps several in no particular order, and equal models are to be equal files.
        return save(stored, {"about": json.dumps(about, sort_keys=True)})

    return write({**about, "checksum": _tensors_checksum(write(about))})


def about_tensors(content: bytes) -> dict[str, Any]:
    """What :func:`sealed_tensors` was told about the tensors, and their ``checksum``, after comparing that."""
    if not content:
        raise Damage("is empty")
    try:
        about = json.loads(_header(content)["__metadata__"]["about"])
        found = _tensors_checksum(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damage("is not a whole safetensors file with a checksum") from None
    if about.get("checksum") != found:
        raise Damage("does not match its checksum")
    return about


def _header(content: bytes) -> dict[str, Any]:
    """A safetensors file begins with the length of a JSON object, and that object."""
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def _tensors_checksum(content: bytes) -> str:
    header = _header(content)
    about = json.loads(header.pop("__metadata__")["about"])
    about.pop("checksum", None)
    sha256 = hashlib.sha256(json.dumps([header, about], sort_keys=True).encode())
    sha256.update(memoryview(content)[8 + int.from_bytes(content[:8], "little") :])
    return sha256.hexdigest()
