"""Build an engine from a checkpoint: the other ranks, if any; weights, pages, sampler and core."""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mega_model.decoder import Decoder
from mega_model.devices import resolve_device
from mega_model.distributed.mesh import Mesh
from mega_model.kernels import REFERENCE
from mega_model.kernels.dispatch import choose_kernels
from mega_model.kernels.numba import has_numba, load_kernels
from mega_model.runtime import Runtime
from mega_schema.app.kernel_cache import has_compiled_kernels
from mega_schema.checkpoint.checkpoint_dir import MANIFEST
from mega_schema.checkpoint.checkpoint_tokenizer import open_checkpoint_tokenizer
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import RequestError
from mega_schema.parallel_layout import Layout
from mega_schema.spec import ModelSpec
from mega_schema.spec_checks import require_decoder
from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.engine.detokenizer import Detokenizer
from mega_serve.engine.engine_core import EngineCore, GrammarFactory
from mega_serve.engine.grammar import GrammarCompiler
from mega_serve.engine.interfaces import Chunk, ModelInfo, ModelRunner, SamplingRow, TokenSampler
from mega_serve.engine.option_checks import check_context_length, check_follow, check_layout
from mega_serve.engine.requests import SamplingParams
from mega_serve.engine.scheduler import EngineConfig
from mega_serve.execution.attention_choice import (
    AttentionName,
    can_capture,
    choose_attention,
    default_page_size,
)
from mega_serve.execution.checkpoint_follower import CheckpointFollower
from mega_serve.execution.device_sampler import DeviceSampler
from mega_serve.execution.model_runner import RunnerOptions, TorchModelRunner
from mega_serve.execution.packed_weights import WeightDtype
from mega_serve.execution.paged_attention import page_bytes
from mega_serve.execution.parallel_runner import ParallelRunner, StageRunner, run_commands
from mega_serve.execution.pool_memory import cache_dtype, choose_memory, count_pages
from mega_serve.execution.rank_sockets import CommandReceiver
from mega_serve.execution.rendezvous_folder import file_init_method
from mega_serve.execution.sampler import BatchSampler
from mega_serve.execution.served_checkpoint import load_served
from mega_serve.execution.weight_loading import compute_dtype, load_weights
from mega_serve.execution.workers import WorkerGroup, join_ranks
from mega_serve.process.engine_process import LoadedEngine

logger = logging.getLogger("mega.serve.engine")

