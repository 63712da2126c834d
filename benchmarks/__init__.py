"""Side by side: the library, a plain implementation of the paper's experiments, and peers from PyPI.

``python -m benchmarks`` runs it, from a checkout. Everything here stays outside the package, so that the processes that
time the reference and the peers import nothing of the library and run with torch's default settings.

workloads.py   what is compared with what, and the targets: data alone
reference.py   the paper's experiments as they were run
tasks_*.py     the work, once for each contestant
peers.py       the same work by Pyro, normflows, zuko and nflows
worker.py      one process of one contestant
runner.py      alternating processes, minima over repetitions, ratios
suite.py       the rows asked for, from the first to the report
versions.py    this checkout against another commit of it
scaling.py     cost and memory against the sizes, with fitted exponents
report.py      JSON, table, figure and page
agreement.py   which weight of the reference is which of the library

Two more are commands of their own: ``python -m benchmarks.path_gradients``, what path gradients gain and cost, and
``python -m benchmarks.linear_gaussian_gaps``, the gap report against closed forms.
"""
