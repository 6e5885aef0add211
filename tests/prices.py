"""`pytest --prices 30`: what tests cost, in seconds of a processor, by file: the dearest 30, and the sum.

A process's own time and that of the processes that it waited for, which are g++ and the race detector mostly. Every
worker of xdist tells its tests' with their reports.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Generator

import pytest

PRICE = "processor seconds"
COLLECTION = "collection and imports"


def seconds() -> float:
    """Of this process, and of all that it started and waited for."""
    return sum(os.times()[:4])


class Prices:
    def __init__(self) -> None:
        self.told = 0.0
        self.news: list[tuple[str, float]] = []
        self.by_file: defaultdict[str, float] = defaultdict(float)
        self.tests: Counter[str] = Counter()

    def since(self) -> float:
        """Seconds since this was asked last, or since the process began."""
        before, self.told = self.told, seconds()
        return self.told - before

    def pytest_collection_finish(self) -> None:
        self.news = [(COLLECTION, self.since())]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        report.user_properties += [*self.news, (PRICE, self.since())]
        self.news = []
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """In the process that was started by hand."""
        file = report.nodeid.partition("::")[0]
        self.tests[file] += report.when == "setup"
        for name, value in report.user_properties:
            if name in (PRICE, COLLECTION) and isinstance(value, float):
                self.by_file[file if name == PRICE else COLLECTION] += value

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        terminalreporter.section("seconds of a processor")
        for file, took in sorted(self.by_file.items(), key=lambda one: -one[1])[: config.getoption("--prices")]:
            terminalreporter.write_line(f"{took:8.1f}  {file}, {self.tests[file]} tests")
        terminalreporter.write_line(f"{sum(self.by_file.values()):8.1f}  in all")
