"""Images with their classes: in epochs for training, all of the held-out ones for judging."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from secateur.errors import DataError
from secateur.lab.draws import fingerprint_of, generator
from secateur.optional import library

PADDING = 4  # pixels on every side that a crop may move into, as is usual for CIFAR
DIGITS_HELD_OUT = 360  # the last fifth of the digits: mostly other writers than those before
Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Images:
    """Training and held-out images, uint8 [N, C, H, W], and their classes, int64; mean and std are those of pixels."""

    inputs: Tensor
    targets: Tensor
    held_inputs: Tensor
    held_targets: Tensor
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str
    augment: bool = False

    def batch(self, step: int, size: int, seed: int, device: torch.device | str = "cpu") -> Labelled:
        """Normalised images and their classes; depends on the arguments alone. Bytes go to the device and become
        numbers there.

        Steps from 0 go through epochs without a gap: each holds every example once, in an order of its own.
        """
        places = torch.arange(step * size, (step + 1) * size)
        epochs = places // len(self.inputs)
        chosen = torch.empty_like(places)
        for epoch in epochs.unique().tolist():
            mine = epochs == epoch
            chosen[mine] = order(len(self.inputs), seed, epoch)[places[mine] % len(self.inputs)]
        inputs = self.inputs[chosen].to(device)
        if self.augment:
            inputs = moved(inputs, generator("augment", seed, step))
        return self.normalised(inputs), self.targets[chosen].to(device)

    def evaluation(self, size: int) -> Iterator[Labelled]:
        """Every held-out image once, in order, as it is."""
        for inputs, targets in zip(self.held_inputs.split(size), self.held_targets.split(size), strict=True):
            yield self.normalised(inputs), targets

    def fingerprint(self) -> str:
        """What tells this data from other data of the same name."""
        return fingerprint_of(self.inputs, self.targets, self.held_inputs, self.held_targets)

    def normalised(self, inputs: Tensor) -> Tensor:
        """float32, with mean 0 and deviation 1 in each channel of the training images."""
        mean, std = (torch.tensor(one, device=inputs.device)[:, None, None] for one in (self.mean, self.std))
        return (inputs.float() - mean) / std


@lru_cache(maxsize=2)  # a batch may lie in two epochs, and the next one lies in the same
def order(count: int, seed: int, epoch: int) -> Tensor:
    """The order of the examples in an epoch."""
    return torch.randperm(count, generator=generator("epoch", seed, epoch))


def moved(inputs: Tensor, draw: torch.Generator) -> Tensor:
    """Each image cropped at a random place of its padded self, and half of them mirrored. What is drawn is drawn on the
    host, so that it is the same wherever the images are."""
    count, channels, height, width = inputs.shape
    down, right = torch.randint(0, 2 * PADDING + 1, (2, count, 1), generator=draw)
    mirrored = torch.rand(count, 1, generator=draw) < 0.5
    rows, columns = down + torch.arange(height), right + torch.arange(width)
    columns = torch.where(mirrored, columns.flip(1), columns)
    which, channel = torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None]
    places = (which, channel, rows[:, None, :, None], columns[:, None, None, :])
    return torch.nn.functional.pad(inputs, (PADDING,) * 4)[tuple(place.to(inputs.device) for place in places)]


def make_images(train: Labelled, held_out: Labelled, classes: int, name: str, *, augment: bool = False) -> Images:
    """Images that were checked, with the mean and deviation of the training pixels."""
    for which, (inputs, targets) in (("training", train), ("held-out", held_out)):
        if not len(inputs) or len(inputs) != len(targets):
            raise DataError(f"{name} has {len(inputs):,} {which} images and {len(targets):,} labels. Fetch it again.")
        if int(targets.min()) < 0 or int(targets.max()) >= classes:
            found = f"{int(targets.min())} to {int(targets.max())}"
            raise DataError(f"{name} has {which} labels from {found}; they should be below {classes}. Is it another?")
    if train[0].shape[1:] != held_out[0].shape[1:]:
        shapes = " and ".join(str(list(inputs.shape[1:])) for inputs in (train[0], held_out[0]))
        raise DataError(f"{name} has training and held-out images of different shapes: {shapes}. Fetch it again.")
    figures = [_mean_and_std(train[0][:, channel]) for channel in range(train[0].shape[1])]
    mean, std = (tuple(figure) for figure in zip(*figures, strict=True))
    return Images(*train, *held_out, classes, mean, std, name, augment)


def _mean_and_std(pixels: Tensor) -> tuple[float, float]:
    """From counts of each value, so that no float copy of the images is made."""
    counts = torch.bincount(pixels.flatten(), minlength=256).double()
    values = torch.arange(256).double()
    mean = (counts * values).sum() / counts.sum()
    std = ((counts * (values - mean).square()).sum() / counts.sum()).sqrt()
    return float(mean), float(std) or 1.0  # a channel of one value has nothing to divide by


def digits(name: str) -> Images:
    """The 8x8 handwritten digits that come with scikit-learn."""
    datasets = library("sklearn.datasets", f"Reading {name}", "'secateur[lab]'")
    found = datasets.load_digits()
    inputs = torch.from_numpy(found.images).to(torch.uint8)[:, None]
    targets = torch.from_numpy(found.target).long()
    first = len(inputs) - DIGITS_HELD_OUT
    return make_images((inputs[:first], targets[:first]), (inputs[first:], targets[first:]), 10, name)
