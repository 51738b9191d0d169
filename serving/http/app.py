"""The app factory: one engine, one vocabulary, one set of limits; no globals."""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from serving.http import completions, errors, service
from serving.http.context import Server
from serving.http.middleware import AccessLog, ApiKeys, BodyLimit
from serving.http.settings import HttpSettings
from serving.metrics import Metrics
from serving.protocol import EngineClient
from serving.tokenizer import Tokenizer


def create_app(engine: EngineClient, tokenizer: Tokenizer, *, settings: HttpSettings | None = None) -> FastAPI:
    """An ASGI app that serves `engine`. `app.state.server` is its `Server`."""
    settings = settings or HttpSettings()
    server = Server(engine, tokenizer, settings, Metrics(engine, engine.model_name))
    app = FastAPI(title="dsv4", version=service.package_version(), redoc_url=None, docs_url=None)
    app.state.server = server
    app.include_router(service.router(server))
    app.include_router(completions.router(server))
    errors.install(app)
    # Added last runs first: a request is logged, then its origin, key and size are checked.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
    if settings.api_keys:
        app.add_middleware(ApiKeys, keys=settings.api_keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(AccessLog)
    return app
