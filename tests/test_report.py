"""Reports: exact numbers, every tensor named, three renderings of the same facts."""

from __future__ import annotations

import json

import torch

import secateur as sc
from secateur.report import markdown_table, text_table
from tests.conftest import Block, train


def pruned(block: Block, score: str = "bitter7") -> sc.Pruner:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, score=score, sparsity=sc.linear(0.6, begin=0, end=4), every=2)
    train(block, optimizer, 4, pruner.step)
    return pruner


def test_numbers_add_up(block: Block) -> None:
    report = pruned(block).report()
    everything = sum(parameter.numel() for parameter in block.parameters())
    assert report.prunable == 2048
    assert report.pruned == round(0.6 * 2048)
    assert report.sparsity == report.pruned / 2048
    assert report.model_sparsity == report.pruned / everything
    assert report.prunable + sum(numel for _, numel, _ in report.left_out) == everything
    first, second = report.updates
    assert (first.step, second.step) == (2, 4)
    assert first.churn + second.churn == report.pruned
    assert sum(row.churn for row in report.tensors) == second.churn
    assert all(update.seconds > 0 and update.bytes_sent == 0 for update in report.updates)
    assert report.mask_bytes == 2048
    assert report.fact_bytes == 0


def test_the_cut_is_the_score_at_the_boundary(block: Block) -> None:
    optimizer = torch.optim.AdamW(block.parameters())
    pruner = sc.Pruner(block, optimizer, sparsity=0.6, every=1)
    train(block, optimizer, 1)
    scores = torch.cat([piece.score(slice(0, piece.numel)) for piece in pruner.pieces()])
    pruner.step()
    cut = scores.kthvalue(round(0.6 * 2048)).values
    assert {row.cut for row in pruner.report().tensors} == {float(cut)}


def test_renderings_hold_the_same_facts(block: Block) -> None:
    report = pruned(block, "movement").report()
    data = json.loads(report.to_json())
    assert data["pruned"] == report.pruned
    assert data["tensors"][0]["name"] == "up.weight"
    for text in (str(report), report.to_markdown()):
        assert "asked 60.0000%, achieved 60.0098% of prunable weights (1,229 of 2,048)" in text
        assert "up.weight" in text
        assert "Left dense, embedding: 1 tensors, 160 weights (embedding.weight)" in text
        assert "Masks take 2,048 bytes here, 256 when saved; the score keeps 8,192 more." in text
    assert "| up.weight | 64x16 | 1,024 |" in report.to_markdown()


def test_tables_line_up() -> None:
    rows = [("a", "1"), ("bcd", "22")]
    assert text_table(("name", "n"), rows) == "name   n\n----  --\na      1\nbcd   22"
    assert markdown_table(("name", "n"), rows) == "| name | n |\n| --- | ---: |\n| a | 1 |\n| bcd | 22 |"
