"""Run tasks on a Slurm job array: element i of n runs every n-th task of a stage, starting with task i.

The output of a task does not depend on the element, so an array may be resubmitted with another n: finished
tasks stay finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from mega_data.task_stages import TaskStage
from mega_schema.errors import ConfigError

_ID, _FIRST, _STEP, _COUNT = (f"SLURM_ARRAY_TASK_{word}" for word in ("ID", "MIN", "STEP", "COUNT"))
_ARRAY = "sbatch --array=0-15"


def array_element(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return this process's index in its array, from 0, and the size of the array.

    Raises:
        ConfigError: the process is not in an array, or the array indices have gaps.
    """
    values = {name: environment.get(name, "") for name in (_ID, _FIRST, _STEP, _COUNT)}
    values[_STEP] = values[_STEP] or "1"
    for name, value in values.items():
        if not value.isdecimal():
            what = "is not a number" if value else "is not set: not an element of a job array"
            raise ConfigError(name, what, hint=f"{_ARRAY} infra/slurm/data.sbatch ...")
    number, first, step, count = (int(value) for value in values.values())
    index, remainder = divmod(number - first, max(1, step))
    if remainder or not 0 <= index < count:
        what = f"element {number} of {count}: the numbers have gaps"
        raise ConfigError(_ID, what, hint=f"{_ARRAY}; finished tasks are not repeated")
    return index, count


def refuse_whole_run(stages: Iterable[str]) -> NoReturn:
    """Refuse an array element without --stage.

    Raises:
        ConfigError: always; it names the stages.
    """
    what, hint = (
        "an element of a job array does one stage",
        "infra/slurm/data.sh submits an array per stage, and a job that ends the run",
    )
    raise ConfigError("--stage", what, wanted=" | ".join(stages), hint=hint)


def element_stages(stages: Sequence[TaskStage], environment: Mapping[str, str]) -> list[TaskStage]:
    """Return the stages with this element's tasks.

    Raises:
        ConfigError: as `array_element`; or several stages, of which only the first could begin.
    """
    if len(stages) > 1:
        refuse_whole_run(stage.name for stage in stages)
    element = array_element(environment)
    return [replace(stage, shard=element) for stage in stages]
