"""Read llama2.c's model files: a header and every tensor in float32, little endian.

version 0    int32[7]                         sizes; a negative vocabulary size: the head is not tied
             float32                          the tensors, and two tables of rotary angles after the last norm
version 1    "24ka", int32 1, int32[7]        sizes
             uint8, zeros up to byte 256      whether the head is the embedding
             float32                          the tensors, norms first

The sizes are dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size and seq_len. All other
hyperparameters are constants in https://github.com/karpathy/llama2.c.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from mega_ckpt.checkpoint.checkpoint_source import CheckpointSource, gather_boxes, match_tensors
from mega_ckpt.formats import user_overrides
from mega_ckpt.formats.interface import Format, ReadOptions
from mega_ckpt.formats.llama2c import tokenizer as llama2c_tokenizer
from mega_ckpt.formats.meta.names import aliases
from mega_ckpt.tensors.mapped_tensor import MappedTensor
from mega_schema.arch import table
from mega_schema.checkpoint.reader import MODEL
from mega_schema.errors import ConfigError, FormatError
from mega_schema.params import count_params
from mega_schema.spec import ModelSpec, llama
from mega_schema.tokenizer.tokenizer import Tokenizer

_MAGIC, _BEGIN = b"24ka", 256  # offset of the tensors in version 1
_SIZES, _SHARED = struct.Struct("<7i"), struct.Struct("<4s8iB")
_LAYER: Mapping[str, str] = MappingProxyType(
    {name: f"{name}.weight" for name in ("attention_norm", "ffn_norm")}
    | {name: f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")}
    | {name: f"feed_forward.{name}.weight" for name in ("w1", "w2", "w3")}
)
# tensor kinds; each is stored for all layers before the next
_ORDERS = (
    ("tok_embeddings", "attention_norm", "wq", "wk", "wv", "wo", "ffn_norm", "w1", "w2", "w3", "norm"),
    ("attention_norm", "ffn_norm", "norm", "tok_embeddings", "wq", "wk", "wv", "wo", "w1", "w2", "w3"),
)


def read(load: Path, reading: ReadOptions) -> CheckpointSource:
    """Read the file, and the tokenizer in its folder.

    Raises:
        FormatError: the file is not a llama2.c model, is truncated, or has quantised weights.
    """
    version, spec = _header(load)
    begin = _BEGIN if version else _SIZES.size
    angles = 0 if version else spec.max_seq_len * spec.head_dim  # sine and cosine of every pair
    size = load.stat().st_size
    wanted = begin + 4 * (_parameters(spec) + angles)
    if size != wanted:
        sizes = f"{spec.layers:,} layers, hidden {spec.hidden:,}, vocabulary {spec.vocab:,}"
        hint = "the file is truncated, or is not a llama2.c model"
        raise FormatError(
            load, "size in bytes", found=f"{size:,}", wanted=f"{wanted:,} for {sizes}", hint=hint
        )
    rows = {row.name: row for row in table(spec)}
    expected = [alias.unsharded_tensor(rows[alias.ours]) for alias in aliases(spec)]
    shapes = {foreign.name: foreign.shape for foreign in expected}
    stored = dict[str, MappedTensor]()
    offset = begin
    for name in _names(version, spec):
        offset += 4 * angles if name == "output.weight" else 0
        stored[name] = MappedTensor(load, "F32", shapes[name], offset)
        offset += stored[name].bytes
    spaces, box, verify = gather_boxes(load, spec, {MODEL: match_tensors(load, expected, stored)})
    tokenizer: Tokenizer | None = None
    if reading.tokenizer is not None:
        tokenizer = user_overrides.load_tokenizer(reading.tokenizer, spec)
    elif not reading.no_tokenizer:
        tokenizer = llama2c_tokenizer.find_tokenizer(load, spec.vocab)
    return CheckpointSource(load, spec, spaces, box, tokenizer=tokenizer, verify=verify)


def _header(load: Path) -> tuple[int, ModelSpec]:
    """Return the version and the model spec."""
    try:
        with load.open("rb") as file:
            head = file.read(_SHARED.size)
    except OSError as error:
        raise FormatError(
            load, "not readable", found=error.strerror, wanted="a .bin model file of llama2.c"
        ) from None
    if len(head) < _SHARED.size:
        raise FormatError(load, "size in bytes", found=len(head), wanted="a header and a model")
    version = 0
    sizes = [*_SIZES.unpack_from(head)]
    shared = sizes[5] > 0
    if head.startswith(_MAGIC):
        _, version, *sizes, shared = _SHARED.unpack(head)
    if version == 2:
        hint = "export the model as version 1: python export.py model.bin --version 1"
        raise FormatError(load, "has quantised weights", found="version 2", wanted="0 | 1", hint=hint)
    if version not in (0, 1):
        raise FormatError(load, "version", found=version, wanted="0 | 1")
    hidden, ffn, layers, heads, kv_heads, vocab, max_seq_len = sizes
    try:
        spec = llama(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            ffn=ffn,
            vocab=abs(vocab),
            max_seq_len=max_seq_len,
            tied=bool(shared),
        )
    except ConfigError as error:
        raise FormatError(load, f"is not a llama2.c model: {error}") from None
    return version, spec


def _parameters(spec: ModelSpec) -> int:
    """Count the parameters without building a table: the layer count of an untrusted header may be huge."""
    rows = table(replace(spec, layers=1))
    return count_params(rows) + (spec.layers - 1) * count_params(row for row in rows if row.stage == 0)


def _names(version: int, spec: ModelSpec) -> Iterator[str]:
    """Yield the tensor names in the order of the file."""
    for name in _ORDERS[version]:
        if name in _LAYER:
            yield from (f"layers.{i}.{_LAYER[name]}" for i in range(spec.layers))
        else:
            yield f"{name}.weight"
    if not spec.tied:
        yield "output.weight"


FORMAT = Format(read)
