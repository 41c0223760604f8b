"""The model under test: log-probabilities of the tokens a task asks about. The one file here with torch.

Shapes: B windows of a batch, S tokens of its longest, T = B S, K of them scored, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mega_eval.windows import Window, batches
from mega_model.attend import Packed
from mega_model.build import build, fill
from mega_model.runtime import Runtime
from mega_model.stage import Decoder
from mega_schema.checkpoint import Checkpoint
from mega_schema.errors import ConfigError, FormatError
from mega_schema.tokenizer import Tokenizer, open_folder

LOGITS = 1 << 23  # most logits held at once, in elements: 32 MiB of float32, quicker on a CPU than more


@dataclass(frozen=True, slots=True)
class Scored:
    """What a model says of one window's targets.

    Attributes:
        log: (scored,) ln P of each target given all tokens before it in the window, float64.
        best: (scored,) whether the target is the model's first choice.
    """

    log: npt.NDArray[np.float64]
    best: npt.NDArray[np.bool_]


class Scorer(Protocol):
    """What a task asks of a model."""

    @property
    def context(self) -> int:
        """Most tokens a window may read."""

    @property
    def vocab(self) -> int:
        """Tokens a prediction chooses from; ids of a window are below it."""

    def score(self, windows: Sequence[Window]) -> list[Scored]:
        """One answer a window, in their order; a window that scores nothing has an empty one."""


class Model:
    """A decoder as a `Scorer`.

    Args:
        decoder: the whole model on one device.
        where: what to call the model in an error.
        rows: windows that are read together. It changes speed and memory, not what is computed.
        report: called after every batch with the windows done and all that there are.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        where: object = "model",
        rows: int = 16,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.context, self.vocab = decoder.spec.context, decoder.spec.vocab
        self._decoder, self._where, self._rows, self._report = decoder.eval(), where, rows, report

    @torch.inference_mode()
    def score(self, windows: Sequence[Window]) -> list[Scored]:
        """See `Scorer`.

        Raises:
            FormatError: the model's scores are not finite, as those of weights that diverged are not.
        """
        answers = [Scored(np.zeros(0), np.zeros(0, dtype=np.bool_)) for _ in windows]
        work, done = batches(windows, self._rows), 0
        total = sum(map(len, work))
        for batch in work:
            asked = [windows[n] for n in batch]
            log_K, best_K = self._answer(asked)
            if not np.isfinite(log_K).all():
                raise FormatError(
                    self._where, "the model's scores are not finite numbers", hint="an earlier --load"
                )
            ends = np.cumsum([w.scored for w in asked])[:-1]
            for n, log, best in zip(batch, np.split(log_K, ends), np.split(best_K, ends), strict=True):
                answers[n] = Scored(log, best)
            done += len(batch)
            self._report(done, total)
        return answers

    def _answer(self, asked: Sequence[Window]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """ln P of every target and whether it is the first choice, windows end to end; both (K,)."""
        longest = max(w.read for w in asked)
        assert longest <= self.context, f"{longest} tokens for a context of {self.context}"
        device = next(self._decoder.parameters()).device
        # shorter windows are padded on the right, where causal attention never looks
        token_BS = np.zeros((len(asked), longest), dtype=np.int64)
        for row, window in enumerate(asked):
            token_BS[row, : window.read] = window.tokens[:-1]
        place_K = np.concatenate(
            [np.arange(w.read - w.scored, w.read) + row * longest for row, w in enumerate(asked)]
        )
        target_K = np.concatenate([w.tokens[len(w.tokens) - w.scored :] for w in asked])
        position_T = torch.arange(longest, device=device).repeat(len(asked))
        token_T = torch.as_tensor(token_BS, device=device).flatten()
        x_TD = self._decoder.hidden(token_T, position_T, Packed(rows=len(asked), length=longest))
        x_KD = x_TD[torch.as_tensor(place_K, device=device)]
        parts = list(self._choices(x_KD, torch.as_tensor(target_K, device=device)))
        log_K, best_K = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
        return log_K, best_K

    def _choices(self, x_KD: Tensor, target_K: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """ln P and first choice, a part of K at a time: a whole row of logits is only ever needed once."""
        part = max(1, LOGITS // self.vocab)
        for at in range(0, len(target_K), part):
            target = target_K[at : at + part]
            # columns past the vocabulary are padding and get no probability
            logits = self._decoder.logits(x_KD[at : at + part])[:, : self.vocab].float()
            at_target = logits.gather(1, target[:, None])[:, 0]
            yield (at_target.double() - logits.logsumexp(1).double()), logits.argmax(1) == target


def open_checkpoint(folder: Path, *, device: str | None = None) -> tuple[Checkpoint, Decoder, Tokenizer]:
    """A checkpoint, its model with the weights in float32, and its tokenizer.

    Args:
        folder: a run, whose newest checkpoint is taken, or one checkpoint of it.
        device: as torch names it; None is the first GPU, or the CPU where there is none.

    Raises:
        FormatError: there is no whole checkpoint, it has no tokenizer, or one that does not fit the model.
        ConfigError: the machine does not have the device.
    """
    checkpoint = Checkpoint.open(folder)
    spec, files = checkpoint.spec, checkpoint.tokenizer_folder
    tokenizer = open_folder(files)
    if tokenizer.identity.vocab_size > spec.vocab:
        raise FormatError(
            files,
            "more tokens than the model has",
            found=f"vocab_size={tokenizer.identity.vocab_size}",
            wanted=f"at most {spec.vocab}",
        )
    runtime = Runtime.alone(spec, device=_device(device))
    decoder = build(spec, runtime)
    fill(decoder, checkpoint.model_slab, runtime)
    return checkpoint, decoder, tokenizer


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without CUDA
        raise ConfigError(
            "--device", "not a device of this machine", found=name, hint="--device cpu"
        ) from error
    return device
