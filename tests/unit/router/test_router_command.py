"""The command as a process of its own: it listens, serves, and stops on SIGTERM."""

import asyncio
import signal
import socket
import sys

import aiohttp
import pytest
import typer
from router_fakes import PATIENCE, Router, free_port, pair, run
from typer.testing import CliRunner

from kvxfer.router.command import register

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
        (["--prefill", "http://a:1", "--decode", "http://b:1", "--mode", "both"], "push"),
        (["--prefill", "http://a:1", "--decode", "http://b:1", "--request-timeout", "0"], "request_timeout"),
    ],
)
def test_wrong_options_are_told(options, words):
    result = command(options)
    assert result.exit_code == 2
    assert words in result.output


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
