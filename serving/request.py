"""A request from the engine's point of view: token ids in, token ids out.

Text lives one floor up (`detokenize`, `http`); pages and steps one floor down (`scheduler`).
"""

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

_ids = itertools.count()


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are those of the OpenAI API plus `aborted` and `error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a client may choose. Decoding is greedy, so there is no temperature.

    max_tokens: generated tokens at most, EOS included.
    stop: strings that end the text; matched on text, cut exactly where they begin.
    logprobs: None for none, else how many alternatives (0..20) to return with each token.
    grammar: a compiled constraint (`serving.grammar`), or None for free text.
    """

    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: object | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """log p of one emitted token and of the `top` most likely ones, best first (ties: lowest id first)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class Speculation:
    """What drafting bought; all zero at K=0."""

    verify_steps: int = 0
    fallback_steps: int = 0  # verify steps that had room for fewer than K drafts
    plain_steps: int = 0  # steps without drafts because that was faster (`serving/pace.py`); not among verify_steps
    proposed: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per verify step, the target's own token included."""
        return 1.0 + self.accepted / self.verify_steps if self.verify_steps else 0.0

    def record(self, proposed: int, accepted: int, width: int) -> None:
        """Adds one verify step that offered `proposed` of `width` drafts and kept `accepted`."""
        if len(self.accepted_per_position) < width:
            self.accepted_per_position += [0] * (width - len(self.accepted_per_position))
        self.verify_steps += 1
        self.fallback_steps += proposed < width
        self.proposed += proposed
        self.accepted += accepted
        for position in range(accepted):
            self.accepted_per_position[position] += 1


@dataclass(frozen=True, kw_only=True)
class EngineOutput:
    """News about one request: the tokens one step added, and whether it is over.

    draft_mask[i] is True where token i was proposed by the drafter and accepted.
    """

    token_ids: Sequence[int]
    draft_mask: Sequence[bool] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    speculation: Speculation | None = None
    error: str | None = None


def new_request_id(prefix: str = "req") -> str:
    """A process-wide unique id."""
    return f"{prefix}-{next(_ids)}"
