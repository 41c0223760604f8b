"""transformers gives the same ids with the files that `export-tokenizer` writes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers

from mega_ckpt.formats.huggingface.tokenizer import export_tokenizer
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import FormatError
from mega_schema.spec import gpt
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer, open_tokenizer_folder

TEXTS = ["the quick fox 12", "  two  spaces\nand a line", "naïve é 漢字 🙂", "", "a </s> in a text"]


def _export(tokenizer: Tokenizer, folder: Path, random_whole: Any, save_whole: Any) -> Any:
    spec = gpt(layers=1, hidden=8, heads=2, vocab=tokenizer.identity.vocab_size, max_seq_len=64)
    tokenizer.save(folder / "tokenizer")
    run = save_whole(folder / "run", spec, random_whole(spec), tokenizer=folder / "tokenizer")
    export_tokenizer(Checkpoint(run), folder / "out")
    return transformers.AutoTokenizer.from_pretrained(folder / "out")


@pytest.fixture
def llamas(tmp_path: Path) -> Path:
    """A SentencePiece model as Llama's are: byte pairs, bytes for what is unknown, text left as it is."""
    lines = [f"the quick brown fox {i} jumps over the lazy dog number {7 * i}" for i in range(300)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    return tmp_path / "tokenizer.model"


def test_llamas_sentencepiece_model_is_llamas_tokenizer_there(
    llamas: Path, tmp_path: Path, random_whole: Any, save_whole: Any
) -> None:
    ours = open_tokenizer("Llama2Tokenizer", model=llamas)
    theirs = _export(ours, tmp_path, random_whole, save_whole)
    for text in [text.lstrip() for text in TEXTS[:-1]]:  # the last has </s>, which is a token there
        assert theirs.encode(text) == ours.encode(text), text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.identity.bos, ours.identity.eod) == (1, 2)
    assert theirs.model_max_length == 64
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == llamas.read_bytes()


def test_other_sentencepiece_models_are_refused_with_the_place_of_the_model(
    llamas: Path, tmp_path: Path, random_whole: Any, save_whole: Any
) -> None:
    ours = open_tokenizer("GPTSentencePieceTokenizer", model=llamas)
    with pytest.raises(FormatError, match=r"found GPTSentencePieceTokenizer, .*tokenizer.model is the model"):
        _export(ours, tmp_path, random_whole, save_whole)
    assert not (tmp_path / "out").exists()


def test_byte_pairs_of_gpt2_have_the_same_ids_there(
    tmp_path: Path, random_whole: Any, save_whole: Any
) -> None:
    from mega_schema.tokenizer.files import byte_alphabet

    vocab = {letter: number for number, letter in enumerate(sorted(byte_alphabet()))}
    vocab |= {"th": 256, "the": 257, "Ġq": 258, "<|endoftext|>": 259}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), "utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\nĠ q\n", "utf-8")
    ours = open_tokenizer(
        "GPT2BPETokenizer", vocab_file=tmp_path / "vocab.json", merge_file=tmp_path / "merges.txt"
    )
    theirs = _export(ours, tmp_path, random_whole, save_whole)
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode(text), text
        assert theirs.decode(theirs.encode(text)) == text
    assert theirs.eos_token_id == open_tokenizer_folder(tmp_path / "tokenizer").identity.eod == 259
