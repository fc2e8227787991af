"""Several hosts on one machine, as network namespaces that meet on a bridge: each has an address of its own and sees no other's
loopback. Takes root and iproute2; without them all hosts are this one."""

import os
import shutil
import subprocess

_NETWORK = "10.197.61"
_BRIDGE = "02:00:0a:c5:3d:fe"


class Hosts:
    """`count` hosts for the time of a `with`; none is this machine. address: of this machine, which all hosts reach."""

    def __init__(self, count: int):
        self._tag = f"dt{os.getpid() % 10000}"
        self._count = count
        self.apart = (count > 0 and os.geteuid() == 0 and shutil.which("ip") is not None
                      # Without an address of its own a bridge has the lowest of its ports, and another one when that host goes.
                      and self._ip("link", "add", f"{self._tag}b", "address", _BRIDGE, "type", "bridge"))
        self.address = f"{_NETWORK}.254" if self.apart else "127.0.0.1"

    @staticmethod
    def _ip(*words) -> bool:
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0

    def __enter__(self):
        if self.apart:
            self._ip("addr", "add", f"{self.address}/24", "dev", f"{self._tag}b")
            self._ip("link", "set", f"{self._tag}b", "up")
            for number in range(self._count):
                host, wire = self._name(number), f"{self._tag}w{number}"
                assert self._ip("netns", "add", host)
                assert self._ip("link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", host)
                self._ip("link", "set", wire, "master", f"{self._tag}b", "up")
                self._ip("-n", host, "addr", "add", f"{self.address_of(number)}/24", "dev", "eth0")
                self._ip("-n", host, "link", "set", "eth0", "up")
                self._ip("-n", host, "link", "set", "lo", "up")
        return self

    def _name(self, number: int) -> str:
        return f"{self._tag}h{number}"

    def address_of(self, number: int) -> str:
        return f"{_NETWORK}.{number + 1}" if self.apart else "127.0.0.1"

    def command(self, number: int) -> tuple[list[str], dict[str, str]]:
        """(what stands before a command that is to run on a host, its environment)."""
        return (["ip", "netns", "exec", self._name(number)], {"GLOO_SOCKET_IFNAME": "eth0"}) if self.apart else ([], {})

    def remove(self, number: int) -> None:
        """A host goes, with its network."""
        if self.apart:
            self._ip("netns", "del", self._name(number))

    def __exit__(self, *error):
        for number in range(self._count):
            self.remove(number)
        if self.apart:
            self._ip("link", "del", f"{self._tag}b")
