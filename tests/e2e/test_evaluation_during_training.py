"""A training run asks mega-eval for the accuracy of its checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedWriter
from mega_schema.tokenizer.tokenizer import open_tokenizer

TRAINING = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 1 --train-iters 4 --lr 0.01 --data-path corpus "
    "--log-interval 2 --eval-interval 2 --eval-iters 1 --save-interval 2 --save run "
    "--split 80,10,10 --device cpu"
)


def test_the_numbers_of_mega_eval_come_into_the_event_log(tmp_path: Path) -> None:
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=50)
    with IndexedWriter(tmp_path / "corpus", "uint16", DatasetInfo(tokenizer.identity)) as writer:
        for first in range(60):
            writer.add([(first + index) % 50 for index in range(40)])
            writer.end_document()
    tokenizer.save(tmp_path / "corpus.tokenizer")
    (tmp_path / "data.jsonl").write_text('{"text": "1 2 3 4"}\n{"text": "5 6 7"}\n')
    command = f"{sys.executable} -m mega_eval lambada --data data.jsonl --device cpu"
    words = [sys.executable, "-m", "mega_train", "gpt", *TRAINING.split(), "--evaluation-commands", command]
    process = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    evaluations = [event for event in events if event["event"] == "evaluation"]
    assert [event["iteration"] for event in evaluations] == [2, 4], process.stdout
    for event in evaluations:
        result = json.loads((tmp_path / event["result"]).read_bytes())
        assert result["model"]["iteration"] == event["iteration"]
        assert event["metrics"]["accuracy"] == result["metrics"]["accuracy"]["value"]
    assert "at iteration 4 | accuracy" in process.stdout
