"""Megatron Core's results for generated data cases, written to files by `reference_process`."""

from __future__ import annotations

import contextlib
import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

Case = dict[str, Any]


class Arrays(dict[str, np.ndarray]):
    """Copies: their datasets unmap the files that their views are of."""

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        super().__setitem__(name, np.array(array))


class Tokenizer:
    """What their datasets ask a tokenizer for; one that has no pad has no attribute `pad`."""

    def __init__(self, *, vocab_size: int = 70_000, eod: int = 3, pad: int | None = None) -> None:
        self.vocab_size, self.eod = vocab_size, eod
        self.unique_identifiers = {"vocab_size": vocab_size, "eod": eod}
        if pad is not None:
            self.pad = pad


def answer(folder: Path) -> None:
    """Answer all cases of `cases.json`, kind by kind: arrays in KIND.npz, the rest in KIND.json."""
    kinds = {
        "written": write_dataset,
        "merged": merge_datasets,
        "read": read,
        "samples": samples,
        "cuts": cuts,
        "greedy": greedy,
        "blends": blends,
        "words": words,
        "splits": splits,
        "masks": masks,
        "dtypes": dtypes,
        "courses": courses,
        "batches": batches,
        "scales": scales,
    }
    gc.freeze()  # they collect garbage at each index that they add
    with contextlib.chdir(folder):  # words name datasets from there
        for kind, cases in json.loads((folder / "cases.json").read_text()).items():
            arrays = Arrays()
            answers = [kinds[kind](folder, case, f"{number}/", arrays) for number, case in enumerate(cases)]
            (folder / f"{kind}.json").write_text(json.dumps(answers))
            np.savez(folder / f"{kind}.npz", **arrays)
    gc.unfreeze()


def write_dataset(folder: Path, case: Case, case_prefix: str, arrays: Arrays) -> None:
    """A dataset by their builder, sequence by sequence or document by document."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix, ids = str(folder / case["theirs"]), np.array(case["ids"], case["dtype"])
    out = IndexedDatasetBuilder(f"{prefix}.bin", np.dtype(case["dtype"]).type, case["modes"] is not None)
    first, number = 0, 0
    for lengths in case["documents"]:
        modes = None if case["modes"] is None else case["modes"][number : number + len(lengths)]
        whole = ids[first : first + sum(lengths)]
        if case["whole"]:
            out.add_document(whole, lengths, modes)
        else:
            for i, part in enumerate(np.split(whole, np.cumsum(lengths)[:-1]) if lengths else ()):
                out.add_item(torch.from_numpy(part.astype(np.int64)), modes[i] if modes else 0)
            out.end_document()
        first, number = first + sum(lengths), number + len(lengths)
    out.finalize(f"{prefix}.idx")


def merge_datasets(folder: Path, case: Case, case_prefix: str, arrays: Arrays) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = str(folder / case["theirs"])
    out = IndexedDatasetBuilder(f"{prefix}.bin", np.dtype(case["dtype"]).type, case["multimodal"])
    for part in case["parts"]:
        out.add_index(str(folder / part))
    out.finalize(f"{prefix}.idx")


def read(folder: Path, case: Case, prefix: str, arrays: Arrays) -> Case:
    """Our files by their reader."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(folder / case["ours"]), multimodal=case["multimodal"], mmap=case["mmap"])
    arrays[prefix + "lengths"], arrays[prefix + "documents"] = data.sequence_lengths, data.document_indices
    arrays[prefix + "pointers"] = data.index.sequence_pointers
    if case["multimodal"]:
        arrays[prefix + "modes"] = data.index.sequence_modes
    for number, (sequence, offset, length) in enumerate(case["pieces"]):
        tokens = data.get(sequence, offset, length)
        arrays[f"{prefix}piece{number}"] = tokens[0] if case["multimodal"] else tokens
    return {"dtype": np.dtype(data.index.dtype).name, "sequences": len(data)}


