"""Read a pipeline file: stages, the options of their commands, and the stages whose output they read.

output = "corpus"

[[stage]]                           mega-data clean --input raw --step whitespace --output corpus/text
name = "text"
command = "clean"
input = "raw"
step = ["whitespace"]

[[stage]]                           mega-data preprocess --input corpus/text --tokenizer-type NullTokenizer
name = "ids"                            --vocab-size 100 --output-prefix corpus/ids/ids
command = "preprocess"
input = "{text}"                    # the output of the stage `text`
tokenizer-type = "NullTokenizer"
vocab-size = 100
"""

from __future__ import annotations

import glob
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import click

from mega_data.readers.hub import HUB_PREFIX
from mega_data.readers.inputs import STDIN
from mega_schema.app.click_messages import rephrase_value
from mega_schema.app.click_options import flag_of
from mega_schema.app.config import did_you_mean
from mega_schema.dataset.indexed_dataset import sibling
from mega_schema.errors import ConfigError
from mega_schema.outputs import dataset_files
from mega_schema.urls import url_scheme

# command -> option that names its output
OUTPUT_OPTIONS: Final = MappingProxyType(
    {
        "extract": "--output",
        "clean": "--output",
        "dedup": "--output",
        "train-tokenizer": "--output",
        "preprocess": "--output-prefix",
        "preprocess-chat": "--output-prefix",
        "merge": "--output-prefix",
        "mix": "--output",
        "stats": "--output",
    }
)
# options of a run of one command in parts, or without output
_NOT_HERE: Final = frozenset({"stage", "dry-run", "help", "work-dir"})
# that change the speed of a command and not its output
SPEED_OPTIONS: Final = frozenset({"workers", "executor", "memory"})
_SLURM_OPTIONS: Final = frozenset({"executor", "workers"})  # that an array's script sets
_ARRAY_SIZE: Final = "array-size"
_SLURM: Final = "slurm"
# whose values can be checked before the files of earlier stages are there
_CHECKED_TYPES: Final = (click.Choice, click.types.IntParamType, click.types.FloatParamType)
_EXECUTORS: Final = ("local", "ray", _SLURM)
_TEXT_INPUTS: Final = "input"  # files, globs, folders and URLs
_DATASET_INPUTS: Final = frozenset({"data-path", "datasets"})
_REFERENCE: Final = re.compile(r"\{([^{}]*)\}")
_SEPARATORS: Final = re.compile("[:=,+]")  # of the options in a step
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """A command with its options.

    Attributes:
        options: values by the names of the flags, without dashes; references are not replaced.
        folder: folder of all that the stage writes.
        array_size: elements of the Slurm arrays that run its tasks; 0: they run without Slurm.
    """

    name: str
    command: str
    options: Mapping[str, Any]
    folder: Path
    array_size: int = 0

    @property
    def references(self) -> list[str]:
        """Return the names of the stages whose output the options name, each once."""
        words = [word for value in self.options.values() for word in _words(value)]
        return list(dict.fromkeys(name for word in words for name in _REFERENCE.findall(word)))

    @property
    def output(self) -> Path:
        """Return the value of the command's output option."""
        is_prefix = OUTPUT_OPTIONS[self.command] == "--output-prefix"
        return self.folder / self.name if is_prefix else self.folder

    @property
    def result(self) -> str:
        """Return the path by which other stages name the output."""
        if self.command == "preprocess":
            key = next(iter(_words(self.options.get("json-keys", self.options.get("json-key", "text")))))
            unit = "sentence" if self.options.get("split-sentences") else "document"
            return str(sibling(self.output, f"_{key}_{unit}"))
        if self.command == "preprocess-chat":
            from mega_data.chat.chat_tasks import CHAT_KEY

            return str(sibling(self.output, f"_{CHAT_KEY}_document"))
        return str(self.output)

    def arguments(self, results: Mapping[str, str]) -> list[str]:
        """Return the command line after `mega-data`.

        Args:
            results: `result` of the stages that the options name.
        """
        words = [self.command]
        for name, value in self.options.items():
            if value is False or (self.array_size and name in _SLURM_OPTIONS):
                continue
            words.append(f"--{name}")
            if value is not True:
                words += [_REFERENCE.sub(lambda m: results[m[1]], word) for word in _words(value)]
        return [*words, OUTPUT_OPTIONS[self.command], str(self.output)]

    def input_words(self) -> Iterator[tuple[str, str]]:
        """Yield the options that name inputs with each of their words, without weights."""
        for option, value in self.options.items():
            if option == _TEXT_INPUTS or option in _DATASET_INPUTS:
                for word in _words(value):
                    if not _is_number(word):
                        yield option, word


