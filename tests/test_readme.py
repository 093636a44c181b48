"""Every Python block of the README runs, in order, in one namespace."""

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_readmes_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 3
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)


def test_the_readme_starts_with_the_two_commands():
    head = README[: README.index("##")]
    assert head.index("make demo") < head.index("make test")
