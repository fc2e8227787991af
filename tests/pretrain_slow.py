"""`scripts/pretrain_gpt.py` with steps that last at least STEP_SECONDS."""

import os
import runpy
import time
from pathlib import Path

from megatron.training import training

step = training.train_step


def train_step(*args, **kwargs):
    time.sleep(float(os.environ["STEP_SECONDS"]))
    return step(*args, **kwargs)


training.train_step = train_step
runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "pretrain_gpt.py"), run_name="__main__")
