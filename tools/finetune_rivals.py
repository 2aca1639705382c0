"""Compare ways to prune a trained network while it is fine-tuned, at equal tokens: ours, ADMM, AST, SquareHead, SEFT.

    python -m tools.finetune_rivals [--seeds 0 1 2] [--only NAME ...] [--minutes 60]
    python -m tools.finetune_rivals --stories data-cache/stories15m/llama2.data ...
    python -m tools.finetune_rivals --steps 960 --only oneshot 'gradual variance'

A GPT of 4 layers and width 128 is trained on the source of Python's library, then pruned and fine-tuned on it with
distillation. With --stories the network is stories15M (tools/stories.py says where it comes from), fine-tuned and
judged on stories that it wrote itself. A record is written after every run, and the next call continues where the last
one stopped.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.integrations.distillation import Mixture, hidden_loss, position_loss
from secateur.lab import record
from secateur.lab.data import load
from secateur.lab.models import language_model, seeded
from secateur.lab.statistics import difference, percent, scatter, verdict
from secateur.report import text_table
from tools import stories
from tools.cells import Cells
from tools.finetune_ways import Settings, Way, build, rate, sparsity_of

THEME = "finetune-rivals"
STORIES = f"{THEME}-stories15m"
THEMES = THEME, STORIES, f"{THEME}-960-steps", f"{THEME}-3840-steps"  # the tables of docs/finetune.md
MODEL, EVALUATION, CALIBRATION = "gpt-4x128x4", 512, 64
STEP_TOKENS, DENSE_BATCH = 512, 20  # tokens of a fine-tuning step; windows of a step of the training before it
WRITTEN = 4096  # stories to fine-tune on
DENSE = Settings(how="dense", steps=1500, lr=3e-3, alpha=0.0)
BASELINE = "gradual variance"
CACHE = record.ROOT / "data-cache"
Run = dict[str, Any]


class Windows(Protocol):
    """Windows of tokens, one longer than the context: for every step, and held out."""

    def batch(self, step: int, size: int, context: int, seed: int, /) -> Tensor: ...

    def evaluation(self, context: int, count: int, /) -> Tensor: ...


@dataclasses.dataclass(frozen=True)
class Network:
    """A dense network to prune, and the windows it is fine-tuned and judged on."""

    model: nn.Module
    data: Windows
    context: int
    begun: int  # steps of the training before, whose windows are not read again
    about: dict[str, Any]

    @property
    def batch(self) -> int:
        return STEP_TOKENS // self.context


def ways() -> dict[str, Settings]:
    """Everything that is compared, by name; each differs from the baseline in what its name says."""
    base, changed = Settings(), dataclasses.replace
    oneshot = changed(base, how="oneshot", start=0.8)
    # Published: lambda 0.01, z every 32 steps, the Fisher metric, 4,096 steps.
    admm = changed(base, how="admm", score="fisher", begin=0.0, end=0.01, every=32, strength=1e-2)
    ast = changed(base, how="ast", score="magnitude", begin=0.0, end=0.25, every=10, rising=True, strength=1e-3)
    found = {
        BASELINE: base,
        "gradual magnitude": changed(base, score="magnitude"),
        "gradual magnitude by layer": changed(base, score="magnitude", scope="layer"),
        "oneshot": oneshot,
        "gradual, RigL": changed(base, regrow="gradient"),
        "gradual, SET": changed(base, regrow="random"),
        "gradual, SquareHead 1": changed(base, hidden=1.0),
        "ADMM, as published": admm,
        "ADMM, ramp, hard at 60 %": changed(admm, score="variance", end=0.5, every=4, hard=0.6, strength=1e-3),
        "AST, as published": ast,
        "AST, variance, hard at 60 %": changed(ast, score="variance", begin=0.05, end=0.6, every=4, hard=0.6),
        "SEFT: oneshot, then RigL": changed(oneshot, regrow="gradient", until=0.6),
        "oneshot, RigL drop 0.05": changed(oneshot, regrow="gradient", until=0.6, drop=0.05),
        "oneshot at 70 %, then gradual": changed(base, start=0.7, begin=0.0, end=0.4),
        "oneshot, SquareHead 1": changed(oneshot, hidden=1.0),
        "oneshot, cross entropy alone": changed(oneshot, alpha=0.0),
        "oneshot, alpha 1": changed(oneshot, alpha=1.0),
        "oneshot, lr 5e-4": changed(oneshot, lr=5e-4),
        "oneshot, lr 2e-3": changed(oneshot, lr=2e-3),
        "ramp until 40 %": changed(base, end=0.4),
        "ramp until 25 %": changed(base, end=0.25),
        "ramp until 75 %": changed(base, end=0.75),
        "ramp of power 5": changed(base, power=5),
        "ramp of power 2": changed(base, power=2),
        "oneshot at 50 %, then gradual": changed(base, start=0.5, begin=0.0, end=0.5),
        "levels 50/65/75/80 %, reconstructed": changed(base, how="levels", levels=(0.5, 0.65, 0.75, 0.8), end=0.45),
        "every step": changed(base, every=1),
        "every 15 steps": changed(base, every=15),
        "q 1/8": changed(base, score="variance(q=1/8)"),
        "q 3/8": changed(base, score="variance(q=3/8)"),
        "Adam's state reset after the ramp": changed(base, reset=True),
        "alpha 1": changed(base, alpha=1.0),
        "alpha 0.5": changed(base, alpha=0.5),
        "cross entropy alone": changed(base, alpha=0.0),
        "gradual, RigL drop 0.1": changed(base, regrow="gradient", drop=0.1),
        "gradual, RigL drop 0.5": changed(base, regrow="gradient", drop=0.5),
        "allocation uniform": changed(base, scope="layer"),
        "allocation owl": changed(base, allocation="owl"),
        "ADMM decoupled 10, ramp, hard at 60 %": changed(
            admm, how="admm-decoupled", score="variance", end=0.5, every=4, hard=0.6, strength=10.0
        ),
        "ADMM 1e-1, rising": changed(admm, strength=1e-1, rising=True),
        "AST decoupled 10": changed(ast, how="ast-decoupled", score="variance", strength=10.0, hard=0.6, end=0.6),
        "gradual movement": changed(base, score="movement"),
        "gradual bitter3": changed(base, score="bitter3"),
    }
    for rate_ in (5e-4, 2e-3, 4e-3):
        found[f"{BASELINE}, lr {rate_:g}"] = changed(base, lr=rate_)
        found[f"gradual magnitude by layer, lr {rate_:g}"] = changed(found["gradual magnitude by layer"], lr=rate_)
    return found


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """What `make` returns, made once and kept in a file."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        torch.save(make(), part)
        part.replace(path)
    return torch.load(path, weights_only=True)


