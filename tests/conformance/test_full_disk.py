"""A full disk is a one-line error in every program."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from mega_schema.spec import ModelSpec
from tests.conformance.conftest import RandomWhole, SaveWhole


def test_torchs_writer_on_a_full_disk_is_one_line_and_leaves_nothing(
    small_gpt: ModelSpec, random_whole: RandomWhole, save_whole: SaveWhole, tmp_path: Path
) -> None:
    save_whole(tmp_path / "run", small_gpt, random_whole(small_gpt))
    words = ["convert", "--from", "mega", "--to", "torch_dist", "--load", tmp_path / "run"]
    process = subprocess.run(
        [sys.executable, "-m", "mega_ckpt", *map(str, words), "--save", str(tmp_path / "out")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 2, process.stderr
    assert [line for line in process.stderr.splitlines() if "not written: found" in line] == (
        process.stderr.splitlines()[-1:]
    )
    assert "Traceback" not in process.stderr
    assert not list((tmp_path / "out").glob("iter_*"))
