"""What shells are told so that they complete ``sylvester``: commands, flags, names and paths.

The scripts are static, so that pressing TAB starts no Python. What cyclopts generates leaves three things out, which
are put in here: folders that end in a slash and not in a blank, paths where names are offered too, and one way for
all shells to read a script, be it from a file or by ``eval``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from sylvester.names import DATASETS

if TYPE_CHECKING:
    from cyclopts import App

__all__ = ["SHELLS", "Shell", "script"]

Shell = Literal["bash", "zsh", "fish"]
SHELLS: tuple[Shell, ...] = get_args(Shell)
_NAMES = " ".join(DATASETS)


def script(app: App, shell: Shell) -> str:
    """What a shell is to read in order to complete the application."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](app.generate_completion(shell=shell))


def _bash(text: str) -> str:
    # Where the function finds nothing, readline completes paths, which it does better than compgen.
    text = text.replace('COMPREPLY=( $(compgen -f -- "${cur}") )', "COMPREPLY=()")
    return text.replace("\ncomplete -F ", "\ncomplete -o default -F ")


def _zsh(text: str) -> str:
    text = text.replace("_cyclopts_sylvester", "_sylvester").replace(f"({_NAMES})", "_sylvester_dataset")
    return f"""{text.rstrip()}

_sylvester_dataset() {{
  _alternative 'names:dataset:({_NAMES})' 'files:archive:_files -g "*.npz"'
}}

# From a file in $fpath, this is the function itself; read by eval, it is not.
if [[ "$funcstack[1]" == _sylvester ]]; then
  _sylvester "$@"
else
  compdef _sylvester sylvester
fi
"""


def _fish(text: str) -> str:
    return text.replace(f"-x -a '{_NAMES}'", f"-r -F -a '{_NAMES}'")
