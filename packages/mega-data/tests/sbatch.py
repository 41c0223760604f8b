"""A fake sbatch with the features that infra/slurm and `mega-data run` use.

The elements of an array run side by side as processes here, and it returns when they have ended, with the
exit code of one that failed if `--wait` is there. A job after one that failed is not run. JOBS is a folder
for what the jobs said and for which of them failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

NO_VALUE = ("--parsable", "--wait")


def main(words: list[str], jobs: Path) -> int:
    flags = dict[str, str]()
    while words[0].startswith("--"):
        flag = words.pop(0)
        flags[flag] = "" if flag in NO_VALUE else words.pop(0)
    number = len(list(jobs.glob("*.said"))) + 1
    (jobs / f"{number}.flags").write_text(" ".join([*flags, *flags.values()]))
    sys.stdout.write(f"{number};cluster\n")
    sys.stdout.flush()
    failed = jobs / f"{number}.failed"
    before = flags.get("--dependency", "").rpartition(":")[2]
    ends = [1]
    with ExitStack() as logs:
        log = logs.enter_context((jobs / f"{number}.said").open("w"))
        if not before or not (jobs / f"{before}.failed").exists():
            count = int(flags["--array"].partition("-")[2]) + 1 if "--array" in flags else 0
            elements = []
            for element in range(max(1, count)):
                out = log
                if "--output" in flags:
                    out = logs.enter_context(Path(flags["--output"].replace("%a", str(element))).open("w"))
                error = logs.enter_context(Path(flags["--error"]).open("w")) if "--error" in flags else out
                variables = environment(element, count, flags.get("--cpus-per-task", "1"))
                elements.append(subprocess.Popen(["bash", *words], env=variables, stdout=out, stderr=error))
            ends = [element.wait() for element in elements]
        if any(ends):
            failed.touch()
    return max(ends) if "--wait" in flags else 0


def environment(element: int, count: int, cpus: str) -> dict[str, str]:
    """As Slurm sets it in an element of an array of `count`, or in a job where that is 0."""
    variables = dict(os.environ, SLURM_CPUS_PER_TASK=cpus)
    if count:
        variables.update(SLURM_ARRAY_TASK_ID=str(element), SLURM_ARRAY_TASK_MIN="0")
        variables.update(SLURM_ARRAY_TASK_COUNT=str(count), SLURM_ARRAY_TASK_STEP="1")
    return variables


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(os.environ["JOBS"])))
