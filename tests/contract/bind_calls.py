"""Run with a version's double first on the path: binds every call that this version makes of a hook to our connectors' own.

Reads the recording from standard input; writes what this version lets a connector do, and what does not fit, as JSON.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys

from kvxfer.connector import KvxferPullConnector, KvxferPushConnector, compat


def misfits(connector: type, recorded: dict) -> list[str]:
    found = []
    for call in recorded["calls"]:
        hook = inspect.getattr_static(connector, call["hook"])
        bound = () if isinstance(hook, classmethod) else (connector,)
        function = hook.__func__ if isinstance(hook, classmethod) else hook
        given = [*bound, *range(call["positional"])]
        try:
            inspect.signature(function).bind(*given, **dict.fromkeys(call["keywords"]))
        except TypeError as error:
            found.append(f"{connector.__name__}.{call['hook']}, called at {call['where']}: {error}")
    for name, hook in recorded["hooks"].items():
        ours = inspect.getattr_static(connector, name)
        if isinstance(ours, property) != (hook["kind"] == "property"):
            found.append(f"{connector.__name__}.{name} is not a {hook['kind']}")
        if hook.get("abstract") and name not in vars(connector.__mro__[1]):
            found.append(f"{connector.__name__} lacks {name}")
    return found


recording = json.load(sys.stdin)
print(
    json.dumps(
        {
            "features": dataclasses.asdict(compat.features()),
            "misfits": [
                one for connector in (KvxferPushConnector, KvxferPullConnector) for one in misfits(connector, recording)
            ],
        }
    )
)
