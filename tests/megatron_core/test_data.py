"""Data is Megatron Core's number for number: files, samples, blends, masks, schedules, over drawn cases."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega_data.merge import merge_datasets
from mega_schema.dataset.indexed_dataset import open_dataset, smallest_dtype
from mega_schema.errors import ConfigError
from mega_train.config import BatchConfig, DataConfig, RunConfig, TrainConfig
from mega_train.data.blend import blend_blocks, normalize
from mega_train.data.blend_spec import parse_data_spec
from mega_train.data.datasets import Datasets
from mega_train.data.gpt_dataset import GPTDataset, build_sample_index, plan_epochs
from mega_train.data.sample_index import BlendedDataset, SampleIndexSpec
from mega_train.data.splits import split_ranges
from mega_train.engine.forward_step import IGNORED, split_batch
from mega_train.optim.loss_scaler import DynamicLossScaler
from mega_train.resolve.batch import batch_size_schedule, batch_sizes
from mega_train.schedules.lr import LRSchedule, WeightDecaySchedule
from tests.megatron_core import reference_process
from tests.megatron_core.data_cases import Case, drawn


class Answers:
    """The cases, and what Megatron Core made of each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cases = folder, drawn(folder)
        (folder / "cases.json").write_text(json.dumps(self.cases))
        reference_process.run("tests.megatron_core.data:answer", folder)

    def of(self, kind: str) -> Iterator[tuple[Any, Any, dict[str, np.ndarray]]]:
        """Case, what was told of it, and its arrays."""
        told, arrays = json.loads((self.folder / f"{kind}.json").read_text()), {}
        with np.load(self.folder / f"{kind}.npz") as file:
            for name in file.files:
                number, _, rest = name.partition("/")
                arrays.setdefault(int(number), {})[rest] = file[name]
        for number, case in enumerate(self.cases[kind]):
            yield case, told[number], arrays.get(number, {})


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return Answers(tmp_path_factory.mktemp("data"))


def _same(ours: Path, other: Path) -> None:
    for end in (".bin", ".idx"):
        assert Path(f"{ours}{end}").read_bytes() == Path(f"{other}{end}").read_bytes(), (ours, other)


def test_datasets_are_written_byte_for_byte_as_theirs(answers: Answers) -> None:
    for case, _, _ in answers.of("written"):
        _same(answers.folder / case["ours"], answers.folder / case["theirs"])


def test_merged_datasets_are_theirs_byte_for_byte(answers: Answers, tmp_path: Path) -> None:
    for number, (case, _, _) in enumerate(answers.of("merged")):
        parts = [open_dataset(answers.folder / part, multimodal=case["multimodal"]) for part in case["parts"]]
        merge_datasets(parts, tmp_path / str(number))
        _same(tmp_path / str(number), answers.folder / case["theirs"])


def test_their_reader_finds_in_our_files_what_ours_finds(answers: Answers) -> None:
    for case, told, arrays in answers.of("read"):
        data = open_dataset(answers.folder / case["ours"], multimodal=case["multimodal"])
        assert (data.dtype.name, len(data)) == (told["dtype"], told["sequences"])
        for name in ("lengths", "documents", "pointers", *(["modes"] if case["multimodal"] else [])):
            np.testing.assert_array_equal(getattr(data, name), arrays[name], f"{case['ours']} {name}")
        for number, (sequence, offset, length) in enumerate(case["pieces"]):
            ours = data.read(sequence, offset, length, copy=not case["mmap"])
            np.testing.assert_array_equal(ours, arrays[f"piece{number}"])


def test_ids_have_the_dtype_that_theirs_have(answers: Answers) -> None:
    for vocabulary, told, _ in answers.of("dtypes"):
        assert smallest_dtype(vocabulary).name == told


def test_the_samples_of_a_dataset_are_theirs(answers: Answers) -> None:
    compared, short = 0, 0
    for case, told, arrays in answers.of("samples"):
        if told is None:
            continue
        corpus, keep = (
            open_dataset(answers.folder / case["prefix"]),
            not case["drop"] and case["use"] == "valid",
        )
        numbers = np.arange(*case["range"], dtype=np.int32)
        todo = plan_epochs(
            int(corpus.lengths[numbers].sum()),
            length=case["length"],
            samples=case["samples"],
            extra=int(case["extra"]),
            keep_partial=keep,
        )
        assert todo is not None
        index = build_sample_index(corpus.lengths, numbers, todo, case["seed"])
        for name in ("document", "sample", "shuffle"):
            np.testing.assert_array_equal(getattr(index, name), arrays[name], f"{name} of {case}")
        samples = GPTDataset(corpus, index, extra=int(case["extra"]), copy=not case["mmap"])
        assert len(samples) == told["count"]
        for number in (number for number in case["shown"] if number < len(samples)):
            ours, text = samples[number], arrays[f"text{number}"]
            np.testing.assert_array_equal(ours, text[: len(ours)], f"sample {number} of {case}")
            assert (text[len(ours) :] == -1).all()
            short += len(ours) < len(text)
        compared += 1
    assert compared > 350
    assert short, "no sample was padded"


