"""A resumed run must read the same data, and reports other changed settings."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from mega_schema.checkpoint.checkpoint_dir import FORMAT
from mega_schema.checkpoint.side_files import rewrite_checksums
from mega_schema.dataset.indexed_dataset import IndexedDataset, sibling
from mega_train.cli import main

MODEL = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8"]
TRAINING = ["--global-batch-size", "4", "--lr", "0.01", "--lr-decay-iters", "8", "--eval-iters", "0"]


def _gpt(corpus: object, *argv: object, code: int = 0) -> str:
    """What a run says on stdout, or if it is refused, on stderr."""
    return _start(corpus, *MODEL, *TRAINING, *argv, code=code)


def _start(corpus: object, *argv: object, code: int = 0) -> str:
    """The same for a run of which nothing but its data is given."""
    return _start_with(["--data-path", *(corpus if isinstance(corpus, list) else [corpus])], *argv, code=code)


def _start_with(data: list[object], *argv: object, code: int = 0) -> str:
    out, err = io.StringIO(), io.StringIO()
    words = ["gpt", *map(str, data), *map(str, argv)]
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == code, err.getvalue()
    return err.getvalue() if code else out.getvalue()


@pytest.fixture(scope="module")
def trained_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    _gpt(corpus, "--train-iters", 2, "--save", run)
    return run


@pytest.fixture
def moved_corpus(corpus: Path, tmp_path: Path) -> Path:
    """The corpus in another place."""
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(sibling(corpus, suffix), sibling(tmp_path / corpus.name, suffix))
    shutil.copytree(f"{corpus}.tokenizer", tmp_path / f"{corpus.name}.tokenizer")
    return tmp_path / corpus.name


OTHER_DATA = {
    "seed": (["--seed", "99"], "--seed: ", "--seed 99", "--seed 1234"),
    "split": (["--split", "50,50,0"], "--split: ", "--split 50,50,0", "--split 969, 30, 1"),
    "both": (["--seed", "99", "--split", "50,50,0"], "--seed: ", "--seed 99 --split 50,50,0", "--seed 1234"),
    "order": (["--dataloader-type", "cyclic"], "--dataloader-type: ", "--dataloader-type cyclic", "single"),
    "blend": ([], "--data-path: ", "--data-path 0.5", "toy_text_document"),
}


@pytest.mark.parametrize("what", OTHER_DATA)
def test_other_data_is_refused_and_read_where_it_is_asked_for(
    corpus: Path, moved_corpus: Path, trained_run: Path, what: str
) -> None:
    words, begins, found, wanted = OTHER_DATA[what]
    data = ["0.5", corpus, "0.5", moved_corpus] if what == "blend" else [corpus]
    run = ["--train-iters", 3, "--load", trained_run, *words]
    line = _gpt(data, *run, code=2)
    assert line.startswith(
        f"error: {begins}the run would read different data from the run it resumes: found {found}"
    )
    assert wanted in line.partition("wanted ")[2]
    assert "hint: --override-data" in line
    assert line.count("\n") == 1
    assert "from iteration 2" in _gpt(data, *run, "--override-data")


def _altered_copy(corpus: Path, folder: Path, what: str) -> Path:
    """A copy of the corpus with a change that leaves its size."""
    prefix = folder / corpus.name
    for suffix in (".bin", ".idx"):
        shutil.copy(sibling(corpus, suffix), sibling(prefix, suffix))
    file = sibling(prefix, ".bin" if what == "tokens" else ".idx")
    data = bytearray(file.read_bytes())
    if what == "tokens":
        data[0] ^= 1
    else:  # the first two sequences are one token longer and shorter
        lengths = np.frombuffer(data, np.int32, count=2, offset=34)
        lengths += np.array([-1, 1], np.int32)
        begin = 34 + 4 * len(IndexedDataset(corpus))
        np.frombuffer(data, np.int64, count=2, offset=begin)[1] -= IndexedDataset(corpus).dtype.itemsize
    file.write_bytes(data)
    return prefix


def test_a_corpus_that_moved_is_taken_in_one_line(
    corpus: Path, moved_corpus: Path, trained_run: Path
) -> None:
    out = _gpt(moved_corpus, "--train-iters", 2, "--load", trained_run)
    (line,) = [line for line in out.splitlines() if "data.data_path" in line]
    assert line == f"  data.data_path: {corpus} -> {moved_corpus}, which contains the same data"
    refused = _gpt(moved_corpus, "--train-iters", 2, "--load", trained_run, "--seed", 99, code=2)
    assert "found --seed 99, wanted --seed 1234" in refused, "the move is no reason"


def test_a_blend_whose_datasets_moved_is_the_same_in_the_same_order(
    corpus: Path, moved_corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    changed_copy = _altered_copy(corpus, tmp_path / "other", "tokens")
    blend, run = ["0.3", corpus, "0.7", changed_copy], tmp_path / "run"
    _gpt(blend, "--train-iters", 2, "--save", run)
    resumes = ["--train-iters", 2, "--load", run]
    assert "which contains the same data" in _gpt(["0.3", moved_corpus, "0.7", changed_copy], *resumes)
    for changed in (
        ["0.3", changed_copy, "0.7", moved_corpus],
        ["0.4", moved_corpus, "0.6", changed_copy],
        ["0.3", moved_corpus, "0.7", moved_corpus],
    ):
        line = _gpt(changed, *resumes, code=2)
        assert "--data-path: the run would read different data" in line
        assert line.endswith("hint: --override-data reads these from here on\n")


def test_groups_that_moved_are_the_same(corpus: Path, moved_corpus: Path, tmp_path: Path) -> None:
    def group(prefix: Path, *words: object) -> str:
        flags = ["--train-weighted-split-paths", f"T: 0.5 0:0.5 {prefix}, 0.5 0.5:1 {prefix}"]
        return _start_with(flags, *MODEL, *TRAINING, "--train-iters", 2, *words)

    group(corpus, "--save", tmp_path / "run")
    assert "which contains the same data" in group(moved_corpus, "--load", tmp_path / "run")


@pytest.mark.parametrize("what", ["tokens", "lengths"])
def test_a_corpus_of_the_same_size_and_other_content_is_refused(
    corpus: Path, trained_run: Path, tmp_path: Path, what: str
) -> None:
    changed_copy = _altered_copy(corpus, tmp_path, what)
    words = ["--vocab-size", 33, "--train-iters", 2, "--load", trained_run]
    assert "--data-path: the run would read different data" in _gpt(changed_copy, *words, code=2)


def test_a_checkpoint_without_identities_is_resumed_as_before(
    corpus: Path, moved_corpus: Path, trained_run: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    file = run / "iter_0000002/trainer.json"
    trainer = json.loads(file.read_text("utf-8"))
    del trainer["datasets"]
    file.write_text(json.dumps(trainer), "utf-8")
    rewrite_checksums(file.parent, FORMAT)
    assert "from iteration 2" in _gpt(corpus, "--train-iters", 2, "--load", run)
    line = _gpt(moved_corpus, "--train-iters", 2, "--load", run, code=2)
    assert "--override-data reads these from here on; also use it if the same data was moved" in line


def test_the_same_data_in_other_words_is_the_same(
    corpus: Path, trained_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(corpus.parent)
    out = _gpt(corpus.name, "--train-iters", 2, "--load", trained_run, "--split", "969,30,1")
    assert "changed" not in out


def test_every_other_change_is_listed_in_one_block(corpus: Path, trained_run: Path) -> None:
    words = ("--hidden-dropout", "0.1", "--adam-beta2", "0.95", "--log-interval", 1)
    out = _gpt(corpus, "--train-iters", 3, "--load", trained_run, *words)
    block = out[out.index("settings that changed since iteration 2 was saved:") :].splitlines()
    assert "  train.hidden_dropout: 0.0 -> 0.1" in block[1:6]
    assert "  optimizer.adam_beta2: 0.999 -> 0.95" in block[1:6]
    assert "  log.log_interval: 100 -> 1" in block[1:6]
    assert "  train.train_iters: 2 -> 3" in block[1:6]
    assert "settings that changed" not in _gpt(
        corpus, "--train-iters", 2, "--load", trained_run, "--save", trained_run
    )


@pytest.mark.parametrize("words", [["--finetune"], ["--skip-train", "--eval-iters", "1"]])
def test_weights_alone_go_with_any_data(corpus: Path, trained_run: Path, words: list[str]) -> None:
    _gpt(corpus, "--train-iters", 2, "--load", trained_run, "--seed", "99", "--split", "50,50,0", *words)


def test_a_record_of_another_version_is_a_line_and_no_obstacle(
    corpus: Path, trained_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    file = run / "iter_0000002/run.toml"
    file.write_text(file.read_text("utf-8") + "\n[future]\nsetting = 1\n", "utf-8")
    rewrite_checksums(file.parent, FORMAT)
    assert "from iteration 2" in _gpt(corpus, "--train-iters", 2, "--load", run, "--seed", "99")
    (line,) = caplog.messages
    assert line == f"{file}: [future]: unknown section; it is not compared with this run"


def test_what_was_allowed_once_is_not_recorded(corpus: Path, trained_run: Path, tmp_path: Path) -> None:
    words = ("--load", trained_run, "--save", tmp_path / "new", "--seed", 99, "--override-data")
    _gpt(corpus, "--train-iters", 3, *words)
    recorded = (tmp_path / "new/iter_0000003/run.toml").read_text("utf-8")
    assert "override_data = false" in recorded
    assert "seed = 99" in recorded


def test_a_start_that_names_no_model_has_the_model_of_the_checkpoint_and_changes_nothing(
    corpus: Path, trained_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(trained_run, tmp_path / "run")
    result = _start(corpus, *TRAINING, "--train-iters", 3, "--load", run, "--save", run)
    assert "num-layers" not in result
    assert "train.train_iters: 2 -> 3" in result
