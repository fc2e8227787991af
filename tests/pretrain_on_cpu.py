"""`scripts/pretrain_gpt.py` on the CPU backend, without the launcher: `python tests/pretrain_on_cpu.py <Megatron arguments>`.

At the end it says whether megatron_dynatrain was attached to the job.
"""

import runpy
import sys
from pathlib import Path

from megatron_dynatrain import cpu

if __name__ == "__main__":
    cpu.install()
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "scripts" / "pretrain_gpt.py"), run_name="__main__")
    sys.stdout.write(f"attached: {'megatron_dynatrain.session' in sys.modules}\n")
