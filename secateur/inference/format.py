"""Packed weights in safetensors files: a bit mask and the values that are not zero, exact to the bit.

A weight NAME is stored as up to three tensors. `NAME` holds the values row by row in one dimension, so that a program
that does not know the format finds a shape that does not fit and stops. `NAME_mask` holds one bit a weight, uint8
[rows, ceil(rest / 8)], the lowest bit of a byte first; `NAME_groups` instead holds the same in fewer bits where zeros
are in n:m patterns (secateur.inference.groups). `NAME_scale` (int8 values only) holds an fp32 scale a row. The metadata
has a version, the shape and dtype of every packed weight, and a SHA-256 of every tensor of all shards. Negative zero is
zero: it comes back as 0.0. safetensors is imported when a file is read.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from secateur.errors import HF_EXTRA, ModelError, library
from secateur.files import read_json
from secateur.inference import groups
from secateur.inference.groups import Groups
from secateur.model.masks import MASKS
from secateur.selection import masks

# A file has the lowest version that can read it: 2 if it has groups or transposed weights.
VERSION, NEWEST = 1, 2
KEY, DIGEST = "secateur", "secateur_sha256"  # in the metadata: what the file holds, and the hash of that text
MASK, GROUPS, SCALE = "_mask", "_groups", "_scale"
PARTS = (MASK, GROUPS, SCALE)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = 5 * 10**9  # bytes in a file before the next is begun
ALIGNED = 64  # bytes to which torch aligns tensors
LARGEST = 127  # int8
AGAIN = "Save the model again, or fetch the file again."
PACKABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Packed:
    """One weight without its zeros."""

    values: Tensor  # [number kept], row by row, in the weight's dtype; int8 if there is a scale
    mask: Tensor  # uint8 [rows, ceil(rest / 8)]
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: Tensor | None = None  # fp32 [rows]
    transposed: bool = False  # the weight is [inputs, outputs], as GPT-2's are; its rows here are outputs

    @property
    def nbytes(self) -> int:
        """Bytes of mask, values and scales, in memory."""
        return self.values.nbytes + self.mask.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def dense(self) -> Tensor:
        """The weight with its zeros."""
        weight = unpacked(self.values, self.mask, self.scale, self.shape, self.dtype)
        return weight.T.contiguous() if self.transposed else weight

    @property
    def groups(self) -> Groups | None:
        """n and m if a file holds the mask as n:m groups."""
        return None if self.mask.is_meta else groups.shortest(self.mask, math.prod(self.shape[1:]))

    def parts(self, name: str) -> dict[str, Tensor]:
        """The tensors that a file holds for this weight."""
        found, short = {name: self.values}, self.groups
        if short is None:
            found[name + MASK] = self.mask
        else:
            found[name + GROUPS] = groups.encode(self.mask, math.prod(self.shape[1:]), short)
        return found if self.scale is None else {**found, name + SCALE: self.scale}


Weight = Tensor | Packed


@torch.no_grad()
def pack_weight(weight: Tensor, *, int8: bool = False, transposed: bool = False) -> Packed:
    """Drop the zeros of a weight of two or more dimensions. NaN and infinity are kept; -0.0 counts as zero.

    With `int8` the values are rounded to 255 levels a row, the largest of the row being 127 steps. `transposed`: the
    weight is a matrix [inputs, outputs].
    """
    if transposed:
        return replace(pack_weight(weight.T.contiguous(), int8=int8), transposed=True)
    if weight.ndim < 2 or weight.dtype not in PACKABLE:
        raise ModelError(
            f"A tensor of {weight.dtype} {list(weight.shape)} cannot be packed: it must be floating point, of 2 or more"
            " dimensions."
        )
    kept = weight != 0
    values, mask, shape = _selected(weight, kept), masks.pack(kept), tuple(weight.shape)
    if not int8:
        return Packed(values, mask, shape, weight.dtype)
    largest = weight.detach().flatten(1).abs().amax(1).float()
    if not bool(largest.isfinite().all()):
        raise ModelError("A weight with NaN or infinite values cannot be stored as int8. Keep its own dtype.")
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    steps = (values.float() / scale.repeat_interleave(kept.flatten(1).sum(1))).round_()
    return Packed(steps.clamp_(-LARGEST, LARGEST).to(torch.int8), mask, shape, weight.dtype, scale)


def _selected(weight: Tensor, kept: Tensor) -> Tensor:
    """The values that are kept. A part at a time, since torch takes 8 bytes for the place of each."""
    parts = zip(weight.reshape(-1).split(groups.PART), kept.reshape(-1).split(groups.PART), strict=True)
    return torch.cat([part[mine] for part, mine in parts])


@torch.no_grad()
def unpacked(values: Tensor, mask: Tensor, scale: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The dense weight of packed values, on their device, without waiting for it."""
    kept = masks.unpack(mask, shape)
    weight = torch.zeros(tuple(shape), dtype=values.dtype if scale is None else torch.float32, device=values.device)
    weight.masked_scatter_(kept, values if scale is None else values.float())
    if scale is not None:
        weight *= scale.view(-1, *[1] * (len(shape) - 1))
    return weight.to(dtype)


