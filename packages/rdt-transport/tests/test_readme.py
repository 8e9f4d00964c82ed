import contextlib
import io
import re
import threading
from pathlib import Path


def test_the_example_prints_what_it_says_and_leaves_no_thread():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    code, printed = re.findall(r"```(?:python|text)\n(.*?)```", text, re.DOTALL)
    before = set(threading.enumerate())
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    assert output.getvalue() == printed
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []
