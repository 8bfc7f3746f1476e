"""The command as a process: streams, exit codes, colour, imports; and what it lists."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import surefoot as sf
from surefoot.cli.commands import app
from surefoot.operations import rules

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


@pytest.mark.parametrize("arguments", [["--help"], ["certify", "--help"], ["--version"], ["certify"]])
def test_nothing_heavy_is_imported_to_answer_at_once(arguments):
    result = subprocess.run(
        [sys.executable, "-c", LAZY.format(arguments=arguments)], capture_output=True, text=True, check=False
    )
    assert result.stderr.splitlines()[-1] == "imported: []"
    assert result.returncode == (2 if arguments == ["certify"] else 0)


def test_the_result_is_on_standard_output_and_the_rest_is_not():
    result = run("certify", "mlp@activation=relu", "--center", "weights", "--json", FORCE_COLOR="", NO_COLOR="1")
    assert result.returncode == 1
    assert json.loads(result.stdout)["certified"] is False
    assert result.stderr.startswith("note: ")
    assert "\x1b" not in result.stdout + result.stderr


def test_a_reader_that_leaves_early_is_no_error():
    process = subprocess.Popen([*SUREFOOT, "rules", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_a_terminal_without_unicode_gets_an_answer():
    result = run("certify", "mlp", "--batch", "2", "--json", PYTHONIOENCODING="ascii")
    content = json.loads(result.stdout)
    assert content["input"] == "2×16"
    assert sf.Certificate.from_dict(content["certificate"]).smoothness.is_finite
    assert "?" in run("certify", "mlp", "--batch", "2", PYTHONIOENCODING="ascii").stdout


FULL = """
import resource, sys
from surefoot.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
main()
"""


def test_where_no_byte_can_be_written_the_model_is_not_blamed(tmp_path):
    arguments = f"certify mlp@sizes=3,4,2 --input 2,3 --report {tmp_path}/page.html".split()
    result = subprocess.run([sys.executable, "-c", FULL, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert "could not be written" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_every_command_explains_itself_with_an_example(surefoot):
    names = [command.callback.__name__ for command in app.registered_commands]
    assert names == ["certify", "compare", "train", "converge", "rules", "doctor"]
    for name in names:
        result = surefoot(name, "--help")
        assert result.exit_code == 0
        assert f"surefoot {name}" in result.stdout.split("Example", 1)[1]
    assert surefoot("--version").stdout == f"surefoot {sf.__version__}\n"


def test_rules_lists_the_registry(surefoot):
    entries = json.loads(surefoot("rules", "--json").stdout)
    assert {entry["operation"] for entry in entries} == set(rules())
    assert all(entry["claim"] and "`" not in entry["claim"] and "\n" not in entry["claim"] for entry in entries)
    some = surefoot("rules", "--search", "POOL")
    assert "aten.avg_pool2d" in some.stdout
    assert "aten.tanh" not in some.stdout
    nothing = surefoot("rules", "--search", "quantum")
    assert nothing.stdout == ""
    assert "quantum" in nothing.stderr


def test_doctor_is_well_and_says_what_is_wrong(surefoot, monkeypatch):
    document = json.loads(surefoot("doctor", "--json").stdout)
    assert document["packages"]["torch"] == torch.__version__
    assert document["passed"]
    monkeypatch.setattr(sf, "certify", lambda *_, **__: 1 / 0)
    result = surefoot("doctor")
    assert result.exit_code == 1
    assert "FAILED: ZeroDivisionError" in result.stdout
