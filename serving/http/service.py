"""The small routes: models, health, version, metrics, tokenize, detokenize."""

import asyncio
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from dsv4.errors import EngineError, RequestError
from serving.http.chat_completions import chat_ids
from serving.http.chat_schema import TokenizeBody
from serving.http.context import Server
from serving.http.lifetime import JsonResponse
from serving.http.schema import DetokenizeBody


def package_version() -> str:
    try:
        return version("dsv4")
    except PackageNotFoundError:
        return "unknown"


def router(server: Server) -> APIRouter:
    """The routes over one server."""
    routes = APIRouter()
    engine = server.engine

    @routes.get("/health")
    async def health() -> Response:
        """200 while the engine steps and takes requests; 503 with the reason otherwise."""
        if server.draining:
            return JsonResponse({"status": "draining"}, 503)
        try:
            async with asyncio.timeout(server.settings.health_timeout_s):
                await engine.check_health()
        except EngineError as error:
            return JsonResponse({"status": "error", "message": str(error)}, 503)
        except TimeoutError:
            message = f"the engine did not answer within {server.settings.health_timeout_s:g} s"
            return JsonResponse({"status": "error", "message": message}, 503)
        return JsonResponse({"status": "ok"})

    @routes.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [_model(server)]})

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        server.check_model(name)
        return JsonResponse(_model(server))

    @routes.get("/version")
    async def show_version() -> Response:
        return JsonResponse({"version": package_version()})

    if server.settings.profile_output is not None:

        @routes.post("/start_profile")
        async def start_profile() -> Response:
            """Begins a trace of the engine's steps."""
            await asyncio.to_thread(engine.start_profile, server.settings.profile_output)
            return JsonResponse({"status": "profiling"})

        @routes.post("/stop_profile")
        async def stop_profile() -> Response:
            """Ends it and says where the trace is."""
            return JsonResponse({"trace": str(await asyncio.to_thread(engine.stop_profile))})

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @routes.get("/metrics/json")
    async def metrics_json() -> Response:
        return JsonResponse(_stats(server))

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        server.check_model(body.model)
        if body.add_special_tokens:
            raise RequestError("add_special_tokens: a raw prompt gets none", param="add_special_tokens")
        ids = await (chat_ids(server, body) if body.prompt is None else server.encode(body.prompt))
        answer = {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids}
        if body.return_token_strs:
            answer["token_strs"] = [server.tokenizer.token_text(i) for i in ids]
        return JsonResponse(answer)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        server.check_model(body.model)
        for token_id in body.tokens:
            if not 0 <= token_id < engine.vocab_size:
                raise RequestError(
                    f"tokens: {token_id} is outside the vocabulary of {engine.vocab_size}",
                    param="tokens",
                    code="invalid_token_id",
                )
        raw = b"".join(map(server.tokenizer.token_bytes, body.tokens))
        return JsonResponse({"prompt": raw.decode(errors="replace")})

    return routes


def _model(server: Server) -> dict[str, Any]:
    return {
        "id": server.engine.model_name,
        "object": "model",
        "created": server.started,
        "owned_by": "dsv4",
        "max_model_len": server.engine.max_model_len,
    }


def _stats(server: Server) -> dict[str, Any]:
    stats = server.engine.stats()
    speculation = stats.speculation
    return {
        "schema_version": 1,
        "model_name": server.engine.model_name,
        "gauges": {
            "num_requests_running": stats.running,
            "num_requests_waiting": stats.waiting,
            "kv_cache_usage_perc": stats.kv_cache_usage,
        },
        "counters": {
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "prefix_cache_queries": stats.prefix_queries,
            "prefix_cache_hits": stats.prefix_hits,
            "num_preemptions": stats.preemptions,
        },
        "speculation": {
            "num_speculative_tokens": server.engine.num_speculative_tokens,
            "verify_steps": speculation.verify_steps,
            "fallback_steps": speculation.fallback_steps,
            "plain_steps": speculation.plain_steps,
            "proposed": speculation.proposed,
            "accepted": speculation.accepted,
            "accepted_per_position": list(speculation.accepted_per_position),
            "mean_accepted_length": speculation.mean_accepted_length,
        },
    }
