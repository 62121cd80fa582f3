import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvxfer.bench import corpus
from kvxfer.bench.model import SPECIAL_TOKENS, Recipe, build, default_cache, prompt_tokens
from kvxfer.errors import ConfigError

pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.numpy")

TINY = Recipe(
    name="tiny", vocab=320, hidden=32, intermediate=48, q_heads=4, kv_heads=2, head_dim=16,
    sharpness=(2.0, 5.0), attention_gain=(10.0, 6.0),
)  # fmt: skip

BUILD = """
import sys
from pathlib import Path
from kvxfer.bench.model import build
from test_bench_model import TINY
print(build(TINY, Path(sys.argv[1])))
"""


def hashes(directory):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def start_build(cache, hash_seed):
    environment = dict(os.environ, PYTHONHASHSEED=str(hash_seed), PYTHONPATH=str(Path(__file__).parent))
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(cache)], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_same_recipe_gives_the_same_bytes_in_every_process(tmp_path):
    here = build(TINY, tmp_path / "here")
    builds = [start_build(tmp_path / f"other{seed}", seed) for seed in (1, 2)]
    there = [Path(one.communicate()[0].strip()) for one in builds]
    assert hashes(here) == hashes(there[0]) == hashes(there[1])
    assert {here.name} == {one.name for one in there}


def test_builds_at_the_same_time_agree_and_leave_nothing_half_made(tmp_path):
    builds = [start_build(tmp_path, seed) for seed in range(3)]
    assert len({one.communicate()[0] for one in builds}) == 1
    assert [one.returncode for one in builds] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == [f"tiny-{TINY.digest}"]


def test_second_build_touches_nothing(tmp_path):
    model = build(TINY, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in [model, *model.iterdir()]}
    assert build(TINY, tmp_path) == model
    assert {path: path.stat().st_mtime_ns for path in [model, *model.iterdir()]} == before


def test_failed_build_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError, match="lengthen the corpus"):
        build(replace(TINY, vocab=100_000), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2}, {"vocab": 321}, {"hidden": 64}, {"kv_heads": 4}, {"mlp_gain": 2.0}, {"embedding_scale": 0.2},
        {"sharpness": (2.0, 6.0)}, {"max_positions": 100}, {"attention_gain": (10.0, 7.0)}, {"head_dim": 32},
    ],
)  # fmt: skip
def test_every_part_of_the_recipe_is_in_the_name(change):
    assert replace(TINY, **change).digest != TINY.digest


def test_contradicting_recipes_are_refused():
    with pytest.raises(ConfigError, match="one value of each per layer"):
        Recipe(sharpness=(1.0,))
    with pytest.raises(ConfigError, match="multiple of 3"):
        Recipe(kv_heads=3)


def test_weights_have_the_shapes_that_the_config_says_and_the_scales_of_the_recipe(tmp_path):
    model = build(TINY, tmp_path)
    config = json.loads((model / "config.json").read_text())
    weights = safetensors.load_file(model / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {np.dtype(np.float32)}
    assert len(weights) == 3 + 11 * config["num_hidden_layers"]
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    hidden = config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        attention = f"model.layers.{layer}.self_attn."
        assert weights[attention + "q_proj.weight"].shape == (heads * dim, hidden)
        assert weights[attention + "v_proj.weight"].shape == (kv_heads * dim, hidden)
        assert weights[attention + "q_norm.weight"] == pytest.approx(TINY.sharpness[layer] ** 0.5)
        gain = weights[attention + "o_proj.weight"].std() * (heads * dim) ** 0.5
        assert gain == pytest.approx(TINY.attention_gain[layer], rel=0.1)
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    assert embedding.mean(axis=0) == pytest.approx(0.0, abs=1e-6)
    assert embedding.std() == pytest.approx(TINY.embedding_scale, rel=0.05)
    assert not head[: len(SPECIAL_TOKENS)].any()
    assert (head[len(SPECIAL_TOKENS) :].std(axis=1) > 0).all()


def test_the_default_model_is_long_enough_and_its_kv_has_the_known_size():
    recipe = Recipe()
    assert recipe.max_positions >= 8192
    assert recipe.kv_bytes_per_token() == 2 * 4 * 4 * 64 * 4


def test_the_default_model_is_the_one_whose_figures_are_written_down():
    # A new digest means new files: measure again with `kvxfer bench model`, and change the docstring of model.py.
    assert Recipe().digest == "3dffc71793cc"


@pytest.mark.parametrize(
    "text", [corpus.TEXT, "", " a  b\n\n\tc ", "Zürich, 漢字, Ελλάδα 🎉", "\x00\x7f\r\n", "<|im_start|>user"]
)
def test_the_tokenizer_gives_every_text_back(tmp_path, text):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(build(TINY, tmp_path) / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert max(ids, default=0) < TINY.vocab


def test_special_tokens_come_first_and_every_id_has_a_text(tmp_path):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(build(TINY, tmp_path) / "tokenizer.json"))
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert sorted(tokenizer.get_vocab().values()) == list(range(TINY.vocab))


def test_prompts_are_the_same_everywhere():
    assert prompt_tokens(4, 0) == [119, 858, 449, 824]
    assert prompt_tokens(1, 0) != prompt_tokens(1, 1)
    assert prompt_tokens(0, 0) == []
    long = prompt_tokens(6000, 0)
    assert len(long) == 6000
    assert min(long) >= len(SPECIAL_TOKENS)
    assert max(long) < Recipe().vocab
    assert len(set(long)) > 900
    # Not one another's prefixes, or a prefix cache would make them one prompt.
    assert long[:4] != prompt_tokens(4, 0)


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache() == Path("/somewhere/kvxfer/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache() == Path("/home/someone/.cache/kvxfer/models")
