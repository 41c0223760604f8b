"""What a person can say of a training run: sections, keys, flags (Megatron's names), defaults.

Nothing is derived and nothing is cross-checked here; `resolve` does both, once.
"""

from __future__ import annotations

from dataclasses import dataclass

from mega_train.config.data import Data, Evaluation, Tokenizer
from mega_train.config.keeping import Log, Profile, Save
from mega_train.config.model import Model
from mega_train.config.parallel import Parallel, Recomputation
from mega_train.config.training import Batch, Curriculum, Optimizer, Train

__all__ = [
    "Batch",
    "Curriculum",
    "Data",
    "Evaluation",
    "Log",
    "Model",
    "Optimizer",
    "Parallel",
    "Profile",
    "Recomputation",
    "Run",
    "Save",
    "Tokenizer",
    "Train",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run."""

    model: Model = Model()
    parallel: Parallel = Parallel()
    recompute: Recomputation = Recomputation()
    batch: Batch = Batch()
    curriculum: Curriculum = Curriculum()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    data: Data = Data()
    tokenizer: Tokenizer = Tokenizer()
    evaluation: Evaluation = Evaluation()
    checkpoint: Save = Save()
    log: Log = Log()
    profile: Profile = Profile()
