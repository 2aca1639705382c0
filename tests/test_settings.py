"""Settings from TOML and the command line: what fits, and what is said when something does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from secateur.errors import SecateurError
from secateur.settings import from_mapping, parse, read_toml


@dataclass(frozen=True)
class Job:
    rounds: int = 1
    rate: float = 0.1
    name: str | None = None
    repaired: bool | str = False
    skip: tuple[str, ...] = ()


def test_values_of_every_kind() -> None:
    found = from_mapping(Job, {"rounds": 2, "rate": 1, "name": None, "repaired": "every", "skip": ["a", "b"]}, "x.toml")
    assert found == Job(2, 1.0, None, "every", ("a", "b"))
    assert isinstance(found.rate, float)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"round": 3}, "x.toml has no setting 'round'. Did you mean 'rounds'? Known: rounds, rate"),
        ({"rounds": "3"}, "x.toml: rounds = '3' must be a whole number"),
        ({"rounds": True}, "must be a whole number"),
        ({"rate": "fast"}, "must be a number"),
        ({"skip": [1]}, "must be a list, each text"),
        ({"name": 3}, "must be text or none"),
        ({"repaired": 3}, "must be true or false or text"),
    ],
)
def test_what_does_not_fit(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SecateurError) as error:
        from_mapping(Job, given, "x.toml")
    assert said in str(error.value)


def test_words_of_the_command_line() -> None:
    words = ["lr=3e-4", "score=bitter7", "compile=true", "skip=['a', 'b']", "name=none", "data=tokens:a=b"]
    assert parse(words) == {
        "lr": 3e-4, "score": "bitter7", "compile": True, "skip": ["a", "b"], "name": None, "data": "tokens:a=b"
    }  # fmt: skip
    with pytest.raises(SecateurError, match="--set needs key=value"):
        parse(["lr"])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SecateurError, match="Cannot read .*nowhere.toml: No such file"):
        read_toml(tmp_path / "nowhere.toml")
    (tmp_path / "broken.toml").write_text("a = ", encoding="utf-8")
    with pytest.raises(SecateurError, match="is not TOML"):
        read_toml(tmp_path / "broken.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SecateurError, match="it is not UTF-8 text"):
        read_toml(tmp_path / "bytes.toml")
