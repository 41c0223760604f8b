"""--data-path at an S3 server that is started here: the run of local files, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mega_schema.dataset.dataset_info import DatasetInfo
from mega_schema.dataset.indexed_dataset import IndexedWriter
from mega_schema.remote_files import RemotePath
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.cli import main
from mega_train.telemetry.event_log import read_events
from tests.s3_server import serve_s3

pytest.importorskip("moto")
pytest.importorskip("s3fs")

MODEL = (
    "gpt --num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 4 --lr 0.01 --eval-iters 1 --eval-interval 2 --log-interval 1"
)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder with the datasets a and b, and the URL of its copy."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=500)
    for name, first in (("a", 0), ("b", 250)):
        with IndexedWriter(folder / name, np.uint16, info=DatasetInfo(tokenizer.identity)) as out:
            for document in range(120):
                out.add(first + np.arange(5 + document) % 250)
                out.end_document()
        tokenizer.save(folder / f"{name}.tokenizer")
    with serve_s3() as environment, pytest.MonkeyPatch.context() as patched:
        for variable, value in environment.items():
            patched.setenv(variable, value)
        file_system = RemotePath("s3://bucket/x").file_system()
        if not file_system.exists("bucket"):
            file_system.mkdir("bucket")
        file_system.put(f"{folder}/", "bucket/data/", recursive=True)
        yield folder, "s3://bucket/data"


def losses(
    run: Path, data: str, capsys: pytest.CaptureFixture[str], more: str = ""
) -> list[tuple[object, ...]]:
    code, error = train(f"--data-path {data} --save {run} {more}", capsys)
    assert code == 0, error
    return [
        (event["event"], event["iteration"], event["loss"]) for event in read_events(run) if "loss" in event
    ]


def train(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Return the exit code, and what is on stderr."""
    with pytest.raises(SystemExit) as left:
        main(f"{MODEL} {words}".split())
    return left.value.code, capsys.readouterr().err


def test_a_blend_in_s3_trains_as_one_of_this_machine(
    bucket: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, url = bucket
    local = losses(tmp_path / "local", f"0.3 {folder}/a 0.7 {folder}/b", capsys)
    cache = tmp_path / "cache"
    words = f"0.3 {url}/a 0.7 {url}/b"
    remote = losses(tmp_path / "remote", words, capsys, f"--object-storage-cache-path {cache}")
    assert len(local) >= 4
    assert remote == local
    assert len(list(cache.glob("*/tokenizer/*.json"))) >= 2, "the tokenizers are copied"
    assert (tmp_path / "remote" / "iter_0000004" / "tokenizer").is_dir()


def test_a_file_in_place_of_the_folder_for_tokens_is_one_refusal(
    bucket: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a table of two: the dataset that could not be opened was refused too."""
    (tmp_path / "cache").touch()
    words = f"--data-path s3://bucket/data/a --object-storage-cache-path {tmp_path / 'cache'}"
    code, error = train(words, capsys)
    message = f"is a file: found {tmp_path / 'cache'}, wanted a folder"
    assert (code, error) == (2, f"error: --object-storage-cache-path: {message}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data-path s3://bucket/data/c", "s3://bucket/data/c.idx: no such file"),
        ("--data-path s3://bucket/data/a --sft", "s3://bucket/data/a_prompt_document: is a URL"),
        ("--data-path s3://no-such-bucket/a", "s3://no-such-bucket/a.idx: no such file"),
        ("--data-path ftp://bucket/a", "ftp://bucket/a: is a URL"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    bucket: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    code, error = train(f"{words} --object-storage-cache-path {tmp_path / 'cache'}", capsys)
    assert code == 2
    assert message in error
    assert "Traceback" not in error
