import json
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mega_eval.cli import cli
from mega_eval.models.answer_cache import AnswerCache, hash_model, hash_request, hash_window
from mega_eval.models.interface import GenerationRequest, ModelIdentity, WindowScores
from mega_eval.models.session import EvaluationSession
from mega_eval.windows import Window, as_tokens
from mega_schema.app import cli_runner
from mega_schema.errors import ConfigError
from tests import evaluation_programs, fork_server

IDENTITY = ModelIdentity(
    source="RUN", sha256="a" * 64, tokenizer_sha256="b" * 64, iteration=7, dtype="float32", device="cpu"
)
WINDOWS = [Window(as_tokens(range(start, start + 9)), 1 + start % 3) for start in range(7)]
REQUESTS = [GenerationRequest((1, 2, start), 4, ("\n",)) for start in range(3)]


class CountingModel:
    """A model that answers two windows, or one prompt, at a time and records what it was asked."""

    context_length = 16
    vocab_size = 50
    identity = IDENTITY
    tokenizer = None

    def __init__(self, batches: int = 1000) -> None:
        self.batches = batches
        self.computed: list[int] = []

    def score_batches(self, windows: Sequence[Window], answered=()):
        for start in range(0, len(windows), 2):
            indices = range(start, min(start + 2, len(windows)))
            if all(index in answered for index in indices):
                continue
            if len(self.computed) == 2 * self.batches:
                raise KeyboardInterrupt
            self.computed += indices
            yield [(index, scores_of(windows[index])) for index in indices]

    def generate_batches(self, requests: Sequence[GenerationRequest], answered=()):
        for index, request in enumerate(requests):
            if index not in answered:
                self.computed.append(index)
                yield [(index, f"é{request.prompt[-1]}")]

    def close(self) -> None:
        pass


def scores_of(window: Window) -> WindowScores:
    n = window.target_length
    return WindowScores(-np.sqrt(window.targets + 0.1), window.targets % 2 == 0, np.arange(n) + 1)


def open_cache(folder: Path, identity: ModelIdentity = IDENTITY, **options) -> AnswerCache:
    return AnswerCache(folder, hash_model(identity, {"mega-eval": "1"}, (50, 16)), **options)


def equal(left: Sequence[WindowScores], right: Sequence[WindowScores]) -> bool:
    return all(
        np.array_equal(a.logprobs, b.logprobs)
        and np.array_equal(a.is_greedy, b.is_greedy)
        and np.array_equal(a.greedy_ids, b.greedy_ids)
        for a, b in zip(left, right, strict=True)
    )


def test_answers_come_back_bit_for_bit(tmp_path):
    cache = open_cache(tmp_path / "c")
    silent = WindowScores(np.array([-0.1, -1e-300]), np.array([True, False]))
    cache.add_scores({hash_window(WINDOWS[0]): silent, hash_window(WINDOWS[1]): scores_of(WINDOWS[1])}, 3.0)
    cache.add_texts({hash_request(REQUESTS[0]): "né😀"}, 1.0)
    cache.close()
    reader = open_cache(tmp_path / "c")
    assert len(reader) == 3
    for window, scores in ((WINDOWS[0], silent), (WINDOWS[1], scores_of(WINDOWS[1]))):
        scores_read, seconds = reader.find_scores(hash_window(window))
        assert equal([scores_read], [scores])
        assert seconds == 1.5
    assert reader.find_text(hash_request(REQUESTS[0])) == ("né😀", 1.0)
    assert reader.find_scores(hash_window(WINDOWS[2])) is None


def test_an_interrupted_session_resumes_and_asks_only_for_the_rest(tmp_path):
    expected = EvaluationSession(CountingModel()).score(WINDOWS)
    first = CountingModel(batches=2)
    with pytest.raises(KeyboardInterrupt):
        EvaluationSession(first, cache=open_cache(tmp_path)).score(WINDOWS)
    assert first.computed == [0, 1, 2, 3]
    second = CountingModel()
    session = EvaluationSession(second, cache=open_cache(tmp_path))
    assert equal(session.score(WINDOWS), expected)
    assert second.computed == [4, 5, 6]
    assert session.cached_requests == 4
    assert session.cached_seconds > 0


