"""Run the procedure of GradProbe's WANDA document and record it: layer by layer in reverse, rising levels, tuning.

    python -m tools.procedure stories15m --checkpoint data-cache/stories15m/llama2.data
    python -m tools.procedure smollm2 --text wiki.test.raw --context 128 --calibration 4 --group 70

A cell is one probe or one search from the dense weights. `strict` probes once with tolerance 0, layer by layer; `raise`
goes through the levels without a limit of quality; `off`, `on` and `both` search up to a limit and differ in tuning.
Decisions of a search are made on one held-out text and every perplexity of a table is of another. Beside each result
stand the score alone and the recipe `recommended` at the same sparsity. Cells that are on record are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import secateur as sc
from secateur.bench.measuring import synchronize
from secateur.errors import SecateurError
from secateur.integrations import smollm2, text
from secateur.integrations.evaluation import perplexity
from secateur.lab import record
from secateur.oneshot.calibration import CalibratedModel
from secateur.oneshot.veto import Probe
from secateur.report import Outcome
from tools import stories

CELLS = ("strict", "raise", "raise, refreshed", "off", "on", "both")
BESIDE: dict[str, dict[str, Any]] = {"alone": {"score": "wanda"}, "recommended": {"rounds": 5, "reconstruct": "every"}}
WRITTEN = "its own stories"


@dataclass(frozen=True)
class Texts:
    """Windows of tokens: calibration for every draw, a held-out text for decisions and another for the tables."""

    draws: list[Tensor]
    decisions: Tensor
    evaluation: Tensor


@dataclass
class Meter:
    """What a cell costs: seconds, calls of the score, passes that measure its facts, and the peak of memory."""

    device: torch.device
    began: float = 0.0
    calls: int = 0
    passes: int = 0
    levels: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.began = seconds(self.device)

    def figures(self) -> dict[str, Any]:
        found = {"probe_seconds": seconds(self.device) - self.began, "calls": self.calls, "passes": self.passes}
        return found | {"probe_peak_bytes": peak_bytes(self.device), "levels": self.levels}

    def watch(self, metric: Callable[[Any], float]) -> Callable[[Any], float]:
        """The metric; notes the seconds and the calls between its evaluations, which are those of a level."""
        last = [seconds(self.device), self.calls]

        def watched(model: Any) -> float:
            taken, calls = seconds(self.device) - last[0], self.calls - last[1]
            value = metric(model)
            self.levels.append({"seconds": taken, "calls": calls, "value": value})
            last[:] = seconds(self.device), self.calls
            return value

        return watched


@contextmanager
def metered(device: torch.device) -> Iterator[Meter]:
    """Counts the selections of candidates and the passes of facts inside."""
    meter = Meter(device)
    select, gather = Probe.kept_at, CalibratedModel.facts

    def selecting(self: Probe, *given: Any, **named: Any) -> Any:
        meter.calls += 1
        return select(self, *given, **named)

    def gathering(self: CalibratedModel, *given: Any, **named: Any) -> Any:
        meter.passes += 1
        return gather(self, *given, **named)

    reset_peak(device)
    with mock.patch.object(Probe, "kept_at", selecting), mock.patch.object(CalibratedModel, "facts", gathering):
        yield meter


def seconds(device: torch.device) -> float:
    """CPU seconds of this process, since other work on a machine does not change them; the time of a GPU."""
    if device.type == "cpu":
        return time.process_time()
    synchronize(device)
    return time.perf_counter()


def reset_peak(device: torch.device) -> None:
    """Make the peak of memory the present memory: of this process (Linux), or of what torch has on a GPU."""
    if device.type == "cpu":
        Path("/proc/self/clear_refs").write_text("5")
    else:
        torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The peak of memory since the last reset."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def run(options: argparse.Namespace) -> int:
    """Run the cells that are not on record, and save after each."""
    torch.set_num_threads(1)
    model, texts, about = prepare(options)
    device = options.device
    theme = f"procedure-{options.name}" + (f"-{options.label}" if options.label else "")
    data = about | {"cells": [], "commands": []}
    path = record.save(theme, data, options, device) if options.fresh else None
    for found in sorted((options.out or record.results_folder()).glob(f"{theme}_*.json")):
        path, data = found, json.loads(found.read_text(encoding="utf-8"))
    if {key: data[key] for key in about} != about:
        raise SecateurError(f"{path} was measured with other settings. Pass --fresh to replace it, or --label NAME.")
    data["commands"] = list(dict.fromkeys([*data["commands"], record.command_of(options)]))
    done = {(cell["cell"], cell["group"], cell["draw"]) for cell in data["cells"]}
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for draw in range(options.draws):
        for name in options.cells:
            if (name, options.group, draw) in done:
                continue
            model.load_state_dict(dense)
            found = cell(model, dense, name, texts, draw, options)
            which = {"cell": name, "group": options.group, "draw": draw, "commit": record.commit()}
            data["cells"].append(which | found)
            path = record.save(theme, data, options, device)
            print(f"{name}, draw {draw}: {found['sparsity']:.4f} {found['perplexity']:.3f}", flush=True)
    print(path)
    return 0


def prepare(options: argparse.Namespace) -> tuple[Any, Texts, dict[str, Any]]:
    """The model, its texts, and what the record says about them."""
    counts = [*[options.calibration] * options.draws, options.decisions, options.evaluation]
    if options.name == "smollm2":
        model, tokenizer = smollm2.read(options.checkpoint) if options.checkpoint else smollm2.load()
        windows = text.windows(tokenizer, text.read_text(options.text), options.context, sum(counts))
        named = "SmolLM2-135M-Instruct, dequantized from a Q4_1 file"
    else:
        model, vocabulary = stories.read(options.checkpoint)
        named = "stories15M"
        if options.text:
            windows = windows_of(vocabulary, options)
        else:
            windows = stories.written(model, sum(counts), options.context, options.seed)
    if len(windows) < sum(counts):
        raise SecateurError(f"The text has {len(windows)} windows; {sum(counts)} are needed. Ask for fewer.")
    if options.name == "stories15m":
        whole = perplexity(model, windows[-options.evaluation :], batch=4)
        model, [windows] = stories.restricted(model, [windows])
        named = f"stories15M with the {model.config.vocab_size:,} tokens of these texts (all 32,000: {whole:.3f})"
    model.to(options.device)
    *draws, decisions, evaluation = windows[: sum(counts)].to(options.device).split(counts)
    about = {
        "model": named, "text": options.text.name if options.text else WRITTEN, "context": options.context,
        "calibration": options.calibration, "windows": [options.decisions, options.evaluation], "seed": options.seed,
        "tolerance": options.tolerance, "max_drop": options.max_drop, "end": options.end,
        "dense": perplexity(model, evaluation, batch=4),
    }  # fmt: skip
    return model, Texts(draws, decisions, evaluation), about


def windows_of(vocabulary: Any, options: argparse.Namespace) -> Tensor:
    """Windows of a text with a story on each line, in an order drawn by the seed."""
    lines = filter(None, options.text.read_text(encoding="utf-8").splitlines())
    ids = torch.tensor([number for line in lines for number in vocabulary.encode(line)])
    windows = ids[: len(ids) // options.context * options.context].view(-1, options.context)
    return windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(options.seed))]


def cell(
    model: Any, dense: dict[str, Tensor], name: str, texts: Texts, draw: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One probe or search, its perplexity on the evaluation text, and what stands beside it at the same sparsity."""
    batches = list(texts.draws[draw].split(options.batch))

    def judged(windows: Tensor = texts.evaluation) -> float:
        return perplexity(model, windows, batch=4)

    with metered(options.device) as meter:
        found = probed(model, batches, name, meter, texts, options)
        figures = meter.figures() | {"sparsity": found.sparsity, "found": [list(pair) for pair in found.found]}
    figures |= {"perplexity": judged(), "calibrated": judged(texts.draws[draw])}
    model.load_state_dict(dense)
    figures["dense_calibrated"] = judged(texts.draws[draw])
    for other in options.beside if found.pruned else ():
        reset_peak(options.device)
        began = seconds(options.device)
        sc.prune(model, batches, sparsity=found.sparsity, **BESIDE[other])
        figures[f"{other}_seconds"] = seconds(options.device) - began
        figures[f"{other}_peak_bytes"] = peak_bytes(options.device)
        figures[other] = judged()
        model.load_state_dict(dense)
    return figures


