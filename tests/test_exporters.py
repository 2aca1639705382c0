"""`secateur export --format 24|onnx|openvino`: the exported model computes the same, or nothing is written."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import secateur as sc
from secateur.cli import main
from secateur.errors import ModelError, SaveError
from secateur.files import megabytes
from secateur.inference import exporters
from tests import tiny
from tests.damage import refused, small_disk
from tests.test_saving import TOKENS, logits, sparsify

transformers = pytest.importorskip("transformers")


def export(*words: Any) -> int:
    return main(["export", *map(str, words)])


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return sc.save(sparsify(tiny.llama(num_hidden_layers=1)), tmp_path / "packed", tokenizer=tiny.tokenizer())


def test_onnx_runtime_gives_the_same_logits(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    out = tmp_path / "onnx"
    assert export(packed, "--format", "onnx", "--out", out) == 0
    said = capsys.readouterr().out
    size = sum(path.stat().st_size for path in out.glob("model.onnx*"))
    assert f"model files {megabytes(size)}" in said
    assert "Zeros stay, ONNX Runtime does not use them: weights are as large as dense ones in fp32." in said
    assert {"config.json", "model.onnx", "tokenizer.json"} <= {path.name for path in out.iterdir()}
    assert "quantization_config" not in (out / "config.json").read_text()
    session = runtime.InferenceSession(out / "model.onnx")
    given = {"input_ids": TOKENS.numpy(), "attention_mask": torch.ones_like(TOKENS).numpy()}
    found = torch.from_numpy(session.run(None, given)[0])
    torch.testing.assert_close(found, logits(sc.load(packed, packed=False)), rtol=1e-4, atol=1e-6)


def test_openvino_gives_the_same_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    openvino = pytest.importorskip("openvino")
    model = sparsify(tiny.gpt2())
    sc.save(model, tmp_path / "a", packed=False, tokenizer=tiny.tokenizer())
    assert export(tmp_path / "a", "--format", "openvino", "--out", tmp_path / "b") == 0
    assert "Zeros stay, OpenVINO does not use them: " in capsys.readouterr().out
    compiled = openvino.Core().compile_model(
        tmp_path / "b" / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    found = torch.from_numpy(compiled([TOKENS.numpy(), torch.ones_like(TOKENS).numpy()])[0])
    torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=1e-6)


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows of 9, 6 and 4 real tokens, and their mask."""
    ids = torch.randint(1, tiny.VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(9) < torch.tensor([[9], [6], [4]])).long()
    return ids, mask.flip(1) if side == "left" else mask


