"""Hugging Face models: loading, errors, perplexity and evaluation tasks, without the hub."""

from __future__ import annotations

import io
import json
import math
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secateur.errors import ModelError, SecateurError
from secateur.inference import saving
from secateur.integrations import evaluation, smollm2
from secateur.integrations import folder as models
from secateur.integrations import transformers as hf
from tests import tiny
from tests.test_api import run_blocked


def stored(model: Any, folder: Path, **changes: Any) -> Path:
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("make", "named", "expected"),
    [
        (tiny.llama, True, "LlamaForCausalLM"),
        (tiny.llama, False, "LlamaForCausalLM"),
        (tiny.gpt2, True, "GPT2LMHeadModel"),
        (tiny.bert, True, "BertForMaskedLM"),
        (lambda: tiny.bert("BertModel"), True, "BertModel"),
    ],
)
def test_a_folder_is_loaded_as_what_it_was(make: Any, named: bool, expected: str, tmp_path: Path) -> None:
    model = make()
    folder = stored(model, tmp_path, **({} if named else {"architectures": None}))
    found, tokenizer = hf.load(folder)
    assert type(found).__name__ == expected
    assert not found.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), found.parameters(), strict=True))
    assert tokenizer("trees").input_ids == tiny.tokenizer()("trees").input_ids


def test_where_nothing_is_named_the_first_kind_that_fits_is_taken() -> None:
    import transformers

    def kind(config: Any, *names: str) -> str:
        config.architectures = list(names)
        return saving.pretrained_class(config).__name__

    assert kind(transformers.LlamaConfig()) == kind(transformers.LlamaConfig(), "pipeline") == "AutoModelForCausalLM"
    assert kind(transformers.DistilBertConfig()) == "AutoModelForMaskedLM"
    assert kind(transformers.ViTConfig(), "Unheard") == "AutoModel"
    assert kind(transformers.LlamaConfig(), "LlamaModel") == "LlamaModel"


def test_dtype_and_device(tmp_path: Path) -> None:
    folder = stored(tiny.llama().to(torch.bfloat16), tmp_path)
    assert next(hf.load(folder)[0].parameters()).dtype == torch.bfloat16
    model, _ = hf.load(str(folder), dtype=torch.float32, device="cpu")
    assert next(model.parameters()).dtype == torch.float32
    with pytest.raises(ModelError, match="There is no device 'meta2'. Use a name that torch knows"):
        hf.load(folder, device="meta2")


def test_missing_weights_are_told(tmp_path: Path) -> None:
    tiny.bert("BertModel").save_pretrained(tmp_path)
    folder = stored(tiny.bert("BertModel", num_hidden_layers=1), tmp_path, num_hidden_layers=2)
    with pytest.warns(
        UserWarning, match="lacks 16 tensors, which are initialized at random: encoder.layer.1.attention"
    ):
        hf.load(folder)


def test_folders_that_cannot_be_loaded(tmp_path: Path) -> None:
    for name in (str(tmp_path / "gone"), "./gone", "a/b/c"):
        with pytest.raises(ModelError, match=f"There is no folder {name}. Give a folder, a name on the"):
            hf.load(name)
    with pytest.raises(ModelError, match="cannot be loaded: Unrecognized model"):
        hf.load(tmp_path)
    folder = stored(tiny.llama(), tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match="cannot be loaded: "):
        hf.load(folder)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot be loaded: .*tokenizer"):
        hf.load(tmp_path)


def test_a_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def refuse(*given: Any, **options: Any) -> Any:
        raise OSError("We couldn't connect")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    monkeypatch.setattr(socket, "create_connection", lambda *given: io.BytesIO())
    message = r"user/model cannot be loaded \(there is no such folder, so it was looked up on .* hub\): We couldn't"
    with pytest.raises(ModelError, match=message):
        hf.load("user/model")


def test_a_hub_that_no_name_leads_to_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def refuse(*given: Any, **options: Any) -> Any:
        raise OSError("Name or service not known")

    def never(*given: Any, **options: Any) -> Any:
        raise AssertionError("asked all the same")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(models, "getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", never)
    with pytest.raises(
        ModelError, match=r"no folder nosuch, no model .* in the cache .* cannot be reached .*not known"
    ):
        hf.load("nosuch")
    with pytest.raises(ModelError, match="neither a folder nor a name on the Hugging Face hub"):
        hf.load("no such")


