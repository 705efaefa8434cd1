"""Draw a trace (MPIGRAD_TRACE) as a picture for the docs.

    python tools/timeline.py trace.json picture.png [FROM TO]

FROM and TO are milliseconds of the timeline.
"""

from __future__ import annotations

import json
import pathlib
import sys

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {
    "allreduce": "#4477aa",
    "bcast": "#66ccee",
    "sendrecv": "#228833",
    "barrier": "#bbbbbb",
}


def main() -> None:
    """Draw."""
    trace, picture, *window = sys.argv[1:]
    events = [e for e in json.loads(pathlib.Path(trace).read_text()) if e["ph"] == "X"]
    first = min(e["ts"] for e in events)
    low, high = map(float, window) if window else (first / 1e3, float("inf"))
    shown = [e for e in events if e["ts"] / 1e3 <= high and (e["ts"] + e["dur"]) / 1e3 >= low]
    ranks = sorted({e["pid"] for e in events})
    figure, axes = plt.subplots(figsize=(9, 0.6 + 0.5 * len(ranks)))
    seen = set()
    for e in shown:
        name = e["name"].removesuffix(" (adjoint)")
        adjoint = e["cat"] == "adjoint"
        label = name + (", adjoint" if adjoint else "")
        axes.barh(
            e["pid"],
            max(e["dur"] / 1e3, 0.004 * (min(high, 1e9) - low)),
            left=e["ts"] / 1e3 - low,
            height=0.62,
            color=COLOURS.get(name, "#ccbb44"),
            hatch="////" if adjoint else None,
            edgecolor="white",
            linewidth=0.4,
            label=None if label in seen else label,
        )
        seen.add(label)
    axes.set_yticks(ranks, [f"rank {r}" for r in ranks])
    axes.invert_yaxis()
    axes.set_xlim(0, (high if window else max((e["ts"] + e["dur"]) / 1e3 for e in shown)) - low)
    axes.set_xlabel("milliseconds")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(ncols=6, loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8)
    figure.savefig(picture, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
