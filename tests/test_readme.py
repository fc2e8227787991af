"""The README is true: its examples run, its names exist, and the messages that a user can meet are in its tables."""

import ast
import inspect
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import wheels
from conftest import ROOT
from markdown_it import MarkdownIt

import megatron_dynatrain
from megatron_dynatrain import cli, config, launch
from megatron_dynatrain.layout import Layout
from megatron_dynatrain.patching import tree
from megatron_dynatrain.report import read

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
TOKENS = MarkdownIt("commonmark").enable("table").parse(TEXT)
CODE = [inline.content for token in TOKENS for inline in token.children or () if inline.type == "code_inline"]
COMMAND = "python -m megatron_dynatrain "


def blocks(language):
    """The fenced blocks in a language, in order."""
    return [token.content for token in TOKENS if token.type == "fence" and token.info == language]


def block(language, part):
    """The one block in which `part` stands."""
    found = [text for text in blocks(language) if part in text]
    assert len(found) == 1, f"{part!r} stands in {len(found)} blocks"
    return found[0]


def lines(text):
    """The lines of a shell block, each joined over its backslashes."""
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def words(line):
    """A line of a shell as words, without its comment; <a placeholder> is one word."""
    return shlex.split(re.sub(r"<([^>]*)>", r"'<\1>'", line), comments=True)


def table_rows(*head):
    """The rows, [[cell, ...], ...], of all tables with this head."""
    found, rows, row = [], [], []
    for i, token in enumerate(TOKENS):
        if token.type == "table_open":
            rows = []
        elif token.type == "tr_open":
            row = []
        elif token.type in ("th_open", "td_open"):
            row.append(TOKENS[i + 1].content)
        elif token.type == "tr_close":
            rows.append(row)
        elif token.type == "table_close" and tuple(rows[0][:len(head)]) == head:
            found += rows[1:]
    assert found, f"there is no table {head}"
    return found


def names(text):
    """The words in backticks."""
    return re.findall(r"`(\w+)`", text)


COMMANDS = [words(line)[3:] for text in blocks("bash") for line in lines(text) if line.startswith(COMMAND)]
COMMANDS += [words(text)[3:] for text in CODE if text.startswith(COMMAND)]
LAUNCHES = [words(line) for text in blocks("bash") for line in lines(text) if "megatron_dynatrain.launch" in line]


def test_every_block_says_what_it_is():
    assert {token.info for token in TOKENS if token.type == "fence"} == {"bash", "yaml", "python", "text"}


class TestCommandLines:
    @pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
    def test_the_parser_takes_it(self, arguments):
        assert cli.parse(arguments).run

    def test_each_command_is_shown(self):
        known = next(action for action in cli.parser()._actions if action.dest == "command").choices
        assert {arguments[0] for arguments in COMMANDS} == set(known)

    @pytest.mark.parametrize("line", LAUNCHES, ids=lambda line: " ".join(line)[:60])
    def test_the_launcher_takes_it(self, line):
        _, script = launch.parse(line[line.index("megatron_dynatrain.launch") + 1:])
        assert script[0].endswith(".py") and "--dynatrain-config" in script

    def test_each_command_and_flag_has_a_help(self):
        parsers = [cli.parser(), launch.parser(),
                   *next(action for action in cli.parser()._actions if action.dest == "command").choices.values()]
        for parser in parsers:
            assert parser.description
            for action in parser._actions:
                assert action.help or action.dest == "command", f"{parser.prog}: {action.dest} has no help"
            if parser is not parsers[0]:
                shown = parser.format_help()
                assert re.search(r"exit codes?\b", shown, re.I), f"{parser.prog} does not say its exit codes"
                assert re.search(r"^ +(torchrun|python -m megatron_dynatrain)", shown, re.M), f"{parser.prog} has no example"


