"""Sentences become sequences, split by a published model or one trained on the corpus; the log names it."""

from __future__ import annotations

import json
import logging
import pickle

import pytest

from mega_data.preprocess import Options, preprocess
from mega_data.sentences import SentenceSplitter, make_splitter
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.tokenizer import open_tokenizer

pytest.importorskip("nltk")

TEXT = "Dr. Smith went home. He slept.\n\nThe next day he woke up! Did he? Yes."


def train_splitter(**more: bool) -> SentenceSplitter:
    return make_splitter("klingon", ["Dr. Smith went to see Dr. Jones. He met Dr. Brown. " * 20], **more)


def test_a_model_is_trained_on_the_corpus_where_there_is_none_and_that_is_said(caplog):
    with caplog.at_level(logging.WARNING, "mega.data"):
        split = train_splitter()
    assert (
        "a Punkt model trained on 0.0 million characters of the input: nltk has none of klingon"
        in caplog.text
    )
    assert split(TEXT)[0] == "Dr. Smith went home."
    assert split(TEXT)[1:] == ["He slept.", "The next day he woke up!", "Did he?", "Yes."]
    assert split("") == []


def test_sentences_that_keep_newlines_are_together_the_text():
    split = train_splitter(keep_newlines=True)
    assert "".join(split(TEXT)) == TEXT
    assert split(TEXT)[1] == "He slept.\n\n"


def test_a_splitter_sent_to_another_process_splits_alike():
    split = train_splitter()
    unpickled = pickle.loads(pickle.dumps(split))
    assert (unpickled, unpickled(TEXT)) == (split, split(TEXT))
    assert unpickled.model == train_splitter().model


def test_a_text_of_any_length_is_cut_in_blocks_that_punkt_can_take(monkeypatch):
    from mega_data import sentences

    monkeypatch.setattr(sentences, "MAX_CHARACTERS", 30)
    assert "".join(train_splitter(keep_newlines=True)(TEXT)) == TEXT


def test_a_published_model_is_used_where_nltk_has_one(tmp_path, monkeypatch):
    import nltk

    folder = tmp_path / "tokenizers/punkt_tab/elvish"
    folder.mkdir(parents=True)
    (folder / "abbrev_types.txt").write_text("mae\n")
    (folder / "collocations.tab").write_text("")
    (folder / "sent_starters.txt").write_text("he\n")
    (folder / "ortho_context.tab").write_text("he\t46\n")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    split = make_splitter("elvish", [])
    assert split.name.startswith("punkt (elvish), sha256 ")
    assert split("Mae. Govannon went. He slept.") == ["Mae. Govannon went.", "He slept."]


def test_documents_have_a_sequence_for_each_sentence_and_eod_on_the_last(tmp_path):
    texts = ["1 2. 3 4.", "", "5."]
    path = tmp_path / "a"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    (tmp_path / "vocab.txt").write_text("\n".join(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"12345.")))
    tokenizer = open_tokenizer("BertWordPieceCase", vocab_file=tmp_path / "vocab.txt")
    result = preprocess([path], tmp_path / "p", tokenizer, Options(language="klingon"), workers=2)
    data = IndexedDataset(tmp_path / "p_text_sentence")
    assert result.prefixes == (data.prefix,)
    assert data.documents.tolist()[0] == 0
    assert (len(data.documents) - 1, int(data.documents[-1])) == (3, len(data))
    assert data.documents[1] == data.documents[2]
    assert data.info is not None
    assert data.info.options["split_sentences"] == "klingon"


def test_a_list_of_strings_is_sentences_already(tmp_path):
    path = tmp_path / "a"
    rows = [["1 2", "", "3"], [], "4"]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), "utf-8")
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=9)
    result = preprocess([path], tmp_path / "p", tokenizer, Options(append_eod=True))
    data = IndexedDataset(result.prefixes[0])
    assert [data[i].tolist() for i in range(len(data))] == [[1, 2], [3, 9], [4, 9]]
    assert data.documents.tolist() == [0, 2, 2, 3]


def test_a_language_that_is_no_name_or_a_library_that_is_missing_is_told(monkeypatch):
    with pytest.raises(ConfigError, match="--lang: not the name of a language: found ../x"):
        make_splitter("../x", [])
    import sys

    monkeypatch.setitem(sys.modules, "nltk.tokenize.punkt", None)
    with pytest.raises(ConfigError, match=r"wanted nltk; hint: pip install .*mega-data\[sentences\]"):
        make_splitter("english", [])


def test_a_text_dense_in_full_stops_takes_the_time_it_takes(monkeypatch):
    redos = pytest.importorskip("nltk.redos")
    monkeypatch.setattr(redos, "DEFAULT_TIMEOUT", 0.2)  # as on a machine that does much else
    text = "Sec. 1. No. 1 vol. 1 p. 1; cf. Fig. 1. " * 2500 + "Mr. " * 2500
    split = make_splitter("klingon", [text[:9000]], keep_newlines=True)
    assert "".join(split(text)) == text


def test_a_damaged_model_of_nltk_is_named(tmp_path, monkeypatch):
    import nltk

    (tmp_path / "tokenizers").mkdir()
    (tmp_path / "tokenizers/punkt_tab.zip").write_bytes(b"PK nothing packed")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match="NLTK_DATA: punkt_tab: damaged: found .*; hint: nltk.download"):
        make_splitter("english", ["x"])


def test_the_sentence_model_is_in_the_sidecar_and_models_are_not_mixed(tmp_path, monkeypatch):
    import nltk

    from mega_data.merge import merge_datasets

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    null = open_tokenizer("NullTokenizer", vocab_size=9)
    prefixes = []
    for name, text in (("a", "1 2. 3 4. "), ("b", "5 b. 6 b. 7 b. " * 40)):
        path = tmp_path / name
        path.write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "1"}) + "\n")
        options = Options(language="english", skip=True)
        prefixes += preprocess([path], tmp_path / f"p{name}", null, options).prefixes
    models = [IndexedDataset(prefix).info.options["sentence_model"] for prefix in prefixes]
    assert all(str(name).startswith("punkt trained on the corpus (english), sha256 ") for name in models)
    assert models[0] != models[1]
    with pytest.raises(FormatError, match=r"pb_text_sentence.json: sentence_model is not that of"):
        merge_datasets([IndexedDataset(prefix) for prefix in prefixes], tmp_path / "all")


def test_a_run_goes_on_only_with_the_sentence_model_it_began_with(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "."]))
    bert = open_tokenizer("BertWordPieceCase", vocab_file=tmp_path / "vocab.txt")
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    texts = [json.dumps({"text": "a a. a a. A b. "}) + "\n", json.dumps({"text": "a etc. a etc. "}) + "\n"]
    longer = json.dumps({"text": "A. a. a vol. a vol. a vol. a no. a no. " * 40}) + "\n"
    options = Options(language="klingon")  # whose model is trained on the inputs
    inputs[0].write_text(texts[0])
    for name, mended, expected_bytes in (
        ("same", texts[1], len(texts[1])),
        ("other", longer, len(texts[0] + longer)),
    ):
        inputs[1].write_text(texts[1] + "oops\n")
        with pytest.raises(FormatError, match=r"b\.jsonl:2"):
            preprocess(inputs, tmp_path / name, bert, options)
        inputs[1].write_text(mended)
        result = preprocess(inputs, tmp_path / name, bert, options)
        assert (result.size, result.fresh) == (len(texts[0] + mended), expected_bytes)
