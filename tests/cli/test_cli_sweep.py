"""``surefoot compare`` over many checkpoints: lines as they finish, failures, workers, going on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import surefoot as sf
from surefoot import zoo

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


def test_weights_stand_behind_a_model(surefoot, here):
    files = checkpoints(here)
    assert "name the model before it" in surefoot("compare", *files).stderr
    assert "at least 1" in surefoot("compare", "mlp", "--workers", "0").stderr


@pytest.mark.slow
def test_workers_give_what_one_process_gives(surefoot, here):
    files = checkpoints(here)
    asked = ("compare", MODEL, *files, "--input", "2,3", "--json")
    one, two = surefoot(*asked), surefoot(*asked, "--workers", "2", "--log", "rows.jsonl")
    assert json.loads(one.stdout) == json.loads(two.stdout)
    assert len(lines(here / "rows.jsonl")) == 4
