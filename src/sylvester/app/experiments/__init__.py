"""Many runs: the paper's grid and its published figures, comparisons, sweeps, on one machine or a cluster."""
