"""Weights from one form of file to another, one tensor at a time: packed, dense, or compressed for transport."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import HF_EXTRA, ModelError, library
from secateur.files import read_json
from secateur.inference.format import (
    AGAIN,
    INDEX,
    MASK,
    PARTS,
    SINGLE,
    Lazy,
    Packed,
    Weight,
    WeightFiles,
    describe,
    no_weights,
    pack_weight,
    smaller,
    version_of,
    weight_files,
    write_weights,
)
from secateur.inference.packed import packed_layers

CONFIG = "config.json"
ZSTD = ".zst"
LEVEL = 3  # of zstd: level 10 gains another 4 points and takes ten times as long (docs/sharing.md)
METHOD = "secateur"  # the name that transformers knows packed models by
# transformers raises an error with this text unless Secateur is imported, instead of loading random weights.
GUARD = (
    "none, because this model was packed by Secateur. Run `pip install secateur`, then `import secateur` before"
    " from_pretrained"
)


@dataclass(frozen=True)
class Converted:
    """Sizes before and after a conversion, in bytes."""

    weights: int  # number of tensors
    packed: int  # number of packed tensors
    dense_bytes: int  # of all weights, dense
    bytes: int  # of all weights as written, before compression
    packed_dense_bytes: int  # of the packed weights alone, dense
    packed_bytes: int  # of the packed weights alone, as written
    version: int = 0  # of the packed format; 0 if nothing is packed
    compressed_bytes: int | None = None  # of the files, if they were compressed


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    packed: bool,
    only: Collection[str] | None = None,
    transposed: Collection[str] = (),
    int8: bool = False,
    compress: bool = False,
) -> Converted:
    """Write the weights of one folder into another, packed or dense.

    `only` names the weights that may be packed; any by default. Weights that would not get smaller stay dense. Those in
    `transposed` are matrices [inputs, outputs]. With `int8` the values of packed weights are rounded to int8.
    """
    with WeightFiles(_files(source)) as found:
        names = list(found)

        def wanted(name: str) -> Weight:
            weight = found[name]
            if not packed:
                return weight.dense() if isinstance(weight, Packed) else weight
            if isinstance(weight, Packed):
                return with_int8(weight) if int8 else weight
            taken = any(f"{name}{suffix}" in found for suffix in PARTS)  # names of the model's own
            if taken or (only is not None and name not in only) or not smaller(weight):
                return weight
            return pack_weight(weight, int8=int8, transposed=name in transposed)

        counted = _Counting(wanted)
        files = write_weights(target, Lazy(names, counted))
    if compress:
        return replace(counted.total(), compressed_bytes=sum(compress_file(Path(target) / file) for file in files))
    return counted.total()


def with_int8(weight: Packed) -> Packed:
    """The weight with its values rounded to int8, if they are not already."""
    if weight.scale is not None:
        return weight
    return pack_weight(weight.dense(), int8=True, transposed=weight.transposed)


class _Counting:
    """Makes weights and remembers their sizes."""

    def __init__(self, make: Any) -> None:
        self.make, self.sizes = make, dict[str, tuple[bool, int, int]]()
        self.version = 0

    def __call__(self, name: str) -> Weight:
        weight: Weight = self.make(name)
        if isinstance(weight, Packed):
            dense = torch.Size(weight.shape).numel() * weight.dtype.itemsize
            now = sum(part.nbytes for part in weight.parts(name).values())
            self.sizes[name] = True, dense, now
            self.version = max(self.version, version_of({name: describe(weight)}))
        else:
            self.sizes[name] = False, weight.nbytes, weight.nbytes
        return weight

    def total(self) -> Converted:
        all_of, some = list(self.sizes.values()), [size for size in self.sizes.values() if size[0]]
        dense, now = sum(size[1] for size in all_of), sum(size[2] for size in all_of)
        of_packed = sum(size[1] for size in some), sum(size[2] for size in some)
        return Converted(len(all_of), len(some), dense, now, *of_packed, self.version)


def _files(folder: str | os.PathLike[str]) -> list[Path]:
    if files := weight_files(folder):
        return files
    raise no_weights(folder)


def is_packed(folder: str | os.PathLike[str]) -> bool:
    """Whether the weights in a folder are packed."""
    with WeightFiles(_files(folder)) as found:
        return bool(found.packed)


def file_names(model: nn.Module) -> dict[str, str]:
    """Names in files of the tensors that `save_pretrained` writes as they are, by their names in the model.

    transformers keeps the names of older versions in files for some families, such as ViT, and splits or joins some
    tensors; those are not listed, nor are weights whose mask would not get the new name of the weight.
    """
    named = {name: tensor.shape for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    named |= {f"{name}.weight": torch.Size(layer.packed.shape) for name, layer in packed_layers(model)}
    stand_ins = {name: torch.empty(shape, device="meta") for name, shape in named.items()}
    masks = {name + MASK: torch.empty_like(one) for name, one in stand_ins.items() if name.endswith(".weight")}
    known = {id(stand_in): name for name, stand_in in (stand_ins | masks).items()}
    saved = as_in_files(model, stand_ins | masks)
    found = {known[id(tensor)]: name for name, tensor in saved.items() if id(tensor) in known}
    apart = {name for name, file in found.items() if name + MASK in masks and found.get(name + MASK) != file + MASK}
    return {name: file for name, file in found.items() if name in named and name not in apart}


def loaded_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Names in the model, as transformers finds them, by names in files: renamed, with or without the prefix of a model
    that has a head. Those of tensors that are split or joined are not listed."""
    loading = library("transformers.core_model_loading", "Loading a model", HF_EXTRA)
    mapping = library("transformers.conversion_mapping", "Loading a model", HF_EXTRA)
    changes = mapping.get_model_conversion_mapping(model)
    renamed = [change for change in changes if isinstance(change, loading.WeightRenaming)]
    joined = [change for change in changes if isinstance(change, loading.WeightConverter)]
    prefix, state = model.base_model_prefix, model.state_dict()
    found = {}
    for name in names:
        target, split = loading.rename_source_key(name, renamed, joined, prefix, state)
        if target not in state:  # transformers' own second try
            target, split = loading.rename_source_key(name, [], [], prefix, state)
        if split is None:
            found[name] = target
    return found


