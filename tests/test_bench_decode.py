"""The decoding benchmark: what is measured, when no ratio is given, and the plain sentence where nothing is gained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from secateur.bench import decode, decode_gpu
from secateur.cli import main
from secateur.inference import gpu, timing
from secateur.inference.packed import PackedLinear, pack
from secateur.inference.saving import save
from secateur.kernels.decode import TRITON
from tests import tiny
from tests.damage import refused


def cell(**changes: Any) -> dict[str, Any]:
    return {
        "shape": "8192x8192", "layers": 1, "dtype": "bfloat16", "values": "as dense", "sparsity": 0.8, "bytes": 0.26,
        "dense_us": [100.0, 120.0], "packed_us": [40.0, 60.0], "difference": 0.0, "right": True, **changes,
    }  # fmt: skip


def test_rows_show_the_fastest_calls_and_the_bar() -> None:
    header, (row,) = decode.table([cell()])
    assert len(header) == len(row)
    assert row[header.index("dense us") :] == ("100", "40", "2.50x (bar 2.0x met)", "2.20x")
    assert decode.table([cell(packed_us=[80.0])])[1][0][8] == "1.25x (bar 2.0x missed)"
    assert decode.table([cell(values="int8")])[1][0][8] == "2.50x"


def test_no_ratio_where_outputs_differ() -> None:
    (row,) = decode.table([cell(right=False)])[1]
    assert row[-2:] == ("outputs differ", "outputs differ")
    assert not any("x" in text for text in row[1:3] + row[5:])
    data = {"kernel": "portable", "cells": [cell(right=False)]}
    assert decode.summary(data)[-1] == "Nothing is gained here."


def test_the_plain_sentence() -> None:
    slower = {"kernel": "portable", "cells": [cell(packed_us=[100.0])]}
    assert decode.summary(slower)[-1] == "Nothing is gained here."
    assert decode.NOTHING not in decode.summary({**slower, "cells": [cell()]})
    step = {
        "dtype": "bfloat16", "sparsity": 0.8, "packed_layers": 2, "layers": 3, "dense_ms": [20.0], "packed_ms": [10.0],
        "dense_error": 0.01, "packed_error": 0.05, "right": True,
    }  # fmt: skip
    model = {**slower, "model": "m", "steps": [step]}
    assert decode.summary(model)[-1] == (
        "m, bfloat16, 2 of 3 linear layers packed (80% zeros): 50.0 tokens/s dense, 100.0 packed (2.00x; of the fastest"
        " steps 2.00x)."
    )
    model["steps"] = [{**step, "packed_ms": [21.0]}]
    assert decode.summary(model)[-1] == decode.NOTHING
    model["steps"] = [{**step, "packed_layers": 0}]  # whatever the times say: both models are the same
    assert decode.summary(model)[-2].endswith(
        "50.0 tokens/s dense. No layer is smaller and faster packed, so all of them stay dense."
    )
    assert decode.summary(model)[-1] == decode.NOTHING
    model["steps"] = [{**step, "right": False}]
    assert "outputs differ: 5.0% from the logits in fp32, dense 1.0%." in decode.summary(model)[-2]
    assert decode.summary(model)[-1] == decode.NOTHING


def test_layers_that_compute_something_else_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = decode.made_up((32, 48), torch.bfloat16, 0.5, torch.device("cpu"))
    found = decode.measure(layer, 5)
    assert found["right"]
    assert found["sparsity"] == pytest.approx(0.5, abs=0.05)
    assert decode.measure(layer, 5, int8=True)["right"]
    right = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: 1.2 * right(self, x))
    assert not decode.measure(layer, 5)["right"]


@pytest.mark.parametrize("packed", [True, False])
def test_a_model_is_measured_layer_by_layer_and_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], packed: bool
) -> None:
    pytest.importorskip("transformers", reason="the model comes from transformers, which is not installed")
    model, place = tiny.llama(), tmp_path / "model"
    decode.prune_by_magnitude(model, 0.5 if packed else 0.0)
    save(model, place, tokenizer=tiny.tokenizer(), packed=packed)
    words = [
        "bench",
        "decode",
        str(place),
        "--device",
        "cpu",
        "--sparsity",
        "0.8",
        "--dtype",
        "float32",
        "--calls",
        "5",
    ]
    assert main([*words, "--tokens", "3", "--out", str(tmp_path / "record")]) == 0
    (path,) = (tmp_path / "record").iterdir()
    saved = json.loads(path.read_text())
    (step,) = saved["steps"]
    assert step["right"]
    assert step["sparsity"] == pytest.approx(0.8, abs=0.02)
    assert len(step["dense_ms"]) == len(step["packed_ms"]) == 3
    linears = [layer for layer in model.model.layers.modules() if isinstance(layer, nn.Linear)]
    assert sum(one["layers"] for one in saved["cells"]) in (
        len(linears),
        len(linears) + 1,
    )  # one more if untied
    assert all(one["right"] and one["sparsity"] == pytest.approx(0.8, abs=0.02) for one in saved["cells"])
    assert f"{place}, float32, " in capsys.readouterr().out


def test_a_model_whose_packed_layers_are_wrong_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="the model comes from transformers, which is not installed")
    model = tiny.llama().to(torch.bfloat16).eval()
    decode.prune_by_magnitude(model, 0.5)
    monkeypatch.setattr(decode, "pack", lambda given: pack(given, memory=True))
    assert decode.measure_steps(model, 3)["right"]
    right = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: 1.05 * right(self, x))
    assert not decode.measure_steps(model, 3)["right"]
    # one sequence is one sample of rounding: layers that are wrong for several sequences at once are found out too
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: (1 if len(x) == 1 else 1.05) * right(self, x))
    assert not decode.measure_steps(model, 3)["right"]


def test_options_that_do_not_fit_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode", "--device", "cpu", "--shapes", "64", "--out", str(tmp_path)]) == 2
    assert "a shape is written ROWSxCOLUMNS" in capsys.readouterr().err
    assert main(["bench", "decode", "model", "--device", "cpu", "--int8", "--out", str(tmp_path)]) == 2
    assert "for made-up layers; leave out the model" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_layers_of_gpt2_are_measured_too() -> None:
    pytest.importorskip("transformers")
    from tests import tiny

    model = tiny.gpt2().eval().requires_grad_(False)
    decode.prune_by_magnitude(model, 0.5)
    found = decode.measure_layers(model, 5)
    assert sum(cell["layers"] for cell in found) == 4
    assert all(cell["right"] for cell in found)


def test_the_cases_of_a_gpu_run_on_a_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's interpreter, so that a mistake is not first seen where time is short."""
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("interpreted kernels cannot be mixed with compiled ones")
    monkeypatch.delenv("SECATEUR_KERNELS")
    monkeypatch.setattr(gpu, "DEVICES", {"cpu"})
    monkeypatch.setattr(gpu, "TRITON_SETTINGS", ((TRITON, 8, 4, 2),))
    monkeypatch.setattr(gpu, "COPIES", 1)
    monkeypatch.setattr(timing, "COPIES", 1)
    monkeypatch.setattr(timing, "LEAST", 1)
    monkeypatch.setattr(timing, "REPLAYS", 1)
    cells = []
    for case in decode_gpu.CASES:
        if case.inputs in (1, decode_gpu.PREFILL):
            cells.append(decode_gpu.measure((8, 64), case, torch.float32, torch.device("cpu"), 1))
    assert all(one["right"] for one in cells)
    assert all(one["settings_us"] for one in cells[:-1])
    assert [one["form"]["cell"] for one in cells if ":" in one["zeros"]] == [4, 2]
    header, rows = decode_gpu.table(cells)
    assert all(len(row) == len(header) for row in rows)
    assert all(row[-1].endswith(("met", "missed")) for row in rows)
    assert decode_gpu.table([{**cells[0], "right": False}])[1][0][-2:] == ("outputs differ", "2.10x outputs differ")


