"""The checklist docs/claims.toml as tables, and the tables of the two records made for it.

Every claim of the documents of AdamWPrune and GradProbe has a verdict and evidence. tools/tables.py writes the tables
of docs/claims.md from here, and tests/test_claims.py checks that the evidence exists.
"""

from __future__ import annotations

import re
import statistics
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secateur.lab.record import ROOT
from secateur.report import markdown_table

CHECKLIST = ROOT / "docs" / "claims.toml"
RESULTS = "benchmarks/results/"
DOCS = "docs/"


@dataclass(frozen=True)
class Claim:
    """A row of the checklist."""

    document: str
    claim: str
    verdict: str
    found: str
    evidence: list[str]
    line: int | None = None  # in its document


@dataclass(frozen=True)
class Checklist:
    """The whole file: verdicts that are known, documents by key, and claims."""

    verdicts: list[str]
    documents: dict[str, str]
    claims: list[Claim]


def read_checklist() -> Checklist:
    """The checklist in its order."""
    found = tomllib.loads(CHECKLIST.read_text(encoding="utf-8"))
    return Checklist(found["verdicts"], found["documents"], [Claim(**claim) for claim in found["claim"]])


def slug(heading: str) -> str:
    """The anchor that mkdocs gives a heading."""
    plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)


def anchors(page: Path) -> list[str]:
    """Anchors of a page of Markdown."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [slug(heading) for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)]


def missing(evidence: str) -> str | None:
    """What a piece of evidence names that does not exist; None if all of it does."""
    if evidence.startswith("tests/"):
        file, _, test = evidence.partition("::")
        path = ROOT / file
        if not path.is_file():
            return file
        return None if not test or re.search(rf"^def {test}\(", path.read_text(), flags=re.MULTILINE) else evidence
    file, _, anchor = evidence.partition("#")
    if not (evidence.startswith((RESULTS, DOCS)) and (ROOT / file).is_file()):
        return file
    return None if not anchor or anchor in anchors(ROOT / file) else evidence


def linked(evidence: str) -> str:
    """Evidence as a link of a page in docs, or as code."""
    if evidence.startswith(DOCS):
        target = evidence.removeprefix(DOCS)
        return f"[{target.partition('#')[0].removesuffix('.md')}]({target})"
    return f"`{evidence.removeprefix(RESULTS).removesuffix('.json')}`"


def full_tables() -> str:
    """Every claim, document by document, with its evidence."""
    found = read_checklist()
    parts = [counts(found)]
    for key, title in found.documents.items():
        rows = [
            (
                "-" if one.line is None else str(one.line),
                one.claim,
                one.verdict,
                one.found,
                ", ".join(map(linked, one.evidence)) or "-",
            )
            for one in sorted(found.claims, key=lambda one: one.line or 0)
            if one.document == key
        ]
        table = markdown_table(("line", "claim", "verdict", "found", "evidence"), rows).replace("---:", "---")
        parts += [f"## {title}", table]
    return "\n\n".join(parts)


def counts(found: Checklist) -> str:
    """How many claims have which verdict, in a sentence."""
    number = Counter(one.verdict for one in found.claims)
    listed = ", ".join(f"{number[verdict]} {verdict}" for verdict in found.verdicts)
    return f"{len(found.claims)} claims: {listed}."


def forms_tables(record: dict[str, Any]) -> list[str]:
    """Masks of forms of scores beside ours, and CPU time of forms of bitter7."""
    names = dict.fromkeys(row["form"] for row in record["masks"])
    cells = {(row["form"], row["sparsity"]): row for row in record["masks"]}
    masks = [
        (name, *(f"{cells[name, at]['differ']:.2%}" for at in (0.5, 0.8)), f"{cells[name, 0.5]['strict']:.2%}")
        for name in names
    ]
    header = (
        "form, to what it is compared with",
        "masks differ at 50 %",
        "at 80 %",
        "score > threshold prunes of 50 %",
    )
    medians = {name: statistics.median(several) for name, several in record["milliseconds"].items()}
    ours = next(iter(medians.values()))
    times = [(name, f"{value:.1f}", f"{value / ours:.2f}x") for name, value in medians.items()]
    timed = f"bitter7 of {record['size'] / 1e6:.1f} M weights"
    return [markdown_table(header, masks), markdown_table((timed, "CPU ms", "to ours"), times)]


def stream_tables(records: list[dict[str, Any]]) -> list[str]:
    """Peak memory of all processes while a dataset was tokenized, and whether a kill changed the files."""
    header = ("tokenizer", "text", "tokens", "workers", "seconds", "peak MiB, all processes", "killed at, continued")
    rows = []
    for one in records:
        total = sum(one["tokens"].values())
        after = "same files" if one["equal_after_kill"] else "other files"
        rows.append(
            (
                one["tokenizer"],
                f"{one['bytes'] / 1e9:g} GB, {one['rows']:,} rows",
                f"{total:,} in {sum(one['shards'].values())} shards",
                str(one["workers"]),
                f"{one['seconds']:.0f}",
                f"{one['peak_mib']:.0f}",
                f"{one['killed_after_tokens'] / total:.0%}, {after}",
            )
        )
    return [markdown_table(header, rows)]
