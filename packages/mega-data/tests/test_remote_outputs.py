"""Outputs on an S3 server that is started here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mega_data.cli import commands
from mega_schema import remote_files
from mega_schema.app.cli_runner import run_command
from mega_schema.remote_files import RemotePath
from tests.s3_server import serve_s3

pytest.importorskip("moto")
pytest.importorskip("s3fs")

LINES = "".join(json.dumps({"text": f"{n}  {n + 1} 7"}) + "\n" for n in range(500))
ENCODE = "preprocess --input in/a.jsonl --tokenizer-type NullTokenizer --vocab-size 9999"


def run(words: str) -> int:
    with pytest.raises(SystemExit) as left:
        run_command(commands, words.split())
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with serve_s3() as environment:
        yield environment


@pytest.fixture
def store(s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file system of an empty bucket."""
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote_files, "_FIRST_WAIT", 0.001)
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path("in/a.jsonl").write_text(LINES)
    file_system = RemotePath("s3://bucket/x").file_system()
    if file_system.exists("bucket"):
        file_system.rm("bucket", recursive=True)
    file_system.mkdir("bucket")
    return file_system


def objects(store: Any) -> dict[str, bytes]:
    return {key.removeprefix("bucket/"): store.cat_file(key) for key in store.find("bucket")}


def local_files(folder: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "command", ["clean --step whitespace --keep-dropped", "dedup --preset exact --output-format parquet"]
)
def test_a_folder_in_a_bucket_has_the_files_of_a_local_one(store: Any, command: str) -> None:
    assert run(f"{command} --input in --output kept") == 0
    assert run(f"{command} --input in --output s3://bucket/kept --work-dir work") == 0
    assert objects(store) == local_files("kept")
    assert list(Path("work").iterdir()) == []
    assert run("clean --step whitespace --input s3://bucket/kept --output again") == 0


def test_extract_uploads_folders_files_and_dropped_pages(store: Any) -> None:
    Path("in/p.html").write_text("<html><title>t</title><body><p>A paragraph.</p></body></html>")
    Path("in/q.html").write_text("<html></html>")
    for output in ("pages", "all.jsonl.gz"):
        command = "extract --input in/p.html in/q.html --full-page --keep-dropped"
        assert run(f"{command} --output {output}") == 0
        assert run(f"{command} --output s3://bucket/{output} --work-dir work") == 0
    local = local_files("pages") | local_files("pages.dropped")
    local |= {path.name: path.read_bytes() for path in Path().glob("all.*")}
    assert objects(store) == local


