"""Options of logging, metrics and the profiler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mega_schema.app.config import Words, option, words


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingConfig:
    """What is shown."""

    interval: int = option("--log-interval", 100, "optimizer steps between lines of the log")
    peak_tflops: float | None = option(
        "--peak-tflops",
        None,
        "TFLOP/s of one device that MFU is a share of; of A100, H100 SXM and H200 it is known",
    )
    timing_level: int = option(
        "--timing-log-level",
        0,
        "phases whose times on all ranks are shown: 0 none, 1 of a step, 2 of a micro-batch too",
    )
    timing_option: Literal["max", "minmax", "all"] = option(
        "--timing-log-option", "minmax", "of each phase the slowest rank, that and the fastest, or every rank"
    )
    params_norm: bool = option("--log-params-norm", False, "tell the weights' norm after every step")
    zeros: bool = option("--log-num-zeros-in-grad", False, "tell how many elements of the gradients are zero")
    tensorboard_dir: Path | None = option(
        "--tensorboard-dir", None, "folder for TensorBoard, under Megatron's names"
    )
    tensorboard_queue: int = option(
        "--tensorboard-queue-size", 1000, "values that wait to be written at once"
    )
    tensorboard_interval: int = option(
        "--tensorboard-log-interval", 1, "optimizer steps between values in TensorBoard"
    )
    tensorboard_timers: bool = option(
        "--log-timers-to-tensorboard", False, "also the time of an iteration, TFLOP/s and the phases' times"
    )
    tensorboard_batch_size: bool = option(
        "--log-batch-size-to-tensorboard", False, "also the samples of a step"
    )
    tensorboard_perplexity: bool = option(
        "--log-validation-ppl-to-tensorboard", False, "also the perplexity of a validation"
    )
    tensorboard_memory: bool = option(
        "--log-memory-to-tensorboard", False, "also the memory of the first rank"
    )
    tensorboard_world: bool = option("--log-world-size-to-tensorboard", False, "also the number of ranks")
    tensorboard_no_rate: bool = option(
        "--no-log-learnig-rate-to-tensorboard", False, "not the learning rate; spelt as Megatron does"
    )
    tensorboard_no_scale: bool = option("--no-log-loss-scale-to-tensorboard", False, "not the loss scale")
    wandb_project: str | None = option("--wandb-project", None, "project of Weights & Biases to log to")
    wandb_entity: str | None = option(
        "--wandb-entity", None, "team or user that the project belongs to; your own default if not given"
    )
    wandb_exp_name: str | None = option(
        "--wandb-exp-name", None, "the run's name there; that of the --save folder if not given"
    )
    wandb_save_dir: Path | None = option(
        "--wandb-save-dir", None, "folder for its files; wandb under --save if not given"
    )
    codecarbon_dir: Path | None = option(
        "--codecarbon-dir", None, "folder for CodeCarbon's emissions-RANK.csv, one a machine"
    )
    codecarbon_country: str = option(
        "--codecarbon-country",
        "FRA",
        "the grid it reckons with, three letters (ISO 3166); Megatron's is France",
    )
    opentelemetry_endpoint: str | None = option(
        "--opentelemetry-endpoint", None, "collector to send metrics to, such as http://localhost:4318"
    )
    prometheus_port: int | None = option(
        "--prometheus-port", None, "serve metrics of the run to Prometheus here, on the first rank"
    )
    prometheus_host: str = option(
        "--prometheus-host", "127.0.0.1", "address to serve them on; 0.0.0.0 lets other machines scrape"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Which steps are recorded call by call."""

    on: bool = option("--profile", False, "record some steps call by call")
    torch: bool = option(
        "--use-pytorch-profiler", False, "by torch's profiler, to --tensorboard-dir or --save; CPUs always"
    )
    start: int = option("--profile-step-start", 10, "begin when so many steps are done")
    end: int = option("--profile-step-end", 12, "end when so many are")
    ranks: Words = words("--profile-ranks", "the ranks that do; the first if not given")

    @property
    def rank_numbers(self) -> tuple[int, ...]:
        """The ranks as numbers, -1 for a word that is none."""
        return tuple(int(word) if word.isdecimal() else -1 for word in self.ranks)
