"""Saving and loading whole models: with transformers in every order of imports, without Secateur, and other modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secateur as sc
from secateur.errors import ModelError, SecateurError
from secateur.inference import convert, groups, saving
from secateur.inference import format as form
from secateur.inference.card import model_card
from secateur.inference.packed import PackedLinear, is_conv1d, linear_layers, packed_layers
from secateur.integrations import folder as folder_module
from secateur.model.masks import load_masks
from tests import tiny
from tests.damage import damage, damages

files = pytest.importorskip("safetensors.torch", reason="folders need safetensors, which is not installed")
transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parent.parent
TOKENS = torch.arange(1, 13)[None]


def sparsify(model: Any, sparsity: float = 0.8) -> Any:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embed" not in name:
                parameter[torch.rand(parameter.shape) < sparsity] = 0
    return model.eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(TOKENS).logits
    return found


def run(code: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Code in a fresh interpreter, in which all warnings and logs are shown."""
    places = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    settings = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, env=settings
    )


# transformers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_folders_load_with_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    model = sparsify(tiny.llama(attention_bias=True).to(dtype))
    expected = logits(model)
    assert sc.save(model, tmp_path / "a", tokenizer=tiny.tokenizer()) == tmp_path / "a"
    assert not packed_layers(model)  # saving changes nothing
    found, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert not any(info.values())
    assert len(packed_layers(found)) == 15
    assert found.dtype == dtype
    assert torch.equal(logits(found), expected)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "a")("trees").input_ids
    again = sc.load(tmp_path / "a", packed=False)
    assert not packed_layers(again)
    assert all(torch.equal(again.state_dict()[name], one) for name, one in model.state_dict().items())


def test_save_pretrained_round_trips(tmp_path: Path) -> None:
    model = sparsify(tiny.llama())
    sc.save(model, tmp_path / "a")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    loaded.save_pretrained(tmp_path / "b", max_shard_size="4KB")
    assert len(list((tmp_path / "b").glob("model-*.safetensors"))) > 2
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert len(packed_layers(again)) == 15
    assert torch.equal(logits(again), logits(model))
    sc.save(again, tmp_path / "c", packed=False)  # and back to a dense folder
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    assert not packed_layers(dense)
    assert torch.equal(logits(dense), logits(model))
    sc.save(again, tmp_path / "d", values="int8")
    assert all(layer.weight.dtype == torch.int8 for _, layer in packed_layers(sc.load(tmp_path / "d")))


def test_models_packed_in_memory_are_saved_as_such(tmp_path: Path) -> None:
    model = sparsify(tiny.llama())
    expected = logits(model)
    sc.pack(model, memory=True)
    assert model.config.quantization_config.quant_method == "secateur"
    model.save_pretrained(tmp_path / "a")
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")), expected)
    sc.save(model, tmp_path / "b")
    assert torch.equal(logits(sc.load(tmp_path / "b")), expected)
    sc.unpack(model)
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path / "c")
    assert "quantization_config" not in json.loads((tmp_path / "c" / "config.json").read_text())
    loaded = sc.load(tmp_path / "b")
    assert not packed_layers(loaded.dequantize())  # transformers' own word for it
    assert torch.equal(logits(loaded), expected)


def test_models_with_and_without_a_head(tmp_path: Path) -> None:
    model = sparsify(tiny.llama())
    sc.save(model, tmp_path / "a")
    base = transformers.AutoModel.from_pretrained(tmp_path / "a")
    assert len(packed_layers(base)) == 14
    with torch.no_grad():
        assert torch.equal(base(TOKENS).last_hidden_state, model.model(TOKENS).last_hidden_state)
    sc.save(base, tmp_path / "b")
    head = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert len(packed_layers(head)) == 14
    answer = transformers.pipeline("text-generation", str(tmp_path / "a"), tokenizer=tiny.tokenizer())
    assert len(packed_layers(answer.model)) == 15