def test_samples_of_documents_of_millions_of_tokens_begin_where_theirs_do(answers: Answers) -> None:
    compared = 0
    for case, told, arrays in answers.of("cuts"):
        if not told:
            continue
        lengths, numbers = np.array(case["lengths"], np.int32), np.array(case["documents"], np.int32)
        tokens, extra = int(lengths[numbers].sum(dtype=np.int64)), int(case["extra"])
        todo = plan_epochs(
            tokens, length=case["length"], samples=None, extra=extra, keep_partial=not case["drop"]
        )
        assert todo is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mega_train.data.gpt_dataset._shuffle", lambda numbers, _: numbers)
            index = build_sample_index(lengths, numbers, todo, 0)
        np.testing.assert_array_equal(index.sample, arrays["sample"], str(case))
        compared += 1
    assert compared > 20


def test_the_choices_of_a_blend_are_theirs(answers: Answers) -> None:
    for case, _, arrays in answers.of("greedy"):
        sizes = np.array(case["weights"], np.int64) if case["all"] else None
        size = sum(case["weights"]) if case["all"] else case["size"]
        blocks = list(blend_blocks(normalize(case["weights"]), size, sizes))
        for place, name in enumerate(("corpus", "number")):
            ours = np.concatenate([block[place] for block in blocks])
            np.testing.assert_array_equal(ours, arrays[name], str(case)[:300])


