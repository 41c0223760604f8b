"""The tokenizer of a server, by its endpoints /tokenizer_info, /tokenize and /detokenize."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson

from mega_eval.models.endpoint_client import EndpointClient, EndpointError
from mega_schema.errors import ConfigError
from mega_schema.tokenizer.identity import TYPES, TokenizerIdentity

Input = TypeVar("Input")
Output = TypeVar("Output")
_HINT = "--tokenizer DIR, a checkpoint or a Hugging Face folder with the model's tokenizer"


class EndpointTokenizer:
    """A `Tokenizer` at the other end of a connection.

    Args:
        model: the server's name of the model.
        map_all: calls a function for every element, on several threads.

    Raises:
        ConfigError: the server does not describe its tokenizer.
    """

    def __init__(
        self,
        client: EndpointClient,
        model: str,
        map_all: Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]],
    ) -> None:
        self._client = client
        self._model = model
        self._map_all = map_all
        self._texts: dict[int, str] = {}  # of single tokens
        try:
            info = client.get_json("/tokenizer_info")
        except EndpointError as error:
            if error.status is None:
                raise
            info = None
        size = info.get("vocab_size") if isinstance(info, dict) else None
        if not isinstance(info, dict) or not isinstance(size, int):
            raise ConfigError("--tokenizer", f"{client.url} does not describe its tokenizer", hint=_HINT)
        kind = info.get("tokenizer_class")

        def find_id(name: str) -> int | None:
            value = info.get(f"{name}_token_id")
            return value if isinstance(value, int) else None

        self.identity = TokenizerIdentity(
            type=kind if kind in TYPES else "HuggingFaceTokenizer",
            vocab_size=size,
            eod=find_id("eos"),
            bos=find_id("bos"),
            pad=find_id("pad"),
            sha256=hashlib.sha256(orjson.dumps(info, option=orjson.OPT_SORT_KEYS)).hexdigest(),
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        answer = self._client.post_json("/tokenize", body)
        return [int(token) for token in self._field("/tokenize", answer, "tokens", list)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode each text."""
        return list(self._map_all(self.encode, texts))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids; that of a single one is asked for once."""
        if len(ids) == 1 and ids[0] in self._texts:
            return self._texts[ids[0]]
        answer = self._client.post_json("/detokenize", {"model": self._model, "tokens": list(ids)})
        text = str(self._field("/detokenize", answer, "prompt", str))
        if len(ids) == 1:
            self._texts[ids[0]] = text
        return text

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id."""
        return list(self._map_all(lambda token: self.decode([token]), ids))

    def save(self, folder: Path) -> None:
        """Refuse: only the server has the files."""
        raise ConfigError(
            "--tokenizer", f"{self._client.url} does not give out the files of its tokenizer", hint=_HINT
        )

    def _field(self, path: str, answer: object, name: str, kind: type[Output]) -> Output:
        value = answer.get(name) if isinstance(answer, dict) else None
        if not isinstance(value, kind):
            raise EndpointError(self._client.url + path, f"the answer has no {name}", hint=_HINT)
        return value
