import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Runs real Megatron jobs (`harness.Jobs`), on a small data set that is built once."""
    import make_dataset
    from harness import Jobs

    folder = tmp_path_factory.mktemp("data")
    make_dataset.build(str(folder / "stdlib"), limit_bytes=1_500_000)
    running = Jobs(str(folder / "stdlib"), str(folder / "cache"))
    yield running
    running.close()
