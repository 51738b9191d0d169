"""`dsv4 generate`: prompts in, text out, through the same engine as the server."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from cli.console import stage_progress
from cli.options import takes_engine_args
from dsv4.errors import ConfigError
from serving.args import EngineArgs
from serving.build import Built, build_engine
from serving.generation import Generation
from serving.request import SamplingParams, Speculation


def speculation_record(s: Speculation) -> dict[str, Any]:
    """The `speculation` object of --json."""
    return {
        "verify_steps": s.verify_steps,
        "fallback_steps": s.fallback_steps,
        "plain_steps": s.plain_steps,
        "proposed": s.proposed,
        "accepted": s.accepted,
        "mean_accepted_length": round(s.mean_accepted_length, 4),
        "accepted_per_position": s.accepted_per_position,
    }


def _check_texts(flag: str, texts: Sequence[str]) -> None:
    """Raises ConfigError for an argument whose bytes were not UTF-8: Python hands those over as lone surrogates."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{flag}: not UTF-8 at character {error.start}") from None


async def _one(built: Built, index: int, prompt: str, params: SamplingParams) -> dict[str, Any]:
    # An empty prompt becomes one BOS, as in the original.
    ids = built.tokenizer.encode(prompt) or [built.cfg.bos_token_id]
    tokens: list[int] = []
    text = ""
    with Generation(built.engine, built.tokenizer, f"prompt-{index}", ids, params) as generation:
        async for delta in generation:
            tokens += [token.token_id for token in delta.tokens]
            text += delta.text
        usage = generation.usage
        return {
            "prompt": prompt,
            "text": text,
            "token_ids": tokens,
            "finish_reason": str(generation.finish_reason),
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            },
            "speculation": speculation_record(generation.speculation),
        }


async def _all(built: Built, prompts: list[str], params: SamplingParams) -> list[dict[str, Any]]:
    return await asyncio.gather(*(_one(built, i, prompt, params) for i, prompt in enumerate(prompts)))


@takes_engine_args()
def generate(
    args: EngineArgs,
    prompt: Annotated[list[str], typer.Option("--prompt", help="A prompt; repeat for several.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 256,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="A string that ends the text; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Run to --max-tokens.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt.")] = False,
) -> None:
    """Generates from one or more prompts, offline."""
    _check_texts("--prompt", prompt)
    _check_texts("--stop", stop or ())
    if stop and not all(stop):
        raise ConfigError("--stop: a stop string must not be empty; leave the flag out for none")
    params = SamplingParams(max_tokens=max_tokens, stop=tuple(stop or ()), ignore_eos=ignore_eos)
    with stage_progress("start") as progress:
        built = build_engine(args, progress)
    try:
        began = time.monotonic()
        results = asyncio.run(_all(built, prompt, params))
        seconds = time.monotonic() - began
    finally:
        built.engine.close()
    for result in results:
        typer.echo(json.dumps(result, ensure_ascii=False) if as_json else result["prompt"] + result["text"])
    made = sum(len(result["token_ids"]) for result in results)
    typer.echo(f"{made} tokens in {seconds:.2f} s ({made / seconds:.1f} tokens/s), K={built.settings.k}", err=True)
