"""``kvxfer router``."""

from __future__ import annotations

import asyncio
import logging
import signal
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from kvxfer.errors import ConfigError
from kvxfer.router.settings import Mode, RouterSettings

if TYPE_CHECKING:
    from collections.abc import Coroutine


class LogLevel(str, Enum):
    """How much the router logs."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def router(
    *,
    prefill: Annotated[list[str], typer.Option(help="A prefill engine's HTTP URL; repeat it for more.")],
    decode: Annotated[list[str], typer.Option(help="A decode engine's HTTP URL; repeat it for more.")],
    mode: Annotated[
        Mode, typer.Option(help="Who moves the KV: prefill writes (push) or decode reads (pull).")
    ] = Mode.PUSH,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    request_timeout: Annotated[float, typer.Option(help="Longest time for one leg of a request, in seconds.")] = 600.0,
    connect_timeout: Annotated[float, typer.Option(help="Longest time to connect to an engine, in seconds.")] = 5.0,
    check_interval: Annotated[float, typer.Option(help="Seconds between two checks of an engine.")] = 5.0,
    check_timeout: Annotated[float, typer.Option(help="Longest time for each request of a check, in seconds.")] = 10.0,
    max_body_size: Annotated[int, typer.Option(help="Largest request body, in bytes.")] = 32 * 1024 * 1024,
    max_singles: Annotated[int, typer.Option(help="Most prompts × n in one request.")] = 1024,
    concurrent_singles: Annotated[int, typer.Option(help="How many of those are in flight at one time.")] = 64,
    engine_api_key: Annotated[
        str | None,
        typer.Option(
            envvar="KVXFER_ENGINE_API_KEY", help="Key for the router's own checks of engines started with --api-key."
        ),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="How much to log.")] = LogLevel.INFO,
) -> None:
    """Serve OpenAI's API in front of separate prefill and decode engines."""
    try:
        settings = RouterSettings(
            prefill=tuple(prefill),
            decode=tuple(decode),
            mode=mode,
            host=host,
            port=port,
            request_timeout=request_timeout,
            connect_timeout=connect_timeout,
            check_interval=check_interval,
            check_timeout=check_timeout,
            max_body_size=max_body_size,
            max_singles=max_singles,
            concurrent_singles=concurrent_singles,
            engine_api_key=engine_api_key,
        )
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    logging.basicConfig(level=log_level.value.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        _run(_serve(settings))
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def register(app: typer.Typer) -> None:
    """Add ``router`` to the ``kvxfer`` command. Importing this module imports no HTTP library."""
    app.command("router")(router)


async def _serve(settings: RouterSettings) -> None:
    from kvxfer.router.app import serve

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with serve(settings) as port:
        logging.getLogger(__name__).info(
            "the router listens on %s port %d, mode %s", settings.host, port, settings.mode.value
        )
        await stop.wait()


def _run(main: Coroutine[None, None, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
