"""Telemetry: console, TensorBoard, timers, and isolation of observers."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from rich.console import Console

from mega_model.distributed.mesh import Mesh, World
from mega_schema.dataset.indexed_dataset import IndexedDataset
from mega_schema.errors import ConfigError
from mega_train.config import CheckpointConfig, LoggingConfig, ProfileConfig, RunConfig
from mega_train.engine.train_loop import TrainLoop
from mega_train.engine.trainer import Trainer
from mega_train.planning.flops import flops_per_token
from mega_train.planning.hardware import peak_flops
from mega_train.resolve import ResolvedConfig
from mega_train.telemetry.console import ConsoleReporter, Ema, fit_width, format_flops, format_log
from mega_train.telemetry.event_log import read_events
from mega_train.telemetry.events import (
    CheckpointSaved,
    Event,
    LogLine,
    Message,
    StepEnd,
    TrainStart,
    ValidationEnd,
)
from mega_train.telemetry.factory import open_observers
from mega_train.telemetry.observers import AsyncObserver, Observers
from mega_train.telemetry.profiler import Profiler
from mega_train.telemetry.timers import LEVELS, Timers, reduce_timers

NOW = LogLine(
    iteration=20,
    iterations=100,
    consumed_samples=80,
    loss=2.5,
    learning_rate=3e-4,
    grad_norm=1.25,
    skipped=0,
    loss_scale=1.0,
    iteration_seconds=0.5,
    tokens_per_second=12345.6,
    seconds=10.0,
    global_batch_size=4,
    seq_length=16,
    tflops=412.3,
    memory={"reserved": 71_230_000_000, "allocated": 60_000_000_000, "peak": 7, "allocated_count": 9},
)
BEGAN = TrainStart(
    iteration=0,
    iterations=100,
    consumed_samples=0,
    family="gpt",
    parameters=1234,
    layout={"tp": 2, "pp": 1, "vp": 1, "cp": 1, "dp": 4},
    world=8,
    global_batch_size=4,
    seq_length=16,
    device="cpu",
)
STEP = StepEnd(
    iteration=20,
    consumed_samples=80,
    loss=2.4,
    learning_rate=3e-4,
    grad_norm=1.25,
    skipped_samples=0,
    loss_scale=1.0,
    global_batch_size=4,
    seq_length=16,
    seconds=0.5,
)
CPU = torch.device("cpu")
VALIDATED = ValidationEnd(iteration=20, consumed_samples=80, loss=2.0, perplexity=7.39, seconds=1.0)


class ResolveConfig(Protocol):
    def __call__(self, **values: Any) -> ResolvedConfig: ...


class RecordingObserver:
    """Remembers what it was told; raises or waits where it is asked to."""

    def __init__(self, *, fails: bool = False, waits_for: threading.Event | None = None) -> None:
        self.events: list[Event] = []
        self.fails, self.waits_for, self.closed = fails, waits_for, False

    def on_event(self, event: Event) -> None:
        if self.waits_for is not None:
            self.waits_for.wait(30)
        if self.fails:
            raise OSError("the disk\nis full")
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


def _render(*, terminal: bool, width: int = 80) -> str:
    out = io.StringIO()
    screen = ConsoleReporter(Console(file=out, force_terminal=terminal, width=width), "all")
    for event in (
        BEGAN,
        Message("[red] words"),
        STEP,
        NOW,
        VALIDATED,
        CheckpointSaved(iteration=20, blocked_seconds=1.0),
    ):
        screen.on_event(event)
    screen.on_event(replace(NOW, iteration=60, iteration_seconds=100.0, mfu=0.4169))
    if not terminal:
        screen.on_event(replace(NOW, iteration=80, skipped=3, loss_scale=65536.0, extra={"num-zeros": 12.0}))
        of_ranks = {"optimizer": (0.001, 0.0025)}
        screen.on_event(replace(NOW, iteration=100, skipped=20, loss=None, timers_of_ranks=of_ranks))
    screen.close()
    return out.getvalue()


def test_plain_lines_appear_where_there_is_no_terminal() -> None:
    pace = "12,346 tokens/s | 412 TFLOP/s per rank"
    numbers = "loss 2.5000 | lr 3.00e-04 | grad norm 1.25"
    assert _render(terminal=False).splitlines() == [
        "gpt, 1,234 parameters | tp 2 x pp 1 x dp 4 | 4 samples x 16 tokens a step | from new weights",
        "[red] words",
        f"iteration 20/100 | {numbers} | {pace} | 71.23 GB | 0:40 left",
        "validation at iteration 20 | loss 2.0000 | perplexity 7.39",
        f"iteration 60/100 | {numbers} | {pace} | MFU 41.7% | 71.23 GB | 1:06:40 left",
        "iteration 80/100 | loss 2.5000 (3 skipped) | lr 3.00e-04 | grad norm 1.25 | loss scale 65536 | "
        f"num zeros 12 | {pace} | 71.23 GB | 0:10 left",
        f"iteration 100/100 | no update (20 skipped) | lr 3.00e-04 | grad norm 1.25 | {pace} | 71.23 GB | "
        "0:00 left",
        "  milliseconds of a step, every rank:",
        "  optimizer............................... 1.00 2.50 | most on rank 1",
    ]


def _scrollback(shown: str) -> list[str]:
    """The lines that stay on a terminal: without the moving line, which is erased after each refresh."""
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "\n").splitlines()
    return [line for line in lines if line and not re.match(r"\d+/\d+", line)]


def test_a_terminal_shows_a_line_that_moves() -> None:
    shown = _render(terminal=True)
    assert "20/100 loss 2.4000 grad norm 1.25 lr 3.0e-04 128 tok/s 412 TFLOP/s 71.2GB 0:40" in shown
    assert "validation at iteration 20" in shown
    assert "\x1b[" in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_control_characters_of_a_message_are_escaped(terminal: bool) -> None:
    out = io.StringIO()
    screen = ConsoleReporter(Console(file=out, force_terminal=terminal, width=80))
    screen.on_event(Message("loads a\x1b]52;c;ZXZpbA==\x07\r\x9b2J\nand b"))
    screen.close()
    assert out.getvalue() == "loads a\\x1b]52;c;ZXZpbA==\\x07\\r\\x9b2J\nand b\n"


@pytest.mark.parametrize("width", [40, 80, 130])
def test_every_log_line_stays_in_the_scrollback_of_a_terminal(width: int) -> None:
    lines = _scrollback(_render(terminal=True, width=width))
    logged = [line for line in lines if line.startswith("iteration ")]
    assert [line.split(" | ")[:4] for line in logged] == [
        [f"iteration {iteration}/100", "loss 2.5000", "lr 3.00e-04", "grad norm 1.25"]
        for iteration in (20, 60)
    ]
    assert all(len(line) <= max(width, 61) for line in logged), "loss and gradient norm are never left out"
    whole = "12,346 tokens/s | 412 TFLOP/s per rank | 71.23 GB | 0:40 left"
    assert logged[0].endswith(whole) == (width == 130)


def test_a_narrow_line_keeps_what_was_asked_for_and_leaves_out_the_memory_first() -> None:
    now = replace(NOW, skipped=3, loss_scale=65536.0, extra={"num-zeros": 12.0}, mfu=0.4169)
    asked = (
        "iteration 20/100 | loss 2.5000 (3 skipped) | lr 3.00e-04 | grad norm 1.25 | loss scale 65536 | "
        "num zeros 12"
    )
    assert format_log(now, 60) == asked
    assert format_log(now, 128) == f"{asked} | 12,346 tokens/s"
    assert (
        format_log(NOW, 80)
        == "iteration 20/100 | loss 2.5000 | lr 3.00e-04 | grad norm 1.25 | 12,346 tokens/s"
    )
    assert format_log(NOW, 93).endswith("12,346 tokens/s | 0:40 left")
    assert len(format_log(now)) > 160


def test_the_line_has_numbers_before_the_first_line_of_the_log() -> None:
    screen = ConsoleReporter(Console(file=io.StringIO()))
    for event in (BEGAN, replace(STEP, iteration=1)):
        screen.on_event(event)
    assert [text for _, text in screen._numbers()] == [
        "loss 2.4000",
        "grad norm 1.25",
        "lr 3.0e-04",
        "128 tok/s",
        "0:50",
    ]
    screen.on_event(replace(STEP, iteration=2, grad_norm=None))
    assert not any("norm" in text for _, text in screen._numbers())


def test_a_wide_terminal_shows_a_bar_too() -> None:
    assert "━" in _render(terminal=True, width=120)
    last = _render(terminal=True, width=76).splitlines()[-2]
    assert "42% MFU" in last
    assert "━" not in last


def test_a_smooth_number_follows_and_forgets() -> None:
    number = Ema()
    assert number.mean is None
    number.update(4.0)
    assert number.mean == 4.0, "the first is not pulled to zero"
    for _ in range(100):
        number.update(1.0)
    assert number.mean == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("tera", "words"),
    [(412.3, "412 TFLOP/s"), (0.1, "0.1 TFLOP/s"), (0.05, "50 GFLOP/s"), (3e-5, "30 MFLOP/s")],
)
def test_flops_are_told_in_a_unit_that_leaves_digits(tera: float, words: str) -> None:
    assert format_flops(tera) == words


def test_the_live_line_fits_and_what_matters_least_goes_first() -> None:
    step = replace(STEP, loss=2.5, seconds=47.0, global_batch_size=64, seq_length=903_281)
    screen = ConsoleReporter(Console(file=io.StringIO()))
    for event in (BEGAN, step, replace(NOW, mfu=0.417)):
        screen.on_event(event)
    parts = screen._numbers()
    whole = "20/100 loss 2.5000 grad norm 1.25 lr 3.0e-04 1.23M tok/s 412 TFLOP/s 42% MFU 71.2GB 1:02:40"
    assert fit_width("20/100", parts, 92) == whole
    assert fit_width("20/100", parts, 90) == (narrow := whole.replace(" 71.2GB", ""))
    assert fit_width("20/100", parts, 80) == (narrow := narrow.replace(" lr 3.0e-04", ""))
    assert fit_width("20/100", parts, 70) == narrow.replace(" 412 TFLOP/s", "")
    assert fit_width("20/100", parts, 50) == "20/100 loss 2.5000 grad norm 1.25 1:02:40"
    for width in range(1, 100):
        assert len(fit_width("20/100", parts, width)) <= width


def test_an_observer_that_fails_is_told_nothing_more_and_the_others_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing, whole = RecordingObserver(fails=True), RecordingObserver()
    watch = Observers([failing, whole])
    for _ in range(3):
        watch.on_event(STEP)
    watch.close()
    assert (len(whole.events), whole.closed) == (3, True)
    assert caplog.messages == [
        "RecordingObserver failed and is disabled (OSError: the disk is full); training continues"
    ]


def test_an_observer_that_fails_behind_the_run_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    failing = AsyncObserver(RecordingObserver(fails=True))
    for _ in range(3):
        failing.on_event(STEP)
    failing.close()
    assert caplog.messages == [
        "RecordingObserver failed and is disabled (OSError: the disk is full); training continues"
    ]


def test_a_slow_observer_delays_nothing_and_drops_events_beyond_its_queue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    go_on = threading.Event()
    slow = RecordingObserver(waits_for=go_on)
    behind = AsyncObserver(slow, queue_size=4)
    for _ in range(20):
        behind.on_event(STEP)  # would wait for ever if anything did
    go_on.set()
    behind.close()
    assert 4 <= len(slow.events) <= 5, "those that waited, and the one that it was busy with"
    assert slow.closed
    assert caplog.messages == ["RecordingObserver is too slow: events are dropped"]


def test_an_observer_that_never_ends_is_left_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    never = threading.Event()
    behind = AsyncObserver(RecordingObserver(waits_for=never), close_timeout=0.05)
    behind.on_event(STEP)
    behind.close()
    assert caplog.messages == ["RecordingObserver did not stop within 0.05 s and is abandoned"]
    never.set()


def test_timers_add_up_by_phase_and_begin_anew_once_taken() -> None:
    ticks = iter([0.0, 1.0, 10.0, 13.0, 20.0, 20.5])
    timers = Timers(torch.device("cpu"), clock=lambda: next(ticks))
    for name in ("optimizer", "optimizer", "forward-compute"):
        with timers(name):
            pass
    assert timers.pop() == {"optimizer": 4.0, "forward-compute": 0.5}
    assert timers.pop() == {}


class Mark:
    """An event of a stream that has got as far as `Mark.stream`."""

    stream = 0.0

    def __init__(self, time: float, waited: list[float]) -> None:
        self.time, self.waited = time, waited

    def query(self) -> bool:
        return self.time <= Mark.stream

    def synchronize(self) -> None:
        self.waited.append(self.time)

    def elapsed_time(self, end_event: Any) -> float:
        return 1000 * float(end_event.time - self.time)


def test_on_a_gpu_marks_are_read_when_they_have_happened_and_none_is_waited_for_before_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []
    timers = Timers(torch.device("cuda"))
    for begin in range(6):
        monkeypatch.setattr(Mark, "stream", begin - 2.0)  # the GPU is behind
        timers.add_pending("optimizer", Mark(begin, waited), Mark(begin + 0.5, waited))
        assert waited == []
        assert len(timers._pending) <= 4, "what has happened is not kept"
    assert timers.pop() == {"optimizer": pytest.approx(3.0)}
    assert waited == [5.5], "the last of them, once"


def test_of_one_rank_the_phases_of_a_level_are_its_own() -> None:
    own_times = {"optimizer": 2.0, "forward-compute": 1.0}
    assert reduce_timers(own_times, 0, "all", Mesh()) == {}
    assert reduce_timers(own_times, 1, "max", Mesh()) == {"optimizer": [2.0]}
    assert reduce_timers(own_times, 2, "minmax", Mesh()) == {
        "forward-compute": [1.0, 1.0],
        "optimizer": [2.0, 2.0],
    }


@pytest.mark.parametrize(
    ("device", "half", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", True, 312),
        ("NVIDIA H100 80GB HBM3", True, 989),
        ("NVIDIA H100 80GB HBM3", False, 67),
        ("NVIDIA H200", True, 989),
        ("NVIDIA H100 PCIe", True, None),
        ("NVIDIA H200 NVL", True, None),
        ("Tesla T4", True, None),
    ],
)
def test_the_peak_is_known_of_the_cards_in_the_table_and_of_no_others(
    device: str, half: bool, tera: float | None
) -> None:
    assert peak_flops(device, half=half) == (None if tera is None else tera * 1e12)


def test_a_line_tells_flops_and_their_share_of_a_peak_that_is_given(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset
) -> None:
    assert open_corpus.info is not None
    values = {
        "log__log_interval": 5,
        "log__peak_tflops": 0.5,
        "log__log_params_norm": True,
        "log__log_num_zeros_in_grad": True,
    }
    trainer = Trainer(resolve_config(corpus=open_corpus.info.tokenizer, **values), Mesh(), open_corpus)
    heard, ticks = RecordingObserver(), iter(range(1000))
    TrainLoop(trainer, Observers([heard]), clock=lambda: float(next(ticks))).run()
    lines = [event for event in heard.events if isinstance(event, LogLine)]
    flops = 32 * flops_per_token(
        trainer.config.spec, 8
    )  # of a step of 4 samples of 8 tokens, which takes a second
    assert [line.tflops for line in lines] == [pytest.approx(flops / 1e12)] * 2
    assert [line.mfu for line in lines] == [pytest.approx(flops / 0.5e12)] * 2
    weights = torch.cat([weight.detach().flatten() for _, weight in trainer.params])
    assert lines[-1].extra["params-norm"] == pytest.approx(float(weights.norm()), rel=1e-5)
    assert 0 <= lines[-1].extra["num-zeros"] < trainer.grad_sync.num_elements
    step = set(LEVELS) - {"forward-recv", "backward-recv"}
    assert set(lines[-1].timers) == step, "one stage waits for no other; every other phase is timed"


def test_zeros_are_those_of_the_table_not_of_its_padding(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset
) -> None:
    assert open_corpus.info is not None
    values = {
        "model__vocab_size": None,
        "model__make_vocab_size_divisible_by": 64,
        "log__log_num_zeros_in_grad": True,
    }
    trainer = Trainer(resolve_config(corpus=open_corpus.info.tokenizer, **values), Mesh(), open_corpus)
    assert trainer.grad_sync.num_elements == sum(
        r.size for r in trainer.rt.table.values() if r.tied_to is None
    )
    trainer.step(0.1)
    zeros = sum(int((shard == 0).sum()) for shard in trainer.grad_sync.shards)
    padding = sum(shard.numel() for shard in trainer.grad_sync.shards) - trainer.grad_sync.num_elements
    assert padding == (64 - 33) * 16
    assert trainer.optimizer_step.extra["num-zeros"] == zeros - padding


def test_a_profile_is_of_the_steps_that_were_asked_for(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path
) -> None:
    assert open_corpus.info is not None
    values = {
        "profile__profile": True,
        "profile__profile_step_start": 2,
        "profile__profile_step_end": 4,
        "log__tensorboard_dir": tmp_path,
    }
    trainer = Trainer(resolve_config(corpus=open_corpus.info.tokenizer, **values), Mesh(), open_corpus)
    TrainLoop(trainer, Observers()).run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile-rank-0.json", "profile-rank-0.txt"]
    calls = [
        event.get("name")
        for event in json.loads((tmp_path / "profile-rank-0.json").read_text())["traceEvents"]
    ]
    assert calls.count("Optimizer.step#AdamW.step") == 2, "steps"
    # a table of the most expensive operations: which they are depends on the machine
    assert "aten::" in (tmp_path / "profile-rank-0.txt").read_text()


def test_a_run_that_leaves_within_a_profile_writes_what_there_is(
    resolve_config: ResolveConfig, open_corpus: IndexedDataset, tmp_path: Path
) -> None:
    assert open_corpus.info is not None
    values = {
        "profile__profile": True,
        "profile__profile_step_start": 9,
        "profile__profile_step_end": 20,
        "log__tensorboard_dir": tmp_path,
    }
    trainer = Trainer(resolve_config(corpus=open_corpus.info.tokenizer, **values), Mesh(), open_corpus)
    TrainLoop(trainer, Observers()).run()
    assert (tmp_path / "profile-rank-0.json").is_file()


@pytest.mark.parametrize(
    ("profile", "rank", "asked"),
    [
        (ProfileConfig(), 0, False),
        (ProfileConfig(on=True), 0, True),
        (ProfileConfig(on=True), 1, False),
        (ProfileConfig(on=True, ranks=("1", "3")), 0, False),
        (ProfileConfig(on=True, ranks=("1", "3")), 3, True),
    ],
)
def test_a_rank_is_profiled_where_it_is_asked_for(
    profile: ProfileConfig, rank: int, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    switched: list[str] = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: switched.append("on"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: switched.append("off"))
    profiler = Profiler.from_config(RunConfig(profile=profile), rank, torch.device("cuda"))
    for step in range(20):
        profiler.before_step(step)
        assert switched == (["on", "off"] if step >= 12 else ["on"] if step >= 10 else [])[: 2 * asked]
        profiler.after_step(step + 1)
    profiler.close()
    assert switched == ["on", "off"][: 2 * asked]


def test_a_profile_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    run = RunConfig(
        profile=ProfileConfig(on=True, start=0), log=LoggingConfig(tensorboard_dir=tmp_path / "file")
    )
    profiler = Profiler.from_config(run, 0, torch.device("cpu"))
    profiler.before_step(0)
    profiler.close()
    (words,) = caplog.messages
    assert words.startswith(f"the profile cannot be written to {tmp_path / 'file' / 'profile-rank-0'}: ")


def test_a_profile_table_leaves_out_threads_that_wait(tmp_path: Path) -> None:
    profiler = Profiler.from_config(
        RunConfig(profile=ProfileConfig(on=True, start=0), log=LoggingConfig(tensorboard_dir=tmp_path)),
        0,
        CPU,
    )
    ended = threading.Event()
    waiting = threading.Thread(target=ended.wait)
    profiler.before_step(0)
    waiting.start()
    torch.ones(64, 64) @ torch.ones(64, 64)
    ended.wait(0.2)
    ended.set()
    waiting.join()
    profiler.close()
    text = (tmp_path / "profile-rank-0.txt").read_text()
    assert "aten::mm" in text
    assert "threading.py" not in text
    assert "acquire of _thread" not in text
    assert "threading.py" in (tmp_path / "profile-rank-0.json").read_text(), "the trace has them"


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {
        name: [(event.step, pytest.approx(event.value, rel=1e-6)) for event in read.Scalars(name)]
        for name in read.Tags()["scalars"]
    }


def _seen(run: RunConfig, events: list[Event]) -> None:
    with open_observers(run, World(), io.StringIO()) as watch:
        for event in events:
            watch.on_event(event)


PLAIN = {"learning-rate", "lm loss", "loss-scale", "grad-norm", "lm loss validation"}


def _and_vs_samples(names: set[str]) -> set[str]:
    return names | {f"{name} vs samples" for name in names}


def test_tensorboard_reads_the_curves_under_megatrons_names_over_iterations_and_samples(
    tmp_path: Path,
) -> None:
    log = LoggingConfig(tensorboard_dir=tmp_path, tensorboard_interval=2)
    steps: list[Event] = [
        replace(STEP, iteration=i, consumed_samples=4 * i, loss=3.0 - i / 8) for i in range(1, 7)
    ]
    _seen(RunConfig(log=log), [BEGAN, *steps, NOW, VALIDATED])
    read = _scalars(tmp_path)
    assert set(read) == _and_vs_samples(PLAIN)
    assert read["lm loss"] == [(2, 2.75), (4, 2.5), (6, 2.25)]
    assert read["lm loss vs samples"] == [(8, 2.75), (16, 2.5), (24, 2.25)]
    assert read["lm loss validation vs samples"] == [(80, 2.0)]


def test_tensorboard_has_what_the_other_flags_ask_for(tmp_path: Path) -> None:
    log = LoggingConfig(
        tensorboard_dir=tmp_path,
        tensorboard_timers=True,
        tensorboard_batch_size=True,
        tensorboard_perplexity=True,
        tensorboard_memory=True,
        tensorboard_world=True,
        tensorboard_learning_rate=False,
        tensorboard_loss_scale=False,
    )
    step = replace(STEP, extra={"num-zeros": 3.0, "params-norm": 9.0}, skipped_samples=8, grad_norm=None)
    line = replace(NOW, timers_of_ranks={"optimizer": [0.25, 0.5]})
    _seen(RunConfig(log=log), [BEGAN, step, line, VALIDATED])
    read = _scalars(tmp_path)
    both = {"batch-size", "lm loss", "world-size", "num-zeros", "params-norm", "skipped-train-samples"}
    both |= {"lm loss validation", "lm loss validation ppl"}
    once = {"iteration-time", "throughput", "optimizer-time", "mem-reserved-bytes", "mem-allocated-bytes"}
    once |= {"mem-allocated-count", "mem-max-allocated-bytes"}
    assert set(read) == _and_vs_samples(both) | once
    assert read["world-size"] == [(20, 8)]
    assert read["optimizer-time"] == [(20, 0.5)]
    assert read["lm loss validation ppl"] == [(20, 7.39)]
    assert read["mem-reserved-bytes"] == [(20, 71_230_000_000)]


def test_ranks_other_than_0_report_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunConfig(
        log=LoggingConfig(tensorboard_dir=tmp_path / "t"), checkpoint=CheckpointConfig(save=tmp_path / "s")
    )
    with open_observers(run, World(rank=1, size=2, local_rank=1), sys.stdout) as watch:
        watch.on_event(BEGAN)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_a_person_is_told_where_the_metrics_are(tmp_path: Path) -> None:
    out = io.StringIO()
    with open_observers(RunConfig(log=LoggingConfig(prometheus_port=0)), World(), out):
        pass
    assert re.fullmatch(r"metrics at http://127\.0\.0\.1:\d+/metrics\n", out.getvalue())


def test_the_record_and_the_screen_are_told_at_once(tmp_path: Path) -> None:
    out = io.StringIO()
    with open_observers(RunConfig(checkpoint=CheckpointConfig(save=tmp_path)), World(), out) as watch:
        watch.on_event(BEGAN)
        watch.on_event(NOW)
        assert [e["event"] for e in read_events(tmp_path)] == ["train_start", "train_log"]
        assert "iteration 20/100" in out.getvalue()


@pytest.mark.parametrize("flag", ["--tensorboard-dir", "--codecarbon-dir"])
def test_a_file_where_a_folder_should_be_is_refused(flag: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    log = LoggingConfig(**{flag.removeprefix("--").replace("-", "_"): tmp_path / "file"})
    with pytest.raises(ConfigError) as caught:
        _seen(RunConfig(log=log), [])
    where = tmp_path / "file"
    assert (
        str(caught.value) == f"{flag}: not a folder: found {where}, wanted a folder, or a name that is free"
    )


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine where no optional package is installed."""
    for name in list(sys.modules):
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    return None


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            LoggingConfig(tensorboard_dir=Path("t")),
            '--tensorboard-dir: needs tensorboard; hint: pip install -e "packages/mega-train[tensorboard]"',
        ),
    ],
)
def test_a_package_that_is_not_installed_is_named(
    log: LoggingConfig, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        _seen(RunConfig(log=log), [])
    assert str(caught.value) == line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"timing_log_level": 3}, "--timing-log-level: not a level: found 3, wanted 0, 1 or 2"),
        ({"peak_tflops": 0.0}, "--peak-tflops: not a rate: found 0.0, wanted more than 0"),
        ({"tensorboard_queue_size": 0}, "--tensorboard-queue-size: not a size: found 0, wanted 1 or more"),
        (
            {"tensorboard_log_interval": 0},
            "--tensorboard-log-interval: not an interval: found 0, wanted 1 or more",
        ),
    ],
)
def test_a_number_out_of_range_is_refused(
    resolve_config: ResolveConfig, values: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config(**{name if "__" in name else f"log__{name}": value for name, value in values.items()})
    assert str(caught.value) == line
