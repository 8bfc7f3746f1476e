"""Certificates: how long they take, a-priori on the ``meta`` device and around the weights.

Durations are of a fresh process per model, after import (of torch.export's tracer too, which torch loads at the
first export, once per process, in about a second): capture and calculus together, with the memory the process
holds at its peak. What the first certificate of a process takes, with all that it loads, has rows of its own, in
processor time. A certificate around the weights is compared with a gradient in the same run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import nn

import surefoot as sf
from benchmarks.timing import Duration, Measurement, compare

_APRIORI = """
import time, warnings
warnings.simplefilter("ignore")
import torch, torch.export._trace
import surefoot as sf
from surefoot.certifying import certify
{imports}
with torch.device("meta"):
    model, x = {build}
start = time.perf_counter()
certificate = certify(model, x, domain=sf.ProductBall(1.0), input_norm=1.0)
assert certificate.lipschitz.is_finite
seconds = time.perf_counter() - start
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(seconds, peak / 2**20, certificate.lipschitz)
"""
_FIRST = """
import time
import torch
from torch import nn
import surefoot as sf
torch.manual_seed(0)

class Damped(nn.Module):
    def forward(self, x):
        return torch.sin(x) * torch.exp(-x**2)

def seconds(activation, certify):
    model = nn.Sequential(nn.Linear(8, 16), activation, nn.Linear(16, 3))
    start = time.process_time()
    assert certify(model, torch.randn(32, 8)).lipschitz.is_finite
    return time.process_time() - start

def network(model, x):
    return sf.certify(model, x, domain=sf.Ball(0.1))

def objective(model, x):
    return sf.certify(model, x, objective=sf.CrossEntropy(torch.zeros(32, dtype=torch.long)))

print(seconds(nn.Tanh(), {function}), seconds(Damped(), {function}) - seconds(Damped(), {function}))
"""
_RUNS = 7  # fresh processes, of which the median is taken
_LLAMA = (
    "LlamaForCausalLM(LlamaConfig(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, "
    "num_key_value_heads=8, intermediate_size=28672, vocab_size=128256)).eval(), "
    "torch.zeros(1, 16, dtype=torch.long)"
)
_MODELS = (
    ("VGG-16, 224×224, batch 128", "", "sf.zoo.vgg16(), torch.empty(128, 3, 224, 224)", 1.0),
    ("VGG-16 smooth, 224×224, batch 128", "", "sf.zoo.build('vgg16-smooth'), torch.empty(128, 3, 224, 224)", 1.0),
    ("ResNet-152, 224×224, batch 128", "", "sf.zoo.resnet152(), torch.empty(128, 3, 224, 224)", 5.0),
    (
        "Llama with 70 billion parameters, 16 tokens",
        "from transformers import LlamaConfig, LlamaForCausalLM, logging; logging.set_verbosity_error()",
        _LLAMA,
        60.0,
    ),
)


def run() -> Iterator[Measurement | Duration]:
    """The large models without data, and a perceptron around its weights."""
    for name, imports, build, target in _MODELS:
        code = _APRIORI.format(imports=imports, build=build)
        words = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        seconds, gibibytes, lipschitz = words[-3:]
        note = f"ℓ ≤ {lipschitz}, {float(gibibytes):.2f} GiB at the peak"
        yield Duration(f"{name}: a-priori certificate on meta", float(seconds), target, note)
    yield from _first()
    torch.manual_seed(0)
    model = sf.zoo.mlp((784, 256, 128, 10), activation="tanh")
    yield _local("MLP 784-256-128-10 tanh, batch 128", model, torch.randn(128, 784))


def _first() -> Iterator[Duration]:
    """The first certificate of a process, and what an activation adds that is in no table."""
    with TemporaryDirectory() as folder:  # modules are compiled in a run that does not count
        surroundings = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        for name, function in (("network on a ball", "network"), ("cross-entropy, default ball", "objective")):
            command = [sys.executable, "-c", _FIRST.replace("{function}", function)]
            runs = [
                subprocess.run(command, env=surroundings, capture_output=True, text=True, check=True).stdout
                for _ in range(1 + _RUNS)
            ]
            first, new = zip(*(map(float, run.split()) for run in runs[1:]), strict=True)
            yield Duration(f"MLP 8-16-3 tanh, {name}: first certificate of a process", median(first), 1.5)
            yield Duration(f"MLP 8-16-3, {name}: what a new activation adds", median(new), 0.2)


def _local(name: str, model: nn.Module, x: torch.Tensor) -> Measurement:
    parameters = list(model.parameters())
    slope = torch.randn_like(model(x).detach())
    domain = sf.Ball(0.01)
    return compare(
        f"{name}: certificate on a ball around the weights",
        lambda: sf.certify(model, x, domain=domain),
        "a gradient of the model",
        lambda: torch.autograd.grad(model(x), parameters, slope),
        target=10.0,
        pairs=21,
        calls=2,
    )
