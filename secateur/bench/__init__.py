"""Benchmarks: `secateur bench NAME` measures, prints a table and writes every raw sample to a file.

Each module named here has `run(options)`, which returns the exit code; secateur/cli/bench.py has the options, and shows
the docstring of the module as the description. `python -m tools.tables` renders the records in README and docs.
"""

NAMES = {
    "select": "one mask update: exact selection beside sampling, topk and kthvalue",
    "accuracy": "the error of a sampled threshold, and how it drifts when pruning repeats",
    "step": "one AdamW step: dense, masked, masked with SPAM clipping",
    "train": "GPT-2 training, dense and pruned, eager and compiled, each in its own process",
    "pace": "the time overhead of pruning in GPT-2 training, all methods in turn in one process",
    "scale": "one mask update from a million weights to seven billion",
    "probe": "calibration, the joint probe and five pruning rounds on a large model: time and memory",
    "quality": "perplexity of a language model pruned after training by every method",
    "decode": "what zeros buy in inference on this device: dense and packed time of one input, by layer and in all",
    "patterns": "perplexity beside tokens/s of a language model pruned to n:m patterns and without one",
    "demo": "the table of `secateur demo`, recorded",
}
