#!/usr/bin/env python3
"""Plots a sweep of run_sweep.sh: the time to the first token, or per token, over the rate; a panel for each prompt length.

python scripts/plot_push_vs_pull.py --results-dir results --metric ttft        writes results/push_vs_pull_ttft.png

Lines are medians of all iterations' medians, bands go up to the median of their 90th percentiles.
Needs matplotlib (kvxfer[bench]).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from kvxfer.bench import charts, results

METRICS = {
    "ttft": ("ttft_ms", "time to the first token, ms"),
    "tpot": ("tpot_ms", "time per token after the first, ms"),
}

Key = tuple[int, int]


def collect(directory: Path, metric: str) -> dict[Key, dict[str, dict[float, tuple[float, float]]]]:
    """Return by (input, output), by mode and by rate: the median and the 90th percentile. Raises ResultsError."""
    found: dict[Key, dict[str, dict[float, list[dict[str, Any]]]]] = {}
    for path in sorted(directory.glob("*_iter*.json")):
        if path.name.startswith("multiturn_"):
            continue
        for point in results.read(path)["points"]:
            for mode, arm in point["arms"].items():
                if arm[METRICS[metric][0]] is not None:
                    panel = found.setdefault((point["input"], point["output"]), {})
                    panel.setdefault(mode, {}).setdefault(point["qps"], []).append(arm[METRICS[metric][0]])
    if not found:
        raise results.ResultsError(f"{directory} has no results of run_sweep.sh (*_iter*.json)")
    return {
        key: {
            mode: {
                qps: tuple(statistics.median(one[name] for one in several) for name in ("median", "p90"))
                for qps, several in sorted(rates.items())
            }
            for mode, rates in modes.items()
        }
        for key, modes in sorted(found.items())
    }  # type: ignore[return-value]


def plot(directory: Path, metric: str, out: Path) -> None:
    """Draw the panels into a file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = collect(directory, metric)
    paint = charts.colours(sorted({mode for modes in panels.values() for mode in modes}))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 3.6), squeeze=False, constrained_layout=True
    )
    for axis, ((length, output), modes) in zip(axes[0], panels.items(), strict=True):
        for mode, rates in modes.items():
            middle, high = zip(*rates.values(), strict=True)
            axis.plot(list(rates), middle, marker="o", label=mode, color=paint[mode])
            axis.fill_between(list(rates), middle, high, alpha=0.15, color=paint[mode], linewidth=0)
        axis.set(
            title=f"{length:,} tokens, answers of {output:,}", xlabel="requests a second", ylabel=METRICS[metric][1]
        )
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.savefig(out, dpi=150)


def main() -> int:
    """Read the command line and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results-dir", type=Path, default=Path("results"))
    parser.add_argument("--metric", choices=sorted(METRICS), default="ttft")
    parser.add_argument("--out", type=Path, help="the picture (RESULTS_DIR/push_vs_pull_METRIC.png)")
    arguments = parser.parse_args()
    out = arguments.out or arguments.results_dir / f"push_vs_pull_{arguments.metric}.png"
    try:
        plot(arguments.results_dir, arguments.metric, out)
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
