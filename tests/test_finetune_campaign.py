"""The fine-tuning campaign and the comparison of rivals: what they run next, and what they say about it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from secateur.lab.data import Tokens
from secateur.lab.models import language_model
from tests import tiny
from tests.test_finetune import text
from tools import finetune_campaign as campaign
from tools import finetune_rivals as rivals
from tools.finetune_ways import Settings, sparsity_of

FACTORS = {"variance": 1.5, "bitter3": 1.7, "magnitude by layer": 3.0, "movement": 9.0, "one-shot, retrained": 1.6}


def measured(job: campaign.Job) -> dict[str, Any]:
    """A made-up result: one learning rate is best, sparsity costs, tokens help."""
    factor = FACTORS.get(job.way, 2.0) * (1 if job.lr == 1e-3 else 1.1) * (1 + job.sparsity - 0.8)
    factor = factor ** (1 if job.tokens == campaign.SHORT else 0.5)
    after = {"before": 20.0, "after": 20 * factor, "other_before": 30.0, "other": 30 * factor, "trained": job.tokens}
    return asdict(job) | after


def run_all(model: str = "smollm2", whole: bool = True) -> list[dict[str, Any]]:
    """Every cell in the order in which the campaign takes them."""
    done: list[dict[str, Any]] = []
    for _ in range(200):
        known = {json.dumps(campaign.key(cell)) for cell in done}
        jobs = list(campaign.grid(done, model, whole))
        left = [job for job in jobs if json.dumps(campaign.key(asdict(job))) not in known]
        if not left:
            return done
        done.append(measured(left[0]))
    raise AssertionError("the grid does not end")


def test_the_grid_tunes_first_and_then_uses_the_best() -> None:
    first = list(campaign.grid([], "smollm2"))
    assert {job.way for job in first} == set(FACTORS)
    assert {(job.sparsity, job.tokens, job.seed) for job in first} == {(0.8, campaign.SHORT, 0)}
    cells = run_all()
    assert all(cell["lr"] == 1e-3 for cell in cells[len(first) :])
    assert {cell["seed"] for cell in cells if cell["way"] == "movement"} == {0, 1, 2}
    longer = {(cell["way"], cell["sparsity"]) for cell in cells if cell["tokens"] == campaign.LONG}
    assert longer == {(way, level) for way in ("variance", "one-shot, retrained") for level in (0.8, 0.9)}
    levels = {cell["way"] for cell in cells if cell["sparsity"] == 0.5}
    assert levels == {"variance", "magnitude by model", "one-shot, retrained"}  # the best of each kind
    assert {cell["way"] for cell in run_all(whole=False)} == {"variance", "magnitude by layer", "one-shot, retrained"}


def test_a_way_that_diverges_is_never_the_best() -> None:
    done = [measured(job) for job in campaign.grid([], "smollm2")]
    for cell in done:
        if cell["way"] == "movement" and cell["lr"] == 1e-3:
            cell["after"] = math.nan
    assert campaign.best_rate(done, "smollm2", "movement") == 3e-4
    assert campaign.best_rate(done[:1], "smollm2", "variance") is None


def test_bars_stand_beside_the_table() -> None:
    told = campaign.bars(run_all())
    assert told[0] == "80 %, 5 M tokens: at most 2.2x dense: **met**, 1.500x."
    assert "missed" in told[5] or "met" in told[5]
    assert told[-1].endswith("**missed**, 1.33x.")
    assert all("not measured yet" in line for line in campaign.bars([]))
    header, lines = campaign.table(run_all())
    assert all(len(line) == len(header) for line in lines)
    best = [line for line in lines if line[1:4] == ("80%", "5 M", "variance")]
    assert best == [("smollm2", "80%", "5 M", "variance", "0.001", "3", "30.00", "1.500", "45.00", "1.500")]


def test_the_campaign_runs_what_users_run_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    tiny.llama(initializer_range=0.2).save_pretrained("model")
    tiny.tokenizer().save_pretrained("model")
    for seed, name in enumerate(("train", "inside", "outside")):
        Path(f"{name}.txt").write_text(text(seed, 2000), encoding="utf-8")
    Path("others").mkdir()
    Path("outside.txt").rename("others/one.txt")
    words = "--wiki train.txt --wikitext inside.txt --other others --models model --cpu --context 16 --batch 2"
    words += " --evaluation 3 --calibration 3 --scale 2e-5 --out out --work work --cells 1"
    assert campaign.main(words.split()) == 0
    assert campaign.main(words.split()) == 0
    (path,) = Path("out").glob("finetune-campaign_*.json")
    cells = json.loads(path.read_text())["cells"]
    assert [(cell["way"], cell["lr"]) for cell in cells] == [("variance", 3e-4), ("variance", 1e-3)]
    for cell in cells:
        assert cell["achieved"] == pytest.approx(0.8, abs=1e-3)
        assert cell["before"] != cell["after"] != cell["other"]
        assert cell["steps"] == 3
    assert not [one for one in Path("work").iterdir() if one.is_dir()]  # checkpoints are gone
    assert "next: Job" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="was measured with"):
        campaign.main([*words.split(), "--context", "8"])
    with pytest.raises(SystemExit):
        campaign.main(["--wiki", "nosuch", "--wikitext", "inside.txt", "--other", "others", "--cpu"])
    assert "there is no nosuch" in capsys.readouterr().err


SHORT_RUN = {"steps": 12, "every": 2}


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(regrow="gradient", until=0.6, start=0.8),
        Settings(start=0.5, begin=0.0, end=0.5),
        Settings(how="levels", levels=(0.5, 0.8), end=0.5),
        Settings(how="admm", score="fisher", strength=1e-2, begin=0.0, end=0.01),
        Settings(how="admm-decoupled", strength=10.0, hard=0.6, end=0.5),
        Settings(how="ast", score="magnitude", strength=1e-3, rising=True),
        Settings(how="ast-decoupled", strength=10.0, hard=0.6),
        Settings(hidden=1.0, alpha=0.5, reset=True),
    ],
    ids=lambda one: f"{one.how}-{one.start}-{one.regrow}-{one.hidden}",
)
def test_every_way_ends_at_the_sparsity_asked_for(settings: Settings) -> None:
    draw = torch.Generator().manual_seed(0)
    data = Tokens(torch.randint(0, 32, (5000,), generator=draw), torch.zeros(500, dtype=torch.long), 32, "made up")
    torch.manual_seed(0)
    dense = language_model("gpt-2x16x2", 32, 64)
    network = rivals.Network(dense, data, context=64, begun=1, about={})
    cell = rivals.measure("made up", replace(settings, **SHORT_RUN), network, 30.0, 0)  # type: ignore[arg-type]
    assert cell["sparsity"] == pytest.approx(settings.sparsity, abs=2e-3)
    assert math.isfinite(cell["perplexity"])
    assert sparsity_of(weight for weight in dense.parameters() if weight.ndim == 2) == 0


def test_stories_are_held_out_and_their_order_depends_on_the_seed_alone() -> None:
    tokens = torch.arange(rivals.EVALUATION + 24).view(-1, 1).expand(-1, 9)
    data = rivals.Stories(tokens)
    held_out = set(data.evaluation(8, rivals.EVALUATION).flatten().tolist())
    read = [data.batch(step, 4, 8, 1) for step in range(6)]
    assert all(batch.shape == (4, 9) for batch in read)
    seen = set(torch.cat(read).flatten().tolist())
    assert seen == set(range(24))
    assert not seen & held_out
    assert torch.equal(data.batch(6, 4, 8, 1), read[0])
    assert not torch.equal(data.batch(0, 4, 8, 2), read[0])


def test_rivals_are_compared_in_pairs() -> None:
    cells = [
        {"name": name, "seed": seed, "perplexity": (5 + seed) * (factor + spread * (seed - 1)), "dense": 4.0}
        for name, factor, spread in (("gradual variance", 1.0, 0.0), ("oneshot", 0.9, 1e-3), ("other", 1.2, 1e-3))
        for seed in range(3)
    ]
    header, lines = rivals.rows(cells)
    assert [line[0] for line in lines] == ["oneshot", "gradual variance", "other"]
    assert [line[-1] for line in lines] == ["better", "baseline", "worse"]
    assert lines[0][4].startswith("-10.00 %")
    assert "3 seeds" in rivals.noise(cells)
    assert len(header) == len(lines[0])
