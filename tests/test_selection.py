"""Selection is exact: it equals a stable sort at any chunking, with ties, signs, zeros, subnormals and infinities."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import secateur as sc
from secateur.errors import PatternError, ScheduleError, ScoreError
from secateur.selection import exact
from secateur.selection.exact import (
    ALONE,
    HIGHEST_KEY,
    LOWEST_KEY,
    ScoredTensor,
    keys_of,
    places_of,
    value_of,
    values_of,
)
from secateur.selection.masks import to_bits
from tests import oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TIES = (-1.5, -0.0, 0.0, 0.0, 1.0, 1.0, 2.0)
ODD = (math.inf, -math.inf, 1e-45, -1e-45, 1e-38, 3.4e38, -3.4e38)
FLOATS = st.floats(width=16, allow_nan=False), st.floats(width=32, allow_nan=False)
VALUES = st.one_of(st.sampled_from(TIES), st.sampled_from(ODD), *FLOATS)
SIZE = 5  # bytes drawn for a value

Case = tuple[dict[str, Tensor], dict[str, Tensor]]


def values_from(drawn: bytes) -> Tensor:
    """Hard values: of every five bytes the first says whether the others mean a tie, an odd value, an fp16 or an fp32.

    Bytes are drawn many times faster than lists of floats, and hypothesis makes short examples of lists.
    """
    rows = torch.frombuffer(bytearray(drawn), dtype=torch.uint8).view(-1, SIZE)
    kind, one = rows[:, 0] % 4, rows[:, 1].long()
    half = rows[:, 1:3].clone(memory_format=torch.contiguous_format).view(torch.float16).flatten().float()
    full = rows[:, 1:5].clone(memory_format=torch.contiguous_format).view(torch.float32).flatten()
    kinds = [torch.tensor(TIES)[one % len(TIES)], torch.tensor(ODD)[one % len(ODD)], half, full]
    values = torch.stack(kinds).gather(0, kind.long()[None]).flatten()
    return torch.where(values.isnan(), 1.0, values)


@st.composite
def tensors(draw: st.DrawFn) -> Case:
    """One to three matrices of hard values in one dtype, and which weights compete."""
    dtype = draw(st.sampled_from(DTYPES))
    scores, alive = {}, {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        shape = (draw(st.integers(1, 5)), draw(st.integers(1, 7)))
        size = math.prod(shape)
        scores[name] = values_from(draw(st.binary(min_size=SIZE * size, max_size=SIZE * size))).to(dtype).view(shape)
        living = torch.frombuffer(bytearray(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8) % 2 == 0
        alive[name] = living.view(shape) if draw(st.booleans()) else torch.ones(shape, dtype=torch.bool)
    return scores, alive


SPARSITY = st.one_of(st.floats(0, 0.999), st.sampled_from((0.0, 0.25, 0.5, 0.75)))


@pytest.mark.slow
@settings(max_examples=4000)
@given(tensors(), SPARSITY)
def test_model_scope_is_a_stable_sort(case: Case, sparsity: float) -> None:
    scores, alive = case
    expected = oracle.select_model(scores, sparsity, alive)
    found = sc.select(scores, sparsity, alive=alive)
    assert all(torch.equal(found[name], expected[name]) for name in scores)


def test_a_bracket_that_ends_at_minus_zero() -> None:
    """Zeros count as inside it, because -0.0 equals 0.0; the range of keys must have them too."""
    scores, alive = {"a": torch.tensor([-1.5] * 7 + [-0.0, 0.0])}, {"a": torch.ones(9, dtype=torch.bool)}
    with mock.patch.object(exact, "_bracket", return_value=(-0x1000001, -1)):
        found = sc.select(scores, 0.875)
    assert torch.equal(found["a"], oracle.select_model(scores, 0.875, alive)["a"])


@pytest.mark.slow
@settings(max_examples=4000)
@given(tensors(), SPARSITY, st.integers(1, 9), st.integers(0, 12), st.integers(LOWEST_KEY, HIGHEST_KEY))
def test_any_chunking_and_any_bracket_give_the_same_mask(
    case: Case, sparsity: float, chunk: int, room: int, low: int
) -> None:
    """Tiny chunks, no room to collect, and a bracket that is wrong on purpose: the fallback must be exact too."""
    scores, alive = case
    bracket = (low, min(HIGHEST_KEY, low + 0x1000000))
    with (
        mock.patch.object(exact, "CHUNK", chunk),
        mock.patch.object(exact, "COLLECTED", room),
        mock.patch.object(exact, "_bracket", return_value=bracket),
    ):
        found = sc.select(scores, sparsity, alive=alive)
    expected = oracle.select_model(scores, sparsity, alive)
    assert all(torch.equal(found[name], expected[name]) for name in scores)


@pytest.mark.slow
@settings(max_examples=1500)
@given(tensors(), SPARSITY)
def test_layer_scope_is_exact_per_tensor(case: Case, sparsity: float) -> None:
    scores, alive = case
    found = sc.select(scores, sparsity, scope="layer", alive=alive)
    for name, tensor in scores.items():
        assert torch.equal(found[name], oracle.select_model({name: tensor}, sparsity, alive)[name])


@pytest.mark.slow
@settings(max_examples=1500)
@given(tensors(), SPARSITY)
def test_row_scope_is_exact_per_row(case: Case, sparsity: float) -> None:
    scores, alive = case
    found = sc.select(scores, sparsity, scope="row", alive=alive)
    for name, tensor in scores.items():
        expected = oracle.select_groups(tensor, round(sparsity * tensor.shape[1]), alive[name])
        assert torch.equal(found[name], expected)


@pytest.mark.slow
@settings(max_examples=1000)
@given(tensors(), SPARSITY)
def test_no_kept_score_is_below_a_pruned_one(case: Case, sparsity: float) -> None:
    scores, alive = case
    masks = sc.select(scores, sparsity, alive=alive)
    gone = torch.cat([scores[n][alive[n] & ~masks[n]].float() for n in scores])
    kept = torch.cat([scores[n][masks[n]].float() for n in scores])
    assert not any(bool((masks[name] & ~alive[name]).any()) for name in scores)
    assert not (len(gone) and len(kept)) or float(gone.max()) <= float(kept.min())


@settings(max_examples=500)
@given(st.lists(VALUES, min_size=1, max_size=30))
def test_keys_order_as_floats_do(values: list[float]) -> None:
    scores = torch.tensor(values, dtype=torch.float32)
    keys = keys_of(scores)
    assert torch.equal(keys[:, None] < keys, scores[:, None] < scores)
    assert all(value_of(int(key)) == value for key, value in zip(keys, scores.tolist(), strict=True))
    assert torch.equal(values_of(keys), scores)


@given(st.lists(st.booleans(), max_size=40))
def test_places_of_is_nonzero(values: list[bool]) -> None:
    sparse = torch.tensor(values, dtype=torch.bool)
    assert torch.equal(places_of(sparse), sparse.nonzero().flatten())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sparsity", [0.001, 0.3, 0.8, 0.999])
def test_large_tensors_take_the_sampled_way_and_agree(dtype: torch.dtype, sparsity: float) -> None:
    scores = {"a": torch.randn(1200, 1000).to(dtype), "b": (torch.randn(700, 1000) * 3).abs().to(dtype)}
    alive = {name: torch.rand(tensor.shape) > 0.3 for name, tensor in scores.items()}
    for living in (alive, {name: torch.ones_like(mask) for name, mask in alive.items()}):
        found = sc.select(scores, sparsity, alive=living)
        expected = oracle.select_model(scores, sparsity, living)
        assert all(torch.equal(found[name], expected[name]) for name in scores)


def test_a_sample_that_misleads_costs_time_and_nothing_else() -> None:
    scores = torch.rand(1 << 20)
    scores[torch.arange(scores.numel()) % 16 < 8] += 100  # neighbours alike: runs are worth little here
    mask = sc.select({"a": scores}, 0.5)["a"]
    assert torch.equal(mask, oracle.remove_lowest(scores, scores.numel() // 2, torch.ones_like(mask)))


def test_all_equal_goes_in_flat_order() -> None:
    masks = sc.select({"a": torch.zeros(4, 5), "b": torch.zeros(4, 5)}, 0.6)
    flat = torch.cat([masks["a"].flatten(), masks["b"].flatten()])
    assert torch.equal(flat, torch.arange(40) >= 24)


def test_strided_and_expanded_scores_need_no_copy_and_agree() -> None:
    base = torch.randn(6, 8)
    for view in (base.t(), base[:, ::2], torch.randn(8).expand(6, 8)):
        assert torch.equal(sc.select({"a": view}, 0.4)["a"], sc.select({"a": view.contiguous()}, 0.4)["a"])


def test_nan_names_the_tensor() -> None:
    scores = {"fine": torch.ones(3, 3), "layer.7": torch.tensor([[1.0, math.nan], [2.0, math.nan]])}
    for scope in ("model", "layer", "row"):
        with pytest.raises(ScoreError, match=r"NaN scores in 'layer.7' \(2\).*No mask was changed"):
            sc.select(scores, 0.5, scope=scope)
    dead = {"layer.7": ~scores["layer.7"].isnan()}
    assert int(sc.select(scores, 0.5, alive=dead)["layer.7"].sum()) <= 2


def test_nan_in_a_sampled_selection_is_named() -> None:
    """Large enough that a sample, itself full of NaN, is drawn first."""
    scores = torch.rand(1000, 1000)
    scores[:, ::2] = math.nan
    with pytest.raises(ScoreError, match=r"NaN scores in 'a' \(500000\)"):
        sc.select({"a": scores}, 0.9)


def test_nothing_is_modified() -> None:
    scores, alive = {"a": torch.randn(9, 9)}, {"a": torch.rand(9, 9) > 0.5}
    before = scores["a"].clone(), alive["a"].clone()
    state = torch.random.get_rng_state()
    sc.select(scores, 0.7, alive=alive)
    assert torch.equal(scores["a"], before[0])
    assert torch.equal(alive["a"], before[1])
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("sparsity", [-0.1, 1.0, 50, math.nan, True])
def test_sparsity_outside_its_range_is_refused(sparsity: float) -> None:
    with pytest.raises(ScheduleError, match=r"in \[0, 1\)"):
        sc.select({"a": torch.ones(2, 2)}, sparsity)


def test_dtypes_that_would_lose_order_are_refused() -> None:
    with pytest.raises(PatternError, match="'a' is torch.float64"):
        sc.select({"a": torch.ones(2, 2, dtype=torch.float64)}, 0.5)


@pytest.mark.slow
def test_counts_past_two_to_the_31() -> None:
    """More scores than int32 can count, all walked through and none stored: one chunk of keys is handed out again and
    again. The cut lies past 2^31 of them."""
    chunk = torch.zeros(1 << 21, dtype=torch.int32)
    chunk[-512:] = 1  # the key of the smallest subnormal
    repeats = 1025
    zeros = repeats * (chunk.numel() - 512)
    assert zeros > 2**31
    key, ties = exact.locate(lambda: (chunk for _ in range(repeats)), zeros + 7, low=0, high=1)
    assert (key, ties) == (1, 7)


def test_quotas_past_two_to_the_31() -> None:
    """Ties are counted in int64: three tensors that claim 2^31 equal scores each."""
    device = torch.device("cpu")
    claims = [ScoredTensor(name, 0, 2**31, lambda where: torch.empty(0), device) for name in "abc"]
    assert exact._quotas(claims, [2**31] * 3, 2**32 + 5, ALONE) == [2**31, 2**31, 5]


def test_positions_past_two_to_the_31() -> None:
    """The last chunk of an expanded tensor past 2^31 is read where it is."""
    tall = torch.arange(1024.0).expand(2**21 + 2, 1024)
    where = slice(2**31 + 1000, 2**31 + 1030)
    assert torch.equal(exact.flat_part(tall, where), (torch.arange(1000, 1030) % 1024).float())
    assert torch.equal(exact.flat_part(tall, torch.tensor([2**31 + 5])), torch.tensor([5.0]))


def test_sampled_cut_is_close_but_not_exact() -> None:
    scores = {"a": torch.rand(300, 1000), "b": torch.rand(200, 1000)}
    total = 500_000
    for per_tensor in (False, True):
        cut = sc.selection.sampled_cut(scores, 0.5, per_tensor=per_tensor, seed=3)
        assert cut == sc.selection.sampled_cut(scores, 0.5, per_tensor=per_tensor, seed=3)
        gone = sum(int((tensor <= cut).sum()) for tensor in scores.values())
        assert abs(gone / total - 0.5) < 0.03
        assert gone != total // 2


def test_a_replicated_tensor_is_counted_by_the_first_process_alone() -> None:
    scored = ScoredTensor("a", 1, 1, lambda where: torch.ones(1), torch.device("cpu"), replicated=True)
    peers: list[Any] = [SimpleNamespace(rank=rank) for rank in range(3)]
    assert [scored.counted(one) for one in peers] == [True, False, False]
    sharded = ScoredTensor("a", 1, 1, lambda where: torch.ones(1), torch.device("cpu"))
    assert all(sharded.counted(one) for one in peers)


def test_an_empty_alive_mask_of_numpys_is_taken() -> None:
    """NumPy gives an empty array a stride of zero."""
    np = pytest.importorskip("numpy", reason="numpy is not installed")
    scores = {"a": torch.zeros(0), "b": torch.arange(4.0)}
    masks = sc.select(scores, 0.5, alive={"a": torch.from_numpy(np.random.default_rng(0).random(0) > 0.5)})
    assert masks["b"].tolist() == [False, False, True, True]


def test_a_tensor_with_bits_for_a_mask_becomes_one_with_bools() -> None:
    alive = torch.rand(45) > 0.5
    packed = ScoredTensor("a", 45, 45, lambda where: torch.arange(45.0)[where], torch.device("cpu"), to_bits(alive))
    plain = packed.unpacked()
    assert plain.alive is not None
    assert torch.equal(plain.alive, alive)
    assert plain.unpacked() is plain
    assert plain.living() == int(alive.sum())


def test_where_the_cut_lies_beside_a_bracket() -> None:
    """Both ends of the bracket were counted inside it, and are not looked at again outside."""
    assert exact.narrowed((10, 20), 3, 3, 4) == (LOWEST_KEY, 9, 3)
    assert exact.narrowed((10, 20), 4, 3, 4) == (10, 20, 1)
    assert exact.narrowed((10, 20), 7, 3, 4) == (10, 20, 4)
    assert exact.narrowed((10, 20), 8, 3, 4) == (21, HIGHEST_KEY, 1)
