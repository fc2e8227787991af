"""The key-value store of a job whose ranks change.

It must outlive any of them. Without further ado it is the store of the launch, which lives in the torchrun of the first machine:
all ranks of that machine may leave, its torchrun may not. `python -m megatron_dynatrain store` is a process of its own, for any
machine that stays (a login node, a job of one core), and then every machine may go.
"""

import argparse
import socket
import sys
import threading
from datetime import timedelta

from megatron_dynatrain.errors import ConfigError

HELP = "hold the store of an elastic job"
DESCRIPTION = """\
Hold the key-value store of elastic jobs, on a machine that stays, until it is ended. A job names it with

  dynatrain: {elastic: {store: HOST:PORT}}

  python -m megatron_dynatrain store --port 29400
"""
_TIMEOUT = timedelta(seconds=60)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.epilog = "exit codes:\n  0  ended by a signal\n  2  the command line is wrong, or the port is taken"
    parser.add_argument("--port", type=int, default=29400,
                        help="the port on which it listens, on all addresses (%(default)s; 0: any)")


def run(flags: argparse.Namespace) -> int:
    """Hold the store until a signal ends the process."""
    import signal

    from torch.distributed import TCPStore

    try:
        store = TCPStore("0.0.0.0", flags.port, is_master=True, wait_for_workers=False)
    except Exception as error:
        print(f"store: port {flags.port} cannot be used ({str(error).splitlines()[0]}); give another with --port", file=sys.stderr)
        return 2
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    print(f"the store is at {socket.gethostname()}:{store.port}", flush=True)
    while not ended.wait(3600):
        pass
    return 0


def connect(address: str):
    """A client of the store at HOST:PORT. Raises ConfigError where nothing answers."""
    from torch.distributed import TCPStore

    host, _, port = address.rpartition(":")
    try:
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
    except Exception as error:
        raise ConfigError(f"`dynatrain.elastic.store` {address}: no store answers there ({str(error).splitlines()[0][:200]}); "
                          "start one with `python -m megatron_dynatrain store`, or leave the key out") from error


def of_launch() -> str:
    """HOST:PORT of the store with which torch.distributed was launched. Raises ConfigError where it is of another kind."""
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        raise ConfigError(f"`dynatrain.elastic`: the job was launched with a {type(store).__name__}, which others cannot reach; "
                          "launch it with torchrun, or give `elastic.store`")
    return f"{store.host}:{store.port}"
