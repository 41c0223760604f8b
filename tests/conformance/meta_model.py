"""Meta's own Llama over the parts of a folder, in processes of its own: fairscale prints, and keeps groups.

Run as `python -m tests.conformance.meta_model MEET TOKENS FOLDER...`, one process a part. A folder in
which logits are left was loaded without a key too many or too few.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tests.processes import on_ranks


def logits(folders: Sequence[Path], parts: int, token_BS: torch.Tensor, meet: Path) -> list[torch.Tensor]:
    """What Meta's model computes of each folder, which has so many parts."""
    tokens = meet.with_suffix(".tokens")
    torch.save(token_BS, tokens)
    on_ranks("tests.conformance.meta_model", [str(meet), str(tokens), *map(str, folders)], parts, meet.parent)
    return [torch.load(folder / "logits.pt", weights_only=True) for folder in folders]


def _rank(meet: str, tokens: str, folders: Sequence[Path]) -> None:
    from fairscale.nn.model_parallel.initialize import initialize_model_parallel
    from llama_models.llama3.args import ModelArgs
    from llama_models.llama3.model import Transformer

    rank, parts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=parts)
    initialize_model_parallel(parts)
    token_BS = torch.load(tokens, weights_only=True)
    for folder in folders:
        params = json.loads((folder / "params.json").read_bytes())
        model = Transformer(ModelArgs(max_batch_size=len(token_BS), max_seq_len=token_BS.shape[1], **params))
        model.load_state_dict(torch.load(sorted(folder.glob("*.pth"))[rank], weights_only=True))
        with torch.no_grad():
            logits_BSV = model(token_BS, 0)
        if rank == 0:
            torch.save(logits_BSV.clone(), folder / "logits.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1], sys.argv[2], [Path(word) for word in sys.argv[3:]])
