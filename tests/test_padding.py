"""Padded positions do not count: statistics, masks and reconstructed weights are those of the text alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.model.prunable import find_prunable
from secateur.oneshot.activations import InputStatistics, gather_inputs
from secateur.oneshot.batches import padding_masks, run_model

transformers = pytest.importorskip("transformers", reason="padded batches are those of transformers' models")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LENGTHS, LONGEST = (5, 9, 12, 7), 12


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, vocab_size=64))


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, vocab_size=64)
    return transformers.MixtralForCausalLM(config)


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=80, vocab_size=64)
    )


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, vocab_size=64))


def t5() -> Any:
    config = transformers.T5Config(d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, vocab_size=64)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


def bart() -> Any:
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in
             {"layers": 2, "ffn_dim": 48, "attention_heads": 4}.items()}  # fmt: skip
    config = transformers.BartConfig(d_model=32, max_position_embeddings=80, vocab_size=64, **sizes)
    return transformers.BartForConditionalGeneration(config)


def bert_to_gpt2() -> Any:
    """Keys and values of the decoder's cross-attention are one weight."""
    decoder = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=80, vocab_size=64, is_decoder=True, add_cross_attention=True
    )
    encoder = transformers.BertConfig(**SIZES, vocab_size=64)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 0, 0
    return transformers.EncoderDecoderModel(config)


def switch() -> Any:
    """Experts get tokens of the encoder in one half of the model and of the decoder in the other."""
    config = transformers.SwitchTransformersConfig(
        d_model=32, d_ff=48, d_kv=8, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=64, num_experts=2,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=64,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    return transformers.SwitchTransformersForConditionalGeneration(config)


def texts() -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randint(1, 64, (length,)) for length in LENGTHS]


def padded(width: int, mask: bool = True) -> dict[str, Tensor]:
    """One batch of all texts, filled up on the right with one token and labels of -100."""
    ids = torch.full((len(LENGTHS), width), 7)
    for row, text in zip(ids, texts(), strict=True):
        row[: len(text)] = text
    real = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    batch = {"input_ids": ids, "labels": ids.masked_fill(~real, -100)}
    return batch | ({"attention_mask": real.long()} if mask else {})


def alone() -> list[dict[str, Tensor]]:
    """The same texts one by one, without padding."""
    return [
        {"input_ids": text[None], "labels": text[None], "attention_mask": torch.ones(1, len(text))} for text in texts()
    ]


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize(
    "settings", [{"score": "wanda"}, {"method": "sparsegpt"}, {"score": "magnitude", "reconstruct": True}]
)
@pytest.mark.parametrize("build", [llama, mixtral, gpt2])
def test_padding_changes_nothing(build: Any, settings: dict[str, Any], mask: bool) -> None:
    torch.manual_seed(0)
    model = build()
    other = copy.deepcopy(model)
    expected = sc.prune(model, alone(), sparsity=0.6, **settings)
    report = sc.prune(
        other, [padded(6 * LONGEST, mask) if mask else padded(2 * LONGEST, mask)], sparsity=0.6, **settings
    )
    apart = sum(int((found != expected.masks[name]).sum()) for name, found in report.masks.items())
    assert apart <= 0.002 * report.prunable  # sums in another order may swap neighbours at a cut
    for name, weight in other.named_parameters():
        right = model.get_parameter(name).detach()
        same = report.masks[name] == expected.masks[name] if name in report.masks else torch.ones_like(right) > 0
        off = (weight.detach() - right)[same].norm() / right.norm().clamp(min=1e-30)
        assert float(off) < 0.02  # few tokens leave a layer's equations nearly singular, so rounding shows


def test_what_padding_did_before_it_was_left_out() -> None:
    """Without an attention mask the result differs, so the test above can fail."""
    torch.manual_seed(0)
    model = llama()
    expected = sc.prune(copy.deepcopy(model), alone(), sparsity=0.6, score="wanda")
    blind = {"input_ids": padded(2 * LONGEST)["input_ids"]}
    report = sc.prune(model, [blind], sparsity=0.6, score="wanda")
    assert (
        sum(int((found != expected.masks[name]).sum()) for name, found in report.masks.items()) > 0.02 * report.prunable
    )


