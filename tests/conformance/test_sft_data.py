"""`mega-train --sft` reads the prompts and answers that `mega-data preprocess` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega_data.preprocess import Options, preprocess
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.data.sft import PromptResponsePairs

EXAMPLES = [("1 2 3", "4 5"), ("", "6"), ("7", ""), ("8 9", "10"), ("", ""), ("11", "12 13 14")]


@pytest.mark.parametrize("append_eod", [False, True])
def test_every_line_is_an_example_also_where_a_text_is_empty(tmp_path: Path, append_eod: bool) -> None:
    lines = [json.dumps({"question": prompt, "reply": answer}) + "\n" for prompt, answer in EXAMPLES]
    (tmp_path / "lines.jsonl").write_text("".join(lines))
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=20)
    options = Options(keys=("question", "reply"), append_eod=append_eod)
    preprocess([tmp_path / "lines.jsonl"], tmp_path / "sft", tokenizer, options)
    pairs = PromptResponsePairs(tmp_path / "sft", ("question", "reply"))
    assert (pairs.identity, pairs.eod) == (tokenizer.identity, 20)
    examples = [pairs.read(i) for i in range(len(pairs))]
    assert [(ids.tolist(), prompt) for ids, prompt in examples] == [
        ([*map(int, prompt.split()), *map(int, answer.split()), 20], len(prompt.split()))
        for prompt, answer in EXAMPLES
    ]
