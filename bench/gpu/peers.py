"""What others do in a step, on the same device and tokens: Hugging Face's model under torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_ckpt.config_json import from_spec
from mega_schema.spec import ModelSpec


def hugging_face(spec: ModelSpec, device: torch.device, *, compiled: bool) -> Callable[[Tensor], Tensor]:
    """A step of `transformers`' model of this shape on (B, S + 1) tokens, which gives its loss.

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