class TestConfiguration:
    @pytest.mark.parametrize("text", blocks("yaml"), ids=lambda text: text[:40])
    def test_an_example_is_accepted(self, text):
        assert config.parse(text).layouts

    def test_each_key_is_explained(self):
        keys = {name for row in table_rows("key under `dynatrain`") for name in re.findall(r"`([\w.]+)`", row[0])}
        inner = {f"transfer.{name}" for name in config.TransferConfig.__struct_fields__}
        inner |= {f"elastic.{name}" for name in config.ElasticConfig.__struct_fields__}
        assert keys == set(config.Config.__struct_fields__) - {"transfer"} | inner

    def test_each_key_of_a_layout_is_named(self):
        paragraph = next(token.content for token in TOKENS if token.content.startswith("Keys of a layout:"))
        assert set(names(paragraph)) - {"null"} == set(Layout.__struct_fields__)


class TestPaths:
    def test_what_is_named_is_there(self):
        named = {path for path in re.findall(r"(?<![\w/~.-])(?:scripts|configs|patches|tests)/[\w./-]*\w", TEXT)}
        inner = {path for path in CODE if re.fullmatch(r"(?:[a-z_]+/)?[a-z_]+\.py|[a-z_]+/", path)}
        assert "scripts/slurm/train.sbatch" in named and "planning/memory.py" in inner
        assert not [path for path in named if not (ROOT / path).exists()]
        elsewhere = {"pretrain_gpt.py"}  # NVIDIA's
        folders = (ROOT, ROOT / "megatron_dynatrain", ROOT / "scripts" / "slurm")
        assert not [path for path in inner - elsewhere if not any((folder / path).exists() for folder in folders)
                    and path not in ("megatron/", "answers/", "rejected/")]

    def test_links_lead_to_headings(self):
        headings = {re.sub(r"[^\w -]", "", TOKENS[i + 1].content).strip().lower().replace(" ", "-")
                    for i, token in enumerate(TOKENS) if token.type == "heading_open"}
        links = re.findall(r"\]\(#([\w-]+)\)", TEXT)
        assert links and set(links) <= headings, set(links) - headings