def test_a_batch_of_which_an_answer_is_missing_is_computed_whole(tmp_path):
    cache = open_cache(tmp_path)
    cache.add_scores({hash_window(WINDOWS[0]): scores_of(WINDOWS[0])}, 1.0)
    model = CountingModel()
    EvaluationSession(model, cache=cache).score(WINDOWS)
    assert model.computed == list(range(7))


def test_progress_counts_answers_of_the_cache_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        EvaluationSession(CountingModel(batches=2), cache=open_cache(tmp_path)).score(WINDOWS)
    amounts: list[int] = []

    class Progress:
        def __init__(self, total: int) -> None:
            amounts.append(total)

        def __enter__(self):
            return amounts.append

        def __exit__(self, *error: object) -> None:
            pass

    EvaluationSession(CountingModel(), cache=open_cache(tmp_path), progress=Progress).score(WINDOWS)
    assert amounts == [7, 4, 2, 1]


def test_continuations_are_kept_by_prompt_length_and_stop(tmp_path):
    model = CountingModel()
    texts = EvaluationSession(model, cache=open_cache(tmp_path)).generate(REQUESTS)
    assert (
        EvaluationSession(model, cache=open_cache(tmp_path)).generate(REQUESTS) == texts == ["é0", "é1", "é2"]
    )
    assert model.computed == [0, 1, 2]
    changed = [
        replace(REQUESTS[0], max_tokens=5),
        replace(REQUESTS[0], stop=()),
        replace(REQUESTS[0], prompt=(9,)),
    ]
    EvaluationSession(model, cache=open_cache(tmp_path)).generate(changed)
    assert model.computed == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"sha256": "c" * 64},
        {"tokenizer_sha256": "c" * 64},
        {"dtype": "bfloat16"},
        {"device": "cuda:0"},
        {"layout": {"tp": 2, "pp": 1, "dp": 1}},
    ],
)
def test_answers_of_another_model_never_hit(tmp_path, changes):
    EvaluationSession(CountingModel(), cache=open_cache(tmp_path)).score(WINDOWS)
    assert len(open_cache(tmp_path, replace(IDENTITY, source="COPY", iteration=8))) == 7
    assert len(open_cache(tmp_path, replace(IDENTITY, **changes))) == 0


def test_other_targets_of_the_same_tokens_never_hit(tmp_path):
    EvaluationSession(CountingModel(), cache=open_cache(tmp_path)).score(WINDOWS)
    assert open_cache(tmp_path).find_scores(hash_window(replace(WINDOWS[0], target_length=2))) is None


def test_a_damaged_file_loses_only_answers_after_the_damage(tmp_path):
    EvaluationSession(CountingModel(), cache=open_cache(tmp_path)).score(WINDOWS)
    (path,) = tmp_path.glob("*/*.answers")
    content = path.read_bytes()
    known = []
    for size in range(len(content) + 1):  # a write may stop after any byte
        path.write_bytes(content[:size])
        known.append(len(open_cache(tmp_path)))
    assert known == sorted(known)
    assert (known[0], known[-2], known[-1]) == (0, 6, 7)
    for position in range(0, len(content), 7):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        model = CountingModel()
        session = EvaluationSession(model, cache=open_cache(tmp_path))
        assert equal(session.score(WINDOWS), [scores_of(window) for window in WINDOWS])
        assert model.computed
        for extra in set(tmp_path.glob("*/*.answers")) - {path}:
            extra.unlink()


