"""`secateur data dataset:FOLDER`: streamed into shards, the same files for any workers and after any kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("datasets", reason="datasets is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from secateur.cli import main
from secateur.errors import DataError, SaveError, SecateurError, TextError
from secateur.files import write
from secateur.lab import encoding, shards
from secateur.lab.data import Tokens, load, prepare
from secateur.lab.encoding import is_held_out, read_tokenizer
from secateur.lab.shards import Shards
from tests.damage import small_disk
from tests.test_lab_prepare import bpe

ROOT = Path(__file__).parent.parent
TEXTS = [f"Document {number} has trees, \u00e4hren and {'words ' * (number % 7)}." for number in range(120)]


def documents(folder: Path, texts: list[Any], column: str = "text", files: int = 3) -> str:
    """A folder of JSON lines, as `datasets` reads it; its name for `secateur data`."""
    folder.mkdir()
    each = -(-len(texts) // files)
    for number in range(files):
        lines = [json.dumps({column: text}) for text in texts[number * each : (number + 1) * each]]
        (folder / f"part-{number}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return f"dataset:{folder}"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return documents(tmp_path / "texts", TEXTS)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks, shards and commits in little text."""
    monkeypatch.setattr(shards, "BLOCK", 300)
    monkeypatch.setattr(shards, "SHARD", 1000)
    monkeypatch.setattr(shards, "COMMIT_SECONDS", 0.0)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def held(tokens: Any) -> list[int]:
    found: list[int] = tokens[torch.arange(tokens.numel())].tolist()
    return found


