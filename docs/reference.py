"""The pages that are made of the code: every public name of every public module, and every command with its flags."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import sylvester

#: Modules of the application that programs may rely on.
APPLICATION = (
    "sylvester.app.data",
    "sylvester.app.runs",
    "sylvester.app.experiments.comparison",
    "sylvester.app.experiments.paper",
)


def missing(*packages: str) -> list[str]:
    return [package for package in packages if importlib.util.find_spec(package) is None]


def modules() -> list[str]:
    """Every public module, the package itself first."""
    library = [f"sylvester.{name}" for name in sorted(sylvester._SUBMODULES)]
    contrib = Path(sylvester.__file__).parent / "contrib"
    adapters = [f"sylvester.contrib.{found.name}" for found in pkgutil.iter_modules([str(contrib)])]
    return ["sylvester", *library, *adapters, *APPLICATION]


def write(folder: Path) -> None:
    """All pages; one that would not change is left alone, so that it is not read again."""
    folder.mkdir(exist_ok=True)
    pages = {"command-line.md": command_line(), "modules.txt": "".join(f"{about(name)}\n" for name in modules())}
    for name in modules():
        pages[f"{name}.md"] = module_page(name)
    for stale in {path.name for path in folder.iterdir()} - set(pages):
        (folder / stale).unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def about(name: str) -> str:
    """A line of the list of modules: the first sentence of its docstring."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    docstring = ast.get_docstring(ast.parse(Path(str(spec.origin)).read_text())) or ""
    sentence = re.split(r"(?<=\.)\s", docstring.replace("``", "`"), maxsplit=1)[0].rstrip(".:")
    return f"- [{name}](generated/{name}.md): {' '.join(re.sub(r':[a-z]+:`~?', '`', sentence).split())}."


def module_page(name: str) -> str:
    """The module's docstring, a table of its public names, and each with its signature."""
    kinds = public(name)
    lines = [f".. automodule:: {name}", "", f".. currentmodule:: {name}", ""]
    lines += [".. autosummary::", "   :nosignatures:", "", *(f"   {each}" for each in kinds)]
    for each, kind in kinds.items():
        lines += ["", f".. auto{kind}:: {name}.{each}"]
        if kind == "class":
            # What the package shows at its top has its entry in the index from its own module.
            lines.append("   :no-index:" if name == "sylvester" else "   :members:")
            if fields := _tuple_fields(name, each):
                lines.append(f"   :exclude-members: {', '.join(fields)}")
    body = "\n".join(lines)
    return f"# {name}\n\n```{{eval-rst}}\n{body}\n```\n"


def public(name: str) -> dict[str, str]:
    """What a module's ``__all__`` names, each a class, function or data; modules have pages of their own.

    Adapters are read and not imported: their peers need not be installed.
    """
    if name.startswith("sylvester.contrib."):
        path = Path(sylvester.__file__).parent / "contrib" / f"{name.rpartition('.')[2]}.py"
        tree = ast.parse(path.read_text())
        kinds = {node.name: "class" for node in tree.body if isinstance(node, ast.ClassDef)}
        kinds |= {node.name: "function" for node in tree.body if isinstance(node, ast.FunctionDef)}
        found = next(ast.literal_eval(node.value) for node in tree.body if _assigns(node, "__all__"))
        return {each: kinds.get(each, "data") for each in found}
    module = importlib.import_module(name)
    values = {each: getattr(module, each) for each in module.__all__}
    return {each: _kind(value) for each, value in values.items() if not inspect.ismodule(value)}


def _tuple_fields(module: str, name: str) -> tuple[str, ...]:
    """Of a named tuple, whose fields describe themselves as "Alias for field number 0"; its signature has them."""
    if module.startswith("sylvester.contrib."):
        return ()
    return getattr(getattr(importlib.import_module(module), name), "_fields", ())


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets)


def _kind(value: Any) -> str:
    return "class" if inspect.isclass(value) else "function" if inspect.isroutine(value) else "data"


