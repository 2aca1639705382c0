"""n:m, blocks and rows: right for every layout, exact per group, refused where they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import secateur as sc
from secateur import selection
from secateur.errors import PatternError, ScoreError
from secateur.selection import Target, choose, exact, tiles
from secateur.selection.exact import ScoredTensor, flat_part
from secateur.selection.tiles import Layout, Tiling, parse_pattern
from tests import oracle


def target(scores: Tensor, layout: Layout, alive: Tensor | None = None) -> Target:
    scored = ScoredTensor(
        "w", scores.numel(), scores.numel(), lambda where: flat_part(scores, where), scores.device, alive
    )
    return Target(scored, tuple(scores.shape), tuple(scores.shape), layout)


@settings(max_examples=300)
@given(st.sampled_from(["1:2", "2:4", "4:8", "3:5"]), st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**30))
def test_n_of_m_keeps_the_best_of_every_group(pattern: str, rows: int, groups: int, seed: int) -> None:
    kept, group = map(int, pattern.split(":"))
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randint(-3, 4, (rows, groups * group), generator=draw).float()  # few values, so ties
    alive = torch.rand(scores.shape, generator=draw) > 0.2
    mask = sc.select({"w": scores}, None, pattern=pattern, alive={"w": alive})["w"]
    expected = oracle.select_groups(scores.view(-1, group), group - kept, alive.view(-1, group))
    assert torch.equal(mask.view(-1, group), expected)
    assert int(sc.select({"w": scores}, None, pattern=pattern)["w"].sum()) == rows * groups * kept


def test_n_of_m_runs_along_inputs_in_every_layout() -> None:
    """The same weights stored four ways lose the same members."""
    matrix = torch.randn(6, 8)
    pattern = parse_pattern("2:4")
    expected = choose([target(matrix, Layout())], 0.5, pattern=pattern).masks[0].view(6, 8)
    transposed = matrix.t().contiguous()
    found = choose([target(transposed, Layout(rows=(1,), inputs=0))], 0.5, pattern=pattern).masks[0].view(8, 6)
    assert torch.equal(found.t(), expected)
    stacked = torch.stack((matrix, matrix * 2))
    found = choose([target(stacked, Layout((0, 1), 2))], 0.5, pattern=pattern).masks[0].view(2, 6, 8)
    assert torch.equal(found[1], expected)
    turned = stacked.transpose(1, 2).contiguous()
    found = choose([target(turned, Layout((0, 2), 1))], 0.5, pattern=pattern).masks[0].view(2, 8, 6)
    assert torch.equal(found[0].t(), expected)
    kernel = torch.randn(6, 8, 3, 3)
    found = choose([target(kernel, Layout())], 0.5, pattern=pattern).masks[0].view(6, 8, 3, 3)
    assert torch.equal(
        found[:, :, 1, 2], choose([target(kernel[:, :, 1, 2], Layout())], 0.5, pattern=pattern).masks[0].view(6, 8)
    )


def test_rows_follow_the_layout() -> None:
    matrix = torch.randn(5, 12)
    expected = choose([target(matrix, Layout())], 0.3, scope="row").masks[0].view(5, 12)
    turned = matrix.t().contiguous()
    found = choose([target(turned, Layout(rows=(1,), inputs=0))], 0.3, scope="row").masks[0].view(12, 5)
    assert torch.equal(found.t(), expected)
    kernel = matrix.view(5, 3, 2, 2)
    assert torch.equal(choose([target(kernel, Layout())], 0.3, scope="row").masks[0].view(5, 12), expected)


def test_rows_too_long_for_one_go_are_streamed() -> None:
    scores = torch.randint(0, 50, (4, 500)).float()
    alive = torch.rand(4, 500) > 0.2
    expected = oracle.select_groups(scores, 300, alive)
    turned = target(scores.t().contiguous(), Layout((1,), 0), alive.t().reshape(-1))
    for small in (64, 100):
        patches = [mock.patch.object(module, "CHUNK", small) for module in (exact, selection, tiles)]
        with patches[0], patches[1], patches[2]:
            assert torch.equal(sc.select({"w": scores}, 0.6, scope="row", alive={"w": alive})["w"], expected)
            assert torch.equal(choose([turned], 0.6, scope="row").masks[0].view(500, 4).t(), expected)


@settings(max_examples=200)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.floats(0, 0.99),
    st.integers(0, 2**30),
)
def test_blocks_go_whole_and_exactly(
    rows: int, columns: int, down: int, across: int, sparsity: float, seed: int
) -> None:
    scores = torch.randint(
        -4, 5, (down * rows, across * columns), generator=torch.Generator().manual_seed(seed)
    ).float()
    tiles = scores.view(down, rows, across, columns).permute(0, 2, 1, 3).reshape(down, across, -1)
    for scope in ("model", "row"):
        mask = sc.select({"w": scores}, sparsity, scope=scope, pattern=f"block:{rows}x{columns}")["w"]
        found = mask.view(down, rows, across, columns).permute(0, 2, 1, 3).reshape(down, across, -1)
        assert torch.equal(found.all(2), found.any(2))
        sums = tiles.sum(2)  # small integers: exact in any order
        everything = torch.ones_like(sums, dtype=torch.bool)
        if scope == "model":
            expected = oracle.remove_lowest(sums.flatten(), round(sparsity * sums.numel()), everything.flatten())
        else:
            expected = oracle.select_groups(sums, round(sparsity * across), everything)
        assert torch.equal(found.any(2).flatten(), expected.flatten())


def test_blocks_count_the_living_only() -> None:
    scores = torch.tensor([[9.0, 9.0, 2.0, 2.0]])
    alive = torch.tensor([[False, True, True, True]])
    mask = sc.select({"w": scores}, 0.5, pattern="block:1x2", alive={"w": alive})["w"]
    assert mask.tolist() == [[False, True, False, False]]  # 9 against 4
    gone = torch.tensor([[False, False, True, True]])
    mask = sc.select({"w": scores}, 0.5, pattern="block:1x2", alive={"w": gone})["w"]
    assert mask.tolist() == [[False, False, True, True]]  # half is gone already


def test_block_sums_do_not_depend_on_how_many_there_are() -> None:
    rows = torch.randn(1000, 37)
    whole = tiles.pairwise_sum(rows)
    assert torch.equal(whole, torch.cat([tiles.pairwise_sum(part) for part in rows.split([1, 6, 993])]))
    torch.testing.assert_close(whole, rows.sum(1))


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4))
def test_a_tiling_visits_every_place_once(dims: list[tuple[int, int]]) -> None:
    tiling = Tiling(tuple(tile * count for tile, count in dims), tuple(tile for tile, _ in dims))
    numbers = torch.arange(tiling.count * tiling.size)
    everywhere = tiling.members(slice(0, tiling.count))
    visited = numbers[everywhere]
    assert torch.equal(visited.sort().values, numbers)
    one_by_one = [numbers[tiling.members(torch.tensor([tile]))] for tile in range(tiling.count)]
    assert torch.equal(torch.cat(one_by_one), visited)
    parts = [numbers[tiling.members(slice(0, 1), slice(place, place + 1))] for place in range(tiling.size)]
    assert torch.equal(torch.cat(parts), one_by_one[0])


@pytest.mark.parametrize("pattern", ["4:2", "0:4", "2;4", "block:0x4", "block:4", "nonsense"])
def test_patterns_that_mean_nothing_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match="No pattern"):
        sc.select({"w": torch.ones(4, 4)}, 0.5, pattern=pattern)


def test_settings_that_contradict_each_other_are_refused() -> None:
    scores = {"layer.weight": torch.ones(6, 6)}
    with pytest.raises(PatternError, match=r"'2:4' means sparsity 0.5, not 0.8. Pass sparsity=None"):
        sc.select(scores, 0.8, pattern="2:4")
    with pytest.raises(
        PatternError, match=r"'layer.weight' of shape \(6, 6\) cannot be tiled by '2:4'.*skip='layer.weight'"
    ):
        sc.select(scores, None, pattern="2:4")
    with pytest.raises(PatternError, match="needs a matrix"):
        sc.select({"v": torch.ones(8)}, None, pattern="2:4")
    with pytest.raises(PatternError, match="Only an n:m pattern"):
        sc.select(scores, None)
    for scope in ("tensor", ["model"]):
        with pytest.raises(PatternError, match=r"No scope .* Use one of .*'row' \('global' is 'model'\)"):
            sc.select(scores, 0.5, scope=scope)  # type: ignore[arg-type]
    with pytest.raises(PatternError, match=r"alive\['layer.weight'\] has shape"):
        sc.select(scores, 0.5, alive={"layer.weight": torch.ones(3, 3)})


def test_global_is_another_name_for_model() -> None:
    scores = {"a": torch.rand(8, 8), "b": 3 * torch.rand(8, 4)}
    for options in ({}, {"pattern": "block:2x2"}):
        wide, named = (sc.select(scores, 0.4, scope=scope, **options) for scope in ("global", "model"))
        assert all(torch.equal(wide[name], named[name]) for name in scores)


def scratch(function: Callable[[], object], masks_bytes: int) -> int:
    """What torch's own memory profile saw at its highest, beyond the masks."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    live = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert peak > masks_bytes  # the profiler saw the masks, so it would see more
    return peak - masks_bytes


