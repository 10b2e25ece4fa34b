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
