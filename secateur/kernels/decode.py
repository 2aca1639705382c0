"""Sparse weights as GPUs decode them: streams of values with short column indices, made from a packed weight.

Work on a GPU is bound by instructions per value kept, not by bytes alone, so nothing here is stored per position. A row
is cut into segments of `width` columns. The values of a segment form a stream of groups of 16, and a group is what one
thread reads: 16 values, 16 indices and, for gaps, the column of its first value. Two kinds of index:

- gaps (`bits` 4 or 8): the distance from the value before. A wider gap is bridged by entries with value zero.
- cells (4 bits): the column inside its cell of 16, for weights with at most 1, 2, 4 or 8 values in each cell (n:16).

The kind with the fewest bytes is taken. `streams_of` converts exactly, a block of rows at a time; `dense_of` reads the
same streams in plain torch and is the twin of the kernels in decode_triton.py. Files never hold streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from secateur.kernels.table import FLOATS
from secateur.selection import masks

ENTRIES = 16  # in a group
CELL = 16  # columns in a cell
PART, PART_ON_GPU = 1 << 22, 1 << 24  # positions converted at a time; a GPU needs more to be busy
CHUNK = 64  # columns in which entries are counted before the width is chosen; widths are multiples of it
WIDEST = 2048  # columns of a segment: their inputs are staged in shared memory
GROUPS = (32, 16, 8)  # groups that a segment may have at most; fewer only if that saves CLEARLY
CLEARLY = 0.95
ROWS = 8  # that share one staging of inputs, for the choice of the width
STARTS = 40  # bits of `starts` that hold where a stream begins; those above hold its length
SHORT = 1 << 16  # columns up to which 16 bits hold the column of a group
SHARES = 16  # of the work for each multiprocessor, at least
SHARE, SHARE_ROWS = 1024, 128  # groups and rows that a share has at most
ROW_COST = 2  # groups that take as long as adding up a row does
TRITON, CUDA = 0, 1  # kernels


@dataclass(frozen=True)
class Form:
    """How a weight is cut into streams, and how the kernel is launched."""

    rows: int
    columns: int
    width: int  # columns of a segment
    groups: int  # power of two that no stream exceeds
    bits: int  # of an index
    cell: int = 0  # values in a cell of 16 columns; 0: indices are gaps
    share: int = 0  # groups that no share exceeds; 0: there are no shares
    share_rows: int = 0  # rows that no share exceeds
    kernel: int = TRITON  # or CUDA, for which the next three mean what stands in brackets
    tile: int = ROWS  # rows of a program (threads of a block)
    warps: int = 4  # (blocks of a multiprocessor)
    stages: int = 2  # segments in flight (groups that a thread reads ahead)
    copies: int = 1  # (of the inputs in shared memory, at most)

    @property
    def segments(self) -> int:
        """In a row."""
        return -(-self.columns // self.width)

    def numbers(self) -> list[int]:
        """As the arguments of a torch op."""
        return [
            self.rows, self.columns, self.width, self.groups, self.bits, self.cell, self.share, self.share_rows,
            self.kernel, self.tile, self.warps, self.stages, self.copies,
        ]  # fmt: skip


@dataclass(frozen=True)
class Streams:
    """A weight in this form. Planes lie apart, so that neighbouring threads read neighbouring memory."""

    form: Form
    values: tuple[Tensor, ...]  # int32 [groups, 4], two 16-bit values a word; or four of fp32 or int8 [groups, 4]
    indices: tuple[Tensor, ...]  # int32 [groups], 32 bits of indices each
    bases: Tensor  # [groups]: column of the first value, in the bits of int16 up to SHORT columns, otherwise int32;
    # empty for cells
    starts: Tensor  # int64 [rows * segments]: where the stream begins, and above STARTS bits its number of groups
    shares: Tensor  # int32 [shares + 1, 2]: row and group at which each share of the work begins, and the ends
    dtype: torch.dtype  # of the values

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return (*self.values, *self.indices, self.bases, self.starts, self.shares)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def launched(self, kernel: int, tile: int, warps: int, stages: int, copies: int = 1) -> Streams:
        """The same streams with other launch settings."""
        form = replace(self.form, kernel=kernel, tile=tile, warps=warps, stages=stages, copies=copies)
        return replace(self, form=form)


def can_stream(dtype: torch.dtype, scaled: bool) -> bool:
    """Whether values of this dtype can be streamed; int8 values need a scale a row."""
    return dtype == torch.int8 if scaled else dtype in FLOATS


@torch.no_grad()
def streams_of(
    values: Tensor, mask: Tensor, columns: int, *, kinds: tuple[str, ...] = ("cells", "4", "8"), processors: int = 1
) -> Streams:
    """The streams of a packed weight: its values row by row, and a bit mask of [rows, ceil(columns / 8)].

    The weight has at least one row and one column. `kinds` limits the choice: cells, and gaps of 4 or 8 bits. Shares
    of the work are a multiple of `processors`.
    """
    found = [_plan_cells(mask, columns, values.itemsize)] if "cells" in kinds else []
    found += [_plan_gaps(mask, columns, values.itemsize, int(kind)) for kind in kinds if kind in ("4", "8")]
    _, form = min((plan for plan in found if plan is not None), key=lambda plan: plan[0])
    parts, first = [], 0
    for kept in _blocks(mask, columns):
        count = int(kept.sum())
        mine = values[first : first + count]
        parts.append(_cells(form, kept, mine) if form.cell else _gaps(form, kept, mine))
        first += count
    entries, codes, bases, counts = (torch.cat(part) for part in zip(*parts, strict=True))
    starts = counts.cumsum(0) - counts | counts << STARTS
    bases = bases.to(torch.int32 if columns > SHORT else torch.int16)
    form, shares = shares_of(starts, form, processors)
    return Streams(
        form, _value_planes(entries), _index_planes(codes, form.bits), bases, starts, shares, values.dtype
    )  # fmt: skip


def shares_of(starts: Tensor, form: Form, processors: int) -> tuple[Form, Tensor]:
    """Cuts the rows into shares of about equal work; none if a row is too long for a share."""
    begin = starts.view(form.rows, form.segments)[:, 0] & (1 << STARTS) - 1
    groups = torch.cat((begin, (starts & (1 << STARTS) - 1)[-1:] + (starts >> STARTS)[-1:]))
    if int(groups.diff().max()) > SHARE:
        return form, starts.new_empty(0, 2, dtype=torch.int32)
    work = groups + ROW_COST * torch.arange(form.rows + 1, device=starts.device)
    least = max(int(groups[-1]) / SHARE, form.rows / SHARE_ROWS, SHARES * processors)
    number = -int(-least // processors) * processors
    while True:  # ends at the latest when every row is a share of its own
        wanted = torch.arange(number + 1, device=starts.device) * work[-1] // number
        found = torch.searchsorted(work, wanted)
        before = (found - 1).clamp_(min=0)
        rows = torch.where(wanted - work[before] < work[found] - wanted, before, found)
        made = torch.stack((rows, groups[rows]), 1)
        share_rows, share = made.diff(dim=0).amax(0).tolist()
        if share <= SHARE and share_rows <= SHARE_ROWS:
            return replace(form, share=share, share_rows=share_rows), made.int()
        number += max(processors, number // 16 // processors * processors)


def _blocks(mask: Tensor, columns: int) -> Iterator[Tensor]:
    """Blocks of rows: which of their weights are kept, bool [rows, columns]."""
    positions = PART_ON_GPU if mask.is_cuda else PART
    for part in mask.split(max(1, positions // columns)):
        yield masks.unpack(part, (part.shape[0], columns))


# Which form: the fewest bytes, then segments as wide as streams of at most 32 groups allow


def _plan_gaps(mask: Tensor, columns: int, itemsize: int, bits: int) -> tuple[int, Form]:
    """Bytes of the streams and their form."""
    upto = torch.cat([_entries_upto(kept, bits) for kept in _blocks(mask, columns)])
    entries = int(upto[:, -1].sum())
    width, groups = _width(upto, columns, CHUNK)
    streams = -(-columns // width) * mask.shape[0]
    total = entries // ENTRIES + streams // 2  # the last group of a stream is half empty
    return total * (ENTRIES * (8 * itemsize + bits) // 8 + 2), Form(mask.shape[0], columns, width, groups, bits)


def _entries_upto(kept: Tensor, bits: int) -> Tensor:
    """Entries up to every CHUNK of columns, int32 [rows, chunks + 1]; a few too many where segments will begin."""
    rows, columns = kept.shape
    row, column = kept.nonzero(as_tuple=True)
    weight = 1 + _bridges(_distance(row, column), bits)
    chunks = -(-columns // CHUNK)
    counts = torch.zeros(rows * chunks, dtype=torch.int64, device=kept.device)
    counts.scatter_add_(0, row * chunks + column // CHUNK, weight)
    return torch.nn.functional.pad(counts.view(rows, chunks).cumsum(1), (1, 0)).int()


def _distance(stream: Tensor, column: Tensor) -> Tensor:
    """From the value before in its stream; zero for the first of a stream."""
    gap = column.diff(prepend=column[:1])
    return torch.where(stream == stream.roll(1), gap, 0).index_fill_(0, stream.new_zeros(min(1, stream.numel())), 0)


def _bridges(gap: Tensor, bits: int) -> Tensor:
    """How many entries of value zero stand before a value at this distance."""
    return (gap - 1).clamp_(min=0) // ((1 << bits) - 1)


def _width(upto: Tensor, columns: int, step: int) -> tuple[int, int]:
    """Columns of a segment and the groups that its streams have at most, with the least work for the kernel.

    A program computes all groups it has room for and stages the inputs of a segment once for its rows.
    """
    best: tuple[float, int, int] | None = None
    for groups in GROUPS:
        fits = max(step, ENTRIES * groups // step * step)  # that many values always fit
        width = WIDEST // step * step
        while width > fits and not _fits(upto, width, groups):
            width -= step
        segments = -(-columns // width)
        width = -(-columns // (segments * step)) * step  # all segments alike
        staged = 1 << (width - 1).bit_length()
        cost = segments * (10.0 * ENTRIES * groups + 3.0 * staged / ROWS)
        if best is None or cost < CLEARLY * best[0]:
            best = (cost, width, groups)
    assert best is not None
    return best[1], best[2]


def _fits(upto: Tensor, width: int, groups: int) -> bool:
    """Whether no stream has more than this many groups, were segments this wide."""
    every = width // CHUNK
    ends = torch.cat((upto[:, ::every], upto[:, -1:]), 1)
    return int(ends.diff(dim=1).max()) <= ENTRIES * groups


def _plan_cells(mask: Tensor, columns: int, itemsize: int) -> tuple[int, Form] | None:
    """The same for cells, or None if some cell has more than 8 values."""
    most = max(int(_in_cells(kept).sum(2).max()) for kept in _blocks(mask, columns))
    if most > CELL // 2:
        return None
    cell = 1 << (max(1, most) - 1).bit_length()
    step = CELL * ENTRIES // cell  # columns of a group
    segments = -(-columns // min(WIDEST, 32 * step))
    width = -(-columns // (segments * step)) * step
    groups = max(GROUPS[-1], 1 << (width // step - 1).bit_length())
    total = mask.shape[0] * -(-columns // step)
    return total * (ENTRIES * (8 * itemsize + 4) // 8), Form(mask.shape[0], columns, width, groups, 4, cell)


def _in_cells(kept: Tensor) -> Tensor:
    return torch.nn.functional.pad(kept, (0, -kept.shape[1] % CELL)).view(kept.shape[0], -1, CELL)


# Conversion of a block of rows: entries [groups, 16], their codes, the column of each group, groups of each stream


def _gaps(form: Form, kept: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row, column = kept.nonzero(as_tuple=True)
    stream, local = row * form.segments + column // form.width, column % form.width
    gap = _distance(stream, local)
    bridges = _bridges(gap, form.bits)
    entries = torch.zeros(kept.shape[0] * form.segments, dtype=torch.int64, device=kept.device)
    entries.scatter_add_(0, stream, 1 + bridges)
    counts = -(-entries // ENTRIES)
    moved = ENTRIES * (counts.cumsum(0) - counts) - (entries.cumsum(0) - entries)  # by the padding of streams before
    slot = (1 + bridges).cumsum(0) - 1 + moved[stream]
    last = torch.zeros_like(entries).scatter_reduce_(0, stream, local, "amax")
    places = last.repeat_interleave(ENTRIES * counts)  # the rest of the last group stays at the last column
    places[slot] = local
    many = bridges.nonzero().squeeze(1)
    owner = many.repeat_interleave(bridges[many])
    number = torch.arange(owner.numel(), device=kept.device) - (bridges.cumsum(0) - bridges)[owner]
    places[slot[owner] - bridges[owner] + number] = (local - gap)[owner] + (number + 1) * ((1 << form.bits) - 1)
    stored = values.new_zeros(places.numel())
    stored[slot] = values
    places = places.view(-1, ENTRIES)
    codes = places.diff(dim=1, prepend=places[:, :1])
    segment = torch.arange(counts.numel(), device=kept.device).repeat_interleave(counts) % form.segments
    return stored.view(-1, ENTRIES), codes, places[:, 0] + segment * form.width, counts


def _cells(form: Form, kept: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    step = CELL * ENTRIES // form.cell
    cells = _in_cells(torch.nn.functional.pad(kept, (0, -form.columns % step)))
    rows, number, _ = cells.shape
    rank = cells.cumsum(2) - 1
    row, cell, column = cells.nonzero(as_tuple=True)
    slot = (row * number + cell) * form.cell + rank[row, cell, column]
    stored, codes = values.new_zeros(rows * number * form.cell), slot.new_zeros(rows * number * form.cell)
    stored[slot], codes[slot] = values, column
    widths = [min(form.width, form.columns - first) for first in range(0, form.columns, form.width)]
    counts = slot.new_tensor([-(-width // step) for width in widths]).repeat(rows)
    return stored.view(-1, ENTRIES), codes.view(-1, ENTRIES), slot.new_empty(0), counts


def _value_planes(entries: Tensor) -> tuple[Tensor, ...]:
    """Quarters of the groups; of 16-bit values, quarters 0 and 1 in the halves of a word, and 2 and 3."""
    quarters = entries.view(-1, 4, 4).unbind(1)
    if entries.itemsize != 2:
        return tuple([quarter.contiguous() for quarter in quarters])
    pairs = (torch.stack(quarters[plane : plane + 2], -1).view(torch.int16) for plane in (0, 2))
    return tuple([pair.contiguous().view(torch.int32).squeeze(-1) for pair in pairs])


def _index_planes(codes: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Words of 32 bits, the first code in the lowest bits."""
    data = codes.to(torch.uint8)
    if bits == 4:
        data = data[:, 0::2] | (data[:, 1::2] << 4)
    return tuple([word.contiguous() for word in data.contiguous().view(torch.int32).unbind(1)])


