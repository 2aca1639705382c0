"""Models of experiments: small GPTs, GPT-2, LeNet-5 and ResNets, all trained from random weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secateur.errors import HF_EXTRA, ModelError, library, nearest


@dataclass(frozen=True)
class GPTShape:
    """The size of a GPT."""

    vocabulary: int
    context: int = 64
    layers: int = 4
    width: int = 128
    heads: int = 4


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """A pre-norm transformer layer: attention, then an MLP."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions and a head tied to the token embedding."""

    _no_split_modules = (Layer.__name__,)  # Accelerate shards by these, as for models of transformers

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.lm_head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


GPT2 = {  # layers, width, heads
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}
SMALL_GPT = re.compile(r"gpt-(\d+)x(\d+)(?:x(\d+))?")  # layers, width, heads
HEAD_WIDTH = 64  # unless the name has the number of heads
SMALL_IMAGE = 64  # pixels a side up to which the first layer of a ResNet does not downsample


class LeNet5(nn.Module):
    """LeNet-5 with batch normalization and ReLU, for images of any size."""

    def __init__(self, channels: int, classes: int, size: int) -> None:
        super().__init__()
        self.padding = max(0, (32 - size + 1) // 2)  # to at least 32 pixels a side
        side = (size + 2 * self.padding) // 4 - 3
        self.conv1, self.norm1 = nn.Conv2d(channels, 6, 5), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * side * side, 120), nn.Linear(120, 84), nn.Linear(84, classes)

    def forward(self, images: Tensor) -> Tensor:
        images = functional.pad(images, [self.padding] * 4)
        images = functional.max_pool2d(functional.relu(self.norm1(self.conv1(images))), 2)
        images = functional.max_pool2d(functional.relu(self.norm2(self.conv2(images))), 2)
        hidden = functional.relu(self.fc1(images.flatten(1)))
        return self.fc3(functional.relu(self.fc2(hidden)))


class Residual(nn.Module):
    """A residual block of two convolutions, or a bottleneck of three."""

    def __init__(self, before: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        after = 4 * width if bottleneck else width
        sizes = [(before, width, 1), (width, width, 3), (width, after, 1)] if bottleneck else [
            (before, width, 3), (width, after, 3)
        ]  # fmt: skip
        steps: list[nn.Module] = []
        for number, (inputs, outputs, extent) in enumerate(sizes):
            shrinks = stride if number == (1 if bottleneck else 0) else 1
            steps += [nn.Conv2d(inputs, outputs, extent, shrinks, extent // 2, bias=False), nn.BatchNorm2d(outputs)]
            steps += [nn.ReLU()] if number < len(sizes) - 1 else []
        self.steps = nn.Sequential(*steps)
        self.around: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.around = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.steps(x) + self.around(x))


class ResNet(nn.Module):
    """ResNet; the first layer is that of CIFAR for small images and that of ImageNet for large ones."""

    def __init__(self, depths: tuple[int, ...], bottleneck: bool, channels: int, classes: int, size: int) -> None:
        super().__init__()
        small = size <= SMALL_IMAGE
        stem: list[nn.Module] = [
            nn.Conv2d(channels, 64, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False)
        ]
        stem += [nn.BatchNorm2d(64), nn.ReLU()] + ([] if small else [nn.MaxPool2d(3, 2, 1)])
        self.stem, blocks, before = nn.Sequential(*stem), [], 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            for number in range(depth):
                blocks.append(Residual(before, width, 2 if stage and not number else 1, bottleneck))
                before = 4 * width if bottleneck else width
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(before, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


IMAGE_MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "lenet5": LeNet5,
    "resnet18": lambda channels, classes, size: ResNet((2, 2, 2, 2), False, channels, classes, size),
    "resnet50": lambda channels, classes, size: ResNet((3, 4, 6, 3), True, channels, classes, size),
}


class Causal(nn.Module):
    """A causal model of transformers with the interface of GPT: tokens in, logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def size_of(name: str) -> tuple[int, int]:
    """Layers and width of the language model of this name."""
    shape = SMALL_GPT.fullmatch(name)
    return GPT2[name][:2] if shape is None else (int(shape[1]), int(shape[2]))


def language_model(name: str, vocabulary: int, context: int, most_layers: int = 1000) -> nn.Module:
    """The GPT of this name, with at most `most_layers` layers."""
    if (shape := SMALL_GPT.fullmatch(name)) is not None:
        layers, width = int(shape[1]), int(shape[2])
        heads = max(1, width // HEAD_WIDTH) if shape[3] is None else int(shape[3])
        if not layers or not width or not heads or width % heads:
            raise ModelError(
                f"{name} needs at least one layer and a width that its {heads} heads divide, as in gpt-8x512 or"
                " gpt-4x128x4 (layers, width, heads)."
            )
        return GPT(GPTShape(vocabulary, context, min(layers, most_layers), width, heads))
    transformers = library("transformers", f"Model {name}", HF_EXTRA)
    layers, width, heads = GPT2[name]
    config: Any = transformers.GPT2Config(
        vocab_size=vocabulary, n_positions=context, n_layer=min(layers, most_layers), n_embd=width, n_head=heads,
        use_cache=False, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    return Causal(transformers.GPT2LMHeadModel(config))


def is_language_model(name: str) -> bool:
    """Whether the model of this name reads tokens; raises if there is none."""
    if name in GPT2 or SMALL_GPT.fullmatch(name):
        return True
    if name in IMAGE_MODELS:
        return False
    known = [*GPT2, "gpt-4x128", "gpt-8x512", *IMAGE_MODELS]
    raise ModelError(
        f"No model {name!r}.{nearest(name, known)} Use {', '.join(GPT2)}, gpt-LAYERSxWIDTH[xHEADS] (such as gpt-8x512)"
        f" or {', '.join(IMAGE_MODELS)}."
    )


def image_model(name: str, channels: int, classes: int, size: int) -> nn.Module:
    """The classifier of this name for images of `size` pixels a side."""
    return IMAGE_MODELS[name](channels, classes, size)


def predict(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """float32 logits and targets, a row per prediction. A batch is tokens, or a pair of images and their classes."""
    inputs, targets = batch if isinstance(batch, tuple) else (batch[:, :-1], batch[:, 1:])
    return model(inputs).float().flatten(0, -2), targets.flatten()


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups for the optimizer: matrices and kernels decay, biases and normalization do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model with random weights of this seed, leaving torch's random state as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()
