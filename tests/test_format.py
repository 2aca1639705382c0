"""The packed file format: exact to the bit, of the promised size, streamed, and closed to damaged or foreign files."""

from __future__ import annotations

import json
import random
import struct
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from secateur.errors import ModelError
from secateur.inference import format as form
from secateur.inference import groups
from secateur.inference.format import (
    Lazy,
    Packed,
    WeightFiles,
    fault,
    pack_weight,
    smaller,
    weight_files,
    write_weights,
)
from secateur.selection import masks
from tests.damage import MISSING, damage, damages, hostile_pickle

files = pytest.importorskip("safetensors.torch", reason="packed files need safetensors, which is not installed")
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def sparse(shape: tuple[int, ...], sparsity: float, dtype: torch.dtype = torch.float32) -> Tensor:
    weight = torch.randn(shape).to(dtype)
    return weight * (torch.rand(shape) >= sparsity).to(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    kind = BITS[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.view(kind), other.view(kind))


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 35),
    sparsity=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 99),
)
def test_packing_is_exact_to_the_bit(rows: int, columns: int, sparsity: float, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    weight = sparse((rows, columns), sparsity, dtype)
    packed = pack_weight(weight)
    assert packed.values.numel() == int((weight != 0).sum())
    assert not fault(packed)
    assert same_bits(packed.dense(), torch.where(weight == 0, 0.0, weight).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_odd_values_are_kept_and_negative_zero_is_zero(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal / 2  # subnormal
    weight = torch.tensor([[float("nan"), float("inf"), -float("inf"), -0.0], [tiny, 0.0, -tiny, 1.0]], dtype=dtype)
    packed = pack_weight(weight)
    assert packed.values.numel() == 6
    back = packed.dense()
    expected = weight.clone()
    expected[0, 3] = 0.0
    assert same_bits(back, expected)
    assert not bool(torch.signbit(back[0, 3]))


def test_masks_are_little_endian_and_row_by_row() -> None:
    weight = torch.zeros(2, 10)
    weight[0, 0], weight[0, 9], weight[1, 3] = 1.0, 2.0, 3.0
    packed = pack_weight(weight)
    assert packed.mask.tolist() == [[1, 2], [8, 0]]
    assert packed.values.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(("sparsity", "share"), [(0.5, 0.5625), (0.8, 0.2625), (0.9, 0.1625)])
def test_sizes_are_those_promised(sparsity: float, share: float) -> None:
    """1 + 16 (1 - s) bits a weight in bf16: 57 % of dense at 50 %, 27 % at 80 %."""
    weight = torch.randn(512, 512).to(torch.bfloat16)
    order = torch.randperm(weight.numel())[: int(sparsity * weight.numel())]
    weight.view(-1)[order] = 0
    assert pack_weight(weight).nbytes / weight.nbytes == pytest.approx(share, abs=1e-3)


def test_files_have_those_sizes_too(tmp_path: Path) -> None:
    weight = sparse((1024, 1024), 0.8, torch.bfloat16)
    write_weights(tmp_path, {"w": pack_weight(weight)})
    assert (tmp_path / "model.safetensors").stat().st_size / weight.nbytes == pytest.approx(0.2625, abs=2e-3)


def test_int8_values_have_a_scale_a_row() -> None:
    weight = sparse((8, 40), 0.5) * torch.logspace(-6, 6, 8)[:, None]
    weight[3] = 0
    packed = pack_weight(weight, int8=True)
    assert packed.values.dtype == torch.int8
    assert packed.scale is not None
    assert packed.scale.shape == (8,)
    error = (packed.dense() - weight).abs() / weight.abs().amax(1, keepdim=True).clamp(min=1e-30)
    assert float(error.max()) <= 0.5 / 127 * 1.001
    assert torch.equal(packed.dense() != 0, (packed.dense() != 0) & (weight != 0))  # no zero comes back
    bf16 = sparse((64, 512), 0.5, torch.bfloat16)
    assert pack_weight(bf16, int8=True).nbytes / bf16.nbytes == pytest.approx(5 / 16, abs=0.01)
    weight[0, 0] = float("inf")
    with pytest.raises(ModelError, match="NaN or infinite values cannot be stored as int8"):
        pack_weight(weight, int8=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_int8_values_near_the_largest_number_stay_finite(dtype: torch.dtype) -> None:
    """127 times a scale that was rounded up would be infinite."""
    largest = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).max
    rows = [[-largest * share, 0.0, largest * share / 3] for share in (1.0, 0.999, 0.9, 0.51)]
    weight = torch.tensor(rows, dtype=torch.float64).to(dtype)
    dense = pack_weight(weight, int8=True).dense()
    assert bool(dense.isfinite().all())
    torch.testing.assert_close(dense.double(), weight.double(), rtol=0.02, atol=0.0)
    with pytest.raises(ModelError, match="cannot be stored as int8"):
        pack_weight(torch.full((2, 2), 1e300, dtype=torch.float64), int8=True)


@pytest.mark.parametrize("weight", [torch.zeros(4), torch.zeros(2, 2, dtype=torch.int8), torch.tensor(1.0)])
def test_what_cannot_be_packed_is_refused(weight: Tensor) -> None:
    assert not smaller(weight)
    with pytest.raises(ModelError, match="cannot be packed: it must be floating point, of 2 or more dimensions"):
        pack_weight(weight)


def test_only_what_gets_smaller_is_worth_packing() -> None:
    weight = torch.ones(16, 32)
    weight[0] = 0  # 32 zeros of 4 bytes save 128 bytes; the mask takes 64
    assert smaller(weight)
    weight[0, 16:] = 1
    assert not smaller(weight)
    assert not smaller(torch.zeros(0, 4))


# Masks of n:m patterns


def patterned(rows: int, columns: int, n: int, m: int) -> Tensor:
    """At most n of m kept along the columns; sometimes fewer, as where pruned weights were zero before."""
    weight, ranks = torch.randn(rows, columns), torch.empty(rows, columns)
    for start in range(0, columns, m):
        part = ranks[:, start : start + m]
        part.copy_(torch.rand(part.shape).argsort(1).argsort(1))
    weight[ranks >= n] = 0
    weight[torch.rand(weight.shape) < 0.02] = 0
    return weight


@pytest.mark.parametrize(
    ("pattern", "needed"),
    [((2, 4), 4), ((1, 4), 3), ((4, 8), 8), ((3, 8), 7), ((2, 8), 6), ((1, 8), 4), ((8, 16), 16), ((7, 16), 15),
     ((4, 16), 12), ((3, 16), 10), ((2, 16), 8), ((1, 16), 5), ((0, 16), 0)],
)  # fmt: skip
def test_bits_of_a_group(pattern: tuple[int, int], needed: int) -> None:
    """The smallest number of bits that tells apart all groups with at most n of m kept, counted one by one."""
    n, m = pattern
    found = sum(number.bit_count() <= n for number in range(1 << m))
    assert groups.bits(pattern) == needed
    assert 2 ** (needed - 1) < found <= 2**needed or (found, needed) == (1, 0)


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 70),
    pattern=st.sampled_from([(1, 4), (2, 4), (2, 8), (3, 8), (1, 16), (2, 16), (4, 16), (7, 16), (8, 16), (0, 16)]),
    seed=st.integers(0, 99),
)
def test_groups_are_exact_and_never_longer_than_the_mask(
    rows: int, columns: int, pattern: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    weight = patterned(rows, columns, *pattern)
    packed = pack_weight(weight)
    short = packed.groups
    assert sum(part.nbytes for part in packed.parts("a").values()) <= packed.nbytes
    if short is None:
        assert packed.parts("a").keys() == {"a", "a_mask"}
        return
    stored = packed.parts("a")["a_groups"]
    assert stored.shape == groups.stored_shape(rows, columns, short)
    assert stored.nbytes < packed.mask.nbytes
    back, wrong = groups.mask_of(stored, weight.shape, short)
    assert not wrong
    assert torch.equal(back, packed.mask)


def test_a_mask_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_weight(patterned(50, 64, 2, 16))
    whole = groups.encode(packed.mask, 64, (2, 16))
    monkeypatch.setattr(groups, "PART", 200)
    assert torch.equal(groups.encode(packed.mask, 64, (2, 16)), whole)
    back = groups.decode(whole, 64, (2, 16))
    assert back is not None
    assert torch.equal(back, packed.mask)


@pytest.mark.parametrize(
    ("pattern", "share"), [((4, 16), 4.75), ((2, 16), 2.5), ((1, 16), 1.3125), ((8, 16), 9.0), ((2, 4), 9.0)]
)
def test_files_of_patterns_have_the_promised_size(tmp_path: Path, pattern: tuple[int, int], share: float) -> None:
    """Bits a weight in bf16, as docs/inference.md says."""
    ranks = torch.rand(512, 1024 // pattern[1], pattern[1]).argsort(-1).argsort(-1).flatten(1)
    weight = torch.where(ranks < pattern[0], 1.0 + ranks, 0.0).to(torch.bfloat16)
    write_weights(tmp_path, {"w": pack_weight(weight)})
    found = files.load_file(tmp_path / "model.safetensors")
    assert sum(part.nbytes for part in found.values()) * 8 / weight.numel() == pytest.approx(share, abs=0.01)
    assert list(read_all(tmp_path)) == ["w"]
    assert same_bits(read_all(tmp_path)["w"].dense(), weight)  # type: ignore[union-attr]


def test_files_have_the_lowest_version_that_reads_them(tmp_path: Path) -> None:
    """Files without groups are read by the first version of the library too; others it refuses by their version."""
    for weight, version in ((sparse((8, 32), 0.5), 1), (patterned(8, 32, 2, 16), 2)):
        write_weights(tmp_path, {"w": pack_weight(weight)})
        with files.safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
            assert json.loads(opened.metadata()["secateur"])["version"] == version
        with WeightFiles([tmp_path / "model.safetensors"]) as found:
            assert found.version == version


@pytest.mark.parametrize("rows", [1, 6])
def test_groups_are_found_a_part_at_a_time(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row decides too; the others are 2:16, and 1:8 besides."""
    monkeypatch.setattr(groups, "PART", 64 * 2)  # two rows
    for last, expected in ((16, None), (8, None), (4, (4, 16)), (2, (2, 16)), (0, (1, 8) if rows > 1 else (0, 4))):
        kept = torch.zeros(rows, 4, 16, dtype=torch.bool)
        kept[:-1, :, 3::7] = True
        kept[-1, :, :last] = True
        assert groups.shortest(masks.pack(kept.flatten(1)), 64) == expected, last


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory can be reset on Linux alone")
def test_packing_takes_little_more_memory_than_the_weight() -> None:
    """torch's masked_select would take eight times that of a bf16 weight."""
    weight = torch.randn(2048, 8192).masked_fill_(torch.rand(2048, 8192) < 0.8, 0).bfloat16()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    packed = pack_weight(weight)
    _ = packed.groups
    assert resident("VmHWM") - before < 3 * weight.nbytes
    assert torch.equal(packed.dense(), weight)


def resident(field: str) -> int:
    """Bytes of memory that this process has, or had at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def test_groups_are_read_while_another_device_is_the_default() -> None:
    """transformers builds and fills models with meta as the default device; nothing may have been cached before."""
    mask = torch.tensor([[3, 0], [0, 96]], dtype=torch.uint8)
    stored = groups.encode(mask, 16, (2, 16))
    for cached in (groups._ones, groups._table):
        cached.cache_clear()
    with torch.device("meta"):
        found = groups.decode(stored, 16, (2, 16))
        assert groups.shortest(mask, 16) == (2, 16)
    assert found is not None
    assert torch.equal(found, mask)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (torch.full((4, 2), 255, dtype=torch.uint8), "its groups are not of 2:16"),
        (torch.zeros((4, 3), dtype=torch.uint8), "its groups are torch.uint8 .4, 3., which does not fit .4, 32."),
        (torch.zeros((4, 2), dtype=torch.int8), "its groups are torch.int8"),
        (torch.zeros((4, 2), dtype=torch.uint8), "its mask keeps 0 weights, and there are 3 values"),
    ],
)
def test_impossible_groups_are_refused(tmp_path: Path, stored: Tensor, message: str) -> None:
    said = {"a": {"dtype": "float32", "shape": [4, 32], "groups": [2, 16]}}
    tensors = {"a": torch.ones(3), "a_groups": stored}
    files.save_file(tensors, tmp_path / "model.safetensors", metadata=form.metadata(said, None))
    with pytest.raises(ModelError, match=message):
        read_all(tmp_path)


# Files


def weights() -> dict[str, Tensor | Packed]:
    return {
        "a.weight": pack_weight(sparse((7, 13), 0.6, torch.bfloat16)),
        "b.weight": pack_weight(sparse((6, 3, 3, 3), 0.5)),
        "c.weight": pack_weight(sparse((5, 9), 0.5), int8=True),
        "c.bias": torch.randn(5),
        "d.weight": pack_weight(patterned(5, 52, 2, 16)),
        "e.weight": pack_weight(patterned(3, 32, 4, 16).T, int8=True, transposed=True),
        "double": torch.randn(3, dtype=torch.float64),
        "steps": torch.tensor(7),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
        "é世": torch.ones(3, dtype=torch.float16),
    }


def equal(one: Tensor | Packed, other: Tensor | Packed) -> bool:
    if isinstance(one, Packed) and isinstance(other, Packed):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.dense(), other.dense())
    return (
        isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    )


@pytest.mark.parametrize("shard", [form.SHARD, 300])
def test_files_round_trip(tmp_path: Path, shard: int) -> None:
    written = weights()
    names = write_weights(tmp_path, written, shard=shard)
    assert (len(names) > 1) == (shard == 300)
    assert [path.name for path in weight_files(tmp_path)] == names
    with WeightFiles(weight_files(tmp_path), foreign=False) as found:
        assert set(found) == set(written)
        assert len(found) == len(written)
        assert all(equal(found[name], written[name]) for name in written)
        assert found.shapes()["b.weight"] == [6, 3, 3, 3]
        assert found.packed == ["a.weight", "b.weight", "c.weight", "d.weight", "e.weight"]
        assert [found.groups(name) for name in found.packed] == [None, None, None, (2, 16), (4, 16)]
        assert found.shapes()["e.weight"] == [32, 3]
        found.check()
    for name in names:
        with files.safe_open(tmp_path / name, framework="pt") as opened:  # safetensors itself reads them
            assert all(opened.get_tensor(part) is not None for part in opened.keys())  # noqa: SIM118
            assert json.loads(opened.metadata()["secateur"])["version"] == 2


def test_whole_lines_of_a_file_are_aligned_as_torch_aligns_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    packed = form.pack_weight(torch.randn(7, 5).relu())
    odd = {"odd": torch.ones(3), "few": torch.ones(5, dtype=torch.bfloat16), "packed": packed}
    write_weights(tmp_path, {**odd, **{str(size): torch.randn(8, size) for size in (8, 20, 2)}})
    begin = int.from_bytes((tmp_path / "model.safetensors").read_bytes()[:8], "little") + 8
    header = json.loads((tmp_path / "model.safetensors").read_bytes()[8:begin])
    assert begin % 64 == 0
    assert all(header[size]["data_offsets"][0] % 64 == 0 for size in ("8", "20", "2"))
    assert all(header[name]["data_offsets"][0] % 4 == 0 for name in ("odd", "packed"))
    assert header["few"]["data_offsets"][0] % 2 == 0
    assert torch.equal(files.load_file(tmp_path / "model.safetensors")["odd"], torch.ones(3))


def test_shards_have_the_index_of_hugging_face(tmp_path: Path) -> None:
    names = write_weights(tmp_path, weights(), shard=300)
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    sizes = 0
    for name in names:
        tensors = files.load_file(tmp_path / name)
        assert {part for part, file in index["weight_map"].items() if file == name} == tensors.keys()
        sizes += sum(tensor.nbytes for tensor in tensors.values())
    assert index["metadata"]["total_size"] == sizes


def test_one_weight_at_a_time_is_held(tmp_path: Path) -> None:
    made: list[weakref.ref[Tensor]] = []
    most = 0

    def make(name: str) -> Tensor:
        nonlocal most
        tensor = torch.full((64, 64), float(name))
        made.append(weakref.ref(tensor))
        most = max(most, sum(one() is not None for one in made))
        return tensor

    write_weights(tmp_path, Lazy([str(number) for number in range(10)], make))
    assert (len(made), most) == (20, 1)
    assert torch.equal(files.load_file(tmp_path / "model.safetensors")["7"], torch.full((64, 64), 7.0))


def test_a_dtype_that_files_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="x is torch.complex128, which safetensors files cannot hold"):
        write_weights(tmp_path, {"x": torch.zeros(2, dtype=torch.complex128)})
    assert not list(tmp_path.iterdir())


# Damage


def read_all(folder: Path) -> dict[str, Tensor | Packed]:
    with WeightFiles(weight_files(folder) or [folder / "model.safetensors"], foreign=False) as found:
        return {name: found[name] for name in found}


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write_weights(tmp_path, weights())
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for how, content in damages(path).items():
        damage(path, how, content)
        with pytest.raises(ModelError, match="model.safetensors"):
            read_all(tmp_path)
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(whole)
    assert len(read_all(tmp_path)) == len(weights())


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """A flipped bit gives an error, or (in what says nothing, such as the spelling of a number) the same weights."""
    written = weights()
    write_weights(tmp_path, written)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    header = struct.unpack("<Q", whole[:8])[0] + 8
    draw = random.Random(0)
    places = [*range(header, len(whole)), *draw.sample(range(header), 400)]
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        if place >= header:
            with pytest.raises(ModelError, match="is damaged"):
                read_all(tmp_path)
            continue
        try:
            found = read_all(tmp_path)
        except ModelError as error:
            assert "model.safetensors" in str(error)  # noqa: PT017
        else:
            assert found.keys() == written.keys()
            assert all(equal(found[name], written[name]) for name in written)


@pytest.mark.parametrize("length", [0, 7, 8, 9, 100, -1])
def test_truncated_files_are_refused(tmp_path: Path, length: int) -> None:
    write_weights(tmp_path, weights())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelError, match="cannot be read"):
        read_all(tmp_path)


def test_foreign_files_are_refused_and_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(hostile_pickle(tmp_path / "made"))
    with pytest.raises(ModelError, match="cannot be read"):
        read_all(tmp_path)
    assert not (tmp_path / "made").exists()
    files.save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ModelError, match="was not packed by Secateur"):
        read_all(tmp_path)
    with WeightFiles([path]) as found:  # unless any file will do
        assert torch.equal(found["a"], torch.ones(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"version": 3},
            "has version 3 of the packed format; this Secateur reads versions 1 to 2. Install a newer one",
        ),
        ({"version": "1"}, "has version 1 of the packed format"),
        ({"weights": {"a": {"dtype": "float32", "shape": [2, 4], "groups": [9, 8]}}}, "impossible groups"),
        ({"weights": {"a": {"dtype": "float32", "shape": [2, 4], "groups": "no"}}}, "impossible groups"),
        ({"weights": {"a": {"dtype": "float32", "shape": [2, 4], "groups": [1, 4]}}}, "a_groups is not in"),
        ({"weights": 3}, "says nothing of use"),
        ({"weights": {"a": {}}}, "says nothing of use"),
        ({"weights": {"a": {"dtype": "save", "shape": [1, 1]}}}, "impossible dtypes or shapes"),
        ({"weights": {"a": {"dtype": "float32", "shape": ["1"]}}}, "impossible dtypes or shapes"),
        ({"weights": {"b": {"dtype": "float32", "shape": [1, 1]}}}, "b is not in model.safetensors"),
        ({"weights": {"a": {"dtype": "float32", "shape": [10**9, 10**9]}}}, "its mask is .* which does not fit"),
        ({"weights": {"a": {"dtype": "float32", "shape": [2, 9]}}}, "its mask is .* which does not fit"),
        ({"weights": {"a": {"dtype": "float32", "shape": [2, 2]}}}, "its mask has bits beyond the end of a row"),
        ({"weights": {"a": {"dtype": "float16", "shape": [2, 4]}}}, "its values are torch.float32"),
        ({}, "its mask keeps 4 weights, and there are 3 values"),
    ],
)
def test_files_that_contradict_themselves_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    said = {"version": 1, "weights": {"a": {"dtype": "float32", "shape": [2, 4]}}, "sha256": None, **changes}
    text = json.dumps(said)
    digest = form.hashlib.sha256(text.encode()).hexdigest()
    tensors = {"a": torch.ones(3), "a_mask": torch.tensor([[3], [12]], dtype=torch.uint8)}
    files.save_file(tensors, tmp_path / "model.safetensors", metadata={"secateur": text, "secateur_sha256": digest})
    with pytest.raises(ModelError, match=message):
        read_all(tmp_path)


def test_a_tensor_in_two_files_is_noticed(tmp_path: Path) -> None:
    for number in (1, 2):
        files.save_file({f"{number}": torch.ones(1), "a": torch.full((1,), number)}, tmp_path / f"{number}.safetensors")
    with pytest.raises(ModelError, match=r"a is in .*1.safetensors and in .*2.safetensors. Remove"):
        WeightFiles(weight_files(tmp_path))


def test_a_missing_or_foreign_shard_is_noticed(tmp_path: Path) -> None:
    names = write_weights(tmp_path, weights(), shard=300)
    with pytest.raises(ModelError, match="is not in model-00001"):
        WeightFiles([tmp_path / names[0]], foreign=False)
    damage(tmp_path / names[1], MISSING, b"")
    with pytest.raises(ModelError, match=f"names {names[1]}, which is not in that folder"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(ModelError, match="names passwd, which is not in that folder"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    with pytest.raises(ModelError, match="does not say which file holds which tensor"):
        weight_files(tmp_path)
