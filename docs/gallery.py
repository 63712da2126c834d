"""Make the figures of the gallery: `make gallery`, or `python docs/gallery.py two_moons …` for some of them.

Each example runs as its own page says, and its figure is kept twice, for light and for dark pages. So an example knows
nothing of pages. What it draws in black or white follows the page; colours of its own must be seen on both.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"

#: Each example that ends with a figure, and the figure's name.
EXAMPLES = {
    "bend_a_gaussian": "bend",
    "four_energies": "energies",
    "posterior_in_your_vae": "your-vae",
    "logistic_regression": "logistic",
    "pyro_guide": "pyro",
    "densities": "densities",
    "two_moons": "two-moons",
}
BACKGROUND, FOREGROUND = "#131416", "#cfd0d0"  # of furo's dark pages
BYTES = 150_000


def make(example: str) -> None:
    path = FIGURES / f"{EXAMPLES[example]}.png"
    sys.argv = [f"examples/{example}.py", str(path)]
    runpy.run_path(str(ROOT / "examples" / f"{example}.py"), run_name="__main__")
    figure = plt.gcf()
    with Image.open(path) as image:
        dpi = image.width / figure.get_figwidth()
    darken(figure)
    dark = path.with_stem(f"{path.stem}-dark")
    figure.savefig(dark, dpi=dpi)
    plt.close(figure)
    for each in (path, dark):
        shrink(each)


def darken(figure: Figure) -> None:
    """Black to light grey and white to dark, in all that is not data."""
    for part in (figure, *figure.subfigs):
        part.set_facecolor(BACKGROUND)
    for text in figure.findobj(Text):
        if to_rgba(text.get_color()) == to_rgba("black"):
            text.set_color(FOREGROUND)
    for axis in figure.axes:
        axis.tick_params(color=FOREGROUND, labelcolor=FOREGROUND)
        axis.spines[:].set_edgecolor(FOREGROUND)
        if axis.get_facecolor() == to_rgba("white"):
            axis.set_facecolor(BACKGROUND)


def shrink(path: Path) -> None:
    """As many colours as fit into the bytes that a page may ask for."""
    with Image.open(path) as image:
        pixels = image.convert("RGB")
    for colours in (256, 128, 64):
        pixels.quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size < BYTES:
            break


if __name__ == "__main__":
    for example in sys.argv[1:] or EXAMPLES:
        make(example)
