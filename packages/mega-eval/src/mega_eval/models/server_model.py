"""A running server as a model for the tasks: mega-serve, or any that speaks OpenAI's /v1/completions.

A window is scored by a prompt of its token ids with `echo` and `logprobs`. A prompt may have as many tokens
as the server's context, one of which is predicted only: windows read one token less than those of a local
model.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np

from mega_eval.models.endpoint_client import EndpointClient, EndpointError
from mega_eval.models.endpoint_tokenizer import EndpointTokenizer
from mega_eval.models.greedy_continuation import cut_at_stop
from mega_eval.models.interface import GenerationRequest, ModelIdentity, WindowScores
from mega_eval.windows import Window, as_tokens
from mega_schema.errors import ConfigError
from mega_schema.tokenizer.tokenizer import Tokenizer

NOISE_LIMIT = 1e-3  # of ln P; the same request, alone and among others
_PROBES = 8
_PROBE_TOKENS = 32
_MAX_STOPS = 4  # OpenAI's limit
# digits, so that a tokenizer of numbers can encode it too
_TOKENIZER_PROBE = "12 7 30 5 19"
_SHOWN_IDS = 8
COMPLETIONS = "/v1/completions"
Request = TypeVar("Request")
Answer = TypeVar("Answer")


class ServerModel:
    """A model behind an HTTP server.

    Args:
        name: the server's name of the model; None: the only one it has.
        tokenizer: of the model; None: the server's endpoints.
        max_model_len: tokens of a prompt and its continuation; None: as the server says.
        concurrency: requests at a time.
        allow_noise: use a server whose scores depend on what else it computes.

    Raises:
        ConfigError: the model is not named, or its context is unknown; or its scores are noisy.
        EndpointError: the server does not answer, or not with scores.
    """

    def __init__(
        self,
        client: EndpointClient,
        *,
        name: str | None = None,
        tokenizer: Tokenizer | None = None,
        max_model_len: int | None = None,
        concurrency: int = 8,
        allow_noise: bool = False,
    ) -> None:
        self._client = client
        self._concurrency = concurrency
        self._threads = ThreadPoolExecutor(concurrency, "requests")
        description = _find_model(client, name)
        self._name = str(description["id"])
        self.tokenizer = tokenizer or EndpointTokenizer(client, self._name, self._threads.map)
        self._max_model_len = max_model_len or self._ask_context(description)
        if tokenizer is not None:
            _check_tokenizer(client, self._name, tokenizer)
        self.vocab_size = self.tokenizer.identity.vocab_size
        # what the server may not know: a continuation of no tokens, and vLLM's scores by id
        self._options: dict[str, int] = {"max_tokens": 0, "prompt_logprobs": 1}
        self.probes = self._build_probes()
        self._choose_options()
        # a prompt holds the last target too
        self.context_length = self._max_model_len - 1 - self._options["max_tokens"]
        self.probe_scores = [self._score(probe) for probe in self.probes]
        noise = self._measure_noise()
        if noise > NOISE_LIMIT and not allow_noise:
            raise ConfigError(
                "--url",
                "ln P of a token depends on the other requests of the server",
                found=f"{noise:.2g} between 1 and {_PROBES} requests at a time",
                wanted=f"at most {NOISE_LIMIT:g}",
                hint="start mega-serve with --batch-invariant, or add --allow-noise",
            )
        version = description.get("owned_by", "unknown")
        iteration = description.get("iteration")
        self.identity = ModelIdentity(
            source=client.url,
            sha256=hashlib.sha256(f"{self._name}\n{client.url}".encode()).hexdigest(),
            tokenizer_sha256=self.tokenizer.identity.sha256,
            iteration=iteration if isinstance(iteration, int) else None,
            dtype="of the server",
            device="remote",
            noise=noise,
            versions={"server": f"{version} {_ask_version(client)}".strip()},
        )

    def score_batches(
        self, windows: Sequence[Window], answered: Collection[int] = ()
    ) -> Iterator[list[tuple[int, WindowScores]]]:
        """Yield scores as they arrive, as `RequestModel.score_batches` does; the longest windows first."""
        order = [index for index in range(len(windows)) if index not in answered]
        order.sort(key=lambda index: -windows[index].input_length)
        return self._answer_all(self._score, windows, order)

    def generate_batches(
        self, requests: Sequence[GenerationRequest], answered: Collection[int] = ()
    ) -> Iterator[list[tuple[int, str]]]:
        """Yield continuations as they arrive, as `RequestModel.generate_batches` does."""
        order = [index for index in range(len(requests)) if index not in answered]
        return self._answer_all(self._generate, requests, order)

    def close(self) -> None:
        """Close the connections, and end the threads."""
        self._client.close()
        self._threads.shutdown(cancel_futures=True)

    def _answer_all(
        self, answer: Callable[[Request], Answer], requests: Sequence[Request], order: Iterable[int]
    ) -> Iterator[list[tuple[int, Answer]]]:
        """Keep `concurrency` requests running; yield the answers that have arrived."""
        remaining = iter(order)
        running: dict[Future[Answer], int] = {}
        while True:
            for index in remaining:
                running[self._threads.submit(answer, requests[index])] = index
                if len(running) == 2 * self._concurrency:  # half of them wait for a free thread
                    break
            if not running:
                return
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            # answers before errors: the caller keeps them
            errors = [error for future in finished if (error := future.exception()) is not None]
            answers = [(running.pop(future), future) for future in finished]
            batch = [(index, future.result()) for index, future in answers if future.exception() is None]
            if batch:
                yield sorted(batch, key=lambda pair: pair[0])
            if errors:
                raise errors[0]

    def _score(self, window: Window) -> WindowScores:
        ids = window.tokens.tolist()
        answer = self._client.post_json(
            COMPLETIONS,
            {
                "model": self._name,
                "prompt": ids,
                "echo": True,
                "logprobs": 1,
                "temperature": 0,
                **self._options,
            },
        )
        choice = self._find_choice(answer)
        logprobs = _scores_of_prompt(choice, len(ids), self._options["max_tokens"])
        if logprobs is None:
            raise self._refuse_scores("the answer has no ln P for each token of the prompt", choice)
        best = [max(top.values(), default=own) for own, top in logprobs]
        own = [value for value, _ in logprobs]
        count = window.target_length
        scores = np.array(own[-count:])
        greedy = _greedy_ids(choice, len(ids))
        if greedy is not None:
            ids_K = np.array(greedy[-count:], np.int64)
            return WindowScores(scores, ids_K == window.targets, ids_K)
        return WindowScores(scores, scores >= np.array(best[-count:]))

    def _generate(self, request: GenerationRequest) -> str:
        room = max(1, self._max_model_len - request.max_tokens)
        answer = self._client.post_json(
            COMPLETIONS,
            {
                "model": self._name,
                "prompt": list(request.prompt[-room:]),
                "max_tokens": request.max_tokens,
                "temperature": 0,
                **({"stop": list(request.stop[:_MAX_STOPS])} if request.stop else {}),
            },
        )
        text = self._find_choice(answer).get("text")
        if not isinstance(text, str):
            raise EndpointError(self._client.url + COMPLETIONS, "the answer has no text")
        return cut_at_stop(text, request.stop)

    def _find_choice(self, answer: object) -> dict[str, Any]:
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise EndpointError(self._client.url + COMPLETIONS, "the answer has no choices")
        return choices[0]

    def _refuse_scores(self, problem: str, choice: dict[str, Any]) -> EndpointError:
        found = choice.get("logprobs")
        if isinstance(found, dict):
            found = f"{len(found.get('token_logprobs') or ())} of them"
        hint = "a server whose /v1/completions knows echo with logprobs, as mega-serve's and vLLM's do"
        return EndpointError(self._client.url + COMPLETIONS, problem, found=found, hint=hint)

    def _choose_options(self) -> None:
        """Find the request that the server understands: of no new tokens, or else of one."""
        candidates: list[dict[str, int]] = [
            {"max_tokens": 0, "prompt_logprobs": 1},
            {"max_tokens": 0},
            {"max_tokens": 1},
        ]
        for number, options in enumerate(candidates):
            self._options = options
            try:
                self._score(self.probes[0])
                return
            except EndpointError as error:
                is_last = number == len(candidates) - 1
                if is_last or error.status not in (None, 400, 422):
                    raise

    def _build_probes(self) -> list[Window]:
        """Build windows of random tokens, the same in every run."""
        rng = random.Random(0)
        identity = self.tokenizer.identity
        special = {identity.eod, identity.bos, identity.pad}
        length = max(2, min(_PROBE_TOKENS, self._max_model_len - 1))
        probes = []
        for _ in range(_PROBES):
            ids = [rng.randrange(self.vocab_size) for _ in range(2 * length + len(special))]
            tokens = [token for token in ids if token not in special][:length] or ids[:length]
            probes.append(Window(as_tokens(tokens), len(tokens) - 1))
        return probes

    def _measure_noise(self) -> float:
        """Return the largest difference of ln P between a probe alone and among the others."""
        together = [future.result() for future in [self._threads.submit(self._score, p) for p in self.probes]]
        differences = [
            float(np.abs(score.logprobs - concurrent.logprobs).max())
            for score, concurrent in zip(self.probe_scores, together, strict=True)
        ]
        return max(differences)

    def _ask_context(self, description: dict[str, Any]) -> int:
        """Return the server's context: of its list of models, or of /tokenize."""
        length = description.get("max_model_len")
        if not isinstance(length, int):
            try:
                answer = self._client.post_json("/tokenize", {"model": self._name, "prompt": "a"})
                length = answer.get("max_model_len") if isinstance(answer, dict) else None
            except EndpointError as error:
                if error.status is None:
                    raise
        if not isinstance(length, int) or length < 4:
            raise ConfigError(
                "--max-model-len",
                f"{self._client.url} does not tell its model's context",
                wanted="a number of tokens",
                hint="--max-model-len 2048",
            )
        return length


