import json
import math

import numpy as np
import pytest

from mega_eval.documents import Documents, joined
from mega_eval.tasks import lambada, perplexity, wikitext
from mega_eval.windows import ids
from mega_schema.errors import ConfigError, FormatError


def at(texts):
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
    assert lambada.last_word(text) == (context, word)


def test_the_last_words_of_the_test_set_differ_from_a_cut_at_spaces_on_seven_lines(shared):
    lines = (shared / "data/eval/lambada/lambada_test.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    parts = [lambada.last_word(text) for text in texts]
    assert len(parts) == 5153
    assert all(context and word for context, word in parts)
    at_spaces = [text.rpartition(" ") for text in texts]
    assert sum(word != other[2] for (_, word), other in zip(parts, at_spaces, strict=True)) == 7
    assert sum(context != other[0] for (context, _), other in zip(parts, at_spaces, strict=True)) == 6


def test_the_strict_target_is_the_word_with_a_space_and_the_loose_one_a_token(gpt2):
    text = "He drew a picture of a brontosaurus"
    [strict], _ = lambada.passages(at([text]), gpt2, strict=True, longest=50)
    [loose], _ = lambada.passages(at([text]), gpt2, strict=False, longest=50)
    assert strict.tokens.tolist() == loose.tokens.tolist() == gpt2.encode(text)
    assert gpt2.decode(strict.tokens[-strict.scored :].tolist()) == " brontosaurus"
    assert strict.scored == len(gpt2.encode(" brontosaurus")) > loose.scored == 1


def test_strict_loses_white_space_at_the_end_and_the_loose_target_is_that_white_space(gpt2):
    [strict], _ = lambada.passages(at(["to the dock \n"]), gpt2, strict=True, longest=50)
    [loose], _ = lambada.passages(at(["to the dock \n"]), gpt2, strict=False, longest=50)
    assert gpt2.decode(strict.tokens.tolist()) == "to the dock"
    assert gpt2.decode(loose.tokens[-1:].tolist()) == "\n"


def test_every_lambada_passage_fits_gpt2s_context_and_ends_in_its_target(shared, gpt2):
    lines = (shared / "data/eval/lambada/lambada_test.jsonl").read_text("utf-8").splitlines()[:300]
    texts = [json.loads(line)["text"] for line in lines]
    windows, cut = lambada.passages(at(texts), gpt2, strict=True, longest=1024)
    assert cut == 0
    for text, window in zip(texts, windows, strict=True):
        target = gpt2.decode(window.tokens[len(window.tokens) - window.scored :].tolist())
        assert target == " " + text.split()[-1]


def test_lambada_is_right_only_where_every_target_token_is(uniform, words):
    words.encode("yes no")  # yes is token 1, the first choice of the scorer
    found = lambada.evaluate(uniform(50, 10), words, at(["a yes", "b no", "c yes", "d e yes"]), strict=True)
    assert found.scores["accuracy"] == 0.75
    assert found.scores["accuracy_stderr"] == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    assert found.scores["target_perplexity"] == pytest.approx(50)
    assert found.counts == {"correct": 3, "passages": 4, "target_tokens": 4, "passages_cut": 0}


def test_a_long_passage_keeps_its_end_and_is_counted(uniform, words):
    scorer = uniform(50, 3)
    found = lambada.evaluate(scorer, words, at(["a b c d e f", "a b"]), strict=True)
    assert found.counts["passages_cut"] == 1
    assert scorer.seen[0].tokens.tolist() == words.encode("c d e f")


@pytest.mark.parametrize("strict", [True, False])
def test_a_passage_of_one_word_is_an_error_that_names_its_line(words, uniform, strict):
    with pytest.raises(FormatError, match="file:2: nothing to predict the last word from"):
        lambada.evaluate(uniform(50, 9), words, at(["a b", "alone"]), strict=strict)


@pytest.mark.parametrize("stride", [1, 3, 8])
def test_wikitext_perplexity_of_a_uniform_model_is_the_vocabulary(uniform, words, stride):
    text = " = Head = \n one two , three four . five six 's seven eight nine ten eleven twelve \n"
    found = wikitext.evaluate(uniform(50, 8), words, text, detokenizer="wikitext", stride=stride)
    tokens, original = found.counts["tokens"], found.counts["original_words"]
    assert original == len(text.strip().split(" ")) > tokens
    assert found.scores["perplexity"] == pytest.approx(50)
    assert found.scores["token_ratio"] == (tokens - 1) / (original - 1)
    assert found.scores["adjusted_perplexity"] == pytest.approx(50 ** ((tokens - 1) / (original - 1)))
    assert found.counts["tokens_scored"] == tokens - 1


def test_wikitext_exponents_stop_at_twenty_nats(uniform, words):
    found = wikitext.evaluate(uniform(10**12, 8), words, "a b c", detokenizer="none", stride=1)
    assert found.scores["loss"] == pytest.approx(math.log(10**12))
    assert found.scores["perplexity"] == found.scores["adjusted_perplexity"] == math.exp(20)


def test_the_test_set_has_the_counts_the_paper_gives(shared, gpt2):
    text = (shared / "data/eval/wikitext-103/wiki.test.tokens").read_text("utf-8")
    assert wikitext.words_of(text) == 245566
    assert len(gpt2.encode(wikitext.DETOKENIZERS["wikitext"](text))) - 1 == 270329


def test_windows_longer_than_the_context_are_an_error_with_the_longest_as_hint(uniform, words):
    with pytest.raises(ConfigError, match="--seq-length: .*found 9 tokens, wanted at most 8.*--seq-length 8"):
        wikitext.evaluate(uniform(50, 8), words, "a b c", detokenizer="none", stride=1, length=9)


def test_windows_that_leave_gaps_are_an_error(uniform, words):
    with pytest.raises(ConfigError, match="--overlapping-eval: .*found 32 tokens.*--overlapping-eval 8"):
        wikitext.evaluate(uniform(50, 8), words, "a b c", detokenizer="none", stride=32)


@pytest.mark.parametrize("text", ["one", "one\ntwo"])
def test_a_text_too_short_for_wikitext_is_an_error(uniform, words, text):
    with pytest.raises(FormatError, match="f.txt: too short to score"):
        wikitext.evaluate(uniform(50, 8), words, text, detokenizer="none", stride=1, where="f.txt")


def documents(words, *texts, empty=0):
    return Documents(list(texts), [ids(words.encode(text)) for text in texts], empty)


def test_perplexity_of_a_uniform_model_is_the_vocabulary_and_bits_follow(uniform, words):
    held = documents(words, "a b c d e f g", "h i j", "k l m n o", empty=2)
    found = perplexity.evaluate(uniform(50, 6), words, held)
    tokens = 7 + 3 + 5 + 3
    assert found.scores["perplexity"] == pytest.approx(50)
    size = len("a b c d e f gh i jk l m n o")
    assert found.scores["bits_per_byte"] == pytest.approx((tokens - 1) * math.log2(50) / size)
    assert found.counts["tokens"] == tokens
    assert found.counts["tokens_scored"] == tokens - 1
    assert found.counts["bytes"] == size
    assert (found.counts["documents"], found.counts["documents_empty"]) == (3, 2)


def test_bytes_are_of_utf8_not_characters(uniform, words):
    assert perplexity.evaluate(uniform(50, 6), words, documents(words, "é ß")).counts["bytes"] == 5


def test_after_the_first_window_every_token_has_half_a_context_before_it(uniform, words):
    scorer = uniform(200, 10)
    perplexity.evaluate(scorer, words, documents(words, " ".join(map(str, range(90)))))
    windows = [window for window in scorer.seen if window.scored]
    assert len(windows) > 10
    assert all(len(window.tokens) - window.scored >= 5 for window in windows[1:])


def test_documents_of_one_word_have_no_last_word_to_predict_and_are_counted(uniform, words):
    words.encode("yes")
    held = documents(words, "alone", "so yes", "so no")
    found = perplexity.evaluate(uniform(50, 6), words, held)
    assert found.scores["last_word_accuracy"] == 0.5
    assert (found.counts["last_words"], found.counts["last_words_skipped"]) == (2, 1)


def test_without_any_last_word_there_is_no_accuracy(uniform, words):
    found = perplexity.evaluate(uniform(50, 6), words, documents(words, "alone", "again"))
    assert "last_word_accuracy" not in found.scores


def test_counted_models_are_scored_on_the_same_tokens(uniform, words):
    held = documents(words, "a b a b a c", "a b")
    stream = joined(held.tokens, words.identity.eod)
    found = perplexity.evaluate(uniform(50, 6), words, held, baseline=np.tile(stream, 40))
    assert found.scores["kneser_ney_perplexity"] < found.scores["unigram_perplexity"] < 50
    ratio = found.scores["bits_per_byte"] / found.scores["loss"]
    for name in ("unigram", "kneser_ney"):
        bits, loss = found.scores[f"{name}_bits_per_byte"], found.scores[f"{name}_loss"]
        assert bits / loss == pytest.approx(ratio)
    counts = np.bincount(np.tile(stream, 40), minlength=50) + 1
    assert found.scores["unigram_loss"] == pytest.approx(-np.log(counts / counts.sum())[stream[1:]].mean())


def test_one_token_is_too_short_for_a_perplexity(uniform, words):
    words.identity = words.identity.__class__("NullTokenizer", 50, None, None, None, "0" * 64)
    with pytest.raises(FormatError, match="held.jsonl: too short to score: found 1 tokens"):
        perplexity.evaluate(uniform(50, 6), words, documents(words, "a"), where="held.jsonl")


def test_documents_are_joined_with_an_end_each_where_the_tokenizer_has_one():
    parts = [ids([1, 2]), ids([3])]
    assert joined(parts, 0).tolist() == [1, 2, 0, 3, 0]
    assert joined(parts, None).tolist() == [1, 2, 3]
