"""Training steps of other programs on the same device and tokens: Hugging Face and Megatron Core."""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mega_ckpt.formats.huggingface.config_json import from_spec
from mega_schema.spec import ModelSpec


def is_installed(module: str) -> bool:
    """Whether a module is installed; its package may be missing too."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def hugging_face(spec: ModelSpec, device: torch.device, *, compiled: bool) -> Callable[[Tensor], Tensor]:
    """Build a step of `transformers`' model of this shape on (B, S + 1) tokens, which returns its loss.

    Weights are float32 and products bfloat16 under autocast, attention is torch's fused one, the gradient is
    clipped and AdamW is torch's fused: how people run it. No padding of the vocabulary, no recomputation.

    Raises:
        ImportError: `transformers` is not installed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = from_spec(spec, "the model")
    none = {key: 0.0 for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop") if spec.family == "gpt"}
    settings = {**config, **none, "use_cache": False}
    kind = settings.pop("model_type")
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **settings), attn_implementation="sdpa", dtype=torch.float32
        )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def loss_of(token_BS1: Tensor) -> Tensor:
        logits = model(input_ids=token_BS1[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), token_BS1[:, 1:].flatten())

    forward = torch.compile(loss_of) if compiled else loss_of

    def step(token_BS1: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward(token_BS1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def megatron_core(
    spec: ModelSpec, device: torch.device, *, compiled: bool, dtype: torch.dtype = torch.bfloat16
) -> Callable[[Tensor], Tensor]:
    """Build a step of Megatron Core's model of this shape, as `hugging_face`.

    Put together as its own training does on one rank, with its defaults: weights in `dtype`, gradients and
    main weights in float32, what it fuses under torch.compile. The layers are TransformerEngine's where that
    is installed, and else its own, with torch's norms and AdamW and an attention that keeps its scores.

    Raises:
        ImportError: `megatron.core` is not installed.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    cuda, half = device.type == "cuda", dtype != torch.float32
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    if cuda:
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    else:
        without_gpu()
    norm = "RMSNorm" if spec.norm == "rmsnorm" else "LayerNorm"
    config = TransformerConfig(
        num_layers=spec.layers, hidden_size=spec.hidden, num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads, kv_channels=spec.head_dim, ffn_hidden_size=spec.ffn,
        normalization=norm, add_bias_linear=spec.bias, gated_linear_unit=spec.is_gated,
        activation_func=F.silu if spec.is_gated else F.gelu, bias_activation_fusion=True,
        bias_dropout_fusion=True, hidden_dropout=0.0, attention_dropout=0.0, bf16=half, params_dtype=dtype,
        use_cpu_initialization=not cuda,
    )  # fmt: skip
    fused = cuda and is_installed("transformer_engine")
    layer = (
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
        if fused
        else gpt_layer_specs.get_gpt_layer_local_spec(normalization=norm)
    )
    model: Any = GPTModel(
        config, layer, spec.vocab, spec.max_seq_len, share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="rope" if spec.positions == "rope" else "learned_absolute",
        rotary_base=int(spec.rope_theta),
    ).to(device)  # fmt: skip
    optimizer_config = OptimizerConfig(
        optimizer="adam", lr=1e-4, weight_decay=0.01, clip_grad=1.0, bf16=half, params_dtype=dtype
    )
    reduced = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = Float16Module(config, model) if half else model
    ddp = DistributedDataParallel(config, reduced, wrapped)
    with contextlib.nullcontext() if cuda else OnCPU():
        optimizer = get_megatron_optimizer(optimizer_config, [ddp])
    hidden = (
        None if fused else torch.ones(1, 1, spec.max_seq_len, spec.max_seq_len, device=device).triu(1).bool()
    )

    def step(token_BS1: Tensor) -> Tensor:
        rows, length = token_BS1.shape[0], token_BS1.shape[1] - 1
        place_BS = torch.arange(length, device=device).expand(rows, length)
        unseen = None if hidden is None else hidden[..., :length, :length]
        with torch.compiler.set_stance("default" if compiled else "force_eager"):
            loss = ddp(token_BS1[:, :-1], place_BS, unseen, labels=token_BS1[:, 1:]).mean()
            loss.backward()
        with contextlib.nullcontext() if cuda else OnCPU():
            ddp.finish_grad_sync()
            optimizer.step()
        ddp.zero_grad_buffer()
        return loss.detach()

    return step


class OnCPU(TorchFunctionMode):
    """Redirect Megatron Core's CUDA tensors and type checks to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = dict(kwargs or {})
        if str(asked.get("device", "")).startswith("cuda"):
            asked["device"] = "cpu"
        if func is Tensor.type and len(args) == 1 and not asked:
            return func(*args).replace("torch.", "torch.cuda.")
        return args[0] if func is Tensor.cuda else func(*args, **asked)


def without_gpu() -> None:
    """Replace unnecessary uses of a GPU in Megatron Core: buffers, synchronisation, dropout states."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