def fault(weight: Packed) -> str:
    """What is inconsistent in a packed weight, in words; empty if nothing is."""
    rows, shape = weight.shape[0], list(weight.shape)
    if len(shape) < 2 or weight.dtype not in PACKABLE:
        return f"a weight of {weight.dtype} {shape} cannot be packed"
    if weight.mask.dtype != torch.uint8 or weight.mask.shape != (rows, -(-math.prod(shape[1:]) // 8)):
        return f"its mask is {weight.mask.dtype} {list(weight.mask.shape)}, which does not fit {shape}"
    if weight.values.ndim != 1 or weight.values.dtype != (weight.dtype if weight.scale is None else torch.int8):
        return f"its values are {weight.values.dtype} {list(weight.values.shape)} for a weight of {weight.dtype}"
    if weight.scale is not None and (weight.scale.dtype != torch.float32 or weight.scale.shape != (rows,)):
        return f"its scales are {weight.scale.dtype} {list(weight.scale.shape)} for {rows} rows"
    columns = math.prod(shape[1:])
    bits = masks.unpack(weight.mask, (rows, 8 * weight.mask.shape[1]))
    if bool(bits[:, columns:].any()):
        return "its mask has bits beyond the end of a row"
    if (found := int(bits.sum())) != weight.values.numel():
        return f"its mask keeps {found:,} weights, and there are {weight.values.numel():,} values"
    return ""


def not_read(version: object) -> str:
    """Why this version of the format is not read; empty if it is."""
    if type(version) is int and VERSION <= version <= NEWEST:
        return ""
    return (
        f"has version {version} of the packed format; this Secateur reads versions {VERSION} to {NEWEST}."
        " Install a newer one."
    )


def smaller(weight: Tensor) -> bool:
    """Whether a tensor can be packed and takes fewer bytes then."""
    if weight.ndim < 2 or weight.dtype not in PACKABLE or not weight.numel():
        return False
    kept = int(torch.count_nonzero(weight))
    return masks.packed_bytes(weight.shape) + kept * weight.element_size() < weight.nbytes


# Writing


class Lazy(Mapping[str, Weight]):
    """Weights made when they are asked for, so that one at a time is in memory."""

    def __init__(self, names: Sequence[str], make: Callable[[str], Weight]) -> None:
        self._names, self._make = names, make

    def __getitem__(self, name: str) -> Weight:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass
class _Part:
    """One tensor of a file that is being written."""

    dtype: torch.dtype
    shape: list[int]
    nbytes: int
    start: int = 0  # in the data of its file
    sha256: str = "0" * 64  # as long as the hash that replaces it, so the header's length is known before


def write_weights(folder: str | os.PathLike[str], weights: Mapping[str, Weight], *, shard: int = SHARD) -> list[str]:
    """Write weights as `model.safetensors`, or as numbered shards with an index; returns the names of the files.

    Each weight is asked for twice, for its size and to be written; no more than one is held. The folder must exist;
    `secateur.files.appearing` gives one that others see only when it is complete.
    """
    folder = Path(folder)
    layout: dict[str, dict[str, _Part]] = {}
    described: dict[str, dict[str, Any]] = {}
    for name in weights:
        layout[name], said = _sized(name, weights[name])
        described |= said
    shards = _sharded(layout, shard)
    files = [SINGLE] if len(shards) == 1 else [_shard_name(number, len(shards)) for number in range(len(shards))]
    for file, names in zip(files, shards, strict=True):
        start = _place(names, layout, described)
        with (folder / file).open("wb") as opened:
            for name in names:
                _write(opened, start, layout[name], name, weights[name])
    for file, names in zip(files, shards, strict=True):  # hashes of all shards are known now
        with (folder / file).open("r+b") as opened:
            opened.write(_header(names, layout, described))
    if len(files) > 1:
        _write_index(folder, files, shards, layout)
    return files


def tensors_of(name: str, weight: Weight) -> dict[str, Tensor]:
    """The tensors that a file holds for a weight."""
    return weight.parts(name) if isinstance(weight, Packed) else {name: weight}


def _sized(name: str, weight: Weight) -> tuple[dict[str, _Part], dict[str, dict[str, Any]]]:
    """The parts of a weight, and what the metadata says about it."""
    parts = {part: _Part(one.dtype, list(one.shape), one.nbytes) for part, one in tensors_of(name, weight).items()}
    if unknown := [part.dtype for part in parts.values() if part.dtype not in CODES]:
        raise ModelError(f"{name} is {unknown[0]}, which safetensors files cannot hold.")
    return parts, {name: describe(weight)} if isinstance(weight, Packed) else {}


def describe(weight: Packed, *, grouped: bool = True) -> dict[str, Any]:
    """What the metadata says about a packed weight; its mask may be `grouped` in files."""
    said: dict[str, Any] = {"shape": list(weight.shape), "dtype": str(weight.dtype).removeprefix("torch.")}
    short = weight.groups if grouped else None
    return said | ({"groups": list(short)} if short else {}) | ({"transposed": True} if weight.transposed else {})


def version_of(described: Mapping[str, Mapping[str, Any]]) -> int:
    """The version of the format that files with these packed weights have."""
    return NEWEST if any("groups" in one or "transposed" in one for one in described.values()) else VERSION


def _sharded(layout: Mapping[str, Mapping[str, _Part]], shard: int) -> list[list[str]]:
    """Names in files of at most `shard` bytes, in order; a weight is never split."""
    found: list[list[str]] = [[]]
    filled = 0
    for name, parts in layout.items():
        size = sum(part.nbytes for part in parts.values())
        if found[-1] and filled + size > shard:
            found.append([])
            filled = 0
        found[-1].append(name)
        filled += size
    return found


def _shard_name(number: int, of: int) -> str:
    return f"model-{number + 1:05d}-of-{of:05d}.safetensors"


def _place(names: Sequence[str], layout: Mapping[str, dict[str, _Part]], described: Mapping[str, Any]) -> int:
    """Give every part of a file its place; returns where data begins. Tensors of whole cache lines come first, aligned
    as torch aligns its own, which changes how some sums are rounded; then large elements, so that all are aligned."""
    start, parts = 0, [one for name in names for one in layout[name].values()]
    for part in sorted(parts, key=lambda one: (one.nbytes % ALIGNED != 0, -one.dtype.itemsize)):
        part.start, start = start, start + part.nbytes
    return len(_header(names, layout, described))


def _header(names: Sequence[str], layout: Mapping[str, Mapping[str, _Part]], described: Mapping[str, Any]) -> bytes:
    """The length and the JSON text that a safetensors file begins with."""
    hashes = {part: one.sha256 for parts in layout.values() for part, one in parts.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata(described, hashes)}}
    for part, one in ((part, one) for name in names for part, one in layout[name].items()):
        place = [one.start, one.start + one.nbytes]
        header[part] = {"dtype": CODES[one.dtype], "shape": one.shape, "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    return len(text).to_bytes(8, "little") + text


def metadata(described: Mapping[str, Any], hashes: Mapping[str, str] | None) -> dict[str, str]:
    """What the metadata of a file says about its packed weights; without hashes, files are not checked by them."""
    text = json.dumps({"version": version_of(described), "weights": described, "sha256": hashes}, separators=(",", ":"))
    return {KEY: text, DIGEST: hashlib.sha256(text.encode()).hexdigest()}


def _write(opened: Any, start: int, parts: Mapping[str, _Part], name: str, weight: Weight) -> None:
    """Write the bytes of a weight to their places, and note their hashes."""
    for part, tensor in tensors_of(name, weight).items():
        tensor = tensor.detach().cpu().contiguous()
        data = _bytes_of(tensor)
        opened.seek(start + parts[part].start)
        opened.write(data)
        parts[part].sha256 = _hash(part, tensor, data)


def _bytes_of(tensor: Tensor) -> Any:
    """The memory of a contiguous CPU tensor, without a copy and without numpy."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""


def _hash(name: str, tensor: Tensor, data: Any) -> str:
    """SHA-256 of a tensor's name, dtype, shape and bytes."""
    found = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    found.update(data)
    return found.hexdigest()


def _write_index(
    folder: Path, files: Sequence[str], shards: Sequence[Sequence[str]], layout: Mapping[str, Mapping[str, _Part]]
) -> None:
    total = sum(part.nbytes for parts in layout.values() for part in parts.values())
    places = {part: file for file, names in zip(files, shards, strict=True) for name in names for part in layout[name]}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


# Reading


def weight_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The safetensors files of a model: one, or those that its index names, or all but the masks."""
    folder = Path(folder)
    if (folder / SINGLE).is_file() or not (folder / INDEX).exists():
        single = folder / SINGLE
        return (
            [single]
            if single.is_file()
            else [path for path in sorted(folder.glob("*.safetensors")) if path.name != MASKS]
        )
    places = read_json(folder / INDEX, dict, ModelError, AGAIN).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ModelError(f"{folder / INDEX} does not say which file holds which tensor. {AGAIN}")
    found = sorted({folder / file for file in places.values()})
    if wrong := [path for path in found if path.parent != folder or not path.is_file()]:
        raise ModelError(f"{folder / INDEX} names {wrong[0].name}, which is not in that folder. {AGAIN}")
    return found


def no_weights(folder: str | os.PathLike[str]) -> ModelError:
    """The error about a folder without safetensors files."""
    advice = "Name a folder that a model was saved in."
    if any(Path(folder).glob("*.bin")):
        advice = "Its .bin files are pickles, which are not read: load it with transformers, then call save_pretrained."
    return ModelError(f"{folder} holds no .safetensors files. {advice}")


class WeightFiles(Mapping[str, Weight]):
    """Weights read from safetensors files one at a time, packed or not, each checked against its hash.

    `foreign` allows files that this library did not write, which have no hashes. Close it, or use it in a `with`.
    """

    def __init__(self, files: Sequence[str | os.PathLike[str]], *, foreign: bool = True) -> None:
        self._stack, self._files = ExitStack(), [Path(file) for file in files]
        self._library = library("safetensors", "Reading packed weights", HF_EXTRA)
        self._where: dict[str, tuple[Path, Any]] = {}  # by tensor
        self._hashes: dict[str, str] | None = None
        self._described: dict[str, Any] = {}
        self.packed_files = 0
        try:
            for path in self._files:
                self._open(path, foreign)
            self._check_names()
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, foreign: bool) -> None:
        try:
            opened = self._stack.enter_context(self._library.safe_open(path, framework="pt"))
            said = opened.metadata() or {}
            names = list(opened.keys())
        except (self._library.SafetensorError, OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path} cannot be read: {' '.join(str(error).split())}. {AGAIN}") from error
        if twice := sorted(self._where.keys() & set(names)):
            raise ModelError(
                f"{twice[0]} is in {self._where[twice[0]][0]} and in {path}. Remove the file that does not belong."
            )
        self._where |= dict.fromkeys(names, (path, opened))
        if KEY not in said and not foreign:
            raise ModelError(f"{path} was not packed by Secateur, or its metadata is damaged. {AGAIN}")
        if KEY in said:
            self._read_metadata(path, said)
            self.packed_files += 1

    def _read_metadata(self, path: Path, said: Mapping[str, str]) -> None:
        text = said[KEY]
        if said.get(DIGEST) != hashlib.sha256(text.encode()).hexdigest():
            raise ModelError(f"{path} is damaged: its metadata does not fit its own hash. {AGAIN}")
        try:
            found = json.loads(text)
            version, described, hashes = found["version"], found["weights"], found["sha256"]
            dtypes = {name: getattr(torch, one["dtype"]) for name, one in described.items()}
            sizes = [size for one in described.values() for size in one["shape"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{path} says nothing of use about its packed weights: {error!r}. {AGAIN}") from error
        if wrong := not_read(version):
            raise ModelError(f"{path} {wrong}")
        if not all(groups.valid(one["groups"]) for one in described.values() if "groups" in one):
            raise ModelError(f"{path} has packed weights with impossible groups. {AGAIN}")
        if not all(dtype in PACKABLE for dtype in dtypes.values()) or not all(type(size) is int for size in sizes):
            raise ModelError(f"{path} has packed weights of impossible dtypes or shapes. {AGAIN}")
        self._described |= described
        if hashes is not None:
            self._hashes = {**(self._hashes or {}), **hashes}

    def _check_names(self) -> None:
        """All tensors that belong to the model are there, and no others."""
        masked = {name: GROUPS if "groups" in one else MASK for name, one in self._described.items()}
        needed = {part for name, suffix in masked.items() for part in (name, name + suffix)}
        if self._hashes is not None and 0 < self.packed_files == len(self._files):
            needed = set(self._hashes)
            if odd := sorted(self._where.keys() - needed):
                raise ModelError(
                    f"{self._where[odd[0]][0]} holds {odd[0]}, of which its metadata knows nothing. {AGAIN}"
                )
        if missing := sorted(needed - self._where.keys()):
            raise ModelError(f"{missing[0]} is not in {', '.join(path.name for path in self._files)}. {AGAIN}")

    def __iter__(self) -> Iterator[str]:
        parts = {name + suffix for name in self._described for suffix in PARTS}
        return (name for name in self._where if name not in parts)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __getitem__(self, name: str) -> Weight:
        if name not in self._described:
            return self._tensor(name)
        scale = self._tensor(name + SCALE) if name + SCALE in self._where else None
        one, path = self._described[name], self._where[name][0]
        dtype, shape = getattr(torch, one["dtype"]), tuple(one["shape"])
        if short := self.groups(name):
            stored = self._tensor(name + GROUPS)
            mask, wrong = groups.mask_of(stored, shape, short)
        else:
            mask, wrong = self._tensor(name + MASK), ""
        found = Packed(self._tensor(name), mask, shape, dtype, scale, bool(one.get("transposed")))
        if wrong := wrong or fault(found):
            raise ModelError(f"{path} is damaged: in {name}, {wrong}. {AGAIN}")
        return found

    def groups(self, name: str) -> Groups | None:
        """n and m of a packed weight whose mask is stored as groups."""
        found = self._described[name].get("groups")
        return None if found is None else (found[0], found[1])

    def kept(self, name: str) -> int:
        """How many values a packed weight has, from the header of its file."""
        return math.prod(self._where[name][1].get_slice(name).get_shape())

    def _tensor(self, name: str) -> Tensor:
        path, opened = self._where[name]
        try:
            tensor: Tensor = opened.get_tensor(name)
        except (self._library.SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"{path} cannot be read at {name}: {' '.join(str(error).split())}. {AGAIN}") from error
        if self._hashes is not None and name in self._hashes:
            tensor = tensor.contiguous()
            if _hash(name, tensor, _bytes_of(tensor)) != self._hashes[name]:
                raise ModelError(f"{path} is damaged: {name} does not fit its hash. {AGAIN}")
        return tensor

    def shapes(self) -> dict[str, list[int]]:
        """Shapes of all weights, without reading them."""
        stored = {name: list(self._where[name][1].get_slice(name).get_shape()) for name in self}
        return stored | {
            name: one["shape"][::-1] if one.get("transposed") else one["shape"] for name, one in self._described.items()
        }

    @property
    def packed(self) -> list[str]:
        """Names of the packed weights."""
        return list(self._described)

    @property
    def version(self) -> int:
        """Version of the format."""
        return version_of(self._described)

    def check(self) -> None:
        """Read everything once and raise if anything is damaged."""
        for name in self:
            self[name]

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
