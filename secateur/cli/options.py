"""Options that several verbs share, the checks of their values, and the interface of a verb."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import signal
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from secateur.errors import SecateurError

if TYPE_CHECKING:
    import torch

TEXTS = "a file, FILE.jsonl[:FIELD], dataset:NAME[:CONFIG][:SPLIT], or builtin"
MODELS = "a folder, a name on the Hugging Face hub, or smollm2"
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
MOST_SEED = 2**32 - 1
INTERRUPTED = 130  # the exit code of a process ended by Ctrl-C
INTERRUPTED_LINE = "secateur: interrupted"


class Verb(Protocol):
    """What a module of this package offers; its docstring is the description."""

    SUMMARY: str
    EXAMPLE: str
    __doc__: str | None

    def add_options(self, parser: argparse.ArgumentParser, /) -> None: ...

    def run(self, options: argparse.Namespace, /) -> int: ...


def wrapped(text: str) -> str:
    """Paragraphs that fit a terminal of 80 columns."""
    return "\n\n".join(textwrap.fill(paragraph, 79) for paragraph in text.strip().split("\n\n"))


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


def whole(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text.strip() == "0" else positive(text)


def context_length(text: str) -> int:
    """A number of tokens in a window."""
    if (tokens := positive(text)) < 2:
        raise argparse.ArgumentTypeError("must be at least 2: a token is predicted from those before it")
    return tokens


def number(text: str, fits: Callable[[float], bool], wanted: str) -> float:
    """A number that fits; the error says what is wanted."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan  # true in no comparison
    if not fits(found):
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
    return found


def seconds(text: str) -> float:
    """A number of seconds above 0."""
    return number(text, lambda found: found > 0, "a number of seconds above 0")


def demo_steps(text: str) -> int:
    """A number of steps the demo can do with."""
    number = positive(text)
    if number < 20:
        raise argparse.ArgumentTypeError(f"a run needs at least 20 steps to ramp and recover, got {text}")
    return number


def sparsity(text: str) -> float:
    """A number; whether it is a sparsity is checked where it is used, with a hint for percentages."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a fraction such as 0.5, got {text!r}") from None


def seed(text: str) -> int:
    """A whole number that torch and numpy take as a seed: numpy's have 32 bits."""
    if not text.isascii() or not text.isdigit() or int(text) > MOST_SEED:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to {MOST_SEED}, got {text!r}")
    return int(text)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1, mps, xpu, ... (auto: a GPU if there is one)"
    )


def add_sparsity(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--sparsity", type=sparsity, help=f"fraction of the prunable weights to remove ({default})")


def add_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=seed, help="of everything random (0)")


def add_out(parser: argparse.ArgumentParser, text: str, **settings: Any) -> None:
    parser.add_argument("--out", type=Path, help=text, **settings)


def check_other(out: Path, model: str, done: str) -> None:
    """Refuse to replace the model that a verb reads; `done` is what it does to it."""
    if out.exists() and out.resolve() == Path(model).expanduser().resolve():
        raise SecateurError(f"--out {out} would replace the model that is {done}. Name another folder.")


def add_tracker(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--tracker", choices=(*TRACKERS, "none"), help=f"({default})")


def check_tracker(name: str | None) -> None:
    """Refuse a tracker that is not installed."""
    if name not in (None, "none") and importlib.util.find_spec(name) is None:
        raise SecateurError(f"--tracker {name}: it is not installed. pip install {name}, or pass --tracker none.")


def import_torch() -> None:
    """Import torch, which takes seconds. Ctrl-C meanwhile ends the process with one line.

    Parts of that import run in C, where a KeyboardInterrupt may be lost, printed with a traceback, or turned into
    another error. Nothing has been started at that point, so the process can end at once.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        importlib.import_module("torch")
        return
    signal.signal(signal.SIGINT, _end_at_once)
    try:
        importlib.import_module("torch")
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_at_once(*_: Any) -> None:
    os.write(2, f"{INTERRUPTED_LINE}\n".encode())
    os._exit(INTERRUPTED)


def pick_device(name: str) -> torch.device:
    """The torch device of this name, checked by using it; "auto" is a GPU if there is one, else the CPU."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # "meta" and devices that are not there fail here
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        if reason.startswith("Expected one of"):  # torch lists every name it reserves
            reason = "devices are called cpu, cuda, cuda:1, mps, xpu and the like"
        raise SecateurError(
            f"--device {name}: there is no such device here ({reason}). Leave it out, or use --device cpu."
        ) from error
    return device


def add_training_device(parser: argparse.ArgumentParser) -> None:
    """--device, and --cpu, its older name for the CPU."""
    add_device(parser)
    parser.add_argument("--cpu", dest="device", action="store_const", const="cpu", help=argparse.SUPPRESS)


def training_on_cpu(name: str) -> bool:
    """Whether a run should stay on the CPU; a device other than "auto" is passed on to Accelerate, which places it."""
    device = None if name == "auto" else pick_device(name)
    if device is not None and device.type != "cpu":
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    return device is not None and device.type == "cpu"