class TestMessages:
    """Of each message that this package raises, four words in a row (three where it has no more) stand in the tables."""

    KINDS = {"ConfigError", "LayoutRefused", "SpaceError", "VerificationError", "TransferError", "UnsupportedMegatron",
             "PatchError", "RequestDropped", "BenchFailed", "TooLarge", "ArgumentTypeError", "NotImplementedError"}

    @staticmethod
    def words(text):
        return re.findall(r"[\w-]+", re.sub(r"[`'\"]", "", text))

    @staticmethod
    def runs(words, length):
        """All sequences of so many words."""
        return set(zip(*(words[i:] for i in range(length))))

    def messages(self):
        """(where, the words of the constant pieces of the text) of each error that is raised, and of each for all ranks."""
        for path in sorted((ROOT / "megatron_dynatrain").rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                arguments = node.args[1:2] if name in ("together", "share") else node.args[:1] if name in self.KINDS else ()
                for text in arguments:
                    pieces = [self.words(piece.value) for piece in ast.walk(text)
                              if isinstance(piece, ast.Constant) and isinstance(piece.value, str)]
                    pieces = [piece for piece in pieces if len(piece) >= 3]
                    if pieces:
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", pieces

    def test_each_is_in_the_tables(self):
        rows = [self.words(row[0]) for row in table_rows("text", "cause", "cure")]
        listed = {length: set().union(*(self.runs(row, length) for row in rows)) for length in (3, 4)}
        found = list(self.messages())
        assert len(found) > 80
        missing = []
        for where, pieces in found:
            length = min(4, max(map(len, pieces)))
            if not any(self.runs(piece, length) & listed[length] for piece in pieces):
                missing.append(f"{where}: {' ... '.join(map(' '.join, pieces))}")
        assert not missing, "\n".join(missing)

    def test_each_row_has_a_cure(self):
        assert all(len(row) == 3 and all(row) for row in table_rows("text", "cause", "cure"))


class TestRequests:
    def shown(self, command, run_dir):
        """The first example of a command, with a run directory of this test."""
        arguments = next(arguments for arguments in COMMANDS if arguments[0] == command)
        assert "runs/job" in arguments
        return [str(run_dir) if word == "runs/job" else word for word in arguments]

    @pytest.mark.parametrize("command", ["request", "status", "cancel"])
    def test_without_a_job(self, command, tmp_path, capsys):
        with pytest.raises(SystemExit) as ended:
            cli.main(self.shown(command, tmp_path))
        assert ended.value.code == 8
        said = capsys.readouterr()
        if command == "status":  # shown with --json
            assert json.loads(said.out) == {"running": False, "status": None}
        else:
            assert "no job has used the directory" in said.err
        with pytest.raises(SystemExit) as ended:
            cli.main(self.shown(command, tmp_path / "nowhere"))
        assert ended.value.code == 2

    def test_the_exit_codes_are_those_of_the_table(self):
        from megatron_dynatrain.run_dir.commands import CODE_OF_ANSWER

        rows = table_rows("answer", "exit code of `request --wait`")
        assert {name: int(row[1]) for row in rows for name in names(row[0])} == CODE_OF_ANSWER
        printed = cli.parser()._subparsers._group_actions[0].choices["request"].format_help()
        assert {row[1] for row in rows} == set(re.findall(r"^  (\d)  ", printed, re.M))


def test_patch_goes_through_the_shown_states(tmp_path, capsys):
    for path in (tree.RELEASE, "megatron/training/arguments.py", "megatron/training/training.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheels.installed() / path, tmp_path / path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.py")}
    codes = []
    for line in lines(block("bash", "patch check")):
        arguments = words(line)[3:]
        if arguments[0] == "patch":
            with pytest.raises(SystemExit) as ended:
                cli.main([str(tmp_path) if word == "~/Megatron-LM" else word for word in arguments])
            codes.append(ended.value.code)
    assert codes == [1, 0, 0]  # it fits; applied; reverted
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.py")} == before


