import gzip
import sys

import pytest
import zstandard

from mega_eval.documents import (
    list_data_files,
    list_dataset_files,
    read_corpus,
    read_documents,
    read_json_lines,
    read_passages,
    read_text,
    read_token_stream,
)
from mega_schema.dataset.indexed_dataset import DatasetInfo, IndexedWriter
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer.tokenizer import TokenizerIdentity


def make_identity(vocab=50, content="0"):
    return TokenizerIdentity("NullTokenizer", vocab, 0, None, None, content * 64)


@pytest.fixture
def dataset(tmp_path):
    """A function that writes documents, each a list of sequences, and returns the prefix."""

    def write(documents, info=None, name="held.out"):
        with IndexedWriter(tmp_path / name, "uint16", info) as writer:
            for sequences in documents:
                for sequence in sequences:
                    writer.add(sequence)
                writer.end_document()
        return tmp_path / name

    return write


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", r"t\.jsonl:2: not JSON"),
        ('"text"', r"t\.jsonl:2: not a JSON object: found str"),
        ('{"body": "x", "id": 1}', r"t\.jsonl:2: no key 'text': found body, id, wanted text"),
        ("{}", r"t\.jsonl:2: no key 'text': found an empty object"),
        ('{"text": 5}', r"t\.jsonl:2 text: not text: found int, wanted a string"),
        ('{"text": "\\ud800"}', r"t\.jsonl:2: not JSON"),
    ],
)
def test_a_line_without_text_is_an_error_that_names_file_and_line(tmp_path, line, message):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(FormatError, match=message):
        read_json_lines(path, "text")


def test_a_byte_order_mark_at_the_start_of_a_file_is_not_part_of_its_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "\xef\xbb\xbftwo"}\r\n')
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone two\n")
    assert read_json_lines(tmp_path / "a.jsonl", "text") == [(1, "one"), (2, "\ufefftwo")]
    assert read_text(tmp_path / "a.txt") == "one two\n"
    assert [text for _, text in read_passages(tmp_path / "a.txt", "text")] == ["one two"]


@pytest.mark.parametrize("name", ["wiki.jsonl", "wiki.json.gz"])
def test_json_lines_are_no_word_level_corpus(tmp_path, name):
    # their keys and quotes were words of the perplexity
    with pytest.raises(
        FormatError, match=r"wiki\.json.*: JSON lines, not a text .*hint: mega-eval perplexity"
    ):
        read_corpus(tmp_path / name)
    (tmp_path / "wiki.tokens").write_text(" = A = \n")
    assert read_corpus(tmp_path / "wiki.tokens") == " = A = \n"


def test_a_passage_is_a_stripped_line_of_a_text_file_or_the_text_of_a_json_line(tmp_path):
    (tmp_path / "p.txt").write_text("\n one two \n\nthree\n")
    (tmp_path / "p.jsonl").write_text('{"body": " one two "}\n')
    assert read_passages(tmp_path / "p.txt", "body") == [
        (f"{tmp_path}/p.txt:2", "one two"),
        (f"{tmp_path}/p.txt:4", "three"),
    ]
    assert read_passages(tmp_path / "p.jsonl", "body") == [(f"{tmp_path}/p.jsonl:1", " one two ")]


def test_a_text_file_is_one_document_and_several_files_follow_each_other(tmp_path, words, dataset):
    (tmp_path / "a.txt").write_text("a b\n\nc\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "d"}\n{"text": "e f"}\n'))
    (tmp_path / "c.md.zst").write_bytes(zstandard.compress(b"g h"))
    paths = [tmp_path / "a.txt", tmp_path / "b.jsonl.gz", tmp_path / "c.md.zst", dataset([[[1, 2]]])]
    documents = read_documents(paths, "text", words)
    assert documents.texts == ["a b\n\nc\n", "d", "e f", "g h", "a b"]
    assert [words.decode(ids) for ids in documents.tokens] == ["a b c", "d", "e f", "g h", "a b"]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_a_damaged_or_truncated_compressed_file_is_an_error(tmp_path, compress):
    path = tmp_path / ("t.txt.gz" if compress is gzip.compress else "t.txt.zst")
    content = compress(bytes(range(32, 127)) * 9)
    path.write_bytes(content[:-3])
    with pytest.raises(FormatError, match=r"t\.txt\.\w+: .*truncated"):
        read_text(path)
    path.write_bytes(b"no frame at all")
    with pytest.raises(FormatError, match=r"t\.txt\.\w+: damaged"):
        read_text(path)


def test_without_its_library_a_zst_file_is_an_error_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "t.zst").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"t\.zst: zstandard is not installed; hint: .*mega-eval\[zst\]"):
        read_text(tmp_path / "t.zst")


def test_blank_lines_are_passed_over_and_line_numbers_are_the_files(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'\n{"text": "a"}\r\n\n{"text": "b"}')
    assert read_json_lines(path, "text") == [(2, "a"), (4, "b")]


