"""Models and tokenizers small enough to make in a test."""

from __future__ import annotations

from typing import Any

import pytest

VOCABULARY = 96  # printable ASCII, the newline, and an end of text
END = "<end>"

pytest.importorskip("transformers", reason="models of Hugging Face need transformers, which is not installed")


def tokenizer(limit: int = 16, prefix: bool = False) -> Any:
    """A byte-level tokenizer without merges; with `prefix`, one that puts a space before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted({*map(chr, range(33, 127)), "Ġ", "Ċ"} - {"~"})
    words = Tokenizer(models.BPE(vocab={END: 0, **{sign: n for n, sign in enumerate(alphabet, 1)}}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens([END])
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END, model_max_length=limit)


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY + 1}
    marks = {"bos_token_id": None, "eos_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **marks, **changes}))


def gpt2(**changes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": VOCABULARY + 1}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, "bos_token_id": 0, "eos_token_id": 0, **changes}))


def bert(kind: str = "BertForMaskedLM", **changes: Any) -> Any:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(
        **{**sizes, "vocab_size": VOCABULARY + 1, "max_position_embeddings": 32, **changes}
    )
    return getattr(transformers, kind)(config)