def _find_model(client: EndpointClient, name: str | None) -> dict[str, Any]:
    """Return the server's description of the model.

    Raises:
        ConfigError: there is none of this name; or no name was given, and there are several.
    """
    answer = client.get_json("/v1/models")
    entries = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        raise EndpointError(client.url + "/v1/models", "the answer has no list of models")
    models = {str(entry["id"]): entry for entry in entries if isinstance(entry, dict) and "id" in entry}
    if name is None and len(models) == 1:
        return next(iter(models.values()))
    if name not in models:
        names = " | ".join(models) or "a server with a model"
        found = {} if name is None else {"found": name}
        raise ConfigError("--model", "does not name a model of the server", **found, wanted=names)
    return models[name]


def _check_tokenizer(client: EndpointClient, model: str, tokenizer: Tokenizer) -> None:
    """Check that a tokenizer encodes as the server does; a server without /tokenize is not asked.

    Raises:
        ConfigError: it does not.
    """
    body = {"model": model, "prompt": _TOKENIZER_PROBE, "add_special_tokens": False}
    try:
        answer = client.post_json("/tokenize", body)
    except EndpointError as error:
        if error.status is None:
            raise
        return
    wanted = answer.get("tokens") if isinstance(answer, dict) else None
    found = tokenizer.encode(_TOKENIZER_PROBE)
    if isinstance(wanted, list) and wanted != found:
        raise ConfigError(
            "--tokenizer",
            "does not encode as the server does",
            found=f"{_shorten(found)} for {_TOKENIZER_PROBE[:12]!r}...",
            wanted=_shorten(wanted),
            hint="leave --tokenizer out, or name the tokenizer of the server's model",
        )