def probed(
    model: Any, batches: list[Tensor], name: str, meter: Meter, texts: Texts, options: argparse.Namespace
) -> Outcome:
    """The probe or search of a cell."""
    common: dict[str, Any] = {"order": "reverse", "group": options.group}
    metric = meter.watch(lambda model: -perplexity(model, texts.decisions, batch=4))
    if name == "strict":
        return sc.probe(model, batches, sparsity=0.5, evaluate=metric, **common)
    limit = math.inf if name.startswith("raise") else options.max_drop
    return sc.probe_until(
        model, batches, metric, start=options.start, step=options.step, end=options.end, max_drop=limit,
        tune={"on": True, "both": "both"}.get(name, False), tolerance=options.tolerance,
        refresh=name.endswith("refreshed"), **common,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("stories15m", "smollm2"))
    parser.add_argument("--checkpoint", type=Path, help="stories15M in the format of llama2.c; SmolLM2's GGUF file")
    parser.add_argument("--text", type=Path, help="text of the windows (stories15m: what it writes itself)")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--beside", nargs="+", choices=BESIDE, default=list(BESIDE), help="at the same sparsity (all)")
    parser.add_argument("--draws", type=int, default=3, help="calibration texts (3)")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--calibration", type=int, default=8, help="windows of each draw (8)")
    parser.add_argument("--decisions", type=int, default=12, help="held-out windows that decide a search (12)")
    parser.add_argument("--evaluation", type=int, default=24, help="other held-out windows, for the tables (24)")
    parser.add_argument("--batch", type=int, default=4, help="windows at a time in calibration (4)")
    parser.add_argument("--group", default="1", help="layers probed together: a number, or block (1)")
    parser.add_argument("--tolerance", type=float, default=1.0, help="of the levels (1.0, as in the document)")
    parser.add_argument("--max-drop", type=float, default=3.0, help="perplexity lost that ends a search (3.0)")
    parser.add_argument("--start", type=float, default=0.1)
    parser.add_argument("--step", type=float, default=0.1)
    parser.add_argument("--end", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--label", help="of the record")
    parser.add_argument("--fresh", action="store_true", help="replace the record")
    parser.add_argument("--out", type=Path, help="folder of the record (benchmarks/results)")
    options = parser.parse_args()
    options.group = options.group if options.group == "block" else int(options.group)
    options.invocation = shlex.join(["python", "-m", "tools.procedure", *sys.argv[1:]])
    try:
        return run(options)
    except SecateurError as error:
        print(f"procedure: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
