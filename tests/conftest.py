"""What holds for every test: kernels are compiled into one cache that is not the user's, Python's bytecode is kept,
interrupts arrive, tests marked `compiler` are skipped where there is no g++, those marked `gpu` share it, and numpy has
one thread in each of their processes."""

import os

# Before anything imports numpy: threads of its matrix products wait for work by spinning, as many as there are cores in
# every worker, and would take a third of the time of files that multiply much.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import gc
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path

import hypothesis
import pytest

from tests.gpu_turns import gpu_turn, large_place, large_places
from tests.prices import Prices

KEPT_SECONDS = 7 * 24 * 3600

# No example has a time limit, which a busy host would pass. Before a test is decorated.
WITHOUT_TIMES = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("without times", hypothesis.settings.default, **WITHOUT_TIMES)
hypothesis.settings.load_profile("without times")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prices", type=int, default=0, metavar="FILES", help="seconds of a processor, of so many files")


def pytest_configure(config: pytest.Config) -> None:
    """Gives all tests, their processes and xdist's workers one CHEETAH_CACHE, which stays for the next run.

    An entry is named by everything that it depends on, so an old one is never wrong; after a week it is removed.
    It lies in pytest's own cache (`pytest --cache-clear` empties it), or where there is none in a temporary folder.
    """
    # Garbage is looked for rarely: imports and kernels make hundreds of thousands of objects, few of which are any.
    gc.set_threshold(500_000, 20, 100)
    # A shell ignores SIGINT for what it starts in the background, and so would all that is started from here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--prices"):
        config.pluginmanager.register(Prices())
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the first process has set it
    if hasattr(config, "cache"):
        folder = config.cache.mkdir("compiled")
        remove_old(folder)
    else:
        folder = Path(tempfile.mkdtemp(prefix="cheetah-tests-"))
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["CHEETAH_CACHE"] = str(folder)
    keep_bytecode()


def keep_bytecode() -> None:
    """Sources are compiled once, not by every process that a test starts, also where the environment asks for no
    bytecode (PYTHONDONTWRITEBYTECODE): a process would spend a second of a processor on that. It lies beside the
    sources, as usual: another folder would know nothing of what came compiled when it was installed."""
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def remove_old(folder: Path) -> None:
    limit = time.time() - KEPT_SECONDS
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mtime < limit:
            path.unlink(missing_ok=True)


def pytest_collection_finish() -> None:
    """What was imported stays: the collector of garbage need not look at it again."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("g++"):
        return
    for item in items:
        if item.get_closest_marker("compiler"):
            item.add_marker(pytest.mark.skip(reason="needs g++, which is not on PATH"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests on a GPU run side by side, whichever process each is in, but for those that need it for themselves, and as
    many with large models as it has room for."""
    if item.get_closest_marker("gpu") is None:
        return (yield)
    folder, is_large = Path(os.environ["CHEETAH_CACHE"]), item.get_closest_marker("gpu_large") is not None
    with large_place(folder, large_places()) if is_large else nullcontext():
        with gpu_turn(folder, alone=item.get_closest_marker("gpu_alone") is not None):
            return (yield)
