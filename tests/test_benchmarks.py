"""The reference of the benchmarks agrees with the library, and every benchmark runs. Nothing here is timed."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from copy import deepcopy
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from test_allocator import pages_are_small

pytest.importorskip("lightning_fabric")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import report, results, runner, scaling, suite, tasks_library, tasks_reference, versions  # noqa: E402
from benchmarks.agreement import copy_weights, correspondence  # noqa: E402
from benchmarks.path_gradients import by_turns, variance  # noqa: E402
from benchmarks.reference import ReferenceVAE, log_likelihood, orthogonalize, reflections_multiplied  # noqa: E402
from benchmarks.sizes import SIZES  # noqa: E402
from benchmarks.worker import Worker  # noqa: E402
from benchmarks.workloads import GROUPS, MODELS, PEERS, VERSION_GROUPS, Job, Workload, workloads  # noqa: E402
from sylvester import evaluation  # noqa: E402
from sylvester.app.runs import Run  # noqa: E402
from sylvester.flows import Planar  # noqa: E402
from sylvester.linalg import HouseholderProduct, polar  # noqa: E402
from sylvester.objectives import elbo  # noqa: E402

TINY = SIZES["tiny"]
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request):
    """The default of torch for one test: the models of both sides are built with it."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


def both(flow: str, dtype: torch.dtype):
    """The library's model and the reference with its weights."""
    torch.manual_seed(1)
    vae = tasks_library.build(TINY, flow)
    sizes = {key: value for key, value in asdict(TINY).items() if key not in ("batch", "samples", "product")}
    model = ReferenceVAE(flow, **sizes, tolerance=1e-6 if dtype == torch.float32 else 1e-13)
    copy_weights(vae, model)
    return vae, model


def assert_close(ours, theirs, dtype, *, slack=1.0):
    """Relative to the largest entry: a component near zero carries the rounding of its neighbours."""
    scale = max(theirs.abs().max().item(), torch.finfo(dtype).tiny)
    assert (ours - theirs).abs().max().item() <= slack * TOLERANCE[dtype] * scale


@pytest.mark.parametrize("flow", MODELS)
def test_the_reference_computes_what_the_library_computes(flow, dtype):
    vae, model = both(flow, dtype)
    x, noise = tasks_reference.images(TINY, 5).to(dtype), torch.randn(5, TINY.features)
    ours, theirs = vae.log_terms(x, noise=noise.unsqueeze(0)), model(x, noise)
    assert theirs.z.std() > 0.1
    for name in theirs._fields:
        assert_close(getattr(ours, name)[0], getattr(theirs, name), dtype)


@pytest.mark.parametrize("flow", MODELS)
def test_gradients_and_a_step_of_the_optimizer_agree(flow, dtype):
    vae, model = both(flow, dtype)
    x, noise = tasks_reference.images(TINY, 5).to(dtype), torch.randn(5, TINY.features)
    optimizers = (
        tasks_library.make_optimizer(vae),
        torch.optim.Adamax(model.parameters(), lr=5e-4, eps=1e-7),
    )
    terms = model(x, noise)
    losses = (-elbo(vae.log_terms(x, noise=noise.unsqueeze(0))), terms.log_q - terms.log_px_z - terms.log_pz)
    for loss in losses:
        loss.mean().backward()
    pairs = list(correspondence(vae, model))
    assert {id(theirs) for theirs, _ in pairs} == {id(parameter) for parameter in model.parameters()}
    before = [theirs.detach().clone() for theirs, _ in pairs]
    for theirs, find in pairs:
        assert theirs.grad.abs().sum() > 0
        assert_close(find(lambda parameter: parameter.grad), theirs.grad, dtype, slack=10)
    for optimizer in optimizers:
        optimizer.step()
    # Adamax's first step is the learning rate times grad / (|grad| + eps): it magnifies what is noise in the smallest
    # gradients. The larger ones show whether both take the same step, to the rounding of the weights.
    for (theirs, find), start in zip(pairs, before, strict=True):
        large = theirs.grad.abs() > 1e-2 * theirs.grad.abs().max()
        moved, rounding = (theirs.detach() - start)[large], 2 * torch.finfo(dtype).eps * start.abs().max().item()
        assert moved.abs().max() > 100 * rounding
        torch.testing.assert_close(find(lambda p: p.detach())[large] - start[large], moved, rtol=1e-3, atol=rounding)


