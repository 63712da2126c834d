"""``python -m benchmarks``, from a checkout. Progress goes to stderr, results to stdout.

Exit codes: 0 done, 1 failed at run time, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import json as jsonlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import report, versions
from benchmarks.runner import BadRequest, BenchmarkError, check
from benchmarks.workloads import ALL_GROUPS, VERSION_GROUPS, Allocator

app = App(name="python -m benchmarks", help_flags=["--help", "-h"], version_flags=[])


@app.default
def bench(
    *,
    only: Annotated[list[str] | None, Parameter(negative="", help="Measure this group alone; may be repeated.")] = None,
    against: Annotated[
        str | None, Parameter(help="Race this checkout against another commit of it (a branch, a tag) instead.")
    ] = None,
    size: Annotated[str, Parameter(help="The paper's sizes, or tiny ones to see that it runs.")] = "paper",
    repetitions: Annotated[int, Parameter(help="Of each measurement, of which the fastest counts.")] = 5,
    allocator: Annotated[
        Allocator, Parameter(help="Whether the library's processes keep freed memory, as the application's do.")
    ] = "kept",
    out: Annotated[
        Path | None,
        Parameter(
            help="The JSON file, benchmarks.json by default; a page (.md) and a figure (.svg) of the same name go"
            " beside it. With --against, JSON alone, and only where it is asked for."
        ),
    ] = None,
    data_dir: Annotated[Path | None, Parameter(help="Folder of the datasets' files.")] = None,
    quiet: Annotated[bool, Parameter(negative="", help="Show no progress.")] = False,
    json: Annotated[bool, Parameter(negative="", help="Print the result as JSON.")] = False,
) -> None:
    """Race the library against the paper's way of running its experiments, against its peers, or against itself."""
    if out is not None and not out.parent.is_dir():
        raise BadRequest(f"Expected an existing folder for the report; got {out.parent}")
    check(only or (), ALL_GROUPS if against is None else VERSION_GROUPS, size=size, repetitions=repetitions)
    if against is not None:
        versions.find_commit(against)  # before a bar is drawn
        with counter(quiet) as progress:
            found = versions.measure(
                against, only or (), size=size, repetitions=repetitions, allocator=allocator, progress=progress
            )
        if out is not None:
            report.write_json(out, found)
        tables, note = [report.version_table(found)], report.version_note(found)
    else:
        # They bring torch, which neither --help nor a refusal needs.
        from benchmarks import suite
        from sylvester.app.data import DataError

        try:
            with counter(quiet) as progress:
                found = suite.measure(
                    only or (),
                    size=size,
                    repetitions=repetitions,
                    allocator=allocator,
                    data_dir=data_dir,
                    progress=progress,
                )
        except DataError as error:
            raise BadRequest(str(error)) from error
        out = out or Path("benchmarks.json")
        report.save(found, out)
        tables, note = report.tables(found), report.note(found)
    if json:
        print(jsonlib.dumps(found, indent=2, allow_nan=False))
        return
    for table in tables:
        Console().print(table)
    print(note)
    if out is not None:
        print(out)


@contextmanager
def counter(quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=name)


def main() -> None:
    # Asked to end, it leaves through the exits that remove the other commit's files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app(exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, BadRequest) as error:
        fail(error, 2)
    except BenchmarkError as error:
        fail(error, 1)
    except OSError as error:
        fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1)
    except KeyboardInterrupt:
        sys.exit(130)


def fail(reason: object, code: int) -> None:
    print(f"benchmarks: {' '.join(str(reason).split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
