"""A checkpoint, loaded into this process, as a model for the tasks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from mega_eval.models.batch_generator import BatchGenerator
from mega_eval.models.decoder_kernels import choose_decoder_kernels, load_compiler
from mega_eval.models.interface import GenerationRequest, ModelIdentity, WindowScores
from mega_eval.models.stored_weights import weight_reader
from mega_eval.scorer import ModelScorer
from mega_eval.windows import Window
from mega_model.build import load_model
from mega_model.devices import resolve_device
from mega_schema.arch import table
from mega_schema.checkpoint.checkpoint_tokenizer import open_checkpoint_tokenizer
from mega_schema.checkpoint.checksums import verify_namespace
from mega_schema.checkpoint.reader import MODEL, Checkpoint
from mega_schema.parallel_layout import WHOLE, Layout
from mega_schema.spec_checks import require_decoder
from mega_schema.tokenizer.tokenizer import Tokenizer


class DecoderModel:
    """A decoder on one device with its tokenizer."""

    def __init__(
        self,
        scorer: ModelScorer,
        generator: BatchGenerator,
        tokenizer: Tokenizer,
        identity: ModelIdentity,
    ) -> None:
        self._scorer = scorer
        self._generator = generator
        self.tokenizer = tokenizer
        self.identity = identity
        self.context_length = scorer.context_length
        self.vocab_size = scorer.vocab_size

    def score_batches(
        self, windows: Sequence[Window], answered: Collection[int] = ()
    ) -> Iterator[list[tuple[int, WindowScores]]]:
        """Yield scores, as `RequestModel.score_batches` does."""
        return self._scorer.score_batches(windows, answered)

    def generate_batches(
        self, requests: Sequence[GenerationRequest], answered: Collection[int] = ()
    ) -> Iterator[list[tuple[int, str]]]:
        """Yield the continuations of a batch, as `RequestModel.generate_batches` does."""
        return self._generator.generate_batches(requests, answered)

    def close(self) -> None:
        """Nothing is to be ended."""


def open_checkpoint(
    load: Path, *, dtype: str, device: str, batch_size: int | None = None, batch_invariant: bool = False
) -> DecoderModel:
    """Load a checkpoint, or a run's latest, into this process.

    Args:
        dtype: "float32", "bfloat16", or "auto": bfloat16 if all weights are stored in it.
        batch_size: windows of one forward pass, or prompts of a batch, at most.
        batch_invariant: scores have the bits of a training forward pass, in any batch.

    Raises:
        MegaError: there is none, it is damaged or has no tokenizer, or the machine lacks the device or the
            batch-invariant kernels.
    """
    checkpoint = Checkpoint.open(load)
    require_decoder(checkpoint.spec, checkpoint.folder)
    tokenizer = open_checkpoint_tokenizer(checkpoint)
    on = resolve_device(device, where="--device")
    model_dtype = choose_dtype(checkpoint, dtype)
    kernels = choose_decoder_kernels(on, batch_invariant=batch_invariant)
    with ThreadPoolExecutor(2, "open checkpoint") as threads:  # beside the weights, which are read here
        compiler = threads.submit(load_compiler, kernels)
        identity = threads.submit(
            identify_checkpoint, checkpoint, tokenizer, dtype=model_dtype, device=str(on)
        )
        decoder = load_model(
            checkpoint.spec, weight_reader(checkpoint), dtype=model_dtype, device=on, kernels=kernels
        )
        compiler.result()
    scorer = ModelScorer(decoder, batch_size=batch_size)
    generator = BatchGenerator(decoder, tokenizer, scorer, batch_size=batch_size)
    return DecoderModel(scorer, generator, tokenizer, identity.result())


def identify_checkpoint(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype,
    device: str,
    layout: Layout = WHOLE,
) -> ModelIdentity:
    """Return the identity of a checkpoint that is evaluated in this way.

    The hash is made of the manifest's checksums, so the files are compared with these first.

    Raises:
        CorruptFileError: a weight is not the one that was written.
    """
    verify_namespace(checkpoint, MODEL)
    rows = [row for row in table(checkpoint.spec) if row.tied_to is None]
    return ModelIdentity(
        source=str(checkpoint.folder.resolve()),
        sha256=hash_weights(checkpoint),
        tokenizer_sha256=tokenizer.identity.sha256,
        iteration=checkpoint.iteration,
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        layout={"tp": layout.tp, "pp": layout.pp, "dp": layout.dp},
        parameters=sum(math.prod(row.shape) for row in rows),
        tokens=read_consumed_tokens(checkpoint),
    )


def read_consumed_tokens(checkpoint: Checkpoint) -> int | None:
    """Return the tokens that the weights were trained on; None where the checkpoint does not say."""
    tokens = checkpoint.trainer.get("consumed_tokens")
    return tokens if type(tokens) is int and tokens > 0 else None


def choose_dtype(checkpoint: Checkpoint, name: str) -> torch.dtype:
    """Return the dtype of this name; "auto" is bfloat16 if all weights are stored in it, else float32."""
    if name != "auto":
        return torch.bfloat16 if name == "bfloat16" else torch.float32
    stored = {tensor.dtype for tensor in checkpoint.tensors[MODEL].values()}
    return torch.bfloat16 if stored == {"BF16"} else torch.float32


def hash_weights(checkpoint: Checkpoint) -> str:
    """Return a SHA-256 of the model's spec and of the checksums of its weights, as the manifest has them."""
    pieces = sorted(
        [name, tensor.dtype, piece.start, piece.shape, piece.crc32]
        for space, name, tensor, piece in checkpoint.pieces()
        if space == MODEL
    )
    content = json.dumps([checkpoint.spec.to_dict(), pieces], sort_keys=True, default=list)
    return hashlib.sha256(content.encode()).hexdigest()