def test_importance_sampling_agrees_within_its_error():
    vae, model = both("planar", torch.float32)
    x = tasks_reference.images(TINY, 1)
    ours = evaluation.log_likelihood(vae, x, 4000)
    theirs = torch.stack([log_likelihood(model, x, 1000) for _ in range(4)])
    error = (ours.mc_error.item() ** 2 + theirs.var().item() / len(theirs)) ** 0.5
    assert abs(ours.log_px.item() - theirs.mean().item()) < 5 * error < 1.0


def test_linear_algebra_agrees():
    a = torch.randn(3, 6, 4, dtype=torch.float64)
    torch.testing.assert_close(orthogonalize(a, 1e-13), polar(a))
    v, z = torch.randn(3, 2, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(
        (reflections_multiplied(v) @ z.unsqueeze(-1)).squeeze(-1), HouseholderProduct(v).matvec(z)
    )


def test_the_reference_orthogonalizes_longer_where_the_condition_is_worse():
    """Otherwise the rows about memory would compare a thing with itself."""
    steps = [
        next(limit for limit in range(100) if torch.equal(orthogonalize(a, limit=limit), orthogonalize(a, limit=100)))
        for a in (tasks_reference.conditioned(TINY, condition) for condition in (2.0, 1000.0))
    ]
    assert steps[1] >= steps[0] + 8


@pytest.fixture(scope="module")
def workers():
    return {name: Worker(name) for name in ("library", "reference", *PEERS)}


@pytest.fixture(scope="module")
def caltech(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "train.pt"
    torch.save(tasks_reference.images(TINY, 2 * TINY.batch + 1), path)
    return str(path)


@pytest.mark.parametrize("group", GROUPS)
def test_every_job_runs_at_tiny_sizes(group, workers, caltech):
    jobs = {
        json.dumps(asdict(job)): job
        for row in workloads(TINY, caltech)
        if row.group == group
        for job in (row.ours, row.other)
        if find_spec(job.contestant) or job.contestant in ("library", "reference")
    }
    assert jobs
    for job in jobs.values():
        worker = workers[job.contestant]
        built = worker.answer({"build": job.task, "size": asdict(TINY), "arguments": job.arguments})
        worker.jobs[built["job"]]()
        assert group != "throughput" or built["flops"] > 0


def test_every_size_of_the_sweeps_runs(workers):
    for sweep in scaling.sweeps(TINY):
        assert [value for value, _, _ in sweep.points] == sorted({value for value, _, _ in sweep.points})
        for _, size, job in sweep.points:
            built = workers["library"].answer({"build": job.task, "size": asdict(size), "arguments": job.arguments})
            workers["library"].jobs[built["job"]]()


def test_exponents():
    assert scaling.exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2)
    assert scaling.exponent([10, 100], [5.0, 5.0]) == pytest.approx(0)


def test_the_reference_and_the_peers_import_nothing_of_the_library():
    code = (
        "import sys, benchmarks.worker, benchmarks.tasks_reference, benchmarks.peers; print('sylvester' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_row_is_measured_in_alternating_processes_and_reported(tmp_path):
    ours = Workload("linalg", "polar factor", "what", Job("library", "polar"), Job("reference", "polar"), target=1e9)
    absent = Workload("peers", "nobody: planar", "what", Job("library", "polar"), Job("nobody", "polar"), target=1.0)
    rows = list(runner.run([ours], TINY, repetitions=1))
    assert rows[0].ours > 0
    assert rows[0].ratio == pytest.approx(rows[0].other / rows[0].ours)
    assert rows[0].met is False
    rows.append(runner.row(absent, "s", None, None))
    assert rows[1].met is None
    curve = scaling.Curve("S", "samples", [1, 2], [0.1, 0.2], [1.0, 1.0], 1.0, 0.0)
    found = report.document(rows, [curve], size="tiny", repetitions=1, allocator="system")
    report.save(found, tmp_path / "bench.json")
    assert json.loads((tmp_path / "bench.json").read_text()) == found
    text = (tmp_path / "bench.md").read_text()
    assert "polar factor" in text
    assert "not installed" in text
    assert "leave freed memory to the system (`--allocator system`)" in text
    assert "S^1.00" in text
    assert (tmp_path / "bench.svg").read_bytes().startswith(b"<?xml")


def test_a_failing_contestant_is_an_error_in_one_sentence():
    bad = Job("reference", "flow", {"flow": "no such flow"})
    with pytest.raises(runner.BenchmarkError, match=r"reference failed at .*no such flow"):
        list(runner.run([Workload("flow", "bad", "what", bad, bad)], TINY, repetitions=1))


@pytest.mark.parametrize(("only", "options"), [(["everything"], {}), ([], {"size": "huge"}), ([], {"repetitions": 0})])
def test_what_cannot_be_measured_is_refused(only, options):
    with pytest.raises(ValueError, match=r"Expected .*; got"):
        suite.measure(only, **options)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="page faults of a process are read from /proc")
@pytest.mark.skipif(not pages_are_small(), reason="pages of megabytes cannot be counted so")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
@pytest.mark.slow
def test_the_library_keeps_freed_memory_unless_asked_otherwise():
    faults = {}
    for allocator in ("kept", "system"):
        with runner.contestant("library", allocator=allocator) as process:
            # 64 MB for each z: glibc maps blocks of more than 32 MB anew every time, unless told otherwise.
            job = Job("library", "flow", {"flow": "planar", "samples": 2**21, "batch": 1})
            built = process.build(job, replace(TINY, transforms=1))["job"]
            for _ in range(10):  # the heap grows until it has room for all blocks of a call side by side
                process.ask(time=built)
            before = minor_faults(process.process.pid)
            process.ask(time=built)
            faults[allocator] = minor_faults(process.process.pid) - before
    assert faults["kept"] < faults["system"] / 10


def minor_faults(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def test_a_module_that_the_library_lacks_is_no_absent_peer(tmp_path):
    (tmp_path / "src" / "sylvester").mkdir(parents=True)
    (tmp_path / "src" / "sylvester" / "__init__.py").touch()
    with (
        versions.version("an old one", tmp_path, "kept") as process,
        pytest.raises(runner.BenchmarkError, match=r"an old one failed at .*sylvester.allocator"),
    ):
        process.build(Job("library", "polar"), TINY)


def test_a_version_is_the_library_of_its_own_tree(tmp_path):
    with (
        pytest.raises(runner.BenchmarkError, match="Expected the library of that in"),
        versions.version("that", tmp_path, "system"),
    ):
        pass


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """This library and its benchmarks as a repository of one commit, and what is beyond it in the files: slow draws."""
    root = tmp_path_factory.mktemp("checkout")
    for folder in ("src", "benchmarks"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    versions.git(root, "init", "--quiet")
    versions.git(root, "add", ".")
    identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false")
    versions.git(root, *identity, "commit", "--quiet", "--message", "All")
    with (root / "src" / "sylvester" / "distributions.py").open("a") as file:
        file.write(
            """
import time
_draw = FlowDistribution.rsample_and_log_prob
def _slow_draw(*arguments, **options):
    time.sleep(0.5)
    return _draw(*arguments, **options)
FlowDistribution.rsample_and_log_prob = _slow_draw
"""
        )
    return root


def bench(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


@needs_git
@pytest.mark.slow
def test_this_checkout_is_raced_against_another_commit(copy, tmp_path):
    out = tmp_path / "versions.json"
    arguments = ("--against", "HEAD", "--only", "samples", "--size", "tiny", "--repetitions", "1", "--out", str(out))
    done = bench(*arguments, "--quiet", root=copy)
    assert done.returncode == 0, done.stderr
    assert "this checkout is faster" in done.stdout
    assert "Both keep freed memory (--allocator kept)" in done.stdout
    found = json.loads(out.read_text())
    assert found["allocator"] == "kept"
    assert found["this"]["changed"]
    assert found["other"] == {"name": "HEAD", "commit": versions.git(copy, "rev-parse", "HEAD")}
    assert [row["name"] for row in found["rows"]] == ["O-SNF", "H-SNF", "T-SNF"]
    for row in found["rows"]:
        assert row["this"] >= 0.5  # the files as they are
        assert row["other"] < row["this"]  # the commit
        assert row["ratio"] == pytest.approx(row["other"] / row["this"])
    assert len(versions.git(copy, "worktree", "list").splitlines()) == 1


@needs_git
def test_the_other_commit_leaves_nothing_behind_where_something_fails(copy):
    commit = versions.find_commit("HEAD", copy)
    trees = []

    def fail_inside():
        with versions.worktree(commit, copy) as tree:
            trees.append(tree)
            assert "_slow_draw" not in (tree / "src" / "sylvester" / "distributions.py").read_text()
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert not trees[0].exists()
    assert len(versions.git(copy, "worktree", "list").splitlines()) == 1


@needs_git
@pytest.mark.parametrize("ref", ["no-such-branch", "", "HEAD:src", "--all"])
def test_what_is_no_commit_is_refused(ref, copy):
    with pytest.raises(runner.BadRequest, match=r"Expected a commit.*; got"):
        versions.find_commit(ref, copy)


@needs_git
def test_a_folder_without_a_history_of_its_own_is_refused(copy, tmp_path):
    for folder in (tmp_path, copy / "src"):  # the second lies within a repository
        with pytest.raises(runner.BadRequest, match=r"Expected a git checkout.*; got"):
            versions.find_commit("HEAD", folder)


def test_versions_are_compared_by_what_both_can_do():
    with pytest.raises(runner.BadRequest, match=f"Expected groups among {', '.join(VERSION_GROUPS)}; got peers"):
        versions.measure("HEAD", ["peers"])


@needs_git
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--only", "everything"), "Expected groups among training"),
        (("--against", "no-such-branch"), "Expected a commit"),
        (("--against", "HEAD", "--only", "peers"), "Expected groups among training"),
        (("--out", "no/such/folder.json"), "Expected an existing folder"),
    ],
)
def test_the_command_refuses_what_it_does_not_know_in_one_sentence(arguments, sentence, copy):
    done = bench(*arguments, root=copy)
    assert done.returncode == 2
    assert "\n" not in done.stderr.strip()
    assert sentence in done.stderr


def test_densities_are_scored():
    from benchmarks import density

    scores = torch.tensor(density.moons("sylvester", "RealNVP", 0, 2) + density.inference("sylvester", 0, 2))
    assert scores.shape == (2 * density.TEST,)
    assert scores.isfinite().all()
    assert density.bound("banana", "AffineIAF", "relu", 0, 2) < 0
    assert density.digits("RealNVP", "silu", 0, 2) < 0
    assert density.table(["a"], [["b"]]) == "| a |\n| --- |\n| b |"


def test_where_q_is_the_target_path_gradients_have_no_variance() -> None:
    torch.manual_seed(0)
    flow = Planar(2, transforms=2)
    frozen = deepcopy(flow).requires_grad_(False)

    def bound(path_gradient: bool, noise: torch.Tensor) -> torch.Tensor:
        z, log_q = flow().rsample_and_log_prob(noise=noise, path_gradient=path_gradient)
        return (frozen().log_prob(z) - log_q).mean()

    without, with_them = variance(bound, list(flow.parameters()), (1, 2), 30)
    assert without > 0.1
    assert with_them < 1e-6 * without


def test_tasks_are_timed_by_turns() -> None:
    order: list[str] = []
    seconds = by_turns([lambda: order.append("without"), lambda: order.append("with")], 2)
    assert order == ["without", "with"] * 3
    assert all(0 < each < 1 for each in seconds)


def test_curves_are_means_of_the_last_validations_over_minutes() -> None:
    metrics = [{"seconds": 30.0, "valid_neg_elbo": float(bound)} for bound in (9, 8, 7, 6, 5, 4)]
    del metrics[2]["valid_neg_elbo"]
    assert results.smoothed(metrics) == [(0.5, 9.0), (1.0, 8.5), (2.0, 23 / 3), (2.5, 7.0), (3.0, 5.75)]
    assert results.smoothed(metrics[:1], pace=60.0) == [(1.0, 9.0)]


def test_results_are_drawn_beside_the_runs(tmp_path: Path) -> None:
    for run in (ROOT / "results" / "digits").glob("*-gaussian-seed*"):
        shutil.copytree(run, tmp_path / run.name)
    results.main([str(tmp_path), "--epoch", f"{run.name}=1"])
    training = (tmp_path / "training.svg").read_text()
    assert training.count("VAE, quick") == 1  # three lines have one label
    assert not (tmp_path / "nll.svg").exists()
    for samples, more in ((100, {}), (500, {}), (32, {"anneal": 100}), (500, {"adapt": 4})):
        better = "".join(f"-{way}{number}" for way, number in more.items())
        figures = {"nll": 23.0, "khat_share": 0.5, "nll_samples": samples, "images": 200, **more}
        file = tmp_path / run.name / f"evaluation-{samples}{better}-first200-seed0.json"
        file.write_text(json.dumps(figures))
    fewer_images = {"nll": 99.0, "khat_share": 0.5, "nll_samples": 77, "images": 20, "adapt": 4}
    (tmp_path / run.name / "evaluation-77-adapt4-first20-seed0.json").write_text(json.dumps(fewer_images))
    results.main([str(tmp_path)])
    drawn = (tmp_path / "nll.svg").read_text()
    assert "77 samples" not in drawn
    assert "VAE, quick, 32 samples annealed by 100 transitions" in drawn
    assert "VAE, quick, 500 samples of a proposal fitted in 4 rounds" in drawn


def test_the_scale_of_curves_is_that_of_the_trained_bound(tmp_path: Path) -> None:
    """Also where not every epoch is validated."""
    (source, *_) = (ROOT / "results" / "digits").glob("*-gaussian-seed0*")
    run = Run(tmp_path, Run.open(source).config)
    for epoch in range(1, 13):
        bound = {"valid_neg_elbo": 1000.0 / epoch} if epoch % 3 == 0 else {}
        run.append_metrics({"epoch": epoch, "beta": min(1.0, epoch / 6), "seconds": 60.0, **bound})
    axes = Figure().add_subplot()
    results.draw_training(axes, [run], {})
    low, high = axes.get_ylim()
    validated = [1000 / 3, 1000 / 6, 1000 / 9, 1000 / 12]
    seen = [(a + b) / 2 for a, b in pairwise(validated)]  # five epochs hold two validations
    assert (low, high) == pytest.approx((seen[2] - 0.04 * (seen[0] - seen[2]), seen[0] + 0.04 * (seen[0] - seen[2])))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "which is no folder"),
        (["results/digits", "--epoch", "a=b"], "Expected RUN=SECONDS with a positive number; got a=b"),
        (["results/digits", "--epoch", "nobody=3"], "Expected --epoch of a run in"),
        (["results/digits/digits-planar-seed0-4e70bfd2b2"], "Expected a validated run of gaussian or"),
    ],
)
def test_results_that_cannot_be_drawn_are_said_to_be(arguments, sentence, capsys, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        results.main(arguments)
    assert sentence in " ".join(capsys.readouterr().err.split())
