"""Data equals Megatron Core's for random cases: files, samples, blends, masks, schedules."""

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
from mega_train.data.blended_dataset import BlendedDataset
from mega_train.data.datasets import Datasets
from mega_train.data.gpt_dataset import GPTDataset, build_sample_index, plan_epochs
from mega_train.data.sample_index import SampleIndexSpec
from mega_train.data.splits import split_ranges
from mega_train.engine.forward_step import IGNORED, split_batch
from mega_train.optim.loss_scaler import DynamicLossScaler
from mega_train.resolve.batch import batch_size_schedule, batch_sizes
from mega_train.schedules.lr import LRSchedule, WeightDecaySchedule
from tests.megatron_core import reference_process
from tests.megatron_core.data_cases import Case, draw_cases


class Answers:
    """The cases, and what Megatron Core made of each."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cases = folder, draw_cases(folder)
        (folder / "cases.json").write_text(json.dumps(self.cases))
        reference_process.run("tests.megatron_core.data:answer", folder)

    def of_kind(self, kind: str) -> Iterator[tuple[Any, Any, dict[str, np.ndarray]]]:
        """Case, what was told of it, and its arrays."""
        answers_json, arrays = json.loads((self.folder / f"{kind}.json").read_text()), {}
        with np.load(self.folder / f"{kind}.npz") as file:
            for name in file.files:
                number, _, rest = name.partition("/")
                arrays.setdefault(int(number), {})[rest] = file[name]
        for number, case in enumerate(self.cases[kind]):
            yield case, answers_json[number], arrays.get(number, {})


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return Answers(tmp_path_factory.mktemp("data"))


def _assert_same_files(ours: Path, theirs: Path) -> None:
    for end in (".bin", ".idx"):
        assert Path(f"{ours}{end}").read_bytes() == Path(f"{theirs}{end}").read_bytes(), (ours, theirs)


def test_datasets_are_written_byte_for_byte_as_theirs(answers: Answers) -> None:
    for case, _, _ in answers.of_kind("written"):
        _assert_same_files(answers.folder / case["ours"], answers.folder / case["theirs"])


def test_merged_datasets_are_theirs_byte_for_byte(answers: Answers, tmp_path: Path) -> None:
    for number, (case, _, _) in enumerate(answers.of_kind("merged")):
        parts = [open_dataset(answers.folder / part, multimodal=case["multimodal"]) for part in case["parts"]]
        merge_datasets(parts, tmp_path / str(number))
        _assert_same_files(tmp_path / str(number), answers.folder / case["theirs"])


def test_their_reader_finds_in_our_files_what_ours_finds(answers: Answers) -> None:
    for case, expected, arrays in answers.of_kind("read"):
        data = open_dataset(answers.folder / case["ours"], multimodal=case["multimodal"])
        assert (data.dtype.name, len(data)) == (expected["dtype"], expected["sequences"])
        for name in ("lengths", "documents", "pointers", *(["modes"] if case["multimodal"] else [])):
            np.testing.assert_array_equal(getattr(data, name), arrays[name], f"{case['ours']} {name}")
        for number, (sequence, offset, length) in enumerate(case["pieces"]):
            ours = data.read(sequence, offset, length, copy=not case["mmap"])
            np.testing.assert_array_equal(ours, arrays[f"piece{number}"])


def test_ids_have_the_dtype_that_theirs_have(answers: Answers) -> None:
    for vocabulary, expected, _ in answers.of_kind("dtypes"):
        assert smallest_dtype(vocabulary).name == expected


def test_the_samples_of_a_dataset_are_theirs(answers: Answers) -> None:
    compared, short = 0, 0
    for case, expected, arrays in answers.of_kind("samples"):
        if expected is None:
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
        assert len(samples) == expected["count"]
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
    for case, expected, arrays in answers.of_kind("cuts"):
        if not expected:
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
    for case, _, arrays in answers.of_kind("greedy"):
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
    for case, expected, arrays in answers.of_kind("blends"):
        if isinstance(expected, str) and "oversamples the contributing datasets" in expected:
            list(_streams(case, tmp_path))  # ours begins such a part again
            continue
        if isinstance(expected, str) or any(use is not None and use["count"] == 0 for use in expected):
            with pytest.raises(ConfigError, match="too few tokens for one sample"):
                list(_streams(case, tmp_path))
            continue
        for use, (stream, their) in enumerate(zip(_streams(case, tmp_path), expected, strict=True)):
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


def _streams(case: Case, folder: Path) -> Iterator[BlendedDataset[np.ndarray] | None]:
    """Of training, validation and test, made of the words that the case says."""
    words = [tuple(several) for several in case["words"]]
    by_use = dict(zip(("train_path", "valid_path", "test_path"), words, strict=False))
    arguments = {"path": words[0], "split": case["split"]} if case["split"] else by_use
    corpora = Datasets.open(DataConfig(**arguments, blend_rule="exact"))
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
    for words, expected, _ in answers.of_kind("words"):
        try:
            training = parse_data_spec(DataConfig(path=tuple(words))).training
        except ConfigError:  # they assert; or a number is taken for a dataset, and there is none
            assert expected is None or (
                expected[1] is None and {"0.3", "1", "1e-3", "2"} & set(expected[0])
            ), words
            refused += 1
            continue
        weights = None if training.weights is None else list(training.weights)
        assert [[str(part.prefix) for part in training.parts], weights] == expected, words
    assert 0 < refused < len(answers.cases["words"]) - 20


def test_splits_are_theirs(answers: Answers) -> None:
    refused = 0
    for case, expected, _ in answers.of_kind("splits"):
        if expected is None:
            with pytest.raises(ConfigError):
                split_ranges(case["split"], case["sequences"])
            refused += 1
            continue
        for ours, theirs in zip(split_ranges(case["split"], case["sequences"]), expected, strict=True):
            assert ours[0] == ours[1] if theirs is None else list(ours) == theirs, case
    assert refused


def test_masks_and_positions_are_theirs(answers: Answers) -> None:
    for case, _, arrays in answers.of_kind("masks"):
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
    for case, _, arrays in answers.of_kind("courses"):
        options, group = case["options"], case["group"]
        rate = LRSchedule(
            peak=options["max_lr"],
            least=options["min_lr"],
            warmup=options["lr_warmup_steps"],
            decay=options["lr_decay_steps"],
            style=options["lr_decay_style"],
            initial=options["init_lr"],
            anneal=options["wsd_decay_steps"] or 0,
            anneal_style=options["lr_wsd_decay_style"],
        )
        ends = replace(rate, peak=group["max_lr"], least=group["min_lr"])
        decay = WeightDecaySchedule(
            start=options["start_wd"],
            end=options["end_wd"],
            samples=options["wd_incr_steps"],
            style=options["wd_incr_style"],
        )
        for samples, (lr, wd, ends_lr, ends_wd) in zip(case["at"], arrays["values"].tolist(), strict=True):
            actual = (
                rate.lr_at(samples),
                decay.value_at(samples),
                ends.lr_at(samples),
                decay.value_at(samples) * group["wd_mult"],
            )
            assert actual == (lr, wd, ends_lr, ends_wd), (samples, case)


def test_the_sizes_of_steps_are_theirs(answers: Answers) -> None:
    """What theirs asserts or divides by zero at ours refuses; also a size that a short ramp passes over."""
    compared, refused = 0, 0
    for case, expected, arrays in answers.of_kind("batches"):
        ramp, samples_per_round = case["ramp"] and tuple(case["ramp"]), case["micro"] * case["dp"]
        batch = BatchConfig(
            micro=case["micro"], global_samples=case["full"], rampup=ramp, decrease=case["decrease"]
        )
        run = RunConfig(batch=batch, train=TrainConfig(samples=10**6))
        ladder = range(ramp[0], case["full"], ramp[1]) if ramp else ()
        uneven = not case["decrease"] and any(size % samples_per_round for size in ladder)
        if isinstance(expected, str) or uneven or not arrays["rows"][:, 1].all():
            with pytest.raises(ConfigError):
                batch_size_schedule(run, batch_sizes(run, case["dp"])[1], samples_per_round)
            refused += 1
            continue
        sizes, consumed = batch_size_schedule(run, batch_sizes(run, case["dp"])[1], samples_per_round), 0
        for samples, size, micros in arrays["rows"].tolist():
            assert (consumed, sizes.size_at(consumed), sizes.size_at(consumed) // samples_per_round) == (
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
    for case, _, arrays in answers.of_kind("scales"):
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