def test_a_dataset_becomes_shards_that_training_reads(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tokens"
    command = ["data", source, "--out", str(out), "--tokenizer", f"gpt2:{bpe(tmp_path)}", "--workers", "2"]
    assert main(command) == 0
    assert f"shards. Train on tokens:{out}" in capsys.readouterr().out
    data = load(f"tokens:{out}")
    assert isinstance(data, Tokens)
    assert isinstance(data.train, Shards)
    tokenizer = read_tokenizer(str(out / "tokenizer.json"))
    for part, apart in ((data.train, False), (data.held_out, True)):
        wanted = [text + "\n\n" for text in TEXTS if is_held_out((text + "\n\n").encode(), 0.1) == apart]
        assert held(part) == [number for text in wanted for number in tokenizer.encode(text).ids]
    meta = json.loads((out / "meta.json").read_text())
    assert meta["tokens"] == {"train": data.train.numel(), "val": data.held_out.numel()}
    assert [entry["tokens"] for entry in meta["shards"]["train"][:-1]] == [1000] * (len(meta["shards"]["train"]) - 1)
    assert sorted(files(out)) == sorted(
        ["meta.json", "tokenizer.json", *(one["file"] for part in meta["shards"].values() for one in part)]
    )


def test_windows_cross_shards_as_if_there_were_none(source: str, tmp_path: Path) -> None:
    prepare(source, tmp_path / "a")
    data = load(f"tokens:{tmp_path / 'a'}")
    assert isinstance(data, Tokens)
    assert isinstance(data.train, Shards)
    whole = Tokens(torch.cat(data.train.parts), torch.cat(data.held_out.parts), 256, "whole")  # type: ignore[union-attr]
    assert len(data.train.parts) > 3
    for step in range(5):
        assert torch.equal(data.batch(step, 32, 100, 0), whole.batch(step, 32, 100, 0))
    assert torch.equal(data.evaluation(20), whole.evaluation(20))
    assert data.fingerprint() == load(f"tokens:{tmp_path / 'a'}").fingerprint()


def test_training_on_shards(source: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    assert main(["data", source, "--out", str(tmp_path / "a"), "--tokens", "3000"]) == 0
    settings = ["model=gpt-1x16", f"data=tokens:{tmp_path / 'a'}", "steps=2", "batch=2", "context=16", "evaluation=2"]
    options = [word for setting in settings for word in ("--set", setting)]
    assert main(["train", *options, "--device", "cpu", "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("tokens", [999, 1000, 2345])
def test_exactly_as_many_tokens_as_asked_for(tokens: int, source: str, tmp_path: Path) -> None:
    prepare(source, tmp_path / "whole")
    meta = prepare(source, tmp_path / "a", tokens=tokens)
    assert sum(meta["tokens"].values()) == tokens
    for name, part in meta["shards"].items():
        found = b"".join((tmp_path / "a" / one["file"]).read_bytes() for one in part)
        whole = b"".join(path.read_bytes() for path in sorted((tmp_path / "whole").glob(f"{name}-*")))
        assert whole.startswith(found)


class Killed(BaseException):
    """As a kill: nothing handles it."""


@pytest.mark.parametrize("when", [0, 5, 11, 18])
def test_interrupted_anywhere_and_continued_to_the_same_files(
    when: int, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(source, tmp_path / "whole", tokens=4000)
    calls = 0
    append = shards.Part.append

    def fragile(self: Any, tokens: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls > when:
            append(self, tokens[:2])  # something is on disk that does not count
            raise Killed
        append(self, tokens)

    monkeypatch.setattr(shards.Part, "append", fragile)
    with pytest.raises(Killed):
        prepare(source, tmp_path / "a", tokens=4000)
    assert not (tmp_path / "a").exists()
    monkeypatch.setattr(shards.Part, "append", append)
    prepare(source, tmp_path / "a", tokens=4000)
    assert files(tmp_path / "a") == files(tmp_path / "whole")
    assert not list(tmp_path.glob(".a*"))


RUN = """
import sys
from secateur.lab import shards
shards.BLOCK, shards.SHARD, shards.COMMIT_SECONDS = 300, 1000, 0.0
if __name__ == "__main__":
    from secateur.cli import main
    sys.exit(main(sys.argv[1:]))
"""


def test_killed_and_continued_to_the_same_files(source: str, tmp_path: Path) -> None:
    """SIGKILL of a process with two workers in the middle of its work; none of the workers outlives it."""
    tokenizer, out = f"gpt2:{bpe(tmp_path)}", tmp_path / "a"
    prepare(source, tmp_path / "whole", tokenizer, workers=1)
    script = tmp_path / "run.py"
    script.write_text(RUN)
    command = [sys.executable, str(script), "data", source, "--out", str(out), "--workers", "2"]
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen([*command, "--tokenizer", tokenizer], env=here, stderr=subprocess.DEVNULL)
    progress = tmp_path / ".a.unfinished" / "progress.json"
    while job.poll() is None and not progress.exists():
        time.sleep(0.001)
    children = _children(job.pid)
    job.send_signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    assert len(children) > 2  # the workers and what spawning them needs
    deadline = time.monotonic() + 60
    while any(map(_runs, children)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [child for child in children if _runs(child)]
    assert not out.exists()
    done = sum(entry["tokens"] for part in json.loads(progress.read_text())["files"].values() for entry in part)
    (progress.parent / ".progress.json.0123abcd.tmp").touch()  # as a kill in the middle of a write leaves
    meta = prepare(source, out, tokenizer, workers=1)
    assert 0 < done < sum(meta["tokens"].values())
    assert files(out) == files(tmp_path / "whole")


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_saved_datasets_and_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = datasets.Dataset.from_dict({"body": TEXTS})
    (tmp_path / "parquet").mkdir()
    rows.to_parquet(tmp_path / "parquet" / "a.parquet", batch_size=50)
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "splits")
    jsonl = documents(tmp_path / "jsonl", TEXTS, "body")
    found = []
    for name in (jsonl, f"dataset:{tmp_path}/parquet", f"dataset:{tmp_path}/saved", f"dataset:{tmp_path}/splits:test"):
        prepare(name, tmp_path / f"out{len(found)}", column="body", tokens=3000)
        found.append({key: raw for key, raw in files(tmp_path / f"out{len(found)}").items() if key != "meta.json"})
    assert found[1:] == found[:-1]
    for wrong, said in (
        ("splits", "'train' but 'test'"), ("splits:dev", "'dev' but 'test'"), ("saved:test", "'test' but 'train'"),
    ):  # fmt: skip
        with pytest.raises(TextError, match=f"has no split {said}"):
            prepare(f"dataset:{tmp_path}/{wrong}", tmp_path / "b", column="body")


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (TEXTS, {"column": "body"}, "has no column 'body'; it has 'text'."),
        ([3, 4], {}, "Column 'text' of dataset:.* holds int, not text."),
        (["", "  ", None], {}, "holds no text: 3 rows, all empty in column 'text'."),
        (TEXTS, {"tokens": 10**6}, r"has [\d,]+ tokens and --tokens asks for 1,000,000. Ask for at most"),
        (["one"], {}, "would give no tokens in (train|val): too few documents"),
        (TEXTS, {"tokenizer": "none.json"}, "There is no tokenizer none.json"),
        (TEXTS, {"tokens": 10**14}, "needs about .* MB, and the disk has"),
    ],
)
def test_datasets_that_cannot_work(
    texts: list[Any], options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    name = documents(tmp_path / "texts", texts, files=1)
    with pytest.raises((DataError, TextError, SaveError), match=message) as raised:
        prepare(name, tmp_path / "a", **options)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "a").exists()


def test_names_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "book.txt").write_text("text")
    for words, said in (
        ([f"dataset:{tmp_path}/none"], "There is no folder"),
        ([f"dataset:{tmp_path}/empty"], "cannot be read"),
        (
            [f"dataset:{tmp_path}/book.txt"],
            f"book.txt is a file. Name it without dataset:, or its folder, dataset:{tmp_path}",
        ),
        (["dataset:"], "does not name a dataset"),
        ([str(tmp_path / "book.txt"), "--tokens", "5"], "--tokens goes with dataset:NAME"),
    ):
        assert main(["data", *words, "--out", str(tmp_path / "a")]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert len(error.strip().splitlines()) == 1


def test_more_tokens_continue_fewer(source: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Ask for at most"):
        prepare(source, tmp_path / "a", tokens=10**6)
    with pytest.raises(DataError, match=r"already has [\d,]+ tokens of this job, and 10 are asked for."):
        prepare(source, tmp_path / "a", tokens=10)
    prepare(source, tmp_path / "a")
    prepare(source, tmp_path / "whole")
    assert files(tmp_path / "a") == files(tmp_path / "whole")


def test_a_cut_folder_is_not_taken_for_the_whole_dataset(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the last commit, before the folder is put in place."""
    with monkeypatch.context() as patched:
        patched.setattr(
            shards, "write", lambda path, text: write(path, text) if path.name == "progress.json" else 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            prepare(source, tmp_path / "a", tokens=2000)
    for tokens in (None, 3000):
        with pytest.raises(DataError, match=r"already has 2,000 tokens of this job, and (all|3,000) are asked for"):
            prepare(source, tmp_path / "a", tokens=tokens)
    assert sum(prepare(source, tmp_path / "a", tokens=2000)["tokens"].values()) == 2000
    assert "progress.json" not in files(tmp_path / "a")


def test_an_unfinished_folder_of_another_job(source: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Ask for at most"):
        prepare(source, tmp_path / "a", tokens=10**6)
    with pytest.raises(DataError, match=r"holds another unfinished job \(held_out 0.1 there, 0.2 here\)"):
        prepare(source, tmp_path / "a", held_out=0.2)
    prepare(source, tmp_path / "a", held_out=0.2, overwrite=True)
    prepare(source, tmp_path / "b", held_out=0.2)
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "progress"])
def test_a_damaged_unfinished_folder_is_not_continued(damage: str, source: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Ask for at most"):
        prepare(source, tmp_path / "a", tokens=10**6)
    path = tmp_path / ".a.unfinished" / "train-00001.bin"
    raw = path.read_bytes()
    if damage == "progress":
        (path.parent / "progress.json").write_text("{")
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(raw[:-2] if damage == "cut" else bytes([raw[0] ^ 1]) + raw[1:])
    with pytest.raises(DataError, match=r"Delete .*\.a\.unfinished to begin again."):
        prepare(source, tmp_path / "a")


def test_shards_cut_short_are_not_read(source: str, tmp_path: Path) -> None:
    prepare(source, tmp_path / "a")
    path = tmp_path / "a" / "train-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train-00001.bin has 1,998 bytes of uint16; it should have 2,000 bytes"):
        load(f"tokens:{tmp_path / 'a'}")
    path.unlink()
    with pytest.raises(DataError, match="There is no train-00001.bin"):
        load(f"tokens:{tmp_path / 'a'}")
    meta = json.loads((tmp_path / "a" / "meta.json").read_text())
    (tmp_path / "a" / "meta.json").write_text(json.dumps({**meta, "shards": {"train": []}}))
    with pytest.raises(DataError, match="lists shards of train without tokens"):
        load(f"tokens:{tmp_path / 'a'}")


def test_a_full_disk_keeps_what_is_done(source: str, tmp_path: Path) -> None:
    prepare(source, tmp_path / "whole")
    with small_disk(tmp_path / "disk", 24 << 10) as disk:
        with pytest.raises(SaveError, match=r"No space left on device.*; the same command continues from there."):
            prepare(source, disk / "a")
        assert not (disk / "a").exists()
        subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
        prepare(source, disk / "a")
        assert files(disk / "a") == files(tmp_path / "whole")


def test_workers_do_not_import_torch() -> None:
    code = "import sys, secateur.lab.encoding; sys.exit('torch' in sys.modules)"
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=here, check=False).returncode == 0


def test_memory_holds_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is read only a few blocks further than what is written."""
    read = 0

    def blocks() -> Iterator[tuple[list[str], int]]:
        nonlocal read
        for number in range(1000):
            read += 1
            yield [f"document {number}"], number

    settings = encoding.Encoding(None, "uint16", 0.1)
    monkeypatch.setattr(encoding, "ProcessPoolExecutor", Instant)
    for count, (_, place) in enumerate(encoding.encode_blocks(blocks(), settings, 3)):
        assert place == count
        assert read - count <= encoding.AHEAD * 3
    assert count == 999


def test_a_worker_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "ProcessPoolExecutor", Instant)
    monkeypatch.setattr(Instant, "ends", BrokenProcessPool("a child process terminated abruptly"))
    with pytest.raises(SecateurError, match=r"A worker process ended unexpectedly.* with fewer --workers than 3 it"):
        list(encoding.encode_blocks([(["text"], 0)], encoding.Encoding(None, "uint16", 0.1), 3))


class Instant:
    """A pool whose work is done when it is given, or fails."""

    ends: BaseException | None = None

    def __init__(self, workers: int, context: Any, begin: Any, settings: Any) -> None:
        self._settings = settings[0]

    def submit(self, work: Any, documents: list[str]) -> Any:
        done: Future[Any] = Future()
        if self.ends is not None:
            done.set_exception(self.ends)
            return done
        done.set_result(encoding.encoded(documents, None, self._settings))
        return done

    def shutdown(self, **how: bool) -> None:
        pass
