"""train.sbatch with fake Slurm programs: command lines, and two nodes on this machine."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mega_schema.checkpoint.reader import Checkpoint
from tests.faults.ranks import CONFIG
from tests.parity.runs import corpus
from tests.repo_rules.markdown import check_command
from tests.repo_rules.repository import ROOT

TRAIN = ROOT / "infra/slurm/train.sbatch"
ITS_OWN = "while [[ $1 == --* ]]; do [[ $1 == *=* ]] || shift; shift; done"
SRUN = f"""{ITS_OWN}
for _ in $(seq "$SLURM_NNODES"); do "$@" & steps+=($!); done
for step in "${{steps[@]}}"; do wait "$step" || exit; done"""
ONE_LINE = 'printf "%s\\n" "torchrun$(printf "\\t%s" "$@")"'  # at once: two write to one pipe
NODES = 'case "$*" in "show hostnames here[1-2]") printf "%s\\n" localhost elsewhere ;; *) echo "$@" ;; esac'


def submit_job(folder: Path, words: list[str], torchrun: str, **slurm: str) -> subprocess.Popen[str]:
    """The job's script as the first node of a job of two runs it, with these programs before all others."""
    programs = folder / "programs"
    programs.mkdir()
    for name, body in {"srun": SRUN, "scontrol": NODES, "torchrun": torchrun}.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(stat.S_IRWXU)
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(random.randrange(10_000)),  # decides the port
        "SLURM_JOB_NODELIST": "here[1-2]",
        "SLURM_NNODES": "2",
        **slurm,
    }
    return subprocess.Popen(
        ["bash", str(TRAIN), *words],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_output(job: subprocess.Popen[str], seconds: float) -> str:
    """What it said, once it has ended well."""
    output, _ = job.communicate(timeout=seconds)
    assert job.returncode == 0, output
    return output


@pytest.mark.usefixtures("paths_need_not_exist")
def test_each_node_starts_a_torchrun_that_meets_the_others_at_the_first(tmp_path: Path) -> None:
    run = ["llama", "--config", "with a space.toml", "--load", "runs/a", "--save", "runs/a"]
    slurm = {"SLURM_JOB_ID": "123456", "SLURM_GPUS_ON_NODE": "8", "SLURM_RESTART_COUNT": "2"}
    output = wait_for_output(submit_job(tmp_path, run, ONE_LINE, **slurm), 30)
    lines = [line.split("\t") for line in output.splitlines()]
    assert len(lines) == 2
    for words in lines:
        check_command(words)
        options, arguments = words[1 : words.index("-m")], words[words.index("-m") :]
        assert arguments == ["-m", "mega_train", *run]
        assert dict(zip(options[::2], options[1::2], strict=True)) == {
            "--nnodes": "2",
            "--nproc-per-node": "8",
            "--max-restarts": "3",
            "--rdzv-id": "123456-2",
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": "localhost:23456",
        }


@pytest.mark.long
def test_two_nodes_train_together(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG + f'[data]\ndata_path = "{corpus(tmp_path)}"\n')
    save = tmp_path / "save"
    run = ["gpt", "--config", str(config), "--load", str(save), "--save", str(save), "--train-iters", "3"]
    job = submit_job(tmp_path, run, f'exec {sys.executable} -m torch.distributed.run "$@"')
    assert "tp 1 x pp 1 x dp 2" in wait_for_output(job, 240)
    assert Checkpoint.open(save).iteration == 3


def test_a_job_whose_time_is_up_asks_to_be_put_in_the_queue_again(tmp_path: Path) -> None:
    job = submit_job(tmp_path, ["gpt"], "echo started; sleep 1", SLURM_JOB_ID="77")
    assert job.stdout is not None
    assert job.stdout.readline() == "started\n"
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=30)
    assert "requeue 77\n" in output


def test_a_node_that_fails_fails_the_job(tmp_path: Path) -> None:
    job = submit_job(tmp_path, ["gpt"], "exit 7")
    output, _ = job.communicate(timeout=30)
    assert (job.returncode, output) == (7, "")
