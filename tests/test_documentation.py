"""What the pages say holds: their Python runs, their commands and flags exist, their links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import sys
import tomllib
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from sylvester.app import cli
from sylvester.app.config import resolve
from sylvester.app.experiments import reproduction, sweep, tables
from sylvester.flows import FAMILIES, HouseholderSylvester, OrthogonalSylvester, TriangularSylvester
from tests.app.commands import forked

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))
import reference  # noqa: E402

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/tutorials/*.md"))
)

#: What a page may take for granted, as a reader would: images, what an encoder made of them, a loader.
PRELUDE = """
import numpy, torch
torch.manual_seed(0)
h = torch.randn(3, 256)
x = x_test = torch.rand(1, 1, 28, 28).round()
loader = [torch.rand(2, 1, 28, 28).round()]
train = valid = test = numpy.random.default_rng(0).integers(0, 2, (12, 8, 8)).astype(numpy.uint8)
"""
#: Numbers of a page that only cost time.
SMALLER = {"samples=5000": "samples=50", "fit(log_density, flow)": "fit(log_density, flow, steps=20)"}
#: The exit code of a page about a library that is not installed.
SKIPPED = 77
#: What a page needs beyond that.
PRELUDES = {
    "README.md": """
def log_density(z):
    return -0.5 * z.square().sum(-1)
""",
    "docs/run-folder.md": """
from sylvester.app.cli import app
flags = "--latent 2 --transforms 2 --epochs 1 --warmup 0 --nll-samples 30 --quiet"
app(f"train {flags} --out runs/digits-triangular-sylvester-1", result_action="return_value")
""",
}


def blocks(page: str, language: str) -> Iterator[tuple[int, str]]:
    """The fenced blocks of a language, each with the number of its first line."""
    text = (ROOT / page).read_text()
    for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, found.start()) + 2, found[1]


def execute(page: str) -> None:
    """All blocks of a page in one namespace, in a process of its own."""
    namespace: dict[str, object] = {"__name__": "__page__"}
    exec(PRELUDE + PRELUDES.get(page, ""), namespace)
    for line, source in blocks(page, "python"):
        for number, smaller in SMALLER.items():
            source = source.replace(number, smaller)
        try:
            # Blank lines in front, so that an error names the line of the page.
            exec(compile("\n" * (line - 1) + source, str(ROOT / page), "exec"), namespace)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("pyro", "zuko", "sbi"):
                raise
            raise SystemExit(SKIPPED) from None
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None


#: Notebooks, whose cells `make docs` executes.
TUTORIALS = [page for page in PAGES if page.startswith("docs/tutorials/")]
CELL = re.escape("{code-cell} python")


@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_is_executed_by_the_build_of_the_pages(page: str) -> None:
    """That its cells run is for the build to find out; here, that it does run them, and that imports are real."""
    text = (ROOT / page).read_text()
    assert re.match(r"---\nfile_format: mystnb\nkernelspec:\n  name: python3\n", text)
    assert not list(blocks(page, "python"))  # code that the build would only show
    name = page.removeprefix("docs/").removesuffix(".md")
    assert f"\n{name}\n" in (ROOT / "docs" / "index.md").read_text()
    cells = [source for _, source in blocks(page, CELL)]
    assert len(cells) == text.count("{code-cell}") > 5
    for cell in cells:
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "sylvester":
                if node.module == "sylvester.contrib.pyro":
                    pytest.importorskip("pyro")
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), cell


def test_the_build_of_the_pages_executes_tutorials_and_stops_at_errors() -> None:
    settings = (ROOT / "docs" / "conf.py").read_text()
    assert '\nnb_execution_mode = "force"\n' in settings
    assert "\nnb_execution_raise_on_error = True\n" in settings


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page, "python"))])
def test_python_runs(page: str, tmp_path: Path) -> None:
    result = forked(execute, page, cwd=tmp_path)
    if result.returncode == SKIPPED:
        pytest.skip("a library that the page is about is not installed")
    assert result.returncode == 0, result.stderr


def commands(page: str) -> Iterator[list[str]]:
    """The words of every command of a page's shell blocks."""
    for _, source in blocks(page, "sh"):
        yield from commands_in(source)


