"""Pictures of a forecast: traffic between ranks, bytes per rank, who holds what before and after."""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.colors import LogNorm, hsv_to_rgb  # noqa: E402

from megatron_dynatrain.layout import Layout  # noqa: E402
from megatron_dynatrain.planner.forecast import Forecast  # noqa: E402
from megatron_dynatrain.space import LogicalTensor, World  # noqa: E402

_PIXELS = 480  # of a tensor's rows, and of its columns
_LABELS = 40  # regions of a picture that are still labelled
_STATE = ("exp_avg", "momentum_buffer", "param")  # fields that are cut over data parallelism, the first that there is


def draw(found: Forecast, src: Layout, dst: Layout, folder: str) -> list[Path]:
    """Draw all pictures into `folder`; their paths."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    titles = (f"before: {_short(src)}", f"after: {_short(dst)}")
    figures = {"traffic": _traffic(found), "ranks": _ranks(found), "tensor": _tensor(found, titles),
               "layers": _layers(found, titles)}
    written = []
    for name, figure in figures.items():
        if figure is not None:
            written.append(path / f"{name}.png")
            figure.savefig(written[-1], dpi=130, bbox_inches="tight")
            plt.close(figure)
    return written


def _short(layout: Layout) -> str:
    """'TP4 PP8' of a layout."""
    letters = {"tensor_model_parallel_size": "TP", "pipeline_model_parallel_size": "PP", "context_parallel_size": "CP",
               "expert_model_parallel_size": "EP", "expert_tensor_parallel_size": "ETP",
               "num_virtual_stages_per_pipeline_rank": "VPP"}
    return " ".join(f"{letters[name]}{value}" for name, value in layout.arguments().items() if name in letters) or str(layout)


def _scaled(maximum: float) -> tuple[float, str]:
    """A unit in which bytes are drawn."""
    return next(((size, unit) for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if maximum >= size), (1.0, "bytes"))


def _traffic(found: Forecast):
    plan = found.plan
    crosses = plan.crosses
    size = int(found.ranks.max()) + 1
    src, dst = (found.ranks[side[crosses]] for side in (plan.src_rank, plan.dst_rank))
    matrix = np.bincount(src * size + dst, plan.nbytes[crosses], size * size).reshape(size, size)
    scale, unit = _scaled(matrix.max(initial=0))
    figure, axes = plt.subplots(figsize=(7.5, 6.5))
    if matrix.any():
        shown = np.ma.masked_equal(matrix / scale, 0)
        image = axes.imshow(shown, cmap="viridis", norm=LogNorm(shown.min(), max(shown.max(), shown.min() * 1.01)),
                            interpolation="nearest")
        figure.colorbar(image, label=unit, shrink=0.85)
    step = found.cluster.gpus_per_node
    if size // step <= 32:
        for edge in np.arange(step, size, step) - 0.5:
            axes.axhline(edge, color="0.8", linewidth=0.5)
            axes.axvline(edge, color="0.8", linewidth=0.5)
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.set_title(f"Traffic between ranks (white: none; lines: nodes of {step})" if size // step <= 32 else
                   "Traffic between ranks (white: none)", fontsize=10)
    return figure


def _ranks(found: Forecast):
    ranks, after = found.ranks, np.zeros(len(found.ranks))
    after[found.dst.world.ranks] = found.dst.state_bytes
    stays = after - found.received_bytes
    scale, unit = _scaled(max(found.dst.state_bytes.max(), found.sent_bytes.max()))
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9, 5.5), sharex=True, height_ratios=(2, 1))
    upper.bar(ranks, stays / scale, width=1.0, color="tab:blue", label="holds already")
    upper.bar(ranks, found.received_bytes / scale, width=1.0, bottom=stays / scale, color="tab:orange", label="receives")
    upper.set_ylabel(f"new state, {unit}")
    upper.set_title("Bytes per rank", fontsize=10)
    lower.bar(ranks, found.sent_bytes / scale, width=1.0, color="tab:green", label="sends")
    lower.set_ylabel(f"sent, {unit}")
    lower.set_xlabel("rank")
    for axes in (upper, lower):
        axes.margins(x=0.005)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.18)
        axes.legend(fontsize=8, loc="upper right", ncols=2)
    return figure


def _tensor(found: Forecast, titles):
    """One logical tensor, its last two axes at the first index of the others: the weight and one state of the optimizer."""
    weights = [tensor for tensor in found.plan.tensors if tensor.field == "weight" and len(tensor.shape) > 1]
    if not weights:
        return None
    key = max(weights, key=lambda tensor: (tensor.numel, tensor.key)).key
    fields = [tensor.field for tensor in found.plan.tensors if tensor.key == key]
    rows = ["weight", *[field for field in _STATE if field in fields][:1]]
    figure, axes = plt.subplots(len(rows), 2, figsize=(10, 4.6 * len(rows)), squeeze=False, layout="constrained")
    for row, field in enumerate(rows):
        for column, survey in enumerate((found.src, found.dst)):
            tensor = next(t for t in survey.world.tensors if (t.key, t.field) == (key, field))
            _draw_owners(axes[row, column], survey.world, found.ranks, tensor)
            axes[row, column].set_title(f"{titles[column]}\n{'weight' if field == 'weight' else f'state {field}'}", fontsize=9)
    first = ", ".join(["0"] * (len(tensor.shape) - 2) + [":", ":"])
    figure.suptitle(f"Who holds {key}[{first}] of shape {tensor.shape}", fontsize=10)
    return figure


def _draw_owners(axes, world: World, numbers: np.ndarray, tensor: LogicalTensor) -> None:
    """Paint which rank holds each element, at the first index of all axes but the last two; replicas as '+n'. numbers: of the
    world's ranks in the job."""
    number, lead = world.tensors.index(tensor), len(tensor.shape) - 2
    height, width = tensor.shape[-2:]
    mine = np.nonzero((world.boxes.tensor == number) & (world.boxes.offset[:, :lead] == 0).all(axis=1))[0]
    offset, shape = (table[mine, lead:lead + 2] for table in (world.boxes.offset, world.boxes.shape))
    image = np.ones((min(height, _PIXELS), min(width, _PIXELS), 3))
    per_pixel = np.array([height, width]) / image.shape[:2]
    copies: dict[tuple, list[int]] = {}
    for i, row in enumerate(mine.tolist()):
        copies.setdefault((*offset[i].tolist(), *shape[i].tolist()), []).append(int(numbers[world.rank[row]]))
    for (top, left, rows, columns), ranks in copies.items():
        low = np.floor(np.array([top, left]) / per_pixel).astype(int)
        high = np.maximum(np.ceil(np.array([top + rows, left + columns]) / per_pixel).astype(int), low + 1)
        image[low[0]:high[0], low[1]:high[1]] = _colour(min(ranks))
    axes.imshow(image, interpolation="nearest", aspect="auto", extent=(0, width, height, 0))
    large = [item for item in copies.items() if item[0][2] * item[0][3] * _LABELS >= height * width]
    if len(large) <= _LABELS:
        for (top, left, rows, columns), ranks in large:
            text = f"r{min(ranks)}" + (f" +{len(ranks) - 1}" if len(ranks) > 1 else "")
            axes.text(left + columns / 2, top + rows / 2, text, ha="center", va="center", fontsize=7,
                      bbox={"facecolor": "white", "alpha": 0.7, "pad": 1, "edgecolor": "none"})
    axes.set_xlabel("column", fontsize=8)
    axes.set_ylabel("row", fontsize=8)
    axes.tick_params(labelsize=7)


