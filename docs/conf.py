"""How the documentation is built: `make docs`, with every warning an error."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import reference  # noqa: E402

import sylvester  # noqa: E402

project = "sylvester"
author = "the sylvester maintainers"
release = version = sylvester.__version__
copyright = f"2026, {author}"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}

html_theme = "furo"
html_title = f"sylvester {version}"
html_static_path = ["_static"]
html_css_files = ["page.css"]
html_copy_source = False
html_show_sphinx = False
smartquotes = False  # z' is no quotation
html_math_renderer = "mathml"
pygments_style, pygments_dark_style = "friendly", "github-dark"

# The tutorials are executed as the pages are built, so that what they show is what this version does. A cell that fails
# fails the build. Other pages are no notebooks: the tests run their code.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300  # seconds per cell, also where the processor is shared
nb_output_stderr = "remove-warn"
os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")  # tqdm would like ipywidgets; nothing here does
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3

# Docstrings name what is beside them in single backquotes.
default_role = "py:obj"
autosummary_generate = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# The adapters are described where their peers are not installed, too.
autodoc_mock_imports = reference.missing("pyro", "sbi", "zuko")
python_use_unqualified_type_names = True
python_display_short_literal_types = True
toc_object_entries = False

nitpicky = True
# Names of torch, Python and others have no page here; single backquotes are for any name.
nitpick_ignore_regex = [
    ("py:.*", r"(?!sylvester\.).*"),
    ("py:obj", ".*"),
    # Modules below public ones have names that stand in signatures, but are nobody else's to make.
    ("py:class", r"sylvester\.\w+\.\w+\..*"),
]


def _mathml(tex: str, *, as_block: bool) -> str:
    # A thin space on either side of a function's name, which docutils leaves out.
    tex = re.sub(r"(?<=[\w}\])])\s*(?=\\(log|det|tanh)\b)", r"\\,", tex)
    return tex2mathml(re.sub(r"(\\(?:log|det|tanh))\s*(?=[A-Za-z\\])", r"\1\\,", tex), as_block=as_block)


def _inline(self, node: nodes.math) -> None:
    self.body.append(_mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def _block(self, node: nodes.math_block) -> None:
    self.body.append(f'<div class="equation">{_mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app) -> None:
    # Equations as MathML, which browsers draw by themselves: no script and nothing from the network.
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    app.connect("autodoc-process-docstring", reference.as_markup, priority=100)
    app.connect("config-inited", lambda app, config: reference.write(HERE / "generated"))
