"""Save a sparse model to a folder and load it again: packed or dense, whole or not at all.

Models of Hugging Face become folders that `from_pretrained` loads; other modules become a folder that `load` reads into
a module of the same shape. transformers and safetensors are imported when they are needed.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.errors import HF_EXTRA, DataError, ModelError, library, one_line
from secateur.files import ESCAPED, appearing, read_json, write
from secateur.inference import convert as forms
from secateur.inference.card import CARD, model_card, reloaded
from secateur.inference.format import (
    AGAIN,
    PARTS,
    VERSION,
    Lazy,
    Packed,
    Weight,
    WeightFiles,
    no_weights,
    pack_weight,
    smaller,
    weight_files,
    write_weights,
)
from secateur.inference.packed import CHANGED, check_module, is_conv1d, linear_layers, pack, packed_layers, unpack
from secateur.model.masks import check_masks, save_masks
from secateur.oneshot.batches import is_out_of_memory, usable_device
from secateur.report import Outcome, Report

PRETRAINED = "transformers.modeling_utils.PreTrainedModel"
ADAPTER = "adapter_config.json"  # of PEFT
MANIFEST = "secateur.json"  # of modules that transformers does not know
EXPORTED = ((forms.CONFIG, MANIFEST), "*model*")  # marks of a folder that an export may overwrite
COMPRESSIONS = (None, "zstd")
VALUES = (None, "int8")


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    packed: bool = True,
    values: str | None = None,
    masks: Mapping[str, Tensor] | None = None,
    report: Report | None = None,
    card: bool | str = True,
    overwrite: bool = False,
    compress: str | None = None,
) -> Path:
    """Save a model, packed or dense, to a folder that appears only when it is complete.

    A model of transformers is loaded by `from_pretrained`, after `import secateur` if it is packed; any other module by
    `load(folder, into=module)`. Packed weights without zeros stay dense. `values="int8"` rounds packed values to int8
    with a scale a row. `masks` are those of the report by default. `card` is the text of README.md, or whether to
    write one. `compress="zstd"` makes the files smaller for transport; only `load` and `secateur export` read them.
    """
    check_module(model)
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise ModelError(f"folder must be the path of a folder to write, not {folder!r}.")
    if compress not in COMPRESSIONS or values not in VALUES:
        raise ModelError(
            f"compress={compress!r}, values={values!r}: use compress='zstd' or None, values='int8' or None."
        )
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise ModelError(f"tokenizer must be a tokenizer of transformers, not a {type(tokenizer).__name__}.")
    if report is not None and not isinstance(report, Report):
        raise ModelError(
            f"report must be what sc.prune, sc.probe or pruner.report() gave, not a {type(report).__name__}."
        )
    if masks is not None and not isinstance(masks, Mapping):
        raise ModelError(f"masks must map names of parameters to masks, not be a {type(masks).__name__}.")
    if values and not packed:
        raise ModelError("values='int8' needs packed=True: dense weights keep their dtype.")
    if masks is None:
        masks = report.masks if isinstance(report, Outcome) else None
    texts = {} if report is None else {"report.md": report.to_markdown() + "\n", "report.json": report.to_json() + "\n"}
    bare = getattr(model, "_orig_mod", model)
    if isinstance(card, str):
        texts[CARD] = card
    elif card and not _saves_itself(bare, packed):
        will_be = packed and _has_packable(bare)
        name, compressed = Path(folder).name, compress is not None
        texts[CARD] = model_card(name, bare, report=report, packed=will_be, compressed=compressed)
    return write_folder(
        model, folder, tokenizer=tokenizer, packed=packed, int8=values == "int8", masks=masks, texts=texts,
        overwrite=overwrite, compress=compress is not None,
    )  # fmt: skip


def write_folder(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    packed: bool = False,
    int8: bool = False,
    masks: Mapping[str, Tensor] | None = None,
    texts: Mapping[str, str] | None = None,
    overwrite: bool = False,
    compress: bool = False,
) -> Path:
    """Write model, tokenizer, masks (one bit a weight) and texts ({file name: text}), all or nothing."""
    library("safetensors", "Saving a model", HF_EXTRA)  # fail before anything is written
    if compress:
        library("zstandard", "Compressing", '"secateur[zstd]"')
    folder, bare = Path(folder).absolute(), getattr(model, "_orig_mod", model)
    known = is_pretrained(bare) or _saves_itself(bare, packed)
    check_free(folder, overwrite, signs=(forms.CONFIG if known else MANIFEST, "*model*"))
    check_masks(bare, masks or {})
    meta = [name for name, tensor in bare.state_dict().items() if isinstance(tensor, Tensor) and tensor.is_meta]
    if meta and not hasattr(bare, "hf_device_map"):  # transformers itself saves models that accelerate offloads
        raise ModelError(f"{meta[0]} is on the meta device and has no values to save. Load the model first.")
    with appearing(folder) as partial:
        if known:
            _write_pretrained(bare, partial, packed, int8, compress)
        else:
            _write_module(bare, partial, packed, int8)
            for file in weight_files(partial) if compress else ():
                forms.compress_file(file)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        if masks is not None:
            save_masks(partial, masks)
        for name, text in (texts or {}).items():
            if Path(name).name != name or ((partial / name).exists() and name != CARD):
                raise ModelError(f"A report cannot be saved as {name!r}: that is a path, or a file of the model's own.")
            (partial / name).write_text(text, encoding="utf-8", errors=ESCAPED)
    return folder


def _saves_itself(model: Any, packed: bool) -> bool:
    """Whether another library than transformers saves the model, with a card of its own, such as PEFT its adapters."""
    return not packed and hasattr(model, "save_pretrained") and not is_pretrained(model)


def _has_packable(model: nn.Module) -> bool:
    weights = [layer.weight.detach() for _, layer, reason in linear_layers(model) if not reason]
    return bool(packed_layers(model)) or any(not weight.is_meta and smaller(weight) for weight in weights)


def is_pretrained(model: Any) -> bool:
    """Whether this is a model of transformers."""
    return any(f"{kind.__module__}.{kind.__name__}" == PRETRAINED for kind in type(model).__mro__)


def _write_pretrained(model: Any, folder: Path, packed: bool, int8: bool, compress: bool) -> None:
    """Let transformers write the model, which knows about tied and renamed weights, then change the files' form."""
    already = bool(packed_layers(model))
    if not (packed or already or compress):
        model.save_pretrained(folder)
        return
    plain = folder / ".plain"
    for changed in CHANGED:  # the config knows nothing yet of layers that were packed in a part of the model
        changed(model)
    only, transposed = packable_names(model)
    model.save_pretrained(plain)
    forms.read_config(plain, type(model).__name__)
    if already and not forms.is_packed(plain):
        raise ModelError("The packed layers were not saved as such. Call sc.unpack(model) first, then save it.")
    done = forms.convert(plain, folder, packed=packed, only=only, transposed=transposed, int8=int8, compress=compress)
    for path in forms.other_files(plain):
        shutil.move(path, folder)
    shutil.rmtree(plain)
    forms.mark_config(folder, done.version)