def test_tied_heads_and_other_layers_stay_dense(tmp_path: Path) -> None:
    model = sparsify(tiny.llama(tie_word_embeddings=True))
    sc.save(model, tmp_path / "tied")
    loaded = sc.load(tmp_path / "tied")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(logits(loaded), logits(model))
    dense = tiny.llama()  # and a model without zeros
    sc.save(dense, tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    assert "import secateur" not in (tmp_path / "dense" / "README.md").read_text()
    assert not packed_layers(sc.load(tmp_path / "dense"))


def gpt2() -> Any:
    model = sparsify(tiny.gpt2())
    nn.init.normal_(model.transformer.h[0].mlp.c_fc.bias)
    return model


@pytest.mark.parametrize("values", [None, "int8"])
def test_gpt2_whose_weights_are_inputs_by_outputs(tmp_path: Path, values: str | None) -> None:
    """Conv1D packs in memory, in `sc.save`, by `secateur export`, and comes back to the bit."""
    model = gpt2()
    expected, weights = logits(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sc.save(model, tmp_path / "a", values=values)
    report = sc.pack(model, memory=True)
    assert len(report.packed) == 4  # the head is tied
    assert torch.allclose(logits(model), expected, atol=1e-5)
    if values is None:
        model.save_pretrained(tmp_path / "b")
        model.to(torch.bfloat16).to(torch.float32)
    loaded = sc.load(tmp_path / "a")
    assert len(packed_layers(loaded)) == 4
    assert torch.allclose(logits(loaded), expected, atol=1e-5 if values is None else 0.1)
    convert.convert(tmp_path / "a", tmp_path, packed=False)
    if values is None:
        found = files.load_file(tmp_path / "model.safetensors")
        assert torch.equal(found["transformer.h.0.mlp.c_fc.weight"], weights["transformer.h.0.mlp.c_fc.weight"])
        for folder in "ab":
            back = sc.unpack(sc.load(tmp_path / folder))
            assert not packed_layers(back)
            assert type(back.transformer.h[0].mlp.c_fc).__name__ == "Conv1D"
            assert all(torch.equal(tensor, weights[name]) for name, tensor in back.state_dict().items())
            assert torch.equal(logits(back), expected)


def test_gpt2_exported_and_loaded_into_a_module(tmp_path: Path) -> None:
    model = gpt2()
    sc.save(model, tmp_path / "dense", packed=False)
    saving.export(tmp_path / "dense", tmp_path / "packed")
    assert json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]["version"] == 2
    assert len(packed_layers(sc.load(tmp_path / "packed"))) == 4
    fresh = sc.load(tmp_path / "packed", into=tiny.gpt2())
    assert torch.equal(logits(fresh.eval()), logits(model))
    part = nn.ModuleList(model.transformer.h)  # a module that transformers does not know
    sc.save(part, tmp_path / "part")
    other = nn.ModuleList(tiny.gpt2().transformer.h)
    sc.load(tmp_path / "part", into=other)
    assert all(torch.equal(tensor, part.state_dict()[name]) for name, tensor in other.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_masks_stored_as_groups_load_in_transformers(tmp_path: Path, family: str) -> None:
    """2:16 along the inputs: files hold groups, layers hold masks, and `save_pretrained` writes masks."""
    model = tiny.llama(hidden_size=32, intermediate_size=64) if family == "llama" else tiny.gpt2(n_embd=32)
    with torch.no_grad():
        for name, layer, _ in linear_layers(model):
            if "head" not in name:
                weight = layer.weight.T if is_conv1d(layer) else layer.weight
                weight.unflatten(1, (-1, 16))[:, :, 2:] = 0
    expected = logits(model.eval())
    sc.save(model, tmp_path / "a")
    with form.WeightFiles(form.weight_files(tmp_path / "a")) as found:
        assert {found.groups(name) for name in found.packed} == {(2, 16)}
        assert found.version == 2
    assert json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]["version"] == 2
    for cached in (groups._ones, groups._table):  # as in a process that has saved nothing
        cached.cache_clear()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert {name.rpartition("_")[2] for name in loaded.state_dict()}.isdisjoint({"groups"})
    assert torch.allclose(logits(loaded), expected, atol=1e-5)
    loaded.save_pretrained(tmp_path / "b")
    version = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]["version"]
    assert version == (1 if family == "llama" else 2)
    assert torch.allclose(logits(sc.load(tmp_path / "b")), expected, atol=1e-5)
    assert torch.equal(logits(sc.load(tmp_path / "a", packed=False)), expected)


def vit() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=8))