def _config(folder: Path, case: Case, **values: Any) -> Any:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    cache = folder / "cache" / case["cache"]  # the name of an entry does not say all that it follows from
    return GPTDatasetConfig(
        random_seed=case["seed"],
        sequence_length=case["length"],
        path_to_cache=str(cache),
        tokenizer=Tokenizer(pad=case.get("pad")),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        add_extra_token_to_sequence=case.get("extra", True),
        drop_last_partial_validation_sequence=case.get("drop", True),
        **values,
    )


def samples(folder: Path, case: Case, case_prefix: str, arrays: Arrays) -> Case | None:
    """The indices of one dataset, and the tokens of some samples."""
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    prefix = str(folder / case["prefix"])
    config = _config(folder, case, blend=([prefix], None), split="1,0,0")
    numbers = np.arange(*case["range"], dtype=np.int32)
    try:
        dataset = GPTDataset(
            IndexedDataset(prefix, mmap=case["mmap"]),
            prefix,
            numbers,
            case["samples"],
            Split[case["use"]],
            config,
        )
    except AssertionError:  # a short last sample that ends in an empty document has an offset of -1
        return None
    arrays[case_prefix + "document"], arrays[case_prefix + "shuffle"] = (
        dataset.document_index,
        dataset.shuffle_index,
    )
    arrays[case_prefix + "sample"] = dataset.sample_index
    for number in case["shown"]:
        if number < len(dataset):
            arrays[f"{case_prefix}text{number}"] = dataset._query_document_sample_shuffle_indices(number)[0]
    return {"count": len(dataset)}


def cuts(folder: Path, case: Case, prefix: str, arrays: Arrays) -> bool:
    """The sample index alone, of sizes that no file has."""
    from megatron.core.datasets import helpers

    lengths, documents = np.array(case["lengths"], np.int32), np.array(case["documents"], np.int32)
    tokens = int(lengths[documents].sum()) // case["epochs"]
    try:
        arrays[prefix + "sample"] = helpers.build_sample_idx(
            lengths, documents, case["length"], case["epochs"], tokens, case["drop"], case["extra"]
        )
    except AssertionError:
        return False
    return True


def greedy(folder: Path, case: Case, prefix: str, arrays: Arrays) -> None:
    """The loop that chooses corpora: by shares, or each until it is used up."""
    from megatron.core.datasets import helpers
    from megatron.core.datasets.utils import normalize

    if case["all"]:
        size = sum(case["weights"])
        corpus, number = np.zeros(size, np.int16), np.zeros(size, np.int64)
        helpers.build_exhaustive_blending_indices(corpus, number, case["weights"], len(case["weights"]))
    else:
        size, shares = case["size"], normalize(case["weights"])
        corpus, number = np.zeros(size, np.int16), np.zeros(size, np.int64)
        helpers.build_blending_indices(corpus, number, shares, len(shares), size, False)
    arrays[prefix + "corpus"], arrays[prefix + "number"] = corpus, number


def blends(folder: Path, case: Case, prefix: str, arrays: Arrays) -> list[Case | None] | str:
    """What their builder makes of one blend for three uses, or of three blends; or why it makes nothing."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.datasets.utils import get_blend_from_list

    def blend(words: list[str] | None) -> Any:
        return get_blend_from_list(words or None)

    if case["split"] is not None:
        settings: Case = {"blend": blend(case["words"][0]), "split": case["split"]}
    else:
        settings = {"blend_per_split": [blend(words) for words in case["words"]]}
    config = _config(folder, case, **settings)
    try:
        built = BlendedMegatronDatasetBuilder(GPTDataset, case["sizes"], lambda: True, config).build()
    except (AssertionError, IndexError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    results: list[Case | None] = []
    for use, data in enumerate(built):
        if data is None:
            results.append(None)
            continue
        mixed = hasattr(data, "dataset_index")
        results.append(
            {"count": len(data), "parts": [len(part) for part in data.datasets] if mixed else None}
        )
        if mixed:
            arrays[f"{prefix}{use}/corpus"] = data.dataset_index
            arrays[f"{prefix}{use}/number"] = data.dataset_sample_index
        for number in case["shown"]:
            if number < len(data):
                sample = data[number]
                whole = torch.cat([sample["tokens"], sample["labels"][-1:]])
                arrays[f"{prefix}{use}/text{number}"] = whole.numpy()
    return results


def words(folder: Path, case: list[str], prefix: str, arrays: Arrays) -> Any:
    from megatron.core.datasets.utils import get_blend_from_list

    try:
        return get_blend_from_list(case)
    except AssertionError:
        return None


def splits(folder: Path, case: Case, prefix: str, arrays: Arrays) -> list[list[int] | None] | None:
    """The range that each use has of so many sequences, None for a use that has no dataset."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    try:
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(case["split"]))
        count = float(case["sequences"])
        return [None if ends is None else [round(end * count) for end in ends] for ends in matrix]
    except (AssertionError, ValueError):
        return None


