"""JSON lines become Megatron's files, independent of the workers; after an error there is no output."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from mega_data.preprocess import Options, preprocess
from mega_data.readers.inputs import InputFile
from mega_data.readers.streams import read_blocks
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer, open_tokenizer_folder
from tests.shared_data import SHARED, needs_shared

CHUNK = 1 << 14
GPT2 = SHARED / "data/tokenizers/gpt2"


def null(size: int = 100) -> Tokenizer:
    return open_tokenizer("NullTokenizer", vocab_size=size)


def lines(path: Path, *texts: str, key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), "utf-8")
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_documents_are_in_the_order_of_lines_and_files_with_eod_on_those_that_have_tokens(tmp_path):
    inputs = [lines(tmp_path / "a", "1 2", "", "3"), lines(tmp_path / "b", "4")]
    result = preprocess(inputs, tmp_path / "out" / "p", null(), Options(append_eod=True))
    data = IndexedDataset(result.prefixes[0])
    assert result.prefixes == (tmp_path / "out" / "p_text_document",)
    assert [data[i].tolist() for i in range(len(data))] == [[1, 2, 100], [3, 100], [4, 100]]
    assert data.documents.tolist() == [0, 1, 1, 2, 3]
    assert (result.documents, result.tokens, result.size) == (4, 7, sum(p.stat().st_size for p in inputs))
    assert data.info is not None
    assert data.info.sources == tuple(map(str, inputs))
    assert data.info.options == {"key": "text", "append_eod": True}


def test_without_append_eod_no_token_is_added(tmp_path):
    result = preprocess([lines(tmp_path / "a", "1 2")], tmp_path / "p", null())
    assert IndexedDataset(result.prefixes[0])[0].tolist() == [1, 2]


def test_the_tokenizer_travels_with_each_dataset(tmp_path):
    result = preprocess([lines(tmp_path / "a", "1")], tmp_path / "p", null(7))
    assert open_tokenizer_folder(tmp_path / "p_text_document.tokenizer").identity == null(7).identity
    assert IndexedDataset(result.prefixes[0]).info.tokenizer == null(7).identity


def test_every_key_becomes_a_dataset_of_its_own_and_all_are_complete(tmp_path):
    path = tmp_path / "a"
    path.write_text('{"text": "1", "title": "5 6"}\n{"title": "", "text": "2 3"}\n', "utf-8")
    result = preprocess([path], tmp_path / "p", null(), Options(("text", "title")))
    text, title = (IndexedDataset(prefix) for prefix in result.prefixes)
    assert [text[i].tolist() for i in range(2)] == [[1], [2, 3]]
    assert title[0].tolist() == [5, 6]
    assert title.documents.tolist() == [0, 1, 1]


def test_the_vocabulary_decides_the_dtype(tmp_path):
    for size, dtype in ((65498, "uint16"), (65499, "int32")):  # and one more id, the eod
        result = preprocess([lines(tmp_path / "a", "1")], tmp_path / "p", null(size))
        assert IndexedDataset(result.prefixes[0]).dtype == dtype


def test_output_bytes_do_not_depend_on_the_workers(tmp_path):
    rng = random.Random(7)
    texts = [" ".join(str(rng.randrange(100)) for _ in range(rng.randrange(3000))) for _ in range(60)]
    inputs = [lines(tmp_path / "a", *texts[:41]), lines(tmp_path / "b", *texts[41:])]
    assert sum(len(list(read_blocks(InputFile(p, "jsonl"), keys=["text"], size=CHUNK))) for p in inputs) > 8
    outputs = []
    for workers in (1, 2, 3):
        preprocess(
            inputs,
            tmp_path / str(workers) / "p",
            null(),
            Options(append_eod=True),
            workers=workers,
            block=CHUNK,
        )
        outputs.append(files(tmp_path / str(workers)))
    assert len(outputs[0]) == 4
    assert outputs[0] == outputs[1] == outputs[2]


@needs_shared
def test_gpt2_files_hold_the_published_ids(tmp_path):
    golden = (SHARED / "data/tokenizers/golden/encodings.jsonl").read_text("utf-8").splitlines()
    cases = [json.loads(line) for line in golden]
    tokenizer = open_tokenizer(
        "GPT2BPETokenizer", vocab_file=GPT2 / "gpt2-vocab.json", merge_file=GPT2 / "gpt2-merges.txt"
    )
    source = lines(tmp_path / "a", *(case["text"] for case in cases))
    data = IndexedDataset(
        preprocess([source], tmp_path / "p", tokenizer, Options(append_eod=True)).prefixes[0]
    )
    assert [data[i].tolist() for i in range(len(data))] == [[*c["gpt2"], 50256] for c in cases if c["gpt2"]]


FAULTS = [
    (b'{"text": "1"', "not JSON: found"),
    (b"\xff", "not JSON: found"),
    (b"[1]", "not a JSON object: found list, wanted an object with 'text'"),
    (b'{"txt": "1", "id": 2}', r"no key 'text': found txt, id, wanted 'text' \(see --json-key\)"),
    (b"{}", "no key 'text': found no keys"),
    (b'{"text": 1}', "the value of 'text': found int, wanted a string"),
    (b'{"text": null}', "the value of 'text': found NoneType, wanted a string"),
    (b'{"text": "1 x"}', "not ids for a NullTokenizer: found 'x', wanted integers below 101"),
]


@pytest.mark.parametrize(
    ("line", "message", "workers"), [*((*fault, 1) for fault in FAULTS), (*FAULTS[0], 2), (*FAULTS[-1], 2)]
)
def test_a_line_that_is_wrong_is_named_and_nothing_is_left(line, message, workers, tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"text": "1"}\n\n' + line + b"\n" + b'{"text": "2"}\n')
    with pytest.raises(FormatError, match=rf"corpus.jsonl:3: {message}.*hint: correct or delete"):
        preprocess([path], tmp_path / "p", null(), workers=workers)
    assert list(tmp_path.iterdir()) == [path]


def test_a_mistake_leaves_the_earlier_dataset_as_it_was(tmp_path):
    good = lines(tmp_path / "good", "1")
    preprocess([good], tmp_path / "p", null())
    before = files(tmp_path)
    with pytest.raises(FormatError):
        preprocess([good, lines(tmp_path / "bad", "x")], tmp_path / "p", null(99))
    after = {name: data for name, data in files(tmp_path).items() if not name.startswith("p.unfinished/")}
    assert after == {**before, "bad": (tmp_path / "bad").read_bytes()}


def test_a_file_that_is_damaged_leaves_nothing(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"not packed")
    with pytest.raises(FormatError, match="a.jsonl.gz: damaged"):
        preprocess([path], tmp_path / "p", null())
    with pytest.raises(ConfigError, match="--lang: not the name"):
        preprocess([lines(tmp_path / "b", "1")], tmp_path / "p", null(), Options(language="X"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl.gz", "b"]


def test_the_index_may_have_megatrons_older_form(tmp_path):
    result = preprocess(
        [lines(tmp_path / "a", "1 2", "", "3")], tmp_path / "p", null(), Options(index_format="lazy")
    )
    data = IndexedDataset(result.prefixes[0])
    assert (tmp_path / "p_text_document.idx").read_bytes().startswith(b"TNTIDX")
    assert ([data[i].tolist() for i in range(len(data))], data.documents.tolist()) == (
        [[1, 2], [3]],
        [0, 1, 1, 2],
    )


@needs_shared
def test_llama2s_sequences_begin_with_bos(tmp_path):
    pytest.importorskip("sentencepiece")
    model = SHARED / "data/tokenizers/sentencepiece/test_model.model"
    tokenizer = open_tokenizer("Llama2Tokenizer", model=model)
    source = lines(tmp_path / "a", "Hello", "", "I saw a girl")
    result = preprocess([source], tmp_path / "p", tokenizer, Options(append_eod=True))
    data = IndexedDataset(result.prefixes[0])
    assert [data[i].tolist() for i in range(2)] == [
        [1, *tokenizer.encode(t), 2] for t in ("Hello", "I saw a girl")
    ]


def test_an_eod_the_tokenizer_lacks_is_refused(tmp_path):
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    Library(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer("HuggingFaceTokenizer", model=tmp_path)
    with pytest.raises(ConfigError, match="--append-eod: the tokenizer has no end of document"):
        preprocess([lines(tmp_path / "a", "a")], tmp_path / "p", tokenizer, Options(append_eod=True))


def test_a_key_named_twice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--json-keys: a key is named twice: found text text"):
        preprocess([lines(tmp_path / "a", "1")], tmp_path / "p", null(), Options(("text", "text")))


def test_a_corpus_without_documents_is_a_dataset_without_documents(tmp_path):
    (tmp_path / "a").write_bytes(b"\n  \n")
    result = preprocess([tmp_path / "a"], tmp_path / "p", null())
    data = IndexedDataset(result.prefixes[0])
    assert (len(data), data.documents.tolist(), result.tokens) == (0, [0], 0)


def test_texts_may_have_line_breaks_that_only_unicode_knows(tmp_path):
    path = tmp_path / "a"
    path.write_bytes('{"text": "a\u2028b\u0085c"}\n'.encode())
    (block,) = read_blocks(InputFile(path, "jsonl"), keys=["text"])
    rows = block.rows(["text"])
    assert (rows.numbers, rows.texts, rows.errors) == ([0], [("a\u2028b\u0085c",)], [])