def _words(value: Any) -> list[str]:
    return [str(item) for item in (value if isinstance(value, list) else [value])]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class PipelineFile:
    """The stages of a file, each after the stages that it reads."""

    path: Path
    output: Path
    stages: tuple[PipelineStage, ...]

    @property
    def results(self) -> dict[str, str]:
        return {stage.name: stage.result for stage in self.stages}


def read_pipeline(path: Path, commands: Mapping[str, click.Command]) -> PipelineFile:
    """Read and check a pipeline file.

    Args:
        commands: the commands of the program by name.

    Raises:
        ConfigError: the file is not TOML; a stage, command, option or reference is unknown; stages form a
            cycle; or an input is missing.
    """
    if not path.is_file():
        raise ConfigError(path, "no such file", wanted="a TOML file with [[stage]] tables")
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(path, "not TOML", found=error) from None
    output, tables = document.pop("output", None), document.pop("stage", None)
    if document:
        key = next(iter(document))
        raise ConfigError(f"{path}: {key}", "unknown key", hint=did_you_mean(key, ["output", "stage"]))
    if not isinstance(output, str) or not output:
        wanted, hint = "the folder of all stages", 'output = "corpus"'
        raise ConfigError(f"{path}: output", "missing", wanted=wanted, hint=hint)
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(path, "has no stages", wanted="[[stage]] tables")
    stages = list[PipelineStage]()
    for number, table in enumerate(tables, 1):
        stage = _make_stage(path, number, table, Path(output), commands)
        if any(stage.name == earlier.name for earlier in stages):
            raise ConfigError(f"{path}: stage {stage.name}", "two stages of one name", hint="rename one")
        stages.append(stage)
    pipeline = PipelineFile(path, Path(output), tuple(_sort_stages(path, stages)))
    for stage in pipeline.stages:
        _check_inputs(path, stage)
    return pipeline


def _make_stage(
    path: Path, number: int, table: dict[str, Any], output: Path, commands: Mapping[str, click.Command]
) -> PipelineStage:
    name, command = table.pop("name", None), table.pop("command", None)
    where = f"{path}: stage {name if isinstance(name, str) else number}"
    if name is None:
        raise ConfigError(where, "has no name", found=", ".join(table) or "no key", wanted='name = "clean"')
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        wanted = "letters, digits, - and _, a letter or digit first: it names a folder"
        raise ConfigError(f"{where}: name", "not a name", found=repr(name), wanted=wanted)
    if command not in OUTPUT_OPTIONS:
        hint = did_you_mean(str(command), list(OUTPUT_OPTIONS))
        wanted = " | ".join(OUTPUT_OPTIONS)
        raise ConfigError(f"{where}: command", "unknown command", found=command, wanted=wanted, hint=hint)
    params = [param for param in commands[command].params if isinstance(param, click.Option)]
    flags = {flag[2:]: param for param in params for flag in (*param.opts, *param.secondary_opts)}
    output_option = OUTPUT_OPTIONS[command][2:]
    known = sorted(flags.keys() - _NOT_HERE - {output_option})
    array_size = _array_size(where, table, has_tasks="executor" in known)
    for key, value in table.items():
        if key not in known:
            hint = did_you_mean(key, known)
            if key in (output_option, *_NOT_HERE):
                hint = "leave it out: the run chooses it"
            raise ConfigError(f"{where}: {key}", f"unknown option of {command}", hint=hint)
        _check_value(f"{where}: {key}", flags[key], value)
    missing = [flag_of(param) for param in params if param.required and not _is_given(param, table)]
    if missing := [flag for flag in missing if flag[2:] != output_option]:
        raise ConfigError(f"{where}: {missing[0][2:]}", f"missing option of {command}")
    return PipelineStage(name, command, MappingProxyType(table), output / name, array_size)


def _array_size(where: str, table: dict[str, Any], *, has_tasks: bool) -> int:
    """Take the size of the Slurm arrays from the table of a stage; return 0 without Slurm."""
    size, is_slurm = table.pop(_ARRAY_SIZE, None), has_tasks and table.get("executor") == _SLURM
    if size is not None and not is_slurm:
        hint = f'executor = "{_SLURM}"' if has_tasks else "leave it out: the command has no tasks"
        raise ConfigError(f"{where}: {_ARRAY_SIZE}", "has no effect without Slurm", found=size, hint=hint)
    key, wanted, hint = f"{where}: {_ARRAY_SIZE}", "elements of each job array", f"{_ARRAY_SIZE} = 16"
    if is_slurm and size is None:
        raise ConfigError(key, "missing", wanted=wanted, hint=hint)
    if is_slurm and (type(size) is not int or size < 1):
        raise ConfigError(key, "wrong value", found=repr(size), wanted=wanted, hint=hint)
    return size or 0


