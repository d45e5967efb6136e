"""What one request cost: its tokens, and where its time went.

Runners stage, under the engine loop, which notes a time at each change of phase. Nothing is measured per token.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestStats:
    """What a request cost so far, or in all once it ended.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: how many of them the cache knew, so that they were not computed.
        tokens: tokens of the answer that were read.
        queued_s: seconds from its submission to the start of its prompt, the encoding of its images included.
        prompt_s: seconds from there to the first token of the answer.
        decode_s: seconds from there to the last token.
        done_tokens: how many tokens of the prompt are there, cached ones included: the progress of a long prompt.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    queued_s: float = 0.0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    done_tokens: int = 0


@dataclass(frozen=True)
class ActiveRequest:
    """A request that is being computed, without its texts.

    Attributes:
        number: the order of arrival.
        prompt_tokens: tokens of the prompt.
        cached_tokens: how many of them the cache knew.
        done_tokens: how many of them are computed or were known.
        tokens: tokens of the answer so far.
        limit: maximum number of tokens of the answer.
        drafts: whether it is decoded speculatively.
        paused: whether it made room for others.
    """

    number: int
    prompt_tokens: int
    cached_tokens: int
    done_tokens: int
    tokens: int
    limit: int
    drafts: bool
    paused: bool


@dataclass
class JobRecord:
    """What is noted of a job for its `RequestStats`: times in seconds of the loop's clock, None until then.

    Attributes:
        submitted: it was handed over. Written by the caller; the others by the loop.
        started: it got a sequence; its prompt is computed from here on.
        answered: its first token was there.
        ended: it ended, in whatever way.
        cached: how many tokens of the prompt the cache knew.
    """

    submitted: float | None = None
    started: float | None = None
    answered: float | None = None
    ended: float | None = None
    cached: int = 0

    def stats(self, prompt: int, tokens: int, last: float | None, now: float, done: int = 0) -> RequestStats:
        """The stats of a job.

        Args:
            prompt, tokens: lengths of the prompt, and of the answer as far as it was read.
            done: how many tokens of the prompt its sequence has.
            last: when its last token came.
            now: the time, for a phase that goes on.
        """
        if self.submitted is None:
            return RequestStats(prompt)
        end = now if self.ended is None else self.ended
        started = end if self.started is None else self.started
        answered = end if self.answered is None else self.answered
        decode = 0.0 if last is None else max(0.0, last - answered)
        done = done if self.answered is None else prompt
        return RequestStats(prompt, self.cached, tokens, started - self.submitted, answered - started, decode, done)
