"""The page of the command line, written from the commands themselves when the documentation is built."""

from __future__ import annotations

import inspect
import re
from typing import Any

import typer

from surefoot.cli.commands import app

INTRODUCTION = """# Command line

```console
$ surefoot certify vgg16-smooth --batch 128 --radius 1
$ surefoot certify models.py:make_model --input 8,3,32,32 --json
$ surefoot compare vgg16 vgg16-smooth vgg16-batchnorm --report out.html
```

Results are on standard output, everything else on standard error. `--json` prints exactly one document. Exit
codes: 0 proved, 1 not proved (∞, or steps that were only measured), 2 usage, 3 unsupported operation.

A model is a name of the zoo (`mlp` or `zoo:mlp`, options behind `@`), `file.py:function` or
`package.module:function`. Data are a name or a `.csv`, `.npy`, `.npz`, `.pt` or `.safetensors` file. Without
weights and data only shapes are known: what is certified then holds for all weights in the set.
"""


def page() -> str:
    """The page, in Markdown: one section per command."""
    group: Any = typer.main.get_command(app)
    return "\n".join([INTRODUCTION, *(_section(name, command) for name, command in group.commands.items())])


def _section(name: str, command: Any) -> str:
    text, _, examples = re.sub("Examples?:", "\f", inspect.cleandoc(command.help or "")).partition("\f")
    lines = [f"## surefoot {name}", "", text.replace("\b", "").strip(), ""]
    shown = [line.replace("\b", "").strip() for line in examples.splitlines()]
    if any(shown):
        lines += ["```console", *(f"$ {line}" for line in shown if line), "```", ""]
    for parameter in command.params:
        described = getattr(parameter, "help", None)
        if not described or parameter.name == "help":
            continue
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
        if not names.startswith("-"):
            names = parameter.metavar or names.upper()
        lines += [f"`{names}`", f": {described.strip()}", ""]
    return "\n".join(lines)
