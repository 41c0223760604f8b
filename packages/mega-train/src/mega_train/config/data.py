"""Options of datasets, tokenizer and validation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mega_schema.app.config import WordList, multi_option, option

SplitRule = Literal["mcore", "legacy"]
BlendRule = Literal["surplus", "exact"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Options of the datasets."""

    path: WordList = multi_option(
        "--data-path",
        "prefix of an indexed dataset (path or URL without .bin); or a blend: WEIGHT PREFIX WEIGHT PREFIX",
    )
    path_file: Path | None = option("--data-args-path", None, "a file with the arguments of --data-path")
    mock: bool = option(
        "--mock-data",
        False,
        "train on Megatron's mock data: counting documents of random length",
    )
    train_path: WordList = multi_option(
        "--train-data-path", "like --data-path, but whole datasets for training only"
    )
    valid_path: WordList = multi_option("--valid-data-path", "like --train-data-path, for validation")
    test_path: WordList = multi_option("--test-data-path", "like --train-data-path, for the test")
    split_paths_file: Path | None = option(
        "--per-split-data-args-path",
        None,
        "JSON file with the arguments of these three under train, valid and test",
    )
    train_group: WordList = multi_option(
        "--train-weighted-split-paths",
        "'NAME: WEIGHT START:END PREFIX, ...', with START and END fractions of the dataset",
    )
    valid_groups: WordList = multi_option(
        "--valid-weighted-split-paths", "validation groups, one argument for each"
    )
    test_groups: WordList = multi_option("--test-weighted-split-paths", "test groups, one argument for each")
    train_group_file: Path | None = option(
        "--train-weighted-split-paths-path", None, "a file with the arguments of --train-weighted-split-paths"
    )
    valid_groups_file: Path | None = option(
        "--valid-weighted-split-paths-path", None, "a file with the arguments of --valid-weighted-split-paths"
    )
    test_groups_file: Path | None = option(
        "--test-weighted-split-paths-path", None, "a file with the arguments of --test-weighted-split-paths"
    )
    sft: bool = option(
        "--sft",
        False,
        "supervised fine-tuning: --data-path P reads P_prompt_document and P_answer_document, or "
        "P_chat_document; only answers and the assistant's turns have a loss",
    )
    sft_keys: tuple[str, str] = option("--sft-keys", ("prompt", "answer"), "the keys of prompt and answer")
    split: str | None = option(
        "--split",
        None,
        "fractions of the sequences for training, validation and test; 969, 30, 1 if not given",
    )
    split_rule: SplitRule = option(
        "--split-rule", "mcore", "rounding of the split: Megatron core's, or Megatron's before October 2023"
    )
    blend_rule: BlendRule = option(
        "--blend-rule",
        "surplus",
        "length of a blend: surplus includes the 0.5 % built in excess, exact does not (Megatron core 0.13)",
    )
    renormalize: bool = option(
        "--renormalize-blend-weights", False, "weigh datasets by the samples built of each"
    )
    cache: Path | None = option(
        "--data-cache-path", None, "cache folder of the sample order; next to the data if not given"
    )
    object_storage_cache: Path | None = option(
        "--object-storage-cache-path",
        None,
        "folder for the index, and the tokens that were read, of datasets at a URL; in the temporary folder "
        "if not given",
    )
    order: Literal["single", "cyclic", "external"] = option(
        "--dataloader-type",
        "single",
        "single reads samples in the order of the index, cyclic shuffles them in every epoch",
    )
    sharding: bool = option(
        "--no-data-sharding", True, "with cyclic, shuffle all samples instead of each rank's own"
    )
    mmap: bool = option(
        "--no-mmap-bin-files", True, "read the .bin files instead of mapping them into memory"
    )
    threads: int = option("--num-dataset-builder-threads", 8, "threads that open datasets")
    reset_positions: bool = option(
        "--reset-position-ids",
        False,
        "count positions from the start of the document; rotary ones are not reset, as in Megatron",
    )
    reset_attention: bool = option(
        "--reset-attention-mask", False, "limit attention to the token's own document"
    )
    eod_mask_loss: bool = option(
        "--eod-mask-loss", False, "no loss for inputs that are an end-of-document token"
    )

    @property
    def has_dataset_per_split(self) -> bool:
        """Whether training, validation and test have their own datasets instead of parts of one."""
        values = self.train_path, self.split_paths_file, self.train_group, self.train_group_file
        return any(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer of datasets that do not record theirs, as those of mega-data do."""

    type: str | None = option(
        "--tokenizer-type", None, "Megatron's name of the tokenizer, such as GPT2BPETokenizer"
    )
    vocab_file: Path | None = option("--vocab-file", None, "vocab.json or vocab.txt")
    merge_file: Path | None = option("--merge-file", None, "merges.txt")
    model: Path | None = option(
        "--tokenizer-model", None, "tokenizer.json, a folder with one, or a SentencePiece model"
    )
    name_or_path: Path | None = option("--tokenizer-name-or-path", None, "BigScience's --tokenizer-model")
    extra_ids: int = option("--vocab-extra-ids", 0, "number of sentinel tokens after the vocabulary")
    tiktoken_pattern: str | None = option(
        "--tiktoken-pattern", None, "pattern that splits text into words: v1 or v2"
    )
    tiktoken_specials: int = option(
        "--tiktoken-num-special-tokens", 1000, "ids reserved for special tokens of a TikTokenizer"
    )
    tiktoken_names: WordList = multi_option(
        "--tiktoken-special-tokens", "names of the first special tokens of a TikTokenizer"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """Options of validation during training."""

    iterations: int = option("--eval-iters", 100, "batches per validation; 0 disables it")
    interval: int = option("--eval-interval", 1000, "optimizer steps between validations")
    commands: WordList = multi_option(
        "--evaluation-commands",
        "commands for each checkpoint saved at a validation, such as 'mega-eval lambada --data FILE'; rank 0 "
        "runs them in the background, with --load and --output",
    )
