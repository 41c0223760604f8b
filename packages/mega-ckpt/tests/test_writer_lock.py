"""Only one process at a time writes into a run's folder, in any format; others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mega_ckpt.formats.megatron.run_dir import atomic_checkpoint_dir
from mega_schema.checkpoint.checkpoint_dir import iterations
from mega_schema.checkpoint.run_lock import lock_run_folder
from mega_schema.checkpoint.tracker import latest_checkpoint
from mega_schema.errors import ConfigError
from mega_schema.spec import ModelSpec

BUSY = (
    "another process writes to this folder: found {}, wanted one writer at a time, a run or mega-ckpt; hint: "
)


def test_one_process_at_a_time_writes_into_a_run_folder(
    mega: Any, run_folder: Any, small_gpt: ModelSpec, tmp_path: Path
) -> None:
    run, busy = run_folder(small_gpt), tmp_path / "busy"
    partial = busy / ".iter_0000009.partial"
    partial.mkdir(parents=True)
    convert = ("convert", "--from", "mega", "--load", run, "--save", busy)
    commands = (
        ["reshard", "--load", run, "--save", busy],
        ["average", run, "--save", busy],
        *([*convert, "--to", form] for form in ("megatron", "megatron-core", "torch_dist")),
    )
    with lock_run_folder(busy):
        for command in commands:
            message = str(mega(*command).exception)
            assert message == f"--save: {BUSY.format(busy)}wait for it, end it, or --save elsewhere"
            assert partial.is_dir(), "that of the process that writes"
    assert mega(*commands[0]).exit_code == 0
    assert not partial.exists(), "nobody writes it any more"


def test_prune_leaves_a_run_alone_that_another_process_writes_to(
    mega: Any, run_folder: Any, small_gpt: ModelSpec
) -> None:
    for iteration in (10, 20):
        run = run_folder(small_gpt, iteration=iteration)
    with lock_run_folder(run):
        result = mega("prune", run, "--keep-last", 1)
        assert str(result.exception) == f"RUN: {BUSY.format(run)}wait for it, or end it"
        assert iterations(run) == [10, 20]
        assert mega("prune", run, "--keep-last", 1, "--dry-run").exit_code == 0, "reads only"
    assert mega("prune", run, "--keep-last", 1).exit_code == 0
    assert iterations(run) == [20]
    missing = str(mega("prune", run / "nowhere", "--keep-last", 1).exception)
    assert missing.startswith(f"{run / 'nowhere'}")


def test_accept_leaves_a_run_alone_that_another_process_writes_to(
    mega: Any, run_folder: Any, small_gpt: ModelSpec
) -> None:
    run = run_folder(small_gpt)
    folder = latest_checkpoint(run)
    (folder / "run.toml").write_text("# another run\n")
    before = {path: path.read_bytes() for path in folder.glob("manifest.*")}
    with lock_run_folder(run):
        message = str(mega("verify", folder, "--accept").exception)
    assert message == f"FOLDER: {BUSY.format(run)}wait for it, or end it"
    assert {path: path.read_bytes() for path in folder.glob("manifest.*")} == before
    assert "accepted: run.toml" in mega("verify", folder, "--accept").output


def test_a_refused_writer_leaves_the_half_written_checkpoint_of_the_first(
    tmp_path: Path,
) -> None:
    with atomic_checkpoint_dir(tmp_path / "run", 3, force=False) as partial:
        with (
            pytest.raises(ConfigError, match="another process"),
            atomic_checkpoint_dir(tmp_path / "run", 3, force=True),
        ):
            pass
        assert partial.is_dir()
        (partial / "weights").touch()
    assert [path.name for path in (tmp_path / "run/iter_0000003").iterdir()] == ["weights"]


def test_what_another_process_wrote_meanwhile_is_not_replaced_unasked(tmp_path: Path) -> None:
    with atomic_checkpoint_dir(tmp_path, 3, force=False) as partial:
        (partial / "theirs").touch()
    with (
        pytest.raises(ConfigError, match="there is a checkpoint already"),
        atomic_checkpoint_dir(tmp_path, 3, force=False),
    ):
        pass
    with atomic_checkpoint_dir(tmp_path, 3, force=True) as partial:
        (partial / "ours").touch()
    assert [path.name for path in (tmp_path / "iter_0000003").iterdir()] == ["ours"]
