"""Claims of AdamWPrune and GradProbe (docs/claims.toml) that a CPU settles in minutes.

    python -m tools.small_claims

trains the GPT of recipes/gpt-python-variance-80.toml without pruning for some steps, and takes the weights and Adam's
state of its prunable matrices. Then it measures

- forms of scores that the documents and AdamWPrune's code describe, beside ours: on which share of the weights masks
  of half and of 80 % of them differ;
- CPU time of forms of bitter7 on larger random tensors;
- torch.quantile up to the size it refuses;
- a backward pass for all layers, and with all but one frozen;
- masking gradients and updating masks, in shares of a training step.

Everything goes to benchmarks/results/small-claims_*.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.lab import record
from secateur.lab.config import read_experiment
from secateur.lab.trainer import Execution, Trainer
from secateur.model.prunable import find_prunable
from secateur.scores import bitter3, bitter5, bitter7, bitter9, magnitude, variance

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "gpt-python-variance-80.toml"
EPS, FP16_EPS = 1e-8, 1e-5  # of AdamWPrune's fp32 forms, and of its fp16 forms after they had underflowed
SIZE = 1 << 22  # weights of the timed tensors
CALLS = 9
QUANTILE_LIMIT = 1 << 24


def eps_outside(weight: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """bitter7 as the variants document writes it in words: |w| (v^(1/4) + eps)."""
    return weight.abs() * (exp_avg_sq.sqrt().sqrt() + EPS)


def half_rsqrt(weight: Tensor, exp_avg_sq: Tensor, eps: float = FP16_EPS) -> Tensor:
    """bitter8 of AdamWPrune's code: bitter7 in fp16 by two reciprocal square roots."""
    return (weight.abs().half() * (exp_avg_sq.abs().half() + eps).rsqrt().rsqrt()).float()


