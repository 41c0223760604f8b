"""Our models as a model of lm-evaluation-harness: `--model mega --model_args pretrained=RUN`.

The harness finds `MegaLM` by the entry point group `lm_eval.models` (releases after 0.4.13), or after
`register_model` has run. Log-likelihoods equal those of its own class for `transformers`, `HFLM`, on the
converted weights: the same ids, the same windows, the same truncation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import model_registry

from mega_eval.commands.evaluate import open_session
from mega_eval.commands.model_options import build_options
from mega_eval.harness_encoding import HarnessEncoder
from mega_eval.models.interface import GenerationRequest
from mega_eval.tasks.rolling_windows import rolling_windows
from mega_eval.windows import suffix_window
from mega_schema.errors import ConfigError, FormatError

NAME = "mega"
DEFAULT_DEVICE = "cuda:0"  # the harness's, also on a machine without GPU
# the harness's names of the same limit, the first that is present counts
LIMIT_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")

TokenRequest = tuple[tuple[str, str], list[int], list[int]]


class MegaLM(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """A model that lm-evaluation-harness evaluates.

    Args:
        load: checkpoint directory, or run directory (its latest); None with the option `url`.
        pretrained: the harness's name of `load`, after which it names the folder of its results.
        device: as the option of the tasks; the harness's default, cuda:0, means the first GPU or the CPU.
        batch_size: windows in one forward pass; the harness's default, 1, means ours. Without effect on a
            server.
        max_batch_size: of the harness; without effect.
        max_length: tokens the model reads at most; None is its context.
        max_gen_toks: most tokens of an answer whose task sets no limit.
        add_bos_token: begin every text with the tokenizer's bos; None adds what its post-processor adds.
        prefix_token_id: the token before a text without context; None is bos, or eod.
        model_options: further options of the tasks, such as dtype="bfloat16".

    Raises:
        MegaError, click.ClickException: as the command line of a task does.
    """

    def __init__(
        self,
        load: str | Path | None = None,
        *,
        pretrained: str | Path | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        **model_options: object,
    ) -> None:
        super().__init__()
        if load is not None and pretrained is not None:
            raise ConfigError("pretrained", "contradicts load", hint="leave one of them out")
        load = pretrained if load is None else load
        values: dict[str, object] = {"load": load, "device": None if device == DEFAULT_DEVICE else device}
        is_remote = model_options.get("url") is not None
        if str(batch_size).isdecimal() and int(str(batch_size)) > 1 and not is_remote:
            values["micro_batch_size"] = batch_size
        self._session = open_session(build_options(values | model_options))
        self._tokenizer = self._session.tokenizer
        self._encoder = HarnessEncoder(self._tokenizer, add_bos=add_bos_token, prefix_id=prefix_token_id)
        self._max_gen_toks = int(max_gen_toks)
        context_length = self._session.context_length
        self._max_length = context_length if max_length is None else int(max_length)
        if not 1 <= self._max_length <= context_length:
            raise ConfigError(
                "max_length",
                "not a length that the model can read",
                found=max_length,
                wanted=f"1 to {context_length}",
            )

    @property
    def eot_token_id(self) -> int:
        eod = self._tokenizer.identity.eod
        return self.prefix_token_id if eod is None else eod

    @property
    def prefix_token_id(self) -> int:
        return self._encoder.prefix_id

    @property
    def max_length(self) -> int:
        """Largest number of tokens the model reads."""
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        """Most tokens of an answer whose task sets no limit."""
        return self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        """Content hash of the tokenizer: part of the keys of cached requests."""
        return self._tokenizer.identity.sha256

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Refuse chats: special tokens mark their turns, and our tokenizers read none in a text.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "--apply_chat_template",
            "our tokenizers read no special tokens in a text",
            hint="evaluate a server of mega-serve with --model local-chat-completions",
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: object) -> list[int]:
        """Encode a text; None adds the special tokens that the tokenizer is configured to add."""
        return self._encoder.encode(string, add_special_tokens=add_special_tokens is not False)

    def get_model_info(self) -> dict[str, object]:
        """Return what the harness's result file tells of the model."""
        identity = self._session.identity
        return {
            "model_source": identity.source,
            "model_num_parameters": identity.parameters,
            "model_dtype": identity.dtype,
            "model_revision": identity.iteration,
            "model_sha": identity.sha256,
        }

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return ln P of each continuation after its context, and whether it is the greedy one."""
        pairs: list[tuple[str, str]] = [request.args for request in requests]
        encodings = self._encoder.encode_pairs(pairs)
        return self._loglikelihood_tokens(
            [(pair, *encoding) for pair, encoding in zip(pairs, encodings, strict=True)]
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], **ignored: object
    ) -> list[tuple[float, bool]]:
        for pair, context, continuation in requests:
            if not context or not 0 < len(continuation) <= self._max_length:
                raise FormatError(
                    f"continuation {pair[1][:40]!r}",
                    "cannot be scored",
                    found=f"{len(context)} tokens of context, {len(continuation)} of continuation",
                    wanted=f"1 at least, and 1 to {self._max_length}",
                )
        windows = [suffix_window(context, target, self._max_length)[0] for _, context, target in requests]
        answers = []
        for (pair, *_), score in zip(requests, self._session.score(windows), strict=True):
            answer = (float(score.logprobs.sum()), bool(score.is_greedy.all()))
            self.cache_hook.add_partial("loglikelihood", pair, answer)
            answers.append(answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return ln P of each text after the prefix token, in disjoint windows of `max_length`."""
        texts: list[str] = [request.args[0] for request in requests]
        windows = [
            rolling_windows(ids, self.prefix_token_id, self._max_length)
            for ids in self._encoder.encode_texts(texts)
        ]
        scores = iter(self._session.score([window for text_windows in windows for window in text_windows]))
        totals = []
        for text, text_windows in zip(texts, windows, strict=True):
            totals.append(sum(float(next(scores).logprobs.sum()) for _ in text_windows))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context greedily until one of its stop strings.

        Raises:
            ConfigError: a task samples, or asks for as many tokens as the model can read.
        """
        pairs: list[tuple[str, dict[str, Any]]] = [request.args for request in requests]
        contexts = self._encoder.encode_texts([context for context, _ in pairs])
        answers = self._session.generate(
            [self._build_request(ids, settings) for ids, (_, settings) in zip(contexts, pairs, strict=True)]
        )
        for pair, answer in zip(pairs, answers, strict=True):
            self.cache_hook.add_partial("generate_until", pair, answer)
        return answers

    def _build_request(self, ids: list[int], settings: Mapping[str, Any]) -> GenerationRequest:
        temperature = float(settings.get("temperature") or 0)
        if settings.get("do_sample", temperature > 0) and temperature != 0:
            raise ConfigError(
                "generation_kwargs",
                "the task samples, and only greedy answers are supported",
                found=f"do_sample={settings.get('do_sample')}, temperature={temperature:g}",
                hint="--gen_kwargs do_sample=False,temperature=0",
            )
        limits = (settings[key] for key in LIMIT_KEYS if settings.get(key) is not None)
        max_tokens = int(next(limits, self._max_gen_toks))
        if max_tokens >= self._max_length:
            raise ConfigError(
                "max_gen_toks",
                "leaves no room for the prompt",
                found=f"{max_tokens} tokens",
                wanted=f"less than the model's context, {self._max_length}",
                hint=f"--gen_kwargs max_gen_toks={self._max_length // 2}",
            )
        until = settings.get("until") or []
        stop = (until,) if isinstance(until, str) else tuple(until)
        prompt = tuple(ids[-(self._max_length - max_tokens) :])
        return GenerationRequest(prompt, max_tokens, tuple(string for string in stop if string))


def register_model() -> None:
    """Make `--model mega` known to the harness, whose releases up to 0.4.13 read no entry points."""
    if NAME not in model_registry:
        model_registry.register(NAME, target=f"{__name__}:{MegaLM.__name__}")
