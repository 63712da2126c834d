"""This checkout against another commit of it: the library's own work from both trees, in alternating processes.

The tasks are this checkout's for both, so that they measure the same; the library is each tree's own.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import report, runner
from benchmarks.runner import ROOT, BadRequest, BenchmarkError, Contestant
from benchmarks.sizes import SIZES
from benchmarks.workloads import VERSION_GROUPS, Allocator, between_versions

THIS = "this checkout"


def measure(
    ref: str,
    only: Sequence[str] = (),
    *,
    size: str = "paper",
    repetitions: int = 5,
    allocator: Allocator = "kept",
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> report.Document:
    """``progress`` is told how many rows are done, of how many, and the name of the next."""
    runner.check(only, VERSION_GROUPS, size=size, repetitions=repetitions)
    commit = find_commit(ref)
    rows = [row for row in between_versions(SIZES[size], THIS, ref) if row.group in (only or VERSION_GROUPS)]
    done = iter(range(len(rows)))

    def tell(name: str) -> None:
        progress(next(done), len(rows), name)

    with worktree(commit) as tree:
        trees = {THIS: ROOT, ref: tree}
        measured = [
            {
                "group": row.group,
                "name": row.name,
                "measures": row.measures,
                "this": row.ours,
                "other": row.other,
                "ratio": row.ratio,
            }
            for row in runner.run(
                rows,
                SIZES[size],
                repetitions=repetitions,
                progress=tell,
                start=lambda name: version(name, trees[name], allocator),
            )
        ]
    changed = bool(git(ROOT, "status", "--porcelain", "--", "src"))
    return report.circumstances(size=size, repetitions=repetitions, allocator=allocator) | {
        "this": {"name": THIS, "commit": git(ROOT, "rev-parse", "HEAD"), "changed": changed},
        "other": {"name": ref, "commit": commit},
        "rows": measured,
    }


@contextmanager
def version(name: str, tree: Path, allocator: Allocator) -> Iterator[Contestant]:
    with runner.contestant("library", label=name, tree=tree, allocator=allocator) as process:
        found = Path(process.ask(library=True)["path"])
        # An installation that comes first on the path would be raced against itself.
        if not found.resolve().is_relative_to(tree.resolve()):
            raise BenchmarkError(f"Expected the library of {name} in {tree}; got {found}")
        yield process


def find_commit(ref: str, root: Path = ROOT) -> str:
    """The commit that a name stands for in the checkout."""
    try:
        top = git(root, "rev-parse", "--show-toplevel")
    except (OSError, subprocess.CalledProcessError):
        top = ""
    # A copy without a history of its own may lie within another repository.
    if not top or Path(top).resolve() != root.resolve():
        raise BadRequest(f"Expected a git checkout, whose commits can be compared; got {root}")
    try:
        commit = git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
        git(root, "cat-file", "-e", f"{commit}:src/sylvester")
    except subprocess.CalledProcessError:
        raise BadRequest(f"Expected a commit, a branch or a tag that has src/sylvester; got {ref!r}") from None
    return commit


@contextmanager
def worktree(commit: str, root: Path = ROOT) -> Iterator[Path]:
    """The commit's files in a folder of their own, gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / commit[:12]
        try:
            git(root, "worktree", "add", "--quiet", "--detach", str(tree), commit)
        except subprocess.CalledProcessError as error:
            raise BenchmarkError(f"git could not check {commit[:12]} out: {error.stderr}") from error
        try:
            yield tree
        finally:
            git(root, "worktree", "remove", "--force", str(tree))


def git(root: Path, *arguments: str) -> str:
    # Within a hook, git's own variables name another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()
