"""``kvxfer router``."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from kvxfer.errors import ConfigError
from kvxfer.router.settings import Choice, Mode, RouterSettings, When

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
    prefill: Annotated[list[str] | None, typer.Option(help="A prefill engine's HTTP URL; repeat it for more.")] = None,
    decode: Annotated[list[str] | None, typer.Option(help="A decode engine's HTTP URL; repeat it for more.")] = None,
    engines_file: Annotated[
        str | None, typer.Option(help='A JSON file {"prefill": [URLs], "decode": [URLs]}; it is watched.')
    ] = None,
    prefill_dns: Annotated[str | None, typer.Option(help="A URL whose host is a name of all prefill engines.")] = None,
    decode_dns: Annotated[str | None, typer.Option(help="A URL whose host is a name of all decode engines.")] = None,
    dns_interval: Annotated[float, typer.Option(help="Seconds between two resolutions of those names.")] = 5.0,
    mode: Annotated[
        Mode, typer.Option(help="Who moves the KV: prefill writes (push) or decode reads (pull).")
    ] = Mode.PUSH,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    choice: Annotated[Choice, typer.Option(help="How engines are chosen.")] = Choice.LOAD,
    decode_when: Annotated[
        When, typer.Option(help="When decode is chosen: with prefill, after it, or what measures better. Pull: late.")
    ] = When.EARLY,
    skip_prefill_below: Annotated[
        int, typer.Option(help="Prompts of which decode lacks fewer tokens are not handed over; 0: all are.")
    ] = 0,
    decode_share: Annotated[
        float, typer.Option(help="Share of decode's cache that handoffs may hold that wait for their KV.")
    ] = 0.5,
    queue_limit: Annotated[int, typer.Option(help="Most single requests that wait for room on decode.")] = 1024,
    queue_timeout: Annotated[
        float | None, typer.Option(help="Longest time that they wait, in seconds; by default what fits the engines.")
    ] = None,
    retries: Annotated[int, typer.Option(help="Attempts with other engines while nothing was streamed.")] = 3,
    request_timeout: Annotated[float, typer.Option(help="Longest time for one leg of a request, in seconds.")] = 600.0,
    connect_timeout: Annotated[float, typer.Option(help="Longest time to connect to an engine, in seconds.")] = 5.0,
    check_interval: Annotated[float, typer.Option(help="Seconds between two checks of an engine.")] = 5.0,
    check_timeout: Annotated[float, typer.Option(help="Longest time for each request of a check, in seconds.")] = 10.0,
    max_body_size: Annotated[int, typer.Option(help="Largest request body, in bytes.")] = 32 * 1024 * 1024,
    max_singles: Annotated[int, typer.Option(help="Most prompts × n in one request.")] = 1024,
    concurrent_singles: Annotated[int, typer.Option(help="How many of those are in flight at one time.")] = 64,
    max_requests: Annotated[int, typer.Option(help="Most client requests at one time.")] = 8192,
    rate_limit: Annotated[float, typer.Option(help="Requests a second of one API key; 0: any number.")] = 0.0,
    rate_burst: Annotated[int, typer.Option(help="How many of them may come at once.")] = 32,
    conversations: Annotated[int, typer.Option(help="Most turns remembered in this process; 0: none.")] = 100_000,
    conversation_ttl: Annotated[float, typer.Option(help="Seconds for which a turn is remembered.")] = 480.0,
    redis: Annotated[
        str | None, typer.Option(envvar="KVXFER_REDIS", help="Where replicas remember together: redis://host:port/db.")
    ] = None,
    conversation_secret: Annotated[
        str | None, typer.Option(envvar="KVXFER_CONVERSATION_SECRET", help="Shared by replicas that share a Redis.")
    ] = None,
    trusted_key: Annotated[
        list[str] | None,
        typer.Option(envvar="KVXFER_TRUSTED_KEYS", help="API key whose kv_transfer_params reach engines; repeatable."),
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="KVXFER_ADMIN_KEY", help="Key of the admin API; without it there is none.")
    ] = None,
    stop_delay: Annotated[
        float, typer.Option(help="Seconds for which /health says that this router stops before it takes no more.")
    ] = 0.0,
    stop_timeout: Annotated[float, typer.Option(help="Seconds that requests in flight have at a stop.")] = 30.0,
    engine_ca: Annotated[
        str | None, typer.Option(help="File of certificate authorities for engines with https URLs.")
    ] = None,
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
            prefill=tuple(prefill or ()),
            decode=tuple(decode or ()),
            engines_file=engines_file,
            prefill_dns=prefill_dns,
            decode_dns=decode_dns,
            dns_interval=dns_interval,
            mode=mode,
            host=host,
            port=port,
            choice=choice,
            decode_when=decode_when,
            skip_prefill_below=skip_prefill_below,
            decode_share=decode_share,
            queue_limit=queue_limit,
            queue_timeout=queue_timeout,
            retries=retries,
            request_timeout=request_timeout,
            connect_timeout=connect_timeout,
            check_interval=check_interval,
            check_timeout=check_timeout,
            max_body_size=max_body_size,
            max_singles=max_singles,
            concurrent_singles=concurrent_singles,
            max_requests=max_requests,
            rate_limit=rate_limit,
            rate_burst=rate_burst,
            conversations=conversations,
            conversation_ttl=conversation_ttl,
            redis=redis,
            conversation_secret=conversation_secret,
            trusted_keys=tuple(trusted_key or ()),
            admin_key=admin_key,
            stop_delay=stop_delay,
            stop_timeout=stop_timeout,
            engine_ca=engine_ca,
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
    try:
        from kvxfer.router.parts import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"the router needs {error.name}: pip install 'kvxfer[router]'") from None

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with serve(settings) as port:
        _calm_collector()
        logging.getLogger(__name__).info(
            "the router listens on %s port %d, mode %s", settings.host, port, settings.mode.value
        )
        await stop.wait()


def _calm_collector() -> None:
    """Leave what lives as long as the process out of every collection, and collect seldom.

    With Python's defaults a collection comes with every few requests, and a full one looks at everything that was imported,
    which is a tenth of the processor time of short requests and a pause in all streams. Nearly nothing here is cyclic.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _run(main: Coroutine[None, None, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
