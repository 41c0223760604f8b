"""A fake sbatch with the features that infra/slurm uses.

The elements of an array run side by side as processes here, and it returns when they have ended. A job after
one that failed is not run. JOBS is a folder for what the jobs said and for which of them failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def main(words: list[str], jobs: Path) -> None:
    flags = dict[str, str]()
    while words[0].startswith("--"):
        flag = words.pop(0)
        flags[flag] = "" if flag == "--parsable" else words.pop(0)
    number = len(list(jobs.glob("*.said"))) + 1
    failed = jobs / f"{number}.failed"
    before = flags.get("--dependency", "").rpartition(":")[2]
    with (jobs / f"{number}.said").open("w") as log:
        if before and (jobs / f"{before}.failed").exists():
            failed.touch()
        else:
            count = int(flags["--array"].partition("-")[2]) + 1 if "--array" in flags else 0
            elements = [
                subprocess.Popen(["bash", *words], env=environment(element, count), stdout=log, stderr=log)
                for element in range(max(1, count))
            ]
            ends = [element.wait() for element in elements]
            if any(ends):
                failed.touch()
    sys.stdout.write(f"{number};cluster\n")


def environment(element: int, count: int) -> dict[str, str]:
    """As Slurm sets it in an element of an array of `count`, or in a job where that is 0."""
    variables = dict(os.environ, SLURM_CPUS_PER_TASK="1")
    if count:
        variables.update(SLURM_ARRAY_TASK_ID=str(element), SLURM_ARRAY_TASK_MIN="0")
        variables.update(SLURM_ARRAY_TASK_COUNT=str(count), SLURM_ARRAY_TASK_STEP="1")
    return variables


if __name__ == "__main__":
    main(sys.argv[1:], Path(os.environ["JOBS"]))
