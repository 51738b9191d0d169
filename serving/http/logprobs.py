"""Log probabilities in the two shapes OpenAI gives them."""

from collections.abc import Sequence
from typing import Any

from serving.detokenize import TextToken
from serving.tokenizer import Tokenizer


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[TextToken]) -> dict[str, Any]:
    """Four parallel lists, as of `/v1/completions`; text_offset counts characters from the start of the output."""
    scored = [token for token in tokens if token.logprobs is not None]
    return {
        "tokens": [tokenizer.token_text(token.token_id) for token in scored],
        "token_logprobs": [token.logprobs.logprob for token in scored],
        "top_logprobs": [
            {tokenizer.token_text(token_id): logprob for token_id, logprob in token.logprobs.top} for token in scored
        ],
        "text_offset": [token.start for token in scored],
    }


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TextToken]) -> dict[str, Any]:
    """One object per token, as of `/v1/chat/completions`."""
    return {
        "content": [
            _entry(tokenizer, token.token_id, token.logprobs.logprob)
            | {"top_logprobs": [_entry(tokenizer, *candidate) for candidate in token.logprobs.top]}
            for token in tokens
            if token.logprobs is not None
        ]
    }


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": logprob,
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