def as_in_files(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by names of parameters in the form that `save_pretrained` writes: renamed, split and joined."""
    loading = library("transformers.core_model_loading", "Saving a model", HF_EXTRA)
    saved: dict[str, Tensor] = loading.revert_weight_conversion(model, dict(tensors))
    return saved


def read_config(folder: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """The config of a Hugging Face folder. Refuses a model that another library has quantized, calling it `name`."""
    config: dict[str, Any] = read_json(Path(folder) / CONFIG, dict, ModelError, AGAIN)
    found = config.get("quantization_config")
    method = found.get("quant_method") if isinstance(found, dict) else found
    if method not in (None, METHOD):
        raise ModelError(
            f"{name} is quantized ({method}), and quantized weights cannot be packed or converted. Load it with"
            " transformers, call model.dequantize() and model.save_pretrained, or start from the model it was made of."
        )
    return config


def mark_config(folder: str | os.PathLike[str], version: int) -> None:
    """Make a Hugging Face config say in which version of the format its weights are packed (0: not), so that
    transformers cannot mistake them."""
    path = Path(folder) / CONFIG
    config = read_json(path, dict, ModelError, AGAIN)
    config = {key: value for key, value in config.items() if key not in ("quantization_config", "transformers_weights")}
    if version:
        config |= {"quantization_config": {"quant_method": METHOD, "version": version}, "transformers_weights": GUARD}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# Compression for transport


def compress_file(path: Path) -> int:
    """Replace a file by its compressed form; returns the bytes of that."""
    zstandard = library("zstandard", "Compressing", '"secateur[zstd]"')
    target = path.with_name(path.name + ZSTD)
    with path.open("rb") as plain, target.open("wb") as small:
        zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).copy_stream(plain, small, size=path.stat().st_size)
    path.unlink()
    return target.stat().st_size


def is_compressed(folder: str | os.PathLike[str]) -> bool:
    """Whether the weights in a folder are compressed for transport."""
    return any(Path(folder).glob(f"*.safetensors{ZSTD}"))


@contextmanager
def expanded(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """The folder itself, or a temporary copy with its weights decompressed if they are compressed."""
    folder = Path(folder)
    if not is_compressed(folder):
        yield folder
        return
    zstandard = library("zstandard", f"Decompressing {folder}", '"secateur[zstd]"')
    with tempfile.TemporaryDirectory(prefix="secateur-", ignore_cleanup_errors=True) as made:
        for path in sorted(folder.iterdir()):
            if path.name.endswith(f".safetensors{ZSTD}"):
                try:
                    with path.open("rb") as small, (Path(made) / path.stem).open("wb") as plain:
                        zstandard.ZstdDecompressor().copy_stream(small, plain)
                except zstandard.ZstdError as error:
                    raise ModelError(f"{path} is damaged and cannot be decompressed: {error}. {AGAIN}") from error
            else:
                (shutil.copytree if path.is_dir() else shutil.copy2)(path, Path(made) / path.name)
        yield Path(made)


def other_files(folder: str | os.PathLike[str]) -> list[Path]:
    """What a model folder holds besides its weights: config, tokenizer, masks, reports, code."""
    weights = {*(path.name for path in weight_files(folder)), SINGLE, INDEX}
    return [
        path for path in sorted(Path(folder).iterdir()) if path.name not in weights and not path.name.startswith(".")
    ]
