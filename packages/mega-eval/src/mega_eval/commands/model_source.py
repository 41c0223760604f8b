"""Open the model that the options of a task name: a checkpoint, a Hugging Face folder or a server."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np

from mega_eval.commands.source_options import check_source, is_hugging_face
from mega_eval.commands.task_options import TaskOptions
from mega_eval.models.answer_cache import AnswerCache, hash_window
from mega_eval.models.decoder_model import open_checkpoint
from mega_eval.models.endpoint_client import EndpointClient
from mega_eval.models.interface import RequestModel
from mega_eval.models.rank_setup import RankSettings
from mega_eval.models.server_model import NOISE_LIMIT, ServerModel
from mega_model.distributed.mesh import World
from mega_schema.checkpoint.checkpoint_tokenizer import open_checkpoint_tokenizer
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError
from mega_schema.tokenizer.identity import IDENTITY
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer, open_tokenizer_folder


def open_model(options: TaskOptions) -> RequestModel:
    """Open the model of `--load` or `--url`.

    Raises:
        MegaError: the options do not fit its source, or it cannot be opened.
    """
    check_source(options)
    if options.url is not None:
        return _open_server(options.url, options)
    assert options.load is not None
    if is_hugging_face(options.load):
        return _open_hugging_face(options.load, options)
    settings = choose_ranks(options)
    if settings.layout.world > 1:
        from mega_eval.models.rank_opening import open_ranks

        return open_ranks(settings, options.world)
    return open_checkpoint(
        options.load,
        dtype=options.dtype,
        device=options.device,
        batch_size=options.micro_batch_size,
        batch_invariant=options.batch_invariant,
    )


def choose_ranks(options: TaskOptions) -> RankSettings:
    """Return the settings of the ranks; under torchrun, dp takes the processes that are left.

    Raises:
        ConfigError: torchrun started another number of processes.
    """
    assert options.load is not None
    copy = options.tp * options.pp
    started = copy if options.world is None else options.world.size
    dp = options.dp or max(1, started // copy)
    if options.world is not None and copy * dp != started:
        raise ConfigError(
            "--tp, --pp, --dp",
            "need as many processes as torchrun starts",
            found=f"{options.tp} x {options.pp} x {dp} for {started} processes",
            hint=f"torchrun --nproc-per-node {copy * dp}",
        )
    return RankSettings(
        load=str(options.load),
        dtype=options.dtype,
        device=options.device,
        batch_size=options.micro_batch_size,
        batch_invariant=options.batch_invariant,
        tp=options.tp,
        pp=options.pp,
        dp=dp,
    )


def run_other_rank(options: TaskOptions, world: World) -> None:
    """Be a rank of torchrun that is not rank 0."""
    from mega_eval.models.rank_processes import run_worker

    check_source(options)
    run_worker(world, choose_ranks(options), "env://")


def open_cache(model: RequestModel, folder: Path, key: str, *, is_temporary: bool) -> AnswerCache:
    """Open the answers of a model.

    A server may have loaded other weights under the same name. Its answers are those of the first cache in
    which its scores of the probes are the present ones; a new one has none yet.
    """
    for number in itertools.count():
        cache = AnswerCache(folder, f"{key}-{number}" if number else key, is_temporary=is_temporary)
        if not isinstance(model, ServerModel):
            return cache
        scores = [
            (hash_window(probe), score) for probe, score in zip(model.probes, model.probe_scores, strict=True)
        ]
        known = [entry for digest, _ in scores if (entry := cache.find_scores(digest)) is not None]
        if not known:
            cache.add_scores(dict(scores), 0.0)
            return cache
        differences = [
            np.abs(entry.logprobs - score.logprobs).max()
            for (entry, _), (_, score) in zip(known, scores, strict=False)
        ]
        if max(differences) <= max(NOISE_LIMIT, model.identity.noise or 0.0):
            return cache
    raise AssertionError("unreachable")


def _open_hugging_face(folder: Path, options: TaskOptions) -> RequestModel:
    from mega_eval.models.hugging_face_opening import open_hugging_face

    return open_hugging_face(
        folder,
        dtype=options.dtype,
        device=options.device,
        batch_size=options.micro_batch_size,
        max_length=options.max_model_len,
    )


def _open_server(url: str, options: TaskOptions) -> ServerModel:
    key = None
    if options.api_key_env is not None:
        key = os.environ.get(options.api_key_env)
        if not key:
            hint = f"export {options.api_key_env}=..."
            raise ConfigError(
                "--api-key-env", "no such variable, or an empty one", found=options.api_key_env, hint=hint
            )
    client = EndpointClient(url, api_key=key)
    try:
        return ServerModel(
            client,
            name=options.model,
            tokenizer=None if options.tokenizer is None else open_any_tokenizer(options.tokenizer),
            max_model_len=options.max_model_len,
            concurrency=options.concurrency,
            allow_noise=options.allow_noise,
        )
    except BaseException:
        client.close()
        raise


def open_any_tokenizer(folder: Path) -> Tokenizer:
    """Open the tokenizer of a checkpoint, of a run, or of a Hugging Face folder, or a saved one.

    Raises:
        MegaError: it is none of them.
    """
    if (folder / IDENTITY).is_file():
        return open_tokenizer_folder(folder)
    if (folder / "tokenizer.json").is_file() or folder.is_file():
        return open_tokenizer("HuggingFaceTokenizer", model=folder)
    return open_checkpoint_tokenizer(Checkpoint.open(folder))