def test_plan_writes_what_is_named(tmp_path):
    [arguments] = [arguments for arguments in COMMANDS if arguments[0] == "plan"]
    small = {"configs/models/llama2-70b.yaml": "configs/models/gpt3-1.3b.yaml", "128": "8",
             "plan.json": str(tmp_path / "plan.json"), "plots": str(tmp_path / "plots"),
             "tensor_model_parallel_size=8,pipeline_model_parallel_size=4": "tensor_model_parallel_size=2",
             "tensor_model_parallel_size=4,pipeline_model_parallel_size=8": "tensor_model_parallel_size=4"}
    assert set(small) <= set(arguments)
    arguments = [*(small.get(word, word) for word in arguments), "--no-cache"]
    done = subprocess.run([sys.executable, "-m", "megatron_dynatrain", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [named] = [text for text in CODE if text.startswith('{"world_size", "describe_seconds"')]
    fields = set(re.findall(r'[{,]\s*"(\w+)"', named))
    numbers = json.loads((tmp_path / "plan.json").read_text())
    assert len(fields) > 10 and fields <= set(numbers), fields - set(numbers)
    assert list((tmp_path / "plots").iterdir())


def test_the_dry_run_prints_the_launch(tmp_path):
    [line] = [line for line in lines(block("bash", "DRY_RUN=1")) if line.startswith("DRY_RUN=1")]
    line = re.sub(r"<.*?>|#.*", "", line)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True,
                          env={**environment, "PYTHON": sys.executable})
    assert done.returncode == 0, done.stderr
    printed = shlex.split(done.stdout)
    assert printed[1] == "srun"
    assert printed[-4:] == ["megatron_dynatrain.launch", "pretrain_gpt.py", "--dynatrain-config", "switch.yaml"]


def test_names_of_the_python_interface_exist():
    calls = [node for node in ast.walk(ast.parse("\n".join(blocks("python")))) if isinstance(node, ast.Call)
             and isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "megatron_dynatrain"]
    assert {call.func.attr for call in calls} == {"Layout", "reconfigure", "plan", "current_layout", "on_switch"}
    for call in calls:
        inspect.signature(getattr(megatron_dynatrain, call.func.attr)).bind(
            *call.args, **{keyword.arg: keyword.value for keyword in call.keywords})
    bullet = next(token.content for token in TOKENS if token.content.startswith("**plan** has all ranks"))
    fields = names(bullet.partition("`SwitchCost` has")[2].partition("and the stall")[0])
    assert len(fields) > 4 and set(fields) <= set(megatron_dynatrain.SwitchCost.__dataclass_fields__)


def fields_of_events():
    """{event: the fields that README says it has}."""
    return {event: set(names(row[1].partition("a superseded one")[0])) - {"report_steps"}
            for row in table_rows("event", "fields") for event in names(row[0])}


def test_the_long_example_trains_and_switches(tmp_path):
    """The job on CPU ranks, word for word but for fewer iterations, in an empty folder."""
    [setup, *rest] = block("bash", "--train-iters").splitlines(keepends=True)
    assert setup.startswith("scripts/setup.sh") and (ROOT / "scripts" / "setup.sh").exists()
    script, count = re.subn(r"--train-iters \d+", "--train-iters 21", "".join(rest))
    assert count == 1
    for folder in ("scripts", "configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True, timeout=400, env={
        **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1", "PET_MASTER_PORT": str(port)})
    assert done.returncode == 0, done.stderr[-3000:]
    written = config.load(str(ROOT / "configs" / "demo.yaml"))
    events = read(tmp_path / written.report)
    switches = [event for event in events if event["event"] == "switch"]
    assert [(event["iteration"], event["to"]) for event in switches] == [
        (switch.at_iteration, switch.layout) for switch in written.schedule]
    assert {event["verify"] for event in switches} == {"ok"}
    assert all(event["moved_bytes"] == event["minimum_bytes"] for event in switches)
    assert len(re.findall(r"^.*iteration +\d+/ +21 .*lm loss", done.stdout, re.M)) == 21
    assert re.search(r"\[dynatrain\] after iteration 10: launch \(TP2 PP2 DP2\) -> deep \(TP1 PP4 DP2\), stall", done.stdout)


def run_the_python_block(rank, folder, code):
    """A probe: README's Python, on rank 1 in the sixth step of a job; a refusal before that."""
    from megatron.training import training

    step, done = training.train_step, []

    def train_step(*args, **kwargs):
        done.append(None)
        if len(done) == 1 and rank == 0:
            def veto(iteration, layout):
                remove()
                raise RuntimeError("not this one")

            remove = megatron_dynatrain.on_switch(before=veto)
            megatron_dynatrain.reconfigure("deep")
        if len(done) == 6 and rank == 1:
            exec(compile(code, "README.md", "exec"), {})
        return step(*args, **kwargs)

    training.train_step = train_step


def test_the_python_block_runs_and_events_have_the_named_fields(jobs, tmp_path):
    arguments = {"tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2, "train-iters": 14}
    layouts = config.parse(blocks("yaml")[0]).layouts
    result = jobs.run(tmp_path, 4, arguments, {"layouts": {name: layout.arguments() for name, layout in layouts.items()},
                                               "report_steps": True},
                      probe="test_readme:run_the_python_block", code=blocks("python")[0]).assert_ok()
    said = result.logs[1]
    assert "about to switch to deep" in said and re.search(r"^trains in deep [\d.]+$", said, re.M)
    assert re.search(r"^\d+ None$", said, re.M)  # what the switch would move; it has not been made before
    documented = fields_of_events()
    for event in result.events:
        assert set(event) - {"event", "time"} == documented[event["event"]]
    assert set(documented) == {event["event"] for event in result.events} | {"superseded", "cancelled"}