@pytest.mark.parametrize("way", ["save", "pack", "export"])
def test_families_whose_tensors_have_other_names_in_files(tmp_path: Path, way: str) -> None:
    model = sparsify(vit())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if way == "export":
        sc.save(model, tmp_path / "dense", packed=False)
        assert saving.export(tmp_path / "dense", tmp_path / "a").packed == 7
    elif way == "save":
        sc.save(model, tmp_path / "a")
    else:
        sc.pack(model, memory=True)
        model.save_pretrained(tmp_path / "a")
    loaded = transformers.ViTForImageClassification.from_pretrained(tmp_path / "a")
    assert len(packed_layers(loaded)) == 7  # all but the convolution
    loaded.save_pretrained(tmp_path / "b")
    again = sc.unpack(sc.load(tmp_path / "b"))
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_base_whose_tensors_have_other_names_in_files(tmp_path: Path) -> None:
    model = sparsify(vit())
    sc.save(model, tmp_path / "a")
    base = transformers.AutoModel.from_pretrained(tmp_path / "a")
    assert len(packed_layers(base)) == 6
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(base(x).last_hidden_state, model.vit(x).last_hidden_state)
    base.save_pretrained(tmp_path / "b")
    head = transformers.ViTForImageClassification.from_pretrained(tmp_path / "b")
    assert len(packed_layers(head)) == 6


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV4Config"), reason="this transformers has no DeepSeek V4")
def test_weights_whose_masks_would_get_another_name_stay_dense(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "head_dim": 8, "q_lora_rank": 16, "vocab_size": 40, "index_topk": 4}
    experts = {"n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64}
    model = sparsify(transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**sizes, **heads, **experts)))
    loaded = sc.load(sc.save(model, tmp_path / "a"))
    assert "lm_head" not in dict(packed_layers(loaded))  # transformers renames it by a pattern that ends in ".weight"
    assert len(packed_layers(loaded)) > 5
    loaded.save_pretrained(tmp_path / "b")
    for folder in "ab":
        again = sc.load(tmp_path / folder, packed=False)
        assert all(torch.equal(again.state_dict()[name], one) for name, one in model.state_dict().items())
    sc.pack(model, memory=True)
    with pytest.raises(ModelError, match="lm_head.weight is packed, and transformers renames parts of it"):
        sc.save(model, tmp_path / "c")


def test_families_that_draw_weights_for_all_that_is_called_linear(tmp_path: Path) -> None:
    sizes = {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "vocab_size": 50}
    config = transformers.FunnelConfig(**sizes, block_sizes=[1, 1], num_decoder_layers=1)
    model = sparsify(transformers.FunnelForMaskedLM(config))
    loaded = sc.load(sc.save(model, tmp_path / "a"))
    assert torch.equal(logits(loaded), logits(model))


def test_models_that_accelerate_offloads(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = sparsify(tiny.llama(attention_bias=True))
    sc.save(model, tmp_path / "a")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    settings = {
        "device_map": {**places, "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"},
        "offload_folder": tmp_path / "disk",
    }
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", **settings)
    expected = logits(model)
    assert torch.equal(logits(loaded), expected)
    with pytest.raises(ModelError, match=r"model.layers.1.self_attn.q_proj is offloaded by accelerate"):
        sc.unpack(loaded)
    assert torch.equal(logits(loaded), expected)  # nothing was unpacked
    with pytest.warns(UserWarning, match="offloaded modules"):
        sc.save(loaded, tmp_path / "b")
    assert torch.equal(logits(sc.load(tmp_path / "b")), expected)
    with pytest.raises(ModelError, match="was offloaded to disk, which packed weights cannot be"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", **settings, offload_buffers=True)


def test_biases_that_files_lack_are_zero(tmp_path: Path) -> None:
    model = sparsify(tiny.llama())
    sc.save(model, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    with pytest.warns(UserWarning, match="lacks 8 tensors"):
        loaded = sc.load(tmp_path / "a")
    assert not any(layer.bias.any() for _, layer in packed_layers(loaded) if layer.bias is not None)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("way", ["save", "pack"])
def test_layers_that_mamba_reads_itself_stay_dense(tmp_path: Path, way: str) -> None:
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=50, state_size=8)
    model = sparsify(transformers.MambaForCausalLM(config))
    expected = logits(model)
    if way == "save":
        loaded = sc.load(sc.save(model, tmp_path / "a"))
    else:
        loaded = model
        sc.pack(loaded, memory=True)
    packed = {name.rpartition(".")[2] for name, _ in packed_layers(loaded)}
    assert "in_proj" in packed
    assert packed.isdisjoint({"dt_proj", "x_proj"})
    assert torch.allclose(logits(loaded), expected, atol=1e-5)


def test_layers_that_transformers_keeps_in_fp32(tmp_path: Path) -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 50}
    model = sparsify(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)))
    sc.save(model, tmp_path / "a")
    loaded = type(model).from_pretrained(tmp_path / "a", dtype=torch.float16)
    layer = loaded.encoder.block[0].layer[1].DenseReluDense
    assert (layer.wo.weight.dtype, layer.wi.weight.dtype) == (torch.float32, torch.float16)
    with torch.no_grad():
        found, expected = (one(TOKENS, decoder_input_ids=TOKENS).logits for one in (loaded, model))
    assert torch.allclose(found.float(), expected, atol=0.05)
    assert sc.unpack(loaded).encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32


