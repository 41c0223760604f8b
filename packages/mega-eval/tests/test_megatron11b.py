import json
import math
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from mega_eval.cli import cli
from mega_eval.tasks import megatron11b
from mega_eval.windows import as_tokens
from mega_schema.errors import ConfigError, FormatError


def test_the_published_figure_follows_from_its_counts():
    assert round(megatron11b.renormalize(8.46, 270_847, 245_566), 2) == 10.54


def test_the_command_renormalizes_a_figure_without_a_model():
    outcome = CliRunner().invoke(cli, ["megatron11b", "--renormalize", "8.46"])
    assert outcome.exit_code == 0
    assert outcome.output == "8.46 over 270,847 tokens of 245,566 words: 10.54 per word\n"


@pytest.mark.parametrize(("count", "block", "context"), [(1, 4, 3), (9, 4, 3), (8, 4, 8), (30, 3, 20)])
def test_windows_are_those_of_fairseqs_dataset(count, block, context):
    # fairseq: blocks of the stream and of the stream shifted by one, and the last tokens before each
    targets = list(range(100, 100 + count))
    inputs = [7, *targets[:-1]]
    expected, before = [], []
    for start in range(0, count, block):
        own = inputs[start : start + block]
        before = before[max(0, len(before) + len(own) - block - context) :]
        expected.append(([*before, *own], targets[start : start + block]))
        before = [*before, *own][-context:]
    windows = megatron11b.context_windows(as_tokens([7, *targets]), block, context)
    assert [(w.tokens[:-1].tolist(), w.targets.tolist()) for w in windows] == expected


def test_lines_are_stripped_end_in_a_token_and_divide_by_the_words_of_the_file(uniform, words):
    text = " \n = One = \n \n a b @-@ c , d \n"
    result = megatron11b.evaluate(
        uniform(50, 8), words, text, detokenize=lambda line: line.strip(), context_window=6
    )
    assert result.counts["lines"] == 2
    assert result.counts["tokens"] == (3 + 1) + (6 + 1) == result.counts["tokens_scored"]
    assert result.counts["original_words"] == len(text.strip().split(" "))
    ratio = 11 / result.counts["original_words"]
    assert result.values["perplexity"] == pytest.approx(50)
    assert result.values["renormalized_perplexity"] == pytest.approx(50**ratio)
    assert result.values["renormalized_perplexity"] == pytest.approx(
        megatron11b.renormalize(result.values["perplexity"], 11, result.counts["original_words"])
    )


def test_a_context_window_that_leaves_no_block_is_an_error(uniform, words):
    with pytest.raises(
        ConfigError, match="--context-window: .*found 992 tokens, wanted less than .*, 8; hint"
    ):
        megatron11b.evaluate(uniform(50, 8), words, "a", detokenize=str, context_window=992)


def test_an_empty_text_is_an_error(uniform, words):
    with pytest.raises(FormatError, match=r"f\.raw: too short to score"):
        megatron11b.evaluate(
            uniform(50, 8), words, " ", detokenize=str.strip, context_window=4, where="f.raw"
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lines_are_detokenized_as_the_readme_does():
    detokenize = megatron11b.load_detokenizer()
    assert detokenize(" = = Career = = \n") == "==Career=="
    assert detokenize('a guest @-@ starring role , in the 1 @.@ 5 m ( 4 ft ) film " He \'s " .') == (
        'a guest-starring role, in the 1.5 m (4 ft) film "He\'s".'
    )
    assert detokenize("1999 – 2000") == "1999–2000"


def test_without_sacremoses_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(ConfigError, match=r"sacremoses is not installed; hint: .*mega-eval\[moses\]"):
        megatron11b.load_detokenizer()


def test_the_command_writes_a_result(run, tmp_path):
    (tmp_path / "wiki.test.raw").write_text("1 2 3 \n\n 4 5 6 7 8 \n")
    output = tmp_path / "r.json"
    argv = [
        "megatron11b",
        tmp_path / "wiki.test.raw",
        "--load",
        run,
        "--output",
        output,
        "--context-window",
        12,
    ]
    outcome = CliRunner().invoke(cli, [*map(str, argv), "--device", "cpu"])
    assert outcome.exit_code == 0, outcome.output
    record = json.loads(output.read_bytes())
    assert record["convention"] == "context-window12"
    assert record["counts"]["tokens"] == 10
    loss = record["metrics"]["loss"]["value"]
    assert record["metrics"]["perplexity"]["value"] == pytest.approx(math.exp(loss))
    assert np.isfinite(loss)
