"""`python -m megatron_dynatrain request | status | cancel`: ask a running job from outside, without torch and Megatron."""

import argparse
import getpass
import json
import math
import socket
import sys
import time

import msgspec

from megatron_dynatrain.config import parse_layout
from megatron_dynatrain.errors import ConfigError
from megatron_dynatrain.layout import LAUNCH, nearest
from megatron_dynatrain.report import in_bytes, in_sizes
from megatron_dynatrain.run_dir.files import Answer, CancelFile, RequestFile, RunDir, Status, Unreadable, as_json, is_id, new_id
from megatron_dynatrain.run_dir.ownership import age, is_running, who

# Exit codes, the same for all three commands. Python's own code for a failure is 1, argparse's for a wrong flag 2.
DONE, WRONG, NO_ANSWER, NO_JOB, TOO_LATE = 0, 2, 7, 8, 9
CODE_OF_ANSWER = {"done": DONE, "unchanged": DONE, "refused": 3, "superseded": 4, "expired": 5, "cancelled": 6}

EXIT_CODES = """\
exit codes:
  0  done; without --wait: the request was filed
  2  the command line is wrong, or there is no such directory, layout or request
  3  refused: the layout cannot be trained here, or the switch failed and was taken back; the job trains on
  4  superseded by a newer request
  5  expired: the iteration had passed, or the job ended first
  6  cancelled
  7  no answer within --timeout; the request stays where it is
  8  no job is running on the directory, or it ended without an answer
"""
REQUEST = """\
Ask the job that runs with `dynatrain: {run_dir: DIR}` in its configuration for a switch of its layout.

  python -m megatron_dynatrain request --run-dir DIR --layout deep --wait
  python -m megatron_dynatrain request --run-dir DIR --layout tensor_model_parallel_size=2,pipeline_model_parallel_size=1 \\
      --at-iteration 500

The job switches at the first iteration boundary at which all ranks can act together, or after iteration N has finished. A newer
request for the same boundary takes the place of an older one. The answer is kept in DIR/answers/ID.json.
"""
STATUS = """\
Say what the job of a run directory is doing: state, iteration, layout, pending requests, its last switch.

  python -m megatron_dynatrain status --run-dir DIR
  python -m megatron_dynatrain status --run-dir DIR --json | jq .status.layout
"""
CANCEL = """\
Take back a request that has no answer yet, and wait until the job says so.

  python -m megatron_dynatrain cancel --run-dir DIR 20261202-194314-d74308cb
"""
STATUS_EXIT_CODES = """\
exit codes:
  0  a job is running
  2  the command line is wrong, or there is no such directory
  8  no job is running: it ended, or its last heartbeat is old
"""
CANCEL_EXIT_CODES = """\
exit codes:
  0  cancelled
  2  the command line is wrong, or there is no such directory or request
  7  no answer within --timeout
  8  no job is running on the directory
  9  too late: the request has another answer already, which is printed
"""


def add_flags(commands) -> None:
    """Add the three commands to argparse's subparsers."""
    asking = _command(commands, "request", "ask a running job for a switch", REQUEST, EXIT_CODES, request)
    asking.add_argument("--layout", required=True, metavar="LAYOUT", help="the name of a declared layout, 'launch', or a list "
                        "of Megatron's arguments as in tensor_model_parallel_size=2,context_parallel_size=2; what it leaves "
                        "out stays as launched")
    asking.add_argument("--at-iteration", type=_iteration, metavar="N", help="switch after iteration N has finished")
    asking.add_argument("--wait", action="store_true", help="wait until the answer is there, and exit with its code")
    asking.add_argument("--timeout", type=_seconds, default=math.inf, metavar="S", help="with --wait: no longer than S seconds "
                        "(no limit)")
    _command(commands, "status", "say what the job of a run directory is doing", STATUS, STATUS_EXIT_CODES, status)
    taking_back = _command(commands, "cancel", "take a request back", CANCEL, CANCEL_EXIT_CODES, cancel)
    taking_back.add_argument("id", metavar="ID", help="as printed by `request`")
    taking_back.add_argument("--timeout", type=_seconds, default=60.0, metavar="S", help="wait no longer than S seconds "
                             "(%(default)s)")