def _write_module(model: nn.Module, folder: Path, packed: bool, int8: bool) -> None:
    """Write the state of any module, each shared tensor once, and a manifest."""
    state = model.state_dict()
    if odd := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise ModelError(f"The state of {type(model).__name__} has {odd[0]}, which is no tensor and cannot be saved.")
    layers = {f"{name}.weight": layer.packed for name, layer in packed_layers(model)}
    parts = {name + suffix for name in layers for suffix in PARTS}
    transposed = {f"{name}.weight" for name, layer, _ in linear_layers(model) if is_conv1d(layer)}
    first: dict[Any, str] = {}
    aliases = {}
    for name, tensor in state.items():
        if (known := first.setdefault(_memory(name, tensor), name)) != name:
            aliases[name] = known

    def made(name: str) -> Weight:
        weight = layers.get(name, state[name])
        if isinstance(weight, Packed):
            if not packed:
                return weight.dense()
            return forms.with_int8(weight) if int8 else weight
        taken = any(name + suffix in state for suffix in PARTS)  # names of the model's own
        if not packed or taken or not smaller(weight):
            return weight
        return pack_weight(weight, int8=int8, transposed=name in transposed)

    write_weights(folder, Lazy([name for name in state if name not in parts and name not in aliases], made))
    write(
        folder / MANIFEST,
        json.dumps({"version": VERSION, "module": type(model).__name__, "aliases": aliases}, indent=2),
    )


def _memory(name: str, tensor: Tensor) -> Any:
    """A key that tensors have in common if they are the same memory."""
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name


def _dense(weight: Weight) -> Tensor:
    return weight.dense() if isinstance(weight, Packed) else weight


