"""The app factory: one engine, one vocabulary, one set of limits; no globals."""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from serving.http import chat_completions, completions, errors, page, service
from serving.http.context import Server
from serving.http.farewell import Farewell
from serving.http.middleware import AccessLog, ApiKeys, BodyLimit, ConnectionLimit
from serving.http.protocol_texts import ProtocolTexts
from serving.http.settings import HttpSettings
from serving.metrics import Metrics
from serving.protocol import EngineClient, GrammarCompiler
from serving.tokenizer import Tokenizer

_PATIENCE = 8  # times the allowed size of a body that is read, and thrown away, of one that was refused


def create_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    *,
    settings: HttpSettings | None = None,
    texts: ProtocolTexts | None = None,
    grammars: GrammarCompiler | None = None,
) -> FastAPI:
    """An ASGI app that serves `engine`; `app.state.server` is its `Server`.

    texts: the checkpoint's protocol texts; without them tools are refused.
    grammars: only for an engine that honours `SamplingParams.grammar`; without it constrained output is refused.
    """
    settings = settings or HttpSettings()
    metrics = Metrics(engine, engine.model_name)
    server = Server(engine, tokenizer, settings, metrics, texts or ProtocolTexts(), grammars)
    app = FastAPI(title="dsv4", version=service.package_version(), redoc_url=None, docs_url=None)
    app.state.server = server
    app.include_router(service.router(server))
    app.include_router(completions.router(server))
    app.include_router(chat_completions.router(server))
    app.include_router(page.router())
    errors.install(app)
    # Added last runs first: a request is logged, then its origin, key and size are checked.
    size, seconds = settings.max_body_bytes, settings.body_timeout_s
    farewell = Farewell(max_bytes=_PATIENCE * size, timeout_s=seconds)
    app.add_middleware(BodyLimit, max_bytes=size, timeout_s=seconds, farewell=farewell)
    if settings.api_keys:
        app.add_middleware(ApiKeys, keys=settings.api_keys, farewell=farewell)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(
        ConnectionLimit, most=settings.max_connections, connections=lambda: server.connections(), farewell=farewell
    )
    app.add_middleware(AccessLog)
    return app
