"""Choose the examples that come before a question."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mega_eval.records import TaskRecord
from mega_schema.errors import ConfigError

SAMPLERS = ("shared", "first", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class FewShot:
    """How examples are chosen.

    Attributes:
        count: examples before each question.
        sampler: "shared": one draw for all questions, so that they share a prefix that the model reads once;
            "first": the first records of the file; "random": a draw for each question, in the order of
            lm-evaluation-harness' default sampler, so that equal seeds draw equal examples.
        seed: of the draws.
        where: the file of the examples, for error messages.
    """

    count: int = 0
    sampler: str = "shared"
    seed: int = 1234
    where: str = "--data"

    @property
    def suffix(self) -> str:
        """What a convention's name says of it."""
        if not self.count:
            return ""
        return f"-{self.count}shot" + ("" if self.sampler == "first" else f"-{self.sampler}{self.seed}")


class ExamplePool:
    """Draws the examples of questions, one question after the other; a question is never its own example.

    Args:
        records: the candidates, for each group of questions (an MMLU subject); "" without groups.
        draws_spare: whether a random draw takes one more record, in case the question is among them.
            lm-evaluation-harness does so in its tasks without a test split.
    """

    def __init__(
        self, fewshot: FewShot, records: dict[str, Sequence[TaskRecord]], *, draws_spare: bool = True
    ) -> None:
        self._fewshot = fewshot
        self._draws_spare = draws_spare
        self._random = random.Random(fewshot.seed)
        self._records = {group: self._arrange(group, rows) for group, rows in records.items()}

    def _arrange(self, group: str, records: Sequence[TaskRecord]) -> list[TaskRecord]:
        """Return the candidates of a group in the order in which a fixed draw takes them."""
        if self._fewshot.sampler != "shared":
            return list(records)
        return random.Random(f"{self._fewshot.seed}/{group}").sample(list(records), len(records))

    def draw(self, question: TaskRecord, group: str = "") -> list[TaskRecord]:
        """Return the examples of a question.

        Raises:
            ConfigError: there are too few candidates.
        """
        count = self._fewshot.count
        if not count:
            return []
        candidates = self._records.get(group, [])
        if self._fewshot.sampler == "random":
            examples = self._draw_at_random(question, candidates)
        else:
            # one more than needed, in case the question is among them
            examples = [record for record in candidates[: count + 1] if record.values != question.values][
                :count
            ]
        if len(examples) < count:  # copies of the question, or a short file
            others = [record for record in candidates if record.values != question.values]
            self._check_count(len(others), len(candidates), group)
            examples = (
                others[:count] if self._fewshot.sampler != "random" else self._random.sample(others, count)
            )
        return examples

    def _draw_at_random(self, question: TaskRecord, candidates: list[TaskRecord]) -> list[TaskRecord]:
        size = min(len(candidates), self._fewshot.count + self._draws_spare)
        drawn = self._random.sample(candidates, size)
        return [record for record in drawn if record.values != question.values][: self._fewshot.count]

    def _check_count(self, available: int, total: int, group: str) -> None:
        if available < self._fewshot.count:
            what = f"{self._fewshot.where} has {total:,} examples" + (f" of {group}" if group else "")
            if available < total:
                what += f", {available:,} without the question itself"
            raise ConfigError(
                "--num-fewshot",
                what,
                found=self._fewshot.count,
                wanted=f"at most {available}",
                hint=f"--num-fewshot {available}" if available else "--fewshot-data FILE",
            )
