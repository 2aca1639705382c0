"""Experiments: data, models, the training loop, runs, sweeps, comparisons and their pages."""