def test_smollm2_is_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "load", lambda: (tiny.llama(), tiny.tokenizer()))
    model, _ = hf.load("smollm2", dtype=torch.bfloat16)
    assert next(model.parameters()).dtype == torch.bfloat16
    assert not model.training


@pytest.mark.parametrize(
    ("call", "blocked", "message"),
    [
        (lambda: hf.load("x"), "transformers", 'Loading x needs transformers: pip install "secateur[hf]".'),
        (
            lambda: hf.save(0, 0, "x", {}, {}),
            "safetensors",
            'Saving a model needs safetensors: pip install "secateur[hf]".',
        ),
        (lambda: hf.load_masks("x"), "safetensors", 'Reading masks needs safetensors: pip install "secateur[hf]".'),
        (lambda: hf.lm_eval(nn.Linear(1, 1), 0, []), "lm_eval", "Running tasks needs lm_eval: pip install lm_eval."),
    ],
)
def test_what_is_missing_is_named(call: Any, blocked: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == blocked]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, blocked, None)
    with pytest.raises(SecateurError) as caught:
        call()
    assert str(caught.value) == message


def test_a_library_that_lacks_something_itself_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_library.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    from secateur.errors import library

    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        library("broken_library", "This", "that")


def test_contexts() -> None:
    evaluation.check_context(tiny.gpt2(), 32)
    evaluation.check_context(tiny.llama(), 32)
    evaluation.check_context(nn.Linear(2, 2), 10**9)
    with pytest.raises(
        ModelError, match="GPT2LMHeadModel has 32 learned positions, and a context of 33 was asked for."
    ):
        evaluation.check_context(tiny.gpt2(), 33)
    with pytest.raises(ModelError, match="BertModel has 32 learned positions, .* Use at most 32."):
        evaluation.check_context(tiny.bert("BertModel"), 40)
    with pytest.warns(
        UserWarning, match="LlamaForCausalLM was made for 32 tokens; with 33 its perplexity may be worse."
    ):
        evaluation.check_context(tiny.llama(), 33)


@pytest.mark.parametrize(("kind", "limit"), [("Roberta", 30), ("OPT", 32)])
def test_contexts_of_tables_with_an_offset(kind: str, limit: int) -> None:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9, "ffn_dim": 16}
    config = getattr(transformers, f"{kind}Config")(**sizes, intermediate_size=16, max_position_embeddings=32)
    config.word_embed_proj_dim = 16
    model = getattr(transformers, f"{kind}Model")(config).eval()
    evaluation.check_context(model, limit)
    model(torch.full((1, limit), 5))  # so long it can be
    with pytest.raises(ModelError, match=f"has {limit} learned positions"):
        evaluation.check_context(model, limit + 1)


def plainly(model: Any, rows: Tensor) -> float:
    """Perplexity, one token at a time."""
    losses = []
    with torch.no_grad():
        for row in rows:
            guesses = model(row[None]).logits[0].double().log_softmax(-1)
            losses += [-guesses[place, row[place + 1]].item() for place in range(len(row) - 1)]
    return math.exp(sum(losses) / len(losses))