def export(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    packed: bool = True,
    int8: bool = False,
    compress: bool = False,
    overwrite: bool = False,
) -> forms.Converted:
    """Write a saved model in another form, tensor by tensor, without building it; everything else is copied."""
    if compress:
        library("zstandard", "Compressing", '"secateur[zstd]"')
    folder = Path(folder).absolute()
    with forms.expanded(source) as place:
        known = (place / forms.CONFIG).is_file()
        check_free(folder, overwrite, signs=EXPORTED)
        if known:
            forms.read_config(place, os.fspath(source))
        elif (place / ADAPTER).is_file():
            raise ModelError(f"{source} holds an adapter of PEFT, not a model. Merge it into its model, and save that.")
        only, transposed = linear_weights(place) if known and packed else (None, set())
        with appearing(folder) as partial:
            done = forms.convert(
                place, partial, packed=packed, only=only, transposed=transposed, int8=int8, compress=compress
            )
            for path in forms.other_files(place):
                (shutil.copytree if path.is_dir() else shutil.copy2)(path, partial / path.name)
            if known:
                forms.mark_config(partial, done.version)
            if (partial / CARD).is_file():
                text = (partial / CARD).read_text(encoding="utf-8")
                text = reloaded(text, folder.name, bool(done.packed), compress)
                (partial / CARD).write_text(text, encoding="utf-8", errors=ESCAPED)
    return done


def linear_weights(folder: Path) -> tuple[set[str], set[str]]:
    """Names of the weights that packed layers can hold, and of those that are [inputs, outputs], from the model's
    config alone."""
    return packable_names(without_values(folder))


def without_values(folder: Path) -> nn.Module:
    """The model of a folder on the meta device, from its config alone."""
    transformers = library("transformers", f"Reading the config of {folder}", HF_EXTRA)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kind = pretrained_class(config)
        with torch.device("meta"):
            model: nn.Module = kind(config) if issubclass(kind, nn.Module) else kind.from_config(config)
    except Exception as error:  # damaged files raise almost any type
        raise not_loaded(os.fspath(folder), error) from error
    return model


def packable_names(model: nn.Module) -> tuple[set[str], set[str]]:
    """Names in files of the weights that packed layers can hold, and of those among them that are [inputs, outputs]."""
    names = forms.file_names(model)
    found = {f"{name}.weight": layer for name, layer, reason in linear_layers(model) if not reason}
    known = {names[weight]: layer for weight, layer in found.items() if weight in names}
    return set(known), {name for name, layer in known.items() if is_conv1d(layer)}


def load(
    folder: str | os.PathLike[str],
    *,
    into: nn.Module | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    packed: bool | None = None,
) -> Any:
    """Load a model that `save` wrote, or any Hugging Face model, in eval mode; returns the model.

    Modules that transformers does not know are loaded `into` a module of the same shape, which is returned as well; it
    is unchanged if the files are damaged or do not fit. Linear layers are packed if they were saved packed (dense with
    `into`); `packed` says otherwise, and True packs wherever that takes fewer bytes. The dtype is that of the stored
    weights by default, with `into` that of the module.
    """
    target = None if device is None else usable_device(device)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ModelError(f"dtype must be a torch.dtype, such as torch.bfloat16, not {dtype!r}.")
    if into is not None:
        check_module(into)
        if not Path(folder).is_dir():
            raise ModelError(f"There is no folder {folder}. Name one that a model was saved in.")
    with forms.expanded(folder) if Path(folder).is_dir() else nullcontext(Path(folder)) as place:
        if into is not None:
            model: Any = _load_into(into, place, dtype)
        elif (place / MANIFEST).is_file():
            raise ModelError(
                f"{folder} holds a module that transformers does not know. Build it, and pass it as into=."
            )
        else:
            model = load_pretrained(os.fspath(folder) if place == Path(folder) else os.fspath(place), dtype)
    model = model if target is None else model.to(target)
    if packed:
        pack(model, memory=True)  # asked for, so not left to timing
    elif packed is not None:
        unpack(model)
    return model.eval()