def test_what_is_read_for_each_use_is_theirs(
    answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(answers.folder)
    for case, told, arrays in answers.of("blends"):
        if isinstance(told, str) and "oversamples the contributing datasets" in told:
            list(_streams(case, tmp_path))  # ours begins such a part again
            continue
        if isinstance(told, str) or any(use is not None and use["count"] == 0 for use in told):
            with pytest.raises(ConfigError, match="too few tokens for one sample"):
                list(_streams(case, tmp_path))
            continue
        for use, (stream, their) in enumerate(zip(_streams(case, tmp_path), told, strict=True)):
            where = f"use {use} of {case}"
            assert (stream is None) == (their is None), where
            if stream is None:
                continue
            assert len(stream) == their["count"], where
            if their["parts"] is not None:
                assert stream.order is not None, where
                assert [len(part) for part in stream.parts] == their["parts"], where
                np.testing.assert_array_equal(stream.order[0], arrays[f"{use}/corpus"], where)
                np.testing.assert_array_equal(stream.order[1], arrays[f"{use}/number"], where)
            for shown in (shown for shown in case["shown"] if shown < len(stream)):
                np.testing.assert_array_equal(stream[shown], arrays[f"{use}/text{shown}"], where)


def _streams(case: Case, folder: Path) -> Iterator[BlendedDataset | None]:
    """Of training, validation and test, made of the words that the case says."""
    words = [tuple(several) for several in case["words"]]
    by_use = dict(zip(("train_path", "valid_path", "test_path"), words, strict=False))
    said = {"path": words[0], "split": case["split"]} if case["split"] else by_use
    corpora = Datasets.open(DataConfig(**said, blend_rule="exact"))
    uses = corpora.spec
    for several, size in zip(((uses.training,), uses.validation, uses.test), case["sizes"], strict=True):
        for source in several:
            recipe = SampleIndexSpec.from_source(
                source, corpora, length=case["length"], samples=size, seed=case["seed"]
            )
            recipe.write(folder)  # over the files of the one before
            names = ("document", "sample", "shuffle", *(["corpus", "number"] if recipe.blend else []))
            yield recipe.open_dataset({name: np.load(folder / f"{name}.npy") for name in names})
        if not several:
            yield None


def test_words_mean_the_blend_that_theirs_means(answers: Answers) -> None:
    refused = 0
    for words, told, _ in answers.of("words"):
        try:
            training = parse_data_spec(DataConfig(path=tuple(words))).training
        except ConfigError:  # they assert; or a number is taken for a dataset, and there is none
            assert told is None or (told[1] is None and {"0.3", "1", "1e-3", "2"} & set(told[0])), words
            refused += 1
            continue
        weights = None if training.weights is None else list(training.weights)
        assert [[str(part.prefix) for part in training.parts], weights] == told, words
    assert 0 < refused < len(answers.cases["words"]) - 20


def test_splits_are_theirs(answers: Answers) -> None:
    refused = 0
    for case, told, _ in answers.of("splits"):
        if told is None:
            with pytest.raises(ConfigError):
                split_ranges(case["split"], case["sequences"])
            refused += 1
            continue
        for ours, other in zip(split_ranges(case["split"], case["sequences"]), told, strict=True):
            assert ours[0] == ours[1] if other is None else list(ours) == other, case
    assert refused


def test_masks_and_positions_are_theirs(answers: Answers) -> None:
    for case, _, arrays in answers.of("masks"):
        data = DataConfig(
            reset_positions=case["reset_positions"],
            reset_attention=case["reset_attention"],
            eod_mask_loss=case["eod_mask_loss"],
        )
        batch = torch.tensor([[*case["tokens"], 1]])
        _, target, position, document = split_batch(batch, data, case["eod"])
        seen = torch.ones(2 * (len(case["tokens"]),), dtype=torch.bool).tril()
        if document is not None:
            seen &= document[0][:, None] == document[0]
        np.testing.assert_array_equal(~seen, arrays["hidden"])
        np.testing.assert_array_equal(position[0], arrays["position"])
        np.testing.assert_array_equal(target[0] != IGNORED, arrays["loss"] == 1)


def test_learning_rate_and_weight_decay_are_theirs_to_the_bit(answers: Answers) -> None:
    for case, _, arrays in answers.of("courses"):
        said, group = case["said"], case["group"]
        rate = LRSchedule(
            peak=said["max_lr"],
            least=said["min_lr"],
            warmup=said["lr_warmup_steps"],
            decay=said["lr_decay_steps"],
            style=said["lr_decay_style"],
            initial=said["init_lr"],
            anneal=said["wsd_decay_steps"] or 0,
            anneal_style=said["lr_wsd_decay_style"],
        )
        ends = replace(rate, peak=group["max_lr"], least=group["min_lr"])
        decay = WeightDecaySchedule(
            start=said["start_wd"],
            end=said["end_wd"],
            samples=said["wd_incr_steps"],
            style=said["wd_incr_style"],
        )
        for samples, (lr, wd, ends_lr, ends_wd) in zip(case["at"], arrays["values"].tolist(), strict=True):
            found = (
                rate.lr_at(samples),
                decay.value_at(samples),
                ends.lr_at(samples),
                decay.value_at(samples) * group["wd_mult"],
            )
            assert found == (lr, wd, ends_lr, ends_wd), (samples, case)


def test_the_sizes_of_steps_are_theirs(answers: Answers) -> None:
    """What theirs asserts or divides by zero at ours refuses; also a size that a short ramp passes over."""
    compared, refused = 0, 0
    for case, told, arrays in answers.of("batches"):
        ramp, each = case["ramp"] and tuple(case["ramp"]), case["micro"] * case["dp"]
        batch = BatchConfig(
            micro=case["micro"], global_samples=case["full"], rampup=ramp, decrease=case["decrease"]
        )
        run = RunConfig(batch=batch, train=TrainConfig(samples=10**6))
        ladder = range(ramp[0], case["full"], ramp[1]) if ramp else ()
        uneven = not case["decrease"] and any(size % each for size in ladder)
        if isinstance(told, str) or uneven or not arrays["rows"][:, 1].all():
            with pytest.raises(ConfigError):
                batch_size_schedule(run, batch_sizes(run, case["dp"])[1], each)
            refused += 1
            continue
        sizes, consumed = batch_size_schedule(run, batch_sizes(run, case["dp"])[1], each), 0
        for samples, size, micros in arrays["rows"].tolist():
            assert (consumed, sizes.size_at(consumed), sizes.size_at(consumed) // each) == (
                samples,
                size,
                micros,
            ), case
            consumed += size
        assert consumed == sizes.samples_after(0, len(arrays["rows"]))
        compared += 1
    assert compared > 50
    assert refused > 20


def test_the_loss_scale_goes_the_way_of_theirs(answers: Answers) -> None:
    for case, _, arrays in answers.of("scales"):
        scale = DynamicLossScaler.from_config(
            TrainConfig(
                fp16=True,
                initial_loss_scale=case["initial"],
                min_loss_scale=case["least"],
                loss_scale_window=case["window"],
                hysteresis=case["hysteresis"],
            )
        )
        for overflow, value in zip(case["overflows"], arrays["scales"].tolist(), strict=True):
            if value == math.inf:  # theirs stays there
                break
            scale.update(overflow=overflow)
            assert scale.value == value, case
