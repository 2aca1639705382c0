"""Distillation: the chunked loss against the plain formula, its memory, and the Trainer around it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from transformers import Trainer, TrainingArguments, default_data_collator

from secateur.errors import ModelError, SecateurError
from secateur.integrations import distillation
from secateur.integrations.distillation import DistillationTrainer, Mixture, chunked_loss, hidden_loss
from tests import tiny
from tests.test_distributed import launch

IGNORED = -100


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    usual = {"use_cpu": True, "report_to": "none", "max_steps": 1, "learning_rate": 0.1, "optim": "sgd"}
    usual |= {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "save_strategy": "no", "disable_tqdm": True}
    return TrainingArguments(str(folder), **{**usual, **changes})


def rows(count: int, length: int = 12, padded: bool = False) -> list[dict[str, Tensor]]:
    found = []
    for number in range(count):
        ids = torch.randint(1, tiny.VOCABULARY, (length,))
        labels, mask = ids.clone(), torch.ones_like(ids)
        if padded:
            end = length - number % 4
            labels[end:], mask[end:], labels[:2] = IGNORED, 0, IGNORED
        found.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return found


def batch_of(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def trainer(folder: Path, student: Any, teacher: Any = None, changes: Any = None, **options: Any) -> Any:
    options.setdefault("train_dataset", rows(4))
    return DistillationTrainer(student, arguments(folder, **(changes or {})), teacher=teacher, **options)


def plain_loss(student: Any, teacher: Any, batch: dict[str, Tensor], mixture: Mixture) -> Tensor:
    """The formula with all logits at once."""
    given = {name: value for name, value in batch.items() if name != "labels"}
    labels = batch["labels"][:, 1:]
    keep = labels != IGNORED
    mine = student(**given).logits[:, :-1][keep]
    theirs = teacher(**given).logits[:, :-1][keep].detach()
    wanted, t = labels[keep], mixture.temperature
    p, q = (theirs / t).softmax(-1), (mine / t).softmax(-1)
    divergence = (p * (p.log() - q.log())).sum(-1).mean()
    entropy = nn.functional.cross_entropy(mine, wanted)
    return mixture.alpha * t**2 * divergence + (1 - mixture.alpha) * entropy


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def gpt2(**changes: Any) -> Any:
    return tiny.gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **changes)


@pytest.mark.parametrize("make", [tiny.llama, gpt2], ids=["llama", "gpt2 (tied)"])
@pytest.mark.parametrize("mixture", [Mixture(2.0, 0.7), Mixture(1.0, 1.0), Mixture(1.0, 0.0)], ids=str)
@pytest.mark.parametrize("by_head", [True, False])
def test_gradients_are_those_of_the_plain_formula(
    make: Callable[..., Any], mixture: Mixture, by_head: bool, tmp_path: Path
) -> None:
    student, teacher = (make(initializer_range=0.3).double() for _ in range(2))
    batch = batch_of(rows(3, padded=True))
    plain_loss(student, teacher.eval(), batch, mixture).backward()
    expected = gradients(student)
    student.zero_grad()
    job = trainer(tmp_path, student, teacher, temperature=mixture.temperature, alpha=mixture.alpha, positions=5)
    if not by_head:
        job._by_head = False
    student.train()
    loss = job.compute_loss(student, batch)
    assert job._by_head is by_head
    loss.backward()
    found = gradients(student)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # fp64; sums in another order.
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
    assert all(weight.grad is None for weight in teacher.parameters())


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = [one for one in (found if isinstance(found, tuple | list) else (found,)) if isinstance(one, Tensor)]
        self.most = max(self.most, *(one.numel() for one in made), 0)
        return found


@pytest.mark.parametrize("by_head", [True, False])
def test_no_tensor_is_as_large_as_all_logits(by_head: bool, tmp_path: Path) -> None:
    vocabulary, width, count = 1000, 8, 64
    student = tiny.llama(vocab_size=vocabulary, hidden_size=width, num_attention_heads=2, max_position_embeddings=128)
    job = trainer(tmp_path, student, alpha=0.5, positions=4)
    batch = batch_of(rows(1, count))
    job._by_head = by_head
    student.train()
    with Largest() as seen:
        job.compute_loss(student, batch).backward()
    if by_head:
        assert seen.most < vocabulary * max(width, 4) * 1.01  # a chunk, or a gradient of the output layer
    else:
        assert seen.most >= vocabulary * (count - 1)


def test_nothing_of_a_chunk_is_saved_for_the_backward_pass() -> None:
    head = nn.Linear(8, 500)
    hidden, labels = torch.randn(40, 8, requires_grad=True), torch.randint(0, 500, (40,))
    kept: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = chunked_loss(hidden, head, hidden.detach(), head, labels, Mixture(alpha=0.5), 4)
    assert sum(kept) == 40 * (8 + 8 + 1)  # hidden states of both and labels: no logits
    loss.backward()
    assert hidden.grad is not None


def test_a_teacher_equal_to_the_student_has_no_gradient(tmp_path: Path) -> None:
    student = tiny.llama(initializer_range=0.3).double()
    job = trainer(tmp_path, student, temperature=3.0)
    student.train()
    loss = job.compute_loss(student, batch_of(rows(2)))
    loss.backward()
    assert abs(loss.item()) < 1e-12
    assert all(gradient.abs().max() < 1e-12 for gradient in gradients(student).values())


@pytest.mark.parametrize("padded", [False, True])
def test_accumulation_of_two_equals_one_batch_of_double_size(padded: bool, tmp_path: Path) -> None:
    items, start, teacher = rows(4, padded=padded), tiny.llama(initializer_range=0.3), tiny.llama(initializer_range=0.3)
    found = []
    for size, times in ((4, 1), (2, 2), (1, 4)):
        changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": times}
        student = copy.deepcopy(start)
        job = trainer(tmp_path, student, teacher, changes, alpha=0.6, temperature=2.0, train_dataset=items)
        job.train()
        found.append((student, job.state.log_history[-1]["train_loss"]))
    for other, loss in found[1:]:
        assert loss == pytest.approx(found[0][1], rel=1e-5)  # fp32, other batches
        for mine, theirs in zip(found[0][0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_cross_entropy_alone_is_trainers_own_loss(tmp_path: Path) -> None:
    items, start = rows(4, padded=True), tiny.llama(initializer_range=0.3)
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    found = []
    for kind, options in ((Trainer, {}), (DistillationTrainer, {"alpha": 0.0})):
        student = copy.deepcopy(start)
        kind(student, arguments(tmp_path, **changes), train_dataset=items, **options).train()
        found.append(student)
    for mine, theirs in zip(found[0].parameters(), found[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_evaluation_reports_plain_cross_entropy(tmp_path: Path) -> None:
    items, student = rows(4, padded=True), tiny.llama(initializer_range=0.3)
    job = trainer(tmp_path, student, tiny.llama(), eval_dataset=items)
    expected = Trainer(student, arguments(tmp_path), eval_dataset=items).evaluate()["eval_loss"]
    assert job.evaluate()["eval_loss"] == expected


def test_the_teacher_is_frozen_and_in_no_checkpoint(tmp_path: Path) -> None:
    student = tiny.llama()
    names = set(student.state_dict())
    job = trainer(tmp_path, student, changes={"max_steps": 2, "save_strategy": "steps", "save_steps": 2})
    before = {name: weight.clone() for name, weight in job.teacher.state_dict().items()}
    job.train()
    assert not job.teacher.training
    assert all(torch.equal(weight, before[name]) for name, weight in job.teacher.state_dict().items())
    from safetensors.torch import load_file

    assert set(load_file(tmp_path / "checkpoint-2" / "model.safetensors")) == names
    assert set(student.state_dict()) == names


def test_no_teacher_is_a_copy_of_the_model_as_it_was(tmp_path: Path) -> None:
    student = tiny.llama()
    job = trainer(tmp_path, student, teacher_dtype=torch.bfloat16)
    before = student.lm_head.weight.detach().clone()
    with torch.no_grad():
        student.lm_head.weight.zero_()
    assert torch.equal(job.teacher.lm_head.weight, before.to(torch.bfloat16))
    assert student.lm_head.weight.dtype == torch.float32
    job.train()


def test_a_teacher_from_a_folder(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path / "teacher")
    tiny.tokenizer().save_pretrained(tmp_path / "teacher")
    given = {"processing_class": tiny.tokenizer(), "data_collator": default_data_collator}
    job = trainer(tmp_path, tiny.llama(), str(tmp_path / "teacher"), **given)
    job.train()
    other = tiny.tokenizer()
    other.add_tokens(["tree"])
    with pytest.raises(ModelError, match="tokenizers of student and teacher differ in 1 tokens, such as 'tree'"):
        trainer(tmp_path, tiny.llama(), str(tmp_path / "teacher"), processing_class=other)


def capped(**changes: Any) -> Any:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": tiny.VOCABULARY + 1}
    marks = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    config = transformers.Gemma2Config(**{**sizes, **heads, **marks, **changes}, final_logit_softcapping=0.5)
    return transformers.Gemma2ForCausalLM(config)


def test_a_model_that_caps_its_logits_is_distilled_from_those(tmp_path: Path) -> None:
    student, teacher = (capped(initializer_range=0.5).double() for _ in range(2))
    batch = batch_of(rows(2))
    expected = plain_loss(student, teacher.eval(), batch, Mixture())
    job = trainer(tmp_path, student, teacher, positions=3)
    student.train()
    assert job.compute_loss(student, batch).item() == pytest.approx(expected.item(), rel=1e-9)
    assert job._by_head is False


def test_masked_models_are_not_shifted(tmp_path: Path) -> None:
    student, teacher = (tiny.bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).double() for _ in range(2))
    batch = batch_of(rows(2, padded=True))
    keep = batch["labels"] != IGNORED
    given = {name: value for name, value in batch.items() if name != "labels"}
    mine, theirs = student(**given).logits[keep].log_softmax(-1), teacher(**given).logits[keep].log_softmax(-1)
    expected = (theirs.exp() * (theirs - mine)).sum(-1).mean()
    job = trainer(tmp_path, student, teacher)
    student.train()
    assert job.compute_loss(student, batch).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_batch_without_labels_costs_nothing(tmp_path: Path) -> None:
    student = tiny.llama()
    job = trainer(tmp_path, student, tiny.llama())
    batch = batch_of(rows(2))
    batch["labels"].fill_(IGNORED)
    student.train()
    loss = job.compute_loss(student, batch)
    loss.backward()
    assert loss.item() == 0
    assert all(not gradient.any() for gradient in gradients(student).values())


def test_hidden_states(tmp_path: Path) -> None:
    student, teacher = (tiny.llama(initializer_range=0.3).double() for _ in range(2))
    batch = batch_of(rows(3, padded=True))
    given = {name: value for name, value in batch.items() if name != "labels"}
    mine, theirs = (one(**given, output_hidden_states=True).hidden_states for one in (student, teacher))
    real = batch["attention_mask"].bool()
    expected = sum(
        (a[real] - b[real]).square().sum() / b[real].square().sum() for a, b in zip(mine[1:], theirs[1:], strict=True)
    ) / (len(mine) - 1)
    assert hidden_loss(mine, theirs, real).item() == pytest.approx(expected.item(), rel=1e-9)
    student.train()
    losses = [
        trainer(tmp_path, student, copy.deepcopy(teacher), hidden=weight).compute_loss(student, batch).item()
        for weight in (0.0, 2.0)
    ]
    assert losses[1] - losses[0] == pytest.approx(2 * expected.item(), rel=1e-6)
    with pytest.raises(ModelError, match="the student has 3 hidden states .* the teacher 2"):
        trainer(tmp_path, student, tiny.llama(num_hidden_layers=1).double(), hidden=1.0).compute_loss(student, batch)


def test_half_precision_trains(tmp_path: Path) -> None:
    student = tiny.llama(initializer_range=0.3)
    job = trainer(tmp_path, student, tiny.llama(initializer_range=0.3), {"bf16": True, "max_steps": 3}, positions=4)
    job.train()
    assert job._by_head is True
    assert all(weight.dtype == torch.float32 for weight in student.parameters())


def test_what_cannot_be_distilled(tmp_path: Path) -> None:
    student = tiny.llama()
    for options, message in (
        ({"teacher": tiny.llama(vocab_size=50)}, "The student predicts 97 tokens and the teacher 50"),
        ({"teacher": student}, "The teacher is the model that trains"),
        ({"teacher": 3}, "teacher must be a model, a folder or name, or None; got int"),
        ({"teacher": str(tmp_path / "gone")}, "There is no folder"),
        ({"temperature": 0.0}, "temperature must be a positive number; got 0.0"),
        ({"alpha": 1.5}, "alpha is the share of the KL divergence, from 0 to 1; got 1.5"),
        ({"hidden": -1.0}, "hidden must be a number of at least 0"),
        ({"positions": 0}, "positions must be at least 1"),
        ({"compute_loss_func": print}, "has its own loss function"),
        ({"changes": {"label_smoothing_factor": 0.1}}, "does not smooth labels"),
    ):
        with pytest.raises(SecateurError, match=message):
            trainer(tmp_path, student, **{"teacher": None, **options})
    job = trainer(tmp_path, student)
    student.train()
    with pytest.raises(SecateurError, match="Distillation needs labels"):
        job.compute_loss(student, {"input_ids": torch.ones(1, 4, dtype=torch.int64)})


def test_a_chunk_fits_a_large_vocabulary() -> None:
    assert distillation.CHUNK // 256_000 >= 128


def pair_and_rows() -> tuple[Any, Any, list[dict[str, Tensor]]]:
    """A student, a teacher and four rows with labels of different numbers, the same in every process."""
    torch.manual_seed(0)
    student, teacher = (tiny.llama(initializer_range=0.3) for _ in range(2))
    return student, teacher, rows(4, padded=True)


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    student, teacher, items = pair_and_rows()
    changes = {"per_device_train_batch_size": 4}
    trainer(tmp_path, student, teacher, changes, alpha=0.6, train_dataset=items).train()
    found = launch(tmp_path / "out.pt", 2, "ddp", "fsdp", worker="tests.distillation_worker")
    for job in ("ddp", "fsdp"):
        for name, weight in student.named_parameters():
            # fp32; gradients are summed in another order.
            torch.testing.assert_close(found[job][name], weight.detach(), rtol=1e-4, atol=1e-6, msg=f"{job} {name}")