def test_models_that_are_part_of_a_module_or_packed_in_part(tmp_path: Path) -> None:
    wrapped = nn.ModuleDict({"model": sparsify(tiny.llama())})
    sc.pack(wrapped, memory=True)
    wrapped["model"].save_pretrained(tmp_path / "a")
    assert torch.equal(logits(sc.load(tmp_path / "a")), logits(wrapped["model"]))
    sc.unpack(wrapped)
    wrapped["model"].save_pretrained(tmp_path / "b")
    assert not packed_layers(sc.load(tmp_path / "b"))
    model = sparsify(tiny.llama())
    expected = logits(model)
    sc.pack(model.model, memory=True)
    sc.save(model, tmp_path / "c")
    assert packed_layers(sc.load(tmp_path / "c"))
    sc.pack(model.model, memory=True)
    sc.unpack(model)
    model.save_pretrained(tmp_path / "d")
    assert torch.equal(logits(sc.load(tmp_path / "d")), expected)
    part = sparsify(tiny.llama())
    sc.pack(part.model, memory=True)
    assert torch.equal(logits(sc.unpack(part)), logits(part))
    assert not hasattr(part.config, "quantization_config")


@pytest.mark.parametrize("where", ["model", "model.layers.0", "model.layers.0.mlp"])
def test_save_pretrained_of_a_model_packed_in_part(tmp_path: Path, where: str) -> None:
    """The part does not know the model, so `save_pretrained` has to look at the layers itself."""
    model = sparsify(tiny.llama())
    expected = logits(model)
    sc.pack(model.get_submodule(where), memory=True)
    model.save_pretrained(tmp_path / "a")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert [name for name, _ in packed_layers(loaded)] == [name for name, _ in packed_layers(model)]
    assert torch.equal(logits(loaded), logits(model))
    sc.unpack(model.get_submodule(where))
    model.save_pretrained(tmp_path / "b")
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")), expected)


def test_int8_values_and_dtypes(tmp_path: Path) -> None:
    model = sparsify(tiny.llama())
    sc.save(model, tmp_path / "a", values="int8")
    loaded = sc.load(tmp_path / "a", dtype=torch.bfloat16)
    layer = loaded.model.layers[0].self_attn.q_proj
    assert (layer.weight.dtype, layer.weight_scale.dtype, layer.dtype) == (torch.int8, torch.float32, torch.bfloat16)
    exact = sc.load(tmp_path / "a").model.layers[0].self_attn.q_proj.packed.dense()
    weight = model.model.layers[0].self_attn.q_proj.weight.detach()
    assert float((exact - weight).abs().max()) <= float(weight.abs().max()) / 127 / 2 * 1.01
    assert logits(loaded).dtype == torch.bfloat16
    assert sc.load(tmp_path / "a", device="cpu", packed=False).dtype == torch.float32


def test_sizes_on_disk(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 32}
    for sparsity, share in ((0.5, 0.57), (0.8, 0.27)):
        model = sparsify(tiny.llama(**sizes).to(torch.bfloat16), sparsity)
        sc.save(model, tmp_path / f"{sparsity}")
        layers = sum(layer.weight.nbytes for layer in model.modules() if isinstance(layer, nn.Linear))
        other = sum(parameter.nbytes for parameter in model.parameters()) - layers
        assert ((tmp_path / f"{sparsity}" / "model.safetensors").stat().st_size - other) / layers < share + 0.01
        report = sc.pack(model, memory=True)
        assert report.packed_bytes / report.dense_bytes == pytest.approx(share, abs=0.01)


LOAD = """
import sys
{imports}
import torch
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.save(model(torch.arange(1, 13)[None]).logits, sys.argv[2])
assert type(model.model.layers[0].mlp.up_proj).__name__ == "PackedLinear"
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import secateur\nassert 'torch' not in sys.modules\nfrom transformers import AutoModelForCausalLM",
        "import transformers\nfrom transformers import AutoModelForCausalLM, PreTrainedModel\nimport secateur",
    ],
    ids=["secateur first", "transformers first"],
)
def test_any_order_of_imports_will_do(tmp_path: Path, imports: str) -> None:
    model = sparsify(tiny.llama())
    sc.save(model, tmp_path / "a")
    done = run(LOAD.format(imports=imports), str(tmp_path / "a"), str(tmp_path / "logits"))
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "logits"), logits(model))


def test_a_transformers_that_cannot_register_is_not_broken(tmp_path: Path) -> None:
    (tmp_path / "transformers" / "quantizers").mkdir(parents=True)
    for name in ("__init__.py", "quantizers/__init__.py", "quantizers/auto.py"):
        (tmp_path / "transformers" / name).write_text("")
    code = "import secateur, transformers.quantizers.auto as auto; print(auto.__file__)"
    done = run(code, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "transformers" / "quantizers" / "auto.py")
    assert "This transformers cannot load packed models: ImportError" in done.stderr


WITHOUT = """
import json, sys
from transformers import AutoModel, AutoModelForCausalLM, pipeline
ways = {
    "AutoModel": AutoModel.from_pretrained,
    "AutoModelForCausalLM": AutoModelForCausalLM.from_pretrained,
    "options": lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype="float16", use_safetensors=True),
    "pipeline": lambda folder: pipeline("text-generation", folder),
}
found = {}
for folder in sys.argv[1:]:
    for name, way in ways.items():
        try:
            way(folder)
        except Exception as error:
            found[f"{folder[-1]} {name}"] = str(error)
