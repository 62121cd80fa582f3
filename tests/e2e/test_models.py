"""Models and engines beyond the matrix's, each over a real pair: tokens of an engine alone, and every rank's records.

Latent attention (a replica on each rank), an fp8 cache, prefill in pipeline stages, the KV of a draft model, data-parallel engines;
and what is refused at start, with the reason and what to set. Each costs a minute or two, so all are slow.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import operator
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvxfer.bench import engines, model
from kvxfer.bench.client import Client
from kvxfer.bench.latent import LatentRecipe
from kvxfer.bench.model import Recipe
from kvxfer.bench.process import ServerError, running
from kvxfer.bench.verdict import MIN_DISTINCT
from kvxfer.transport.query import fetch_records
from tests.e2e.conftest import PYTHON, Pair, prompt
from tests.e2e.recording import record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvxfer.transport.records import HandoffRecord

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

PATIENCE = {"leg_timeout": 120.0, "peer_timeout": 60.0, "connect_timeout": 60.0}
ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "tests" / "support" / "plugins"
PROMPTS = (1, 2, 33, 128, 129, 700, 1500)
VERY_SHORT = 2
LATENT = ("--block-size", "16")
FP8 = ("--kv-cache-dtype", "fp8")
STAGES = ("--pipeline-parallel-size", "2")
DATA = ("--data-parallel-size", "2")


@dataclass(frozen=True)
class Kind:
    """A pair: arguments and sizes of prefill and of decode. ``cores``: data-parallel engines of each."""

    mode: engines.Mode
    recipe: Recipe = dataclasses.field(default_factory=Recipe)
    args: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    ranks: tuple[int, int] = (1, 1)
    stages: int = 1
    cores: tuple[int, int] = (1, 1)
    blocks: tuple[int, int] = (32, 32)
    draft: bool = False
    newer: bool = False

    @property
    def cache(self) -> str:
        """What kind of cache its engines have, as recordings name it."""
        if self.latent:
            return "latent"
        return "draft" if self.draft else "fp8" if FP8 in self.args else "gqa"

    @property
    def latent(self) -> bool:
        """Whether it keeps a latent a token."""
        return isinstance(self.recipe, LatentRecipe)


KINDS = {
    "latent-push": Kind("push", LatentRecipe(), (LATENT, LATENT)),
    "latent-pull-0.32": Kind("pull", LatentRecipe(), (LATENT, LATENT), newer=True),
    "latent-push-1-2": Kind("push", LatentRecipe(), (LATENT, LATENT), ranks=(1, 2)),
    "latent-pull-2-1": Kind("pull", LatentRecipe(), (LATENT, LATENT), ranks=(2, 1)),
    "fp8-push": Kind("push", args=(FP8, FP8)),
    "fp8-pull-128-32": Kind("pull", args=(FP8, FP8), blocks=(128, 32)),
    "fp8-push-0.32": Kind("push", args=(FP8, FP8), newer=True),
    "stages-push": Kind("push", args=(STAGES, ()), stages=2),
    "stages-pull": Kind("pull", args=(STAGES, ()), stages=2),
    "stages-push-0.32": Kind("push", args=(STAGES, ()), stages=2, newer=True),
    "draft-push": Kind("push", draft=True),
    "draft-pull-0.32": Kind("pull", draft=True, newer=True),
    "data-push-2-1": Kind("push", args=(DATA, ()), cores=(2, 1)),
    "data-pull-2-1": Kind("pull", args=(DATA, ()), cores=(2, 1)),
    "data-push-1-2": Kind("push", args=((), DATA), cores=(1, 2)),
    "data-pull-1-2-0.32": Kind("pull", args=((), DATA), cores=(1, 2), newer=True),
}


@dataclass
class Started:
    kind: Kind
    pair: Pair
    digests: Path

    def records(self, side: int) -> list[HandoffRecord]:
        """Of all data-parallel engines of a side: each listens at the port behind the last one's."""
        engine = (self.pair.prefill, self.pair.decode)[side]
        return [
            record
            for core in range(self.kind.cores[side])
            for record in fetch_records(engine.control_host, engine.control_port + core).records
        ]


def python(kind: Kind) -> str:
    found = os.environ.get("KVXFER_VLLM032_PYTHON") if kind.newer else PYTHON
    if found is None:
        pytest.skip("KVXFER_VLLM032_PYTHON is not set: scripts/test.sh --vllm032 sets it")
    return found


