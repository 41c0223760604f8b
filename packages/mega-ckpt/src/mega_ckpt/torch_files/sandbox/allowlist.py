"""The globals that a pickle may name. Callable ones are in `stubs.MAKERS`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

# torch's dtypes by their safetensors names; storages are torch.FloatStorage and so on
DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "torch.float64": "F64",
        "torch.float32": "F32",
        "torch.float16": "F16",
        "torch.bfloat16": "BF16",
        "torch.int64": "I64",
        "torch.int32": "I32",
        "torch.int16": "I16",
        "torch.int8": "I8",
        "torch.uint64": "U64",
        "torch.uint32": "U32",
        "torch.uint16": "U16",
        "torch.uint8": "U8",
        "torch.bool": "BOOL",
        "torch.float8_e4m3fn": "F8_E4M3",
        "torch.float8_e5m2": "F8_E5M2",
    }
)
STORAGES: Mapping[str, str] = MappingProxyType(
    {
        "torch.DoubleStorage": "F64",
        "torch.FloatStorage": "F32",
        "torch.HalfStorage": "F16",
        "torch.BFloat16Storage": "BF16",
        "torch.LongStorage": "I64",
        "torch.IntStorage": "I32",
        "torch.ShortStorage": "I16",
        "torch.CharStorage": "I8",
        "torch.ByteStorage": "U8",
        "torch.BoolStorage": "BOOL",
        "torch.storage.UntypedStorage": "U8",
    }
)

# globals that may be named but not called
VALUES = frozenset(
    {
        *DTYPES,
        *STORAGES,
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
        "numpy.ndarray",
        "typing.Any",
        *(f"builtins.{name}" for name in ("object", "dict", "list", "tuple", "bytes", "str")),
        *(f"builtins.{name}" for name in ("bool", "int", "float")),
    }
)

# members in the order of their values, from 1; Megatron's are pickled by value
ENUMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "ModelType": ("encoder_or_decoder", "encoder_and_decoder", "retro_encoder", "retro_decoder"),
        "LayerType": (
            "encoder",
            "decoder",
            "retro_encoder",
            "retro_decoder",
            "retro_decoder_with_retriever",
        ),
        "AttnType": ("self_attn", "cross_attn"),
        "AttnMaskType": (
            *("padding", "causal", "no_mask", "padding_causal"),
            *("arbitrary", "causal_bottom_right"),
        ),
        "AttnBackend": ("flash", "fused", "unfused", "local", "auto"),
        "CudaGraphScope": (
            *("full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"),
        ),
        "PositionEmbeddingType": ("rotary", "absolute", "alibi"),
    }
)
_HOMES = tuple(
    f"megatron.{module}enums" for module in ("", "model.", "legacy.model.", "core.", "core.transformer.")
)


def _classes() -> Iterator[str]:
    """Yield the classes whose objects become records: class and fields, nothing else."""
    yield from ("argparse.Namespace", "types.SimpleNamespace", "builtins.complex", "builtins.slice")
    yield from ("datetime.datetime", "datetime.timedelta", "signal.Signals", "_io.BytesIO")
    yield from ("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePosixPath", "pathlib.Path")
    yield from ("torch.device", "torch.serialization._get_layout")
    for home in _HOMES:
        yield from (f"{home}.{enum}" for enum in ENUMS)
    for module in ("fp16", "megatron.fp16", "apex.fp16_utils", "deepspeed.runtime.fp16"):
        for scaler in ("LossScaler", "DynamicLossScaler"):
            yield f"{module}.loss_scaler.{scaler}"
    for scaler in ("ConstantGradScaler", "DynamicGradScaler", "MegatronGradScaler"):
        yield f"megatron.optimizer.grad_scaler.{scaler}"
        yield f"megatron.core.optimizer.grad_scaler.{scaler}"
    for enum in ("RerunMode", "RerunState"):  # state of a step that is repeated
        yield f"megatron.core.rerun_state_machine.{enum}"
    for enum in ("Fp8Recipe", "Fp4Recipe"):
        yield f"megatron.core.enums.{enum}"
    yield "deepspeed.runtime.zero.config.ZeroStageEnum"
    yield "deepspeed.utils.tensor_fragment.fragment_address"
    for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"):
        yield f"torch.distributed.checkpoint.metadata.{name}"
    for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"):
        yield f"torch.distributed.checkpoint.metadata.{name}"
    for name in ("_StorageInfo", "_StoragePrefix"):
        yield f"torch.distributed.checkpoint.filesystem.{name}"
    # Megatron core stores the save plan with the metadata
    for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"):
        yield f"torch.distributed.checkpoint.planner.{name}"
    for name in ("TensorProperties", "MEM_FORMAT_ENCODING"):
        yield f"torch.distributed._shard.sharded_tensor.metadata.{name}"
    for meter in ("AverageMeter", "TimeMeter", "StopwatchMeter"):
        yield f"fairseq.meters.{meter}"
    for name in ("base.ContainerMetadata", "base.Metadata", "dictconfig.DictConfig", "listconfig.ListConfig"):
        yield f"omegaconf.{name}"
    for kind in ("Any", "Boolean", "Enum", "Float", "Integer", "String"):
        yield f"omegaconf.nodes.{kind}Node"


CLASSES = frozenset(_classes())