assert "secateur" not in sys.modules
print(json.dumps(found))
"""


def test_without_secateur_nothing_loads(tmp_path: Path) -> None:
    """transformers alone would log a line and go on with random weights."""
    model = sparsify(tiny.llama())
    sc.save(model, tmp_path / "a", tokenizer=tiny.tokenizer())
    sc.load(tmp_path / "a").save_pretrained(tmp_path / "b")
    tiny.tokenizer().save_pretrained(tmp_path / "b")
    done = run(WITHOUT, str(tmp_path / "a"), str(tmp_path / "b"))
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    for name in ("AutoModel", "AutoModelForCausalLM", "options", "pipeline"):
        assert "packed by Secateur. Run `pip install secateur`, then `import secateur`" in errors[f"a {name}"]
        # save_pretrained drops the entry with that text: the shapes do not fit, and a line above names secateur
        assert "ignore_mismatched_sizes" in errors[f"b {name}"]
    assert "Unknown quantization type, got secateur" in done.stderr


def test_damaged_packed_folders_do_not_load(tmp_path: Path) -> None:
    sc.save(sparsify(tiny.llama()), tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    whole = path.read_bytes()
    for how, content in damages(path).items():
        damage(path, how, content)
        with pytest.raises((ModelError, OSError)):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
        with pytest.raises(ModelError, match="a"):
            sc.load(tmp_path / "a")
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        path.write_bytes(whole)
    for place in (len(whole) // 2, len(whole) - 1, len(whole) - 2000):
        changed = bytearray(whole)
        changed[place] ^= 4
        path.write_bytes(changed)
        with pytest.raises(ModelError, match="is damaged: .* does not fit its hash"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    path.write_bytes(whole)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    config["quantization_config"]["version"] = 9
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="has version 9 of the packed format; this Secateur reads versions 1 to 2"):
        sc.load(tmp_path / "a")


def test_a_foreign_file_in_a_packed_folder_is_refused(tmp_path: Path) -> None:
    model = sparsify(tiny.llama())
    sc.save(model, tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").replace(tmp_path / "a" / "model.safetensors")
    with pytest.raises(ModelError, match="was not packed by Secateur"):
        sc.load(tmp_path / "a")


# Other modules


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.convolution = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.up = nn.Linear(8, 16)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("already", [True, False])
def test_modules_of_any_kind_round_trip(tmp_path: Path, packed: bool, already: bool) -> None:
    model = sparsify(Small())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if already:
        sc.pack(model, memory=True)
    sc.save(model, tmp_path / "a", packed=packed)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"README.md", "model.safetensors", "secateur.json"}
    with form.WeightFiles([tmp_path / "a" / "model.safetensors"]) as found:
        assert bool(found.packed) == packed
        assert "head.weight" not in found  # tied: saved once
    fresh = Small()
    assert sc.load(tmp_path / "a", into=fresh) is fresh
    assert all(torch.equal(fresh.state_dict()[name], tensor) for name, tensor in before.items())
    assert not fresh.training
    assert fresh.head.weight is fresh.embedding.weight
    assert isinstance(sc.load(tmp_path / "a", into=Small(), packed=True).up, PackedLinear)
    assert sc.load(tmp_path / "a", into=Small(), dtype=torch.float16).up.weight.dtype == torch.float16


def test_a_module_is_unchanged_if_the_file_does_not_fit(tmp_path: Path) -> None:
    sc.save(sparsify(Small()), tmp_path / "a")
    with pytest.raises(
        ModelError, match="holds a module that transformers does not know. Build it, and pass it as into="
    ):
        sc.load(tmp_path / "a")
    for change, message in (
        (lambda model: setattr(model, "more", nn.Linear(2, 2)), "has no more.bias, which the module needs"),
        (lambda model: delattr(model, "up"), "has up.bias, which the module does not have"),
        (lambda model: setattr(model, "up", nn.Linear(9, 16)), "up.weight is .16, 8. in .* and .16, 9. in the module"),
        (lambda model: model.to("meta"), "embedding.weight is on the meta device"),
        (lambda model: sc.pack(sparsify(model), memory=True), "Call sc.unpack.module., then load into it"),
        (
            lambda model: setattr(model.norm, "weight", model.norm.bias),
            "norm.(weight|bias) and norm.(weight|bias) differ in .* and are one tensor in the module",
        ),
    ):
        model = Small()
        change(model)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(ModelError, match=message):
            sc.load(tmp_path / "a", into=model)
        assert all(one.is_meta or torch.equal(one, before[name]) for name, one in model.state_dict().items())
    path = tmp_path / "a" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # the very last byte: everything is read before anything is copied
    path.write_bytes(content)
    model = Small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match="is damaged"):
        sc.load(tmp_path / "a", into=model)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_compiled_modules_are_saved_and_loaded_into(tmp_path: Path) -> None:
    model = sparsify(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    sc.save(torch.compile(model, backend="eager"), tmp_path / "a")
    fresh = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    compiled = torch.compile(fresh, backend="eager")
    assert sc.load(tmp_path / "a", into=compiled) is compiled
    assert torch.equal(fresh[1].weight, model[1].weight)


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    sc.save(Small(), tmp_path / "a")
    with pytest.raises(ModelError, match="A torch.nn.Module is needed, not a str"):
        sc.load(tmp_path / "a", into="small")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="dtype must be a torch.dtype, such as torch.bfloat16, not 'bf16'"):
        sc.load(tmp_path / "a", into=Small(), dtype="bf16")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="There is no folder .*missing. Name one that a model was saved in"):
        sc.load(tmp_path / "missing", into=Small())
    with pytest.raises(ModelError, match="model.safetensors is a file. Name the folder"):
        sc.load(tmp_path / "a" / "model.safetensors")


def test_states_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    with pytest.raises(ModelError, match="has _extra_state, which is no tensor"):
        sc.save(Extra(2, 2), tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_what_is_no_module_or_has_no_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="A torch.nn.Module is needed, not a list"):
        sc.save([1], tmp_path / "a")  # type: ignore[arg-type]
    for model in (tiny.llama().to("meta"), Small().to("meta")):
        with pytest.raises(ModelError, match="is on the meta device and has no values to save"):
            sc.save(model, tmp_path / "a")
    for place in (None, "", 3):
        with pytest.raises(ModelError, match="folder must be the path of a folder to write, not"):
            sc.save(Small(), place)  # type: ignore[arg-type]
    model = Small()
    model.norm.running_mean = torch.empty(8, device="meta")
    with pytest.raises(ModelError, match="norm.running_mean is on the meta device"):
        sc.save(model, tmp_path / "a")
    assert not list(tmp_path.iterdir())


# Folders


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compress": "gzip"}, "use compress='zstd' or None"),
        ({"values": "int4"}, "values='int8' or None"),
        ({"values": "int8", "packed": False}, "needs packed=True"),
        ({"masks": {"x": torch.ones(1, 1, dtype=torch.bool)}}, "There is a mask for 'x'"),
        ({"masks": [1]}, "masks must map names of parameters to masks, not be a list"),
        ({"tokenizer": "gpt2"}, "tokenizer must be a tokenizer of transformers, not a str"),
        ({"report": "good"}, "report must be what sc.prune, .* gave, not a str"),
    ],
)
def test_wrong_settings_write_nothing(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SecateurError, match=message):
        sc.save(nn.Sequential(nn.Linear(2, 2)), tmp_path / "a", **settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [tiny.llama, Small])
def test_folders_are_replaced_only_when_asked(tmp_path: Path, make: Any) -> None:
    sc.save(make(), tmp_path / "a")
    with pytest.raises(ModelError, match="is not empty"):
        sc.save(make(), tmp_path / "a")
    sc.save(make(), tmp_path / "a", card=False, overwrite=True)
    assert not (tmp_path / "a" / "README.md").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "letter.txt").write_text("mine")
    with pytest.raises(ModelError, match="holds something other than a model"):
        sc.save(make(), tmp_path / "b", overwrite=True)


def test_an_error_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "mark_config", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sc.save(sparsify(tiny.llama()), tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_compressed_folders(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    model = sparsify(tiny.llama())
    sc.save(model, tmp_path / "a", compress="zstd", tokenizer=tiny.tokenizer())
    assert not (tmp_path / "a" / "model.safetensors").exists()
    assert torch.equal(logits(sc.load(tmp_path / "a")), logits(model))
    assert folder_module.load(tmp_path / "a")[1] is not None
    with pytest.raises(OSError, match="no file named model.safetensors"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert 'sc.load("a")' in (tmp_path / "a" / "README.md").read_text()
    (tmp_path / "a" / "original").mkdir()
    (tmp_path / "a" / "original" / "params.json").write_text("{}")
    saving.export(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c" / "original" / "params.json").read_text() == "{}"
    assert 'AutoModelForCausalLM.from_pretrained("c")' in (tmp_path / "c" / "README.md").read_text()
    saving.export(tmp_path / "c", tmp_path / "d", compress=True)
    assert 'sc.load("d")' in (tmp_path / "d" / "README.md").read_text()
    small = sparsify(Small())
    sc.save(small, tmp_path / "b", compress="zstd")
    assert torch.equal(sc.load(tmp_path / "b", into=Small()).up.weight, small.up.weight)
    path = tmp_path / "b" / "model.safetensors.zst"
    for content in (path.read_bytes()[:-9], b"nothing", path.read_bytes()[:50] + b"x" + path.read_bytes()[51:]):
        path.write_bytes(content)
        with pytest.raises(ModelError, match="damaged|cannot be read"):
            sc.load(tmp_path / "b", into=Small())


# Cards


def pruned_llama() -> tuple[Any, Any]:
    model = tiny.llama()
    batches = [torch.randint(1, 90, (2, 12)) for _ in range(2)]
    return model, sc.prune(model, batches, sparsity=0.75, score="magnitude")


def test_the_card_says_what_was_done(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    model, report = pruned_llama()
    model.config.name_or_path = "someone/model-1b"
    sc.save(model, tmp_path / "a", report=report)
    card = hub.ModelCard.load(tmp_path / "a" / "README.md")
    assert card.data.tags == ["secateur", "pruning", "sparse"]
    assert card.data.base_model == "someone/model-1b"
    assert card.data.library_name == "transformers"
    for part in ("| score | magnitude |", "75.00%", "import secateur", "AutoModelForCausalLM", "unstructured"):
        assert part in card.text
    assert {path.name for path in (tmp_path / "a").iterdir()} >= {"report.md", "report.json", "masks.safetensors"}
    masks = load_masks(tmp_path / "a")
    assert masks.keys() == report.masks.keys()
    assert all(torch.equal(masks[name], mask) for name, mask in report.masks.items())


def test_cards_have_the_evaluation_the_command_and_the_license() -> None:
    hub = pytest.importorskip("huggingface_hub")
    model, report = pruned_llama()
    report = replace(report, found=(("perplexity before", 27.18), ("perplexity | after", 34.7)), pattern="2:4")
    text = model_card("m", model, report=report, base_model="a/b: c", command="secateur prune m", license="apache-2.0")
    card = hub.ModelCard(text)
    assert card.data.base_model == "a/b: c"
    assert card.data.license == "apache-2.0"
    for part in (
        "| perplexity before | 27.18 |",
        r"| perplexity \| after | 34.7 |",
        "secateur prune m",
        "| pattern | 2:4 |",
    ):
        assert part in card.text
    assert "into=model" in model_card("m", Small())


def test_a_folder_is_no_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.llama().save_pretrained("runs/llama")
    model = sc.load("runs/llama")
    assert "base_model" not in model_card("m", model)
    assert 'base_model: "someone/llama"' in model_card("m", model, base_model="someone/llama")


def test_a_card_of_ones_own(tmp_path: Path) -> None:
    sc.save(Small(), tmp_path / "a", card="# Mine\n")
    assert (tmp_path / "a" / "README.md").read_text() == "# Mine\n"


# The hub


class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as an upload needs; remembers what it was sent."""

    seen: list[tuple[str, str, bytes]]

    def _answer(self, found: Any, code: int = 200) -> None:
        text = json.dumps(found).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.seen.append((self.path.partition("?")[0], self.headers.get("Authorization") or "", body))
        return body

    def do_POST(self) -> None:
        body, path = self._body(), self.path.partition("?")[0]
        here = f"http://{self.headers['Host']}"
        if self.headers.get("Authorization") != "Bearer hf_right":
            self._answer({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            self._answer({"url": f"{here}/someone/sparse"})
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            given = json.loads(body)["files"]
            kinds = {one["path"]: "lfs" if one["path"].endswith(".safetensors") else "regular" for one in given}
            told = [{"path": one, "uploadMode": kind, "shouldIgnore": False} for one, kind in kinds.items()]
            self._answer({"files": told})
        elif path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            objects = [{**one, "actions": {"upload": {"href": f"{here}/store/{one['oid']}"}}} for one in wanted]
            self._answer({"transfer": "basic", "objects": objects})
        else:
            self._answer({"commitUrl": f"{here}/someone/sparse/commit/1", "commitOid": "1" * 40, "success": True})

    def do_PUT(self) -> None:
        self._body()
        self._answer({})

    def do_GET(self) -> None:
        self._body()
        self._answer({"siblings": [], "id": "someone/sparse", "sha": "1" * 40})

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def fake_hub() -> Iterator[tuple[str, list[tuple[str, str, bytes]]]]:
    handler = type("Handler", (Hub,), {"seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.seen  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


PUSH = """
import sys
from secateur.errors import ModelError
from secateur.integrations.folder import push_to_hub
print(push_to_hub(sys.argv[1], "someone/sparse", token="hf_right"))
try:
    push_to_hub(sys.argv[1], "someone/sparse", token="hf_wrong")
except ModelError as error:
    print(error)
"""


def test_a_folder_is_pushed_to_the_hub(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    sc.save(sparsify(tiny.llama()), tmp_path / "a")
    with fake_hub() as (address, seen):
        alone = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        alone["HF_HUB_OFFLINE"] = "0"  # this hub can be asked
        done = run(PUSH, str(tmp_path / "a"), **alone)
        assert done.returncode == 0, done.stderr
        where, refused = done.stdout.splitlines()
        assert where == f"{address}/someone/sparse"
        assert "was not uploaded to someone/sparse: " in refused
        (stored,) = [body for path, _, body in seen if path.startswith("/store/")]
        assert stored == (tmp_path / "a" / "model.safetensors").read_bytes()
        (commit,) = [body for path, _, body in seen if "/commit/" in path]
        told = [json.loads(line) for line in commit.splitlines()]
        assert {one["value"]["path"] for one in told if one["key"] in ("file", "lfsFile")} == {
            "README.md", "config.json", "generation_config.json", "model.safetensors",
        }  # fmt: skip
    done = run(PUSH, str(tmp_path / "a"), **alone)  # nobody answers at this address any more
    assert done.stderr.splitlines()[-1].startswith("secateur.errors.ModelError: ")
    assert "was not uploaded to someone/sparse: " in done.stderr.splitlines()[-1]
    with pytest.raises(ModelError, match="There is no folder .* Save the model first"):
        folder_module.push_to_hub(tmp_path / "missing", "a/b")


def test_only_what_is_known_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="There is no folder"):
        sc.load(tmp_path / "missing")
    (tmp_path / "a").mkdir()
    with pytest.raises(ModelError, match="cannot be loaded"):
        sc.load(tmp_path / "a")
    with pytest.raises(ModelError, match="holds no .safetensors files"):
        sc.load(tmp_path / "a", into=Small())
    assert saving.is_pretrained(tiny.llama())
    assert not saving.is_pretrained(Small())


def test_other_libraries_save_their_models_themselves_unless_packed(tmp_path: Path) -> None:
    """As PEFT does with adapters, and any class with the hub's mixin."""
    hub = pytest.importorskip("huggingface_hub")

    class Mixed(nn.Module, hub.PyTorchModelHubMixin, library_name="mixed"):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 16)

    model = sparsify(Mixed())
    sc.save(model, tmp_path / "own", packed=False)
    assert torch.equal(Mixed.from_pretrained(tmp_path / "own").up.weight, model.up.weight)
    assert "library_name: mixed" in (tmp_path / "own" / "README.md").read_text()
    sc.save(model, tmp_path / "card", packed=False, card="# Mine\n")
    assert (tmp_path / "card" / "README.md").read_text() == "# Mine\n"
    sc.save(model, tmp_path / "packed")
    assert torch.equal(sc.load(tmp_path / "packed", into=Mixed()).up.weight, model.up.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_layers_of_zeros_alone_in_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    model = sparsify(tiny.llama()).to(dtype)
    for name, parameter in model.named_parameters():
        if "mlp" in name:
            parameter.data.zero_()
    expected = logits(model)
    sc.save(model, tmp_path / "a")
    loaded = sc.load(tmp_path / "a")
    assert loaded.dtype == dtype
    assert torch.allclose(logits(loaded), expected, atol=1e-2 if dtype == torch.float16 else 1e-12)
    assert torch.equal(logits(sc.unpack(loaded)), expected)
    loaded.save_pretrained(tmp_path / "b")
    assert torch.equal(logits(sc.load(tmp_path / "b", packed=False)), expected)


def test_buffers_named_like_parts_of_a_packed_weight_survive(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 32))
            self.register_buffer("weight_mask", torch.rand(16, 32) < 0.3)
            self.register_buffer("weight_scale", torch.ones(16))

    model, into = Masked(), Masked()
    with torch.no_grad():
        model.weight.mul_(model.weight_mask)  # type: ignore[arg-type]
    sc.save(model, tmp_path / "saved")
    sc.load(tmp_path / "saved", into=into)
    assert all(torch.equal(into.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
