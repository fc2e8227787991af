"""A real Slurm of three nodes on this machine: own configuration, key, socket and ports in a folder that goes away with it."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

from harness import free_ports, wait_until

NODES = ("node1", "node2", "node3")
CPUS_PER_NODE = 4
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "srun", "squeue", "setpriv")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # daemons lie where users do not look

TRIED = "22.05"  # the release of Slurm that the configuration was tried with

# No cgroups, no limits, and by default no accounting: what a container without systemd allows. Each node claims more than its
# share of CPUs.
CONFIGURATION = """\
ClusterName=dynatrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=5
"""


def missing() -> list[str]:
    """The programs that a cluster needs and that are not installed."""
    return [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]


def release() -> str:
    """The installed release of Slurm, such as '22.05'."""
    said = subprocess.run([shutil.which("slurmctld", path=PATH), "-V"], capture_output=True, text=True, check=True).stdout
    return ".".join(said.split()[-1].split(".")[:2])  # "slurm-wlm 22.05.8"


class NotUp(Exception):
    """A cluster did not come up. The message has what its daemons said."""


class SlurmCluster:
    """Three nodes for the time of a `with`. Everything that runs in it carries this cluster's SLURM_CONF in its environment."""

    def __enter__(self) -> "SlurmCluster":
        # Not in pytest's folder, whose path may be too long for a socket and closed to munge.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.configuration = self.folder / "slurm.conf"
        # A Slurm job that this test may be running in is none of this cluster's business.
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        self.env.update(PATH=PATH, SLURM_CONF=str(self.configuration))
        self._daemons = []
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        host = socket.gethostname().split(".")[0]
        ports = free_ports(1 + len(NODES))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir()
        self.configuration.write_text(
            CONFIGURATION.format(host=host, ports=ports, user=user, folder=self.folder)
            + "".join(f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE}\n"
                      for node, port in zip(NODES, ports[1:], strict=True))
            + "PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n")
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
                     f"--pid-file={self.folder}/munge.pid", f"--log-file={self.folder}/munge.log",
                     f"--seed-file={self.folder}/munge.seed", "--num-threads=2")
        self._wait_until((self.folder / "munge.socket").exists)
        self._daemon("slurmctld", "-D", "-f", self.configuration)
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node, "-f", self.configuration)
        self._wait_until(lambda: self.run("sinfo", "--noheader", "--states=idle", "--format=%D", check=False).stdout.strip()
                         == str(len(NODES)))

    def _wait_until(self, condition) -> None:
        """Wait for a step of the start. Raises NotUp when it does not come."""
        def reached():
            if any(daemon.poll() is not None for daemon in self._daemons):
                raise NotUp(f"a daemon has ended\n{self.logs()}")
            return condition()

        try:
            wait_until(reached, self.logs, timeout=30)
        except TimeoutError as error:
            raise NotUp(str(error)) from None

    def _daemon(self, *command) -> None:
        with open(self.folder / f"{command[0]}.{len(self._daemons)}.log", "w") as log:
            # Should this process be killed, its daemons are told to end.
            self._daemons.append(subprocess.Popen(["setpriv", "--pdeathsig", "TERM", *map(str, command)], env=self.env,
                                                  stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def run(self, *command, check: bool = True, cwd=None, **env) -> subprocess.CompletedProcess:
        """Run a command of Slurm against this cluster, with more of an environment."""
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60, cwd=cwd,
                              env={**self.env, **{name: str(value) for name, value in env.items()}})
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    def submit(self, *words, cwd, **env) -> str:
        """Give words to sbatch; the number of the job comes back."""
        return self.run("sbatch", "--parsable", "--chdir", cwd, *words, cwd=cwd, **env).stdout.strip().split(";")[0]

    def field(self, job: str, name: str) -> str:
        """What `scontrol show job` says of one field, such as JobState or ExitCode."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).stdout.split()
        return next(word.split("=", 1)[1] for word in words if word.startswith(f"{name}="))

    def logs(self) -> str:
        """What the daemons have said last."""
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}"
                         for log in sorted(self.folder.glob("*.log")))

    def members(self) -> list[int]:
        """The processes of this cluster: its daemons, and whatever its jobs have started."""
        return [int(process.name) for process in Path("/proc").glob("[0-9]*")
                if _belongs(process, f"SLURM_CONF={self.configuration}")]

    def end_jobs(self) -> None:
        """End what jobs there are, and wait until their nodes are free."""
        self.run("scancel", "--me", "--full", "--signal=KILL", check=False)
        wait_until(lambda: not self.run("squeue", "--noheader", check=False).stdout.strip(), "jobs are left", timeout=20)

    def __exit__(self, *exception) -> None:
        """End the jobs, then the daemons, then what should be left, and remove the folder."""
        try:
            self.end_jobs()
        except (TimeoutError, subprocess.TimeoutExpired, OSError):
            pass  # a cluster that is broken itself; its processes are ended below
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in self.members():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        shutil.rmtree(self.folder, ignore_errors=True)


def _belongs(process: Path, variable: str) -> bool:
    try:
        return variable.encode() in process.joinpath("environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended, or is somebody else's
