"""Run the code of the pages and write what it prints below it, so that no output is pasted by hand.

In a page, every block of Python is run, all of a page in one namespace. What a block prints stands below it,
after a marker with a name::

    <!-- output: name -->
    ```text
    …
    ```

``python docs/generate.py`` rewrites the pages; ``tests/test_readme.py`` fails if that would change one.
"""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_GUIDES = "index quickstart reading loops frameworks huggingface pinn gpu faq chains"
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{page}.md" for page in _GUIDES.split()))

_BLOCK = re.compile(
    r"```python\n(?P<code>.*?)```"
    r"(?P<marker>\n+<!-- output: [\w-]+ -->\n)?"
    r"(?P<old>(?<=-->\n)```text\n.*?```)?",
    re.DOTALL,
)


def regenerated(text: str, name: str = "page") -> str:
    """The page with every output as the code prints it now.

    Args:
        text: the page.
        name: what errors call it.

    Raises:
        ValueError: if a block without a marker prints, or one with a marker prints nothing.

    >>> page = "```python\\nprint(1 + 1)\\n```\\n<!-- output: sum -->\\n"
    >>> print(regenerated(page).replace("`", "'").rstrip())
    '''python
    print(1 + 1)
    '''
    <!-- output: sum -->
    '''text
    2
    '''
    """
    namespace: dict[str, Any] = {"__name__": name}

    def run(block: re.Match[str]) -> str:
        first = text.count("\n", 0, block.start("code"))
        printed = io.StringIO()
        with redirect_stdout(printed):
            # Lines are numbered as in the page, so that an error points at the right place.
            exec(compile("\n" * first + block["code"], name, "exec"), namespace)
        output, marker = printed.getvalue().rstrip(), block["marker"]
        if bool(output) != bool(marker):
            raise ValueError(
                f"{name}, line {first}: the block prints {'something' if output else 'nothing'} "
                f"and has {'a' if marker else 'no'} marker '<!-- output: name -->' below it"
            )
        if not marker:
            return block[0]
        lines = "\n".join(line.rstrip() for line in output.splitlines())
        end = "" if block["old"] else "\n"
        return f"```python\n{block['code']}```{marker}```text\n{lines}\n```{end}"

    return _BLOCK.sub(run, text)


def main() -> None:
    """Rewrite the pages in place."""
    for name in PAGES:
        page = ROOT / name
        page.write_text(regenerated(page.read_text(encoding="utf-8"), name), encoding="utf-8")


if __name__ == "__main__":
    main()
