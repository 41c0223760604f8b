"""A user's own file of multiple-choice questions. Imports no numpy, for `--help`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType

from mega_eval.presets.choice_presets import CONTINUATION, LETTER_CHOICES, ChoicePreset
from mega_eval.presets.question import LETTERS, ChoiceQuestion, ask, ask_letters, parse_index
from mega_eval.records import TaskRecord
from mega_schema.errors import ConfigError, FormatError

_ANSWER = "Answer:"
_KEY = re.compile(r"\{([^{}]+)\}")


@dataclass(frozen=True, slots=True)
class OwnChoices:
    """Which keys of a record are question, choices and answer.

    Attributes:
        prompt: text before the choices; {KEY} is replaced by the value of a key.
        choices_key: of the list of choices, or one key for each choice, with commas between them.
        answer_key: of the answer: its number, its letter or its text.
        first_answer: number of the first choice, 0 or 1.
        tag_key: of the tag whose values get an accuracy each.

    Raises:
        ConfigError: the prompt has no key, so that all questions would be the same.
    """

    prompt: str
    choices_key: str
    answer_key: str
    first_answer: int = 0
    tag_key: str | None = None

    def __post_init__(self) -> None:
        if not _KEY.search(self.prompt):
            raise ConfigError(
                "--prompt",
                "names no key of a record",
                found=repr(self.prompt),
                wanted="{KEY} where its text belongs",
                hint="--prompt 'Question: {question}\\nAnswer:'",
            )

    @property
    def preset(self) -> ChoicePreset:
        """The preset that reads such records."""
        source = "your own"
        return ChoicePreset(
            name="choice",
            title="",
            wants="",
            readers=MappingProxyType({CONTINUATION: self.read, LETTER_CHOICES: self.read_letters}),
            sources=MappingProxyType({CONTINUATION: source, LETTER_CHOICES: source}),
            group=self.tag_key,
        )

    def read(self, record: TaskRecord) -> ChoiceQuestion:
        """Read a question; the model scores the choices."""
        choices = self._choices(record)
        return ask(
            record, self._context(record), choices, self._answer(record, choices), tags=self._tags(record)
        )

    def read_letters(self, record: TaskRecord) -> ChoiceQuestion:
        """Read a question; the model scores the letters of the choices."""
        choices = self._choices(record)
        context = self._context(record).removesuffix(_ANSWER).rstrip("\n")
        return ask_letters(record, context, choices, self._answer(record, choices), tags=self._tags(record))

    def _context(self, record: TaskRecord) -> str:
        return _KEY.sub(lambda match: record.text(match[1]), self.prompt)

    def _choices(self, record: TaskRecord) -> list[str]:
        keys = [key.strip() for key in self.choices_key.split(",")]
        choices = record.texts(keys[0]) if len(keys) == 1 else [record.text(key) for key in keys]
        for choice in choices:
            if not choice.strip():
                raise FormatError(
                    f"{record.where} {self.choices_key}", "a choice without text", found=repr(choice)
                )
        return choices

    def _answer(self, record: TaskRecord, choices: list[str]) -> int:
        """Return the index of the answer; a text that is a choice is that choice, even if it is a number."""
        value = record.value(self.answer_key)
        if isinstance(value, str):
            if choices.count(value) == 1:
                return choices.index(value)
            if len(value) == 1 and value in LETTERS:
                return LETTERS.index(value)
            if not value.strip().isdecimal():
                raise FormatError(
                    f"{record.where} {self.answer_key}",
                    "the answer is none of the choices",
                    found=repr(value),
                    wanted="the number, letter or text of a choice",
                )
        return parse_index(record, self.answer_key, first=self.first_answer)

    def _tags(self, record: TaskRecord) -> dict[str, str]:
        return {self.tag_key: record.text(self.tag_key)} if self.tag_key else {}
