"""Write a classic Megatron checkpoint: one file per rank, in the layout that `rank_files` reads."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource
from mega_ckpt.checkpoint.writer import NamespacePlan
from mega_ckpt.formats.megatron import args as megatron_args
from mega_ckpt.formats.megatron.names import LEGACY, Names, chunk_tensors
from mega_ckpt.formats.megatron.optimizer import FIRST, SECOND
from mega_ckpt.formats.megatron.rank_files import FILE
from mega_ckpt.formats.megatron.run_dir import atomic_checkpoint_dir, checkpoint_dir_name
from mega_ckpt.name_maps.alias import ForeignTensor
from mega_ckpt.tensors.parallel_map import Progress, UpdateProgress, parallel_map
from mega_ckpt.tensors.row_stream import RowChunk
from mega_ckpt.tensors.safetensors_io import TensorHeader
from mega_ckpt.torch_files import zip_writer
from mega_ckpt.torch_files.pickle_reader import GlobalName, Record
from mega_schema.arch import table
from mega_schema.checkpoint.checkpoint_dir import TRAINER
from mega_schema.checkpoint.reader import MAIN, MODEL
from mega_schema.errors import FormatError
from mega_schema.parallel_layout import WHOLE, Layout
from mega_schema.sharding import Slab
from mega_schema.spec import ModelSpec

VERSION = 3.0
SCALE = TensorHeader("scale", "F32", (1,))
_TORCH: Mapping[str, str] = MappingProxyType({"F32": "float32", "BF16": "bfloat16", "F16": "float16"})
# names after one of these prefixes are keys of one dictionary; others are nested
_FLAT = ("language_model.encoder.", "language_model.decoder.", "language_model.pooler.", "lm_head.")
_EXTRA = ("linear_proj", "linear_qkv", "linear_fc1", "linear_fc2")  # modules with an empty extra state
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.01}
)
# of every parameter group: fields of Megatron, Apex and torch
_GROUP: Mapping[str, Any] = MappingProxyType(
    {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "bias_correction": True}
    | {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False}
    | {"fused": None, "decoupled_weight_decay": True}
)


@dataclass(frozen=True, slots=True)
class MegatronWriter:
    """Writes a source as a Megatron checkpoint.

    Attributes:
        spaces: the namespaces to write, with the optimizer's moments if they are written.
        core: use the tensor names of the core class.
    """

    source: CheckpointSource
    layout: Layout
    names: Names
    spaces: Mapping[str, NamespacePlan]
    core: bool

    def write(self, run: Path, progress: Progress, *, force: bool) -> tuple[Path, int]:
        """Write the checkpoint into a run's folder atomically; return its folder and tensor bytes.

        Args:
            force: replace a checkpoint of this iteration.

        Raises:
            MegaError: `run_dir.atomic_checkpoint_dir` refuses the folder, or the disk refused the write.
        """
        ranks = [_Rank(self, tp, pp) for pp in range(self.layout.pp) for tp in range(self.layout.tp)]
        size = sum(rank.bytes for rank in ranks)
        iteration = self.source.iteration or None
        with atomic_checkpoint_dir(run, iteration, force=force) as folder, progress(size) as update:

            def write(rank: _Rank, update: UpdateProgress) -> None:
                (folder / rank.name).mkdir()
                rank.write(folder / rank.name / FILE, update)

            parallel_map(ranks, write, update)
        return run / checkpoint_dir_name(iteration), size

    def args(self, tp: int, pp: int) -> dict[str, Any]:
        """Build Megatron's training arguments for this rank's file."""
        source = self.source
        layout = self.layout
        spec = self.source.spec
        rows = table(spec)[0].local_shape(layout.tp)[0]
        kinds = {*self.spaces[MODEL].dtypes.values()}
        kind = kinds.pop() if len(kinds) == 1 else "F32"
        hyper = self.hyperparameters()
        tokenizer = source.tokenizer.identity.type if source.tokenizer else None
        return megatron_args.from_spec(spec, source.path, core=self.core) | {
            "seq_length": spec.max_seq_len,
            "encoder_seq_length": spec.max_seq_len,
            "padded_vocab_size": rows * layout.tp,
            "true_vocab_size": spec.vocab,
            "vocab_size": spec.vocab - 1 if tokenizer == "NullTokenizer" else None,
            "tokenizer_type": tokenizer,
            "iteration": source.iteration,
            "consumed_train_samples": source.trainer.get("consumed_samples", 0),
            "consumed_valid_samples": 0,
            "params_dtype": GlobalName(f"torch.{_TORCH[kind]}"),
            "fp16": kind == "F16",
            "bf16": kind == "BF16",
            "rank": tp + layout.tp * pp,
            "world_size": layout.tp * layout.pp,
            "data_parallel_size": 1,
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "transformer_pipeline_model_parallel_size": layout.pp,
            "pipeline_model_parallel_split_rank": split_rank(spec, layout),
            "virtual_pipeline_model_parallel_size": layout.vp if layout.vp > 1 else None,
            "num_layers_per_virtual_pipeline_stage": (
                spec.layers // (layout.pp * layout.vp) if layout.vp > 1 else None
            ),
            "standalone_embedding_stage": False,
            "num_experts": None,
            "use_distributed_optimizer": False,
            "optimizer": "adam",
            "adam_beta1": hyper["adam_beta1"],
            "adam_beta2": hyper["adam_beta2"],
            "adam_eps": hyper["adam_eps"],
            **_lr_args(source.trainer),
            "use_legacy_models": not self.core,
            "transformer_impl": "transformer_engine" if self.core else "local",
        }

    def hyperparameters(self) -> dict[str, Any]:
        """Return the optimizer's hyperparameters from the run's configuration, or Megatron's defaults."""
        try:
            config = tomllib.loads(self.source.run_config or "").get("optimizer", {})
            return {name: config.get(name, usual) for name, usual in _DEFAULTS.items()}
        except (tomllib.TOMLDecodeError, AttributeError):
            return {**_DEFAULTS}

    @property
    def steps(self) -> int:
        """The number of optimizer steps."""
        return int(self.source.trainer.get("optimizer_steps", self.source.iteration))

    def group(self, decay: bool, params: Sequence[int]) -> dict[str, Any]:
        """Build a parameter group of the optimizer, with or without weight decay."""
        hyper = self.hyperparameters()
        return {
            **_GROUP,
            "wd_mult": float(decay),
            "weight_decay": hyper["weight_decay"] * decay,
            "lr": float(self.source.trainer.get("learning_rate") or 0.0),
            "betas": (hyper["adam_beta1"], hyper["adam_beta2"]),
            "eps": hyper["adam_eps"],
            "step": self.steps,
            "params": [*params],
        }


