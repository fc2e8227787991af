"""python tests/dry_hybrid.py <folder> <layouts as JSON> <pairs as JSON> <Megatron arguments>: `dryprobe.run` of the hybrid
model, in a process of its own, since its stand-ins have to be there before Megatron is."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from megatron_dynatrain import cpu, launch  # noqa: E402

cpu.install()
launch.install()
folder, layouts, pairs, *arguments = sys.argv[1:]
sys.argv = [str(ROOT / "tests" / "pretrain_hybrid.py"), *arguments]

import dryprobe  # noqa: E402

dryprobe.run(0, Path(folder), world=8, layouts=json.loads(layouts), pairs=json.loads(pairs))