@pytest.mark.parametrize("side", ["left", "right"])
def test_openvino_gives_the_same_logits_of_padded_batches(tmp_path: Path, side: str) -> None:
    """Rows of masks that hide everything once gave NaN, which spread to real tokens."""
    openvino = pytest.importorskip("openvino")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MistralConfig(
        **sizes, num_key_value_heads=2, vocab_size=tiny.VOCABULARY + 1, sliding_window=4, max_position_embeddings=32
    )
    for name, model in (("a", tiny.llama()), ("b", transformers.MistralForCausalLM(config)), ("c", tiny.gpt2())):
        used = model.eval().config._attn_implementation
        exporters.export_for("openvino", model, tmp_path / name)
        assert model.config._attn_implementation == used != "eager"
        compiled = openvino.Core().compile_model(
            tmp_path / name / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
        )
        ids, mask = padded(side)
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=mask).logits
        found = torch.from_numpy(compiled([ids.numpy(), mask.numpy()])[0])
        torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_export_that_is_wrong_for_padded_batches_alone_is_refused(side: str) -> None:
    model = exporters._Logits(sparsify(tiny.llama(num_hidden_layers=1)))

    def wrong(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hides = (mask[:, 0] if side == "left" else mask[:, -1]) == 0
        return torch.where(hides[:, None, None], torch.nan, model(ids, mask))

    with pytest.raises(ModelError, match=f"differ by .* in a batch padded on the {side}. Nothing was written"):
        exporters._checked("It", model, wrong)

    def other_at_padding(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.where(mask[..., None] == 0, torch.nan, model(ids, mask))

    assert exporters._checked("It", model, other_at_padding) == 0  # nobody reads those


def test_attention_is_restored_if_the_export_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    model, during = tiny.llama(num_hidden_layers=1), []

    def fail(*_: Any, **__: Any) -> None:
        during.append(model.config._attn_implementation)
        raise RuntimeError("no such operation")

    monkeypatch.setattr(openvino, "convert_model", fail)
    with pytest.raises(ModelError, match="OpenVINO cannot express LlamaForCausalLM: RuntimeError: no such operation"):
        exporters.export_for("openvino", model, tmp_path / "a")
    assert (during, model.config._attn_implementation) == (["eager"], "sdpa")


def test_a_model_that_computes_something_else_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The check of the logits, with a runtime that is slightly wrong, and with one that gives NaN."""
    model = exporters._Logits(sparsify(tiny.llama(num_hidden_layers=1)))
    assert exporters._checked("It", model, lambda *given: model(*given)) == 0
    for wrong in (1.01, float("nan")):
        with pytest.raises(ModelError, match="computes something else: It's logits differ by .* Nothing was written"):
            exporters._checked("It", model, lambda *given, wrong=wrong: wrong * model(*given))
    monkeypatch.setitem(
        exporters.KINDS, "onnx", lambda *_: exporters._checked("It", model, lambda i, m: 2 * model(i, m))
    )
    with pytest.raises(ModelError, match="computes something else"):
        exporters.export_for("onnx", model.model, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_models_that_do_not_read_tokens_alone_are_refused(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    for kind, needed in (("onnx", "onnxscript"), ("openvino", "openvino")):
        pytest.importorskip(needed)
        with pytest.raises(
            ModelError, match="T5ForConditionalGeneration cannot be exported this way: only models that"
        ):
            exporters.export_for(kind, model, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def failing() -> None:
    try:
        raise KeyError("no function for\nthis operation")
    except KeyError as cause:
        raise RuntimeError("\033[96mThis is step 3/3\033[0m of exporting. Next steps: implement it") from cause


def test_what_an_exporter_cannot_express_is_said_in_a_line(tmp_path: Path) -> None:
    """With the first cause, not with what the exporter wraps around it for its own developers."""
    with pytest.raises(ModelError) as caught, exporters._quietly("ONNX", "Model"):
        failing()
    assert str(caught.value) == (
        "ONNX cannot express Model: KeyError: 'no function for\\nthis operation'. Nothing was written; --format packed"
        " and dense take every model."
    )
    with pytest.raises(ModelError, match="No format 'gguf'. Use one of '24', 'onnx', 'openvino'"):
        exporters.export_for("gguf", tiny.llama(), tmp_path / "a")


def no_space(*_: Any) -> Any:
    with exporters._quietly("ONNX", "Model"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "_libraries", lambda kind: [])
    monkeypatch.setitem(exporters.KINDS, "onnx", no_space)
    with pytest.raises(SaveError, match=r"a could not be written \(No space left on device\)"):
        exporters.export_for("onnx", tiny.llama(), tmp_path / "a")
    assert not list(tmp_path.iterdir())
    with (
        small_disk(tmp_path / "disk", 12_000) as folder,
        pytest.raises(SaveError, match=r"a needs about 0 MB, and the disk has 0 MB left. Free some space"),
    ):
        exporters.export_for("onnx", tiny.llama(), folder / "a")


def two_of_four(dtype: torch.dtype = torch.bfloat16) -> Any:
    model = tiny.llama(hidden_size=64, intermediate_size=128).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.unflatten(1, (-1, 4))[:, :, 1:3] = 0
    return model.eval()


def test_24_is_loaded_by_torch_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = two_of_four()
    sc.save(model, tmp_path / "a", tokenizer=tiny.tokenizer())
    assert export(tmp_path / "a", "--format", "24", "--out", tmp_path / "b") == 0
    said = capsys.readouterr().out
    assert "14 of 15 linear layers are 2:4 tensors. " in said  # k and v have 32 rows
    assert "on a CPU nothing is gained" in said
    kind = exporters.SparseSemiStructuredTensorCUTLASS
    with torch.serialization.safe_globals([kind]):
        state = torch.load(tmp_path / "b" / "model_24.pt", weights_only=True)
    assert sum(isinstance(tensor, kind) for tensor in state.values()) == 14
    for name, tensor in model.state_dict().items():
        found = state[name]
        assert torch.equal(found.to_dense() if isinstance(found, kind) else found, tensor), name
    weight = state["model.layers.0.mlp.up_proj.weight"]
    assert (weight.packed.nbytes + weight.meta.nbytes) / (2 * weight.numel()) == 9 / 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.float(), "q_proj: its weight is torch.float32, and torch's 2:4 tensors need bf16 or fp16"),
        (lambda model: model, "groups of four keep more than two weights. Prune with --pattern 2:4"),
    ],
)
def test_24_refuses_other_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, message: str
) -> None:
    model = change(sparsify(tiny.llama(hidden_size=64, intermediate_size=128).to(torch.bfloat16), 0.2))
    sc.save(model, tmp_path / "a", tokenizer=tiny.tokenizer())
    assert message in refused(capsys, export(tmp_path / "a", "--format", "24", "--out", tmp_path / "b"))
    assert not (tmp_path / "b").exists()
    small = sparsify(tiny.llama().to(torch.bfloat16))
    with pytest.raises(ModelError, match="is not in multiples of 32 x 64"):
        exporters.export_for("24", small, tmp_path / "b")


def test_missing_libraries_are_named_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, name in (("onnx", "onnxscript"), ("openvino", "openvino")):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
        said = refused(capsys, export(tmp_path / "no-model", "--format", kind, "--out", tmp_path / "b"))
        assert f'pip install "secateur[{kind}]"' in said
    assert not (tmp_path / "b").exists()


def test_mistakes_are_answered_with_a_line(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "b"
    assert "--compress zstd needs" in refused(
        capsys, export(packed, "--format", "24", "--compress", "zstd", "--out", out)
    )
    assert "--values int8 needs" in refused(
        capsys, export(packed, "--format", "onnx", "--values", "int8", "--out", out)
    )
    with pytest.raises(SystemExit):
        export(packed, "--format", "gguf", "--out", out)
    assert "invalid choice: 'gguf'" in capsys.readouterr().err
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    assert "is not empty" in refused(capsys, export(packed, "--format", "24", "--out", out))
    assert "holds something other than a model" in refused(
        capsys, export(packed, "--format", "24", "--overwrite", "--out", out)
    )
    assert (out / "mine.txt").read_text() == "keep"
