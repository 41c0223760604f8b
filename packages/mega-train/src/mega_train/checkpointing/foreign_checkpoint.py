"""Load a checkpoint of another program: `mega-ckpt` converts it in a subprocess before the run.

The converted copy is SAVE.converted, next to --save. It contains a fingerprint of the source: the next start
reuses the copy, or converts again if the source has changed. The copy gets its name only when it is complete.
Rank 0 converts; the other ranks wait for the copy.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from mega_model.distributed.mesh import World
from mega_schema.app.install_hint import install_hint
from mega_schema.atomic_io import disk_errors, write_text
from mega_schema.checkpoint.checkpoint_dir import LATEST
from mega_schema.checkpoint.formats import FORMAT_TITLES, detect_format
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError, FormatError, MegaError
from mega_schema.spec import ModelSpec
from mega_train.checkpointing.save_dir import is_same_folder
from mega_train.config import CheckpointConfig, RunConfig
from mega_train.data.datasets import Datasets
from mega_train.data.sft import open_examples
from mega_train.optim.base import STATE_NAMESPACES

RECORD = "converted.json"  # in the copy: the source and its fingerprint
_CONVERTER = "mega_ckpt"
_EXAMPLE_COPY = Path("CONVERTED")  # placeholder in suggested commands
_PADDED_FORMATS = ("megatron", "bigscience", "torch_dist")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
_HEARTBEAT_SECONDS = 5.0  # between signs of progress of the converting rank
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

log = logging.getLogger("mega.train")


@dataclass(frozen=True, slots=True)
class Conversion:
    """A checkpoint of another program, and the converted copy that a run loads.

    Attributes:
        flag: the flag that names it, --load or --pretrained-checkpoint.
        format_name: its format.
        copy: the folder of the converted copy.
        fingerprint: of the source's files.
    """

    source: Path
    flag: str
    format_name: str
    copy: Path
    fingerprint: str

    @property
    def is_done(self) -> bool:
        """Whether the copy exists, is complete and matches the source's fingerprint."""
        return _is_copy(self.copy, self.fingerprint)


def find_conversion(run: RunConfig) -> Conversion | None:
    """Find the conversion that the run needs; None if it loads a Mega checkpoint or no checkpoint.

    Raises:
        ConfigError: there is no folder for the copy, --save is the source, or the format is not known.
    """
    save = run.checkpoint
    source = save.load
    flag = "--load"
    if source is None or _is_new_run(save):
        source = save.pretrained
        flag = "--pretrained-checkpoint"
    if source is None:
        return None
    _check_is_folder(source, flag)
    if (format_name := find_foreign_format(source)) is None:
        return None
    if is_same_folder(source, save.save):
        raise ConfigError(
            "--save",
            "contains a checkpoint of another program",
            found=f"{FORMAT_TITLES[format_name]}, {source}",
            wanted="a folder of its own for the run",
            hint=f"--save {source}-mega",
        )
    if save.save is None:
        raise ConfigError(
            flag,
            f"is {FORMAT_TITLES[format_name]}, and its converted copy needs a folder",
            found=source,
            wanted="--save; the copy is written next to it",
            hint=f"--save RUN, or {_convert_command(source, format_name, _EXAMPLE_COPY)}",
        )
    folder = save.save.resolve()
    copy = folder.with_name(f"{folder.name}.converted")
    conversion = Conversion(source, flag, format_name, copy, _compute_fingerprint(source))
    if copy.exists() and _read_fingerprint(copy) is None:
        raise ConfigError(
            flag,
            "the folder for its converted copy is taken",
            found=copy,
            wanted="a free name",
            hint=f"another --save, or {_convert_command(source, format_name, _EXAMPLE_COPY)}",
        )
    return conversion


def convert_foreign_load(run: RunConfig, world: World) -> RunConfig:
    """Replace a --load or --pretrained-checkpoint of another program by its converted copy.

    Of a copy without the optimizer state that the run needs, only the weights are loaded, as with --finetune.

    Raises:
        ConfigError: as `find_conversion`, or mega-ckpt is not installed.
        MegaError: mega-ckpt refuses the source.
    """
    conversion = find_conversion(run)
    if conversion is None:
        return run
    if world.rank:
        _wait_for_copy(conversion, 60 * run.parallel.timeout_minutes)
    elif conversion.is_done:
        what = f"{conversion.source} is {FORMAT_TITLES[conversion.format_name]}"
        log.warning("%s: reusing its converted copy %s", what, conversion.copy)
    else:
        _convert(conversion, run)
    converted = load_copy(run, conversion)
    if conversion.flag == "--load" and world.rank == 0 and not run.checkpoint.finetune:
        finetune = converted.checkpoint.finetune
        what = "only its weights" if finetune else "its weights and its optimizer's state"
        log.warning("%s: the run begins with %s", conversion.copy, what)
    return converted


