import json
from pathlib import Path

import pytest

from mega_eval.detokenize import DETOKENIZERS, choose_detokenizer, ptb_detokenizer, wikitext_detokenizer
from mega_schema.errors import ConfigError


@pytest.mark.parametrize("name", ["wikitext", "ptb"])
def test_text_equals_megatrons_character_by_character(shared, name):
    cases = json.loads((shared / "golden/detokenizers.json").read_text())[name]
    assert cases
    for text, expected in cases:
        assert DETOKENIZERS[name](text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a @-@ b @,@ c @.@ d", "a-b,c.d"),
        ("so : it ; ends . ok ! no ? well , yes", "so: it; ends. ok! no? well, yes"),
        ("( a ) [ b ] { c } \" d \" ' e '", "(a) [b] {c} \"d\" 'e'"),
        ("= = = = four = = = =", "==== four ===="),
        ("the dogs ' bowls", "the dogs' bowls"),
        ("1 ° N", "1°N"),
        ("x N y 's", "x 1 y's"),
        ("/' 9/", "/'[0-9]/"),
    ],
)
def test_each_rule_of_wikitext_does_what_it_says(text, expected):
    assert wikitext_detokenizer(text) == expected


def test_penn_treebank_puts_its_numbers_against_their_signs():
    assert ptb_detokenizer("$ 1 do n't") == "$1 don't"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("wiki.test.tokens", "wikitext"),
        ("ptb.test.txt", "ptb"),
        ("wiki/ptb.txt", "ptb"),
        ("lambada_test.jsonl", "none"),
        ("wiki/test.txt", "wikitext"),
    ],
)
def test_the_path_chooses_the_detokenizer_as_in_megatron(path, name):
    assert choose_detokenizer(Path(path), None) == name


def test_a_name_overrides_the_path():
    assert choose_detokenizer(Path("wiki.test.tokens"), "ptb") == "ptb"


def test_a_path_that_says_nothing_is_an_error_that_says_what_to_add():
    with pytest.raises(ConfigError, match=r"--detokenizer: .*test\.txt.*hint: --detokenizer wikitext"):
        choose_detokenizer(Path("test.txt"), None)
