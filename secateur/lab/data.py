"""What an experiment reads, by a short word for it: `load("python")`, `load("cifar10:FOLDER")`."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from secateur.errors import DataError
from secateur.lab.cifar import cifar
from secateur.lab.images import Images, digits
from secateur.lab.mnist import mnist
from secateur.lab.tokens import Tokens, dataset_tokens, file_tokens, python_tokens, text_tokens

__all__ = ["FORMS", "Images", "Tokens", "load"]

Reader = Callable[[str, str], Tokens | Images]  # what follows the colon, and the whole for the name
READERS: dict[str, Reader] = {
    "python": lambda _, name: python_tokens(name),
    "digits": lambda _, name: digits(name),
    "tokens:FOLDER": file_tokens,
    "text:FILE": text_tokens,
    "dataset:NAME[:CONFIG]": dataset_tokens,
    "mnist:FOLDER": mnist,
    "fashion-mnist:FOLDER": mnist,
    "cifar10:FOLDER": lambda path, name: cifar(path, name, 10),
    "cifar100:FOLDER": lambda path, name: cifar(path, name, 100),
}
FORMS = {form.partition(":")[0]: form for form in READERS}


def load(spec: str) -> Tokens | Images:
    """The data that a spec names; see FORMS for all there are."""
    word, _, rest = spec.partition(":")
    if word not in FORMS:
        near = difflib.get_close_matches(word, FORMS, n=1)
        hint = f" Did you mean {FORMS[near[0]]!r}?" if near else ""
        raise DataError(f"No data {spec!r}.{hint} Use one of {', '.join(FORMS.values())}.")
    form = FORMS[word]
    if bool(rest) != (":" in form):
        raise DataError(f"{spec!r} {'says too much' if rest else 'does not say where'}; the form is {form!r}.")
    return READERS[form](rest, spec)