def _colour(rank: int) -> np.ndarray:
    """A colour of its own for each rank, the same in all pictures, far from its neighbours': red, green, blue."""
    return hsv_to_rgb((rank * 0.618034 % 1, 0.35 + 0.3 * (rank % 3) / 2, 0.95))


def _layers(found: Forecast, titles):
    """Which part of each layer's weights each rank holds. Layers: the first axis of tensors that every piece holds one of."""
    shares = [_share_of_layers(survey.world, found.ranks) for survey in (found.src, found.dst)]
    if any(share is None for share in shares):
        return None
    figure, axes = plt.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    highest = max(100 * share.max() for share in shares)
    for column, share in enumerate(shares):
        image = axes[column].imshow(np.ma.masked_equal(100 * share.T, 0), cmap="viridis", aspect="auto", vmin=0, vmax=highest,
                                    interpolation="nearest")
        axes[column].set_title(titles[column], fontsize=9)
        axes[column].set_xlabel("rank")
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="% of the layer's weights", shrink=0.85)
    figure.suptitle("Which layers each rank holds", fontsize=10)
    return figure


def _share_of_layers(world: World, numbers: np.ndarray) -> np.ndarray | None:
    """float64 [largest rank of the job + 1, num_layers], or None where no tensor has an axis of layers. numbers: of the world's
    ranks in the job."""
    widest = np.zeros(len(world.tensors), np.int64)
    np.maximum.at(widest, world.boxes.tensor, world.boxes.shape[:, 0])
    stacked = [i for i, tensor in enumerate(world.tensors)
               if tensor.field == "weight" and len(tensor.shape) > 1 and tensor.shape[0] > 1 and widest[i] == 1]
    if not stacked:
        return None
    extents = [world.tensors[i].shape[0] for i in stacked]
    num_layers = max(set(extents), key=extents.count)
    stacked = [i for i in stacked if world.tensors[i].shape[0] == num_layers]
    rows = np.nonzero(np.isin(world.boxes.tensor, stacked))[0]
    place = numbers[world.rank[rows]] * num_layers + world.boxes.offset[rows, 0]
    held = np.bincount(place, world.boxes.volume[rows], (int(numbers.max()) + 1) * num_layers).reshape(-1, num_layers)
    return held / (sum(world.tensors[i].numel for i in stacked) / num_layers)
