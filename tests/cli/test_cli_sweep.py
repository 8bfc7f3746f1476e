"""``surefoot certify`` and ``compare`` over many checkpoints: rows as they finish, failures, workers, going on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import surefoot as sf
from surefoot import zoo
from surefoot.cli import sweep
from surefoot.cli.options import Request
from surefoot.cli.sweep import Certified, Job
from surefoot.errors import SurefootError

MODEL = "mlp@sizes=3,4,2@activation=tanh"


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return zoo.build("mlp", sizes=(3, 4, 2), activation="tanh").state_dict()


def checkpoints(folder: Path) -> list[str]:
    """Three of one model, and one that does not fit."""
    (folder / "runs").mkdir()
    for k in range(3):
        save_file(weights(k), folder / f"runs/{k}.safetensors")
    save_file(nn.Linear(2, 2).state_dict(), folder / "runs/other.safetensors")
    return [f"runs/{name}.safetensors" for name in ("0", "other", "1", "2")]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_checkpoints_of_a_model(surefoot, here):
    files = checkpoints(here)
    found = surefoot("compare", MODEL, *files, "--input", "2,3", "--log", "rows.jsonl", "--json")
    assert found.exit_code == 0
    document = json.loads(found.stdout)
    assert [each["model"] for each in document["models"]] == [f"{MODEL} runs/{k}.safetensors" for k in range(3)]
    assert "do not fit the model" in document["failed"][f"{MODEL} runs/other.safetensors"]
    constants = [each["certificate"]["smoothness"] for each in document["models"]]
    assert len(set(constants)) == 3
    written = lines(here / "rows.jsonl")
    assert ["failed" in line for line in written] == [False, True, False, False]
    proved = [line["certificates"]["certified"] for line in written if "failed" not in line]
    assert [each["smoothness"] for each in proved] == constants


def test_a_sweep_goes_on_where_it_stopped(surefoot, here, monkeypatch):
    files = checkpoints(here)
    asked = ("compare", MODEL, *files, "--input", "2,3", "--log", "rows.jsonl", "--json")
    first = surefoot(*asked)
    whole = lines(here / "rows.jsonl")
    half = (here / "rows.jsonl").read_text().splitlines()[:2]
    (here / "rows.jsonl").write_text("\n".join([*half, '{"key": "cut of']))
    save_file(weights(9), here / files[3])
    certified, certify = [], sf.certify

    def counted(*given, **options):
        certified.append(given)
        return certify(*given, **options)

    monkeypatch.setattr(sf, "certify", counted)
    again = surefoot(*asked, "--resume")
    assert len(certified) == 2  # one was there, one does not fit
    before, after = (json.loads(each.stdout)["models"] for each in (first, again))
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False]  # the last file changed
    assert len(lines(here / "rows.jsonl")) == len(whole)
    assert surefoot("compare", MODEL, "--resume").exit_code == 2


def test_a_sweep_does_not_go_on_with_other_data(surefoot, here):
    asked = ("compare", MODEL, "--data", "data.pt", "--log", "rows.jsonl", "--json")
    found = []
    for size in (1.0, 5.0):
        torch.save({"x": torch.full((4, 3), size)}, here / "data.pt")
        found.append([surefoot(*asked), surefoot(*asked, "--resume")])
    assert all(each.exit_code == 0 for pair in found for each in pair)
    (first, same), (other, last) = ([json.loads(each.stdout)["models"] for each in pair] for pair in found)
    assert first == same != other == last
    torch.save({"x": torch.ones(4, 3)}, here / "data.pt")
    assert json.loads(surefoot(*asked, "--resume").stdout)["models"] == first


def test_weights_stand_behind_a_model(surefoot, here):
    files = checkpoints(here)
    assert "name the model before it" in surefoot("compare", *files).stderr
    assert "at least 1" in surefoot("compare", "mlp", "--workers", "0").stderr


def test_certify_shows_each_as_it_finishes(surefoot, here):
    files = checkpoints(here)
    asked = ("certify", MODEL, *files, "--input", "2,3")
    compared = json.loads(surefoot("compare", *asked[1:], "--json").stdout)
    found = surefoot(*asked, "--json", "--log", "rows.jsonl")
    assert found.exit_code == 1  # one does not fit
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert rows == lines(here / "rows.jsonl")
    shown = [row["certificates"]["certified"] for row in rows if "failed" not in row]
    assert shown == [each["certificate"] for each in compared["models"]]
    assert [row["name"] for row in rows if "failed" in row] == [f"{MODEL} runs/other.safetensors"]
    table = surefoot(*asked, "--log", "rows.jsonl", "--resume")
    assert "there is no certificate for" in table.stderr
    names = [f"{MODEL} runs/{k}.safetensors" for k in range(3)]
    assert [line.split("  ")[0] for line in table.stdout.splitlines()[1:]] == names
    alone = surefoot("certify", MODEL, files[0], "--input", "2,3", "--json")
    assert json.loads(alone.stdout)["certificate"] == shown[0]
    assert surefoot("certify", MODEL, *files, "--what-if", "--report", "a.html").exit_code == 2


def test_an_unexpected_error_does_not_lose_the_others(surefoot, here, monkeypatch):
    files, certify = checkpoints(here), sf.certify

    def fails_once(model, *given, **options):
        if torch.equal(model.state_dict()["0.weight"], weights(1)["0.weight"]):
            raise ZeroDivisionError("by nothing")
        return certify(model, *given, **options)

    assert "0.weight" in weights(0)
    monkeypatch.setattr(sf, "certify", fails_once)
    for command in ("compare", "certify"):
        found = surefoot(command, MODEL, *files, "--input", "2,3", "--log", "rows.jsonl")
        assert "ZeroDivisionError: by nothing" in found.stderr
        assert ["failed" in line for line in lines(here / "rows.jsonl")] == [False, True, True, False]


def test_a_full_disk_leaves_whole_lines(surefoot, here, monkeypatch):
    files = checkpoints(here)
    asked = ("certify", MODEL, *files, "--input", "2,3", "--log", "rows.jsonl")
    surefoot(*asked)
    before = lines(here / "rows.jsonl")
    opened = Path.open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def write(self, text):
            self.file.write(text[:50])

        def __exit__(self, *error):
            self.file.close()
            raise OSError(28, "No space left on device")

    def open_full(path, mode="r", *given, **options):
        file = opened(path, mode, *given, **options)
        return Full(file) if mode == "a" else file

    monkeypatch.setattr(Path, "open", open_full)
    found = surefoot(*asked, "--resume")
    assert found.exit_code == 2
    assert "rows.jsonl could not be written: [Errno 28] No space left" in found.stderr
    assert lines(here / "rows.jsonl") == [line for line in before if "failed" not in line]


def work(job: Job) -> Certified:
    """Stands for a certificate; one of them ends its process."""
    if job.model == "deadly":
        os.kill(os.getpid(), signal.SIGKILL)
    return Certified(job.model, "", "", None, {})


def test_a_worker_that_is_killed_loses_its_job_alone():
    jobs = [Job(name, Request()) for name in ("a", "deadly", "b", "c")]
    found = {job.model: result for job, result in sweep.finished(jobs, work, 2)}
    assert {name for name, result in found.items() if isinstance(result, SurefootError)} == {"deadly"}
    assert {result.name for result in found.values() if isinstance(result, Certified)} == {"a", "b", "c"}


@pytest.mark.slow
def test_workers_give_what_one_process_gives(surefoot, here):
    files = checkpoints(here)
    asked = ("compare", MODEL, *files, "--input", "2,3", "--json")
    one, two = surefoot(*asked), surefoot(*asked, "--workers", "2", "--log", "rows.jsonl")
    assert json.loads(one.stdout) == json.loads(two.stdout)
    assert len(lines(here / "rows.jsonl")) == 4
