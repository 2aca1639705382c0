"""Model cards: the README.md of a saved model, with the front matter that the Hugging Face hub reads."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.inference.packed import PackedLinear
from secateur.report import Outcome, Report, markdown_table

CARD = "README.md"
LOADING = "## How to load it"
TAGS = ("secateur", "pruning", "sparse")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
PACKED = """```python
import secateur  # registers the packed format with transformers
from transformers import {kind}

model = {kind}.from_pretrained("{place}")
```

Without `import secateur` transformers refuses to load it. `secateur.unpack(model)` gives dense layers, and
`secateur export FOLDER --format dense --out OTHER` a folder that any program loads."""
COMPRESSED = """```python
import secateur as sc

model = sc.load("{place}")  # {kind}
```

The weights are compressed for transport, which transformers does not read.
`secateur export FOLDER --out OTHER` writes them as they were."""
DENSE = """```python
from transformers import {kind}

model = {kind}.from_pretrained("{place}")
```

The zeros are stored like other values: every program loads it, and nothing is smaller or faster by itself."""
MODULE = """```python
import secateur as sc

model = ...  # build the network as before
sc.load("{place}", into=model)
```"""


@dataclass(frozen=True)
class Zeros:
    """Zeros among the weights of two or more dimensions."""

    zeros: int
    weights: int
    parameters: int  # of the whole model

    @property
    def sparsity(self) -> float:
        """Fraction of those weights that is zero."""
        return self.zeros / self.weights if self.weights else 0.0


@torch.no_grad()
def count_zeros(model: nn.Module) -> Zeros:
    """Count the zeros of a model, packed or not."""
    zeros = weights = parameters = 0
    for module in model.modules():
        if isinstance(module, PackedLinear):
            numel = module.in_features * module.out_features
            weights, parameters = weights + numel, parameters + numel
            zeros += numel - module.weight.numel()
    for parameter in model.parameters():
        parameters += parameter.numel()
        if parameter.ndim >= 2 and not parameter.is_meta:
            weights += parameter.numel()
            zeros += parameter.numel() - int(torch.count_nonzero(parameter))
    return Zeros(zeros, weights, parameters)


def model_card(
    name: str,
    model: nn.Module,
    *,
    report: Report | None = None,
    measures: Sequence[tuple[str, float]] = (),
    packed: bool = False,
    compressed: bool = False,
    base_model: str | None = None,
    command: str | None = None,
    license: str | None = None,
) -> str:
    """The text of a README.md: what was pruned and how, sparsity, evaluation, command, and how to load it.

    `report` is what `sc.prune`, `sc.probe` or `pruner.report()` gave. `measures` are named figures of an evaluation,
    after those that the report has. `base_model` is the dense model's name on the hub; by default the name the model
    was loaded by, if that is one.
    """
    config = getattr(model, "config", None)
    loaded_as = getattr(config, "name_or_path", None) or ""
    base_model = base_model or (loaded_as if _on_the_hub(loaded_as) else None)
    found = count_zeros(model)
    parts = [
        _front_matter(base_model, license, config is not None),
        f"# {name}",
        _what(type(model).__name__, found, base_model),
        "## How it was pruned",
        _how(report, command),
    ]
    measures = (*(report.found if isinstance(report, Outcome) else ()), *measures)
    if measures:
        rows = [(measure, f"{value:.6g}") for measure, value in measures]
        parts += ["## Evaluation", markdown_table(("measure", "value"), rows)]
    kind = type(model).__name__
    kind = "AutoModelForCausalLM" if kind.endswith(("ForCausalLM", "LMHeadModel")) else kind
    loading = MODULE if config is None else COMPRESSED if compressed else PACKED if packed else DENSE
    parts += [LOADING, loading.format(kind=kind, place=name)]
    return "\n\n".join(parts) + "\n"


def _on_the_hub(name: str) -> bool:
    """Whether a model was loaded by a name on the hub, not from a folder, whose relative path may look like one."""
    return HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def reloaded(text: str, name: str, packed: bool, compressed: bool) -> str:
    """A card whose last section says how to load the model in its new form; a card of another kind is unchanged."""
    kept, heading, loading = text.partition(LOADING)
    kind = re.search(r"= (\w+)\.from_pretrained|\)  # (\w+)", loading)
    if not heading or not kind:
        return text
    form = COMPRESSED if compressed else PACKED if packed else DENSE
    return f"{kept}{heading}\n\n{form.format(kind=kind[1] or kind[2], place=name)}\n"


def _front_matter(base_model: str | None, license: str | None, hf: bool) -> str:
    """YAML; strings are written as JSON, which YAML contains."""
    lines = ["---", f"library_name: {'transformers' if hf else 'pytorch'}"]
    if base_model:
        lines.append(f"base_model: {json.dumps(base_model)}")
    if license:
        lines.append(f"license: {json.dumps(license)}")
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in TAGS), "---"])


def _what(kind: str, found: Zeros, base_model: str | None) -> str:
    of = f" [{base_model}](https://huggingface.co/{base_model})" if base_model else f" a {kind}"
    return (
        f"A sparse version of{of}, made with Secateur. {found.zeros:,} of the {found.weights:,} weights in matrices are"
        f" zero ({found.sparsity:.2%}); the model has {found.parameters:,} parameters."
    )


def _how(report: Report | None, command: str | None) -> str:
    lines: list[Any] = []
    if report is not None:
        lines = [
            f"{report.pruned:,} of {report.prunable:,} prunable weights were removed ({report.sparsity:.2%}).",
            markdown_table(("setting", "value"), _settings(report)),
        ]
    if command:
        lines += ["Command:", f"```bash\n{command}\n```"]
    return "\n\n".join(lines or ["No report was saved with this model."])


def _settings(report: Report) -> Sequence[tuple[str, str]]:
    named = {
        "score": report.score,
        "sparsity": report.schedule,
        "scope": report.scope,
        "pattern": report.pattern or "unstructured",
        "allocation": report.allocation,
        "regrowth": report.regrow,
    }
    return [(name, value) for name, value in named.items() if value]
