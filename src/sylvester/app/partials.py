"""What an interrupted evaluation had finished: a line of JSON for each part of the images, in their order.

Lines are only ever appended. Each carries a checksum, to which a key binds everything that the figures depend
on, and says at which image it begins. So a line that was cut off, doubled, edited or taken from another evaluation
is not believed, and neither is what follows it: those images are evaluated again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from sylvester.app import checksums
from sylvester.app.checksums import Damage

Rows = list[list[float]]


class Partial:
    """The file at ``path``: ``rows`` holds the figures of the images that are finished, one list an image."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self.rows: Rows = []
        self.damaged = False  # by more than a kill in the midst of writing the last line
        whole = 0  # bytes
        for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else []:
            if not line.endswith(b"\n"):
                break
            try:
                part = checksums.unsealed(checksums.parse_json(line), key=key)
            except Damage:
                self.damaged = True
                break
            if part["first"] != len(self.rows):
                self.damaged = True
                break
            self.rows += part["rows"]
            whole += len(line)
        if path.is_file():
            os.truncate(path, whole)

    def append(self, rows: Rows) -> None:
        part = {"first": len(self.rows), "rows": rows}
        with open(self.path, "ab") as file:
            file.write((json.dumps(checksums.sealed(part, key=self.key)) + "\n").encode())
        self.rows += rows