_WARM_UP_TOKENS = 20  # more rows than one tile of a kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What the command line decides about the engine. JSON values, as they cross to the engine process.

    Attributes:
        load: a checkpoint, or a run, whose latest checkpoint is taken.
        max_model_len: tokens of a sequence; None: the model's context.
        kv_cache_memory: bytes of the pool of pages; None: enough for `max_num_seqs` sequences of full length,
            but not more than the device has left.
        page_size: tokens of a page; None: as the attention needs them.
        threads: of torch and the kernels on a CPU; None: all cores.
        enforce_eager: do not capture CUDA graphs.
        follow: swap in newer checkpoints of the run.
        iteration: of the checkpoint that an engine served which is started again; None: the latest.
        verify: compare the checksums of the weights while loading.
        rendezvous: folder in which the ranks meet; None: rank 0 creates one and starts the others.
    """

    load: str
    dtype: WeightDtype = "float32"
    device: str = "auto"
    tp: int = 1
    pp: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    kv_cache_memory: int | None = None
    page_size: int | None = None
    attention: AttentionName = "auto"
    enforce_eager: bool = False
    batch_invariant: bool = False
    prefix_caching: bool = True
    speculative_tokens: int = 0
    threads: int | None = None
    follow: bool = False
    iteration: int | None = None
    verify: bool = True
    rendezvous: str | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EngineOptions:
        """Return the options; unknown names are ours to fix."""
        names = {field.name for field in fields(cls)}
        assert values.keys() <= names, f"unknown engine options: {sorted(values.keys() - names)}"
        return cls(**values)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return default_page_size(self.attention) if self.page_size is None else self.page_size

    @property
    def layout(self) -> Layout:
        """The layout of the ranks."""
        return Layout(tp=self.tp, pp=self.pp)


def build_engine(values: Mapping[str, Any]) -> LoadedEngine:
    """Load the model on all ranks and return the engine. Runs in the engine process, which is rank 0.

    Raises:
        MegaError: the checkpoint cannot be read, or an option does not fit it or this machine.
    """
    options = EngineOptions.from_json(values)
    check_follow(options.follow, options.layout.world, Path(options.load))
    load = partial(_load_rank_0, options, values)
    served = load_served(Path(options.load), options.iteration, load, follow=options.follow)
    checkpoint, tokenizer, workers, mesh, model = served
    with contextlib.nullcontext() if workers is None else workers.commands.name_lost_rank():
        stage = _build_stage(options, model, mesh, checkpoint, tokenizer)
    runner: ModelRunner = stage
    if workers is not None:
        assert isinstance(stage, StageRunner)
        runner = ParallelRunner(stage, workers.commands)
    stage.max_seq_len = runner.max_seq_len = check_context_length(options.max_model_len, stage.max_seq_len)
    sampler = _build_sampler(stage, tokenizer)
    warm_up(runner, sampler)
    if _captures_graphs(options, mesh.device):
        stage.capture_graphs(options.max_num_seqs)
    core = EngineCore(
        runner,
        tokenizer,
        sampler,
        EngineConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=max(options.max_num_batched_tokens, options.max_num_seqs),
            prefix_caching=options.prefix_caching,
            speculative_tokens=options.speculative_tokens,
        ),
        clock=time.monotonic,
        detokenizer_factory=Detokenizer,
        draw_seed=lambda: random.SystemRandom().getrandbits(63),
        grammar_factory=_grammar_factory(tokenizer),
        iteration=checkpoint.iteration,
    )
    info = describe_model(options, checkpoint, tokenizer, runner)
    if workers is not None:
        if mesh.device.type == "cpu":  # threads of NCCL read the file as long as they run
            workers.remove_folder()
        return LoadedEngine(
            core=core,
            model=info,
            between_steps=partial(_ping, workers),
            close=partial(_close, mesh, workers),
        )
    if not options.follow:
        return LoadedEngine(core=core, model=info)
    return _follow(options, mesh, checkpoint, tokenizer, stage, core, info)


def _follow(
    options: EngineOptions,
    mesh: Mesh,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    stage: TorchModelRunner,
    core: EngineCore,
    info: ModelInfo,
) -> LoadedEngine:
    """Return the engine with a thread that loads newer checkpoints of the run."""

    def load_newer(newer: Checkpoint) -> tuple[Decoder, ModelInfo]:
        # described here: the run may remove the checkpoint before the swap
        return _load_model(options, mesh, newer), describe_model(options, newer, tokenizer, stage)

    follower = CheckpointFollower(Path(options.load), checkpoint, load_newer)
    follower.start()

    def swap_newer() -> ModelInfo | None:
        newer = follower.take()
        if newer is None:
            return None
        newer_model, newer_info = newer
        stage.replace_model(newer_model)
        core.swap(newer_info.iteration)
        return newer_info

    return LoadedEngine(core=core, model=info, between_steps=swap_newer)


def _load_rank_0(
    options: EngineOptions, values: Mapping[str, Any], folder: Path
) -> tuple[Checkpoint, Tokenizer, WorkerGroup | None, Mesh, Decoder]:
    """Load a checkpoint, or a run's latest, on all ranks; return what rank 0 has of it."""
    checkpoint = Checkpoint.open(folder)
    require_decoder(checkpoint.spec, checkpoint.folder)
    tokenizer = open_checkpoint_tokenizer(checkpoint)
    check_layout(checkpoint.spec, options.tp, options.pp)
    _use_threads(options)
    # one message, before other ranks start and the model is loaded
    device = resolve_device(options.device, where="--device")
    attention = choose_attention(
        options.attention,
        device,
        page_size=options.page_tokens,
        head_dim=checkpoint.spec.head_dim,
        dtype=compute_dtype(options.dtype),
        batch_invariant=options.batch_invariant,
    )
    _check_kv_memory(options, checkpoint.spec, attention, device)
    workers = None
    if options.layout.world > 1:
        rendezvous = None if options.rendezvous is None else Path(options.rendezvous)
        workers = WorkerGroup(values, options.layout.world, rendezvous)
        workers.commands.send({"load": str(checkpoint.folder)})  # a run may have a newer one by now
    with contextlib.nullcontext() if workers is None else workers.commands.name_lost_rank():
        mesh = _join(options, 0, None if workers is None else workers.init_method)
        return checkpoint, tokenizer, workers, mesh, _load_model(options, mesh, checkpoint)


