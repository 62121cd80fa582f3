#!/usr/bin/env python3
"""Plots the legs of run_multiturn_sweep.sh: the time to the first token by prompt length, and prefill's part of a turn.

python scripts/plot_multiturn.py --results-dir results        writes results/multiturn.png

Medians of all iterations. Needs matplotlib (kvxfer[bench]).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from kvxfer.bench import charts, results


@dataclass(frozen=True)
class Turn:
    """One turn of a leg: tokens of its prompt, milliseconds to the first token, and the parts of prefill's time."""

    prompt: float
    ttft: float
    parts: dict[str, float]


def collect(directory: Path) -> dict[str, list[Turn]]:
    """Return each leg's turns, in order. Raises ResultsError."""
    legs: dict[str, list[list[dict]]] = {}
    for path in sorted(directory.glob("multiturn_*_iter*.json")):
        found = results.read(path, "multiturn")
        legs.setdefault(found["settings"]["leg"], []).append(found["turns"])
    if not legs:
        raise results.ResultsError(f"{directory} has no results of run_multiturn_sweep.sh (multiturn_*_iter*.json)")
    return {
        leg: [
            Turn(
                statistics.median(one["prompt_tokens"]["median"] for one in same),
                statistics.median(one["ttft_ms"]["median"] for one in same),
                {part: statistics.median(one["prefill_ms"][part] for one in same) for part in same[0]["prefill_ms"]},
            )
            for same in zip(*iterations, strict=True)
        ]
        for leg, iterations in sorted(legs.items())
    }


def plot(directory: Path, out: Path) -> None:
    """Draw both pictures into a file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    legs = collect(directory)
    figure, (first, second) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    paint = charts.colours(list(legs))
    for leg, turns in legs.items():
        first.plot(
            [turn.prompt for turn in turns],
            [turn.ttft for turn in turns],
            marker="o",
            label=f"reuse {leg}",
            color=paint[leg],
        )
    first.set(title="Time to the first token", xlabel="tokens of the prompt", ylabel="ms, median")
    first.set_ylim(bottom=0)
    first.grid(alpha=0.3)
    first.legend(frameon=False)

    parts = list(dict.fromkeys(part for turns in legs.values() for turn in turns for part in turn.parts))
    colours = charts.colours(parts)
    width = 0.8 / len(legs)
    for number, (leg, turns) in enumerate(legs.items()):
        places = [at + (number - (len(legs) - 1) / 2) * width for at in range(len(turns))]
        bottom = [0.0] * len(turns)
        for part in parts:
            heights = [turn.parts.get(part, 0.0) for turn in turns]
            label = None if number else part
            second.bar(
                places, heights, width * 0.92, bottom=bottom, color=colours[part], edgecolor="white", label=label
            )
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        for place, top in zip(places, bottom, strict=True):
            second.text(place, top, leg, ha="center", va="bottom", fontsize=7)
    longest = max(legs.values(), key=len)
    second.set_xticks(range(len(longest)), [f"{turn.prompt:,.0f}" for turn in longest])
    second.set(title="Prefill's part of a turn", xlabel="tokens of the prompt", ylabel="ms, mean")
    second.legend(frameon=False)
    figure.savefig(out, dpi=150)


def main() -> int:
    """Read the command line and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results-dir", type=Path, default=Path("results"))
    parser.add_argument("--out", type=Path, help="the picture (RESULTS_DIR/multiturn.png)")
    arguments = parser.parse_args()
    out = arguments.out or arguments.results_dir / "multiturn.png"
    try:
        plot(arguments.results_dir, out)
    except results.ResultsError as error:
        print(error, file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(
            f"{error.name} is not installed where {sys.executable} looks: pip install 'kvxfer[bench]'", file=sys.stderr
        )
        return 1
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
