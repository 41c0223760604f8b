"""A process killed at any moment of a save leaves the previous checkpoint unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mega_schema.spec import ModelSpec
from mega_schema.tokenizer.tokenizer import open_tokenizer

# One process that forks a child per moment, for the child to save and to die by SIGKILL just before its Nth
# box, flush, folder, rename or removal. It prints, per moment: how the child ended, what a reader then finds,
# what a reader finds after another save, and what is left in the folder.
DRIVER = """
import json, os, pathlib, shutil, signal, sys
import numpy as np
from mega_ckpt.checkpoint.writer import rank_shares
from mega_ckpt.checkpoint.verify import verify
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.checkpoint.writer import CheckpointWriter
from mega_schema.parallel_layout import WHOLE

before, scratch, iteration = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
spec = Checkpoint.open(before).spec
dtypes = dict.fromkeys(Checkpoint.open(before).tensors["model"], "F32")

def save(run):
    save = CheckpointWriter(run, iteration)
    save.begin()
    for share in rank_shares(spec, WHOLE, dtypes):
        save.write("model", share.rank, share.boxes, lambda box: box_values(box))
    save.commit(spec, layout=WHOLE, trainer={"iteration": iteration}, tokenizer=before / "tokenizer",
                replace=True)

def box_values(box):
    return np.full(box.slab.shape, 2.0, np.float32)

def die_at(moment):
    steps = iter(range(moment))
    def mortal(function):
        def call(*given, **named):
            if next(steps, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*given, **named)
        return call
    global box_values
    box_values, os.fsync = mortal(box_values), mortal(os.fsync)
    shutil.rmtree, os.unlink = mortal(shutil.rmtree), mortal(os.unlink)
    for name in ("mkdir", "rename", "replace", "unlink"):
        setattr(pathlib.Path, name, mortal(getattr(pathlib.Path, name)))

def found(run):
    saved = Checkpoint.open(run)
    verify(saved)
    return sorted({float(v) for _, _, t, p in saved.pieces() for v in np.unique(saved.map_piece(t, p))})

results, code, moment = [], -9, 0
while code != 0:
    run = scratch / str(moment)
    shutil.copytree(before, run)
    child = os.fork()
    if child == 0:
        die_at(moment)
        save(run)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    then = found(run)
    save(run)
    results.append((code, then, found(run), sorted(p.name for p in run.iterdir() if p.name.startswith("."))))
    shutil.rmtree(run)
    moment += 1
print(json.dumps(results))
"""


@pytest.mark.parametrize("iteration", [4, 5], ids=["the same iteration", "the next iteration"])
def test_a_save_that_is_killed_leaves_the_earlier_checkpoint(
    tmp_path: Path, small_gpt: ModelSpec, random_whole: Any, save_whole: Any, iteration: int
) -> None:
    whole = random_whole(small_gpt)
    for tensors in whole.values():
        for values in tensors.values():
            values[...] = 1.0
    before = tmp_path / "before"
    save_whole(before, small_gpt, whole, iteration=4)
    open_tokenizer("NullTokenizer", vocab_size=20).save(before / "tokenizer")
    argv = [sys.executable, "-c", DRIVER, str(before), str(tmp_path / "runs"), str(iteration)]
    process = subprocess.run(argv, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    results = json.loads(process.stdout)
    assert len(results) > 50, "moments at which it was killed"
    assert all(code == -9 for code, *_ in results[:-1])
    seen = [values for _, values, *_ in results]
    assert all(values in ([1.0], [2.0]) for values in seen), "a mixture of two saves"
    assert seen == sorted(seen), "once the new one is found it stays"
    assert seen[0] == [1.0]
    assert seen[-1] == [2.0]
    assert all(after == [2.0] for _, _, after, _ in results), "the next save works"
    assert all(left == [] for *_, left in results), "nothing is left of the killed one"
