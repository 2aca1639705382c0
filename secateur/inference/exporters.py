"""A model for other programs: ONNX, OpenVINO's own files, and torch's 2:4 tensors.

None of the runtimes that read ONNX or OpenVINO files gains from zeros, so these are as large as dense ones; what each
format brings is part of what is returned. Everything is written to a folder that appears only if the exported model
gives the logits of the original. onnx, onnxscript, onnxruntime and openvino are imported when they are needed.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensorCUTLASS
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

from secateur.errors import ModelError, library
from secateur.files import appearing, check_room
from secateur.inference.packed import linear_layers, unpack
from secateur.inference.saving import EXPORTED, check_free

# What is imported for each kind; its extra of this package has the same name.
LIBRARIES = {"24": (), "onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("openvino",)}
ONNX, OPENVINO, SEMI = "model.onnx", "openvino_model.xml", "model_24.pt"
NAMES = ("input_ids", "attention_mask")
TOLERANCE = 1e-3  # largest difference of the logits relative to the largest logit; runtimes sum in another order
FP32 = 4  # bytes a weight, as ONNX and OpenVINO get them
TILE = (32, 64)  # rows and columns that torch's 2:4 tensors of 16 bits are made of
BRINGS = "Zeros stay, {} does not use them: weights are as large as dense ones in fp32. There is no cache of keys."
SAID = 300  # letters of an exporter's error that are shown
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Exported:
    """What was written."""

    bytes: int  # of the model's files
    dense_bytes: int  # of the parameters, dense, in the dtype that was written
    difference: float | None  # of the logits, relative to the largest; None: weights are the same to the bit
    said: str  # what the format brings, in a sentence


def export_for(
    kind: str, model: Any, folder: str | os.PathLike[str], *, tokenizer: Any = None, overwrite: bool = False
) -> Exported:
    """Write a model of transformers for another program: "onnx", "openvino" or "24". Packed layers are unpacked first,
    in place, and weights are fp32 for the first two."""
    check_export(kind, folder, overwrite=overwrite)
    unpack(model).eval()
    if kind != "24":
        check_room(folder, sum(FP32 * parameter.numel() for parameter in model.parameters()))
    with appearing(Path(folder).absolute()) as partial, torch.no_grad():
        done = KINDS[kind](model, partial)
        model.config.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
    return done


def check_export(kind: str, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Refuse an unknown kind, missing libraries and a folder that is in use: all that is known without the model."""
    if kind not in KINDS:
        raise ModelError(f"No format {kind!r}. Use one of {', '.join(map(repr, KINDS))}.")
    _libraries(kind)
    check_free(Path(folder).absolute(), overwrite, signs=EXPORTED)


def _libraries(kind: str) -> list[Any]:
    return [library(name, f"Exporting to {kind}", f'"secateur[{kind}]"') for name in LIBRARIES[kind]]


class _Logits(nn.Module):
    """The model as a function of tokens and their mask, without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, **self.settings)
        logits: Tensor = found.logits if hasattr(found, "logits") else found.last_hidden_state
        return logits

    @property
    def settings(self) -> dict[str, bool]:
        return {"use_cache": False} if hasattr(self.model.config, "use_cache") else {}


def _for_tokens(model: Any) -> _Logits:
    """The model in fp32 as a function of tokens; refuses models that read something else."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False) or getattr(model, "main_input_name", "") != NAMES[0]:
        raise ModelError(
            f"{type(model).__name__} cannot be exported this way: only models that map tokens to logits can, not those"
            " with a decoder of their own, images or audio. Export it with --format dense."
        )
    return _Logits(model.float())


