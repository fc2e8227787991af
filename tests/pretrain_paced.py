"""`scripts/pretrain_gpt.py`, standing still after iteration PAUSE_AFTER until the file GATE exists: a test can then do in
between what comes from outside, however slow the machine is."""

import os
import runpy
import time
from pathlib import Path

from megatron.training import get_args, training

step = training.train_step


def train_step(*args, **kwargs):
    while get_args().curr_iteration == int(os.environ["PAUSE_AFTER"]) and not Path(os.environ["GATE"]).exists():
        time.sleep(0.05)
    return step(*args, **kwargs)


training.train_step = train_step
runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "pretrain_gpt.py"), run_name="__main__")
