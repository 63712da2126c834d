"""What importing costs, and what it does not."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import sylvester
from sylvester.app.config import resolve
from sylvester.app.runs import Run

PACKAGE = Path(sylvester.__file__).parent
#: Every module of the library, by its full name.
LIBRARY = sorted(
    ".".join(("sylvester", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for file in PACKAGE.rglob("*.py")
    if file.relative_to(PACKAGE).parts[0] not in ("app", "contrib", "shipped", "__main__.py")
)


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_needs_torch_alone() -> None:
    """sympy and mpmath are torch's own: it imports them when an operator is registered."""
    code = """
import sys, torch, torch.distributions, torch.func
before = {name.partition('.')[0] for name in sys.modules}
import sylvester
for name in sylvester.__all__:
    getattr(sylvester, name)
flow = sylvester.flows.TriangularSylvester(features=4, context=3, transforms=2)
z, log_q = flow(torch.randn(5, 3)).rsample_and_log_prob((8,))
new = {name.partition('.')[0] for name in sys.modules} - before - set(sys.stdlib_module_names)
print(sorted(name for name in new if not name.startswith('_') and name not in ("sympy", "mpmath")))
"""
    assert run(code).strip() == "['sylvester']"


def test_import_is_lazy() -> None:
    assert run("import sys, sylvester, sylvester.names; print('torch' in sys.modules)").strip() == "False"


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'flow'"):
        _ = sylvester.flow
    assert "flows" in dir(sylvester)


@pytest.mark.parametrize("name", [name for name in LIBRARY if name.count(".") == 1])
def test_every_public_module_says_what_is_public(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__
    assert all(hasattr(module, public) for public in module.__all__)
    assert name.removeprefix("sylvester.") in dir(sylvester)


@pytest.mark.parametrize("missing", ["pydantic", "safetensors"])
def test_loading_a_run_without_the_application_says_what_to_install(missing: str, tmp_path: Path) -> None:
    run_folder = Run.create(tmp_path / "run", resolve({})).path
    (run_folder / "model.safetensors").touch()
    code = f"""
import sys, sylvester
sys.modules[{missing!r}] = None
try:
    sylvester.load({str(run_folder)!r})
except ModuleNotFoundError as error:
    print(error)
"""
    message = f'sylvester.load needs {missing}, which is not installed: pip install "sylvester[app]"'
    assert run(code).strip() == message


STATE = """
import gc, importlib, json, os, signal, sys, threading, warnings, logging
import torch, torch.distributions, torch.func

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

def memory():
    start = resident()
    block = torch.ones(1 << 28)  # 1 GiB
    del block
    pieces = [torch.ones(1 << 22) for _ in range(8)]
    del pieces
    return resident() - start

def state():
    return {
        "environment": dict(os.environ),
        "warnings": [repr(f) for f in warnings.filters],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
        "native threads": len(os.listdir("/proc/self/task")),
        "dtype": [str(torch.get_default_dtype()), str(torch.get_default_device())],
        "flags": [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
            torch.is_anomaly_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.cuda.matmul.allow_tf32,
            torch.distributions.Distribution._validate_args,
        ],
        "rng": torch.get_rng_state().sum().item(),
        "hooks": [repr(sys.excepthook), repr(sys.displayhook), sys.getrecursionlimit(), gc.get_threshold()],
        "signals": [repr(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "logging": [logging.root.level, len(logging.root.handlers)],
        "printing": [repr(torch._tensor_str.PRINT_OPTS)],
    }
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="tells resident memory and threads as Linux does")
def test_importing_the_library_changes_nothing_in_the_process() -> None:
    code = f"""{STATE}
torch.ones(1 << 20).sum()  # torch starts its own threads
names, before = {LIBRARY!r}, state()
for name in names:
    importlib.import_module(name)
after = state()
print(json.dumps([{{key: [before[key], after[key]] for key in before if before[key] != after[key]}}, memory()]))
"""
    assert {"sylvester.flows.base", "sylvester.linalg.tanh", "sylvester.random", "sylvester"} <= set(LIBRARY)
    changed, kept = json.loads(run(code))
    assert changed == {}
    assert kept < 100  # megabytes, of a freed GiB and eight smaller blocks
