"""The options from which the data splits of a run are built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mega_train.config import DataConfig
from mega_train.data.prefix_reader import PrefixRule
from mega_train.data.span_corruption import SpanRule


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSplitsConfig:
    """The options from which the data splits of a run are built.

    Attributes:
        options: the data options of the run.
        seq_length: tokens of a sample.
        seed: of the sample order.
        train_samples: training samples that the run needs.
        valid_samples, test_samples: samples to evaluate; without any, the split is not built.
        prefix_rule: how samples get prefixes; None: they get none.
        span_rule: how the tokens of a sample are corrupted; None: they are not.
        save: folder of the run's checkpoints, where the sample order may be cached.
    """

    options: DataConfig
    seq_length: int
    seed: int
    train_samples: int
    valid_samples: int
    test_samples: int
    prefix_rule: PrefixRule | None = None
    span_rule: SpanRule | None = None
    save: Path | None = None
