"""Completion as the shells do it: the script's function called as bash calls it, and keys pressed in a terminal."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from sylvester.app.cli import app
from sylvester.app.completion import SHELLS, script
from sylvester.app.config import PRESETS
from sylvester.names import DATASETS, FLOWS
from tests.app.commands import environment


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    for shell in SHELLS:
        (folder / shell).write_text(script(app, shell))
    return folder


def offered(scripts: Path, *words: str) -> list[str]:
    """What bash would offer for the last word."""
    code = (
        'source "$1"; shift; COMP_WORDS=(sylvester "$@"); COMP_CWORD=$#; _sylvester sylvester "${@: -1}" '
        '"${COMP_WORDS[COMP_CWORD-1]}"; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", code, "bash", scripts / "bash", *words], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return sorted(filter(None, done.stdout.splitlines()))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tr"], ["train"]),
        (["data", ""], ["check", "fetch", "list"]),
        (["train", "--lat"], ["--latent"]),
        (["train", "--flow", "triangular"], ["triangular-sylvester"]),
        (["train", "--flow", ""], sorted(FLOWS)),
        (["train", "--latent", "4", "--flow", "nic"], ["nice"]),
        (["train", "--flow", "=", "nic"], ["nice"]),
        (["train", "--preset", ""], sorted(PRESETS)),
        (["train", "--dataset", ""], sorted(DATASETS)),
        (["train", "--dataset", "mine"], []),  # left to readline, as are all paths
        (["sweep", "--flow", "real"], ["realnvp"]),
        (["sweep", "--compile", ""], ["false", "true"]),
        (["compare", "--against", "gau"], ["gaussian"]),
        (["compare", "--format", "t"], ["table", "tex"]),
        (["gaps", "runs/a", "--split", ""], ["test", "valid"]),
        (["reproduce", "table"], ["table1", "table2", "table3"]),
        (["data", "check", "m"], ["mnist"]),
        (["completion", ""], sorted(SHELLS)),
        (["evaluate", "run"], []),
        (["evaluate", "runs/a", "--sa"], ["--samples"]),
    ],
)
def test_bash_is_offered(words: list[str], expected: list[str], scripts: Path) -> None:
    assert offered(scripts, *words) == expected


def test_every_flag_of_every_command_is_offered(scripts: Path) -> None:
    for command in (name for name in app if app[name].default_command and not name.startswith("-")):
        flags = {flag for argument in app[command].assemble_argument_collection() for flag in argument.names}
        assert {flag for flag in flags if flag.startswith("-")} <= set(offered(scripts, command, "-"))


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("sylvester ev\trun\tdigits-t\t", "evaluate runs/digits-triangular-sylvester-1"),
        ("sylvester train --dataset om\t--out run\t", "train --dataset omniglot --out runs"),
        ("sylvester train --dataset my\t--pres\tde\t", "train --dataset my images.npz --preset demo"),
    ],
)
@pytest.mark.parametrize("shell", SHELLS)
def test_keys_in_a_terminal(shell: str, typed: str, expected: str, scripts: Path, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "runs" / "digits-triangular-sylvester-1").mkdir(parents=True)
    (tmp_path / "my images.npz").touch()
    assert typed_in(shell, typed, scripts / shell, tmp_path) == expected


def typed_in(shell: str, keys: str, file: Path, folder: Path) -> str:
    """Start a shell in a terminal, let it read the script, press the keys, and see what command it runs."""
    start = {
        "bash": (["bash", "--norc", "--noprofile", "-i"], f'PS1=; sylvester() {{ echo "$*" > said; }}; source {file}'),
        "zsh": (
            ["zsh", "-f", "-i"],
            f'PS1=; autoload -Uz compinit; compinit -D -u; sylvester() {{ echo "$*" > said; }}; source {file}',
        ),
        "fish": (["fish", "--no-config", "-i"], f'function sylvester; echo "$argv" > said; end; source {file}'),
    }
    command, preparation = start[shell]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, {**environment(), "TERM": "xterm", "HOME": str(folder)})
    os.set_blocking(terminal, False)
    deadline = time.monotonic() + 60

    def press(text: str, until: Path) -> None:
        os.write(terminal, text.encode())
        while not until.exists() or not until.read_text().endswith("\n"):
            assert time.monotonic() < deadline
            read()
            time.sleep(0.01)

    def read() -> None:
        """Nobody may be kept waiting for a full pipe."""
        try:
            while os.read(terminal, 65536):
                pass
        except OSError:
            pass

    press(f"{preparation}; echo > ready\n", folder / "ready")
    press(f"{keys}\n", folder / "said")
    os.write(terminal, b"\x15exit\n")
    os.close(terminal)
    os.waitpid(pid, 0)
    return (folder / "said").read_text().strip().rstrip("/")  # which zsh takes away by itself
