"""Packing is the identity there and back; applying zeroes what is gone and nothing else."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secateur.model.masks import Held
from secateur.scores import mixed
from secateur.selection import masks
from secateur.selection.masks import apply, as_bool, checksum, from_bits, inverted, pack, packed_bytes, to_bits, unpack


@given(st.lists(st.integers(0, 5), min_size=2, max_size=4), st.integers(0, 2**30))
def test_pack_and_unpack(shape: list[int], seed: int) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.5
    packed = pack(mask)
    assert packed.dtype == torch.uint8
    assert packed.nbytes == packed_bytes(shape)
    assert torch.equal(unpack(packed, shape), mask)


def test_a_mask_takes_an_eighth_of_a_byte() -> None:
    assert pack(torch.ones(100, 800, dtype=torch.bool)).nbytes == 10_000


def test_apply_is_in_place_for_any_dtype_and_stride() -> None:
    mask = torch.tensor([[True, False], [False, True]])
    one = torch.ones(2, 2)
    for tensor in (one.clone(), one.bfloat16(), one.clone().t(), one.double(), one.to(torch.float8_e4m3fn)):
        pointer = tensor.data_ptr()
        apply([tensor], [mask])
        assert tensor.float().tolist() == [[1, 0], [0, 1]]
        assert tensor.data_ptr() == pointer
    apply([], [])


def test_checksums_tell_masks_apart() -> None:
    mask = torch.rand(40, 50) > 0.5
    moved = mask.flatten().roll(1).view(40, 50)
    assert checksum([mask, mask]) == checksum([mask.clone(), mask.clone()])
    assert checksum([mask, ~mask]) != checksum([~mask, mask])
    assert checksum([mask]) != checksum([moved])


def test_checksums_are_not_fooled_by_sums_of_positions() -> None:
    assert checksum([torch.tensor([False, True, True, False])]) != checksum([torch.tensor([True, False, False, True])])


def test_infinities_are_zeroed_too() -> None:
    tensor = torch.tensor([torch.inf, -torch.inf, torch.nan, -1.0])
    apply([tensor], [torch.zeros(4, dtype=torch.bool)])
    assert torch.equal(tensor.view(torch.int32), torch.zeros(4, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (2, 9), (1, 40), (12,), (2, 3, 2), (0, 3), (3, 0), (1, 1)])
def test_large_tensors_are_masked_in_parts(shape: tuple[int, ...]) -> None:
    """As many rows at a time as make a part, but one at least."""
    tensor, mask = torch.ones(shape), torch.rand(shape) > 0.5
    wide = max(1, mask[:1].numel())
    with mock.patch.object(masks, "PART", 8), mock.patch.object(torch, "_foreach_mul_") as multiply:
        apply([tensor], [mask])
    parts, kept = multiply.call_args.args
    rows = max(1, 8 // wide) if mask.numel() else max(1, shape[0])
    assert [part.shape for part in parts] == [part.shape for part in mask.split(rows)]
    assert all(torch.equal(part, right) for part, right in zip(kept, mask.split(rows), strict=True))
    with mock.patch.object(masks, "PART", 8):
        apply([tensor], [mask])
    assert torch.equal(tensor, mask.float())


def test_a_checksum_adds_the_hashes_of_all_that_is_gone() -> None:
    """Positions are counted through all masks, also past the parts a mask is read in."""
    found = [torch.rand(300, 1000) > 0.5, torch.rand(7) > 0.5]
    gone = (~torch.cat([mask.flatten() for mask in found])).nonzero().flatten()
    assert checksum(found) == int(mixed(gone).sum())


def test_the_hash_is_the_same_everywhere() -> None:
    """Random scores and the marks of saved rows rely on it."""
    numbers = torch.tensor([0, 1, 2, 3, 255, 2**31, 2**40 + 5])
    expected = [0, 1753845952, 3507691905, 1408362973, 3007594116, 3427483940, 3811616505]
    assert mixed(numbers).tolist() == expected


def test_flat_bits_by_hand() -> None:
    mask = torch.tensor([True, False, True])
    assert to_bits(mask).tolist() == [5, 0, 0, 0]
    assert inverted(to_bits(mask), 3).tolist() == [2, 0, 0, 0]
    assert inverted(mask, 3).tolist() == [False, True, False]
    whole = torch.ones(32, dtype=torch.bool)
    assert to_bits(whole).tolist() == [255] * 4
    assert inverted(to_bits(~whole), 32).tolist() == [255] * 4
    longer = torch.arange(40) % 3 == 0
    assert to_bits(longer).numel() == 8
    assert inverted(to_bits(longer), 40).tolist() == to_bits(~longer).tolist()
    assert inverted(to_bits(longer), 40).tolist()[5:] == [0, 0, 0]
    assert torch.equal(from_bits(to_bits(longer), 40), longer)
    for held in (longer, to_bits(longer)):
        assert torch.equal(as_bool(held, (5, 8)), longer.view(5, 8))


def test_how_many_weights_would_come_back() -> None:
    held = Held([torch.ones(2, 3), torch.ones(4)])
    gone = [torch.tensor([True, False, False, True, True, False]), torch.ones(4, dtype=torch.bool)]
    held.take([mask.clone() for mask in gone])
    back = [torch.tensor([False, True, False, True, True, True]), torch.tensor([True, False, True, True])]
    assert held.returning(back) == [2, 0]