@pytest.mark.parametrize("make", [tiny.llama, tiny.gpt2])
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_perplexity_is_that_of_a_plain_loop(make: Any, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "POSITIONS", 7)
    model = make(initializer_range=0.5).eval()
    rows = torch.randint(0, tiny.VOCABULARY, (5, 23))
    told: list[tuple[int, int]] = []
    found = hf.perplexity(model, rows, batch=batch, progress=lambda *now: told.append(now))
    # Sums of fp32 losses in another order, and the model itself in other batches.
    assert found == pytest.approx(plainly(model, rows), rel=1e-5)
    assert told[-1] == (5, 5)
    assert len(told) == -(-5 // batch)


def test_perplexity_leaves_the_model_as_it_was() -> None:
    model = tiny.gpt2().train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    hf.perplexity(model, torch.zeros(1, 8, dtype=torch.int64))
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_perplexity_of_a_plain_module_and_of_a_ruined_one() -> None:
    class Certain(nn.Module):
        def __init__(self, height: float) -> None:
            super().__init__()
            self.height = nn.Parameter(torch.tensor(height))

        def forward(self, tokens: Tensor) -> Tensor:
            return nn.functional.one_hot(tokens, 4) * self.height

    rows = torch.tensor([[0, 1, 2, 3]])
    assert hf.perplexity(Certain(0.0), rows) == pytest.approx(4)
    assert hf.perplexity(Certain(1e6), rows) == math.inf
    assert math.isnan(hf.perplexity(Certain(math.nan), rows))


def test_what_has_no_perplexity() -> None:
    rows = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(ModelError, match="BertForMaskedLM sees the tokens that it predicts; perplexity needs a causal"):
        hf.perplexity(tiny.bert(), rows)
    for model in (tiny.bert("BertModel"), tiny.bert("BertForSequenceClassification")):
        with pytest.raises(ModelError, match="does not predict a token at every position: it has no perplexity."):
            hf.perplexity(model, rows)
    for wrong in (rows[:0], rows[:, :1], rows[0]):
        with pytest.raises(ModelError, match="Perplexity needs windows"):
            hf.perplexity(tiny.llama(), wrong)
    with pytest.raises(ModelError, match="and a batch of 1 or more; got .2, 8. and 0"):
        hf.perplexity(tiny.llama(), rows, batch=0)
    with pytest.raises(ModelError, match="has 32 learned positions"):
        hf.perplexity(tiny.gpt2(), torch.zeros(1, 40, dtype=torch.int64))


def test_tasks_go_through_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def simple_evaluate(**options: Any) -> dict[str, Any]:
        asked.update(options)
        assert not options["model"].pretrained.training
        values = {"alias": "quiz", "acc,none": 0.5, "acc_stderr,none": 0.1, "exact,strict": 1, "sample_len": 3}
        return {"results": {"quiz": values}}

    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=simple_evaluate))
    wrapped = SimpleNamespace(HFLM=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", wrapped)
    model = tiny.llama().train()
    assert hf.lm_eval(model, tiny.tokenizer(), ["quiz"], limit=4) == {"quiz acc": 0.5, "quiz exact,strict": 1.0}
    assert (asked["tasks"], asked["limit"]) == (["quiz"], 4)
    assert model.training


def test_what_the_command_line_uses_imports_without_its_libraries() -> None:
    done = run_blocked(
        "from secateur.integrations import evaluation, folder, pruning, smollm2, text",
        ["transformers", "tokenizers", "gguf", "numpy", "safetensors"],
    )
    assert done.returncode == 0, done.stderr
    assert issubclass(ModelError, SecateurError)


FULL = [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: can't allocate memory")]


def failing(error: Exception) -> Any:
    def fail(*given: Any, **options: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", FULL, ids=lambda error: type(error).__name__)
def test_a_lack_of_memory_stays_what_it_is(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    folder = stored(tiny.llama(), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(transformers.LlamaForCausalLM, "from_pretrained", failing(error))
        with pytest.raises(type(error), match=str(error)) as found:
            hf.load(folder)
        assert found.value is error
    with monkeypatch.context() as patch:
        patch.setattr(transformers.LlamaForCausalLM, "to", failing(error))
        with pytest.raises(type(error), match=str(error)) as found:
            hf.load(folder, device="cpu")
        assert found.value is error
    with pytest.raises(type(error), match=str(error)) as found, evaluation.reading(tiny.llama()):
        raise error
    assert found.value is error


def test_only_missing_files_mean_that_there_is_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=32)).save_pretrained(tmp_path)
    assert hf.load(tmp_path)[1] is None
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", failing(RuntimeError("a bug")))
    with pytest.raises(ModelError, match="cannot be loaded: a bug"):
        hf.load(tmp_path)


def test_any_path_like_object_names_a_folder(tmp_path: Path) -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def __fspath__(self) -> str:
            return str(tmp_path / self.name)

    model = tiny.llama()
    mask = {"lm_head.weight": torch.ones_like(model.lm_head.weight, dtype=torch.bool)}
    hf.save(model, tiny.tokenizer(), Named("model"), mask, {})
    assert torch.equal(hf.load_masks(Named("model"))["lm_head.weight"], mask["lm_head.weight"])
    loaded, _ = hf.load(Named("model"))
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