def _command(commands, name: str, summary: str, description: str, exit_codes: str, action) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=description, epilog=exit_codes, allow_abbrev=False,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", required=True, metavar="DIR", help="`dynatrain.run_dir` of the job")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=lambda flags: _run(action, flags))
    return parser


def _iteration(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} was given, but the number of an iteration is expected, such as 500")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} was given, but a number of seconds is expected, such as 60")
    return value


def _run(action, flags: argparse.Namespace) -> int:
    """Carry out a command; a wrong one is said on the standard error, or in the JSON object, with exit code 2."""
    try:
        run_dir = RunDir(flags.run_dir)
        if not run_dir.path.is_dir():
            raise ConfigError(f"--run-dir {flags.run_dir}: there is no such directory; give `dynatrain.run_dir` of the job")
        return action(flags, run_dir)
    except (ConfigError, Unreadable, OSError) as error:
        _say(flags, {"error": str(error)}, str(error), wrong=True)
        return WRONG


def _say(flags: argparse.Namespace, fields: dict, text: str, wrong: bool = False) -> None:
    print(json.dumps(fields) if flags.json else text, file=sys.stderr if wrong and not flags.json else sys.stdout, flush=True)


def request(flags: argparse.Namespace, run_dir: RunDir) -> int:
    if flags.timeout != math.inf and not flags.wait:
        raise ConfigError(f"--timeout {flags.timeout:g}: it bounds --wait, which was not given; add --wait or leave it out")
    layout = parse_layout(flags.layout, "--layout") if "=" in flags.layout else flags.layout
    found, runs = is_running(run_dir)
    if not runs:
        return _no_job(flags, run_dir, found)
    if isinstance(layout, str) and layout not in (LAUNCH, *found.layouts):
        raise ConfigError(f"--layout {layout}: the job has no such layout{nearest(layout, (LAUNCH, *found.layouts))}, or write "
                          "its sizes as in tensor_model_parallel_size=2")
    request_id = new_id()
    path = run_dir.requests / f"{request_id}.json"
    run_dir.publish(path, RequestFile(layout=layout, at_iteration=flags.at_iteration, run=found.run, by=_me(),
                                      time=round(time.time(), 3)))
    if not flags.wait:
        latest = run_dir.read_status()
        if latest is None or latest.run != found.run or latest.state == "ended":  # it ended in this moment
            path.unlink(missing_ok=True)
            return _no_job(flags, run_dir, latest)
        _say(flags, {"id": request_id, "answer": None}, f"filed request {request_id}; its answer will be in "
             f"{run_dir.answers / request_id}.json")
        return DONE
    if not flags.json:
        print(f"filed request {request_id} with {who(found)}", file=sys.stderr, flush=True)
    try:
        answer = _wait(run_dir, request_id, found, flags.timeout)
    except KeyboardInterrupt:
        _say(flags, {"id": request_id, "answer": None}, f"no longer waiting; request {request_id} stays, and `cancel "
             f"{request_id}` takes it back", wrong=True)
        return 130
    if isinstance(answer, Answer):
        _say_answer(flags, answer)
        return CODE_OF_ANSWER[answer.answer]
    if answer == "no job":
        path.unlink(missing_ok=True)
        return _no_job(flags, run_dir, run_dir.read_status(), request_id)
    _say(flags, {"id": request_id, "answer": None}, f"request {request_id} has no answer after {flags.timeout:g} s; it stays, "
         f"and `cancel {request_id}` takes it back", wrong=True)
    return NO_ANSWER


