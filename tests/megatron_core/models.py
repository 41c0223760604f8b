"""Megatron Core's GPT and BERT, built from a checkpoint's arguments as in its training, and GPT's logits."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

# what the arguments call otherwise than the configuration does
_RENAMED = {"layernorm_zero_centered_gamma": "apply_layernorm_1p", "layernorm_epsilon": "norm_epsilon"}
# of a training on CPUs
_HERE = {
    "use_cpu_initialization": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "pipeline_dtype": torch.float32,
}


def begin(tp: int = 1, pp: int = 1, vp: int = 1) -> None:
    """Cut the world into ranks of a layout, whatever it was cut into before."""
    from megatron.core import parallel_state

    torch._dynamo.config.disable = True  # compiling takes longer than the tests do
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, vp if vp > 1 else None)


def _config(args: Namespace) -> Any:
    from megatron.core import parallel_state as ranks
    from megatron.core.activations import squared_relu
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = {
        field.name: _RENAMED.get(field.name, field.name) for field in dataclasses.fields(TransformerConfig)
    }
    arguments = {ours: getattr(args, name) for ours, name in names.items() if hasattr(args, name)} | _HERE
    pp = ranks.get_pipeline_model_parallel_world_size()
    arguments |= {
        "bias_activation_fusion": args.bias_gelu_fusion and not args.swiglu,
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "num_moe_experts": args.num_experts,
        "tensor_model_parallel_size": ranks.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": ranks.get_virtual_pipeline_model_parallel_world_size(),
    }
    if args.swiglu:
        arguments |= {"activation_func": F.silu, "gated_linear_unit": True}
    if args.squared_relu:
        arguments |= {"activation_func": squared_relu}
    return TransformerConfig(**arguments)


def build_bert(args: Namespace) -> Any:
    """This rank's part of a BERT, as `pretrain_bert.py` builds it; the logits are those of all ranks."""
    from megatron.core import parallel_state as ranks
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(
        _config(args),
        2 if args.bert_binary_head else 0,
        bert_layer_local_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=ranks.is_pipeline_first_stage(),
        post_process=ranks.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        add_binary_head=args.bert_binary_head,
    ).eval()


def build_chunks(args: Namespace) -> list[Any]:
    """This rank's chunks of a GPT, or of a BERT if the arguments have our mark `is_bert`."""
    from megatron.core import parallel_state as ranks
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    if getattr(args, "is_bert", False):
        return [build_bert(args)]
    config = _config(args)
    layer = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    chunks = ranks.get_virtual_pipeline_model_parallel_world_size() or 1
    return [
        GPTModel(
            config,
            layer,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=ranks.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=ranks.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            parallel_output=False,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
            vp_stage=chunk if chunks > 1 else None,
        ).eval()
        for chunk in range(chunks)
    ]


def logits(chunks: list[Any], token_BS: torch.Tensor) -> torch.Tensor | None:
    """Those of the tokens where the last stage is; elsewhere None. Every rank of the pipeline calls it."""
    from megatron.core import parallel_state as ranks

    (rows, length), hidden = token_BS.shape, chunks[0].config.hidden_size
    place_BS = torch.arange(length).expand(rows, length)
    hidden_from = torch.ones(1, 1, length, length).triu(1).bool()
    pipeline = dist.get_process_group_ranks(ranks.get_pipeline_model_parallel_group())
    out: torch.Tensor | None = None
    with torch.no_grad():
        for chunk in chunks:
            for rank in pipeline:
                passed = torch.empty(length, rows, hidden)
                if rank == dist.get_rank():
                    out = chunk(token_BS, place_BS, hidden_from)
                    passed = passed if chunk.post_process else out
                dist.broadcast(passed, rank, group=ranks.get_pipeline_model_parallel_group())
                for module in chunks:
                    module.set_input_tensor(passed)
    return out if chunks[-1].post_process else None