def test_a_whole_decoder_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "decode", "--whole", "tiny", "--device", "cpu", "--tokens", "2", "--out", str(tmp_path)]
    assert main([*words, "--dtype", "float32"]) == 0
    (path,) = tmp_path.iterdir()
    saved = json.loads(path.read_text())
    assert [step["zeros"] for step in saved["whole"]] == ["80%", "90%", "50%", "70%", "4:16"]
    for step in saved["whole"]:
        assert step["right"]
        assert step["packed_layers"] == step["layers"] == 15
        assert step["packed_bytes"] < step["dense_bytes"]
    assert "tokens/s dense" in capsys.readouterr().out
    assert decode_gpu.whole_lines([{**saved["whole"][0], "right": False}])[0].endswith("%.")
    assert main([*words, "--int8"]) == 2
    assert "leave out MODEL" in capsys.readouterr().err


def test_one_token_after_another_is_a_decoder() -> None:
    """Its logits depend on the tokens before, and on their order."""
    torch.manual_seed(0)
    model = decode_gpu.Decoder(decode_gpu.WHOLE["tiny"], torch.device("cpu"), torch.float32).eval()
    found = []
    with torch.no_grad():
        for tokens in ([1, 2, 3], [2, 1, 3], [1, 2, 3]):
            for place, token in enumerate(tokens):
                logits = model(torch.tensor([token]), torch.tensor([place]))
            found.append(logits)
    assert torch.equal(found[0], found[2])
    assert not torch.allclose(found[0], found[1])


@pytest.mark.parametrize(
    ("family", "words", "message"),
    [
        ("gpt2", "", "The context is a prompt of 16 and --tokens 48: GPT2LMHeadModel has 32 learned positions"),
        ("bert", "--tokens 2", "BertForMaskedLM does not decode token after token"),
        ("gpt2", "--tokens 2 --shapes 8x8", "--shapes and --int8 are for made-up layers"),
        ("", "--whole tiny --shapes 8x8", "leave out --shapes"),
    ],
)
def test_what_cannot_be_timed_is_refused_at_once(
    family: str, words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if family:
        getattr(tiny, family)().save_pretrained(tmp_path / "model")
    given = [*([str(tmp_path / "model")] if family else []), "--device", "cpu", *words.split()]
    assert message in refused(capsys, main(["bench", "decode", *given, "--out", str(tmp_path / "records")]))
