import contextlib
import io
import re
from pathlib import Path


def test_the_example_prints_what_it_says() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    printed = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert code is not None and printed is not None
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code[1], "README.md", "exec"), {"__name__": "readme"})
    assert out.getvalue() == printed[1]
