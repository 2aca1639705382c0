"""Benchmarks: `secateur bench NAME` measures, prints a table and writes every raw sample to benchmarks/results.

Each module named here has `run(options)`, which gives the exit code; secateur/cli/bench.py has the options.
Tables in README and docs are generated from the written files by `python -m tools.tables`.
"""

NAMES = {
    "select": "one mask update: exact, sampled, topk, kthvalue",
    "accuracy": "how far a sampled threshold is off, and how that drifts",
    "step": "one step of AdamW: dense, masked, masked and clipped",
    "train": "GPT-2 training: eager and compiled, dense and pruned",
    "pace": "the same side by side in one process, taking turns: what pruning costs in time",
    "scale": "one mask update from a million weights to seven billion",
    "probe": "calibration on a large model: passes, the joint probe, five rounds; time and memory",
    "quality": "perplexity of a language model pruned after training, by every method",
    "demo": "the demo's own table, recorded",
}
