"""Images: epochs, augmentation, and each format with what can be wrong in it. Every file is made here."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from secateur.errors import DataError
from secateur.lab.data import Images, load
from secateur.lab.images import make_images, moved

numpy = pytest.importorskip("numpy", reason="images in pickles and archives need numpy")
PIXELS = torch.randint(0, 256, (12, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(12) % 10


def counting(count: int = 10, augment: bool = False) -> Images:
    """Images of one pixel value each: its own number."""
    inputs = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(count, 2, 8, 8).contiguous()
    return make_images((inputs, torch.arange(count)), (inputs, torch.arange(count)), count, "counting", augment=augment)


@pytest.mark.parametrize("augment", [False, True])
def test_a_batch_depends_on_its_arguments_alone(augment: bool) -> None:
    data = make_images((PIXELS, LABELS), (PIXELS, LABELS), 10, "x", augment=augment)
    first = data.batch(3, 5, seed=1)
    assert first[0].dtype == torch.float32
    assert first[0].shape == (5, 3, 32, 32)
    torch.rand(5)
    for step in range(9):  # through other epochs
        data.batch(step, 5, seed=1)
    again = data.batch(3, 5, seed=1)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], data.batch(3, 5, seed=2)[0])


@pytest.mark.parametrize("size", [1, 3, 5, 10, 25])
def test_each_epoch_holds_every_example_once(size: int) -> None:
    data = counting()
    steps = -(-40 // size)
    seen = torch.cat([data.batch(step, size, seed=0)[1] for step in range(steps)])[:40].view(4, 10)
    assert torch.equal(seen.sort(1).values, torch.arange(10).expand(4, 10))
    assert len({tuple(epoch) for epoch in seen.tolist()}) == 4
    others = torch.cat([data.batch(step, 10, seed=0)[1] for step in range(4)]).view(4, 10)
    assert torch.equal(seen, others)  # at any size of batch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_a_batch_is_the_same_on_every_device() -> None:
    data = make_images((PIXELS, LABELS), (PIXELS, LABELS), 10, "x", augment=True)
    for here, there in zip(data.batch(3, 8, seed=1), data.batch(3, 8, seed=1, device="cuda"), strict=True):
        assert there.is_cuda
        torch.testing.assert_close(there.cpu(), here, rtol=1e-6, atol=1e-6)


def test_inputs_and_targets_stay_together() -> None:
    data = counting()
    inputs, targets = data.batch(1, 7, seed=3)
    pixels = inputs * torch.tensor(data.std)[:, None, None] + torch.tensor(data.mean)[:, None, None]
    assert torch.equal(pixels[:, 0, 0, 0].round().long(), targets)


def test_training_images_are_normalised() -> None:
    data = make_images((PIXELS, LABELS), (PIXELS, LABELS), 10, "x")
    channels = data.batch(0, 12, seed=0)[0].transpose(0, 1).flatten(1)
    torch.testing.assert_close(channels.mean(1), torch.zeros(3), atol=1e-4, rtol=0)  # sums of 12,288 floats
    torch.testing.assert_close(channels.std(1, correction=0), torch.ones(3), atol=1e-4, rtol=0)
    flat = torch.full((2, 1, 2, 2), 7, dtype=torch.uint8)
    assert make_images((flat, LABELS[:2]), (flat, LABELS[:2]), 10, "x").batch(0, 2, 0)[0].eq(0).all()


def test_crops_and_mirrors() -> None:
    image = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8).expand(300, 2, 8, 8)
    found = moved(image, torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(image[0, 0], (4,) * 4)
    crops = {
        bytes(crop.flatten().tolist()): (down, right, mirrored)
        for down in range(9)
        for right in range(9)
        for mirrored in (False, True)
        for crop in [padded[down : down + 8, right : right + 8]]
        for crop in [crop.flip(1) if mirrored else crop]
    }
    places = [crops[bytes(one.flatten().tolist())] for one in found[:, 0]]
    assert torch.equal(found[:, 0], found[:, 1])  # channels move together
    assert {down for down, _, _ in places} == {right for _, right, _ in places} == set(range(9))
    assert 100 < sum(mirrored for _, _, mirrored in places) < 200


def test_evaluation_covers_everything_and_is_never_augmented() -> None:
    data = make_images((PIXELS, LABELS), (PIXELS, LABELS), 10, "x", augment=True)
    parts = list(data.evaluation(5))
    assert [len(targets) for _, targets in parts] == [5, 5, 2]
    assert torch.equal(torch.cat([targets for _, targets in parts]), LABELS)
    assert torch.equal(torch.cat([inputs for inputs, _ in parts]), data.normalised(PIXELS))


def test_digits() -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    data = images("digits")
    assert (data.inputs.shape, data.held_inputs.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert (data.classes, data.augment, int(data.inputs.max())) == (10, False, 16)
    assert data.held_targets.unique().numel() == 10


def images(spec: str) -> Images:
    data = load(spec)
    assert isinstance(data, Images)
    return data


def idx(values: Tensor) -> bytes:
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + bytes(values.flatten().tolist())


def write_mnist(folder: Path, suffix: str = "") -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    pixels, labels = PIXELS[:, 0, :28, :28], LABELS.to(torch.uint8)
    parts = {"train": slice(0, 8), "t10k": slice(8, 12)}
    paths = {}
    for part, where in parts.items():
        for kind, values in (("images-idx3", pixels[where]), ("labels-idx1", labels[where])):
            path = paths[f"{part}-{kind[:6]}"] = folder / f"{part}-{kind}-ubyte{suffix}"
            path.write_bytes(gzip.compress(idx(values)) if suffix else idx(values))
    return paths


@pytest.mark.parametrize("word", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_found_below(tmp_path: Path, word: str, suffix: str) -> None:
    write_mnist(tmp_path / "usr" / "share", suffix)
    data = images(f"{word}:{tmp_path}")
    assert torch.equal(data.inputs, PIXELS[:8, :1, :28, :28])
    assert torch.equal(data.held_inputs, PIXELS[8:, :1, :28, :28])
    assert torch.equal(torch.cat((data.targets, data.held_targets)), LABELS)
    assert (data.classes, data.augment) == (10, False)


def test_compressed_files_beside_the_others_do_no_harm(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_mnist(tmp_path, ".gz")
    assert len(images(f"mnist:{tmp_path}").inputs) == 8


def test_idx_files_that_cannot_be_read(tmp_path: Path) -> None:
    spec = f"mnist:{tmp_path}"

    def refused(message: str) -> None:
        with pytest.raises(DataError, match=message):
            load(spec)
        for path in tmp_path.rglob("*ubyte*"):
            path.unlink()

    refused("There is no train-images-idx3-ubyte or .* in .* or below it.")
    write_mnist(tmp_path)["t10k-labels"].unlink()
    refused(r"There is no t10k-labels-idx1-ubyte\[.gz\] in .*Fetch the data again.")
    path = write_mnist(tmp_path)["train-images"]
    path.write_bytes(path.read_bytes()[:-1])
    refused(r"train-images-idx3-ubyte has 6,271 bytes after its header, which says 8 x 28 x 28. Fetch it again.")
    path = write_mnist(tmp_path)["train-images"]
    path.write_bytes(path.read_bytes()[:9])
    refused("truncated within its header")
    write_mnist(tmp_path)["train-images"].write_bytes(idx(LABELS.to(torch.uint8)))
    refused("starts with 00000801; an idx file of this kind with 00000803.")
    path = write_mnist(tmp_path, ".gz")["train-labels"]
    path.write_bytes(path.read_bytes()[:-9])
    refused("train-labels-idx1-ubyte.gz is truncated or damaged: .*Fetch it again.")
    write_mnist(tmp_path)["train-labels"].write_bytes(idx(LABELS[:7].to(torch.uint8)))
    refused("has 8 training images and 7 labels.")
    write_mnist(tmp_path)["t10k-labels"].write_bytes(idx(torch.full((4,), 10, dtype=torch.uint8)))
    refused("held-out labels from 10 to 10; they should be below 10.")
    write_mnist(tmp_path)["t10k-images"].write_bytes(idx(PIXELS[8:, 0]))
    refused(r"different shapes: \[1, 28, 28\] and \[1, 32, 32\].")
    write_mnist(tmp_path / "one")
    write_mnist(tmp_path / "two")
    refused("in 2 folders: .*one, .*two. Name one of them.")


def batch(where: slice, key: str = "labels", protocol: int = 2, text: bool = False) -> bytes:
    found = {"data": PIXELS[where].flatten(1).numpy(), key: LABELS[where].tolist()}
    return pickle.dumps(found if text else {name.encode(): value for name, value in found.items()}, protocol)


def write_cifar10(folder: Path, **how: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(5):
        (folder / f"data_batch_{number + 1}").write_bytes(batch(slice(2 * number, 2 * number + 2), **how))
    (folder / "test_batch").write_bytes(batch(slice(10, 12), **how))


def check_cifar(data: Images, classes: int = 10) -> None:
    assert torch.equal(data.inputs, PIXELS[:10])
    assert torch.equal(data.held_inputs, PIXELS[10:])
    assert torch.equal(torch.cat((data.targets, data.held_targets)), LABELS)
    assert (data.classes, data.augment) == (classes, True)


@pytest.mark.parametrize("how", [{}, {"protocol": 5}, {"protocol": 4, "text": True}])
def test_cifar10_pickles(tmp_path: Path, how: dict[str, Any]) -> None:
    write_cifar10(tmp_path / "cifar-10-batches-py", **how)
    check_cifar(images(f"cifar10:{tmp_path}"))


def test_cifar_pickles_of_python_2(tmp_path: Path) -> None:
    """As published: strings are bytes, and arrays name numpy.core."""
    for name in ("train", "test"):
        where = slice(0, 10) if name == "train" else slice(10, 12)
        raw = batch(where, "fine_labels", protocol=2)
        (tmp_path / name).write_bytes(raw.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    check_cifar(images(f"cifar100:{tmp_path}"), 100)


class Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def test_pickles_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_cifar10(tmp_path)
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps({b"data": Harm(), b"labels": []}))
    with pytest.raises(DataError, match=r"data_batch_3 is not a CIFAR batch .*mkdir, which is not part of an array"):
        load(f"cifar10:{tmp_path}")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (None, "holds data_batch_1, but not data_batch_3. Fetch the data again."),
        (batch(slice(4, 6))[:-40], "data_batch_3 is not a CIFAR batch with 'labels': .*Fetch it again."),
        (
            pickle.dumps({b"data": numpy.zeros((2, 3072)), b"labels": [0, 1]}),
            "holds images as float64; uint8 is needed.",
        ),
        (
            pickle.dumps({b"data": numpy.zeros((2, 9), "uint8"), b"labels": [0, 1]}),
            r"shape \[9\]; CIFAR's have 3 x 32 x 32",
        ),
        (pickle.dumps({b"data": b"", b"labels": [0, 1]}), "holds images as bytes"),
        (pickle.dumps([1]), "data_batch_3 is not a CIFAR batch"),
    ],
)
def test_cifar_pickles_that_cannot_be_read(tmp_path: Path, raw: bytes | None, message: str) -> None:
    write_cifar10(tmp_path)
    path = tmp_path / "data_batch_3"
    path.unlink() if raw is None else path.write_bytes(raw)
    with pytest.raises(DataError, match=message):
        load(f"cifar10:{tmp_path}")


@pytest.mark.parametrize("last", [False, True])
def test_cifar_archives(tmp_path: Path, last: bool) -> None:
    pixels = (PIXELS.permute(0, 2, 3, 1) if last else PIXELS).numpy()
    labels = LABELS.numpy()[:, None]  # a column, as Keras has it
    parts = {"x_train": pixels[:10], "y_train": labels[:10], "x_test": pixels[10:], "y_test": labels[10:]}
    numpy.savez(tmp_path / "cifar.npz", **parts)
    check_cifar(images(f"cifar10:{tmp_path}"))
    numpy.savez(tmp_path / "other.npz", **parts)
    with pytest.raises(DataError, match="holds 2 .npz files: "):
        load(f"cifar10:{tmp_path}")


def test_cifar_archives_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no CIFAR-100. Known are the python batches .*unpack a .tar.gz first."):
        load(f"cifar100:{tmp_path}")
    numpy.savez(tmp_path / "a.npz", x_train=PIXELS.numpy())
    with pytest.raises(DataError, match="a.npz is not an archive of x_train, y_train, x_test, y_test: .*y_train"):
        load(f"cifar10:{tmp_path}")
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 no")
    with pytest.raises(DataError, match="a.npz is not an archive of x_train"):
        load(f"cifar10:{tmp_path}")


def write_pictures(folder: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="PNG batches need Pillow")
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    for name, pixels in zip(names, PIXELS.split(2), strict=True):
        rows = pixels.permute(0, 2, 3, 1).reshape(2, 1024, 3).numpy()
        image.fromarray(rows).save(folder / f"{name}.png")
    (folder / "train_lables.json").write_text(json.dumps(LABELS[:10].tolist()))
    (folder / "test_lables.json").write_text(json.dumps(LABELS[10:].tolist()))


def test_cifar_pictures(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    check_cifar(images(f"cifar10:{tmp_path}"))
    (tmp_path / "test_lables.json").write_text('["cat", "dog"]')
    with pytest.raises(DataError, match="test_lables.json must be a list of whole numbers."):
        load(f"cifar10:{tmp_path}")
    (tmp_path / "test_lables.json").unlink()
    with pytest.raises(DataError, match="There is no test_labels.json in"):
        load(f"cifar10:{tmp_path}")
    picture = tmp_path / "data_batch_2.png"
    picture.write_bytes(picture.read_bytes()[:-200])
    with pytest.raises(DataError, match="data_batch_2.png is truncated or not a PNG: .*Fetch it again."):
        load(f"cifar10:{tmp_path}")
    picture.unlink()
    with pytest.raises(DataError, match="holds data_batch_1.png, but not data_batch_2.png."):
        load(f"cifar10:{tmp_path}")
