"""The paper's experiments, each one command: recipes, runs, results."""