class _Rank:
    """One rank's file: its object tree, and for each tensor a function that yields its values."""

    def __init__(self, writing: MegatronWriter, tp: int, pp: int) -> None:
        self.writing = writing
        self.tp = tp
        self.pp = pp
        self._values: dict[TensorHeader, Callable[[], Iterator[np.ndarray]]] = {}
        layout = writing.layout
        self.name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if layout.pp > 1 else "")
        self.chunks = [
            list(chunk_tensors(writing.source.spec, writing.names, layout, tp=tp, pp=pp, chunk=chunk))
            for chunk in range(layout.vp)
        ]
        models = [self._model(number, chunk) for number, chunk in enumerate(self.chunks)]
        self.tree: dict[str, Any] = {
            "args": Record("argparse.Namespace", (), writing.args(tp, pp)),
            "checkpoint_version": VERSION,
            "iteration": writing.source.iteration,
            **scheduler_state(writing.source.trainer),
        }
        self.tree |= {f"model{n if len(models) > 1 else ''}": model for n, model in enumerate(models)}
        if FIRST in writing.spaces:
            self.tree |= self._optimizer()

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self._values)

    def write(self, path: Path, update: UpdateProgress) -> None:
        zip_writer.write(path, self.tree, lambda tensor: self._values[tensor](), update)

    def _tensor(self, space: str, number: int, foreign: ForeignTensor) -> TensorHeader:
        plan = self.writing.spaces[space]
        tensor = TensorHeader(f"{space} {number} {foreign.name}", plan.dtypes[foreign.ours], foreign.shape)
        self._values[tensor] = lambda: _row_chunks(
            self.writing.source, plan.space, foreign, tensor.dtype, space
        )
        return tensor

    def _model(self, number: int, chunk: Sequence[ForeignTensor]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for foreign in chunk:
            parts = [foreign.name] if self.writing.core else _nested_keys(foreign.name)
            node = tree
            for part in parts[:-1]:
                node = node.setdefault(part, {})
            node[parts[-1]] = self._tensor(MODEL, number, foreign)
            module, _, kind = foreign.name.rpartition(".")
            if self.writing.core and kind == "weight" and module.endswith(_EXTRA):
                tree[f"{module}._extra_state"] = None
        if self.writing.core and any(foreign.ours == "final_norm.weight" for foreign in chunk):
            tree["output_layer._extra_state"] = None  # the module exists even if its weight is the embedding
        return tree

    def _optimizer(self) -> dict[str, Any]:
        """Build the optimizer state; the group with weight decay has the first parameter numbers."""
        writing = self.writing
        state = dict[int, Any]()
        groups = list[dict[str, Any]]()
        mains = list[Any]()
        decays = {row.name: row.decay for row in table(writing.source.spec)}
        step = TensorHeader("step", "F32", ())
        self._values[step] = lambda: iter([np.array(writing.steps, np.float32)])
        tensors = list(chain.from_iterable(((n, f) for f in chunk) for n, chunk in enumerate(self.chunks)))
        has_main_weights = MAIN in writing.spaces
        for decay in (True, False):
            members = [(number, foreign) for number, foreign in tensors if decays[foreign.ours] == decay]
            indices = range(len(state), len(state) + len(members))
            for index, (number, foreign) in zip(indices, members, strict=True):
                state[index] = {
                    "step": step,
                    "exp_avg": self._tensor(FIRST, number, foreign),
                    "exp_avg_sq": self._tensor(SECOND, number, foreign),
                }
            groups.append(writing.group(decay, indices))
            if has_main_weights:
                kinds = writing.spaces[MODEL].dtypes
                narrow_params = [
                    (number, foreign) for number, foreign in members if kinds[foreign.ours] != "F32"
                ]
                mains.append([self._tensor(MAIN, number, foreign) for number, foreign in narrow_params])
        adam = {"state": state, "param_groups": groups}
        result: dict[str, Any] = {
            "optimizer": {"optimizer": adam, "fp32_from_fp16_params": mains} if has_main_weights else adam
        }
        if has_main_weights and (scale := grad_scaler_state(writing.source.trainer)):
            value, result["optimizer"]["grad_scaler"] = scale
            self._values[SCALE] = lambda: iter([value])
        return result


def split_rank(spec: ModelSpec, layout: Layout) -> int | None:
    """Return the first pipeline rank of a T5's decoder."""
    if spec.encoder_layers is None or layout.pp == 1:
        return None
    stages = [layout.stage(rank, spec.layers) for rank in range(layout.pp)]
    return next(rank for rank, stage in enumerate(stages) if spec.encoder_layers in stage.layers)


def scheduler_state(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Build Megatron's scheduler state from trainer.json's schedules, if it has them."""
    rate = trainer.get("lr_schedule")
    if rate is None:
        return {}
    decay = trainer["wd_schedule"]
    return {
        "opt_param_scheduler": {
            "max_lr": rate["peak"],
            "lr_warmup_steps": rate["warmup"],
            "num_steps": trainer.get("consumed_samples", 0) - trainer.get("skipped_samples", 0),
            "lr_decay_style": rate["style"],
            "lr_decay_steps": rate["decay"],
            "min_lr": rate["least"],
            "start_wd": decay["start"],
            "end_wd": decay["end"],
            "wd_incr_style": decay["style"],
            "wd_incr_steps": decay["samples"],
        }
    }


def grad_scaler_state(trainer: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, Any]] | None:
    """Build Megatron's gradient scaler state from trainer.json's loss scale, if it has one."""
    scale = trainer.get("loss_scale")
    if not scale:
        return None
    counts = {name: scale[name] for name in ("growth_tracker", "hysteresis_tracker")}
    return np.array([scale["value"]], np.float32), {"scale": SCALE, **counts}


def check_trainer(source: CheckpointSource) -> None:
    """Refuse a trainer.json that lacks values that Megatron needs.

    Raises:
        FormatError: a value is missing.
    """
    trainer = source.trainer
    try:
        MegatronWriter(source, WHOLE, LEGACY, {}, core=False).group(True, ())
        scheduler_state(trainer)
        grad_scaler_state(trainer)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        found = f"{type(error).__name__} {error}"
        raise FormatError(source.path / TRAINER, "is not what mega-train writes", found=found) from None


def _nested_keys(name: str) -> list[str]:
    """Split a name into the keys of the dictionaries that Megatron nests."""
    prefix = next((prefix for prefix in _FLAT if name.startswith(prefix)), "")
    return [*prefix.split(".")[:-1], name.removeprefix(prefix)] if prefix else name.split(".")


def _lr_args(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the learning rate settings that are arguments and not in `scheduler_state`."""
    rate = trainer.get("lr_schedule") or {}
    return {
        "lr_warmup_init": rate.get("initial", 0.0),
        "lr_wsd_decay_samples": rate.get("anneal") or None,
        "lr_wsd_decay_style": rate.get("anneal_style", "exponential"),
    }


def _row_chunks(
    source: CheckpointSource, space: str, foreign: ForeignTensor, dtype: str, into: str
) -> Iterator[np.ndarray]:
    """Yield a rank's tensor, a few rows at a time.

    Args:
        space: the namespace to read.
        into: the namespace to write.
    """
    for chunk in source.foreign_chunks(space, foreign, dtype):
        fill_padding(source, space, foreign, dtype, into, chunk)
        yield chunk.values


def fill_padding(
    source: CheckpointSource, space: str, foreign: ForeignTensor, dtype: str, into: str, chunk: RowChunk
) -> None:
    """Fill the padding rows of weights with the last row of the vocabulary, as Megatron's own tool does.

    The padding of an optimizer's moments stays zero.
    """
    filled = sum(box.shape[0] for box in foreign.boxes)
    if into in (MODEL, MAIN) and chunk.first + len(chunk.values) > filled:
        zeros = (0,) * (len(foreign.shape) - 1)
        last = Slab((source.spec.vocab - 1, *zeros), (1, *foreign.shape[1:]), (0, *zeros))
        chunk.values[max(0, filled - chunk.first) :] = source.cast(space, foreign.ours, last, dtype)
