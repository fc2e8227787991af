"""python tests/dry_hybrid.py <folder> <layouts as JSON> <pairs as JSON> <Megatron arguments>: `dryprobe.run` of the hybrid
model, in a process of its own, since its stand-ins have to be there before Megatron is."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from megatron_dynatrain import cpu, session  # noqa: E402

cpu.install()
from megatron_dynatrain.megatron import seams  # noqa: E402
from megatron_dynatrain.megatron.job import MegatronJob  # noqa: E402

session.install(session.Session(MegatronJob()))
seams.install(session.current())
folder, layouts, pairs, *arguments = sys.argv[1:]
sys.argv = [str(ROOT / "tests" / "pretrain_hybrid.py"), *arguments]

import dryprobe  # noqa: E402

dryprobe.run(0, Path(folder), world=8, layouts=json.loads(layouts), pairs=json.loads(pairs))