def warm_up(runner: ModelRunner, sampler: TokenSampler) -> None:
    """Run a prompt and a sampled token, so that kernels are compiled before the first request.

    The keys and values go to pages that belong to no sequence yet.
    """
    length = min(_WARM_UP_TOKENS, runner.max_seq_len - 1, runner.num_pages * runner.page_size - 1)
    pages = range(-(-(length + 1) // runner.page_size))
    for start, count in ((0, length), (length, 1)):
        if count > 0:
            chunk = Chunk(token_ids=[0] * count, start=start, pages=pages, logits_from=count - 1)
            output = runner.run([chunk])
    row = SamplingRow(
        SamplingParams(max_tokens=1, temperature=1.0), [0] * length, [], 0, length, 0, top_p=0.5
    )
    sampler.sample(output.logits, [row])


def run_worker(values: Mapping[str, Any], rank: int) -> None:
    """Load a rank's part of the model, and obey rank 0 until it stops or ends.

    Raises:
        MegaError: the checkpoint cannot be read.
        RankConnectionError: rank 0 never came.
    """
    options = EngineOptions.from_json(values)
    assert options.rendezvous is not None, "a rank without a place to meet"
    _use_threads(options)
    folder = Path(options.rendezvous)
    commands = CommandReceiver(folder, rank)
    first = commands.receive()
    if first is None:
        return
    try:
        checkpoint = Checkpoint.open(Path(first["load"]))
        mesh = _join(options, rank, file_init_method(folder))
        model = _load_model(options, mesh, checkpoint)
        stage = _build_stage(options, model, mesh, checkpoint, open_checkpoint_tokenizer(checkpoint))
        assert isinstance(stage, StageRunner)
        # rank 0 drains after a signal to all ranks, and ends this one afterwards
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        run_commands(stage, commands)
        mesh.destroy()
    except RuntimeError:  # of a collective, if another rank has ended: rank 0 reports that, and ends too
        if not commands.is_hung_up():
            raise


def describe_model(
    options: EngineOptions, checkpoint: Checkpoint, tokenizer: Tokenizer, runner: ModelRunner
) -> ModelInfo:
    """Return what clients may know of the model."""
    run = Path(options.load).resolve()
    return ModelInfo(
        name=run.parent.name if run.name.startswith("iter_") else run.name,
        iteration=checkpoint.iteration,
        created=int((checkpoint.folder / MANIFEST).stat().st_mtime),
        max_seq_len=runner.max_seq_len,
        vocab_size=runner.vocab_size,
        eod=tokenizer.identity.eod,
        bos=tokenizer.identity.bos,
        hidden_size=checkpoint.spec.hidden,
    )


def _ping(workers: WorkerGroup) -> None:
    """Find out whether the other ranks of an idle engine hang."""
    workers.commands.ping()


def _build_sampler(stage: TorchModelRunner, tokenizer: Tokenizer) -> TokenSampler:
    """Return the sampler of the device where the logits are."""
    eod = tokenizer.identity.eod
    if stage.device.type == "cuda":
        return DeviceSampler(stage.vocab_size, eod)
    kernels = load_kernels() if has_numba() else None
    return BatchSampler(stage.vocab_size, eod, stage.log_softmax, kernels=kernels)


def _close(mesh: Mesh, workers: WorkerGroup) -> None:
    """End the other ranks."""
    workers.stop()
    mesh.destroy()


def _grammar_factory(tokenizer: Tokenizer) -> GrammarFactory | None:
    """Return the compiler of grammars; None for a tokenizer of numbers, which has no text to constrain."""
    try:
        return GrammarCompiler(tokenizer).compile
    except RequestError:
        return None


def _use_threads(options: EngineOptions) -> None:
    if options.threads is not None:
        torch.set_num_threads(options.threads)


def _join(options: EngineOptions, rank: int, init_method: str | None) -> Mesh:
    device = resolve_device(options.device, where="--device")
    if init_method is None:
        return Mesh(options.layout, 0, device)
    return join_ranks(options.layout, rank, init_method, device.type)


def _load_model(options: EngineOptions, mesh: Mesh, checkpoint: Checkpoint) -> Decoder:
    kernels = choose_kernels("auto", mesh.device).kernels if mesh.device.type == "cuda" else REFERENCE
    rt = Runtime.from_mesh(mesh, checkpoint.spec, dtype=compute_dtype(options.dtype), kernels=kernels)
    takes_kernels = mesh.device.type == "cpu" and has_numba() and options.attention != "torch"
    if takes_kernels and mesh.rank == 0 and not has_compiled_kernels():
        logger.info("compiles the kernels for this CPU, once, for about a minute")
    model, report = load_weights(
        checkpoint,
        rt,
        dtype=options.dtype,
        kernels=load_kernels() if takes_kernels else None,
        batch_invariant=options.batch_invariant,
        verify=options.verify and mesh.rank == 0,  # once for all ranks: they share the machine
    )
    logger.info("rank %d: %s", mesh.rank, report)
    return model


def _build_stage(
    options: EngineOptions, model: Decoder, mesh: Mesh, checkpoint: Checkpoint, tokenizer: Tokenizer
) -> TorchModelRunner:
    """Return this rank's runner."""
    spec = checkpoint.spec
    settings = RunnerOptions(
        page_size=options.page_tokens,
        kv_memory=options.kv_cache_memory
        or choose_memory(
            spec,
            mesh,
            sequences=options.max_num_seqs,
            length=options.max_model_len or spec.max_seq_len,
            page_size=options.page_tokens,
        ),
        attention=options.attention,
        spare_page=_captures_graphs(options, mesh.device),
        batch_invariant=options.batch_invariant,
    )
    vocab_size = min(tokenizer.identity.vocab_size, spec.vocab)
    if mesh.layout.world == 1:
        return TorchModelRunner(model, settings, vocab_size=vocab_size)
    return StageRunner(model, settings, mesh, vocab_size=vocab_size)


def _captures_graphs(options: EngineOptions, device: torch.device) -> bool:
    """Whether decode steps become CUDA graphs: one process, with attention that a graph can hold."""
    is_alone = device.type == "cuda" and options.layout.world == 1
    return is_alone and not options.enforce_eager and can_capture(options.attention)


def _check_kv_memory(options: EngineOptions, spec: ModelSpec, attention: str, device: torch.device) -> None:
    """Refuse a pool without pages before the model is loaded."""
    if options.kv_cache_memory is not None:
        dtype = cache_dtype(attention, device, compute_dtype(options.dtype))
        layers, kv_heads = spec.layers // options.pp, spec.kv_heads // options.tp
        page = page_bytes(spec, layers, kv_heads, options.page_tokens, dtype)
        count_pages(options.kv_cache_memory, page, least=2 if _captures_graphs(options, device) else 1)