def _is_given(param: click.Option, table: Mapping[str, Any]) -> bool:
    return any(flag[2:] in table for flag in param.opts)


def _check_value(where: str, param: click.Option, value: Any) -> None:
    items = value if isinstance(value, list) and param.multiple else [value]
    are_words = all(isinstance(v, str | int | float) and not isinstance(v, bool) for v in items)
    if param.is_flag:
        is_valid, wanted = isinstance(value, bool), "true or false"
    else:
        is_valid = bool(items) and are_words
        wanted = "a text, a number or a list of them" if param.multiple else "a text or a number"
    if not is_valid:
        raise ConfigError(where, "wrong value", found=repr(value), wanted=wanted)
    if param.name == "executor":  # a pipeline has one that the command has not
        if value not in _EXECUTORS:
            wanted, hint = " | ".join(_EXECUTORS), did_you_mean(str(value), _EXECUTORS)
            raise ConfigError(where, "unknown executor", found=value, wanted=wanted, hint=hint)
    elif isinstance(param.type, _CHECKED_TYPES) and not param.is_flag:
        kind: Any = param.type
        for item in items:
            try:
                kind.convert(str(item), param, None)
            except click.BadParameter as error:
                raise ConfigError(where, rephrase_value(error.message)) from None


def _sort_stages(path: Path, stages: Sequence[PipelineStage]) -> list[PipelineStage]:
    """Return the stages, each after those that it reads, otherwise in the order of the file.

    Raises:
        ConfigError: a reference names no stage, or stages read each other.
    """
    by_name = {stage.name: stage for stage in stages}
    ordered = dict[str, PipelineStage]()

    def add(stage: PipelineStage, readers: tuple[str, ...]) -> None:
        if stage.name in readers:
            cycle = " -> ".join([*readers[readers.index(stage.name) :], stage.name])
            raise ConfigError(f"{path}: stage {stage.name}", "stages read each other", found=cycle)
        if stage.name in ordered:
            return
        for name in stage.references:
            if name not in by_name:
                hint = did_you_mean(name, list(by_name))
                where = f"{path}: stage {stage.name}"
                raise ConfigError(where, "reads an unknown stage", found=f"{{{name}}}", hint=hint)
            add(by_name[name], (*readers, stage.name))
        ordered[stage.name] = stage

    for stage in stages:
        add(stage, ())
    return list(ordered.values())


def _check_inputs(path: Path, stage: PipelineStage) -> None:
    """Refuse an input that is not there and that no stage writes."""
    for option, word in stage.input_words():
        if _REFERENCE.search(word) or url_scheme(word):
            continue
        is_text = option == _TEXT_INPUTS
        if is_text and (word == STDIN or word.startswith(HUB_PREFIX)):
            continue
        paths = _files_at(word) if is_text else (p for p in dataset_files(Path(word)) if p.is_file())
        if next(iter(paths), None) is None:
            names = " | ".join(f"{{{name}}}" for name in stage.references)
            hint = f"a stage's output is written {{NAME}}{f': {names}' if names else ''}"
            raise ConfigError(f"{path}: stage {stage.name}: {option}", "no such input", found=word, hint=hint)


def input_files(stage: PipelineStage, results: Mapping[str, str]) -> list[Path]:
    """Return the files that a stage reads: its inputs, and other files that its options name.

    Args:
        results: `result` of the stages that the options name.
    """
    files = dict[Path, None]()
    values = [value for name, value in stage.options.items() if name not in SPEED_OPTIONS]
    for value in values:
        for word in _words(value):
            text = _REFERENCE.sub(lambda m: results[m[1]], word)
            if not url_scheme(text):
                files.update(dict.fromkeys(_files_at(text)))
    return sorted(files)


def _files_at(word: str) -> Iterator[Path]:
    """Yield the files of a file, a dataset's prefix, a folder without hidden files, a glob or a step."""
    try:
        path = Path(word)
        if path.exists():
            yield from _files_below(path)
        elif sibling(path, ".idx").is_file():
            yield from (file for file in dataset_files(path) if file.is_file())
        elif glob.has_magic(word):
            for name in glob.iglob(word, recursive=True):  # noqa: PTH207 - the word may be absolute
                yield from _files_below(Path(name))
        else:
            yield from (Path(name) for name in _SEPARATORS.split(word) if name and Path(name).is_file())
    except (OSError, ValueError):  # a word that is no path
        return


def _files_below(path: Path) -> Iterator[Path]:
    """Yield a file, or the files of a folder that are not hidden."""
    if path.is_file():
        yield path
    for file in path.rglob("*"):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
            yield file
