"""A stopped run resumes and writes the bytes of an uninterrupted run; memory is bounded."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mega_data import preprocess as module
from mega_data.preprocess import Options, preprocess
from mega_data.readers.inputs import InputFile
from mega_data.resumable_output import ResumableOutput
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError, FormatError, MegaError
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer

BLOCK, NOTE = 2000, 5000
OPTIONS = Options(("text", "title"), append_eod=True, skip=True)


def null() -> Tokenizer:
    return open_tokenizer("NullTokenizer", vocab_size=100)


def corpus(folder: Path, seed: int, rows: int = 150) -> list[Path]:
    """Three files, one of them packed, with a wrong line here and there."""
    rng, paths = random.Random(seed), list[Path]()
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl"):
        lines = list[str]()
        for _ in range(rows):
            words = [" ".join(str(rng.randrange(100)) for _ in range(rng.randrange(40))) for _ in range(2)]
            lines.append(
                json.dumps({"text": words[0], "title": words[1]}) if rng.random() < 0.97 else "{oops"
            )
        data = "\n".join(lines).encode() + b"\n"
        if name.endswith("gz"):
            import gzip

            data = gzip.compress(data)
        paths.append(folder / name)
        paths[-1].write_bytes(data)
    return paths


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


class Stop(Exception):
    pass


@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_is_stopped_again_and_again_writes_the_same_bytes(seed, tmp_path):
    rng = random.Random(seed)
    inputs = corpus(tmp_path, seed)
    whole = preprocess(inputs, tmp_path / "whole/p", null(), OPTIONS)
    out = tmp_path / "out/p"
    for stops in range(200):
        calls = iter(range(rng.randrange(1, 20)))

        def progress(*_: int) -> None:
            if next(calls, None) is None:  # noqa: B023
                raise Stop

        try:
            result = preprocess(inputs, out, null(), OPTIONS, block=BLOCK, note=NOTE, progress=progress)
        except Stop:
            assert stops < 199
            assert [path.name for path in out.parent.iterdir()] == ["p.unfinished"]
            # what stands after the noted part is not to be trusted
            with (out.parent / "p.unfinished/0.ids").open("ab") as file:
                file.write(rng.randbytes(rng.randrange(50)))
        else:
            break
    assert files(out.parent) == files(tmp_path / "whole")
    assert (result.documents, result.tokens, result.size) == (whole.documents, whole.tokens, whole.size)
    assert (result.skipped, whole.fresh) == (whole.skipped, whole.size)
    assert result.fresh < whole.size


KILLED = """
import sys, time
from pathlib import Path
from mega_data.preprocess import Options, preprocess
from mega_schema.tokenizer.tokenizer import open_tokenizer

if __name__ == "__main__":
    options = Options(("text", "title"), append_eod=True, skip=True)
    inputs = [Path(word) for word in sys.argv[3:]]
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=100)
    preprocess(inputs, Path(sys.argv[1]), tokenizer, options, workers=int(sys.argv[2]), block=2000, note=5000,
               progress=lambda *_: time.sleep(0.01))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_killed_at_random_moments_writes_the_same_bytes(workers, tmp_path):
    rng = random.Random(workers)
    inputs = corpus(tmp_path, 3)
    preprocess(inputs, tmp_path / "whole/p", null(), OPTIONS)
    (tmp_path / "run.py").write_text(KILLED, "utf-8")
    out = tmp_path / "out/p"
    words = [sys.executable, str(tmp_path / "run.py"), str(out), str(workers), *map(str, inputs)]
    kills = int(os.environ.get("MEGA_KILLS", "3"))
    for _ in range(kills):
        process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        while not out.parent.exists() and process.poll() is None:
            time.sleep(0.02)
        time.sleep(rng.random() * 0.9)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if out.parent.exists() and not (out.parent / "p.unfinished").exists():
            assert files(out.parent) == files(tmp_path / "whole")  # the moment came after its end
            shutil.rmtree(out.parent)
    subprocess.run(words, check=True, stderr=subprocess.DEVNULL)
    assert files(out.parent) == files(tmp_path / "whole")


def test_an_unfinished_run_of_other_inputs_or_options_is_not_resumed(tmp_path):
    (tmp_path / "a").write_text('{"text": "1"}\n' * 2000, "utf-8")

    def stop(*_: int) -> None:
        raise Stop

    for options in (Options(), Options(append_eod=True)):
        with pytest.raises(Stop):
            preprocess([tmp_path / "a"], tmp_path / "p", null(), options, block=100, note=1, progress=stop)
    (tmp_path / "a").write_text('{"text": "2 3"}\n' * 3, "utf-8")
    result = preprocess([tmp_path / "a"], tmp_path / "p", null())
    assert (result.documents, result.tokens, result.fresh) == (3, 6, result.size)


def test_an_unfinished_run_whose_files_are_not_as_noted_begins_again(tmp_path):
    inputs = corpus(tmp_path, 1)
    seen = 0

    def progress(more: int, _: int) -> None:
        nonlocal seen
        seen += more
        if seen > 3 * NOTE:
            raise Stop

    for damage in (lambda f: (f / "0.ids").write_bytes(b""), lambda f: (f / "journal.json").write_text("{")):
        seen = 0
        with pytest.raises(Stop):
            preprocess(inputs, tmp_path / "p", null(), OPTIONS, block=BLOCK, note=NOTE, progress=progress)
        damage(tmp_path / "p.unfinished")
    result = preprocess(inputs, tmp_path / "p", null(), OPTIONS)
    assert result.fresh == result.size


