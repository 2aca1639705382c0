"""Options of `secateur train` under the names AdamWPrune's own trainer gives them, so that its commands still work.

| AdamWPrune                        | here                                               |
|-----------------------------------|----------------------------------------------------|
| --adamwprune-variant, --variant   | --score, as in --score bitter7                     |
| --pruning-method magnitude        | --score magnitude                                  |
| --pruning-method state            | --score bitter0, or the score of the variant       |
| --pruning-method none             | no score and no setting of pruning: a dense run    |
| --target-sparsity, --max-iters    | --sparsity, --steps                                |
| --pruning-warmup 100              | --set begin=100, a number of steps                 |
| --adamwprune-ramp-end-step 3000   | --set end=3000, a number of steps                  |
| --spam-theta 50 and its like      | --set spam=adamwprune --set spam_theta=50          |

--optimizer, --compile, --max-time, --dry-run, --tracker and --device have the same name and meaning. Options that have
no counterpart in `secateur train`, those of GradProbe and of both projects' scripts among them, are refused by name,
with the reason and what to use instead (REFUSED).
"""

from __future__ import annotations

import argparse
from typing import Any

from secateur.cli.options import positive, sparsity
from secateur.errors import SecateurError

METHODS = ("none", "magnitude", "movement", "state")
STATE_SCORE = "bitter0"  # AdamWPrune's score for state pruning when no variant is named
SPAM_BASE = "adamwprune"  # the preset whose settings --spam-theta and its like change

# Options with another name here, and the setting each one is.
SETTINGS: dict[str, tuple[str, Any, str]] = {
    "--pruning-warmup": ("begin", positive, "step at which the ramp begins: begin"),
    "--adamwprune-ramp-end-step": ("end", positive, "step at which the ramp ends: end"),
    "--model-name": ("model", str, "model"),
    "--block-size": ("context", positive, "context"),
    "--learning-rate": ("lr", float, "lr"),
    "--weight-decay": ("weight_decay", float, "weight_decay"),
    "--warmup-steps": ("warmup", positive, "steps of learning-rate warm-up: warmup"),
    "--eval-interval": ("evaluate_every", positive, "evaluate_every"),
    "--spam-theta": ("spam_theta", float, "spam_theta"),
    "--spam-interval": ("spam_every", int, "steps between resets: spam_every"),
    "--spam-warmup-steps": ("spam_warmup", int, "spam_warmup"),
    "--spam-spike-threshold": ("spam_spike", float, "spam_spike"),
}
SPAM_IS_ON = "SPAM has no switch for it: spam=adamwprune does it."
PROBE = "GradProbe prunes trained models, which `secateur probe` does, not `train`."
BENCH = "it is an option of AdamWPrune's benchmark scripts. Use `secateur bench select --dim N --layers N --calls N`."
REFUSED: dict[str, str] = {
    "--spam-enable-clip": f"{SPAM_IS_ON} --set spam_theta=0 turns clipping off.",
    "--spam-periodic-reset": f"{SPAM_IS_ON} --set spam_every=0 turns resets off.",
    "--spam-warmup": f"{SPAM_IS_ON} --set spam_warmup=0 turns the warm-up after a reset off.",
    "--min-lr": "the lowest rate is a fraction of lr here: --set final_lr=0.1.",
    "--decay-lr": "the learning rate always decays along a cosine. --set final_lr=1 keeps it constant.",
    "--batch-size": "it means a micro-batch there. Use --set batch=N for a step and --micro-batch N for a forward pass;"
    " for probing, secateur probe --batch N.",
    "--gradient-accumulation": "a step is split by itself: --set batch=N, and --micro-batch N for a forward pass.",
    "--num-epochs": "runs are counted in steps: --max-iters N or --steps N.",
    "--eval-samples": "every evaluation reads the same windows here: --set evaluation=N.",
    "--dataset": "data has a name and a place here, such as --set data=tokens:data/fineweb (docs/data.md).",
    "--data-dir": "the folder is part of the data's name: --set data=tokens:FOLDER (docs/data.md).",
    "--dropout": "the models have their published dropout, which is no setting.",
    "--log-interval": "metrics.jsonl has a line every ten steps.",
    "--save-checkpoint": "checkpoints are always written: --checkpoint-every N.",
    "--checkpoint-interval": "use --checkpoint-every N.",
    "--output-dir": "use --out FOLDER.",
    "--json-output": "summary.json in the run's folder has the numbers; `secateur compare --json` those of many runs.",
    "--tracker-project": "runs are logged to the project secateur: --tracker NAME.",
    "--tracker-run-name": "name the folder of the run instead: --out FOLDER.",
    "--ablation-mode": "it compares attention architectures, not pruning. Use `secateur sweep GRID.toml`.",
    "--ablation-steps": "it compares attention architectures, not pruning. Use `secateur sweep GRID.toml`.",
    "--architecture": "only the standard GPT-2 is here: --set model=gpt2.",
    "--flash-attention": "attention uses torch's fused kernels wherever they serve.",
    "--dim": BENCH,
    "--layers": BENCH,
    "--num-calls": BENCH,
    "--iterations": BENCH,
    "--low-memory-mode": f"{PROBE} Use --memory LIMIT, or --stream for a model larger than the GPU.",
    "--use-fp16": f"{PROBE} Use --dtype float16; for training --set precision=fp16.",
    "--use-gradient-checkpointing": f"{PROBE} It is turned on where the memory asks for it: --memory LIMIT.",
    "--layerwise": f"{PROBE} Use --order reverse, forward or size.",
    "--num-batches": f"{PROBE} Use --calibration N --batch N.",
    "--reduction-factor": f"{PROBE} Use --shrink F.",
    "--gradient-threshold": f"{PROBE} Use --tolerance G, the same number.",
    "--experimental-tune-both-steps": f"{PROBE} Use --until with --tune both.",
}  # fmt: skip