def commands_in(source: str) -> Iterator[list[str]]:
    """Without comments and variables in front; what a shell is to eval is a command, too."""
    for line in re.sub(r'eval "\$\((.+)\)"', r"\1", source.replace("\\\n", " ")).splitlines():
        for part in re.split(r"&&|\|", line):
            # What may be left out or repeated, [RUN …], is no word of the command.
            words = shlex.split(re.sub(r"\[[A-Z]+ ?…?\]", "", part), comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield words


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page, "sh"))])
def test_shell_blocks_name_real_commands_and_flags(page: str) -> None:
    for words in commands(page):
        check_command(words)


def check_command(words: list[str]) -> None:
    program, *words = words
    match program:
        case "sylvester":
            check_sylvester(words)
        case "make":
            assert set(words) <= targets(), words
        case "pip":
            check_extras(words)
        case "python":
            module = ROOT / words[1].replace(".", "/") if words[0] == "-m" else None
            scripts = [ROOT / words[0]] if module is None else [module / "__main__.py", module.with_suffix(".py")]
            assert any(script.is_file() for script in scripts), words
        case _:
            assert program in ("export", "git", "ray", "scp", "source"), f"no test knows the program {program}"


def check_sylvester(words: list[str]) -> None:
    """Parsed by the command line itself, without being run, and its values accepted."""
    command, bound, _ = cli.app.parse_args(words, exit_on_error=False, print_error=False)
    arguments = bound.arguments
    if command is cli.train:
        resolve(cli.given(arguments.get("flags")), None)
    elif command is cli.sweep:
        for cell in sweep.grid(cli.given(arguments.get("values"))):
            resolve(cell)
    elif command is cli.reproduce:
        chosen = {name: arguments.get(name) for name in ("preset", "only", "seeds", "data_dir")}
        reproduction.choose(arguments["experiment"], **chosen)
    assert arguments.get("format", "table") in tables.FORMATS


def test_a_wrong_command_flag_or_value_is_seen() -> None:
    for words in (
        "trian",
        "train --flwo iaf",
        "train --flow ifa",
        "sweep --flow iaf,maff",
        "reproduce table9",
        "resume",
    ):
        with pytest.raises(Exception, match=r"Expected|[Uu]nknown|requires"):
            check_sylvester(words.split())


def targets() -> set[str]:
    return set(re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1].split())


