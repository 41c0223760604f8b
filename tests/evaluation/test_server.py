"""A checkpoint behind mega-serve gets the numbers that mega-eval computes from the checkpoint itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega_schema.spec import gpt
from tests import evaluation_programs, fork_server
from tests.serving.random_checkpoint import open_byte_tokenizer, save_random_checkpoint
from tests.serving.server_program import run_server

TEXTS = [f"the {word} of a {word} is the {word}" for word in ("cat", "dog house", "tree", "naïve", "x" * 9)]


def evaluate(output: Path, *words: str) -> dict[str, object]:
    """Run mega-eval and return its result."""
    process = fork_server.run(
        "tests.evaluation_programs:run", [*words, f"--output={output}"], imports=evaluation_programs.IMPORTS
    )
    assert process.returncode == 0, process.stderr
    record: dict[str, object] = json.loads(output.read_bytes())
    return record


def read_samples(output: Path) -> list[dict[str, object]]:
    lines = output.with_name(output.name.replace(".json", ".samples.jsonl")).read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_lambada_and_wikitext_over_http_equal_those_of_the_checkpoint(tmp_path: Path) -> None:
    tokenizer = open_byte_tokenizer(tmp_path)
    tokenizer.save(tmp_path / "tokenizer")
    spec = gpt(layers=2, hidden=32, heads=2, vocab=tokenizer.identity.vocab_size, max_seq_len=64)
    save_random_checkpoint(tmp_path / "run", spec, tmp_path / "tokenizer")
    lines, corpus = tmp_path / "held-out.jsonl", tmp_path / "corpus.txt"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), "utf-8")
    corpus.write_text("".join(f"{text}\n" for text in TEXTS), "utf-8")
    load = [f"--load={tmp_path / 'run'}", "--device=cpu"]
    with run_server(tmp_path / "run") as server:
        url = [f"--url={server.url}"]
        windows = ["--detokenizer=none", "--seq-length=40", "--overlapping-eval=16"]
        for task, *options in (
            ["lambada", f"--data={lines}", "--strict-lambada"],
            ["wikitext103", f"--data={corpus}", *windows],
        ):
            words = [task, *options, "--overwrite"]
            local = evaluate(tmp_path / "local.json", *words, *load)
            remote = evaluate(tmp_path / "remote.json", *words, *url)
            for name, metric in local["metrics"].items():  # type: ignore[attr-defined]
                value = remote["metrics"][name]["value"]  # type: ignore[index]
                assert value == pytest.approx(metric["value"], abs=1e-4, rel=1e-4), (task, name)
            predictions = [
                [sample["prediction"] for sample in read_samples(tmp_path / name)]
                for name in ("local.json", "remote.json")
            ]
            assert predictions[0] == predictions[1]
            assert remote["model"]["noise"] < 1e-3  # type: ignore[index]
            assert remote["versions"]["server"].startswith("mega-serve")  # type: ignore[index]