def test_an_encoder_is_told_by_its_mask_alone() -> None:
    batch = padded(LONGEST)
    assert torch.equal(padding_masks(bert(), batch)["input"], batch["attention_mask"].bool())
    assert padding_masks(bert(), {k: v for k, v in batch.items() if k != "attention_mask"}) == {}


def test_a_prompt_without_labels_is_not_padding() -> None:
    batch = padded(LONGEST, mask=False)
    batch["labels"][:, :3] = -100
    real = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
    assert torch.equal(padding_masks(llama(), batch)["input"], real)
    assert padding_masks(llama(), {"input_ids": batch["input_ids"]}) == {}
    assert padding_masks(llama(), batch["input_ids"]) == {}
    whole = batch["input_ids"]
    assert padding_masks(llama(), {"input_ids": whole, "labels": whole}) == {}


TARGETS = (11, 3, 6, 12)  # lengths of the targets that belong to the texts


def pairs(width: int, mask: bool) -> dict[str, Tensor]:
    """One batch of texts and targets, both padded to one width; labels or a mask tell how long targets are."""
    real = torch.arange(width) < torch.tensor(TARGETS)[:, None]
    labels = torch.randint(1, 64, real.shape, generator=torch.Generator().manual_seed(5)).masked_fill(~real, -100)
    batch = padded(width) | {"labels": labels}
    return batch | {"decoder_attention_mask": real.long(), "labels": labels.clamp(min=0)} if mask else batch


def pairs_alone(mask: bool) -> list[dict[str, Tensor]]:
    """The same texts and targets one by one, without padding."""
    both = pairs(LONGEST, mask)
    names = ("labels", "decoder_attention_mask") if mask else ("labels",)
    return [
        batch | {name: both[name][n : n + 1, : TARGETS[n]].contiguous() for name in names}
        for n, batch in enumerate(alone())
    ]


@pytest.mark.filterwarnings("ignore:Version v4.12.0:FutureWarning")  # transformers, of every batch with labels
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("build", [t5, bart, bert_to_gpt2, switch])
def test_texts_and_targets_of_one_width_each_have_their_own_padding(build: Any, mask: bool) -> None:
    """Keys and values of cross-attention read the encoder's positions, all else in a decoder the decoder's."""
    torch.manual_seed(0)
    model = build()
    prunables, _ = find_prunable(model)
    found = []
    for batches in (pairs_alone(mask), [pairs(LONGEST, mask)]):
        statistics = InputStatistics(prunables)
        gather_inputs(model, batches, statistics, forward=run_model)
        found.append(statistics)
    counts = {int(statistic.sum()) for statistic in found[0].tokens.values()}
    assert {sum(LENGTHS), sum(TARGETS)} <= counts  # 33 and 32
    for prunable in prunables:
        assert found[0].tokens[prunable.name].tolist() == found[1].tokens[prunable.name].tolist(), prunable.name
        torch.testing.assert_close(found[0].norms(prunable), found[1].norms(prunable), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings", [{"score": "wanda"}, {"method": "sparsegpt"}, {"score": "magnitude", "reconstruct": True}]
)
def test_padding_of_texts_and_targets_changes_nothing(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = t5()
    other = copy.deepcopy(model)
    expected = sc.prune(model, pairs_alone(False), **settings)
    report = sc.prune(other, [pairs(LONGEST, False)], **settings)
    apart = sum(int((found != expected.masks[name]).sum()) for name, found in report.masks.items())
    assert apart <= 0.002 * report.prunable  # sums in another order may swap neighbours at a cut
    for name in report.masks:
        right, same = model.get_parameter(name).detach(), report.masks[name] == expected.masks[name]
        off = (other.get_parameter(name).detach() - right)[same].norm() / right.norm()
        assert float(off) < 0.02, name  # few tokens leave a layer's equations nearly singular, so rounding shows


def test_what_a_decoder_reads_decides_its_mask() -> None:
    model, batch = bart(), pairs(LONGEST, False)
    real = torch.arange(LONGEST) < torch.tensor(TARGETS)[:, None]
    batch["labels"][0, :2] = -100
    plain = real.clone()
    plain[0, :2] = False  # labels are also the inputs, so there is nothing
    assert torch.equal(padding_masks(model, batch)["decoder"], plain)
    ids = {"decoder_input_ids": torch.ones(len(TARGETS), LONGEST, dtype=torch.long)}
    assert torch.equal(padding_masks(model, batch | ids)["decoder"], real)  # a prompt that is not predicted
    del batch["labels"]
    assert bool(padding_masks(model, batch | ids)["decoder"].all())
    assert torch.equal(padding_masks(model, batch)["decoder"], batch["attention_mask"].bool())  # BART reads the text


def test_both_sides_of_an_encoder_decoder() -> None:
    torch.manual_seed(0)
    model = t5()
    ids = padded(LONGEST)
    short = {key: value[:, :6].contiguous() for key, value in padded(LONGEST).items()}
    padded_batch = {
        "input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"], "labels": short["labels"],
        "decoder_attention_mask": short["attention_mask"],
    }  # fmt: skip
    apart = [
        {
            "input_ids": text[None], "attention_mask": torch.ones(1, len(text)), "labels": text[None, :6].contiguous(),
            "decoder_attention_mask": torch.ones(1, min(6, len(text))),
        }
        for text in texts()
    ]  # fmt: skip
    expected = sc.prune(copy.deepcopy(model), apart, score="wanda")
    report = sc.prune(model, [padded_batch], score="wanda")
    assert (
        sum(int((found != expected.masks[name]).sum()) for name, found in report.masks.items())
        <= 0.002 * report.prunable
    )