def command_line() -> str:
    """What ``--help`` says, of every command."""
    from sylvester.app.cli import app

    text = app.generate_docs(output_format="markdown")
    text = re.sub(r"^(sylvester\b.*?) -m \w+", r"\1", text, flags=re.MULTILINE)  # how this process was started
    text = re.sub(r"## Table of Contents\n.*?(?=^\*\*)", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^```console$", "```text", text, flags=re.MULTILINE)
    text = re.sub(r"^(sylvester (\w+)) \2 ", r"\1 ", text, flags=re.MULTILINE)  # of usages that name their command
    sections = re.split(r"^(?=#+ sylvester)", text, flags=re.MULTILINE)
    text = "".join(_with_examples(section, app) for section in sections if section)
    # Headings that would fill the list of contents with the same few words.
    text = re.sub(r"^\*\*(.+)\*\*:$", r"```{rubric} \1\n:heading-level: 3\n```", text, flags=re.MULTILINE)
    return re.sub(r"^# sylvester$", "# The command line", text, count=1, flags=re.MULTILINE)


def _with_examples(section: str, app: Any) -> str:
    """A command's part of the page, with the end of its help."""
    for word in section.partition("\n")[0].split()[2:]:
        app = app[word]
    return f"{section.rstrip()}\n\n{app.help_epilogue}\n\n"


def as_markup(app: object, what: str, name: str, value: Any, options: object, lines: list[str]) -> None:
    """Docstrings are written to be read in an editor: what they need to be read as markup is done here.

    Equations and other indented blocks keep their lines, signs of mathematics are not markup, and the comments behind
    the fields of a class describe them.
    """
    if what == "data" and "\n".join(lines).strip() == inspect.cleandoc(type(value).__doc__ or "").strip():
        lines[:] = [data_comment(name), ""]
    lines[:] = [_escaped(line) for line in _with_literal_blocks(lines)]
    if what == "class" and (fields := field_comments(value)):
        lines += ["", "Attributes:", *(f"    {field}: {_escaped(text)}" for field, text in fields.items()), ""]


def _with_literal_blocks(lines: list[str]) -> list[str]:
    out: list[str] = []
    depth, literal = 0, False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            out.append(line)
            continue
        if literal and indent <= depth:
            literal = False
        after_blank = bool(out) and not out[-1].strip()
        if not literal and after_blank and indent >= depth + 4:
            out += [f"{' ' * depth}.. code-block:: text", ""]
            literal = True
        if not literal:
            depth = indent if not line.lstrip().startswith(("- ", ">>>")) else indent + 2
        out.append(_LITERAL + line if literal else line)
    return out


_LITERAL = "\0"
_CODE = re.compile(r"(``.*?``|`[^`]*`)")


def _escaped(line: str) -> str:
    if line.startswith(_LITERAL):
        return line.removeprefix(_LITERAL)
    if line.lstrip().startswith((">>>", "...", "..")):
        return line
    parts = _CODE.split(line)
    parts[::2] = [re.sub(r"(?<!\*)\*(?!\*)|\||(?<=\w)_(?=\W|$)", r"\\\g<0>", part) for part in parts[::2]]
    return "".join(parts)


def field_comments(cls: type) -> dict[str, str]:
    """The comments behind the fields of a dataclass or a named tuple."""
    if not (dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")):
        return {}
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        return {}
    return dict(re.findall(r"^    (\w+): [^#\n]*  # (.+)$", source, flags=re.MULTILINE))


def data_comment(name: str) -> str:
    """The comment behind or above a constant of a module, given by its full name."""
    module, _, constant = name.rpartition(".")
    source = inspect.getsource(importlib.import_module(module)).splitlines()
    place = next((i for i, line in enumerate(source) if re.match(rf"{constant}\b.*?=", line)), None)
    if place is None:
        return ""
    if behind := re.search(r"  #:? (.+)$", source[place]):
        return behind[1]
    above: list[str] = []
    while place and (comment := re.match(r"#:? (.+)", source[place - 1])):
        above.insert(0, comment[1])
        place -= 1
    return " ".join(above)
