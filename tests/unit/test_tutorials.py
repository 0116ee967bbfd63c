"""The runner of tutorials: it fails where a block fails, and tells which; its short forms fit their pages."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.tutorials import Block, blocks_of, run_page

PAGE = """# A page

```sh
echo first > a.txt
cat a.txt
```

```
shown, not run
```

```python
from pathlib import Path
print(Path("a.txt").read_text(), end="")
```

Text.

```sh
{last}
```
"""


def write(folder: Path, last: str) -> Path:
    page = folder / "page.md"
    page.write_text(PAGE.format(last=last))
    return page


def test_a_page_runs_in_order_and_its_output_is_returned(tmp_path: Path) -> None:
    page = write(tmp_path, "raycap --version")
    assert blocks_of(page.read_text())[0] == Block(4, "sh", "echo first > a.txt\ncat a.txt\n")
    outputs = run_page(page, tmp_path, {"first": "changed"})
    assert outputs[:2] == ["changed\n", "changed\n"] and outputs[2].startswith("raycap ")


@pytest.mark.parametrize("last", ["false", "false | true", "echo $no_such_variable", "raycap no-such-command"])
def test_a_block_that_fails_is_named_with_its_line(tmp_path: Path, last: str) -> None:
    with pytest.raises(AssertionError, match=r"block 3 of page\.md, line 20, ended with exit code"):
        run_page(write(tmp_path, last), tmp_path, {})


def test_a_python_block_that_fails_is_named(tmp_path: Path) -> None:
    page = write(tmp_path, "true")
    page.write_text(page.read_text().replace('"a.txt"', '"b.txt"'))
    with pytest.raises(AssertionError, match=r"(?s)block 2 of page\.md, line 13.*No such file"):
        run_page(page, tmp_path, {})


def test_a_change_that_fits_no_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no block has the text 'Text"):
        run_page(write(tmp_path, "true"), tmp_path, {"Text.": ""})


def test_processes_in_the_background_are_ended(tmp_path: Path) -> None:
    outputs = run_page(write(tmp_path, "sleep 1000 &\necho $!"), tmp_path, {})
    with suppress(psutil.NoSuchProcess):
        sleeper = psutil.Process(int(outputs[2]))
        for _ in range(200):  # a process ends some time after its signal
            if sleeper.status() == psutil.STATUS_ZOMBIE:
                return
            time.sleep(0.05)
        raise AssertionError("the process goes on")