def load_copy(run: RunConfig, conversion: Conversion) -> RunConfig:
    """Return the run with the converted copy in place of its source. The copy must exist."""
    save = run.checkpoint
    if conversion.flag == "--pretrained-checkpoint":
        return replace(run, checkpoint=replace(save, pretrained=conversion.copy))
    finetune = save.finetune or not _has_training_state(conversion.copy, run)
    return replace(run, checkpoint=replace(save, load=conversion.copy, finetune=finetune))


def inspect_model(conversion: Conversion, run: RunConfig) -> ModelSpec:
    """Read the model of a checkpoint that is not converted yet, by `mega-ckpt inspect`. Writes nothing.

    Raises:
        ConfigError: mega-ckpt is not installed.
        FormatError: mega-ckpt refuses the checkpoint.
    """
    arguments = [
        "inspect",
        "--json",
        "--from",
        conversion.format_name,
        *_vocab_option(run, conversion.format_name),
    ]
    report = json.loads(_run_converter(conversion, [*arguments, str(conversion.source)]))
    return ModelSpec.from_dict(report["model"])


def find_foreign_format(path: Path) -> str | None:
    """Detect the format of a foreign checkpoint; None of a Mega checkpoint or an unknown format."""
    format_name = detect_format(path) if path.is_dir() else None
    return None if format_name == "mega" else format_name


def _check_is_folder(source: Path, flag: str) -> None:
    """Refuse a file, or a folder of weights of an unknown format."""
    if source.is_file():
        format_name = detect_format(source.parent)
        hint = (
            f"{flag} {source.parent}"
            if format_name is not None
            else _convert_command(source, "FORMAT", _EXAMPLE_COPY)
        )
        raise ConfigError(flag, "is a file", found=source, wanted="the folder of a checkpoint", hint=hint)
    if source.is_dir() and detect_format(source) is None and not (source / LATEST).is_file():
        weights = [path for path in sorted(source.iterdir()) if path.suffix in _WEIGHT_SUFFIXES]
        if weights:
            raise ConfigError(
                flag,
                "contains weights of an unknown format",
                found=weights[0],
                wanted="a checkpoint of Mega, or of Hugging Face with its config.json",
                hint=_convert_command(source, "FORMAT", _EXAMPLE_COPY),
            )


def _is_new_run(save: CheckpointConfig) -> bool:
    """Whether --load is the run's own empty folder, so that --pretrained-checkpoint applies."""
    return save.load is not None and is_same_folder(save.load, save.save) and detect_format(save.load) is None


def _vocab_option(run: RunConfig, format_name: str) -> Sequence[str]:
    """Return --true-vocab-size for a format that may store only the padded vocabulary.

    The datasets are opened for it, and a mistake in --data-path is found before the conversion.
    """
    data = run.data
    if run.model.vocab is not None or not any((data.path, data.path_file, data.has_dataset_per_split)):
        vocab = run.model.vocab
    else:
        identity = (open_examples(data) if data.sft else Datasets.open(data)).identity
        vocab = identity.vocab_size if identity is not None else None
    return ["--true-vocab-size", str(vocab)] if vocab and format_name in _PADDED_FORMATS else []