def test_two_processes_share_a_folder(tmp_path):
    threads = [
        threading.Thread(
            target=lambda: EvaluationSession(CountingModel(), cache=open_cache(tmp_path)).score(WINDOWS)
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(open_cache(tmp_path)) == 7


def test_the_folder_is_private_and_a_temporary_one_is_removed(tmp_path):
    cache = open_cache(tmp_path / "hidden/run", is_temporary=True)
    assert not (tmp_path / "hidden").exists()
    EvaluationSession(CountingModel(), cache=cache).score(WINDOWS)
    assert (tmp_path / "hidden/run").stat().st_mode & 0o777 == 0o700
    (path,) = (tmp_path / "hidden/run").glob("*/*")
    assert path.stat().st_mode & 0o777 == 0o600
    cache.finish()
    assert not (tmp_path / "hidden").exists()


def test_a_folder_to_which_others_may_write_is_refused(tmp_path):
    (tmp_path / "c").mkdir(mode=0o777)
    (tmp_path / "c").chmod(0o777)
    with pytest.raises(ConfigError, match="--cache: is not private: .* hint: chmod 700"):
        open_cache(tmp_path / "c")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--cache: is not a folder"):
        open_cache(tmp_path / "file/c")


@pytest.fixture
def words(run, tmp_path):
    """The words of a command that needs ten batches."""
    data = tmp_path / "held-out.jsonl"
    texts = [" ".join(str(n * 7 % 40) for n in range(s, 2 * s + 4)) for s in range(1, 20)]
    data.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    output = tmp_path / "out/result.json"
    output.parent.mkdir()
    options = ["--device=cpu", "--micro-batch-size=2", f"--output={output}", "--strict-lambada"]
    return ["lambada", f"--load={run}", f"--data={data}", *options]


def read_result(output: Path) -> tuple[dict[str, object], bytes]:
    """Return a result without its times, and its examples."""
    record = json.loads(output.read_bytes())
    for name in ("seconds", "tokens_per_second", "date", "command"):
        del record[name]
    return record, output.with_name("result.samples.jsonl").read_bytes()


def call(words: Sequence[str], capsys) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_info:
        cli_runner.run_command(cli, words)
    return exit_info.value.code or 0, *capsys.readouterr()


def test_a_killed_run_resumes_to_the_same_result(words, tmp_path, capsys):
    folder = tmp_path / "out"
    assert call(words, capsys)[0] == 0
    expected = read_result(folder / "result.json")
    assert sorted(path.name for path in folder.iterdir()) == ["result.json", "result.samples.jsonl"]
    for path in folder.iterdir():
        path.unlink()
    killed = fork_server.run(
        "tests.evaluation_programs:run_until_killed", ["4", *words], imports=evaluation_programs.IMPORTS
    )
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in folder.iterdir()] == [".mega-eval-cache"]
    code, out, _ = call(words, capsys)
    assert code == 0
    assert "8 answers are of earlier runs" in out
    assert read_result(folder / "result.json") == expected
    assert not (folder / ".mega-eval-cache").exists()


def test_an_interruption_says_how_to_resume(words, tmp_path, capsys, monkeypatch):
    append = AnswerCache._append

    def interrupt(*arguments):
        append(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(AnswerCache, "_append", interrupt)
    folder = tmp_path / "out/.mega-eval-cache/lambada-strict"
    message = f"interrupted: the answers so far are in {folder}; repeat the command to resume\n"
    code, out, err = call(words, capsys)
    assert (code, out, err.lstrip("\n")) == (130, "", message)
    monkeypatch.undo()
    assert "2 answers are of earlier runs" in call(words, capsys)[1]


def test_a_named_cache_serves_the_next_run_and_no_cache_keeps_nothing(words, tmp_path, capsys):
    named = [*words, f"--cache={tmp_path / 'kept'}", "--overwrite"]
    assert "earlier runs" not in call(named, capsys)[1]
    assert "19 answers are of earlier runs" in call(named, capsys)[1]
    assert "earlier runs" not in call([*words, "--no-cache", "--overwrite"], capsys)[1]
    code, _, err = call([*named, "--no-cache"], capsys)
    assert (code, err) == (2, "error: --no-cache: contradicts --cache; hint: leave one of them out\n")


def test_another_checkpoint_never_hits(words, checkpoint_writer, tmp_path, capsys):
    named = [*words, f"--cache={tmp_path / 'kept'}", "--overwrite"]
    call(named, capsys)
    checkpoint_writer(tmp_path / "other", seed=2)
    other_words = [
        word if not word.startswith("--load") else f"--load={tmp_path / 'other'}" for word in named
    ]
    assert "earlier runs" not in call(other_words, capsys)[1]
