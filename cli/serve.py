"""`dsv4 serve`: the OpenAI-compatible server."""

import logging
from pathlib import Path
from typing import Annotated

import typer
from fastapi import FastAPI

from cli.console import log_to_stderr, stage_progress
from cli.options import takes_engine_args
from cli.permanent import permanent
from dsv4.errors import ConfigError, PlatformError
from serving.args import EngineArgs
from serving.build import Built, build_engine
from serving.grammar import Compiler
from serving.http.address import hold
from serving.http.app import create_app
from serving.http.protocol_texts import ProtocolTexts
from serving.http.run import serve as run_server
from serving.http.settings import GenerationDefaults, HttpSettings


def _app(built: Built, settings: HttpSettings) -> FastAPI:
    """The app with what the checkpoint and the installed extras allow."""
    try:
        grammars = Compiler(built.tokenizer, built.cfg.vocab_size, built.cfg.eos_token_id)
    except PlatformError as missing:
        logging.getLogger("dsv4").info("%s; requests for it are refused until then", missing)
        grammars = None
    texts = ProtocolTexts.load(built.settings.args.model)
    return create_app(built.engine, built.tokenizer, settings=settings, texts=texts, grammars=grammars)


@takes_engine_args()
def serve(
    args: EngineArgs,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel="HTTP")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.", rich_help_panel="HTTP")] = 8000,
    generate_config: Annotated[
        str | None, typer.Option(help="JSON: server defaults of request fields.", rich_help_panel="HTTP")
    ] = None,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds after which a request is aborted.", rich_help_panel="HTTP")
    ] = 3600.0,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body.", rich_help_panel="HTTP")] = 16 * 2**20,
    thinking: Annotated[
        bool, typer.Option(help="Whether chat thinks when a request does not say.", rich_help_panel="HTTP")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Serve POST /start_profile and /stop_profile.", rich_help_panel="HTTP")
    ] = False,
    profile_output: Annotated[
        Path | None, typer.Option(help="Folder of the traces; default ./profile_out.", rich_help_panel="HTTP")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Keys that clients must send; repeatable.", rich_help_panel="HTTP")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Browser origins to allow; repeatable.", rich_help_panel="HTTP")
    ] = None,
) -> None:
    """Serves a model over HTTP."""
    log_to_stderr()
    if profile_output is not None and not profile:
        raise ConfigError("--profile-output needs --profile")
    settings = HttpSettings(
        defaults=GenerationDefaults.from_json(generate_config) if generate_config else GenerationDefaults(),
        api_keys=tuple(api_key or ()),
        cors_origins=tuple(cors_origin or ()),
        request_timeout_s=request_timeout,
        max_body_bytes=max_body_bytes,
        thinking=thinking,
        profile_output=(profile_output or Path("profile_out")) if profile else None,
    )
    with hold(host, port) as sockets:
        with permanent():
            with stage_progress("start") as progress:
                built = build_engine(args, progress)
            application = _app(built, settings)
        listening = f"http://{host}:{sockets[0].getsockname()[1]}/v1"
        for what, value in [*built.banner(), ("listening", listening)]:
            typer.echo(f"{what:>13}  {value}", err=True)
        try:
            run_server(application, sockets)
        finally:
            built.engine.close()
