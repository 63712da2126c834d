"""One self-contained page about runs, for a person who does not have this project: `html_of(comparison)`.

The page asks the network for nothing. Whatever a folder or a file may be called, its name is text.
"""

from sylvester.app.report.content import html_of

__all__ = ["html_of"]
