"""The checklist of claims and the page of deviations: every piece of evidence exists, every deviation has its test."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import secateur as sc
from secateur.scores import resolve
from tests.conftest import Block, train
from tools.claims import Claim, anchors, linked, missing, read_checklist, slug
from tools.small_claims import FP16_EPS, half_rsqrt

ROOT = Path(__file__).parent.parent
CHECKLIST = read_checklist()
DEVIATIONS = (ROOT / "docs" / "deviations.md").read_text()


@pytest.mark.parametrize("claim", CHECKLIST.claims, ids=lambda claim: f"{claim.document}-{claim.line}")
def test_a_claim_has_a_verdict_and_evidence_that_exists(claim: Claim) -> None:
    assert claim.verdict in CHECKLIST.verdicts
    assert claim.document in CHECKLIST.documents
    assert len(claim.found) > 20
    assert [one for one in claim.evidence if missing(one)] == []
    if not claim.evidence and not claim.found.startswith(("As arithmetic", "It contradicts the document's own")):
        assert claim.verdict == "not measured"


def test_every_document_is_read_to_its_end() -> None:
    number = Counter(claim.document for claim in CHECKLIST.claims)
    assert set(number) == set(CHECKLIST.documents)
    last = {"sampling": 300, "variants": 360, "compile": 180, "performance": 235, "layerwise": 150}
    for document, line in last.items():
        assert max(claim.line or 0 for claim in CHECKLIST.claims if claim.document == document) >= line
    texts = Counter(claim.claim for claim in CHECKLIST.claims)
    assert max(texts.values()) == 1


@pytest.mark.parametrize(
    "words",
    [
        "26 % less memory", "identical sparsity", "13 times fewer calls", "checkpointing costs 30 to 50",
        "2 to 4 times", "utilisation 4 %", "Not freezing gains", "tuning dominates",
        "better signal than the momentum",
        "converges faster", "45 % faster overall", "25 ms an update", "400 MB an update", "Triton kernel is not worth",
        "lowers compute utilisation by 16", "break compiled graphs", "torch.quantile", "fp16 by reciprocal roots",
        "Compiling the score", "Gradients must be masked at every step", "is movement pruning",
    ],
)  # fmt: skip
def test_the_claims_asked_for_are_there(words: str) -> None:
    found = [claim for claim in CHECKLIST.claims if words in claim.claim]
    assert len(found) == 1


@pytest.mark.parametrize(
    "evidence",
    [
        "docs/none.md",
        "docs/results.md#none",
        "tests/test_claims.py::test_none",
        "tests/test_none.py",
        "benchmarks/results/none.json",
        "README.md",
    ],
)
def test_evidence_that_is_missing_is_found(evidence: str) -> None:
    assert missing(evidence)


def test_anchors_are_those_of_mkdocs(tmp_path: Path) -> None:
    assert slug("Where `bitter7`'s eps sits") == "where-bitter7s-eps-sits"
    assert slug("A small GPT at 80 %") == "a-small-gpt-at-80"
    (tmp_path / "page.md").write_text("# One\n```bash\n# no heading\n```\n## Two, three\n")
    assert anchors(tmp_path / "page.md") == ["one", "two-three"]
    assert linked("docs/results.md#spam") == "[results](results.md#spam)"
    assert linked("benchmarks/results/a_b_2026.json") == "`a_b_2026`"


def sections() -> list[tuple[str, str]]:
    parts = re.split(r"^### (.+)$", DEVIATIONS, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize(("name", "text"), sections(), ids=lambda value: value[:30].strip())
def test_every_deviation_names_a_test_that_exists(name: str, text: str) -> None:
    tests = re.findall(r"^Test: `(tests/[\w.:/]+)`$", text, flags=re.MULTILINE)
    assert tests, name
    assert [one for one in tests if missing(one)] == []


def test_the_eps_of_bitter7_is_inside_the_root() -> None:
    facts = {"weight": torch.tensor([2.0, -2.0, 2.0]), "exp_avg_sq": torch.tensor([0.0, 1e-8, 1.0])}
    expected = 2 * (facts["exp_avg_sq"].double() + 1e-8) ** 0.25  # outside it would be 2e-8 where v is zero
    torch.testing.assert_close(resolve("bitter7")(**facts).double(), expected, rtol=1e-6, atol=0)


def test_pruned_weights_do_not_come_back_by_negative_scores(block: Block) -> None:
    """Scores of bitter5 are negative for about half of the weights, and a pruned weight would score 0."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.01)
    pruner = sc.Pruner(block, optimizer, score="bitter5", sparsity=sc.linear(0.5, begin=0, end=20), every=2)
    before = {name: mask.clone() for name, mask in pruner.masks.items()}
    for _ in range(12):
        train(block, optimizer, 2, pruner.step)
        for name, mask in pruner.masks.items():
            assert not (mask & ~before[name]).any()
        before = {name: mask.clone() for name, mask in pruner.masks.items()}
    report = pruner.report()
    assert report.pruned == round(0.5 * report.prunable)


def test_torch_quantile_refuses_more_than_two_to_the_24() -> None:
    with pytest.raises(RuntimeError, match="input tensor is too large"):
        torch.zeros(1).expand(2**24 + 1).quantile(0.5)


def test_an_eps_of_1e_8_is_nothing_in_fp16() -> None:
    assert float(torch.tensor(1e-8).half()) == 0
    weight, quiet = torch.tensor([0.5, 0.1]), torch.tensor([1e-9, 1e-9])
    assert half_rsqrt(weight, quiet, 1e-8).tolist() == [0, 0]  # all weights with a small v score the same
    loud, still = half_rsqrt(torch.tensor([0.5, 0.5]), torch.tensor([1e-7, 1e-12]), FP16_EPS).tolist()
    assert loud / still < 1.01  # and with 1e-5 v hardly counts