def masks(folder: Path, case: Case, prefix: str, arrays: Arrays) -> None:
    """One sample's inputs, as their dataset hands it out."""
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

    attention, loss, position = _get_ltor_masks_and_position_ids(
        torch.tensor(case["tokens"]),
        case["eod"],
        case["reset_positions"],
        case["reset_attention"],
        case["eod_mask_loss"],
        True,
    )
    arrays[prefix + "hidden"], arrays[prefix + "loss"] = attention[0].numpy(), loss.numpy()
    arrays[prefix + "position"] = position.numpy()


def dtypes(folder: Path, case: int | None, prefix: str, arrays: Arrays) -> str:
    from megatron.core.datasets.indexed_dataset import DType

    return np.dtype(DType.optimal_dtype(case)).name


def courses(folder: Path, case: Case, prefix: str, arrays: Arrays) -> None:
    """Learning rate and weight decay after so many samples."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = SimpleNamespace(param_groups=[{}, case["group"]])
    course = OptimizerParamScheduler(optimizer, use_checkpoint_opt_param_scheduler=False, **case["options"])
    rows = []
    for samples in case["at"]:
        course.num_steps = 0
        course.step(samples)
        rows.append(
            [value for group in optimizer.param_groups for value in (group["lr"], group["weight_decay"])]
        )
    arrays[prefix + "values"] = np.array(rows)


def batches(folder: Path, case: Case, prefix: str, arrays: Arrays) -> str | None:
    """Samples consumed, size and micro-batches of every step of the ramp, and of some behind it."""
    from megatron.core import num_microbatches_calculator as calculator

    try:
        calculator.init_num_microbatches_calculator(
            1, case["ramp"], case["full"], case["micro"], case["dp"], case["decrease"]
        )
        rows, consumed, size, last = [], 0, 1, case["ramp"][2] if case["ramp"] else 0
        while size and (len(rows) < 20 or rows[-1][0] <= last):
            calculator.update_num_microbatches(consumed, True)
            size = calculator.get_current_running_global_batch_size()
            rows.append([consumed, size, calculator.get_num_microbatches()])
            consumed += size
    except (AssertionError, ZeroDivisionError) as error:
        return type(error).__name__
    finally:
        calculator.unset_num_microbatches_calculator()
    arrays[prefix + "rows"] = np.array(rows)
    return None


def scales(folder: Path, case: Case, prefix: str, arrays: Arrays) -> None:
    """The loss scale along steps of which some overflow."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    tensor = torch.tensor
    torch.tensor = lambda values, dtype, device: tensor(values, dtype=dtype)  # it says "cuda"
    try:
        scaler = DynamicGradScaler(
            initial_scale=case["initial"],
            min_scale=case["least"],
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=case["window"],
            hysteresis=case["hysteresis"],
        )
    finally:
        torch.tensor = tensor
    rows = []
    for overflow in case["overflows"]:
        scaler.update(bool(overflow))
        rows.append(scaler.scale.item())
    arrays[prefix + "scales"] = np.array(rows)