def trained() -> Network:
    """The GPT, trained once and kept in the cache; seeds are those of the fine-tuning alone."""
    data, context = load("python"), 64
    model = seeded(0, lambda: language_model(MODEL, data.vocabulary, context))
    about = {"model": MODEL, "data": "python", "dense": [DENSE.steps, DENSE_BATCH, context], "tuned": [8, context]}
    network = Network(model, data, context, DENSE.steps, about)

    def weights() -> dict[str, Tensor]:
        train(model, None, DENSE, network, 0)
        return model.state_dict()

    model.load_state_dict(kept(CACHE / f"{THEME}-{MODEL}-{DENSE.steps}-{data.fingerprint()[:8]}-0.pt", weights))
    return network


class Logits(nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.model.layers

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


class Stories:
    """Beginnings of stories; the last ones are held out."""

    def __init__(self, tokens: Tensor) -> None:
        self._train, self._held_out = tokens[:-EVALUATION], tokens[-EVALUATION:]

    def batch(self, step: int, size: int, context: int, seed: int, /) -> Tensor:
        order = torch.randperm(len(self._train), generator=torch.Generator().manual_seed(seed))
        return self._train[order[(step * size + torch.arange(size)) % len(order)], : context + 1]

    def evaluation(self, context: int, count: int, /) -> Tensor:
        return self._held_out[:count, : context + 1]


def story_writer(checkpoint: Path) -> Network:
    """stories15M with the tokens it uses, and what it wrote, kept in the cache."""
    whole, _ = stories.read(checkpoint)
    context = 128
    path = CACHE / f"{STORIES}-{WRITTEN + EVALUATION}x{context + 1}-0.pt"
    written = kept(path, lambda: stories.written(whole, WRITTEN + EVALUATION, context + 1, seed=0))
    model, [tokens] = stories.restricted(whole, [written])
    about = {"model": "stories15M", "vocabulary": model.config.vocab_size, "data": "stories it wrote itself"}
    network = Network(Logits(model), Stories(tokens), context, 1, about | {"written": WRITTEN})
    return dataclasses.replace(network, about=network.about | {"tuned": [network.batch, context]})


@contextmanager
def hidden_states(model: Any) -> Iterator[list[Tensor]]:
    """Collects what each layer returns, after an entry for the embedding."""
    seen: list[Tensor] = []
    handles = [layer.register_forward_hook(lambda _module, _given, out: seen.append(out)) for layer in model.layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def loss_of(model: nn.Module, teacher: nn.Module | None, tokens: Tensor, settings: Settings) -> Tensor:
    """Distillation mixed with cross entropy, and SquareHead's term where it has a weight."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:].flatten()
    mixture = Mixture(alpha=settings.alpha)
    with hidden_states(model) as mine:
        logits = model(inputs).flatten(0, 1)
    theirs: list[Tensor] = []
    wanted = logits
    if teacher is not None and (settings.alpha > 0 or settings.hidden > 0):
        with torch.no_grad(), hidden_states(teacher) as theirs:
            wanted = teacher(inputs).flatten(0, 1)
    loss = position_loss(logits, wanted, labels, mixture) / len(labels)
    if settings.hidden > 0:
        real = torch.ones_like(inputs, dtype=torch.bool)
        loss = loss + settings.hidden * hidden_loss([mine[0], *mine], [theirs[0], *theirs], real)
    return loss


def train(model: nn.Module, teacher: nn.Module | None, settings: Settings, network: Network, seed: int) -> Way:
    """Take all steps. Fine-tuning reads other windows than the training before it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
    data, context = network.data, network.context
    offset, batch = (0, DENSE_BATCH) if teacher is None else (network.begun, network.batch)
    calibration = data.batch(offset - 1, CALIBRATION, context, seed)[:, :-1] if offset else torch.empty(0)
    way = Way(settings, model, optimizer) if teacher is None else build(settings, model, optimizer, calibration)
    model.train()
    for step in range(settings.steps):
        optimizer.param_groups[0]["lr"] = rate(step, settings)
        way.before_forward(step)
        loss_of(model, teacher, data.batch(offset + step, batch, context, seed), settings).backward()
        way.on_gradients(step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        way.after_step(step + 1)
        optimizer.zero_grad()
    return way


@torch.no_grad()
def perplexity(model: nn.Module, network: Network) -> float:
    """Of evenly spread held-out windows."""
    model.eval()
    windows = network.data.evaluation(network.context, EVALUATION)
    losses = [functional.cross_entropy(model(w[:, :-1]).flatten(0, 1), w[:, 1:].flatten()) for w in windows.split(64)]
    return math.exp(float(torch.stack(losses).mean()))


def measure(name: str, settings: Settings, network: Network, before: float, seed: int) -> Run:
    """One run, which begins with the dense network of this perplexity."""
    began, model = time.process_time(), copy.deepcopy(network.model)
    torch.manual_seed(seed)
    way = train(model, network.model, settings, network, seed)
    return {
        "name": name,
        "seed": seed,
        "settings": dataclasses.asdict(settings),
        "dense": before,
        "perplexity": perplexity(model, network),
        "sparsity": sparsity_of(way.weights.values()),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def rows(runs: Sequence[Run]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows, best first: perplexity, times dense, and the paired difference from the baseline."""
    logs: dict[str, dict[int, float]] = {}
    ratios: dict[str, list[float]] = {}
    for run in runs:
        logs.setdefault(run["name"], {})[run["seed"]] = math.log(run["perplexity"])
        ratios.setdefault(run["name"], []).append(run["perplexity"] / run["dense"])
    lines = []
    for name, found in logs.items():
        minus = difference(found, logs.get(BASELINE, {})) if name != BASELINE else None
        told = "-"
        if minus is not None:
            share = percent(minus, logarithmic=True)
            reach = "" if share.interval is None else f" [{share.interval[0]:+.1f}, {share.interval[1]:+.1f}]"
            told = f"{share.mean:+.2f} %{reach}"
        mean = math.exp(sum(found.values()) / len(found))
        times = sum(ratios[name]) / len(ratios[name])
        said = "baseline" if name == BASELINE else verdict(minus, higher_is_better=False)
        lines.append((times, (name, str(len(found)), f"{mean:.3f}", f"{times:.4f}", told, said)))
    header = ("way", "seeds", "perplexity", "times dense", f"to {BASELINE}, 95 %", "verdict")
    return header, [line for _, line in sorted(lines)]


def noise(runs: Sequence[Run]) -> str:
    """What difference of means may be chance, pooled over all ways that have the same seeds; empty for too few."""
    logs: dict[str, dict[int, float]] = {}
    for run in runs:
        logs.setdefault(run["name"], {})[run["seed"]] = math.log(run["perplexity"])
    most = max((len(row) for row in logs.values()), default=0)
    found = scatter({name: row for name, row in logs.items() if len(row) == most})
    if found is None:
        return ""
    return (
        f"Residual standard deviation over the ways with {found.seeds} seeds {found.deviation:.2%}; a difference of"
        f" their means below {found.reach:.2%} may be chance."
    )


def key(cell: Mapping[str, Any]) -> list[Any]:
    """A cell is measured again if its settings have changed."""
    return [cell["name"], cell["seed"], cell["settings"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="names of ways (all)")
    parser.add_argument("--steps", type=int, default=Settings.steps, help=f"of fine-tuning ({Settings.steps})")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--stories", type=Path, metavar="FILE", help="stories15M instead of the GPT: its checkpoint")
    parser.add_argument("--out", type=Path, help="folder of the record (benchmarks/results)")
    options = parser.parse_args()
    if odd := [name for name in options.only if name not in ways()]:
        parser.error(f"no way is named {odd[0]!r}; there are {', '.join(ways())}")
    options.invocation = f"python -m tools.finetune_rivals {shlex.join(sys.argv[1:])}".strip()
    torch.set_num_threads(1)
    network = story_writer(options.stories) if options.stories else trained()
    before = perplexity(network.model, network)
    theme = STORIES if options.stories else THEME
    theme += "" if options.steps == Settings.steps else f"-{options.steps}-steps"  # equal tokens in each record
    cells = Cells(theme, key, options.out)
    end = time.monotonic() + 60 * options.minutes
    wanted = [(name, seed) for seed in options.seeds for name in options.only or ways()]
    for name, seed in wanted:
        settings = dataclasses.replace(ways()[name], steps=options.steps)
        if cells.has({"name": name, "seed": seed, "settings": dataclasses.asdict(settings)}):
            continue
        if time.monotonic() > end:
            break
        found = measure(name, settings, network, before, seed)
        cells.add(found, network.about, options, torch.device("cpu"))
        print(f"{name}, seed {seed}: {found['perplexity']:.3f} (dense {found['dense']:.3f})", flush=True)
    print(text_table(*rows(cells.found)))
    print(noise(cells.found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
