"""``sylvester`` and ``python -m sylvester``: hand over to the application, or say how to install it."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from sylvester.app.cli import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("sylvester"):
            raise
        sys.exit(f'The command line needs {error.name}, which is not installed: pip install "sylvester[app]"')
    except KeyboardInterrupt:  # while loading; from here on the application ends in order
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