def _load_into(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """Copy weights into a module, after all of them were found undamaged and of the right shape."""
    bare = getattr(model, "_orig_mod", model)
    if not (files := weight_files(folder)):
        raise no_weights(folder)
    manifest = read_json(folder / MANIFEST, dict, ModelError, AGAIN) if (folder / MANIFEST).exists() else {}
    aliases = manifest.get("aliases", {})
    with WeightFiles(files, foreign=not manifest) as found:
        if packed_layers(bare):
            raise ModelError("The module has packed layers. Call sc.unpack(module), then load into it.")
        state = bare.state_dict()
        _check_fits(folder, found.shapes(), state, aliases)
        found.check()
        _check_shared(folder, found, state)
        with torch.no_grad():
            for name in found:
                state[name].copy_(_dense(found[name]))
            for name, same in aliases.items():
                if state[name].data_ptr() != state[same].data_ptr():
                    state[name].copy_(state[same])
    return model if dtype is None else model.to(dtype)


def _check_fits(
    folder: Path, shapes: Mapping[str, list[int]], state: Mapping[str, Any], aliases: Mapping[str, str]
) -> None:
    needed = {name: list(tensor.shape) for name, tensor in state.items() if isinstance(tensor, Tensor)}
    if meta := [name for name, tensor in state.items() if isinstance(tensor, Tensor) and tensor.is_meta]:
        raise ModelError(
            f"{meta[0]} is on the meta device, so nothing can be loaded into it. Build the module on a CPU."
        )
    given = {_memory(name, tensor) for name, tensor in state.items() if name in shapes}  # tied ones are stored once
    absent = needed.keys() - shapes.keys() - aliases.keys()
    if missing := sorted(name for name in absent if _memory(name, state[name]) not in given):
        raise ModelError(f"{folder} has no {missing[0]}, which the module needs.")
    if odd := sorted(shapes.keys() - needed.keys()) or sorted(aliases.keys() - needed.keys()):
        raise ModelError(f"{folder} has {odd[0]}, which the module does not have.")
    for name, shape in shapes.items():
        if shape != needed[name]:
            raise ModelError(f"{name} is {shape} in {folder} and {needed[name]} in the module.")


def _check_shared(folder: Path, found: WeightFiles, state: Mapping[str, Tensor]) -> None:
    """Refuse two different weights for one tensor of the module, of which one would be lost."""
    first: dict[Any, str] = {}
    for name in found:
        known = first.setdefault(_memory(name, state[name]), name)
        if known != name and not torch.equal(_dense(found[known]), _dense(found[name])):
            raise ModelError(f"{known} and {name} differ in {folder} and are one tensor in the module.")


def load_pretrained(name: str, dtype: torch.dtype | None) -> Any:
    """A model of transformers from a folder or from the hub, in its own class."""
    transformers = library("transformers", f"Loading {name}", HF_EXTRA)
    # Names on the hub have at most one slash and never start with a dot; anything else must be a folder.
    if Path(name).is_file():
        raise ModelError(f"{name} is a file. Name the folder that the model was saved in.")
    if not Path(name).is_dir() and (Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise ModelError(f"There is no folder {name}. Give a folder, a name on the Hugging Face hub, or smollm2.")
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        model, found = pretrained_class(config).from_pretrained(
            name, dtype="auto" if dtype is None else dtype, output_loading_info=True
        )
    except ModelError:
        raise
    except Exception as error:  # damaged files raise almost any type; tokenizers raises plain Exception
        if is_out_of_memory(error):
            raise
        raise not_loaded(name, error) from error
    if missing := sorted(found["missing_keys"]):
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        warnings.warn(f"{name} lacks {len(missing)} tensors, which are initialized at random: {shown}", stacklevel=4)
    return model


def not_loaded(name: str, error: Exception, part: str = "") -> ModelError:
    """The error that a model, or a `part` of it, could not be loaded, in one line."""
    where = "" if Path(name).is_dir() else " (there is no such folder, so it was looked up on the Hugging Face hub)"
    return ModelError(f"{part}{name} cannot be loaded{where}: {one_line(error)}")


def pretrained_class(config: Any) -> Any:
    """The class the model was saved from; if the config names none, the first auto class that fits."""
    transformers = library("transformers", "Loading a model", HF_EXTRA)
    for name in config.architectures or ():
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING:
        return transformers.AutoModelForMaskedLM
    return transformers.AutoModel


def check_free(
    folder: str | os.PathLike[str],
    overwrite: bool,
    what: str = "model",
    signs: Sequence[str | tuple[str, ...]] = (forms.CONFIG, "*model*"),
) -> None:
    """Refuse to write to a file, to a folder that is not empty (unless `overwrite`), and to overwrite a folder without
    the files that mark a `what`: one for each of `signs`, a pattern or several of which one is enough."""
    folder, error = Path(folder), ModelError if what == "model" else DataError
    if not folder.exists():
        return
    if not folder.is_dir():
        raise error(f"{folder} is a file; a {what} is saved as a folder. Name another path.")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise error(f"{folder} is not empty. Name another folder, or pass overwrite=True (--overwrite).")
    wanted = [(sign,) if isinstance(sign, str) else sign for sign in signs]
    if not all(any(path.is_file() for one in sign for path in folder.glob(one)) for sign in wanted):  # a home folder
        raise error(f"{folder} holds something other than a {what} and is not overwritten. Name another folder.")
