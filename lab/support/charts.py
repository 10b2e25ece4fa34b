"""Figures of a kind that several demos may draw; matplotlib is imported when one is made."""


def heat_map(rows, x: tuple, y: tuple, title: str, shade: str, absent: str = "-"):
    """A figure of coloured cells, each with its value to two digits; the first row at the bottom, none below 1.

    rows: (y, x) numbers, nan where there is no value, which shows `absent`. x, y: (label, the names of the places).
    shade: what the colours mean.
    """
    import numpy as np
    from matplotlib.figure import Figure

    rows = np.asarray(rows, float)
    fig = Figure(figsize=(7.2, 1.4 + 0.45 * len(rows)), layout="constrained")
    axis = fig.subplots(subplot_kw={"facecolor": "0.9"})
    image = axis.imshow(rows, origin="lower", aspect="auto", vmin=1, vmax=max(2, np.nanmax(rows, initial=1)))
    for (i, j), value in np.ndenumerate(rows):
        axis.text(j, i, absent if np.isnan(value) else f"{value:.2f}", ha="center", va="center",
                  color="white" if np.asarray(image.norm(value)) < 0.6 else "black")
    axis.set(title=title, xlabel=x[0], xticks=range(len(x[1])), xticklabels=x[1],
             ylabel=y[0], yticks=range(len(y[1])), yticklabels=y[1])
    fig.colorbar(image, label=shade)
    return fig


def against_measured(title: str, measured: tuple, predicted: dict):
    """A figure of predictions over what was measured, with error bars, and the line on which both are equal.

    measured: (values, their standard errors). predicted: {name: (values, their standard errors)}.
    """
    from matplotlib.figure import Figure

    fig = Figure(figsize=(6.4, 4.4), layout="constrained")
    axis = fig.subplots()
    for (name, (values, errors)), mark in zip(predicted.items(), "os^Dv"):
        axis.errorbar(measured[0], values, errors, measured[1], mark, label=name, elinewidth=0.8, capsize=2, alpha=0.8)
    axis.axline((measured[0][0],) * 2, slope=1, color="0.5", linewidth=1, label="predicted = measured")
    axis.set(title=title, xlabel="measured, ± one standard error", ylabel="predicted, ± one standard error")
    axis.legend()
    return fig


def draft_tree(parents, labels, path, title: str):
    """A figure of a tree of drafts, its root at the left, with the path that was accepted in green.

    parents: of each node, -1 for the root. labels: of the root, then of each node. path: the accepted nodes.
    """
    from matplotlib.figure import Figure

    parents, on_path = list(parents), {-1, *path}
    depth = {-1: 0}
    height: dict[int, float] = {}
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + 1

    def place(node):
        """Height of a node: the middle of its children's, or the next free line."""
        below = [place(child) for child, parent in enumerate(parents) if parent == node]
        leaves = sum(other not in parents for other in height)
        height[node] = (below[0] + below[-1]) / 2 if below else -leaves
        return height[node]

    place(-1)
    fig = Figure(figsize=(7.2, 1.2 + 0.42 * sum(node not in parents for node in height)), layout="constrained")
    axis = fig.subplots()
    for node, y in height.items():
        color, width = ("C2", 3) if node in on_path else ("0.8", 1)
        if node >= 0:
            ends = [height[parents[node]], y]
            axis.plot([depth[node] - 1, depth[node]], ends, color=color, linewidth=width, zorder=1)
        axis.text(depth[node], y, labels[node + 1], ha="center", va="center", parse_math=False,
                  bbox={"boxstyle": "round", "fc": "white", "ec": color})
    deepest = max(depth.values())
    axis.set(xlim=(-0.5, deepest + 0.5), xticks=range(deepest + 1), yticks=[], xlabel="level", title=title)
    return fig


def log_log(readings, lines, x: str, y: str, title: str):
    """A figure of measured points with their quartiles, and lines beside them, on two logarithmic axes.

    readings: {place on the x axis: its readings}. lines: {name: function of the x values}. x, y: labels, with units.
    """
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    places = list(readings)
    low, middle, high = np.quantile(list(readings.values()), (0.25, 0.5, 0.75), axis=1)
    grid = np.geomspace(min(places), max(places), 200)
    fig = Figure(figsize=(7.0, 4.2), layout="constrained")
    axis = fig.subplots()
    axis.errorbar(places, middle, yerr=[middle - low, high - middle], fmt="o", ms=4, capsize=2,
                  label="measured, with quartiles")
    for name, line in lines.items():
        axis.plot(grid, line(grid), label=name)
    axis.set(xscale="log", yscale="log", xlabel=x, ylabel=y, title=title, ylim=(0.5 * min(middle), 2 * max(middle)))
    axis.set_xticks(places, places)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.legend(loc="lower right")
    axis.grid(alpha=0.3)
    return fig
