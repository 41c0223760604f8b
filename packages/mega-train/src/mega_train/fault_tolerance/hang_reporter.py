"""Report a hang or a lost rank: one error line that names the missing ranks, and the stacks of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from mega_schema.errors import MegaError
from mega_train.fault_tolerance.error_reporting import RankLostError, write_error_file
from mega_train.fault_tolerance.rank_status import RankStatus


class HangReporter:
    """Writes the error lines of a rank's watchdog."""

    def __init__(self, rank: int, progress_and_hint: Callable[[], tuple[str, str]], out: TextIO) -> None:
        """Report to a stream.

        Args:
            progress_and_hint: the progress of the run and how to resume it, for the error line.
        """
        self._rank = rank
        self._progress_and_hint = progress_and_hint
        self._out = out

    def report_lost_rank(self, reason: str, diagnosis: str = "", statuses: Sequence[RankStatus] = ()) -> None:
        """Write the error line, and the stacks of the statuses.

        Args:
            diagnosis: the missing ranks and the functions of the others; may be empty.
        """
        progress, hint = self._progress_and_hint()
        where = f"rank {self._rank}, {progress}"
        error = (
            RankLostError(where, reason, found=diagnosis, hint=hint)
            if diagnosis
            else RankLostError(where, reason, hint=hint)
        )
        self.report_error(error, format_stacks(statuses))

    def report_error(self, error: MegaError, details: str = "") -> None:
        """Write an error line, and then `details`."""
        line = f"error: {error}"
        write_error_file(line)
        self._out.write(f"{line}\n{details}")
        self._out.flush()


def diagnose(statuses: Sequence[RankStatus], hosts: Mapping[int, str]) -> str:
    """Describe the ranks that do not reply, and the functions of the others, smallest group first."""
    answered = {status.rank for status in statuses}
    parts = [f"rank {rank} ({host}) does not answer" for rank, host in hosts.items() if rank not in answered]
    by_frame: dict[str, list[RankStatus]] = {}
    for status in statuses:
        by_frame.setdefault(status.frame, []).append(status)
    for frame, group in sorted(by_frame.items(), key=lambda item: len(item[1])):
        idle = max(status.idle for status in group)
        ranks = (
            group[0].name if len(group) == 1 else f"ranks {_format_ranges([status.rank for status in group])}"
        )
        parts.append(f"{ranks} in {frame} for {idle:.0f} s")
    return ", ".join(parts)


def format_stacks(statuses: Sequence[RankStatus]) -> str:
    """Format the stacks of all ranks."""
    return "".join(f"--- stacks of {status.name}\n{status.stacks}" for status in statuses)


def _format_ranges(numbers: Sequence[int]) -> str:
    """Format 1, 2, 3, 7 as "1-3 and 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " and ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
