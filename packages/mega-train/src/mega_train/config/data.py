"""What is read, for training and for validation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mega_schema.app.config import Words, option, words


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What is read."""

    path: Words = words(
        "--data-path", "prefix of an indexed dataset (its path without .bin); several, each behind its weight"
    )
    path_file: Path | None = option("--data-args-path", None, "a file with the words of --data-path")
    mock: bool = option(
        "--mock-data",
        False,
        "no corpus: documents that count up, of random length, the same as Megatron's mock data",
    )
    train_path: Words = words("--train-data-path", "as --data-path, for training alone, whole datasets")
    valid_path: Words = words("--valid-data-path", "as --train-data-path, for validation")
    test_path: Words = words("--test-data-path", "as --train-data-path, for the test")
    split_paths_file: Path | None = option(
        "--per-split-data-args-path", None, "JSON with the words of these three as train, valid and test"
    )
    train_group: Words = words(
        "--train-weighted-split-paths", "'NAME: WEIGHT START:END PREFIX, ...', START and END shares of 1"
    )
    valid_groups: Words = words("--valid-weighted-split-paths", "the same, several times for several")
    test_groups: Words = words("--test-weighted-split-paths", "the same, several times for several")
    train_group_file: Path | None = option(
        "--train-weighted-split-paths-path", None, "a file with the words of --train-weighted-split-paths"
    )
    valid_groups_file: Path | None = option(
        "--valid-weighted-split-paths-path", None, "a file with the words of --valid-weighted-split-paths"
    )
    test_groups_file: Path | None = option(
        "--test-weighted-split-paths-path", None, "a file with the words of --test-weighted-split-paths"
    )
    sft: bool = option(
        "--sft",
        False,
        "supervised fine-tuning: --data-path P means P_prompt_document and P_answer_document, and answers "
        "alone are learnt",
    )
    sft_keys: tuple[str, str] = option("--sft-keys", ("prompt", "answer"), "what the two are called")
    split: str | None = option(
        "--split", None, "shares of the sequences for training, validation and test; 969, 30, 1 if not given"
    )
    split_rule: Literal["mcore", "legacy"] = option(
        "--split-rule", "mcore", "whose rounding: Megatron core's, or that of before October 2023"
    )
    blend_rule: Literal["surplus", "exact"] = option(
        "--blend-rule",
        "surplus",
        "a blend ends with all that was made of its datasets, or with what is wanted (Megatron core 0.13)",
    )
    renormalize: bool = option(
        "--renormalize-blend-weights", False, "weigh datasets by the samples that were made of each"
    )
    cache: Path | None = option(
        "--data-cache-path", None, "where the order of samples is kept; if not given, beside the data"
    )
    order: Literal["single", "cyclic", "external"] = option(
        "--dataloader-type", "single", "samples in the order of the index, or shuffled anew in every epoch"
    )
    no_sharding: bool = option(
        "--no-data-sharding", False, "with cyclic: shuffle all samples, not each rank's own"
    )
    no_mmap: bool = option("--no-mmap-bin-files", False, "read the .bin files rather than map them")
    threads: int = option("--num-dataset-builder-threads", 8, "threads that open datasets")
    reset_positions: bool = option(
        "--reset-position-ids",
        False,
        "count places from the document's first token; rotary ones from the sample's still, as in Megatron",
    )
    reset_attention: bool = option("--reset-attention-mask", False, "a token sees its own document only")
    eod_mask_loss: bool = option("--eod-mask-loss", False, "no loss where the input is the end of a document")

    @property
    def has_dataset_per_split(self) -> bool:
        """Whether training, validation and test have datasets of their own, not shares of the same."""
        values = self.train_path, self.split_paths_file, self.train_group, self.train_group_file
        return any(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer made the data; data that mega-data wrote says so itself."""

    type: str | None = option("--tokenizer-type", None, "Megatron's name of it, such as GPT2BPETokenizer")
    vocab_file: Path | None = option("--vocab-file", None, "vocab.json or vocab.txt")
    merge_file: Path | None = option("--merge-file", None, "merges.txt")
    model: Path | None = option(
        "--tokenizer-model", None, "tokenizer.json or a folder that holds one, or a SentencePiece model"
    )
    name_or_path: Path | None = option("--tokenizer-name-or-path", None, "BigScience's --tokenizer-model")
    extra_ids: int = option("--vocab-extra-ids", 0, "sentinels beyond the vocabulary")
    tiktoken_pattern: str | None = option("--tiktoken-pattern", None, "how text is cut into words: v1 or v2")
    tiktoken_specials: int = option(
        "--tiktoken-num-special-tokens", 1000, "ids kept for special tokens of a TikTokenizer"
    )
    tiktoken_names: Words = words("--tiktoken-special-tokens", "names of the first of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """Validation during training."""

    iterations: int = option("--eval-iters", 100, "batches of a validation; 0 for none")
    interval: int = option("--eval-interval", 1000, "optimizer steps between validations")