def half_rsqrt_1e8(weight: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """The same with its first eps, which is zero in fp16."""
    return half_rsqrt(weight, exp_avg_sq, EPS)


def rsqrt(weight: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """bitter7 in fp32 by two reciprocal square roots."""
    return weight.abs() * (exp_avg_sq + EPS).rsqrt().rsqrt()


def power(weight: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """bitter7 as the documents' code writes it."""
    return weight.abs() * (exp_avg_sq.abs() + EPS) ** 0.25


def opposite5(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """bitter5 with the sign of AdamWPrune's code: 0.1 |w| + sign(w) m / (sqrt v + eps)."""
    return 0.1 * weight.abs() + weight.sign() * exp_avg / (exp_avg_sq.sqrt() + EPS)


def opposite9(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """bitter9 with that sign."""
    return bitter3(weight, exp_avg) + 0.1 * weight.sign() * exp_avg / (exp_avg_sq.sqrt() + EPS)


def trained(**changes: Any) -> Trainer:
    """The small GPT after some steps."""
    trainer = Trainer(read_experiment(RECIPE, changes), Execution(cpu=True))
    trainer.train()
    return trainer


def trained_state(steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and moments of the small GPT's prunable matrices after some dense steps, flat."""
    trainer = trained(score=None, sparsity=0.0, steps=steps, evaluate_every=steps)
    found, _ = find_prunable(trainer.model)
    states = [trainer.optimizer.optimizer.state[one.parameter] for one in found]
    parts = [one.parameter.detach() for one in found], [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
    weight, first, second = (torch.cat([tensor.flatten() for tensor in part]) for part in parts)
    return weight, first, second


def kept_by(scores: Tensor, sparsity: float) -> Tensor:
    """The mask that exactly this share of zeros has, ties by place."""
    kept = torch.ones_like(scores, dtype=torch.bool)
    kept[torch.argsort(scores, stable=True)[: round(sparsity * scores.numel())]] = False
    return kept


def strict(scores: Tensor, sparsity: float) -> float:
    """The sparsity of `score > threshold`, as AdamWPrune applies an exact threshold: ties go with it."""
    threshold = scores.kthvalue(round(sparsity * scores.numel())).values
    return float((scores <= threshold).float().mean())


def masks_table(weight: Tensor, first: Tensor, second: Tensor) -> list[dict[str, Any]]:
    """Each form beside the one it stands for: the share of weights on which their masks differ."""
    seventh = bitter7(weight, second)
    pairs: dict[str, tuple[Tensor, Tensor]] = {
        "bitter7, eps outside the root, to bitter7": (eps_outside(weight, second), seventh),
        "bitter7, eps outside the root, to variance": (eps_outside(weight, second), variance(weight, second)),
        "bitter7, ** 0.25, to bitter7": (power(weight, second), seventh),
        "bitter7, rsqrt in fp32, to bitter7": (rsqrt(weight, second), seventh),
        "bitter7, rsqrt in fp16, eps 1e-5, to bitter7": (half_rsqrt(weight, second), seventh),
        "bitter7, rsqrt in fp16, eps 1e-5, to magnitude": (half_rsqrt(weight, second), magnitude(weight)),
        "bitter7, rsqrt in fp16, eps 1e-8, to bitter7": (half_rsqrt_1e8(weight, second), seventh),
        "bitter7 to magnitude": (seventh, magnitude(weight)),
        "bitter7 to variance": (seventh, variance(weight, second)),
        "bitter5, opposite sign, to bitter5": (opposite5(weight, first, second), bitter5(weight, first, second)),
        "bitter9, opposite sign, to bitter9": (opposite9(weight, first, second), bitter9(weight, first, second)),
    }
    rows = []
    for name, (theirs, ours) in pairs.items():
        for sparsity in (0.5, 0.8):
            differ = float((kept_by(theirs, sparsity) != kept_by(ours, sparsity)).float().mean())
            rows.append({"form": name, "sparsity": sparsity, "differ": differ, "strict": strict(theirs, sparsity)})
    return rows


def times() -> dict[str, list[float]]:
    """CPU milliseconds of forms of bitter7 on SIZE random weights, in turns."""
    torch.manual_seed(0)
    weight, second = torch.randn(SIZE) * 0.02, torch.rand(SIZE) ** 4 * 1e-8
    compiled = torch.compile(power)
    forms: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "bitter7, ours": bitter7,
        "** 0.25": power,
        "rsqrt in fp32": rsqrt,
        "rsqrt in fp16": half_rsqrt,
        "** 0.25, compiled": compiled,
    }
    found: dict[str, list[float]] = {name: [] for name in forms}
    for call in range(CALLS + 2):
        for name, form in forms.items():
            began = time.process_time()
            form(weight, second)
            if call > 1:
                found[name].append(round((time.process_time() - began) * 1e3, 3))
    return found


def quantile() -> dict[str, Any]:
    """torch.quantile at its largest size and one more, and kthvalue beside it."""
    scores = torch.rand(QUANTILE_LIMIT, generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {"largest": QUANTILE_LIMIT}
    for name, form in (("quantile", lambda: scores.quantile(0.5)),
                       ("kthvalue", lambda: scores.kthvalue(QUANTILE_LIMIT // 2).values)):  # fmt: skip
        began = time.process_time()
        threshold = form()
        found[name] = {"cpu_ms": round((time.process_time() - began) * 1e3, 1),
                       "off_by": int((scores <= threshold).sum()) - QUANTILE_LIMIT // 2}  # fmt: skip
    try:
        torch.rand(QUANTILE_LIMIT + 1).quantile(0.5)
        found["one_more"] = "works"
    except RuntimeError as error:
        found["one_more"] = str(error).split(".")[0]
    return found


def cpu_ms(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return round((time.process_time() - began) * 1e3, 2)


def freezing() -> dict[str, Any]:
    """CPU milliseconds of a forward and a backward pass of the small GPT: gradients of all prunable matrices, and of
    one with all else frozen, in turns over the matrices. In a loop over layers the first form stops at one pass."""
    trainer = Trainer(read_experiment(RECIPE, {"score": None, "sparsity": 0.0}), Execution(cpu=True))
    found, _ = find_prunable(trainer.model)
    batch = next(trainer.micro_batches(1))
    samples: dict[str, list[float]] = {"all": [], "one, others frozen": []}
    for one in [*found[:2], *found]:  # the first two warm up
        for name, trains in (("all", None), ("one, others frozen", one.parameter)):
            for parameter in trainer.model.parameters():
                parameter.requires_grad_(trains is None or parameter is trains)
            samples[name].append(cpu_ms(lambda: trainer.loss(batch).backward()))
            trainer.model.zero_grad(set_to_none=True)
    return {name: several[2:] for name, several in samples.items()}


def pruning_costs() -> dict[str, Any]:
    """CPU milliseconds of parts of a step at 80 %: the whole step, masking gradients, an update of the masks."""
    settings = {"steps": 20, "evaluate_every": 20, "end": 0.2, "begin": 0.0, "every": 5}
    trainer = trained(**settings)
    pruner = trainer.pruner
    assert pruner is not None
    samples: dict[str, list[float]] = {"step": [], "mask gradients": [], "masks applied": [], "selection": []}
    for _ in range(CALLS):
        samples["step"].append(cpu_ms(trainer.step))
        trainer.loss(next(trainer.micro_batches(1))).backward()
        samples["mask gradients"].append(cpu_ms(pruner.mask_gradients))
        trainer.optimizer.zero_grad(set_to_none=True)
        samples["masks applied"].append(cpu_ms(pruner.apply))
        samples["selection"].append(cpu_ms(lambda: pruner._choose(20, 0.8)))
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="training steps before the state is read (100)")
    parser.add_argument("--out", type=Path, help="folder for the record (benchmarks/results)")
    options = parser.parse_args()
    options.invocation = " ".join(["python -m tools.small_claims", *sys.argv[1:]])
    weight, first, second = trained_state(options.steps)
    found: dict[str, Any] = {"steps": options.steps, "weights": weight.numel()}
    found |= {"median_v": float(second.median()), "masks": masks_table(weight, first, second)}
    found |= {"size": SIZE, "milliseconds": times(), "quantile": quantile()}
    found |= {"freezing": freezing(), "costs": pruning_costs()}
    for row in found["masks"]:
        print(f"{row['form']:50} {row['sparsity']:.0%}: {row['differ']:8.3%} differ, strict {row['strict']:.4%}")
    for name, several in found["milliseconds"].items():
        print(f"{name:30} {statistics.median(several):8.2f} ms of CPU")
    for part in ("freezing", "costs"):
        print(part, {name: statistics.median(several) for name, several in found[part].items()})
    print(found["quantile"])
    print(record.save("small-claims", found, options, torch.device("cpu")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
