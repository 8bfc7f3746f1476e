"""The command as a process: streams, exit codes, colour, imports."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from surefoot.cli.guard import Outcome, explain

SUREFOOT = [sys.executable, "-m", "surefoot"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([*SUREFOOT, *arguments], capture_output=True, text=True, env=settings, check=False)


LAZY = """
import sys
from surefoot.cli import main
sys.argv = ["surefoot", *{arguments!r}]
try:
    main()
finally:
    heavy = sorted(set(sys.modules) & {{"torch", "numpy", "jinja2", "flint", "surefoot.zoo"}})
    print("imported:", heavy, file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["certify", "--help"], ["--version"], ["models"], ["certify"]])
def test_nothing_heavy_is_imported_to_answer_at_once(arguments):
    found = subprocess.run(
        [sys.executable, "-c", LAZY.format(arguments=arguments)], capture_output=True, text=True, check=False
    )
    assert found.stderr.splitlines()[-1] == "imported: []"
    assert found.returncode == (2 if arguments == ["certify"] else 0)


def test_completion_knows_the_zoo_without_torch():
    found = subprocess.run(
        [sys.executable, "-c", LAZY.format(arguments=[])],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "_SUREFOOT_COMPLETE": "complete_bash",
            "COMP_WORDS": "surefoot certify vgg",
            "COMP_CWORD": "2",
        },
    )
    assert found.stdout.split() == ["vgg16", "vgg16-batchnorm", "vgg16-smooth"]
    assert found.stderr.splitlines()[-1] == "imported: []"


def test_the_result_is_on_standard_output_and_the_rest_is_not():
    found = run("certify", "mlp@activation=relu", "--around-weights", "--json", FORCE_COLOR="", NO_COLOR="1")
    assert found.returncode == 1
    assert json.loads(found.stdout)["certified"] is False
    assert found.stderr.startswith("note: ")
    assert "\x1b" not in found.stdout + found.stderr


def test_an_error_is_a_sentence_without_colour_off_a_terminal():
    found = run("certify", "mlp", "--report", "no-such-folder/page.html")
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr.startswith("error: --report no-such-folder/page.html: there is no folder")
    assert "\x1b" not in found.stderr


def test_a_reader_that_leaves_early_is_no_error():
    process = subprocess.Popen([*SUREFOOT, "models", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_a_terminal_without_unicode_gets_an_answer():
    found = run("models", "--search", "resnet18", PYTHONIOENCODING="ascii")
    assert found.returncode == 0
    assert "3?3 convolutions" in found.stdout


def test_a_ctrl_c_that_meets_a_destructor_ends_the_command() -> None:
    """Python drops what a destructor raises: the command would go on for ever."""
    program = """
import time
import surefoot.cli as cli


class Met:
    def __del__(self):
        raise KeyboardInterrupt


def app(prog_name):
    Met()
    time.sleep(60)


cli.app = app
cli.main()
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=50).returncode == 130


FULL = """
import resource, sys, tempfile
from surefoot.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    main()
finally:
    assert tempfile.tempdir is None
"""


@pytest.mark.parametrize(
    "arguments",
    [
        "certify mlp@sizes=3,4,2 --input 2,3 --report {}/page.html",
        "train --steps 1 --checkpoint {}/run.pt --every 1",
    ],
)
def test_where_no_byte_can_be_written_the_model_is_not_blamed(arguments, tmp_path):
    """Tracing needs no disk; what does says so."""
    found = subprocess.run(
        [sys.executable, "-c", FULL, *arguments.format(tmp_path).split()],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 2, found.stderr
    assert "could not be written" in found.stderr
    assert "Traceback" not in found.stderr
    assert not any(file.stat().st_size for file in tmp_path.iterdir())


def test_a_full_disk_is_no_fault_of_the_model(capsys):
    assert explain(OSError(errno.ENOSPC, "No space left on device")) is Outcome.USAGE
    assert "could not be written" in capsys.readouterr().err
    assert explain(FileNotFoundError("gone")) is Outcome.FAULT