def test_a_dataset_is_uploaded_with_its_index_last(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(f"{ENCODE} --output-prefix corpus") == 0
    order = list[str]()
    put_file = store.put_file

    def record(path: str, key: str, **rest: Any) -> None:
        order.append(key)
        put_file(path, key, **rest)

    monkeypatch.setattr(store, "put_file", record)
    assert run(f"{ENCODE} --output-prefix s3://bucket/data/corpus --work-dir work") == 0
    names = {name.removeprefix("data/"): data for name, data in objects(store).items()}
    assert names == {name: data for name, data in local_files(".").items() if name.startswith("corpus_")}
    assert order[-1] == "bucket/data/corpus_text_document.idx"


def test_mixes_statistics_and_chats_in_a_bucket_have_the_files_of_local_ones(
    store: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{ENCODE} --output-prefix corpus") == 0
    for command in ("mix --data-path corpus_text_document", "mix --input in", "stats --input in"):
        name = command.replace(" ", "").replace("-", "")
        assert run(f"{command} --output {name}") == 0
        assert run(f"{command} --output s3://bucket/{name} --work-dir work") == 0
    local = (
        local_files("mixdatapathcorpus_text_document")
        | local_files("mixinputin")
        | local_files("statsinputin")
    )
    remote = objects(store)
    blend = "mixdatapathcorpus_text_document/blend.json"
    assert json.loads(local.pop(blend))["train"] == ["train_document"]
    url = "s3://bucket/mixdatapathcorpus_text_document"
    assert json.loads(remote.pop(blend))["train"] == [f"{url}/train_document"]
    assert remote == local
    out = capfd.readouterr().out
    assert f"{url}/blend.json: mega-train --per-split-data-args-path blend.json\n" in out
    assert "s3://bucket/statsinputin: 500 documents" in out
    weights = (
        "mix --data-path corpus_text_document --weights-only --output s3://bucket/weights --work-dir work"
    )
    assert run(weights) == 0
    assert sorted(objects(store).keys() - remote.keys() - {blend})[-1] == "weights/report.json"
    assert list(Path("work").iterdir()) == []


def test_chats_in_a_bucket_have_the_files_of_local_ones(store: Any) -> None:
    messages = [{"role": role, "content": "7"} for role in ("user", "assistant")]
    Path("in/a.jsonl").write_text(json.dumps({"messages": messages, "text": "7 7"}) + "\n")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    Path("chat.jinja").write_text(f"{template}{{% if add_generation_prompt %}}assistant: {{% endif %}}")
    assert run("train-tokenizer --input in --vocab-size 260 --output tok") == 0
    command = "preprocess-chat --input in --tokenizer-model tok --chat-template chat.jinja --output-prefix"
    assert run(f"{command} chats") == 0
    assert run(f"{command} s3://bucket/chats --work-dir work") == 0
    local = {name: data for name, data in local_files(".").items() if name.startswith("chats_")}
    assert len(local) > 3
    assert objects(store) == local


@pytest.mark.long
def test_a_large_file_arrives_in_parts(store: Any) -> None:
    from mega_data.remote_output import RemoteOutput

    place = RemoteOutput("--output", RemotePath("s3://bucket/big.jsonl"), Path("work"), [])
    place.local.parent.mkdir(parents=True)
    data = b"0123456789abcdef" * (7 << 20)
    place.local.write_bytes(data)
    assert place.upload() == len(data)
    assert store.cat_file("bucket/big.jsonl") == data
    assert "-" in store.info("bucket/big.jsonl")["ETag"]  # of an upload in parts


def test_an_upload_that_fails_is_continued_and_readers_wait_for_it(
    store: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("in/b.jsonl").write_text(LINES)
    command = "clean --step whitespace --input in --output s3://bucket/kept --work-dir work"
    put_file = store.put_file

    def fail(path: str, key: str, **rest: Any) -> Any:
        if key.endswith("b.jsonl"):
            raise OSError("the network is gone")
        return put_file(path, key, **rest)

    with monkeypatch.context() as broken:
        broken.setattr(store, "put_file", fail)
        assert run(command) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith(
        "error: s3://bucket/kept/b.jsonl: failed 5 times: found OSError: the network is gone"
    )
    assert run("dedup --input s3://bucket/kept --output out") == 2
    assert "error: --input: a folder that is being uploaded" in capfd.readouterr().err
    assert run(command) == 0
    assert run("clean --step whitespace --input in --output kept") == 0
    assert objects(store) == local_files("kept")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--output s3://bucket/used --work-dir work",
            "--output: contains files: found s3://bucket/used with x",
        ),
        ("--output s3://bucket/new", "--output: a URL needs a folder for the files until they are uploaded"),
        ("--output s3://bucket --work-dir work", "--output: names no place in the bucket"),
        (
            "--output s3://bucket/new --work-dir in",
            "--work-dir: is one of the inputs: found in",
        ),
        ("--output http://127.0.0.1:9/new --work-dir work", "--output: is a URL"),
    ],
)
def test_a_place_that_would_lose_files_is_refused(
    store: Any, capfd: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    store.pipe_file("bucket/used/x", b"mine")
    before = objects(store)
    assert run(f"clean --step whitespace --input in {options}") == 2
    assert capfd.readouterr().err.startswith(f"error: {message}")
    assert objects(store) == before
    assert not Path("work").exists()


def test_a_work_folder_belongs_to_one_output(store: Any, capfd: pytest.CaptureFixture[str]) -> None:
    Path("in/a.jsonl").write_text("wrong\n")
    assert run(f"{ENCODE} --output-prefix s3://bucket/x --work-dir work") == 2
    Path("in/a.jsonl").write_text(LINES)
    capfd.readouterr()
    assert run(f"{ENCODE} --output-prefix s3://bucket/x2 --work-dir work") == 2
    what = "--work-dir: holds the unfinished output of another command: found s3://bucket/x, wanted s3://bucket/x2"
    assert what in capfd.readouterr().err
    assert objects(store) == {}
    assert run(f"{ENCODE} --output-prefix s3://bucket/x --work-dir work") == 0
    assert {name.partition("/")[0].partition(".")[0] for name in objects(store)} == {"x_text_document"}


def test_more_places_are_refused(store: Any, capfd: pytest.CaptureFixture[str]) -> None:
    store.pipe_file("bucket/in/a.jsonl", LINES.encode())
    store.pipe_file("bucket/c_text_document.idx", b"")
    for words, message in (
        (
            "clean --step whitespace --input s3://bucket/in --output s3://bucket/in/kept",
            "is in a folder that",
        ),
        (f"{ENCODE} --output-prefix s3://bucket/c", "exists: found s3://bucket/c with c_text_document.idx"),
        ("extract --input in --output s3://bucket/in/a.jsonl", "exists: found s3://bucket/in/a.jsonl with"),
    ):
        assert run(f"{words} --work-dir work") == 2
        assert message in capfd.readouterr().err
    assert run(f"{ENCODE} --output-prefix c --work-dir work") == 2
    assert "--work-dir: has an effect only if --output-prefix is a URL" in capfd.readouterr().err


def test_a_bucket_that_does_not_exist_is_named_and_nothing_is_lost(
    store: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    command = "dedup --preset exact --input in --work-dir work"
    assert run(f"{command} --output s3://no-such-bucket/kept") == 2
    assert "no-such-bucket" in capfd.readouterr().err.splitlines()[-1]
    assert Path("work/output/kept/a.jsonl").exists()