def specs(kind: Kind) -> tuple[engines.EngineSpec, engines.EngineSpec]:
    directory = model.build(kind.recipe)
    several = max(*kind.ranks, kind.stages, *kind.cores) > 1
    drafts = json.dumps({"method": "draft_model", "model": str(directory), "num_speculative_tokens": 3})
    path = os.pathsep.join(filter(None, [str(PLUGINS), os.environ.get("PYTHONPATH")]))
    on_stages = {"PYTHONPATH": path, "STAGES_ON_CPU": "1"}
    found = []
    for side, spec in enumerate(
        engines.pair_specs(
            kind.mode,
            directory,
            python=python(kind),
            max_model_len=4096,
            max_num_batched_tokens=4096 if "--block-size" in kind.args[0] else 512,  # CPU_MLA takes a prompt whole
            threads=1 if several else None,
            ready_seconds=600.0,
            connector_config=PATIENCE,
        )
    ):
        args = kind.args[side] + (("--speculative-config", drafts) if kind.draft else ())
        size = kind.blocks[side]
        tokens = 16 if "--block-size" in args else size
        found.append(
            dataclasses.replace(
                spec,
                args=args,
                tensor_parallel=kind.ranks[side],
                block_size=size,
                num_blocks=16384 // tokens,
                environment=spec.environment | on_stages if STAGES in kind.args else spec.environment,
            )
        )
    return found[0], found[1]


async def accepted(url: str) -> tuple[float, float]:
    """Draft tokens that an engine has taken, of those that it was offered."""
    async with Client(url) as client:
        text = await client.metrics()
    names = ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total")
    taken, offered = (sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE))) for name in names)
    return taken, offered


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, id=name, marks=[pytest.mark.vllm032] * kind.newer) for name, kind in KINDS.items()],
)
def started(request, run, tmp_path_factory) -> Iterator[Started]:
    kind = request.param
    logs = tmp_path_factory.mktemp("models")
    both = specs(kind)
    if kind.latent:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        here = {"PYTHONPATH": path, "KV_DIGESTS": str(logs / "digests")}
        both = tuple(
            dataclasses.replace(spec, connector_module="tests.support.kv_digests", environment=here) for spec in both
        )
    first, second, router = engines.make_pair(kind.mode, *both, logs)
    with running(first.server, second.server, router):
        yield Started(kind, Pair(kind.mode, first, second, router), logs / "digests")
        if kind.cores == (1, 1):
            version = "0.32.0" if kind.newer else "0.29.0"
            record(run, first, version, kind.cache, ranks=kind.ranks[0], stages=kind.stages)
            record(run, second, version, kind.cache, ranks=kind.ranks[1])


def test_prompts_of_many_lengths(started: Started) -> None:
    """The reference is decode's engine, asked directly before anything is handed to it: of the same ranks, cache and drafts.

    A latent's tokens tell nothing: vLLM's CPU_MLA computes a prompt by one kernel and a token behind what is cached by another,
    which disagree on 0.29 and 0.32 by tenths of a logit. Alone, an engine does not go on with its own answer as it began it. What
    decode was handed is compared itself, below.
    """

    async def go() -> None:
        pair, kind = started.pair, started.kind
        async with Client(pair.decode.url, timeout=600) as client:
            expected = [(await client.complete(prompt(n, 40 + n), 12, stream=False)).token_ids for n in PROMPTS]
        assert len(set(expected)) == len(PROMPTS)
        for length, answer in zip(
            PROMPTS, expected, strict=True
        ):  # after a token or two a model may well repeat itself
            assert len(set(answer)) >= MIN_DISTINCT or length <= VERY_SHORT, (length, answer)
        alone = await accepted(pair.decode.url)
        async with Client(pair.router.url, timeout=600) as client:
            for length, answer in zip(PROMPTS, expected, strict=True):
                found = (await client.complete(prompt(length, 40 + length), 12)).token_ids
                assert found == answer or (kind.latent and len(found) == 12), length
            both = await accepted(pair.decode.url)
            answers = await asyncio.gather(*(client.complete(prompt(n, 40 + n), 12) for n in PROMPTS))
        assert kind.latent or [answer.token_ids for answer in answers] == expected
        if kind.draft:
            # The draft model is the model itself, so that whatever it lacks of its own KV costs tokens that are taken. 0.32 wastes
            # the first proposal after a step that computes one token behind what is cached, as it does alone after a prefix hit.
            wasted = 3 * sum(n > 1 for n in PROMPTS) if kind.newer else 0
            for (taken, offered), waste in ((alone, 0), (tuple(map(operator.sub, both, alone)), wasted)):
                assert taken > 0.9 * (offered - waste) > 0, (alone, both)

    asyncio.run(go())
    kind, sides = started.kind, [started.records(side) for side in (0, 1)]
    handoffs = {one.handoff for one in sides[1]}
    assert len(handoffs) == 2 * sum(n > 1 for n in PROMPTS)
    for records, ranks in zip(sides, (kind.ranks[0] * kind.stages, kind.ranks[1]), strict=True):
        taken = [one for one in records if one.handoff in handoffs]
        assert {one.rank for one in taken} == set(range(ranks))
        # Of a latent's replicas decode takes no more than it has ranks.
        spared = {"served"} if kind.latent and ranks > kind.ranks[1] else set()
        assert {one.outcome for one in taken} == {"done"} | spared, {one.reason for one in taken}
        assert "failed" not in {one.outcome for one in records}