def _convert(conversion: Conversion, run: RunConfig) -> None:
    source = conversion.source
    format_name = conversion.format_name
    copy = conversion.copy
    arguments = ["convert", "--from", format_name, "--to", "mega", "--no-check-logits", "--load", str(source)]
    arguments += _vocab_option(run, format_name)
    _check_converter(conversion)
    log.warning("%s is %s: converting it to %s", source, FORMAT_TITLES[format_name], copy)
    partial = _partial_folder(copy)
    with disk_errors(partial):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        with _heartbeat(partial):
            _run_converter(conversion, [*arguments, "--save", str(partial / copy.name)])
        with disk_errors(copy):
            record = json.dumps({"source": str(source), "fingerprint": conversion.fingerprint})
            write_text(partial / copy.name / RECORD, record + "\n")
            if copy.exists():
                shutil.rmtree(copy)
            (partial / copy.name).rename(copy)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_converter(conversion: Conversion) -> None:
    if find_spec(_CONVERTER) is None:
        source, format_name = conversion.source, conversion.format_name
        raise ConfigError(
            conversion.flag,
            f"is {FORMAT_TITLES[format_name]}, and mega-ckpt, which converts it, is not installed",
            found=source,
            hint=f"{install_hint('mega-ckpt')}, or elsewhere "
            + _convert_command(source, format_name, _EXAMPLE_COPY),
        )


def _run_converter(conversion: Conversion, arguments: Sequence[str]) -> str:
    """Run mega-ckpt and return its standard output.

    Raises:
        ConfigError: it is not installed.
        FormatError: it refuses the source, with its own message.
    """
    _check_converter(conversion)
    environment = {name: value for name, value in os.environ.items() if name != _ERROR_FILE}
    argv = [sys.executable, "-m", _CONVERTER, *arguments]
    process = subprocess.run(argv, capture_output=True, text=True, env=environment, check=False)
    if process.returncode:
        lines = [line for line in process.stderr.splitlines() if line.strip()]
        error_line = next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "")
        raise FormatError(
            f"{conversion.flag} {conversion.source}",
            "cannot be converted",
            found=error_line.removeprefix("error: ") or f"mega-ckpt ended with code {process.returncode}",
            hint=_convert_command(conversion.source, conversion.format_name, _EXAMPLE_COPY),
        )
    return process.stdout


def _wait_for_copy(conversion: Conversion, timeout: float) -> None:
    """Wait until rank 0 has written the copy.

    Raises:
        MegaError: rank 0 has shown no progress for `timeout` seconds.
    """
    last_seen = time.monotonic()
    last_beat = 0
    copy = conversion.copy
    while not conversion.is_done:
        try:
            current_beat = _partial_folder(copy).stat().st_mtime_ns
        except OSError:
            current_beat = 0
        if current_beat != last_beat:
            last_beat = current_beat
            last_seen = time.monotonic()
        if time.monotonic() - last_seen > timeout:
            raise MegaError(
                copy,
                "rank 0 has not converted the checkpoint",
                found=f"no sign of it for {timeout:g} s",
                hint="put --save on a file system that all ranks share",
            )
        time.sleep(0.2)


@contextmanager
def _heartbeat(folder: Path) -> Iterator[None]:
    """Touch the folder at intervals, as a sign of progress for the waiting ranks."""
    stop = threading.Event()

    def touch() -> None:
        while not stop.wait(_HEARTBEAT_SECONDS):
            os.utime(folder)

    thread = threading.Thread(target=touch, name="conversion", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _is_copy(copy: Path, fingerprint: str) -> bool:
    """Whether the folder is a complete copy that matches the source's fingerprint."""
    if _read_fingerprint(copy) != fingerprint:
        return False
    try:
        Checkpoint.open(copy)
    except MegaError:
        return False
    return True


def _read_fingerprint(copy: Path) -> str | None:
    """Read the fingerprint of the source of a copy; None if the folder is not a copy."""
    try:
        return str(json.loads((copy / RECORD).read_text("utf-8"))["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _has_training_state(copy: Path, run: RunConfig) -> bool:
    """Whether the copy has an iteration and the optimizer state that the run needs."""
    checkpoint = Checkpoint.open(copy)
    spaces = STATE_NAMESPACES[run.optimizer.name]
    return set(spaces) <= set(checkpoint.tensors) and checkpoint.iteration > 0


def _compute_fingerprint(source: Path) -> str:
    """Hash the names, sizes and modification times of the source's files."""
    digest = blake2b(digest_size=16)
    for path in sorted(source.rglob("*")):
        if path.is_file():
            stat = path.stat()
            digest.update(f"{path.relative_to(source)}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _partial_folder(copy: Path) -> Path:
    return copy.with_name(f".{copy.name}.partial")


def _convert_command(source: Path, format_name: str, target: Path) -> str:
    return f"mega-ckpt convert --from {format_name} --to mega --load {source} --save {target}"
