"""Training runs: options, the loop, the run folder."""
