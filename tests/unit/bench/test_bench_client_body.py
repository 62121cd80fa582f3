"""What the benches' client sends is one JSON object, whatever its caller adds."""

from __future__ import annotations

import json
import math

from kvxfer.bench.client import _packed


def test_what_is_extra_replaces_what_is_usual() -> None:
    packed = _packed({"prompt": [1, 2], "max_tokens": 5}, {"max_tokens": 1, "kv_transfer_params": {"a": None}})
    assert json.loads(packed) == {"prompt": [1, 2], "max_tokens": 1, "kv_transfer_params": {"a": None}}
    assert packed.count(b"max_tokens") == 1
    assert json.loads(_packed({"prompt": "p"}, {})) == {"prompt": "p"}


def test_odd_values_reach_the_server_as_they_are() -> None:
    odd = {"kv_transfer_params": {"surrogate": "\ud800", "nan": math.nan, "infinite": math.inf, "large": 10**30}}
    read = json.loads(_packed({"prompt": [1]}, odd))["kv_transfer_params"]
    assert read["surrogate"] == "\ud800"
    assert math.isnan(read["nan"])
    assert (read["infinite"], read["large"]) == (math.inf, 10**30)