def test_two_runs_do_not_write_one_dataset_at_once(tmp_path):
    (tmp_path / "a").write_text('{"text": "1"}\n', "utf-8")
    parts = ResumableOutput(tmp_path / "p.unfinished", "run", module.smallest_dtype(9), 1)
    with pytest.raises(ConfigError, match="--output-prefix: another run writes there: found .*p.unfinished"):
        preprocess([tmp_path / "a"], tmp_path / "p", null())
    parts.discard()
    assert preprocess([tmp_path / "a"], tmp_path / "p", null()).documents == 1


def test_a_file_system_without_locks_is_written_to(tmp_path, monkeypatch):
    def unable(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    (tmp_path / "a").write_text('{"text": "1"}\n', "utf-8")
    monkeypatch.setattr(fcntl, "flock", unable)
    assert preprocess([tmp_path / "a"], tmp_path / "p", null()).documents == 1


def test_lines_passed_over_are_kept_with_file_number_and_reason(tmp_path):
    (tmp_path / "a").write_text('{"text": "1"}\n\n{oops\n{"text": "x"}\n{"text": "2"}\n', "utf-8")
    (tmp_path / "b").write_text('{"txt": "1"}\n{"text": "3"}\n', "utf-8")
    inputs = [tmp_path / "a", tmp_path / "b"]
    result = preprocess(inputs, tmp_path / "p", null(), Options(skip=True), block=10, workers=2)
    data = IndexedDataset(result.prefixes[0])
    assert [data[i].tolist() for i in range(len(data))] == [[1], [2], [3]]
    assert (result.skipped, result.quarantine) == (3, tmp_path / "p_quarantine.jsonl")
    rows = [json.loads(line) for line in result.quarantine.read_text("utf-8").splitlines()]
    assert [(Path(row["file"]).name, row["line"]) for row in rows] == [("a", 3), ("a", 4), ("b", 1)]
    assert rows[0]["row"] == "{oops"
    assert rows[0]["reason"].startswith("not JSON: found ")
    assert rows[2]["reason"] == "no key 'text': found txt, wanted 'text' (see --json-key)"


def test_stdin_is_a_corpus_and_is_never_resumed(tmp_path, monkeypatch):
    import io

    from mega_data.readers import streams

    class Fake:
        buffer = io.BytesIO(b'{"text": "1"}\n' * 50)

    monkeypatch.setattr(streams.sys, "stdin", Fake)
    result = preprocess([InputFile(Path("-"), "jsonl")], tmp_path / "p", null(), block=100)
    assert (result.documents, result.tokens) == (50, 50)


def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_room(tmp_path):
    (tmp_path / "a").write_text(('{"text": "' + "1 " * 1000 + '"}\n') * 400, "utf-8")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
    try:
        with pytest.raises(
            MegaError, match="p.unfinished: not written: found File too large; hint: free disk space"
        ):
            preprocess([tmp_path / "a"], tmp_path / "p", null(), block=10_000, note=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("p_*"))
    result = preprocess([tmp_path / "a"], tmp_path / "p", null(), block=10_000, note=100_000)
    assert (result.documents, result.tokens) == (400, 400_000)
    assert result.fresh < result.size


def test_a_wrong_line_leaves_no_dataset_even_in_a_resumed_run(tmp_path):
    path = tmp_path / "a"
    path.write_text('{"text": "1"}\n' * 500 + "oops\n", "utf-8")
    for _ in range(2):
        with pytest.raises(FormatError, match="a:501: not JSON"):
            preprocess([path], tmp_path / "p", null(), block=100, note=200)
        assert sorted(tmp_path.iterdir()) == [path, tmp_path / "p.unfinished"]


BOUNDED = """
import resource, sys
from pathlib import Path
from mega_data.preprocess import Options, preprocess
from mega_schema.tokenizer.tokenizer import open_tokenizer

tokenizer = open_tokenizer("BertWordPieceCase", vocab_file=Path(sys.argv[3]))
tokenizer.encode("one")
import numpy, orjson, mega_data.process_pool
held = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (held + (48 << 20), held + (48 << 20)))
done = preprocess([Path(sys.argv[1])], Path(sys.argv[2]), tokenizer)
print(done.size, done.documents)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs /proc to know what is held at first"
)
def test_a_corpus_larger_than_memory_is_encoded(tmp_path):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\none\ntwo\nthree\n", "utf-8")
    rng = random.Random(5)
    part = "".join(
        json.dumps({"text": " ".join(rng.choices(("one", "two", "three"), k=300))}) + "\n"
        for _ in range(1000)
    ).encode()
    corpus_file = tmp_path / "a.jsonl"
    with corpus_file.open("wb") as file:
        for _ in range(64 * 1_000_000 // len(part) + 1):
            file.write(part)
    size = corpus_file.stat().st_size
    assert size > 48 << 20
    code = [sys.executable, "-c", BOUNDED, str(corpus_file), str(tmp_path / "p"), str(vocab)]
    process = subprocess.run(
        code, capture_output=True, text=True, check=False, env={**os.environ, "RAYON_NUM_THREADS": "1"}
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == [str(size), str(1000 * (size // len(part)))]
    assert len(IndexedDataset(tmp_path / "p_text_document")) == 1000 * (size // len(part))