@pytest.mark.parametrize(
    "options", [{"scope": "model"}, {"scope": "layer"}, {"scope": "row"}, {"pattern": "block:8x8"}]
)
def test_scratch_stays_bounded(options: dict[str, str]) -> None:
    scores = {"a": torch.randn(3000, 4000), "b": torch.randn(4096, 4096).bfloat16()}
    masks_bytes = sum(tensor.numel() for tensor in scores.values())
    assert scratch(lambda: sc.select(scores, 0.5, **options), masks_bytes) < 32 * 2**20


def test_scratch_of_a_pruner_stays_bounded_on_one_huge_tensor() -> None:
    """38 M weights in one tensor: no temporary of an update may have its size, the new mask apart."""
    layer = torch.nn.Linear(6144, 6144, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    pruner = sc.Pruner(layer, optimizer, score="magnitude", sparsity=0.5, every=1)
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    assert scratch(pruner.step, layer.weight.numel()) < 32 * 2**20
    assert pruner.updates[0].churn == layer.weight.numel() // 2


def test_alive_may_be_a_view_but_not_of_something_else() -> None:
    scores = {"a": torch.arange(16.0).view(4, 4)}
    assert int(sc.select(scores, 0.5, alive={"a": torch.tensor(True).expand(4, 4)})["a"].sum()) == 8
    turned = torch.arange(16).view(4, 4).t() > 7
    assert int(sc.select(scores, 0.5, alive={"a": turned})["a"].sum()) == 8
    with pytest.raises(PatternError, match="alive has 'b', which scores does not"):
        sc.select(scores, 0.5, alive={"b": turned})


def test_nan_in_a_long_row_is_named_like_any_other() -> None:
    scores = torch.ones(2, 500)
    scores[1, 3] = torch.nan
    patches = [mock.patch.object(module, "CHUNK", 64) for module in (exact, selection, tiles)]
    with patches[0], patches[1], patches[2], pytest.raises(ScoreError, match=r"NaN scores in 'w' \(1\)"):
        sc.select({"w": scores}, 0.5, scope="row")


def test_another_default_device_changes_nothing() -> None:
    """Helpers are made on the CPU on purpose: a default device must not pull them away from the scores."""
    scores = {"a": torch.randn(1000, 1000), "b": torch.randn(64, 64)}
    expected = sc.select(scores, 0.5)
    with torch.device("meta"):
        found = sc.select(scores, 0.5)
        sc.select(scores, None, pattern="2:4")
        sc.select(scores, 0.5, scope="row")
    assert all(torch.equal(found[name], expected[name]) for name in scores)


def test_nothing_to_select_from_is_no_error() -> None:
    assert sc.select({}, 0.5) == {}
    assert sc.select({"empty": torch.ones(0, 4)}, 0.5)["empty"].shape == (0, 4)


@pytest.mark.parametrize("options", [{"scope": "row", "sparsity": 0.4}, {"pattern": "2:4", "sparsity": None}])
def test_rows_and_groups_ranked_by_kernels_are_the_same(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Triton's interpreter, which ranks tiles that are one stretch of memory."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    masks = []
    for kernels_serve in (False, True):
        if kernels_serve:
            monkeypatch.delenv("SECATEUR_KERNELS", raising=False)
        torch.manual_seed(0)
        layer = torch.nn.Linear(16, 6)
        optimizer = torch.optim.AdamW(layer.parameters())
        pruner = sc.Pruner(layer, optimizer, score="magnitude", every=1, only="*", **options)
        layer(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        pruner.step()
        masks.append(pruner.masks["weight"].clone())
        assert all(row.cut is None for row in pruner.report().tensors)
    assert torch.equal(*masks)
    assert not bool(masks[0].all())


def test_rows_in_memory_and_rows_across_it_are_ranked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels rank what is one stretch of memory; with anything else among the tensors, torch ranks all."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")

    class Conv1D(torch.nn.Module):  # as in transformers: [inputs, outputs]
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(inputs, outputs))

    masks = []
    for kernels_serve in (False, True):
        if kernels_serve:
            monkeypatch.delenv("SECATEUR_KERNELS", raising=False)
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(16, 6), "b": Conv1D(16, 6)})
        with torch.no_grad():
            model["a"].weight.copy_(torch.linspace(-1, 2, 96).view(6, 16).roll(5, 1))
            model["b"].weight.copy_(model["a"].weight.t())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        pruner = sc.Pruner(model, optimizer, score="magnitude", sparsity=0.5, every=1, scope="row", only="*")
        sum(parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()
        pruner.step()
        masks.append({name: mask.clone() for name, mask in pruner.masks.items()})
    assert torch.equal(masks[0]["a.weight"], masks[0]["b.weight"].t())
    assert all(torch.equal(mask, masks[1][name]) for name, mask in masks[0].items())


@pytest.mark.parametrize("call", [sc.prune, sc.probe])
def test_global_is_scope_model_after_training_too(call: Callable[..., sc.Report]) -> None:
    found = []
    for scope in ("global", "model"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        batches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(2)]
        report = call(model, batches, score="magnitude", scope=scope, loss=squared_error)
        assert report.scope == "model"
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*found)


def squared_error(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
