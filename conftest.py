"""What all tests share: no timed property tests, and one closing summary for two runs of pytest.

The second run adds the counts that the first one wrote.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine must not make a property test fail.
settings.register_profile("rdt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rdt")

COUNTED = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("two runs, one summary")
    group.addoption("--write-counts", type=Path, help="write this run's outcome counts there")
    group.addoption("--add-counts", type=Path, help="add an earlier run's counts to the summary")
    help = "run the searches of the protocol this many times as long"
    parser.getgroup("hypothesis").addoption("--fuzz", type=int, default=None, help=help)


def pytest_configure(config: pytest.Config) -> None:
    if (times := config.getoption("--fuzz")) is not None:
        os.environ["RDT_FUZZ"] = str(times)  # before any test module is imported


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--write-counts")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if path is not None and reporter is not None and not hasattr(session.config, "workerinput"):
        counts = {key: len(reporter.stats.get(key, ())) for key in COUNTED}
        path.write_text(json.dumps(counts))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: after the short summary of this run
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    result = yield
    path = terminalreporter.config.getoption("--add-counts")
    if path is not None and path.exists():
        for key, count in json.loads(path.read_text()).items():
            if count:
                terminalreporter.write_line(f"{count} {key} in the run before this one")
                terminalreporter.stats.setdefault(key, []).extend([_Earlier()] * count)
    return result


class _Earlier:
    """Stands for one outcome of the earlier run; its own report was printed there."""

    count_towards_summary = True