def test_a_latent_is_on_every_rank_of_decode_what_prefill_computed(started: Started) -> None:
    if not started.kind.latent:
        pytest.skip("tokens tell whether its KV is right")
    sides = [started.records(side) for side in (0, 1)]
    both = {one.handoff for one in sides[0]} & {one.handoff for one in sides[1]}
    assert len(both) == 2 * sum(n > 1 for n in PROMPTS)
    different: dict[int, set[str]] = {}
    for handoff in both:
        told = [json.loads(path.read_text()) for side, records in zip(("source", "sink"), sides, strict=True)
                for request_id in {one.request_id for one in records if one.handoff == handoff}
                for path in started.digests.glob(f"{side}-{request_id}-*.json")]  # fmt: skip
        assert len(told) == sum(started.kind.ranks), handoff
        assert all(one == told[0] for one in told), handoff
        assert len(set(told[0].values())) == started.kind.recipe.layers
        tokens = next(one.tokens for one in sides[1] if one.handoff == handoff)
        different.setdefault(tokens, set()).update(told[0].values())
    assert len(different) == sum(n > 1 for n in PROMPTS)
    assert len(set.union(*different.values())) == sum(map(len, different.values())), "another prompt has other KV"


def test_all_that_is_cached_of_a_prompt_is_moved(started: Started) -> None:
    """Every layer's, the draft's too; of a latent each rank of decode takes a replica."""
    kind = started.kind
    records = started.records(0 if kind.mode == "push" else 1)
    block = 16 if "--block-size" in kind.args[0] else max(kind.blocks)
    item = 1 if FP8 in kind.args else 4
    layers = 2 if kind.draft else 1
    replicas = kind.ranks[1] if kind.latent else 1
    expected = sum(-(-(n - 1) // block) * block for n in PROMPTS) * 2 * kind.recipe.kv_bytes_per_token(item)
    assert sum(record.bytes for record in records) == expected * layers * replicas


# --- refused at start -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConvolutionRecipe(Recipe):
    """LFM2's shape, of whose layers one attends and the others keep a state: to vLLM a Mamba hybrid. Its weights are not needed."""

    name: str = "shape-lfm2-of-four"

    def config(self) -> dict[str, object]:
        kinds = ["conv", "full_attention", "conv", "conv"]
        changes = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "layer_types": kinds, "norm_eps": 1e-6}
        changes |= {"conv_L_cache": 4, "conv_bias": False, "conv_dim": self.hidden, "block_dim": self.hidden}
        changes |= {"block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False}
        return super().config() | changes


REFUSALS = {
    "a hybrid with states": (
        ConvolutionRecipe(),
        ("--load-format", "dummy", "--dtype", "bfloat16"),  # its kernels on the CPU know no other
        r"with MambaSpec.*serve such a model without",
    ),
    "shared positions": (LatentRecipe(), (*LATENT, "-tp", "2", "-dcp", "2"), r"set --decode-context-parallel-size 1"),
    "decode in stages": (Recipe(), STAGES, r"in 2 pipeline stages.*set --pipeline-parallel-size 1"),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_what_cannot_be_moved_is_refused_at_start_with_what_to_set(why: str, tmp_path) -> None:
    recipe, args, expected = REFUSALS[why]
    directory = model.build(recipe, weights="dummy" not in args)
    _, spec = engines.pair_specs("push", directory, python=PYTHON, max_model_len=4096, threads=1)
    engine = engines.make_engine(dataclasses.replace(spec, args=args, num_blocks=512), tmp_path)
    with pytest.raises(ServerError, match="ended with status"):
        try:
            engine.server.start()
            engine.server.wait_ready()
        finally:
            engine.server.stop()
    log = engine.server.log.read_text()
    assert re.search(expected, log, re.DOTALL), log[-3000:]
