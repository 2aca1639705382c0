"""The command line: one file a verb. Results go to stdout, progress and errors to stderr.

Parsing imports no torch, so that help and mistakes are answered at once; each verb imports what it needs in `run`.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import secateur
from secateur.cli import bench, compare, data, demo, export, finetune, inspect, probe, prune, scores, sweep, train
from secateur.cli.options import INTERRUPTED, INTERRUPTED_LINE, Verb, wrapped
from secateur.errors import SecateurError, nearest, one_line
from secateur.files import ESCAPED
from secateur.settings import kernels_off

VERBS: dict[str, Verb] = {
    "demo": demo,
    "prune": prune,
    "probe": probe,
    "finetune": finetune,
    "train": train,
    "sweep": sweep,
    "compare": compare,
    "data": data,
    "inspect": inspect,
    "export": export,
    "scores": scores,
    "bench": bench,
}


UNKNOWN = "unrecognized arguments: "  # how argparse begins its message


class Parser(argparse.ArgumentParser):
    """Answers a mistake with one line instead of the whole usage."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.chosen: Parser | None = None  # of the verb that was given

    def error(self, message: str) -> NoReturn:
        if self.chosen is not None and message.startswith(UNKNOWN):  # which argparse says of the whole command
            self.chosen.error(message + self.chosen.hint(message.removeprefix(UNKNOWN).split()))
        said = " ".join(message.split()) + _choice_hint(message)
        self.exit(2, f"secateur: {said}{'' if said.endswith('?') else '.'} See {self.prog} --help.\n")

    def hint(self, unknown: Sequence[str]) -> str:
        """The option that a misspelt one is closest to, in a sentence; empty if none is close."""
        known = self._option_string_actions
        hints = (nearest(word.partition("=")[0], known) for word in unknown if word.startswith("-"))
        return next((f".{one}" for one in hints if one), "")


def _choice_hint(message: str) -> str:
    """The choice that a misspelt one is closest to, in a sentence; empty if the message is about something else."""
    found = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message, flags=re.DOTALL)
    hint = nearest(found[1], [word.strip(" '\n") for word in found[2].split(",")]) if found else ""
    return f".{hint}" if hint else ""


def build_parser(chosen: str | None = None) -> Parser:
    """The parser of all verbs; with `chosen`, only this verb has its options."""
    parser = Parser(
        prog="secateur",
        description="Make PyTorch networks sparse, exact to the weight, while they train or after.",
        epilog="secateur VERB --help describes a verb and shows an example. Start with: secateur demo",
    )
    parser.add_argument("--version", action="version", version=f"secateur {secateur.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for name, verb in VERBS.items():
        one = verbs.add_parser(
            name,
            help=verb.SUMMARY,
            description=wrapped(verb.__doc__ or ""),
            epilog=f"example:\n  {verb.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if chosen in (None, name):
            verb.add_options(one)
        if chosen == name:
            parser.chosen = one
        one.set_defaults(run=verb.run)
    return parser


def said(error: Exception) -> str:
    """The message of an error in one line, whatever a library wrote; the system's with path and reason."""
    if isinstance(error, OSError) and error.strerror:
        known = error.filename is not None  # not where the output itself cannot be written
        return f"{error.filename} cannot be used: {error.strerror}. Name another path." if known else error.strerror
    return one_line(error)


def _formatted(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Warnings of this package in one line, without the place in its source."""
    ours = Path(filename).is_relative_to(Path(__file__).parents[1])
    return f"secateur: warning: {message}\n" if ours else _STANDARD(message, category, filename, lineno, line)


_STANDARD = warnings.formatwarning


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code: 0, 2 after a mistake, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = build_parser(arguments[0] if arguments else "")
    if not arguments:
        parser.print_help()
        return 0
    if any("\0" in word for word in arguments):  # no path or number has one; a shell cannot pass it, a program can
        parser.error("an argument holds a null character")
    if not arguments[0].startswith("-") and arguments[0] not in VERBS:
        parser.error(f"there is no verb {arguments[0]!r}.{nearest(arguments[0], VERBS)} Verbs: {', '.join(VERBS)}")
    options = parser.parse_args(arguments)
    if options.verb is None:
        parser.error(f"name a verb first: {', '.join(VERBS)}")
    warnings.formatwarning = _formatted
    if not sys.stderr.isatty():  # bars of the Hugging Face libraries would fill a log
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=ESCAPED)  # as stderr is: a path may not be text, or the terminal know no umlauts
    options.invocation = shlex.join(["secateur", *arguments])
    try:
        kernels_off()  # a misspelt value is said before anything is loaded
        return int(options.run(options))
    except BrokenPipeError:  # the reader of our output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (SecateurError, OSError) as error:
        print(f"secateur: {said(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(INTERRUPTED_LINE, file=sys.stderr)
        return INTERRUPTED
