"""Compare the logits of two checkpoints for the same tokens, in float32 on a CPU.

Only this module runs a model, so torch is imported inside its functions. `transformers` runs Hugging Face
folders if it is installed; `mega_model` runs all others. One whole model is in memory at a time.

transformers does not open files of the folder: a key of config.json can name code to download, and
`local_files_only` does not prevent that. It receives a config built from the spec, and the tensors by name.

The source's weights are rounded to the dtype of the written ones, so that only the order of sums differs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource
from mega_ckpt.formats.huggingface import config_json
from mega_ckpt.formats.huggingface import folder as hf_folder
from mega_ckpt.formats.huggingface.names import aliases
from mega_ckpt.tensors import dtypes
from mega_schema.app.install_hint import install_hint
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL
from mega_schema.errors import ConfigError, FormatError
from mega_schema.params import count_params
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec

if TYPE_CHECKING:
    import torch

TOKENS = 64  # of the default check
_SMALL_MODEL = 1_000_000_000  # parameters
_TRANSFORMERS, _REFERENCE = "transformers", "the reference forward"
# relative to the largest logit: effect of the order of float32 sums
_TOLERANCE = 1e-4
# exceptions of transformers for a model that it cannot build
_TRANSFORMERS_ERRORS = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class LoadedSide:
    """An opened checkpoint and the name of its format."""

    format: str
    path: Path
    source: CheckpointSource


@dataclass(frozen=True, slots=True)
class LogitsDifference:
    """The difference between the logits of two checkpoints.

    Attributes:
        tokens: number of tokens.
        absolute, relative: the largest difference, and its fraction of the largest logit.
        tolerance: the relative difference that the order of sums explains.
        by: the programs that ran the source and the result.
    """

    tokens: int
    absolute: float
    relative: float
    tolerance: float
    by: tuple[str, str]

    @property
    def is_close(self) -> bool:
        return self.relative <= self.tolerance  # also false for NaN

    @property
    def error_line(self) -> str:
        """The one-line error message for logits that differ."""
        return (
            f"logits differ from the source's: found {self.relative:.1e} of the largest, "
            f"wanted at most {self.tolerance:.0e}; hint: keep the source, and report which model it is"
        )

    def __str__(self) -> str:
        run = f"both by {self.by[0]}" if len({*self.by}) == 1 else f"by {' and '.join(self.by)}"
        if self.by == (_REFERENCE, _REFERENCE):
            run += ": the weights are equal, the mapping of their names is not checked"
        difference = f"max difference {self.absolute:.1e}, {self.relative:.1e} of the largest"
        return f"{difference}, over {self.tokens} tokens, {run}"


def tokens_to_check(tokens: int | None, want: str, source: CheckpointSource) -> int:
    """Return the number of tokens to check with; 0 for no check.

    Args:
        tokens: from --check-logits; None: check a small model that goes to Hugging Face.

    Raises:
        ConfigError: a check was requested and torch is not installed.
    """
    torch_is_here = importlib.util.find_spec("torch") is not None
    if tokens is None:
        small = want == "hf" and count_params(table(source.spec)) < _SMALL_MODEL
        return _default_tokens(source.spec) if small and torch_is_here else 0
    if tokens and not torch_is_here:
        hint = f"{install_hint('mega-ckpt', 'torch')}, or --no-check-logits"
        raise ConfigError("--check-logits", "runs the model, and torch is not installed", hint=hint)
    return tokens


def _default_tokens(spec: ModelSpec) -> int:
    """Return the number of tokens of the default check, with pairs outside the window of an encoder."""
    window = spec.sliding_window if not spec.causal else None
    return max(TOKENS, 2 * (window or 0))


def compare_logits(read: LoadedSide, written: LoadedSide, tokens: int) -> LogitsDifference:
    """Compare the logits of both sides for the same random tokens.

    Raises:
        FormatError: the vocabulary sizes differ.
    """
    vocab, max_seq_len = read.source.spec.vocab, read.source.spec.max_seq_len
    if written.source.spec.vocab != vocab:
        found = written.source.spec.vocab
        raise FormatError(f"{written.path}: vocabulary", "is another", found=found, wanted=vocab)
    length = min(tokens, max_seq_len)
    token_BS = np.random.default_rng(0).integers(0, vocab, (-(-tokens // length), length))
    stored = written.source.spaces[MODEL]
    read_runner, written_runner = _choose_runner(read), _choose_runner(written)
    a = _RUNNERS[read_runner](read, stored, token_BS)
    b = _RUNNERS[written_runner](written, stored, token_BS)
    a, b = a[:tokens], b[:tokens]
    absolute, largest = float(np.abs(a - b).max()), float(np.abs(a).max())
    return LogitsDifference(
        tokens, absolute, absolute / largest if absolute else 0.0, _TOLERANCE, (read_runner, written_runner)
    )


def _choose_runner(side: LoadedSide) -> str:
    """Choose transformers for a Hugging Face folder, if it is installed and has the class."""
    if side.format != "hf" or importlib.util.find_spec("transformers") is None:
        return _REFERENCE
    architecture = config_json.class_of(side.source.spec, side.path).architecture
    try:  # old releases lack the class, and missing dependencies prevent its import
        return _TRANSFORMERS if hasattr(importlib.import_module("transformers"), architecture) else _REFERENCE
    except (ImportError, RuntimeError):
        return _REFERENCE


def _run_reference(side: LoadedSide, stored: Mapping[str, str], token_BS: np.ndarray) -> np.ndarray:
    import torch

    from mega_model.attention_backends import PackedAttention, PaddedCrossAttention
    from mega_model.build import build_model, fill_weights
    from mega_model.encoder import Encoder
    from mega_model.encoder_decoder import EncoderDecoder, EncoderInput
    from mega_model.runtime import Runtime

    source = side.source

    def read(name: str, slab: Slab) -> np.ndarray:
        rounded = source.cast(MODEL, name, slab, stored[name])
        return np.array(dtypes.cast(rounded, stored[name], "F32", name))  # torch requires a writable array

    rows, length = token_BS.shape
    model = build_model(Runtime.single_process(source.spec))
    fill_weights(model, read)
    with torch.no_grad():
        position_T = torch.arange(length).repeat(rows)
        attend = PackedAttention(rows, length, causal=source.spec.causal)
        token_T = torch.from_numpy(token_BS).flatten()
        if isinstance(model, EncoderDecoder):  # both sides read the same tokens
            both_ways = PackedAttention(rows, length, causal=False)
            text = EncoderInput(token_T, position_T, both_ways, PaddedCrossAttention(rows))
            x_TD = model.hidden_states(token_T, position_T, attend, source=text)
        else:
            x_TD = model.hidden_states(token_T, position_T, attend)
        if isinstance(model, Encoder) and source.spec.task_head != "none":
            task_logits = model.row_logits(x_TD, rows)
            if task_logits.ndim == 2:
                task_logits = task_logits[:, None].expand(-1, length, -1)
            task: np.ndarray = task_logits.flatten(0, 1).numpy()
            return task
        logits = model.logits(x_TD)[:, : source.spec.vocab]
        if isinstance(model, Encoder) and source.spec.binary_head:
            binary_B2 = model.binary_logits(x_TD, torch.arange(rows) * length)
            logits = torch.cat((logits, binary_B2.repeat_interleave(length, 0)), -1)
    numbers: np.ndarray = logits.numpy()
    return numbers


def _run_transformers(side: LoadedSide, stored: Mapping[str, str], token_BS: np.ndarray) -> np.ndarray:
    """Run transformers' class of the model on the folder's tensors, each rounded to its stored dtype.

    Raises:
        FormatError: transformers does not build the model, or does not know one of its tensors.
    """
    import torch

    transformers = importlib.import_module("transformers")
    folder = hf_folder.open_hf_folder(side.path)
    kinds = {alias.foreign: stored[alias.ours] for alias in aliases(folder.spec)}
    weights = {}
    for name, entry in folder.entries.items():
        rounded = dtypes.cast(entry.values(), entry.dtype, kinds[name], name)
        weights[name] = torch.from_numpy(np.array(dtypes.cast(rounded, kinds[name], "F32", name)))
    # the default id of padding may be outside the vocabulary
    config = {**config_json.from_spec(folder.spec, side.path), "pad_token_id": None}
    model_class = getattr(transformers, config_json.class_of(folder.spec, side.path).architecture)
    try:
        with _silence(transformers), torch.no_grad():
            model, report = model_class.from_pretrained(
                None,
                config=model_class.config_class(**config),
                state_dict=weights,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
            token_ids_BS = torch.from_numpy(token_BS)
            if folder.spec.encoder_layers is not None:  # both sides read the same tokens
                inputs = {"input_ids": token_ids_BS, "decoder_input_ids": token_ids_BS}
                logits = model(**inputs, use_cache=False).logits
            elif folder.spec.causal:
                logits = model(token_ids_BS, use_cache=False).logits
            else:
                logits = _encoder_logits(model, token_ids_BS)
    except _TRANSFORMERS_ERRORS as error:
        raise FormatError(
            side.path,
            f"transformers {transformers.__version__} does not run the model",
            found=f"{type(error).__name__} {error}",
            hint="--no-check-logits, or another release of transformers",
        ) from error
    if mismatches := sorted({*report["unexpected_keys"], *report["missing_keys"]}):
        raise FormatError(side.path, "transformers reads other tensors", found=", ".join(mismatches))
    numbers: np.ndarray = logits.flatten(0, 1).numpy()
    return numbers


def _encoder_logits(model: Any, token_BS: torch.Tensor) -> torch.Tensor:
    """Return the logits of every token, (B, S, V), with those of a binary head as two more columns.

    A task's head has the same logits for every token of a row; that of spans its own for each token.

    For a model without a head they are the products of hidden states and embeddings, as in Mega.
    """
    import torch

    output = model(token_BS)
    if "start_logits" in output:
        return torch.stack((output.start_logits, output.end_logits), -1)
    if "last_hidden_state" in output:
        logits: torch.Tensor = output.last_hidden_state @ model.get_input_embeddings().weight.T
    else:
        logits = output["prediction_logits" if "prediction_logits" in output else "logits"]
    if logits.ndim == 2:  # of a row, in the head of a task
        logits = logits[:, None].expand(-1, token_BS.shape[1], -1)
    if "seq_relationship_logits" in output:
        binary_BS2 = output.seq_relationship_logits[:, None].expand(-1, logits.shape[1], -1)
        logits = torch.cat((logits, binary_BS2), -1)
    return logits


_RUNNERS: Mapping[str, Callable[[LoadedSide, Mapping[str, str], np.ndarray], np.ndarray]] = MappingProxyType(
    {_TRANSFORMERS: _run_transformers, _REFERENCE: _run_reference}
)


@contextlib.contextmanager
def _silence(transformers: Any) -> Iterator[None]:
    """Silence transformers' progress bars and warnings."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
