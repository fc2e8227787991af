"""The demo: a small GPT on eight CPU ranks, trained without a switch, with two switches, and with a stop and a restart.

    scripts/demo.sh

All runs are Megatron's own `pretrain` through `torchrun`; losses and times are read from Megatron's log and from
`report.jsonl`. Results go to runs/demo.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

warnings.filterwarnings("ignore")  # Megatron says at import what it did not find; the runs say it too

import make_dataset  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_dynatrain.report import in_bytes, in_sizes, read  # noqa: E402

OUT = ROOT / "runs" / "demo"
RANKS, ITERATIONS, SWITCHES = 8, 30, ((10, "deep"), (20, "wide"))
CONFIG = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())

ARGUMENTS = f"""
    --num-layers 4 --hidden-size 128 --num-attention-heads 8 --group-query-attention --num-query-groups 4
    --ffn-hidden-size 256 --swiglu --position-embedding-type rope --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --seq-length 64 --max-position-embeddings 64
    --micro-batch-size 1 --global-batch-size 8 --train-iters {ITERATIONS} --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine
    --lr-warmup-iters 3 --lr-decay-iters {ITERATIONS} --weight-decay 0.1 --clip-grad 1.0 --attention-dropout 0
    --hidden-dropout 0 --log-interval 1 --eval-iters 1 --eval-interval 1000 --use-distributed-optimizer --seed 1234
    --tokenizer-type NullTokenizer --vocab-size 257 --make-vocab-size-divisible-by 256 --split 90,5,5 --num-workers 0
    --transformer-impl local --distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
    --attention-backend unfused
""".split()
LAUNCH_LAYOUT = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]

_STEP = re.compile(r"\[(?P<time>[\d-]+ [\d:.]+)\] iteration +(?P<iteration>\d+)/.*elapsed time per iteration \(ms\): "
                   r"(?P<elapsed>[\d.]+).*lm loss: (?P<loss>[\d.E+-]+)")


@dataclass
class Run:
    """What Megatron's log said: losses, and when each step started and ended (seconds since the epoch)."""

    losses: dict[int, float] = field(default_factory=dict)
    started: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)


def train(name: str, progress: Progress, last: int, arguments: list[str], first: int = 0) -> Run:
    """Launch one run and follow its log. Ends the demo with the log's tail if the run fails."""
    task = progress.add_task(f"{name}: starting {RANKS} processes", total=last - first)
    log = OUT / f"{name.replace(' ', '-')}.log"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS),
               "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "megatron_dynatrain.launch", "--cpu",
               str(ROOT / "scripts" / "pretrain_gpt.py"), *ARGUMENTS, "--data-path", str(ROOT / "runs/data/stdlib"),
               "--data-cache-path", str(ROOT / "runs/data/cache"), *arguments]
    run = Run()
    with log.open("w") as file, subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                                 text=True, errors="replace", env=_environment()) as process:
        for line in process.stdout:
            file.write(line)
            match = _STEP.search(line)
            if match:
                iteration, end = int(match["iteration"]), datetime.fromisoformat(match["time"]).timestamp()
                run.losses[iteration], run.ended[iteration] = float(match["loss"]), end
                run.started[iteration] = end - float(match["elapsed"]) / 1000
                progress.update(task, completed=iteration - first, description=name)
    if process.returncode != 0:
        sys.exit(f"the run '{name}' failed with exit code {process.returncode}; the end of {log}:\n" + log.read_text()[-3000:])
    progress.update(task, completed=last - first, description=name)
    return run


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}


