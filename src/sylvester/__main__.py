"""``sylvester`` and ``python -m sylvester``: hand over to the application, or say how to install it."""

from __future__ import annotations

import sys


def main() -> None:
    from sylvester.app.processes import Terminated, handle_signals, ignore_signals

    handle_signals()
    try:
        _run()
    except (KeyboardInterrupt, Terminated) as end:
        ignore_signals()  # a second Ctrl-C must not fall into the interpreter's own end
        sys.exit(130 if isinstance(end, KeyboardInterrupt) else 143)


def _run() -> None:
    try:
        from sylvester.app.cli import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("sylvester"):
            raise
        sys.exit(f'The command line needs {error.name}, which is not installed: pip install "sylvester[app]"')
    run()


if __name__ == "__main__":
    main()
