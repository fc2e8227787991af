"""The VPS registry: every layout of the job, what it is and what all its ranks hold."""

from dataclasses import dataclass, field

from megatron_dynatrain.errors import ConfigError
from megatron_dynatrain.layout import LAUNCH, Layout, nearest
from megatron_dynatrain.planning import Plan, Totals
from megatron_dynatrain.space import Holdings, World


@dataclass(slots=True, eq=False)
class Entry:
    """One layout. `own` is what this rank holds in it, `world` what all ranks hold; None until it was described. `holdings`: what
    each rank holds, where the ranks of the job may change and with them which one this is; empty otherwise."""

    name: str
    layout: Layout
    declared: bool
    own: Holdings | None = None
    world: World | None = None
    holdings: dict[int, Holdings] = field(default_factory=dict)

    def become(self, rank: int) -> None:
        """This process is `rank` from now on."""
        if self.holdings:
            self.own = self.holdings.get(rank)


class Registry:
    """Layouts by name, and the plans between them, each made once."""

    def __init__(self, layouts: dict[str, Layout]):
        self.entries = {LAUNCH: Entry(LAUNCH, Layout(), True)}
        self.entries.update({name: Entry(name, layout, True) for name, layout in layouts.items()})
        self.plans: dict[tuple[str, str], Plan] = {}  # of this rank
        self.totals: dict[tuple[str, str], Totals] = {}  # of all ranks
        self.peaks: dict[tuple[str, str], int] = {}  # bytes, of this rank
        self.checked: set[tuple[str, int, str]] = set()  # (name, rank, digest of the world) that this process found to be so

    def find(self, target: str | Layout) -> Entry:
        """The entry of a name or of a layout object; an object that was not declared gets a new entry, named by its text.

        Raises ConfigError for a name that does not exist.
        """
        if isinstance(target, Layout):
            for entry in self.entries.values():
                if entry.layout == target:
                    return entry
            return self.entries.setdefault(str(target), Entry(str(target), target, False))
        if not isinstance(target, str):
            raise ConfigError(f"a layout is a name or a megatron_dynatrain.Layout, not {type(target).__name__} {target!r}")
        if target not in self.entries:
            raise ConfigError(f"there is no layout {target!r}{nearest(target, self.entries)}")
        return self.entries[target]

    def described(self) -> list[Entry]:
        """The layouts that were described, for a process that comes to know them (`adopt`)."""
        return [entry for entry in list(self.entries.values()) if entry.world is not None]

    def adopt(self, entries: list[Entry]) -> None:
        """Take what another process knows."""
        for entry in entries:
            self.entries[entry.name] = entry

    def forget_plans(self) -> None:
        """The ranks have changed."""
        self.plans, self.totals, self.peaks = {}, {}, {}

    def forget(self, name: str) -> None:
        """Drop an entry, the plans from and to it, and what was found out about it."""
        del self.entries[name]
        self.checked = {fact for fact in self.checked if fact[0] != name}
        for pair in [pair for pair in self.plans if name in pair]:
            del self.plans[pair], self.totals[pair], self.peaks[pair]
