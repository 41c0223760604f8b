"""A classifier: a checkpoint with the head of a task, or a Hugging Face folder of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mega_eval.models.decoder_model import choose_dtype, identify_checkpoint
from mega_eval.models.hugging_face_folder import CONFIG, HuggingFaceFolder, open_hugging_face_folder
from mega_eval.models.hugging_face_opening import (
    check_transformers,
    explain_errors,
    identify_module,
    quiet_library,
)
from mega_eval.models.interface import ModelIdentity
from mega_eval.models.stored_weights import weight_reader
from mega_model.attention_backends import PackedAttention
from mega_model.build import load_model
from mega_model.devices import resolve_device
from mega_model.encoder import Encoder
from mega_schema.checkpoint.checkpoint_tokenizer import open_checkpoint_tokenizer
from mega_schema.checkpoint.formats import detect_format
from mega_schema.checkpoint.reader import Checkpoint
from mega_schema.errors import ConfigError, CorruptFileError, FormatError
from mega_schema.spec_checks import find_task_head
from mega_schema.task_heads import FOREIGN_HEADS, TaskHead
from mega_schema.tasks.best_checkpoint import find_best_folder
from mega_schema.tasks.pair_features import REAL, TOKEN, TYPE, EncodedExamples, split_rows
from mega_schema.tasks.span_features import SpanWindows
from mega_schema.tokenizer.tokenizer import Tokenizer, open_tokenizer

Ints = NDArray[np.int64]
CLASS_HEADS: tuple[TaskHead, ...] = ("classification", "multiple_choice")
_AUTO_CLASSES: Mapping[TaskHead, str] = MappingProxyType(
    {
        "classification": "AutoModelForSequenceClassification",
        "span": "AutoModelForQuestionAnswering",
    }
)
_TOKENS = 4096  # of a forward pass


@dataclass(frozen=True, slots=True)
class ClassifierModel:
    """A classifier on one device with its tokenizer.

    Attributes:
        labels: its classes in the order of the logits.
        max_length: tokens of its longest sample.
        forward: computes the logits of rows, (R, K), of choices (R, 1) or of spans (R, L, 2), from their ids,
            types and real tokens, (R, L) each.
    """

    tokenizer: Tokenizer
    identity: ModelIdentity
    labels: tuple[str, ...]
    max_length: int
    forward: Callable[[Tensor, Tensor, Tensor], Tensor]

    @torch.no_grad()
    def compute_logits(
        self, samples: EncodedExamples | SpanWindows, batch_size: int | None
    ) -> Iterator[tuple[Ints, NDArray[np.float32]]]:
        """Yield the numbers of a batch's samples and their logits, (B, K) float32; long samples come first.

        Of spans K is twice the tokens of the batch's longest sample.

        Args:
            batch_size: samples of a forward pass; None: as many as 4,096 tokens allow.
        """
        order = np.argsort(-samples.token_counts, kind="stable")
        device = torch.device(self.identity.device)
        begin = 0
        while begin < len(order):
            longest = int(samples.token_counts[order[begin]])
            limit = batch_size or max(1, _TOKENS // (longest * samples.rows))
            numbers = order[begin : begin + limit]
            rows = split_rows(np.stack([samples[int(number)] for number in numbers]), samples.rows)
            batch = torch.from_numpy(rows[..., :longest]).to(device)
            logits = self.forward(batch[:, TOKEN], batch[:, TYPE], batch[:, REAL])
            yield numbers, logits.float().cpu().numpy().reshape(len(numbers), -1)
            begin += len(numbers)


def open_classifier(
    load: Path, *, dtype: str, device: str, heads: tuple[TaskHead, ...] = CLASS_HEADS
) -> ClassifierModel:
    """Open the best checkpoint of a fine-tuning run, a checkpoint, or a Hugging Face folder.

    Args:
        heads: that the task accepts.
        dtype: "float32", "bfloat16", or "auto": that of the stored weights.

    Raises:
        MegaError: it is none of them, it has no head of classes, or the machine lacks the device.
    """
    if detect_format(load) == "hf":
        return _open_hugging_face(load, heads, dtype=dtype, device=device)
    checkpoint = Checkpoint.open(find_best_folder(load))
    spec = checkpoint.spec
    if spec.task_head not in heads:
        raise ConfigError(
            f"{checkpoint.folder}: model.task_head",
            "is not that of the task",
            found=spec.task_head,
            wanted=" | ".join(heads),
            hint="mega-train finetune trains one",
        )
    tokenizer = open_checkpoint_tokenizer(checkpoint)
    on = resolve_device(device, where="--device")
    model_dtype = choose_dtype(checkpoint, dtype)
    model = load_model(spec, weight_reader(checkpoint), dtype=model_dtype, device=on)
    assert isinstance(model, Encoder)
    has_types = spec.token_types is not None

    def forward(token_BL: Tensor, type_BL: Tensor, real_BL: Tensor) -> Tensor:
        rows, length = token_BL.shape
        attend = PackedAttention(rows, length, real_BL, causal=False)
        position_T = torch.arange(length, device=on).repeat(rows)
        types_T = type_BL.flatten() if has_types else None
        x_TD = model.hidden_states(token_BL.flatten(), position_T, attend, token_type_T=types_T)
        return model.row_logits(x_TD, rows)

    identity = identify_checkpoint(checkpoint, tokenizer, dtype=model_dtype, device=str(on))
    return ClassifierModel(tokenizer, identity, spec.labels, spec.max_seq_len, forward)


def _open_hugging_face(
    folder: Path, heads: tuple[TaskHead, ...], *, dtype: str, device: str
) -> ClassifierModel:
    files = open_hugging_face_folder(folder)
    architectures = files.config.get("architectures")
    head = find_task_head(folder)
    if head not in heads:
        classes = [name for name, name_head in FOREIGN_HEADS.items() if name_head in heads]
        raise FormatError(
            f"{folder / CONFIG}: architectures",
            "is not a class of the task",
            found=json.dumps(architectures),
            wanted=" | ".join(classes),
        )
    tokenizer = open_tokenizer("HuggingFaceTokenizer", model=folder)
    on = resolve_device(device, where="--device")
    check_transformers(folder)
    with quiet_library(), explain_errors(files):
        module = _load_module(files, head, dtype).to(on)
    by_id = module.config.id2label
    labels = tuple(str(by_id[number]) for number in range(len(by_id)))
    identity = identify_module(files, tokenizer, module, on)
    kinds = module.config.type_vocab_size

    def forward(token_BL: Tensor, type_BL: Tensor, real_BL: Tensor) -> Tensor:
        types_BL = type_BL if kinds > 1 else torch.zeros_like(type_BL)
        output = module(token_BL, attention_mask=real_BL, token_type_ids=types_BL)
        if head == "span":
            return torch.stack((output.start_logits, output.end_logits), -1)
        logits: Tensor = output.logits
        return logits

    return ClassifierModel(tokenizer, identity, labels, module.config.max_position_embeddings, forward)


def _load_module(files: HuggingFaceFolder, head: TaskHead, dtype: str) -> Any:
    """Load the weights, and refuse a folder that lacks some: `transformers` would draw them at random."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(
        files.path, local_files_only=True, trust_remote_code=False
    )
    module, loading = getattr(transformers, _AUTO_CLASSES[head]).from_pretrained(
        files.path,
        config=config,
        dtype=(config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype),
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    if missing := sorted(loading["missing_keys"]):
        raise CorruptFileError(
            files.path, "lacks weights", found=f"{len(missing)} missing, such as {missing[0]}"
        )
    return module.eval()