def _tokens(model: Any, batch: int, length: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    return ids, torch.ones_like(ids)


@contextmanager
def _quietly(program: str, name: str) -> Iterator[None]:
    """Without the many warnings of exporters; whatever they raise becomes one error."""
    logger = logging.getLogger("torch.onnx")
    level, before = logger.level, logging.root.manager.disable
    logger.setLevel(logging.ERROR)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (ModelError, OSError):  # a full disk is no fault of the model
        raise
    except Exception as error:  # exporters raise almost any type
        cause: BaseException = error
        while cause.__cause__ is not None:  # what exporters wrap around it says how to mend the exporter
            cause = cause.__cause__
        said = " ".join(str(cause).split())[:SAID].rstrip(".")
        raise ModelError(
            f"{program} cannot express {name}: {type(cause).__name__}: {said}. Nothing was written; --format packed and"
            " dense take every model."
        ) from error
    finally:
        logging.disable(before)
        logger.setLevel(level)


def _batches(model: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What an export is tried on: where, tokens, mask. No shape is the one it was exported with."""
    yield "", *_tokens(model, 1, 7)
    ids, _ = _tokens(model, 3, 9)
    mask = (torch.arange(9) < torch.tensor([[9], [6], [4]])).long()
    pad = getattr(model.config, "pad_token_id", None)
    pad = pad if isinstance(pad, int) and 0 <= pad < model.config.vocab_size else 0
    for side, real in (("left", mask.flip(1)), ("right", mask)):
        yield f" in a batch padded on the {side}", ids.masked_fill(real == 0, pad), real


@torch.no_grad()
def _checked(name: str, model: _Logits, computed: Callable[[Tensor, Tensor], Tensor]) -> float:
    """How far the exported model's logits are from the original's, at real tokens, with and without padding."""
    largest = 0.0
    for where, ids, mask in _batches(model.model):
        expected, found = model(ids, mask), computed(ids, mask)
        if expected.shape[:2] == mask.shape and expected.ndim > 2:  # classifiers give one row a sequence
            expected, found = expected[mask.bool()], found[mask.bool()]
        difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        if not difference <= TOLERANCE:
            raise ModelError(
                f"The exported model computes something else: {name}'s logits differ by {difference:.1%} of the"
                f" largest{where}. Nothing was written."
            )
        largest = max(largest, difference)
    return largest


@contextmanager
def _eager_attention(model: Any) -> Iterator[None]:
    """Attention with a large negative number where tokens are hidden: OpenVINO makes NaN of rows of -inf."""
    pending = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    before: dict[int, tuple[Any, Any]] = {}  # parents come first: setting one also sets its parts
    for config in pending:
        if id(config) not in before and hasattr(config, "_attn_implementation"):
            before[id(config)] = config, config._attn_implementation
            pending += filter(None, (getattr(config, part, None) for part in config.sub_configs))
    try:
        model.set_attn_implementation("eager")
        yield
    finally:
        for config, used in before.values():
            config._attn_implementation = used


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _dense_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def write_onnx(model: Any, folder: Path) -> Exported:
    """model.onnx and model.onnx.data, of any batch size and length."""
    runtime = _libraries("onnx")[-1]
    made, any_size = _for_tokens(model), torch.export.Dim.DYNAMIC
    with _quietly("ONNX", type(model).__name__):
        program = torch.onnx.export(
            made, _tokens(model, 2, 12), dynamo=True, input_names=list(NAMES), output_names=["logits"],
            dynamic_shapes={name: {0: any_size, 1: any_size} for name in NAMES}, verbose=False,
        )  # fmt: skip
        assert program is not None
        program.save(folder / ONNX, external_data=True)
        session = runtime.InferenceSession(folder / ONNX, providers=["CPUExecutionProvider"])

        def computed(*given: Tensor) -> Tensor:
            fed = {name: one.numpy() for name, one in zip(NAMES, given, strict=True)}
            return torch.from_numpy(session.run(None, fed)[0])

        difference = _checked("ONNX Runtime", made, computed)
    return Exported(_bytes(folder), _dense_bytes(model), difference, BRINGS.format("ONNX Runtime"))


def write_openvino(model: Any, folder: Path) -> Exported:
    """openvino_model.xml and openvino_model.bin, of any batch size and length."""
    (openvino,) = _libraries("openvino")
    made = _for_tokens(model)
    with _quietly("OpenVINO", type(model).__name__):
        given = dict(zip(NAMES, _tokens(model, 2, 12), strict=True))
        with _eager_attention(model):
            program = openvino.convert_model(made, example_input=given)
        openvino.save_model(program, folder / OPENVINO, compress_to_fp16=False)
        compiled = openvino.Core().compile_model(folder / OPENVINO, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

        def computed(*given: Tensor) -> Tensor:
            return torch.from_numpy(compiled([one.numpy() for one in given])[0])

        difference = _checked("OpenVINO", made, computed)
    return Exported(_bytes(folder), _dense_bytes(model), difference, BRINGS.format("OpenVINO"))


# torch's 2:4 tensors


def write_24(model: Any, folder: Path) -> Exported:
    """model_24.pt: a state dict whose 2:4 weights are torch's semi-structured tensors (CUTLASS's form).

    torch.load reads it with `weights_only` and this class among its safe globals.
    """
    state, made, reasons = dict(model.state_dict()), [], {}
    for name, layer, reason in linear_layers(model):
        if reason := reason or not_24(layer):
            reasons[name] = reason
        else:
            state[f"{name}.weight"] = to_24(layer.weight.detach().cpu())
            made.append(f"{name}.weight")
    if not made:
        name, reason = next(iter(reasons.items()), ("", "it has no linear layers"))
        raise ModelError(
            f"No linear layer of {type(model).__name__} can be stored as 2:4{f'; of {name}' if name else ''}: {reason}."
            " Prune with --pattern 2:4 in bf16 or fp16 (--dtype), or export with --format packed."
        )
    torch.save(state, folder / SEMI)
    said = (
        f"{len(made)} of {len(made) + len(reasons)} linear layers are 2:4 tensors. torch multiplies by them on NVIDIA"
        " GPUs alone; on a CPU nothing is gained."
    )
    return Exported(_bytes(folder), _dense_bytes(model), None, said)


def not_24(layer: nn.Module) -> str:
    """Why a linear layer's weight cannot be a 2:4 tensor; empty if it can."""
    weight: Any = layer.weight
    if not isinstance(layer, nn.Linear):
        return f"it is a {type(layer).__name__}"
    if weight.dtype not in HALVES:
        return f"its weight is {weight.dtype}, and torch's 2:4 tensors need bf16 or fp16"
    if any(size % tile for size, tile in zip(weight.shape, TILE, strict=True)):
        return f"its shape {list(weight.shape)} is not in multiples of {TILE[0]} x {TILE[1]}"
    over = int(((weight.detach() != 0).unflatten(1, (-1, 4)).sum(-1) > 2).sum())
    return f"{over:,} of its {weight.numel() // 4:,} groups of four keep more than two weights" if over else ""


def to_24(weight: Tensor) -> Tensor:
    """A 2:4 weight as torch's tensor, made on a CPU, which torch's own conversion refuses."""
    values, places = sparse_semi_structured_from_dense_cutlass(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that these tensors are a prototype
        return SparseSemiStructuredTensorCUTLASS(
            weight.shape, packed=values, meta=places, packed_t=None, meta_t=None, compressed_swizzled_bitmask=None
        )


KINDS: dict[str, Callable[[Any, Path], Exported]] = {"24": write_24, "onnx": write_onnx, "openvino": write_openvino}
