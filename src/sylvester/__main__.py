"""``sylvester`` and ``python -m sylvester``: hand over to the application, or say how to install it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def main() -> None:
    from sylvester.app.processes import Terminated, handle_signals

    handle_signals()
    try:
        _run()
    except (KeyboardInterrupt, Terminated) as end:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        # At once: a second Ctrl-C would fall into the interpreter's own end, which takes a while.
        os._exit(130 if isinstance(end, KeyboardInterrupt) else 143)


def _run() -> None:
    try:
        from sylvester.app.cli import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("sylvester"):
            raise
        package = error.name.partition(".")[0]
        sys.exit(f'The command line needs {package}, which is not installed: pip install "sylvester[app]"')
    run()


if __name__ == "__main__":
    main()
