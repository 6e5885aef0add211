"""The wheel holds every module and data file of the package and nothing else, built from a checkout or an sdist."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SUFFIXES = {".py", ".typed", ".h", ".hpp", ".cpp", ".S", ".html", ".css", ".js", ".svg"}
NOT_SOURCES = ("build", "dist", "benchmarks", "tests", "kernels_generated", "*.egg-info", "__pycache__", ".*")


def package_files(sources: Path) -> set[str]:
    """Every file that belongs into the package, by its path inside a wheel."""
    found = set()
    for package, folder in (("cheetah", "cheetah"), ("cheetah/models", "models"), ("cheetah/runtime", "runtime")):
        for path in (sources / folder).rglob("*"):
            if path.suffix in SUFFIXES or path.parent.name == "files":
                found.add(f"{package}/{path.relative_to(sources / folder).as_posix()}")
    return found


def copy_of_the_sources(folder: Path) -> Path:
    """A copy to build in, so that neither old build folders nor other tests are in the way."""
    return Path(shutil.copytree(ROOT, folder / "sources", symlinks=True, ignore=shutil.ignore_patterns(*NOT_SOURCES)))


def build(command: str, sources: Path, output: Path) -> Path:
    """Run a hook of the build backend; the file that it wrote."""
    call = f"import sys; from setuptools import build_meta; build_meta.{command}(sys.argv[1])"
    output.mkdir()
    done = subprocess.run([sys.executable, "-c", call, str(output)], cwd=sources, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = output.iterdir()
    return built


def check_wheel(wheel: Path, sources: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == package_files(sources)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def check_unpacked(wheel: Path, folder: Path) -> None:
    """The package imports from the wheel's files alone and finds its demo model."""
    zipfile.ZipFile(wheel).extractall(folder)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from cheetah.models.registry import DEMO_FOLDER, preset; "
        "assert str(DEMO_FOLDER).startswith(sys.argv[1]), DEMO_FOLDER; preset('demo')"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code, str(folder)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_wheel_holds_the_package(tmp_path: Path) -> None:
    sources = copy_of_the_sources(tmp_path)
    wheel = build("build_wheel", sources, tmp_path / "wheel")
    check_wheel(wheel, sources)
    check_unpacked(wheel, tmp_path / "unpacked")


@pytest.mark.slow
def test_sdist_builds_the_same_wheel(tmp_path: Path) -> None:
    sources = copy_of_the_sources(tmp_path)
    sdist = build("build_sdist", sources, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "from-sdist", filter="data")
    (unpacked,) = (tmp_path / "from-sdist").iterdir()
    check_wheel(build("build_wheel", unpacked, tmp_path / "wheel"), sources)