def test_attention_of_torch_reads_positions_first() -> None:
    """nn.MultiheadAttention multiplies [positions, batch, features], whichever way round it is given."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attention = nn.Embedding(64, 16), nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Tensor:
            hidden = self.embed(input_ids)
            return self.attention(hidden, hidden, hidden, key_padding_mask=attention_mask == 0, need_weights=False)[0]

    torch.manual_seed(0)
    model = Small()
    prunables, _ = find_prunable(model, only="attention")
    found = []
    for batches in (alone(), [padded(2 * LONGEST)]):
        statistics = InputStatistics(prunables)
        gather_inputs(model, batches, statistics, forward=run_model)
        found.append(statistics)
    for prunable in prunables:
        assert found[0].tokens[prunable.name].tolist() == found[1].tokens[prunable.name].tolist()
        torch.testing.assert_close(found[0].norms(prunable), found[1].norms(prunable))


def test_queries_and_keys_of_torchs_decoder_layers_each_have_their_own_padding() -> None:
    """One weight of torch's cross-attention reads the decoder's positions with some rows, the encoder's with others."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 16)
            self.decoder = nn.TransformerDecoderLayer(16, 2, 24, batch_first=True)

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **masks: Tensor) -> Tensor:
            memory, hidden = self.embed(input_ids), self.embed(labels)
            hide, causal = attention_mask == 0, nn.Transformer.generate_square_subsequent_mask(labels.shape[1])
            found: Tensor = self.decoder(hidden, memory, tgt_mask=causal, memory_key_padding_mask=hide)
            return found

    torch.manual_seed(0)
    model = Small()
    prunables, _ = find_prunable(model, only="decoder")
    found = []
    for batches in (pairs_alone(True), [pairs(LONGEST, True)]):
        statistics = InputStatistics(prunables)
        gather_inputs(model, batches, statistics, forward=run_model)
        found.append(statistics)
    own, text = sum(TARGETS), sum(LENGTHS)
    assert found[0].tokens["decoder.multihead_attn.in_proj_weight"].tolist() == [own, text, text]
    for prunable in prunables:
        assert found[0].tokens[prunable.name].tolist() == found[1].tokens[prunable.name].tolist(), prunable.name
        torch.testing.assert_close(found[0].norms(prunable), found[1].norms(prunable))