def status(flags: argparse.Namespace, run_dir: RunDir) -> int:
    found, runs = is_running(run_dir)
    if flags.json:
        print(json.dumps({"running": runs, "status": msgspec.to_builtins(found)}), flush=True)
        return DONE if runs else NO_JOB
    if not runs:
        return _no_job(flags, run_dir, found)
    print(f"{found.state}: {who(found)}, heartbeat {age(found)}")
    which = "" if found.ranks is None else f" ({', '.join(map(str, found.ranks))})"
    print(f"layout {found.layout} ({in_sizes(found.sizes)}) on {found.world_size} ranks{which}; layouts: "
          f"{', '.join((LAUNCH, *found.layouts))}")
    if found.schedule:
        print("scheduled: " + ", ".join(f"{layout} after iteration {at}" for at, layout in found.schedule))
    print(f"pending requests: {', '.join(found.pending) or 'none'}")
    print(f"last switch: {_switch_in_words(found.last_switch) if found.last_switch else 'none'}")
    return DONE


def cancel(flags: argparse.Namespace, run_dir: RunDir) -> int:
    if not is_id(flags.id):
        raise ConfigError(f"{flags.id!r} is not the ID of a request; give one as `request` prints it")
    answer = run_dir.read_answer(flags.id)
    if answer is None:
        found, runs = is_running(run_dir)
        if not runs:
            return _no_job(flags, run_dir, found, flags.id)
        if not (run_dir.requests / f"{flags.id}.json").exists() and run_dir.read_answer(flags.id) is None:
            raise ConfigError(f"there is no request {flags.id} in {run_dir.path}; pending: "
                              f"{', '.join(found.pending) or 'none'}")
        path = run_dir.cancels / f"{flags.id}.json"
        run_dir.publish(path, CancelFile(by=_me(), time=round(time.time(), 3)))
        answer = _wait(run_dir, flags.id, found, flags.timeout)
    if answer == "no job":
        path.unlink(missing_ok=True)
        return _no_job(flags, run_dir, run_dir.read_status(), flags.id)
    if answer == "no answer":
        _say(flags, {"id": flags.id, "answer": None}, f"request {flags.id} has no answer after {flags.timeout:g} s", wrong=True)
        return NO_ANSWER
    _say_answer(flags, answer)
    return DONE if answer.answer == "cancelled" else TOO_LATE


def _wait(run_dir: RunDir, request_id: str, job: Status, timeout: float):
    """The answer to a request of `job`; 'no job' once that has ended without one, 'no answer' after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        latest, runs = is_running(run_dir)
        answer = run_dir.read_answer(request_id)  # after the status: a job answers everything before it says that it ended
        if answer is not None:
            return answer
        if not runs or latest.run != job.run:
            return "no job"
        if time.monotonic() >= deadline:
            return "no answer"
        time.sleep(min(0.1, max(deadline - time.monotonic(), 0)))


def _say_answer(flags: argparse.Namespace, answer: Answer) -> None:
    if flags.json:
        print(as_json(answer), flush=True)
        return
    text = f"request {answer.id}: {answer.answer}"
    if answer.report is not None:
        text += f": {_switch_in_words(answer.report)}"
    elif answer.by is not None:
        text += f" by request {answer.by}"
    elif answer.reason is not None:
        text += f": {answer.reason}"
    print(text, flush=True)


def _switch_in_words(report: dict) -> str:
    return (f"after iteration {report['iteration']}: {report['from']} ({in_sizes(report['from_sizes'])}) -> {report['to']} "
            f"({in_sizes(report['to_sizes'])}), stall {report['stall_seconds']:.3f} s, moved "
            f"{in_bytes(report['moved_bytes'])}, verify {report['verify']}")


def _no_job(flags: argparse.Namespace, run_dir: RunDir, found: Status | None, request_id: str | None = None) -> int:
    """Say why there is nobody to ask."""
    if found is None:
        why = (f"no job has used the directory {run_dir.path} yet; its configuration needs "
               f"`dynatrain: {{run_dir: {run_dir.path}}}`")
    elif found.state == "ended":
        reason = f": {found.reason}" if found.reason else ""
        why = f"no job is running here: the last one ended {age(found)} ({who(found)}{reason})"
    else:
        why = f"no job is running here: the last heartbeat was {age(found)} ({who(found)})"
    _say(flags, {"id": request_id, "answer": None, "running": False, "error": why}, why, wrong=True)
    return NO_JOB


def _me() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return socket.gethostname()
