"""The sample index equals Megatron's blends, and is built once and cached."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from mega_model.distributed.mesh import Mesh
from mega_schema.dataset.dataset_info import DatasetInfo, sibling
from mega_schema.dataset.indexed_dataset import IndexedWriter
from mega_schema.errors import ConfigError, FormatError, MegaError
from mega_schema.tokenizer.tokenizer import open_tokenizer
from mega_train.config import DataConfig
from mega_train.data.array_cache import VALUES_FILE, Arrays, load_or_build
from mega_train.data.blended_dataset import BlendedDataset
from mega_train.data.cache_folders import CACHE_FOLDER, cache_folders
from mega_train.data.dataloaders import build_data_splits
from mega_train.data.datasets import Datasets
from mega_train.data.sample_index import SampleIndexSpec
from mega_train.resolve import ResolvedConfig


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


def _described_corpus(prefix: Path, vocabulary: int = 33) -> str:
    """A corpus of 120 documents that says its tokenizer."""
    tokenizer = open_tokenizer("NullTokenizer", vocab_size=vocabulary - 1)
    with IndexedWriter(prefix, np.int32, info=DatasetInfo(tokenizer=tokenizer.identity)) as out:
        for number in range(120):
            out.add(np.arange(number % 20 + 3))
            out.end_document()
    tokenizer.save(sibling(prefix, ".tokenizer"))
    return str(prefix)


def _stream(recipe: SampleIndexSpec, folder: Path) -> BlendedDataset[np.ndarray]:
    return recipe.open_dataset(load_or_build([folder], "some", recipe.cache_key(), recipe.write))


def test_blends_are_megatrons_to_the_token(
    golden: Path, oracle: Callable[[str], Any], tmp_path: Path
) -> None:
    cases = oracle("blending/end_to_end.json")
    assert len(cases) == 4
    for case in cases:
        prefixes, weights = case["blend"]
        words = [str(golden / "indexed" / prefix) for prefix in prefixes]
        if weights:
            words = [word for pair in zip(map(str, weights), words, strict=True) for word in pair]
        corpora = Datasets.open(DataConfig(path=tuple(words), split="80,20,0"))
        assert case["out"][2] is None
        assert not corpora.spec.test
        uses = (corpora.spec.training, *corpora.spec.validation)
        for source, size, out in zip(uses, case["sizes"], case["out"], strict=False):
            recipe = SampleIndexSpec.from_source(
                source, corpora, length=8, samples=size, seed=1234, renormalize=case["renormalize"]
            )
            stream = _stream(recipe, tmp_path)
            assert len(stream) == out["length"]
            assert [stream[i][:8].tolist() for i in range(3)] == out["first_tokens"]
            if out["mid_lengths"]:
                assert [len(part) for part in stream.parts] == out["mid_lengths"]
                assert stream.order is not None
                corpus, number = stream.order
                assert corpus.tolist() == out["dataset_index"]
                assert number.tolist() == out["sample_index"]


def _write_corpus(prefix: Path, lengths: list[int], first: int = 0) -> str:
    with IndexedWriter(prefix, np.int32) as out:
        for length in lengths:
            out.add(np.arange(first, first + length))
            out.end_document()
            first += length
    return str(prefix)


def _corpora(folder: Path, *words: str) -> Datasets:
    for name, lengths in (("a", [9, 4, 12]), ("b", [30, 8, 5]), ("none", [0])):
        if not (folder / f"{name}.idx").exists():
            _write_corpus(folder / name, lengths)
    return Datasets.open(DataConfig(path=words, split="1,0,0"))


def _recipe(corpora: Datasets, **values: Any) -> SampleIndexSpec:
    return SampleIndexSpec.from_source(
        corpora.spec.training, corpora, **{"length": 4, "samples": 9, "seed": 5, **values}
    )


def test_a_blend_may_want_more_of_a_part_than_was_made(tmp_path: Path) -> None:
    """Rounded up a part at a time, the counts add up to more than their shares of the sum."""
    words = [f"0.01 {_write_corpus(tmp_path / f'small{i}', [40], 1000 * i)}" for i in range(1, 60)]
    words.append(f"0.41 {_write_corpus(tmp_path / 'large', [41])}")
    corpora = Datasets.open(DataConfig(path=tuple(" ".join(words).split()), split="1,0,0"))
    stream = _stream(_recipe(corpora, samples=10), tmp_path)
    assert stream.order is not None
    wanted = np.bincount(stream.order[0])[-1]
    assert wanted > len(stream.parts[-1]), "or the case is none"
    assert all(len(stream[i]) == 5 for i in range(len(stream)))


def test_a_dataset_with_a_weight_is_a_blend_of_one(tmp_path: Path) -> None:
    """Of which half a percent more is made, as of any."""
    alone, weighed = (
        _stream(_recipe(_corpora(tmp_path, *words), samples=samples), tmp_path)
        for words, samples in (((str(tmp_path / "a"),), 10), (("2", str(tmp_path / "a")), 9))
    )
    assert alone.order is None
    assert weighed.order is not None
    assert [weighed[i].tolist() for i in range(9)] == [alone[i].tolist() for i in range(9)]


def test_a_dataset_alone_in_its_use_is_no_blend_whatever_its_weight(tmp_path: Path) -> None:
    name = str(tmp_path / "a")
    _corpora(tmp_path, name)  # writes it
    training = (
        Datasets.open(DataConfig(train_path=("2", name))),
        Datasets.open(DataConfig(train_path=(name,))),
    )
    weighed, alone = (_recipe(corpora, samples=200) for corpora in training)
    assert weighed.blend is None
    assert weighed.cache_key() == alone.cache_key()


def test_a_tie_between_shares_is_decided_by_megatrons_last_bits(tmp_path: Path) -> None:
    """It divides the weights by their sum twice; divided once, the first of these has sample 351."""
    words = [f"{weight} {tmp_path / 'b'}" for weight in (0.5, 0.01, 1, 0.5, 1, 0.5)]
    recipe = _recipe(_corpora(tmp_path, *" ".join(words).split()), samples=400)
    mixed = _stream(recipe, tmp_path).order
    assert mixed is not None
    assert mixed[0][351:354].tolist() == [2, 4, 0]


def test_a_blend_is_as_long_as_the_rule_says(tmp_path: Path) -> None:
    words = ("0.1", str(tmp_path / "a"), "0.9", str(tmp_path / "b"))
    _corpora(tmp_path, *words)  # writes them
    for rule, length in (("exact", 1 + 9), ("surplus", 2 + 10)):
        data = DataConfig(path=words, split="1,0,0", blend_rule=rule)
        mixture = _recipe(Datasets.open(data), samples=10).blend
        assert mixture is not None
        assert mixture.size == length, rule


def test_a_part_without_a_sample_is_named(tmp_path: Path) -> None:
    words = ("1", str(tmp_path / "a"), "1", str(tmp_path / "none"))
    with pytest.raises(ConfigError) as caught:
        _recipe(_corpora(tmp_path, *words))
    assert str(caught.value) == (
        f"--data-path: the training split of {tmp_path / 'none'} contains too few tokens for one sample: "
        "found 0 tokens in 1 sequences, wanted at least 2; hint: a shorter --seq-length, another --split "
        "or more data; for validation also --eval-iters 0"
    )
    with pytest.raises(
        ConfigError, match=r"found 0 tokens in 1 sequences; as few in 2 of 3 datasets, wanted"
    ):
        _recipe(_corpora(tmp_path, *words, "3", str(tmp_path / "none")))


def test_the_key_covers_whatever_changes_an_index(tmp_path: Path) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    corpora = _corpora(tmp_path, "1", a, "1", b)
    base = _recipe(corpora)
    different = [
        base,
        _recipe(corpora, length=5),
        _recipe(corpora, seed=6),
        _recipe(corpora, samples=90),
        _recipe(corpora, samples=10, renormalize=True),
        _recipe(_corpora(tmp_path, "1", b, "1", a)),
        _recipe(_corpora(tmp_path, "1", a, "2", b)),
        _recipe(_corpora(tmp_path, a, b)),
        _recipe(_corpora(tmp_path, a)),
    ]
    texts = {json.dumps(recipe.cache_key()) for recipe in different}
    assert len(texts) == len(different)
    assert _recipe(_corpora(tmp_path, "1", a, "1", b)).cache_key() == base.cache_key()
    _write_corpus(tmp_path / "a", [9, 5, 11])  # as many tokens, otherwise cut
    assert _recipe(_corpora(tmp_path, "1", a, "1", b)).cache_key() != base.cache_key()


def _make(folder: Path) -> None:
    np.save(folder / "numbers.npy", np.arange(5))
    np.save(folder / "none.npy", np.empty(0, np.int16))


def _never(folder: Path) -> None:
    raise AssertionError("made again")


def test_what_was_made_is_found_and_is_mapped(tmp_path: Path) -> None:
    first = load_or_build([tmp_path], "x", {"a": 1}, _make)
    repeat = load_or_build([tmp_path], "x", {"a": 1}, _never)
    for arrays in (first, repeat):
        assert arrays["numbers"].tolist() == [0, 1, 2, 3, 4]
        assert arrays["none"].tolist() == []
        assert isinstance(arrays["numbers"].base, np.memmap)
    (folder,) = tmp_path.glob("x-*")
    assert json.loads((folder / VALUES_FILE).read_text()) == {"a": 1}
    with pytest.raises(AssertionError, match="made again"):
        load_or_build([tmp_path], "x", {"a": 2}, _never)


def test_one_that_dies_while_it_makes_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    def dies(folder: Path) -> None:
        _make(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_or_build([tmp_path], "x", {}, dies)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    (tmp_path / ".x-dead.1234.partial").mkdir()  # as a killed one leaves it
    load_or_build([tmp_path], "x", {}, _make)
    assert sorted(path.name[:2] for path in tmp_path.iterdir()) == [".l", "x-"]


@pytest.mark.parametrize("size", [0, 100, 140])
def test_what_is_damaged_is_made_again(tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture) -> None:
    load_or_build([tmp_path], "x", {}, _make)
    (file,) = tmp_path.glob("x-*/numbers.npy")
    with file.open("r+b") as cut:
        cut.truncate(size)
    with caplog.at_level(logging.WARNING, "mega.train"):
        assert load_or_build([tmp_path], "x", {}, _make)["numbers"].tolist() == [0, 1, 2, 3, 4]
    assert "is damaged and is rebuilt" in caplog.text


def test_of_many_that_want_it_one_makes_it(tmp_path: Path) -> None:
    built_paths: list[Path] = []

    def make(folder: Path) -> None:
        built_paths.append(folder)
        _make(folder)

    def want(_: int) -> Arrays:
        return load_or_build([tmp_path], "x", {}, make)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(want, range(8)))
    assert len(built_paths) == 1
    assert all(arrays["numbers"].tolist() == [0, 1, 2, 3, 4] for arrays in results)


def test_it_goes_where_it_can_be_written_and_is_found_anywhere(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folders = [tmp_path / "file/below", tmp_path / "second", tmp_path / "third"]
    load_or_build(folders, "x", {}, _make)
    assert (tmp_path / "second").is_dir()
    load_or_build([tmp_path / "third", tmp_path / "second"], "x", {}, _never)
    with pytest.raises(MegaError) as caught:
        load_or_build(folders[:1], "x", {}, _make)
    assert str(caught.value) == (
        f"--data-cache-path: the sample order cannot be cached: found {folders[0]}: Not a directory, "
        "wanted a folder that can be written to; hint: --data-cache-path DIR"
    )


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        _make(folder)
        raise OSError(28, os.strerror(28))

    with pytest.raises(MegaError, match="No space left on device"):
        load_or_build([tmp_path], "x", {}, full)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_folder_of_another_user_is_shared_as_far_as_it_lets_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuses_writing(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(13, os.strerror(13), str(path))
        return opened(path, flags, *mode)

    (tmp_path / ".lock").touch()
    monkeypatch.setattr(os, "open", refuses_writing)
    assert load_or_build([tmp_path], "x", {}, _make)["numbers"].tolist() == [0, 1, 2, 3, 4]


def test_a_dataset_may_stand_in_a_blend_more_than_once_but_not_more_often_than_there_are_numbers(
    resolve_config: ResolveConfig, tmp_path: Path
) -> None:
    name = _described_corpus(tmp_path / "one")
    plan = resolve_config(evaluation__eval_iters=0)
    config = plan.data_splits_config(iteration=0, consumed_samples=0)
    twice = Datasets.open(DataConfig(path=(name, name)))
    assert len(build_data_splits(config, twice, Mesh()).training) == plan.train_samples
    line = r"^--data-path: too many datasets: found 32768, wanted at most 32767$"
    with pytest.raises(ConfigError, match=line):
        build_data_splits(config, Datasets.open(DataConfig(path=(name,) * 32768)), Mesh())


def test_datasets_that_cannot_be_opened_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    names = [_write_corpus(tmp_path / f"c{i}", [9]) for i in range(20)]
    with pytest.raises(FormatError) as caught:
        Datasets.open(DataConfig(path=(*names, str(tmp_path / "gone"))))
    near = ", ".join(names[number] for number in (0, 1, 10))
    hint = f"datasets in {tmp_path}: {near} and 17 more"
    assert str(caught.value) == f"{tmp_path / 'gone.idx'}: no such file; hint: {hint}"
    sibling(tmp_path / "c3", ".bin").unlink()
    with pytest.raises(FormatError) as caught:
        Datasets.open(DataConfig(path=(*names, str(tmp_path / "gone"))))
    assert str(caught.value) == (
        f"{tmp_path / 'c3.bin'}: no such file; of 21 datasets 2 cannot be opened; "
        "hint: copy it to the folder of c3.idx, or preprocess the text again"
    )
    with pytest.raises(ConfigError, match="--num-dataset-builder-threads: not a number of threads: found 0"):
        Datasets.open(DataConfig(path=tuple(names), threads=0))


def test_datasets_of_two_tokenizers_are_refused(tmp_path: Path) -> None:
    first, second = _described_corpus(tmp_path / "one"), _described_corpus(tmp_path / "other", 50)
    with pytest.raises(FormatError) as caught:
        Datasets.open(DataConfig(path=(first, second)))
    assert str(caught.value).startswith(f"{second}: has another tokenizer than {first}: found ")
    alike = Datasets.open(DataConfig(path=(_write_corpus(tmp_path / "undescribed", [9]), first)))
    assert alike.identity is not None
    assert alike.tokenizer == tmp_path / "one.tokenizer"


def test_a_run_keeps_its_order_beside_the_data_and_later_runs_find_it(
    resolve_config: ResolveConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpora = Datasets.open(DataConfig(path=(_described_corpus(tmp_path / "one"),)))
    config = resolve_config(evaluation__eval_iters=1).data_splits_config(iteration=0, consumed_samples=0)
    splits = build_data_splits(config, corpora, Mesh())
    names = sorted(path.name.partition("-")[0] for path in (tmp_path / CACHE_FOLDER).glob("*-*"))
    assert names == ["training", "validation"], "of 120 documents 0.1 percent are none to test on"
    assert (list(splits.validation), splits.test) == (["validation"], {})
    monkeypatch.setattr(SampleIndexSpec, "write", lambda self, folder: _never(folder))
    repeat = build_data_splits(config, corpora, Mesh())
    assert repeat.training[3].tolist() == splits.training[3].tolist()


def test_where_an_order_is_kept(tmp_path: Path) -> None:
    corpora = Datasets.open(DataConfig(path=(_described_corpus(tmp_path / "one"),)))
    beside_data, run, temporary = cache_folders(DataConfig(), Path("runs/x"), corpora)
    assert (beside_data, run) == (tmp_path / CACHE_FOLDER, Path("runs/x") / CACHE_FOLDER)
    assert str(os.getuid()) in temporary.name
    assert cache_folders(DataConfig(cache=Path("elsewhere")), None, corpora) == [Path("elsewhere")]