# The twin


def _entries_of(streams: Streams) -> Tensor:
    """The values in groups: [groups, 16]."""
    if len(streams.values) == 4:
        return torch.stack(streams.values, 1).flatten(1)
    halves = [plane.unsqueeze(-1).view(torch.int16).unbind(-1) for plane in streams.values]
    return torch.stack([half for pair in halves for half in pair], 1).flatten(1).view(streams.dtype)


def columns_of(streams: Streams) -> Tensor:
    """The column of every entry: int64 [groups, 16]."""
    form = streams.form
    data = torch.stack(streams.indices, 1).view(torch.uint8)
    codes = (torch.stack((data & 15, data >> 4), -1).flatten(1) if form.bits == 4 else data).long()
    if not form.cell:
        bases = streams.bases.long()
        return (bases & SHORT - 1 if streams.bases.dtype == torch.int16 else bases)[:, None] + codes.cumsum(1)
    counts = streams.starts >> STARTS
    group = torch.arange(codes.shape[0], device=codes.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    entry = group[:, None] * ENTRIES + torch.arange(ENTRIES, device=codes.device)
    segment = torch.arange(counts.numel(), device=codes.device).repeat_interleave(counts) % form.segments
    return entry // form.cell * CELL + codes + (segment * form.width)[:, None]


@torch.no_grad()
def dense_of(streams: Streams) -> Tensor:
    """The dense weight in the dtype of the values, to the bit: what the kernel multiplies by."""
    form, device = streams.form, streams.starts.device
    stream = torch.arange(form.rows * form.segments, device=device).repeat_interleave(streams.starts >> STARTS)
    padded = form.segments * form.width  # cells may reach beyond the last column, with value zero
    weight = torch.zeros(form.rows * padded, dtype=streams.dtype, device=device)
    place = (stream // form.segments * padded)[:, None] + columns_of(streams)
    weight.scatter_add_(0, place.flatten(), _entries_of(streams).flatten())  # entries of value zero add nothing
    return weight.view(form.rows, padded)[:, : form.columns].contiguous()


def reference(x: Tensor, streams: Streams, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """x @ weight.T * scale + bias, computed in fp32: the twin of the kernel."""
    result = x.float() @ dense_of(streams).float().T
    result = result if scale is None else result * scale
    return (result if bias is None else result + bias.float()).to(x.dtype)
