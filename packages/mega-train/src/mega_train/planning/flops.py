"""Floating-point operations of one optimizer step over all ranks.

Every matrix of the table is used once per token: 2 operations per element forward, 4 backward. With
attention's 4·s·q per token and layer forward and 8·s·q backward, without skipping masked scores, this is for
GPT with f = 4h the 72·B·s·L·h²·(1 + s/6h + V/12hL) of arXiv:2205.05198 eq. 7 and what Megatron core reports.
"""

from __future__ import annotations

from mega_schema.arch import table
from mega_schema.params import count_params, is_layer_matrix
from mega_schema.spec import ModelSpec
from mega_train.planning.workload import Workload


def parameters(spec: ModelSpec) -> int:
    """Count the parameters of the model, tied ones once, without padding."""
    return count_params(table(spec))


def model_flops(workload: Workload) -> float:
    """Return the FLOPs of the model without recomputation: the numerator of MFU."""
    return (
        workload.global_batch_size * workload.seq_length * flops_per_token(workload.spec, workload.seq_length)
    )


def flops_per_token(spec: ModelSpec, length: int, decoder_length: int = 0) -> float:
    """Return the FLOPs per token of a sequence of `length`.

    Args:
        decoder_length: tokens of T5's decoder for `length` tokens of its encoder, to which the FLOPs of both
            are attributed.
    """
    if spec.encoder_layers is not None:
        return _encoder_decoder_flops(spec, spec.encoder_layers, length, decoder_length) / length
    return 6.0 * (_layer_elements(spec) + _head_elements(spec)) + 3.0 * _attention_flops(spec, length)


def _encoder_decoder_flops(spec: ModelSpec, encoder_layers: int, source: int, target: int) -> float:
    """Return the FLOPs of a sample of `source` tokens in the encoder and `target` in the decoder."""
    source_elements, target_elements = 0, _head_elements(spec)
    for row in table(spec):
        if isinstance(row.stage, int) and is_layer_matrix(row):
            if not spec.has_cross_attention(row.stage) or ".cross.kv." in row.name:
                source_elements += row.size
            else:
                target_elements += row.size
    products = source * source_elements + target * target_elements
    decoder_layers = spec.layers - encoder_layers
    scores = encoder_layers * source**2 + decoder_layers * (target**2 + target * source)
    return 6.0 * products + 3.0 * 4.0 * spec.q_rows * scores


def hardware_flops(workload: Workload) -> float:
    """Return the FLOPs including recomputation: the numerator of HFU."""
    spec = workload.spec
    forward = _attention_flops(workload.spec, workload.seq_length)
    if workload.recompute.granularity == "full":
        forward += 2.0 * _layer_elements(spec)
    recomputed = sum(workload.recomputed_layers(stages) for stages in workload.model.stages) / spec.layers
    return model_flops(workload) + workload.global_batch_size * workload.seq_length * recomputed * forward


def _layer_elements(spec: ModelSpec) -> int:
    """Count the elements of the layers' matrices."""
    return sum(row.size for row in table(spec) if isinstance(row.stage, int) and len(row.shape) == 2)


def _head_elements(spec: ModelSpec) -> int:
    return spec.vocab * spec.hidden


def _attention_flops(spec: ModelSpec, length: int) -> float:
    """Return the forward FLOPs of attention per token."""
    return 4.0 * length * spec.q_rows * spec.layers
