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
$ surefoot certify package.module:make_model --input 8,3,32,32 --json
$ surefoot compare vgg16 vgg16-smooth vgg16-batchnorm --report out.html
```

Results are on standard output, everything else on standard error. `--json` prints exactly one document
(`certify` of several models prints one per line, as each finishes). Exit
codes: 0 certified, 1 not certified (∞), 2 usage, 3 unsupported operation. `surefoot --install-completion`
completes commands, options and names of models in the shell.

A model is a name of the zoo, `package.module:callable`, a `.pt2` file of `torch.export`, or `hf:` and the
directory or `config.json` of a Hugging Face model on your disk. Data are a name or a `.csv`, `.npy`, `.npz`,
`.pt` or `.safetensors` file. `train --log run.jsonl` writes one line of JSON per step while it trains.

Defaults can stand in a file, with one table per command:

```toml
# surefoot --config surefoot.toml train
[train]
steps = 200
batch = 500
```
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
