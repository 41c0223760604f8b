"""Turn sampled tokens into outputs: text, log-probabilities, and the rules that end a sequence."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace

from mega_schema.tokenizer.tokenizer import Tokenizer
from mega_serve.engine.beam_search import BeamGroup, FinishedBeam
from mega_serve.engine.interfaces import DetokenizerFactory, SampledToken
from mega_serve.engine.requests import FinishReason, SequenceOutput, TokenLogprob
from mega_serve.engine.sequence import Sequence, decay_top_p


@dataclass(slots=True)
class _NewTokens:
    """What a sequence gains in one step."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


class OutputProcessor:
    """Appends tokens to sequences and decides whether they end.

    Args:
        detokenizer_factory: the constructor of the detokenizers.
        clock: the engine's, in seconds.
    """

    def __init__(
        self, tokenizer: Tokenizer, detokenizer_factory: DetokenizerFactory, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._tokenizer = tokenizer
        self._detokenizer_factory = detokenizer_factory
        self._eod = tokenizer.identity.eod

    def append(self, sequence: Sequence, sampled: Ids[SampledToken], drafts: Ids[int] = ()) -> SequenceOutput:
        """Append the sampled tokens that are valid: those up to the first that differs from its draft.

        An error in the sequence's grammar or text ends it with "error".

        Args:
            sampled: one token more than drafts.
        """
        new = _NewTokens()
        try:
            for index, token in enumerate(sampled):
                if token.error is not None:
                    new.finish_reason = "error"
                    new.error = token.error
                    break
                self._append_token(sequence, token, new)
                if new.finish_reason is not None or index == len(drafts) or drafts[index] != token.token_id:
                    break
        except Exception as error:  # whatever a request's own text or grammar raises is its own
            new.finish_reason = "error"
            new.error = describe_error(error)
        return self._output(sequence, new)

    def finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> SequenceOutput:
        """Return the last output of a sequence that ends without a new token."""
        new = _NewTokens(finish_reason=reason, error=error)
        try:
            new.text = sequence.detokenizer.flush()
        except Exception as flush_error:
            new.finish_reason = "error"
            new.error = error or describe_error(flush_error)
        return self._output(sequence, new)

    def finish_beams(self, group: BeamGroup, reason: FinishReason | None = None) -> list[SequenceOutput]:
        """Return one output per beam, best first.

        Where there are fewer hypotheses than beams, because the vocabulary or the time was too small, the
        outputs after the last have no tokens and no score.

        Args:
            reason: why the search was ended early; None: it has come to its end.
        """
        outputs = [self._beam_output(group, rank, beam) for rank, beam in enumerate(group.finished.beams)]
        request_id = group.state.request.request_id
        missing: FinishReason = reason or "length"
        for rank in range(len(outputs), group.params.width):
            outputs.append(SequenceOutput(request_id=request_id, index=rank, finish_reason=missing))
        if reason is None:
            outputs[0] = replace(outputs[0], times=group.state.times(self._clock()))
            return outputs
        return [_with_reason(output, reason) for output in outputs]

    def _append_token(self, sequence: Sequence, token: SampledToken, new: _NewTokens) -> None:
        params = sequence.params
        token_id = token.token_id
        before = sequence.token_ids[-1]
        sequence.token_ids.append(token_id)
        sequence.output_token_ids.append(token_id)
        new.token_ids.append(token_id)
        if token.logprob is not None:
            new.logprobs.append(token.logprob)
        sequence.top_p = decay_top_p(sequence.top_p, params)
        count = len(sequence.output_token_ids)
        is_repeated = token_id == params.stop_repeated_id and before == token_id
        is_eod = token_id == self._eod and not params.ignore_eos
        if count > params.min_tokens and (is_eod or is_repeated or token_id in params.stop_token_ids):
            new.finish_reason = "stop"
            new.stop_reason = token_id
            if params.include_stop_str_in_output:
                new.text += sequence.detokenizer.append((token_id,))[0]
            new.text += sequence.detokenizer.flush()
            return
        if sequence.grammar is not None:
            sequence.grammar.accept(token_id)
        text, stop_string = sequence.detokenizer.append((token_id,))
        new.text += text
        if stop_string is not None:
            new.finish_reason = "stop"
            new.stop_reason = stop_string
            return
        if sequence.grammar is not None and sequence.grammar.is_finished:
            new.finish_reason = "stop"
        elif count == sequence.max_output_tokens:
            new.finish_reason = "length"
        if new.finish_reason is not None:
            new.text += sequence.detokenizer.flush()

    def _output(self, sequence: Sequence, new: _NewTokens) -> SequenceOutput:
        state = sequence.state
        if new.token_ids and state.first_token_time is None:
            state.first_token_time = self._clock()
        is_first = not sequence.has_output
        sequence.has_output = True
        prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        is_scored = sequence.params.prompt_logprobs is not None and not state.missing_scores
        if is_first and sequence.index == 0 and is_scored:
            prompt_logprobs = (None, *state.prompt_logprobs)
        return SequenceOutput(
            request_id=state.request.request_id,
            index=sequence.index,
            token_ids=tuple(new.token_ids),
            text=new.text,
            logprobs=tuple(new.logprobs),
            prompt_logprobs=prompt_logprobs,
            cached_tokens=state.cached_tokens if is_first else 0,
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason,
            embedding=sequence.embedding,
            error=new.error,
            times=state.times(self._clock()) if new.finish_reason in ("stop", "length") else None,
        )

    def _beam_output(self, group: BeamGroup, rank: int, beam: FinishedBeam) -> SequenceOutput:
        state = group.state
        text_ids = beam.token_ids[:-1] if beam.is_stopped else beam.token_ids
        error = None
        text = ""
        try:
            detokenizer = self._detokenizer_factory(
                self._tokenizer,
                state.request.prompt_token_ids,
                stop=(),
                include_stop_str=False,
                min_tokens=0,
                skip_special_tokens=None,
            )
            text = detokenizer.append(text_ids)[0] + detokenizer.flush()
        except Exception as text_error:
            error = describe_error(text_error)
        reason: FinishReason = "stop" if beam.is_stopped else "length"
        return SequenceOutput(
            request_id=state.request.request_id,
            index=rank,
            token_ids=beam.token_ids,
            text=text,
            cached_tokens=state.cached_tokens,
            finish_reason=reason if error is None else "error",
            stop_reason=group.params.stop_token_id if beam.is_stopped else None,
            score=beam.score,
            error=error,
        )


def describe_error(error: Exception) -> str:
    """Return the class and the text of an error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _with_reason(output: SequenceOutput, reason: FinishReason) -> SequenceOutput:
    return output if output.finish_reason == "error" else replace(output, finish_reason=reason)