class Refused(argparse.Action):
    """An option that is known and not taken: says why, and what to use."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        name = self.option_strings[0]
        parser.error(f"{name} is not an option of secateur train: {REFUSED[name].rstrip('.')}")


def add_aliases(parser: argparse.ArgumentParser) -> None:
    """AdamWPrune's names, in a group of their own; those that are refused are not in the help."""
    group = parser.add_argument_group("AdamWPrune's names for the same settings")
    group.add_argument(
        "--adamwprune-variant", "--variant", dest="variant", metavar="NAME",
        help="the score of state pruning: bitter0 to bitter9",
    )  # fmt: skip
    group.add_argument("--pruning-method", choices=METHODS, help="state: by Adam's moments; none: dense")
    group.add_argument("--target-sparsity", dest="sparsity", type=sparsity, metavar="SPARSITY", help="--sparsity")
    group.add_argument("--max-iters", dest="steps", type=positive, metavar="STEPS", help="--steps")
    for option, (_, kind, text) in SETTINGS.items():
        group.add_argument(option, type=kind, metavar="VALUE", help=text)
    for option in REFUSED:
        names = dict.fromkeys((option, f"--{option[2:].replace('-', '_')}"))  # the documents write both
        parser.add_argument(*names, nargs="*", action=Refused, help=argparse.SUPPRESS)


def alias_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that AdamWPrune's options ask for; nothing where none is given."""
    given = {name: getattr(options, option[2:].replace("-", "_")) for option, (name, _, _) in SETTINGS.items()}
    found = {name: value for name, value in given.items() if value is not None}
    if any(name.startswith("spam_") for name in found):
        found["spam"] = SPAM_BASE
    return found | _score_settings(options)


def _score_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Settings that --adamwprune-variant and --pruning-method ask for."""
    method, variant = options.pruning_method, options.variant
    if options.score and (variant or method):
        raise SecateurError(
            "--score and AdamWPrune's --adamwprune-variant or --pruning-method name the score twice. Use one."
        )
    if variant and method not in (None, "state"):
        raise SecateurError(f"--adamwprune-variant {variant} goes with --pruning-method state, not with {method}.")
    if method == "none":
        return {"score": None}
    if not variant and not method:
        return {}
    return {"score": variant or (STATE_SCORE if method == "state" else method)}
