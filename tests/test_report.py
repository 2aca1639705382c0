"""Reports: exact numbers, every tensor named, three renderings of the same facts."""

from __future__ import annotations

import json
import re

import torch

import secateur as sc
from secateur.report import heat_map, html_page, html_table, markdown_table, text_table
from tests.browser import Collector
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
        assert "Left dense, embedding: 1 tensor, 160 weights (embedding.weight)" in text
        assert "Masks take 2,048 bytes here, 256 when saved; the score keeps 8,192 more." in text
    assert "| up.weight | 64x16 | 1,024 |" in report.to_markdown()


def test_tables_line_up() -> None:
    rows = [("a", "1"), ("bcd", "22")]
    assert text_table(("name", "n"), rows) == "name   n\n----  --\na      1\nbcd   22"
    assert markdown_table(("name", "n"), rows) == "| name | n |\n| --- | ---: |\n| a | 1 |\n| bcd | 22 |"


def test_a_heat_map_has_a_row_for_each_block_and_a_column_for_each_kind() -> None:
    rows = [(f"model.layers.{block}.{kind}.weight", block / 10) for block in (0, 1) for kind in ("attn.q", "mlp.up")]
    text = heat_map([*rows, ("lm_head.weight", 0.999)])
    assert [re.findall(r'scope="row"[^>]*>([^<]*)<', text)] == [["0", "1", "-"]]
    assert re.findall(r"<span[^>]*>([^<]*)<", text) == ["attn.q", "mlp.up", "lm_head"]
    assert re.findall(r"<td [^>]*>([^<]*)<", text) == ["0", "0", "", "10", "10", "", "", "", "&gt;99"]
    assert 'title="1 attn.q: 10.00%"' in text
    assert heat_map([]) == ""


def test_a_heat_map_averages_experts_and_tells_stacks_apart() -> None:
    experts = [(f"layers.0.experts.{number}.up.weight", number / 40) for number in range(40)]
    text = heat_map([*experts, ("layers.0.attn.q.weight", 0.25)])
    assert re.findall(r"<span[^>]*>([^<]*)<", text) == ["experts.*.up", "attn.q"]
    assert re.findall(r"<td [^>]*>([^<]*)<", text) == ["49", "25"]
    text = heat_map([("encoder.0.up.weight", 0.5), ("decoder.0.up.weight", 0.5)])
    assert re.findall(r'scope="row"[^>]*>([^<]*)<', text) == ["encoder.0", "decoder.0"]


def test_cells_break_after_dots_of_names_and_not_before_units() -> None:
    table = html_table(("tensor", "bytes"), [("model.layers.0.up_proj.weight", "0.04 MB"), ("up.weight", "1 of 2")])
    assert "<td>model.<wbr>layers.<wbr>0.<wbr>up_proj.<wbr>weight</td><td>0.04\N{NBSP}MB</td>" in table
    assert "<td>up.weight</td><td>1\N{NBSP}of 2</td>" in table


def test_pages_escape_text_and_fetch_nothing() -> None:
    page = html_page("a < b", html_table(("<x>", "y"), [("1 & 2", "3")]), "said <em>once</em>.")
    collector = Collector()
    collector.feed(page)
    assert collector.fetched == []
    assert "<h1>a &lt; b</h1>" in page
    assert "<td>1 &amp; 2</td>" in page
    assert "said <em>once</em>. Made by Secateur." in page
