"""Packing is the identity there and back; applying zeroes what is gone and nothing else."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from secateur.bits import pack, packed_bytes, unpack
from secateur.masks import apply, checksum


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
    for tensor in (torch.ones(2, 2), torch.ones(2, 2).bfloat16(), torch.ones(2, 2).t()):
        pointer = tensor.data_ptr()
        apply([tensor], [mask])
        assert tensor.tolist() == [[1, 0], [0, 1]]
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