def _shorten(ids: Sequence[object]) -> str:
    return " ".join(map(str, ids[:_SHOWN_IDS])) + (" ..." if len(ids) > _SHOWN_IDS else "")


def _ask_version(client: EndpointClient) -> str:
    """Return the server's version, or "" if it does not tell."""
    try:
        answer = client.get_json("/version")
    except EndpointError:
        return ""
    return str(answer.get("version", "")) if isinstance(answer, dict) else ""


def _scores_of_prompt(
    choice: dict[str, Any], length: int, new_tokens: int
) -> list[tuple[float, dict[str, float]]] | None:
    """Return ln P of each token but the first, with the most probable ones; None unless all are there."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return None
    own, top = logprobs.get("token_logprobs"), logprobs.get("top_logprobs")
    if not isinstance(own, list) or not isinstance(top, list):
        return None
    # the end of the text may come instead of the new token
    if len(own) not in range(length, length + new_tokens + 1) or len(top) != len(own):
        return None
    pairs = list(zip(own, top, strict=True))[1:length]
    if not all(isinstance(value, int | float) and isinstance(words, dict) for value, words in pairs):
        return None
    return [(float(value), words) for value, words in pairs]


def _greedy_ids(choice: dict[str, Any], length: int) -> list[int] | None:
    """Return the most probable token at each position but the first, by vLLM's prompt_logprobs."""
    rows = choice.get("prompt_logprobs")
    if not isinstance(rows, list) or len(rows) != length:
        return None
    ids = []
    for row in rows[1:]:
        if not isinstance(row, dict) or not row:
            return None
        best = max(row, key=lambda token: row[token].get("logprob", -math.inf))
        if not best.isdecimal():
            return None
        ids.append(int(best))
    return ids
