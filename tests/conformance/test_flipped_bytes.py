"""Every changed byte of a checkpoint is detected: none is loaded, and none causes a traceback."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mega_ckpt.checkpoint.verify import verify
from mega_ckpt.formats.interface import ReadOptions
from mega_ckpt.formats.mega.format import read
from mega_schema.checkpoint.checkpoint_dir import LATEST
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import MegaError
from mega_schema.parallel_layout import Layout
from mega_schema.spec import gpt
from mega_schema.tokenizer.tokenizer import open_tokenizer


@pytest.fixture
def runs(tmp_path: Path, random_whole: Any, save_whole: Any) -> list[Path]:
    """A bfloat16 run with optimizer and tokenizer, a float32 run of a 2 x 2 layout, and weights alone."""
    small = gpt(layers=1, hidden=8, heads=2, vocab=33, max_seq_len=8)
    tokenizer = tmp_path / "tokenizer"
    open_tokenizer("NullTokenizer", vocab_size=32).save(tokenizer)
    two = gpt(layers=2, hidden=8, heads=2, vocab=33, max_seq_len=8)
    config = '[train]\nseed = 1234\n\n[data]\nsplit = "969, 30, 1"\n'
    state = {"optimizer_steps": 4, "loss_scale": {"value": 1.0, "growth_tracker": 0, "hysteresis_tracker": 2}}
    folders = [
        save_whole(
            tmp_path / "bf16",
            small,
            random_whole(small, optimizer=True, dtype="BF16"),
            dtype="BF16",
            iteration=4,
            tokenizer=tokenizer,
            trainer=state,
            run_config=config,
        ),
        save_whole(
            tmp_path / "cut", two, random_whole(two, optimizer=True), layout=Layout(tp=2, pp=2), iteration=10
        ),
        save_whole(tmp_path / "weights", small, random_whole(small), iteration=0, tokenizer=tokenizer),
    ]
    return [folder.parent for folder in folders]


def _flips(run: Path, rng: random.Random, flips: int) -> Iterator[tuple[Path, int, int]]:
    """File, place and mask of each flip: half of them of one bit; every file has its share."""
    files = sorted(path for path in run.rglob("*") if path.is_file())
    for number in range(flips):
        file = files[number % len(files)]
        mask = 1 << rng.randrange(8) if rng.random() < 0.5 else rng.randrange(1, 256)
        yield file, rng.randrange(file.stat().st_size), mask


def _outcome(run: Path) -> str:
    """What a reader says of a run that was sound: "found", or "sound"."""
    try:
        verify(Checkpoint.open(run))
        read(run, ReadOptions())
    except MegaError as error:
        return "found" if "\n" not in str(error) else "two lines"
    return "sound"


def _is_same_content(file: Path, before: bytes) -> bool:
    """White space in the place of white space: the tracker's line break, the padding of a header."""
    now = file.read_bytes()
    place = next(
        position
        for position, (before_byte, after_byte) in enumerate(zip(before, now, strict=True))
        if before_byte != after_byte
    )
    both = before[place : place + 1] + now[place : place + 1]
    return both.isspace() and (file.name == LATEST or file.suffix == ".safetensors")


def _campaign(runs: list[Path], flips: int) -> Counter[tuple[str, str]]:
    """Outcomes by the kind of file."""
    rng, outcomes = random.Random(7), Counter[tuple[str, str]]()
    for run in runs:
        assert _outcome(run) == "sound"
        for file, offset, mask in _flips(run, rng, flips // len(runs)):
            before = file.read_bytes()
            file.write_bytes(before[:offset] + bytes([before[offset] ^ mask]) + before[offset + 1 :])
            outcome = _outcome(run)
            if outcome == "sound" and _is_same_content(file, before):
                outcome = "harmless"
            file.write_bytes(before)
            kind = "*.safetensors" if file.suffix == ".safetensors" else file.name
            outcomes[kind, outcome] += 1
        assert _outcome(run) == "sound"
    return outcomes


@pytest.mark.parametrize("flips", [360, pytest.param(3848, marks=pytest.mark.long)])
def test_no_changed_byte_of_a_checkpoint_is_missed(runs: list[Path], flips: int) -> None:
    outcomes = _campaign(runs, flips)
    missed = {
        kind: count for (kind, outcome), count in outcomes.items() if outcome not in ("found", "harmless")
    }
    assert missed == {}
    assert outcomes.total() == flips // len(runs) * len(runs)
    assert {kind for kind, _ in outcomes} >= {
        "manifest.json",
        "manifest.sha256",
        "trainer.json",
        "run.toml",
        "identity.json",
        "*.safetensors",
        LATEST,
    }
    assert sum(count for (_, outcome), count in outcomes.items() if outcome == "harmless") < flips / 10
