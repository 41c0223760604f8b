"""Configuration of a training run: sections, keys, flags (Megatron's names) and defaults.

Nothing is derived and nothing is cross-checked here; `resolve` does both.
"""

from __future__ import annotations

from dataclasses import dataclass

from mega_train.config.checkpoint import CheckpointConfig
from mega_train.config.data import DataConfig, EvaluationConfig, TokenizerConfig
from mega_train.config.encoder_data import EncoderDataConfig
from mega_train.config.logging import LoggingConfig, ProfileConfig
from mega_train.config.model import ModelConfig
from mega_train.config.objective import ObjectiveConfig
from mega_train.config.parallel import ParallelConfig, RecomputeConfig
from mega_train.config.task import TaskConfig
from mega_train.config.training import BatchConfig, CurriculumConfig, OptimizerConfig, TrainConfig

__all__ = [
    "BatchConfig",
    "CurriculumConfig",
    "DataConfig",
    "EncoderDataConfig",
    "EvaluationConfig",
    "LoggingConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProfileConfig",
    "RecomputeConfig",
    "RunConfig",
    "CheckpointConfig",
    "TaskConfig",
    "TokenizerConfig",
    "TrainConfig",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A training run."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    batch: BatchConfig = BatchConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    encoder_data: EncoderDataConfig = EncoderDataConfig()
    task: TaskConfig = TaskConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LoggingConfig = LoggingConfig()
    profile: ProfileConfig = ProfileConfig()