def check_extras(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        if found := re.fullmatch(r"sylvester\[(.+)\]", word):
            assert set(found[1].split(",")) <= set(extras), word


@pytest.mark.parametrize("page", PAGES)
def test_code_in_the_text_names_real_commands_and_flags(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    known = flags_of()
    others = set(re.findall(r"--[a-z][a-z0-9-]*", (ROOT / "benchmarks" / "__main__.py").read_text()))
    for code in re.findall(r"`([^`]+)`", text):
        words = code.split()
        if words[0] == "make" and len(words) == 2:
            assert words[1] in targets(), code
        if words[0] == "pip":
            check_extras([word.strip('"') for word in words])
        if words[0] == "sylvester" and len(words) > 1 and re.fullmatch("[a-z]+", words[1]):
            key = " ".join(words[1:3]) if " ".join(words[1:3]) in known else words[1]
            assert key in known, code
            named = set(re.findall(r"(?<!\S)--?[a-z][a-z0-9-]*", code))
            assert named <= known[key] | {"--help", "--version"}, code
        elif words[0].startswith("--"):
            flag = re.match(r"--[a-z][a-z0-9-]*", words[0])[0]
            assert flag in set().union(*known.values()) | others | {"--help", "--version"}, code


def flags_of() -> dict[str, set[str]]:
    """The flags of every command; of those that only hold others, none."""
    return {
        name: {flag for argument in app.assemble_argument_collection() for flag in argument.names}
        if app.default_command
        else set()
        for name, app in applications()
    }


def applications(app: cli.App = cli.app, name: str = "") -> Iterator[tuple[str, cli.App]]:
    """Every command by the words that follow ``sylvester``."""
    for command in (name for name in app if not name.startswith("-")):
        full = f"{name} {command}".strip()
        yield full, app[command]
        yield from applications(app[command], full)


@pytest.mark.parametrize("name", ["", *(name for name, _ in applications())])
def test_help_ends_in_real_examples_of_its_command(name: str) -> None:
    app = {"": cli.app, **dict(applications())}[name]
    (source,) = re.findall(r"```sh\n(.*)```$", app.help_epilogue, flags=re.DOTALL)
    for words in commands_in(source):
        check_command(words)
        assert words[0] == "source" or words[1 : 1 + len(name.split())] == name.split()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if file.parent == ROOT / "docs" / "generated":
            assert file.name in {"command-line.md", *(f"{name}.md" for name in reference.modules())}, target
            continue
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}, target


@pytest.mark.parametrize("name", reference.modules())
def test_the_reference_has_every_public_name_and_what_it_is_for(name: str) -> None:
    page = reference.module_page(name)
    kinds = reference.public(name)
    assert kinds
    for public, kind in kinds.items():
        assert f".. auto{kind}:: {name}.{public}\n" in page + "\n"
    if name.startswith("sylvester.contrib."):
        return
    module = importlib.import_module(name)
    assert set(kinds) == {each for each in module.__all__ if not inspect.ismodule(getattr(module, each))}
    for public, kind in kinds.items():
        value = getattr(module, public)
        own = value.__dict__.get("__doc__") if kind == "class" else getattr(value, "__doc__", None)
        described = reference.data_comment(f"{name}.{public}") if kind == "data" else own
        assert described, f"{name}.{public} says nothing of what it is for"
        # What dataclasses and named tuples write of themselves is a signature.
        assert not described.startswith(f"{public}("), public


def examples() -> str:
    """All that runs and is meant to be read: doctests, the pages' blocks and the scripts of examples/."""
    doctests = [
        line
        for path in (ROOT / "src" / "sylvester").rglob("*.py")
        for line in path.read_text().splitlines()
        if re.match(r" *(>>>|\.\.\.) ", line)
    ]
    on_pages = [source for page in PAGES for _, source in blocks(page, "python")]
    scripts = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
    return "\n".join([*doctests, *on_pages, *scripts])


@pytest.mark.parametrize("name", [name for name in reference.modules() if not name.startswith("sylvester.app")])
def test_every_public_function_has_an_example(name: str) -> None:
    shown = set(re.findall(r"\w+", examples()))
    functions = {each for each, kind in reference.public(name).items() if kind == "function"}
    assert functions <= shown, functions - shown


def test_every_public_module_has_a_page() -> None:
    library = {f"sylvester.{path.stem}" for path in (ROOT / "src" / "sylvester" / "contrib").glob("[!_]*.py")}
    names = {name.replace("sylvester.", "sylvester.contrib.", 1) for name in library}
    assert names <= set(reference.modules())
    assert {"sylvester", "sylvester.flows", "sylvester.app.runs"} <= set(reference.modules())


def test_a_sylvester_step_has_as_many_numbers_as_the_page_says() -> None:
    d, m, h = 6, 4, 3
    sizes = {
        "M² + 2M + DM": OrthogonalSylvester(d, context=2, rank=m),
        "D² + 2D + HD": HouseholderSylvester(d, context=2, reflections=h),
        "D² + 2D": TriangularSylvester(d, context=2),
    }
    text = (ROOT / "docs" / "mathematics.md").read_text()
    for formula, flow in sizes.items():
        row = next(line for line in text.splitlines() if f"| `{type(flow).__name__}` |" in line)
        assert f"| {formula} |" in row
        terms = formula.replace("²", "**2").replace("2M", "2*M").replace("2D", "2*D")
        terms = terms.replace("DM", "D*M").replace("HD", "H*D")
        assert flow.steps[0].hypernetwork.outputs == eval(terms, {"D": d, "M": m, "H": h})


@pytest.mark.parametrize("page", ["docs/mathematics.md", "docs/which-flow.md"])
def test_no_family_is_forgotten(page: str) -> None:
    text = (ROOT / page).read_text()
    assert [family.__name__ for family in FAMILIES.values() if f"`{family.__name__}`" not in text] == []
