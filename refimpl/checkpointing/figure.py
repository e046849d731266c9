"""Time against peak: the best schedules as a staircase, and named policies as points beside it."""

from ..common.figure import MemoryFigure
from ..common.ledger import human


def plot_time_peak(curve, points=(), unit="FLOPs of a step, without recomputation = 1"):
    """Draw `curve`, [(peak, time), …] as `time_peak_curve` gives it, and `points`, {name: (peak, time)}.

    Bytes to the right, time upwards relative to the curve's last (where all is kept): what lies left and below is
    better, and nothing that a schedule can do lies below the staircase. Returns a matplotlib Figure.
    """
    least = curve[-1][1]
    figure = MemoryFigure(figsize=(8.5, 4.2), layout="constrained", facecolor="white")
    figure.labels = ["optimal", *points]
    axes = figure.subplots()
    peaks, times = [p / 2**20 for p, _ in curve], [t / least for _, t in curve]
    right = 1.08 * max([*peaks, *(p / 2**20 for p, _ in dict(points).values())])
    axes.step([*peaks, right], [*times, times[-1]], where="post", color="#0072B2", label="optimal schedule")
    axes.plot(peaks, times, ".", color="#0072B2")
    for i, ((peak, time), names) in enumerate(_together(dict(points)).items()):
        axes.plot([peak / 2**20], [time / least], "ox^sDvP*"[i % 8], color="#D55E00", markersize=7)
        axes.annotate(", ".join(names), (peak / 2**20, time / least), (3, 6), textcoords="offset points", fontsize=9,
                      rotation=30, rotation_mode="anchor")  # so that labels do not cover the staircase
    axes.axvline(peaks[0], color="#999999", linewidth=0.6, linestyle=":")
    axes.text(peaks[0], times[-1], f" least: {human(curve[0][0])}", fontsize=8, color="#444444", va="top")
    axes.set_xlim(0, right)
    axes.set_xlabel("peak, MiB", fontsize=9)
    axes.set_ylabel(unit, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return figure


def _together(points):
    """Return {(peak, time): names}; points too close to distinguish share one label."""
    found = {}
    for name, (peak, time) in points.items():
        near = [at for at in found if abs(at[0] - peak) < 0.01 * peak and abs(at[1] - time) < 0.01 * time]
        found.setdefault(near[0] if near else (peak, time), []).append(name)
    return found
