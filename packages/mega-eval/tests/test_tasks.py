import json
import math

import numpy as np
import pytest

from mega_eval.documents import Documents, concatenate
from mega_eval.tasks import lambada, perplexity, wikitext, wikitext_pages
from mega_eval.tasks.rolling_windows import rolling_windows
from mega_eval.windows import as_tokens
from mega_schema.errors import ConfigError, FormatError


def number_lines(texts):
    return [(f"file:{number}", text) for number, text in enumerate(texts, 1)]


@pytest.mark.parametrize(
    ("text", "context", "word"),
    [
        ("one two three", "one two", "three"),
        ("go and go", "go and", "go"),
        ("the cat\nsat\n", "the cat", "sat"),
        ("a  wide   gap ", "a  wide", "gap"),
        ("cat concat", "cat", "concat"),
        ("  alone ", "", "alone"),
        (" \n", "", ""),
    ],
)
def test_the_last_word_is_what_white_space_bounds_and_its_last_occurrence_is_cut(text, context, word):
    assert lambada.split_last_word(text) == (context, word)


def test_the_last_words_of_the_test_set_differ_from_a_cut_at_spaces_on_seven_lines(shared):
    lines = (shared / "data/eval/lambada/lambada_test.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    parts = [lambada.split_last_word(text) for text in texts]
    assert len(parts) == 5153
    assert all(context and word for context, word in parts)
    at_spaces = [text.rpartition(" ") for text in texts]
    assert sum(word != cut[2] for (_, word), cut in zip(parts, at_spaces, strict=True)) == 7
    assert sum(context != cut[0] for (context, _), cut in zip(parts, at_spaces, strict=True)) == 6


def test_the_strict_target_is_the_word_with_a_space_and_the_loose_one_a_token(gpt2):
    text = "He drew a picture of a brontosaurus"
    [strict], _ = lambada.build_windows(number_lines([text]), gpt2, convention="strict", max_length=50)
    [loose], _ = lambada.build_windows(number_lines([text]), gpt2, convention="last-token", max_length=50)
    assert strict.tokens.tolist() == loose.tokens.tolist() == gpt2.encode(text)
    assert gpt2.decode(strict.targets.tolist()) == " brontosaurus"
    assert strict.target_length == len(gpt2.encode(" brontosaurus")) > loose.target_length == 1


def test_strict_loses_white_space_at_the_end_and_the_loose_target_is_that_white_space(gpt2):
    [strict], _ = lambada.build_windows(
        number_lines(["to the dock \n"]), gpt2, convention="strict", max_length=50
    )
    [loose], _ = lambada.build_windows(
        number_lines(["to the dock \n"]), gpt2, convention="last-token", max_length=50
    )
    assert gpt2.decode(strict.tokens.tolist()) == "to the dock"
    assert gpt2.decode(loose.tokens[-1:].tolist()) == "\n"


def test_every_lambada_passage_fits_gpt2s_context_and_ends_in_its_target(shared, gpt2):
    lines = (shared / "data/eval/lambada/lambada_test.jsonl").read_text("utf-8").splitlines()[:300]
    texts = [json.loads(line)["text"] for line in lines]
    windows, truncated = lambada.build_windows(
        number_lines(texts), gpt2, convention="strict", max_length=1024
    )
    assert truncated == 0
    for text, window in zip(texts, windows, strict=True):
        target = gpt2.decode(window.targets.tolist())
        assert target == " " + text.split()[-1]


def test_lambada_is_right_only_where_every_target_token_is(uniform, words):
    words.encode("yes no")  # yes is token 1, the greedy choice of the scorer
    result = lambada.evaluate(
        uniform(50, 10), words, number_lines(["a yes", "b no", "c yes", "d e yes"]), convention="strict"
    )
    assert result.values["accuracy"] == 0.75
    assert result.metrics["accuracy"].stderr == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    assert result.values["target_perplexity"] == pytest.approx(50)
    assert result.counts == {"correct": 3, "passages": 4, "target_tokens": 4, "passages_cut": 0}


def test_a_long_passage_loses_its_beginning_and_is_counted(uniform, words):
    scorer = uniform(50, 3)
    result = lambada.evaluate(scorer, words, number_lines(["a b c d e f", "a b"]), convention="strict")
    assert result.counts["passages_cut"] == 1
    assert scorer.windows[0].tokens.tolist() == words.encode("c d e f")


@pytest.mark.parametrize("convention", ["strict", "last-token"])
def test_a_passage_of_one_word_is_an_error_that_names_its_line(words, uniform, convention):
    with pytest.raises(FormatError, match="file:2: nothing to predict the last word from"):
        lambada.evaluate(uniform(50, 9), words, number_lines(["a b", "alone"]), convention=convention)


def test_openai_splits_at_single_spaces_and_a_passage_of_one_word_follows_the_end_token(words, uniform):
    scorer = uniform(50, 9)
    lambada.evaluate(scorer, words, number_lines(["a b\nc", "a  b", "alone"]), convention="openai")
    parts = [
        (words.decode(window.tokens[: -window.target_length].tolist()), words.decode(window.targets.tolist()))
        for window in scorer.windows
    ]
    assert parts == [("a", "b c"), ("a", "b"), ("<eod>", "alone")]


def test_openai_refuses_a_passage_that_ends_in_a_space(words, uniform):
    with pytest.raises(FormatError, match="file:1: nothing to predict the last word from"):
        lambada.evaluate(uniform(50, 9), words, number_lines(["a b "]), convention="openai")


@pytest.mark.parametrize("length", [1, 2, 5, 7])
@pytest.mark.parametrize("count", [0, 1, 4, 5, 6, 17])
def test_rolling_windows_predict_every_token_once_with_the_longest_context_at_the_end(length, count):
    ids = list(range(100, 100 + count))
    windows = rolling_windows(ids, 7, length)
    assert [token for window in windows for token in window.targets.tolist()] == ids
    assert all(window.input_length <= length for window in windows)
    for number, window in enumerate(windows):
        assert window.tokens[0] == 7 if number == 0 else window.input_length == length


PAGES = " \n = One = \n \n a b . \n = = Part = = \n c \n = Two = \n d"


def test_a_page_begins_at_a_heading_between_single_signs():
    assert wikitext_pages.split_pages(PAGES) == [
        " = One = \n \n a b . \n = = Part = = \n c ",
        " = Two = \n d",
    ]
    assert wikitext_pages.split_pages("no heading") == ["no heading"]


def test_the_test_set_of_wikitext_2_has_the_pages_of_the_harness(shared):
    text = (shared / "data/eval/wikitext-2/wiki.test.tokens").read_text("utf-8")
    assert len(wikitext_pages.split_pages(text)) == 62


def test_pages_divide_the_nats_by_words_and_bytes_of_the_original(uniform, words):
    result = wikitext_pages.evaluate(
        uniform(50, 3), words, PAGES, task="wikitext2", detokenizer="wikitext", seq_length=3
    )
    tokens, size = result.counts["tokens_scored"], len(PAGES.encode()) - len(" \n") - 1
    # one more word than strings: a page that ends in white space has an empty one there, as at its start
    assert result.counts["original_words"] == 14 + 5
    assert result.counts["original_bytes"] == size
    nats = tokens * math.log(50)
    assert result.values["word_perplexity"] == pytest.approx(math.exp(nats / 19))
    assert result.values["byte_perplexity"] == pytest.approx(math.exp(nats / size))
    assert result.values["bits_per_byte"] == pytest.approx(nats / size / math.log(2))
    assert result.values["perplexity"] == pytest.approx(50)
    assert result.metrics["word_perplexity"].count == result.counts["pages"] == 2


@pytest.mark.parametrize("stride", [1, 3, 8])
def test_wikitext_perplexity_of_a_uniform_model_is_the_vocabulary(uniform, words, stride):
    text = " = Head = \n one two , three four . five six 's seven eight nine ten eleven twelve \n"
    result = wikitext.evaluate(uniform(50, 8), words, text, detokenizer="wikitext", stride=stride)
    tokens = result.counts["tokens"]
    original = result.counts["original_words"]
    assert original == len(text.strip().split(" ")) > tokens
    assert result.values["perplexity"] == pytest.approx(50)
    assert result.values["token_ratio"] == (tokens - 1) / (original - 1)
    assert result.values["adjusted_perplexity"] == pytest.approx(50 ** ((tokens - 1) / (original - 1)))
    assert result.counts["tokens_scored"] == tokens - 1


def test_wikitext_exponents_stop_at_twenty_nats(uniform, words):
    result = wikitext.evaluate(uniform(10**12, 8), words, "a b c", detokenizer="none", stride=1)
    assert result.values["loss"] == pytest.approx(math.log(10**12))
    assert result.values["perplexity"] == result.values["adjusted_perplexity"] == math.exp(20)


def test_the_test_set_has_the_counts_the_paper_gives(shared, gpt2):
    text = (shared / "data/eval/wikitext-103/wiki.test.tokens").read_text("utf-8")
    assert wikitext.count_words(text) == 245566
    assert len(gpt2.encode(wikitext.DETOKENIZERS["wikitext"](text))) - 1 == 270329


def test_windows_longer_than_the_context_are_an_error_with_the_longest_as_hint(uniform, words):
    with pytest.raises(ConfigError, match="--seq-length: .*found 9 tokens, wanted at most 8.*--seq-length 8"):
        wikitext.evaluate(uniform(50, 8), words, "a b c", detokenizer="none", stride=1, seq_length=9)


def test_windows_that_leave_gaps_are_an_error(uniform, words):
    with pytest.raises(ConfigError, match="--overlapping-eval: .*found 32 tokens.*--overlapping-eval 8"):
        wikitext.evaluate(uniform(50, 8), words, "a b c", detokenizer="none", stride=32)


@pytest.mark.parametrize("text", ["one", "one\ntwo"])
def test_a_text_too_short_for_wikitext_is_an_error(uniform, words, text):
    with pytest.raises(FormatError, match="f.txt: too short to score"):
        wikitext.evaluate(uniform(50, 8), words, text, detokenizer="none", stride=1, where="f.txt")


def make_documents(words, *texts, empty=0):
    return Documents(list(texts), [as_tokens(words.encode(text)) for text in texts], empty)


def test_perplexity_of_a_uniform_model_is_the_vocabulary_and_bits_follow(uniform, words):
    held_out = make_documents(words, "a b c d e f g", "h i j", "k l m n o", empty=2)
    result = perplexity.evaluate(uniform(50, 6), words, held_out)
    tokens = 7 + 3 + 5 + 3
    assert result.values["perplexity"] == pytest.approx(50)
    size = len("a b c d e f gh i jk l m n o")
    assert result.values["bits_per_byte"] == pytest.approx((tokens - 1) * math.log2(50) / size)
    assert result.counts["tokens"] == tokens
    assert result.counts["tokens_scored"] == tokens - 1
    assert result.counts["bytes"] == size
    assert (result.counts["documents"], result.counts["documents_empty"]) == (3, 2)


def test_bytes_are_of_utf8_not_characters(uniform, words):
    assert perplexity.evaluate(uniform(50, 6), words, make_documents(words, "é ß")).counts["bytes"] == 5


def test_after_the_first_window_every_token_has_half_a_context_before_it(uniform, words):
    scorer = uniform(200, 10)
    perplexity.evaluate(scorer, words, make_documents(words, " ".join(map(str, range(90)))))
    windows = [window for window in scorer.windows if window.target_length]
    assert len(windows) > 10
    assert all(len(window.tokens) - window.target_length >= 5 for window in windows[1:])


def test_documents_of_one_word_have_no_last_word_to_predict_and_are_counted(uniform, words):
    words.encode("yes")
    held_out = make_documents(words, "alone", "so yes", "so no")
    result = perplexity.evaluate(uniform(50, 6), words, held_out)
    assert result.values["last_word_accuracy"] == 0.5
    assert (result.counts["last_words"], result.counts["last_words_skipped"]) == (2, 1)


def test_each_last_word_is_an_example_so_that_two_models_can_be_compared_by_it(uniform, words):
    words.encode("one two")
    held_out = make_documents(words, "two one", "alone", "one two")
    result = perplexity.evaluate(uniform(50, 8), words, held_out)
    last_words = [example for example in result.examples if example.id.startswith("document")]
    assert [(e.id, e.prompt, e.expected, dict(e.scores)) for e in last_words] == [
        ("document 0", "two", "one", {"last_word_correct": 1.0}),
        ("document 2", "one", "two", {"last_word_correct": 0.0}),
    ]
    assert result.metrics["last_word_accuracy"].example_score == "last_word_correct"
    assert all("nats" in example.scores for example in result.examples[: -len(last_words)])


def test_without_any_last_word_there_is_no_accuracy(uniform, words):
    result = perplexity.evaluate(uniform(50, 6), words, make_documents(words, "alone", "again"))
    assert "last_word_accuracy" not in result.values


def test_baselines_are_scored_on_the_same_tokens(uniform, words):
    held_out = make_documents(words, "a b a b a c", "a b")
    stream = concatenate(held_out.tokens, words.identity.eod)
    result = perplexity.evaluate(uniform(50, 6), words, held_out, baseline=np.tile(stream, 40))
    assert result.values["kneser_ney_perplexity"] < result.values["unigram_perplexity"] < 50
    ratio = result.values["bits_per_byte"] / result.values["loss"]
    for name in ("unigram", "kneser_ney"):
        bits = result.values[f"{name}_bits_per_byte"]
        loss = result.values[f"{name}_loss"]
        assert bits / loss == pytest.approx(ratio)
    counts = np.bincount(np.tile(stream, 40), minlength=50) + 1
    assert result.values["unigram_loss"] == pytest.approx(-np.log(counts / counts.sum())[stream[1:]].mean())


def test_one_token_is_too_short_for_a_perplexity(uniform, words):
    words.identity = words.identity.__class__("NullTokenizer", 50, None, None, None, "0" * 64)
    with pytest.raises(FormatError, match="held.jsonl: too short to score: found 1 tokens"):
        perplexity.evaluate(uniform(50, 6), words, make_documents(words, "a"), where="held.jsonl")


def test_documents_are_joined_with_an_end_each_where_the_tokenizer_has_one():
    parts = [as_tokens([1, 2]), as_tokens([3])]
    assert concatenate(parts, 0).tolist() == [1, 2, 0, 3, 0]
    assert concatenate(parts, None).tolist() == [1, 2, 3]
