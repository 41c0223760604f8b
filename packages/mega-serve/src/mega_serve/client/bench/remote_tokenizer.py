"""The tokenizer of a server, by its endpoints /tokenizer_info, /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mega_serve.client.http import ServerClient, ServerError


@dataclass(frozen=True, slots=True)
class RemoteTokenizer:
    """A tokenizer at the other end of a connection.

    Attributes:
        vocab_size: number of ids.
        special_ids: ids that a prompt should not contain.
    """

    client: ServerClient
    model: str | None
    vocab_size: int
    special_ids: frozenset[int]

    async def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens.

        Raises:
            ServerError: the request failed.
        """
        answer = await self._post("/tokenize", {"prompt": text, "add_special_tokens": False})
        return list(_field(self.client, "/tokenize", answer, "tokens", list))

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids.

        Raises:
            ServerError: the request failed.
        """
        answer = await self._post("/detokenize", {"tokens": list(ids)})
        return str(_field(self.client, "/detokenize", answer, "prompt", str))

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        model = {"model": self.model} if self.model is not None else {}
        return await self.client.send_json("POST", path, {**model, **body})


async def open_remote_tokenizer(
    client: ServerClient, model: str | None, vocab_size: int | None
) -> RemoteTokenizer | None:
    """Return the server's tokenizer; None if the server has no /tokenize.

    Args:
        vocab_size: number of ids, if the user gave it; None asks the server. If the server does not tell,
            the largest id of a sample text is the bound: every id below it exists.
    """
    try:
        answer = await client.send_json(
            "POST",
            "/tokenize",
            {"prompt": _SAMPLE, "add_special_tokens": False} | ({"model": model} if model else {}),
        )
        sample = _field(client, "/tokenize", answer, "tokens", list)
    except ServerError:
        return None
    try:
        info = await client.get_json("/tokenizer_info")
    except ServerError:
        info = {}
    info = info if isinstance(info, dict) else {}
    special = frozenset(
        value for name, value in info.items() if name.endswith("_token_id") and isinstance(value, int)
    )
    size = vocab_size or info.get("vocab_size")
    return RemoteTokenizer(client, model, size if isinstance(size, int) else max(sample) + 1, special)


_SAMPLE = "The quick brown fox jumps over the lazy dog. 0123456789 Straße, naïve, 東京, Привет!"


def _field(client: ServerClient, path: str, answer: object, name: str, kind: type) -> Any:
    value = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(value, kind):
        raise ServerError(client.address.url(path), f"the answer has no {name}")
    return value
