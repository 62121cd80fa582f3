"""The ``kvxfer`` command: each subcommand lives beside the code that it runs, and is imported only when it is called."""

from __future__ import annotations

import io
import sys

import typer

app = typer.Typer(
    name="kvxfer",
    help="KV cache transfer between vLLM prefill and decode engines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _register_commands() -> None:
    from kvxfer.bench import command as bench
    from kvxfer.chaos import command as chaos
    from kvxfer.doctor import command as doctor
    from kvxfer.rails import command as rails
    from kvxfer.router import command as router
    from kvxfer.transport import command as transport

    router.register(app)
    transport.register(app)
    bench.register(app)
    chaos.register(app)
    rails.register(app)
    doctor.register(app)


@app.callback()
def _root() -> None:
    """KV cache transfer between vLLM prefill and decode engines."""


def main() -> None:
    """Run the command line. What the terminal's encoding lacks is written as an escape: it must not end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    _register_commands()
    app()


if __name__ == "__main__":
    main()
