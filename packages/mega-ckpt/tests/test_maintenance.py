"""`prune` and `export-tokenizer`."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mega_ckpt.formats.huggingface.tokenizer import export_tokenizer
from mega_schema.checkpoint.checkpoint_dir import FORMAT, LATEST, iterations
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.checkpoint.side_files import rewrite_checksums
from mega_schema.checkpoint.tracker import latest_checkpoint, latest_iteration
from mega_schema.errors import ConfigError, CorruptFileError, FormatError
from mega_schema.spec import ModelSpec
from mega_schema.tokenizer.tokenizer import open_tokenizer


@pytest.fixture
def run(run_folder: Any, small_gpt: ModelSpec) -> Path:
    for iteration in (10, 20, 30, 40, 50):
        folder: Path = run_folder(small_gpt, iteration=iteration)
    return folder


@pytest.mark.parametrize(
    ("flags", "remaining"),
    [
        (("--keep-last", 2), [40, 50]),
        (("--keep-last", 1), [50]),
        (("--keep-last", 9), [10, 20, 30, 40, 50]),
        (("--keep-every", 20), [20, 40, 50]),
        (("--keep-last", 2, "--keep-every", 30), [30, 40, 50]),
    ],
)
def test_the_newest_and_the_divided_stay(
    mega: Any, run: Path, flags: tuple[Any, ...], remaining: list[int]
) -> None:
    size = sum(f.stat().st_size for f in (run / "iter_0000010").rglob("*") if f.is_file())
    plan = json.loads(mega("prune", run, *flags, "--json", "--dry-run").output)
    assert iterations(run) == [10, 20, 30, 40, 50]
    result = json.loads(mega("prune", run, *flags, "--json").output)
    assert iterations(run) == remaining == result["kept"]
    assert {**result, "dry_run": True} == plan
    assert result["removed"] == [i for i in (10, 20, 30, 40, 50) if i not in remaining]
    assert result["bytes"] == size * len(result["removed"])
    assert latest_iteration(run) == 50


def test_the_one_the_tracker_names_is_the_newest(mega: Any, run: Path) -> None:
    (run / LATEST).write_text("30\n", "utf-8")
    assert mega("prune", run, "--keep-last", 1).output == (
        f"{run}: removed 2 (10, 20): {_size(run / 'iter_0000030') * 2:,} bytes\n{run}: kept 3 (30, 40, 50)\n"
    )


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_nothing_goes_while_the_newest_is_not_whole(mega: Any, run: Path) -> None:
    file = run / "iter_0000050" / "model-00000.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    result = mega("prune", run, "--keep-last", 1)
    assert isinstance(result.exception, FormatError)
    assert "iter_0000050/model-00000.safetensors: size in bytes" in str(result.exception)
    assert iterations(run) == [10, 20, 30, 40, 50]


def test_what_to_keep_has_to_be_said(mega: Any, run: Path) -> None:
    result = mega("prune", run)
    assert str(result.exception).endswith("hint: --keep-last 3")
    assert isinstance(result.exception, ConfigError)


@pytest.fixture
def with_letters(run_folder: Any, small_gpt: ModelSpec, tmp_path: Path) -> Checkpoint:
    """A checkpoint whose tokenizer has text."""
    vocab = {letter: number for number, letter in enumerate("abcdefgh")} | {"<|endoftext|>": 8, "ab": 9}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n", "utf-8")
    tokenizer = open_tokenizer(
        "GPT2BPETokenizer", vocab_file=tmp_path / "vocab.json", merge_file=tmp_path / "merges.txt"
    )
    checkpoint = Checkpoint.open(run_folder(small_gpt))
    tokenizer.save(checkpoint.folder / "tokenizer")
    rewrite_checksums(checkpoint.folder, FORMAT)
    return checkpoint


def test_the_tokenizers_library_loads_what_was_exported(
    mega: Any, with_letters: Checkpoint, tmp_path: Path
) -> None:
    import tokenizers

    result = mega("export-tokenizer", with_letters.folder, "--save", tmp_path / "out")
    assert (
        result.output
        == f"{tmp_path / 'out'}: special_tokens_map.json, tokenizer.json, tokenizer_config.json\n"
    )
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert theirs.encode("abcab", add_special_tokens=False).ids == [9, 2, 9]
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text("utf-8"))
    assert (config["eos_token"], config["model_max_length"]) == ("<|endoftext|>", 6)


def test_what_is_there_is_replaced_only_when_asked_and_only_a_tokenizer(
    with_letters: Checkpoint, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export_tokenizer(with_letters, out)
    with pytest.raises(ConfigError, match="--save: exists already: .*--force"):
        export_tokenizer(with_letters, out)
    export_tokenizer(with_letters, out, force=True)
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis").write_text("years", "utf-8")
    with pytest.raises(ConfigError, match="contains something other than a tokenizer"):
        export_tokenizer(with_letters, tmp_path / "papers", force=True)
    assert (tmp_path / "papers" / "thesis").read_text("utf-8") == "years"


def test_what_hugging_face_has_not_is_refused(run_folder: Any, small_gpt: ModelSpec, tmp_path: Path) -> None:
    numbers = Checkpoint.open(run_folder(small_gpt))
    with pytest.raises(FormatError, match="is not supported by Hugging Face: found NullTokenizer"):
        export_tokenizer(numbers, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for file in (numbers.folder / "tokenizer").iterdir():
        file.unlink()
    (numbers.folder / "tokenizer").rmdir()
    with pytest.raises(FormatError, match="tokenizer: the checkpoint has no tokenizer"):
        export_tokenizer(numbers, tmp_path / "out")


def test_the_hint_of_a_checkpoint_without_tokenizer_gives_it_one(
    mega: Any, hf_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    mega("convert", "--from", "hf", "--to", "mega", "--load", hf_folder(small_gpt), "--save", run)
    with pytest.raises(FormatError) as caught:
        export_tokenizer(Checkpoint.open(run), tmp_path / "out")
    open_tokenizer("NullTokenizer", vocab_size=10).save(tmp_path / "corpus.tokenizer")
    copy, _, accept = caught.value.hint.partition(" && mega-ckpt ")
    words = copy.replace("PREFIX", str(tmp_path / "corpus")).split()
    assert words[:2] == ["cp", "-r"]
    shutil.copytree(*words[2:])
    assert "accepted: tokenizer/identity.json" in mega(*accept.split()).output
    assert Checkpoint.open(run).tokenizer_folder.is_dir()


EDITS = {
    "trainer.json": b'{"iteration": 3, "consumed_samples": 80}',
    "run.toml": b"# another run\n",
    "manifest.json": b" ",
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_found_and_accepted_when_it_was_meant(
    mega: Any, run_folder: Any, small_gpt: ModelSpec, name: str
) -> None:
    run = run_folder(small_gpt)
    folder = latest_checkpoint(run)
    edited = (folder / name).read_bytes() + b" " if name == "manifest.json" else EDITS[name]
    (folder / name).write_bytes(edited)
    for command in ("verify", "inspect"):
        refused = str(mega(command, run).exception)
        assert f"{folder / name}: differs from what was written" in refused
        assert f"mega-ckpt verify {folder} --accept" in refused
    assert f"{folder}: accepted: {name}\n{folder}: sound" in mega("verify", run, "--accept").output
    assert "sound" in mega("verify", run).output
    assert f"{folder}: accepted: nothing had changed" in mega("verify", run, "--accept").output


@pytest.mark.parametrize("name", ["manifest.json", "tokenizer/identity.json", "run.toml"])
@pytest.mark.parametrize("content", [b"", b"[1, "])
def test_a_file_that_cannot_be_read_is_not_hinted_to_be_accepted(
    run_folder: Any, small_gpt: ModelSpec, name: str, content: bytes
) -> None:
    folder = latest_checkpoint(run_folder(small_gpt))
    (folder / name).write_bytes(content)
    with pytest.raises(CorruptFileError) as caught:
        Checkpoint.open(folder)
    if content and name == "run.toml":
        assert caught.value.hint.startswith("if the edit was meant: ")
    else:
        what = "is not JSON" if content else "is empty"
        wanted = f"{name} {what}: restore it, or load another iteration: --load RUN/iter_NNNNNNN"
        assert caught.value.hint == wanted


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("trainer.json", b'{"iteration": 4}', "trainer.json: iteration: found 4, wanted 3"),
        ("trainer.json", b"[", "trainer.json: is not JSON"),
        ("run.toml", b"\xff", "run.toml: is not UTF-8"),
        ("run.toml", b"a = = 1", "run.toml: is not TOML"),
        ("tokenizer/identity.json", b"{}", "identity.json"),
        ("manifest.json", b'{"format": 2}', "is not a manifest"),
    ],
)
def test_what_is_not_sound_is_not_accepted(
    mega: Any, run_folder: Any, small_gpt: ModelSpec, name: str, content: bytes, message: str
) -> None:
    folder = latest_checkpoint(run_folder(small_gpt))
    (folder / name).write_bytes(content)
    before = {path.name: path.read_bytes() for path in folder.glob("manifest.*")}
    assert message in str(mega("verify", folder, "--accept").exception)
    assert {path.name: path.read_bytes() for path in folder.glob("manifest.*")} == before


def test_a_checkpoint_of_format_1_is_read_and_gets_its_checksums_when_asked(
    mega: Any, run_folder: Any, small_gpt: ModelSpec
) -> None:
    folder = latest_checkpoint(run_folder(small_gpt))
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    del manifest["side_files"]
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 1}), "utf-8")
    (folder / "manifest.sha256").unlink()
    assert "sound" in mega("verify", folder).output
    (folder / "run.toml").write_bytes(b"a = '\xff'")
    assert "run.toml: is not UTF-8" in str(mega("verify", folder).exception)
    assert "run.toml: is not UTF-8" in str(
        mega("reshard", "--load", folder, "--save", folder.parent / "n").exception
    )
    (folder / "run.toml").write_text("a = 1", "utf-8")
    mega("verify", folder, "--accept")
    assert Checkpoint(folder).format == 2


def test_sha256sum_reads_the_digest(run_folder: Any, small_gpt: ModelSpec) -> None:
    folder = latest_checkpoint(run_folder(small_gpt))
    content = (folder / "manifest.json").read_bytes()
    line = (folder / "manifest.sha256").read_text("utf-8")
    assert line == f"{hashlib.sha256(content).hexdigest()}  manifest.json\n"
