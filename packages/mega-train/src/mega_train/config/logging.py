"""Options of logging, metrics and the profiler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mega_schema.app.config import WordList, multi_option, option

TimingOption = Literal["max", "minmax", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """Options of logs and metrics."""

    interval: int = option("--log-interval", 100, "optimizer steps between log lines")
    peak_tflops: float | None = option(
        "--peak-tflops",
        None,
        "peak TFLOP/s of one device, for MFU; known for A100, H100 SXM and H200",
    )
    timing_level: int = option(
        "--timing-log-level",
        0,
        "phases whose times are logged: 0 none, 1 per step, 2 also per micro-batch",
    )
    timing_option: TimingOption = option(
        "--timing-log-option",
        "minmax",
        "times shown of each phase: the slowest rank, the fastest and slowest, or every rank",
    )
    params_norm: bool = option("--log-params-norm", False, "log the norm of the weights after every step")
    zeros: bool = option("--log-num-zeros-in-grad", False, "log the number of zero elements of the gradients")
    tensorboard_dir: Path | None = option(
        "--tensorboard-dir", None, "folder for TensorBoard event files, with Megatron's tags"
    )
    tensorboard_queue: int = option(
        "--tensorboard-queue-size", 1000, "number of values buffered before they are written"
    )
    tensorboard_interval: int = option(
        "--tensorboard-log-interval", 1, "optimizer steps between values in TensorBoard"
    )
    tensorboard_timers: bool = option(
        "--log-timers-to-tensorboard", False, "also log iteration time, TFLOP/s and phase times"
    )
    tensorboard_batch_size: bool = option("--log-batch-size-to-tensorboard", False, "also log the batch size")
    tensorboard_perplexity: bool = option(
        "--log-validation-ppl-to-tensorboard", False, "also log the validation perplexity"
    )
    tensorboard_memory: bool = option("--log-memory-to-tensorboard", False, "also log the memory of rank 0")
    tensorboard_world: bool = option("--log-world-size-to-tensorboard", False, "also log the number of ranks")
    tensorboard_learning_rate: bool = option(
        "--no-log-learning-rate-to-tensorboard", True, "do not log the learning rate"
    )
    tensorboard_loss_scale: bool = option(
        "--no-log-loss-scale-to-tensorboard", True, "do not log the loss scale"
    )
    wandb_project: str | None = option("--wandb-project", None, "Weights & Biases project to log to")
    wandb_entity: str | None = option(
        "--wandb-entity", None, "team or user of the project; your default if not given"
    )
    wandb_exp_name: str | None = option(
        "--wandb-exp-name",
        None,
        "name of the run in Weights & Biases; that of the --save folder if not given",
    )
    wandb_save_dir: Path | None = option(
        "--wandb-save-dir", None, "folder for Weights & Biases files; wandb under --save if not given"
    )
    codecarbon_dir: Path | None = option(
        "--codecarbon-dir", None, "folder for CodeCarbon's emissions-RANK.csv, one per machine"
    )
    codecarbon_country: str = option(
        "--codecarbon-country",
        "FRA",
        "country of the power grid for CodeCarbon, three letters (ISO 3166); Megatron uses France",
    )
    opentelemetry_endpoint: str | None = option(
        "--opentelemetry-endpoint", None, "collector to send metrics to, such as http://localhost:4318"
    )
    prometheus_port: int | None = option(
        "--prometheus-port", None, "port on which rank 0 serves Prometheus metrics"
    )
    prometheus_host: str = option(
        "--prometheus-host",
        "127.0.0.1",
        "address of the Prometheus server; 0.0.0.0 lets other machines scrape",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Options of the profiler."""

    on: bool = option("--profile", False, "profile some steps")
    torch: bool = option(
        "--use-pytorch-profiler",
        False,
        "use torch's profiler, which writes to --tensorboard-dir or --save; always used on CPUs",
    )
    start: int = option("--profile-step-start", 10, "number of steps before the first profiled one")
    end: int = option("--profile-step-end", 12, "last step to profile")
    ranks: WordList = multi_option("--profile-ranks", "ranks to profile; rank 0 if not given")

    @property
    def rank_numbers(self) -> tuple[int, ...]:
        """The ranks as numbers; -1 for a word that is no number."""
        return tuple(int(word) if word.isdecimal() else -1 for word in self.ranks)
