"""Side by side: the library, a plain implementation of the paper's experiments, and peers from PyPI.

``sylvester bench`` runs it. Everything here stays outside the package's own namespace, so that the processes that time
the reference and the peers import nothing of the library and run with torch's default settings.

workloads.py   what is compared with what, and the targets: data alone
reference.py   the paper's experiments as they were run
tasks_*.py     the work, once for each contestant
peers.py       the same work by Pyro, normflows, zuko and nflows
worker.py      one process of one contestant
runner.py      alternating processes, minima over repetitions, ratios
scaling.py     cost and memory against the sizes, with fitted exponents
report.py      JSON, table, figure and page
agreement.py   which weight of the reference is which of the library
"""
