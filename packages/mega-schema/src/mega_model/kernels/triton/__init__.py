"""Our Triton kernels; each is checked against its reference (`kernels.reference`).

Importing this needs `triton`, which comes with torch for CUDA. With TRITON_INTERPRET=1 set before the import,
the kernels run on a CPU, slowly: for tests.
"""

from __future__ import annotations

from mega_model.kernels import products, reference
from mega_model.kernels.interface import Kernels
from mega_model.kernels.triton import activations, dropout, norm, rotary, softmax

TRITON = Kernels(
    rms_norm=norm.rms_norm,
    layer_norm=norm.layer_norm,
    add_rms_norm=norm.add_rms_norm,
    add_layer_norm=norm.add_layer_norm,
    bias_gelu=activations.bias_gelu,
    swiglu=activations.swiglu,
    angles=reference.angles,
    apply_rotary=rotary.apply_rotary,
    apply_rotary_packed=rotary.apply_rotary_packed,
    masked_softmax=softmax.masked_softmax,
    attention=reference.attention,  # torch includes fused attention
    cross_entropy=softmax.cross_entropy,
    dropout_add=dropout.dropout_add,
    linear=products.linear,
    add_product=products.add_product,  # cuBLAS accumulates in float32
)