def write_config() -> Path:
    """configs/demo.yaml with the report beside the demo's other results."""
    CONFIG["dynatrain"]["report"] = str(OUT / "report.jsonl")
    path = OUT / "demo.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def restart_seconds(progress: Progress) -> float:
    """The same first change as people do it today: save, end, start anew in the other layout, load. From the end of the
    last old step to the start of the first new one."""
    folder = str(OUT / "checkpoint")
    shutil.rmtree(folder, ignore_errors=True)
    form = ["--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable"]
    at, layout = SWITCHES[0]
    sizes = CONFIG["dynatrain"]["layouts"][layout]
    arguments = [word for key, value in sizes.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    before = train("stop", progress, at, [*LAUNCH_LAYOUT, *form, "--save", folder, "--save-interval", "1000",
                                          "--exit-interval", str(at)])
    after = train("restart", progress, at + 2, [*arguments, *form, "--load", folder, "--exit-interval", str(at + 2)], first=at)
    return after.started[at + 1] - before.ended[at]


def losses_table(plain: Run, switched: Run, events: list[dict]) -> Table:
    table = Table(title="Losses step by step")
    for column in ("iteration", "without a switch", "with two switches", "difference", "layout"):
        table.add_column(column, justify="right")
    layout = in_sizes(events[0]["from_sizes"])
    for iteration in sorted(plain.losses):
        a, b = plain.losses[iteration], switched.losses[iteration]
        table.add_row(str(iteration), f"{a:.6f}", f"{b:.6f}", f"{b - a:+.1e}" if a != b else "0", layout)
        for event in events:
            if event["iteration"] == iteration:
                layout = in_sizes(event["to_sizes"])
    return table


def switches_table(events: list[dict]) -> Table:
    table = Table(title="Switches")
    for column in ("after", "from", "to", "stall", "moved", "minimum", "verified"):
        table.add_column(column, justify="right")
    for e in events:
        table.add_row(str(e["iteration"]), in_sizes(e["from_sizes"]), in_sizes(e["to_sizes"]), f"{e['stall_seconds']:.2f} s",
                      in_bytes(e["moved_bytes"]), in_bytes(e["minimum_bytes"]), e["verify"])
    return table


def plot(plain: Run, switched: Run, events: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, height_ratios=(3, 1), layout="constrained")
    iterations = sorted(plain.losses)
    top.plot(iterations, [plain.losses[i] for i in iterations], color="0.6", linewidth=5, label="without a switch")
    top.plot(iterations, [switched.losses[i] for i in iterations], color="tab:blue", linewidth=1.5, label="with two switches")
    bottom.plot(iterations, [switched.losses[i] - plain.losses[i] for i in iterations], color="tab:red", marker=".")
    for axis in (top, bottom):
        for event in events:
            axis.axvline(event["iteration"] + 0.5, color="0.3", linestyle="--", linewidth=1)
    for event in events:
        top.annotate(f"{in_sizes(event['from_sizes'])} → {in_sizes(event['to_sizes'])}\nstall {event['stall_seconds']:.2f} s",
                     (event["iteration"] + 0.5, 0.98), xycoords=("data", "axes fraction"), xytext=(6, 0),
                     textcoords="offset points", va="top", fontsize=9)
    top.set_ylabel("lm loss")
    top.legend(loc="lower left")
    bottom.set_ylabel("difference")
    bottom.set_xlabel("iteration")
    figure.savefig(path, dpi=130)


def main() -> None:
    console = Console()
    begin = time.time()
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "report.jsonl").unlink(missing_ok=True)  # a job goes on in the report that is there
    tokens = make_dataset.build(str(ROOT / "runs/data/stdlib"))
    console.print(f"data: {tokens:,} bytes of the Python standard library, one token a byte")
    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                  console=console) as progress:
        plain = train("without a switch", progress, ITERATIONS, LAUNCH_LAYOUT)
        switched = train("with two switches", progress, ITERATIONS, [*LAUNCH_LAYOUT, "--dynatrain-config", str(write_config())])
        restart = restart_seconds(progress)
    events = [event for event in read(OUT / "report.jsonl") if event["event"] == "switch"]
    with (OUT / "report.jsonl").open("a") as file:
        file.write(json.dumps({"event": "restart", "iteration": events[0]["iteration"], "to": events[0]["to"],
                               "stall_seconds": round(restart, 3)}) + "\n")
    plot(plain, switched, events, OUT / "losses.png")
    console.print(losses_table(plain, switched, events))
    console.print(switches_table(events))
    stall = events[0]["stall_seconds"]
    console.print(f"The first change by save, stop, restart and load took {restart:.1f} s; switched in place it took "
                  f"{stall:.2f} s, verification included: {restart / stall:.0f} times faster.")
    for path in (OUT / "losses.png", OUT / "report.jsonl"):
        console.print(f"wrote {path.relative_to(ROOT)}")
    console.print(f"the demo took {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
