"""Real Megatron jobs in tests: `Jobs.run` trains through the real pretrain loop on gloo ranks and returns what happened."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent

# A small GPT with everything that layouts cut: GQA, SwiGLU, RoPE, RMSNorm, untied embeddings.
MODEL = {
    "num-layers": 4, "hidden-size": 32, "num-attention-heads": 4, "group-query-attention": True, "num-query-groups": 2,
    "ffn-hidden-size": 64, "swiglu": True, "position-embedding-type": "rope", "normalization": "RMSNorm",
    "disable-bias-linear": True, "untie-embeddings-and-output-weights": True, "seq-length": 16,
    "max-position-embeddings": 16, "init-method-std": 0.1,
}
# 320 rows of padded vocabulary at TP 1, 2 and 4, so that restarted jobs train the same model.
TRAINING = {
    "micro-batch-size": 1, "global-batch-size": 4, "lr": 2e-3, "min-lr": 2e-4, "lr-decay-style": "cosine",
    "lr-warmup-iters": 2, "lr-decay-iters": 40, "weight-decay": 0.1, "clip-grad": 1.0, "attention-dropout": 0.0,
    "hidden-dropout": 0.0, "train-iters": 8, "log-interval": 1, "eval-iters": 1, "eval-interval": 1000, "seed": 1234,
    "tokenizer-type": "NullTokenizer", "vocab-size": 257, "make-vocab-size-divisible-by": 80, "split": "90,5,5",
    "num-workers": 0, "use-distributed-optimizer": True,
}
CPU = {
    "transformer-impl": "local", "distributed-backend": "gloo", "use-cpu-initialization": True,
    "no-gradient-accumulation-fusion": True, "no-masked-softmax-fusion": True, "no-bias-swiglu-fusion": True,
    "no-bias-dropout-fusion": True, "no-rope-fusion": True, "no-persist-layer-norm": True, "attention-backend": "unfused",
}


LAUNCHER = ("-m", "megatron_dynatrain.launch", "--cpu", "scripts/pretrain_gpt.py")


def torchrun(num_ranks: int, words, env) -> subprocess.CompletedProcess:
    """Run a job on `num_ranks` ranks as a user would, from the project's folder: `words` stand after torchrun's own flags."""
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--rdzv-backend",
                           "c10d", "--rdzv-endpoint", "localhost:0", *words], cwd=ROOT, capture_output=True, text=True,
                          env={**env, "OMP_NUM_THREADS": "1"})


def free_ports(count: int) -> list[int]:
    """Ports on which nothing listens on this machine at the moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_until(condition, what="what was waited for did not come", timeout: float = 60, every: float = 0.1):
    """The first true value of `condition()`, asked `every` so many seconds. After `timeout` seconds an error that says `what`: a
    text, or a call for one."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"after {timeout} s: {what() if callable(what) else what}")
        time.sleep(every)
    return value


@dataclass
class Result:
    """What a job left: exit codes and logs by rank, the steps that were recorded, the events of its report."""

    exit_codes: list[int]
    folder: Path

    @property
    def logs(self) -> list[str]:
        return [Path(self.folder, f"rank{r}.log").read_text(errors="replace") for r in range(len(self.exit_codes))]

    @property
    def events(self) -> list[dict]:
        path = self.folder / "report.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def events_of(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["event"] == kind]

    def records(self, name: str) -> list:
        """What probes wrote with `probes.write`, over all ranks."""
        return [json.loads(line) for path in sorted(self.folder.glob(f"{name}.*.jsonl"))
                for line in path.read_text().splitlines()]

    @property
    def steps(self) -> dict[int, dict]:
        """{iteration: {'loss', 'grad_norm', 'lr'}} of the last rank."""
        return {step["iteration"]: step for step in self.records("steps")}

    @property
    def samples(self) -> dict[int, list[int]]:
        """{iteration: sorted sample ids that any rank drew for it}."""
        drawn: dict[int, set[int]] = {}
        for record in self.records("samples"):
            drawn.setdefault(record["iteration"], set()).add(record["sample"])
        return {iteration: sorted(ids) for iteration, ids in drawn.items()}

    def assert_ok(self) -> "Result":
        assert set(self.exit_codes) == {0}, "\n".join(
            f"--- rank {r}, exit code {code}\n{log[-3000:]}"
            for r, (code, log) in enumerate(zip(self.exit_codes, self.logs)) if code != 0)
        return self


def words_of(arguments: dict) -> list[str]:
    """{'swiglu': True, 'rampup-batch-size': '4 4 16', 'bf16': None} -> ['--swiglu', '--rampup-batch-size', '4', '4', '16']."""
    return [word for name, value in arguments.items() if value is not None and value is not False
            for word in ([f"--{name}"] if value is True else [f"--{name}", *str(value).split()])]


class Jobs:
    """Starts jobs from fork servers, one server for each kind, kept for the whole test session."""

    def __init__(self, data: str, cache: str):
        self.data, self.cache = data, cache
        self._servers = {}

    def _server(self, kind: str, optimizer: str):
        if (kind, optimizer) not in self._servers:
            env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore"}
            server = subprocess.Popen([sys.executable, str(ROOT / "tests" / "forkserver.py"), kind, optimizer], env=env,
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            assert json.loads(server.stdout.readline())["ready"]
            self._servers[kind, optimizer] = server
        return self._servers[kind, optimizer]

    def run(self, folder: Path, world_size: int, arguments: dict | None = None, config: dict | str | None = None,
            kind: str = "plugin", optimizer: str = "fused", probe: str | None = "probes:record", timeout: int = 180,
            script: str = "pretrain_gpt.py", grace: int = 20, **probe_arguments) -> Result:
        """Train. arguments override the defaults above (None removes one); config is the value under `dynatrain`; script
        is one of scripts/. grace: how many seconds the others may go on when a rank has failed."""
        folder.mkdir(parents=True, exist_ok=True)
        merged = {**MODEL, **TRAINING, **CPU, "data-path": self.data, "data-cache-path": self.cache, **(arguments or {})}
        if config is not None:
            path = folder / "dynatrain.yaml"
            if isinstance(config, dict):
                config = yaml.safe_dump({"dynatrain": {"report": str(folder / "report.jsonl"), **config}})
            path.write_text(config)
            merged["dynatrain-config"] = str(path)
        argv = [str(ROOT / "scripts" / script), *words_of(merged)]
        port, = free_ports(1)
        job = {"world_size": world_size, "argv": argv, "probe": probe, "probe_arguments": probe_arguments,
               "folder": str(folder), "port": port, "timeout": timeout, "grace": grace}
        server = self._server(kind, optimizer)
        print(json.dumps(job), file=server.stdin, flush=True)
        return Result(json.loads(server.stdout.readline())["exit_codes"], folder)

    def close(self):
        for server in self._servers.values():
            server.stdin.close()
            server.wait(timeout=10)
