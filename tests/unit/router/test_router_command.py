"""The command as a process of its own: it listens, serves, and stops on SIGTERM."""

import asyncio
import signal
import socket
import sys
from dataclasses import fields

import aiohttp
import pytest
import typer
from router_fakes import PATIENCE, Router, free_port, pair, run
from typer.testing import CliRunner

from kvxfer.errors import ConfigError
from kvxfer.router.command import register
from kvxfer.router.settings import RouterSettings, flag

PAIR = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]
CODE = """
import sys, typer
from kvxfer.router.command import register
assert not {"aiohttp", "yarl", "uvloop"} & set(sys.modules), "the command line must not need the http extra"
app = typer.Typer()
register(app)
app.callback()(lambda: None)
app()
"""


def test_serve_and_stop():
    async def main():
        p, d = pair()
        await p.start()
        await d.start()
        port = free_port()
        options = ["--prefill", p.url, "--decode", d.url, "--port", str(port), "--check-interval", "0.05"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CODE, "router", *options, stderr=asyncio.subprocess.PIPE
        )
        try:
            async with aiohttp.ClientSession() as session:
                router = Router(port, session)
                for _ in range(1000):
                    try:
                        await router.health()
                        break
                    except aiohttp.ClientError:
                        await asyncio.sleep(0.02)
                await router.until(200, url=p.url, healthy=True)
                assert (await router.json(prompt="x"))[0] == 200
                assert (await router.events(prompt="x", n=2))[-1] == "[DONE]"
                d.tokens = [str(number) for number in range(500)]  # through uvloop, as it is in production
                events = await router.events(prompt="x")
                assert [one["choices"][0]["text"] for one in events[:-1]] == d.tokens
            process.send_signal(signal.SIGTERM)
            _, log = await asyncio.wait_for(process.communicate(), PATIENCE)
            assert process.returncode == 0, log.decode()
            assert b"Traceback" not in log, log.decode()
            assert b"the router listens on 127.0.0.1" in log
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            await p.stop()
            await d.stop()

    run(main())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prefill", "http://a:1"], "--decode"),
        (["--prefill", "http://a:1", "--decode", "b:1"], "write it like"),
        (["--prefill", "http://a:70000", "--decode", "http://b:1"], "write it like"),
        (["--prefill", "http://u:secret@a:1", "--decode", "http://b:1"], "KVXFER_ENGINE_API_KEY"),
        (["--prefill-dns", "a", "--decode", "http://b:1"], "write it like"),
        ([*PAIR, "--mode", "both"], "push"),
        ([*PAIR, "--request-timeout", "0"], "--request-timeout"),
        ([*PAIR, "--queue-timeout", "nan"], "--queue-timeout"),
        ([*PAIR, "--queue-timeout", "0"], "--queue-timeout"),
        ([*PAIR, "--request-timeout", "inf"], "--request-timeout"),
        ([*PAIR, "--rate-limit", "nan"], "--rate-limit"),
        ([*PAIR, "--stop-delay", "inf"], "--stop-delay"),
        ([*PAIR, "--decode-share", "nan"], "--decode-share"),
        ([*PAIR, "--decode-share", "1.5"], "--decode-share"),
        ([*PAIR, "--retries", "-1"], "--retries"),
        ([*PAIR, "--port", "70000"], "--port"),
        ([*PAIR, "--port", "-1"], "--port"),
        ([*PAIR, "--admin-key", ""], "KVXFER_ADMIN_KEY"),
        ([*PAIR, "--trusted-key", " "], "KVXFER_TRUSTED_KEYS"),
        ([*PAIR, "--redis", "redis://h/0"], "KVXFER_CONVERSATION_SECRET"),
        ([*PAIR, "--redis", "http://h:6379", "--conversation-secret", "s"], "redis://10.0.0.9"),
    ],
)
def test_wrong_options_are_told(options, words):
    result = command(options)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())
    assert "secret@" not in result.output


@pytest.mark.parametrize("field", [one.name for one in fields(RouterSettings) if "float" in str(one.type)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_no_number_is_taken_that_means_nothing(field, value):
    with pytest.raises(ConfigError, match=flag(field)):
        RouterSettings(("http://a:1",), ("http://b:1",), **{field: value})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--engine-ca", "/no/such/file"], "--engine-ca /no/such/file cannot be used"),
        (["--redis", "redis://h:port/0", "--conversation-secret", "s"], "--redis is no URL of a Redis server"),
    ],
)
def test_what_shows_itself_at_the_start_is_told_in_one_line(options, words):
    result = command([*PAIR, "--port", "0", *options])
    assert result.exit_code == 1
    assert result.output.startswith(words), result.output
    assert isinstance(result.exception, SystemExit)


def test_a_taken_port_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = command(["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2", "--port", str(port)])
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in result.output


def command(options):
    app = typer.Typer()
    register(app)
    app.callback()(lambda: None)
    return CliRunner().invoke(app, ["router", *options])
