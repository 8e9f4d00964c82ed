"""All tests: what needs no engine over two processes, then the engine tests in one; one summary.

Arguments go to both runs. The second run's closing line counts both (see `conftest.py`).
"""

import subprocess
import sys
import tempfile
from pathlib import Path

NO_TESTS = 5  # pytest's exit status when a selection is empty


def run(processes: int, selection: str, option: str, counts: Path, arguments: list[str]) -> int:
    """One run of pytest; its exit status."""
    named = any(not argument.startswith("-") for argument in arguments)
    targets = [] if named else ["packages", "tests"]
    command = [sys.executable, "-m", "pytest", "-n", str(processes), "-m", selection]
    return subprocess.run([*command, option, str(counts), *targets, *arguments]).returncode


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.json"
        codes = (
            run(2, "not engine and not gpu", "--write-counts", counts, arguments),
            run(0, "engine and not gpu", "--add-counts", counts, arguments),
        )
    failed = [code for code in codes if code not in (0, NO_TESTS)]
    return max(failed, default=min(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
