"""Distillation with Hugging Face's Trainer: train a sparse model to predict what its dense teacher predicts.

Logits over a large vocabulary are the largest tensors of such a step. Here the loss is computed inside the model's
forward, a few positions at a time: the output layer is applied to one chunk of hidden states, and again in the backward
pass. Neither model's logits ever exist as a whole, except where a model changes them after its output layer.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Trainer
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from secateur.errors import ModelError, SecateurError
from secateur.integrations.evaluation import is_causal
from secateur.integrations.folder import load
from secateur.oneshot.batches import IGNORED

CHUNK = 1 << 26  # logits in fp32 at once: 256 MiB for each of the few tensors of a chunk

Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Mixture:
    """What is added up: `alpha` of the KL divergence at a temperature, and the rest of cross entropy."""

    temperature: float = 1.0
    alpha: float = 1.0
    hidden: float = 0.0  # weight of the hidden-state term

    def check(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise SecateurError(f"temperature must be a positive number; got {self.temperature!r}.")
        if not 0 <= self.alpha <= 1:
            raise SecateurError(f"alpha is the share of the KL divergence, from 0 to 1; got {self.alpha!r}.")
        if not 0 <= self.hidden < float("inf"):
            raise SecateurError(f"hidden must be a number of at least 0; got {self.hidden!r}.")


def position_loss(logits: Tensor, teacher_logits: Tensor, labels: Tensor, mixture: Mixture) -> Tensor:
    """The loss of some positions, summed. Logits are [positions, vocabulary]; half precision is computed in fp32.

    KL(teacher || student) at a temperature T is multiplied by T^2, which keeps its gradients' scale (Hinton 2015).
    """
    logits, temperature = _wide(logits), mixture.temperature
    total = logits.new_zeros(())
    if mixture.alpha > 0:
        wanted = (_wide(teacher_logits) / temperature).log_softmax(-1)
        found = (logits / temperature).log_softmax(-1)
        divergence = nn.functional.kl_div(found, wanted, reduction="sum", log_target=True)
        total = total + mixture.alpha * temperature**2 * divergence
    if mixture.alpha < 1:
        total = total + (1 - mixture.alpha) * nn.functional.cross_entropy(logits, labels, reduction="sum")
    return total


def chunked_loss(
    rows: Tensor,
    head: Head,
    teacher_rows: Tensor,
    teacher_head: Head,
    labels: Tensor,
    mixture: Mixture,
    positions: int,
) -> Tensor:
    """The summed loss of all rows, `positions` of them at a time; each chunk is computed again in the backward pass.

    `head` turns rows [positions, width] into logits. Pass logits themselves with an identity where there is no head.
    """

    def part(mine: Tensor, theirs: Tensor, wanted: Tensor) -> Tensor:
        with torch.no_grad():
            teacher_logits = teacher_head(theirs)
        return position_loss(head(mine), teacher_logits, wanted, mixture)

    # split() has one backward for all chunks; slices would each make a gradient the size of the whole.
    parts = zip(rows.split(positions), teacher_rows.split(positions), labels.split(positions), strict=True)
    sums = [checkpoint(part, *one, use_reentrant=False, preserve_rng_state=False) for one in parts]
    return torch.stack(sums).sum()


def hidden_loss(hidden: Sequence[Tensor], teacher_hidden: Sequence[Tensor], real: Tensor) -> Tensor:
    """SquareHead (arXiv 2310.06927): squared error of every layer's hidden states over the teacher's mean square,
    averaged over layers. `real` marks positions that are not padding."""
    if len(hidden) != len(teacher_hidden) or hidden[0].shape != teacher_hidden[0].shape:
        raise ModelError(
            f"The hidden-state term compares layer by layer: the student has {len(hidden)} hidden states of"
            f" {list(hidden[0].shape)}, the teacher {len(teacher_hidden)} of {list(teacher_hidden[0].shape)}. Leave"
            " hidden=0 for models of different shapes."
        )
    total = torch.zeros((), dtype=_wide(hidden[0]).dtype, device=hidden[0].device)
    for mine, theirs in zip(hidden[1:], teacher_hidden[1:], strict=True):  # the first is the embedding
        mine, theirs = _wide(mine[real]), _wide(theirs[real])
        total = total + (mine - theirs).square().mean() / theirs.square().mean()
    return total / max(1, len(hidden) - 1)


class DistillationTrainer(Trainer):
    """A Trainer whose training loss is the distance to a frozen teacher; evaluation reports plain cross entropy.

    The loss is `alpha` times the KL divergence to the teacher's logits plus `1 - alpha` times cross entropy, over the
    positions that have labels, normalised as Trainer's own (gradient accumulation and several processes included).
    The teacher is not part of the model: it is not trained, not wrapped and not saved in checkpoints. Every process
    holds a whole teacher.

    Args:
        teacher: a model, a folder or name that `secateur.integrations.transformers.load` reads, or None for a copy of
            `model` as it is now, before it is pruned.
        temperature: divides both models' logits in the KL divergence.
        alpha: 1 is distillation alone, 0 cross entropy alone. A copy of the model as teacher and alpha=1 give no
            gradient until the model is pruned, so scores that read Adam's state rank by noise at first; 0.9 avoids it.
        hidden: weight of a term on the hidden states of all layers (SquareHead). Its norm is that of one micro-batch.
        teacher_dtype: such as torch.bfloat16, which halves a teacher's memory; None leaves it as it is.
        positions: positions whose logits exist at once; None bounds their memory for any vocabulary.
        options: those of `transformers.Trainer`.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        teacher: Any = None,
        temperature: float = 1.0,
        alpha: float = 1.0,
        hidden: float = 0.0,
        teacher_dtype: torch.dtype | None = None,
        positions: int | None = None,
        **options: Any,
    ) -> None:
        self.mixture = Mixture(temperature, alpha, hidden)
        self.mixture.check()
        if model is None or options.get("compute_loss_func") is not None:
            raise SecateurError("DistillationTrainer needs a model (not model_init) and has its own loss function.")
        if positions is not None and positions < 1:
            raise SecateurError(f"positions must be at least 1, or None; got {positions!r}.")
        teacher, tokenizer = _teacher_for(teacher, model)
        super().__init__(model, args, **options)
        if self.label_smoother is not None:
            raise SecateurError("DistillationTrainer does not smooth labels: leave label_smoothing_factor at 0.")
        check_teacher(model, teacher, getattr(self, "processing_class", None), tokenizer)
        self.teacher = teacher.to(device=self.args.device, dtype=teacher_dtype).eval().requires_grad_(False)
        self._positions = positions
        self._by_head: bool | None = None  # whether both models' logits are what their output layers return

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The distillation loss in training, the model's own loss in evaluation."""
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        plain = self.accelerator.unwrap_model(model)
        inputs, labels = _without_labels(plain, inputs)
        if self.mixture.hidden > 0:
            inputs["output_hidden_states"] = True
        keep = labels != IGNORED
        theirs = self._ask_teacher(model, inputs, keep)
        outputs, total = self._ask_student(model, inputs, keep, labels[keep], theirs)
        items = keep.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        if self.mixture.hidden > 0:
            real = inputs["attention_mask"].bool() if "attention_mask" in inputs else torch.ones_like(keep)
            distance = hidden_loss(outputs.hidden_states, theirs.hidden or (), real)
            total = total + self.mixture.hidden * keep.sum() * distance
        loss = total / items
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            # Items are those of all processes, whose gradients are averaged; as in Trainer.
            loss = loss * (self.accelerator.num_processes if self.args.n_gpu <= 1 else self.args.n_gpu)
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def _ask_teacher(self, model: Any, inputs: dict[str, Any], keep: Tensor) -> _Answer:
        """The teacher's hidden states before its output layer, or its logits, at the positions that count."""
        if self._by_head is None:
            one = {name: value[:1] if isinstance(value, Tensor) else value for name, value in inputs.items()}
            plain = self.accelerator.unwrap_model(model)
            self._by_head = self.args.n_gpu <= 1 and not self.args.torch_compile
            self._by_head = self._by_head and _ends_in_head(plain, model, one)
            with self.accelerator.autocast():
                self._by_head = self._by_head and _ends_in_head(self.teacher, self.teacher, one)
        head: Head = _identity
        with self.accelerator.autocast():
            if self._by_head:
                layer = self.teacher.get_output_embeddings()
                head = layer.forward
                with _forward_replaced(layer, _identity):
                    outputs = self.teacher(**inputs)
            else:
                outputs = self.teacher(**inputs)
        return _Answer(outputs.logits[keep], head, getattr(outputs, "hidden_states", None))

    def _ask_student(
        self, model: Any, inputs: dict[str, Any], keep: Tensor, labels: Tensor, theirs: _Answer
    ) -> tuple[Any, Tensor]:
        """The student's outputs and its summed loss."""
        size = self._positions or max(1, CHUNK // _vocabulary(self.teacher))

        def loss(rows: Tensor, head: Head) -> Tensor:
            return chunked_loss(rows[keep], head, theirs.rows, theirs.head, labels, self.mixture, size)

        if not self._by_head:
            outputs = model(**inputs)
            return outputs, loss(outputs.logits, _identity)
        layer = self.accelerator.unwrap_model(model).get_output_embeddings()
        forward = layer.forward
        # Inside the model's forward, where sharded weights are gathered and autocast is on.
        # Three dimensions as logits have, and no view, which FSDP would warn about.
        with _forward_replaced(layer, lambda rows: loss(rows, forward).view(1, 1, 1).clone()):
            outputs = model(**inputs)
        return outputs, outputs.logits.sum()


@dataclass(frozen=True)
class _Answer:
    """What the teacher says: rows, what turns them into logits, and its hidden states if asked for."""

    rows: Tensor
    head: Head
    hidden: Sequence[Tensor] | None


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _identity(rows: Tensor) -> Tensor:
    return rows


@contextmanager
def _forward_replaced(layer: nn.Module, forward: Head) -> Iterator[None]:
    """Calls `forward` instead of the layer's own, also where something else had replaced it."""
    before = layer.__dict__.get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        if before is None:
            del layer.forward
        else:
            layer.forward = before


def _ends_in_head(plain: Any, model: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether the logits are what the output layer returns: some models cap or scale them afterwards."""
    layer = plain.get_output_embeddings() if hasattr(plain, "get_output_embeddings") else None
    if layer is None:
        return False
    seen: list[Any] = []
    handle = layer.register_forward_hook(lambda _module, _given, found: seen.append(found))
    try:
        with torch.no_grad():
            logits = model(**inputs).logits
    finally:
        handle.remove()
    same = len(seen) == 1 and isinstance(seen[0], Tensor) and seen[0].shape == logits.shape
    return same and torch.equal(seen[0].to(logits.dtype), logits)


def _without_labels(model: Any, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """The inputs without labels, and the label of every position, shifted as the model's own loss does."""
    rest = {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}
    labels = inputs.get("labels")
    if labels is None:
        raise SecateurError(f"Distillation needs labels, which mark the positions that count; got {sorted(inputs)}.")
    if getattr(model.config, "is_encoder_decoder", False):
        if "decoder_input_ids" not in rest:
            rest["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=labels)
        return rest, labels
    if "shift_labels" in inputs:
        return rest, inputs["shift_labels"]
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    # Names without a known kind of loss, such as GPT2LMHeadModel, get the causal one.
    if LOSS_MAPPING.get(getattr(base, "loss_type", None) or "", ForCausalLMLoss) is not ForCausalLMLoss:
        return rest, labels
    return rest, nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]


def _teacher_for(teacher: Any, model: Any) -> tuple[Any, Any]:
    """The teacher, and its tokenizer where it was loaded with one."""
    if teacher is None:
        return copy.deepcopy(model), None
    if isinstance(teacher, nn.Module):
        if teacher is model:
            raise SecateurError("The teacher is the model that trains. Pass teacher=None for a frozen copy of it.")
        return teacher, None
    if isinstance(teacher, str | os.PathLike):
        return load(teacher)
    raise SecateurError(f"teacher must be a model, a folder or name, or None; got {type(teacher).__name__}.")


def _vocabulary(model: Any) -> int:
    layer = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(layer, "weight", None)
    number = getattr(model.config.get_text_config(), "vocab_size", None) if weight is None else weight.shape[0]
    if number is None:
        raise ModelError(f"{type(model).__name__} predicts no tokens to distill. Use a language model.")
    return int(number)


def check_teacher(student: Any, teacher: Any, tokenizer: Any, teacher_tokenizer: Any) -> None:
    """Refuse a teacher that predicts other tokens, or from others than the student."""
    if is_causal(student) and not is_causal(teacher):
        raise ModelError(
            f"The teacher is a {type(teacher).__name__}, which sees the tokens that a causal language model has to"
            " predict. Use a causal language model."
        )
    mine, theirs = _vocabulary(student), _vocabulary(teacher)
    if mine != theirs:
        raise ModelError(
            f"The student predicts {mine:,} tokens and the teacher {theirs:,}: their logits cannot be compared. Use a"
            " teacher with the student's vocabulary."
        )
    if not all(hasattr(one, "get_vocab") for one in (tokenizer, teacher_tokenizer)):
        return
    ours, others = tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
    odd = sorted(token for token in ours.keys() | others.keys() if ours.get(token) != others.get(token))
    if odd:
        raise ModelError(
            f"The tokenizers of student and teacher differ in {len(odd):,} tokens, such as {odd[0]!r} (number"
            f" {ours.get(odd[0])} and {others.get(odd[0])}). Use a teacher with the student's tokenizer."
        )