@pytest.mark.parametrize("read", [lambda path: read_json_lines(path, "text"), read_text, list_data_files])
def test_a_missing_file_and_a_folder_are_errors(tmp_path, read):
    with pytest.raises(FormatError, match=r"none\.txt: no such file"):
        read(tmp_path / "none.txt")
    with pytest.raises(FormatError, match="is a folder"):
        read(tmp_path)


@pytest.mark.parametrize("read", [lambda path: read_json_lines(path, "text"), read_text])
def test_an_empty_file_is_an_error(tmp_path, read):
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(FormatError, match="empty: no "):
        read(tmp_path / "empty")


def test_text_that_is_not_utf8_is_an_error_that_says_where(tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(
        FormatError, match="latin:1: not UTF-8: found byte 0xe9 at column 4, .*; hint: iconv -f lat"
    ):
        read_text(tmp_path / "latin")


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"\x1f\x8b\x08\x00", "it is compressed: mv {path} {path}.gz"),
        (b"\x28\xb5\x2f\xfd\x00\xff", "it is compressed: mv {path} {path}.zst"),
        ("één\n".encode("utf-16"), "iconv -f utf-16 -t utf-8 {path}"),
        (b'{"text": "\xe9"}\n\x00', "it is a binary file, not text"),
    ],
)
def test_a_binary_file_as_json_lines_is_told_from_damaged_json(tmp_path, content, hint):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * (content[:1] == b"{") + content)
    for read in (lambda: read_json_lines(path, "text"), lambda: read_text(path)):
        with pytest.raises(
            FormatError, match=r"t\.jsonl:[12]: not UTF-8: found byte 0x.. at column "
        ) as error:
            read()
        assert str(error.value).endswith(f"; hint: {hint.format(path=path)}")


def test_line_ends_of_a_text_stay_as_they_are(tmp_path):
    (tmp_path / "t").write_bytes(b"a \r\n b\n")
    assert read_text(tmp_path / "t") == "a \r\n b\n"


def test_documents_without_tokens_are_left_out_and_counted(tmp_path, words):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "a b"}\n{"text": ""}\n{"text": "c"}\n')
    documents = read_documents([path], "text", words)
    assert (documents.texts, documents.empty) == (["a b", "c"], 1)
    assert [ids.tolist() for ids in documents.tokens] == [[1, 2], [3]]


def test_a_file_of_empty_documents_is_an_error(tmp_path, words):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": ""}\n')
    with pytest.raises(FormatError, match=r"t\.jsonl: no tokens in any document"):
        read_documents([path], "text", words)


def test_a_dataset_gives_its_documents_whole_and_without_their_ends(dataset, words):
    words.encode("a b c d e")
    prefix = dataset([[[1, 2], [3, 0]], [], [[4, 5]]], DatasetInfo(words.identity))
    documents = read_documents([prefix], "text", words)
    assert (documents.texts, documents.empty) == (["a b c", "d e"], 1)
    assert read_token_stream(prefix, words.identity).tolist() == [1, 2, 3, 0, 4, 5, 0]


def test_a_dataset_of_another_tokenizer_is_refused(dataset, words):
    prefix = dataset([[[1, 2]]], DatasetInfo(make_identity(content="f")))
    with pytest.raises(FormatError, match=r"held\.out: tokenizer of the dataset is not the model's"):
        read_documents([prefix], "text", words)
    with pytest.raises(FormatError, match=r"held\.out: tokenizer of the dataset is not the model's"):
        read_token_stream(prefix, words.identity)


def test_a_dataset_that_names_no_tokenizer_is_read_with_a_warning(dataset, words, caplog):
    words.encode("a b")
    assert read_documents([dataset([[[1, 2]]])], "text", words).texts == ["a b"]
    assert "does not record its tokenizer" in caplog.text


def test_ids_outside_the_vocabulary_are_an_error(dataset):
    prefix = dataset([[[1, 2]], [[3, 60]]])
    with pytest.raises(FormatError, match="ids of document 1 do not fit .*found 3 to 60, wanted 0 to 49"):
        read_token_stream(prefix, make_identity())


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_one_file_of_a_dataset_is_an_error_with_the_prefix_as_hint(dataset, suffix):
    prefix = dataset([[[1, 2]]])
    path = prefix.with_name(prefix.name + suffix)
    with pytest.raises(FormatError, match=f"one file of an indexed dataset; hint: --data {prefix}$"):
        list_data_files(path)


def test_a_dataset_is_two_files_and_a_missing_one_is_an_error(dataset, tmp_path):
    prefix = dataset([[[1, 2]]])
    assert [path.name for path in list_data_files(prefix)] == ["held.out.bin", "held.out.idx"]
    with pytest.raises(FormatError, match=r"none: no such indexed dataset: wanted .*none\.idx"):
        list_dataset_files(tmp_path / "none")


def test_a_dataset_too_short_to_count_is_an_error(dataset):
    with pytest.raises(FormatError, match="too short to count pairs in: found 0 tokens"):
        read_token_stream(dataset([[]]), make_identity())
