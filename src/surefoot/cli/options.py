"""The options of the commands; options that several commands share are grouped into records."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from surefoot.cli.guard import UsageError, check_destination
from surefoot.cli.zoo_names import complete_model

MODEL_HELP = (
    "A name of the zoo (surefoot models lists them; options behind @, as in mlp@sizes=64,32,10@activation=tanh), "
    "package.module:callable, hf:DIRECTORY or hf:config.json of a Hugging Face model, or a .pt2 file of "
    "torch.export."
)


def _option(panel: str | None, metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, help=text)


_batch = partial(_option, "Model and batch")
_set = partial(_option, "What is certified")
_run = partial(_option, "Training")
_output = partial(_option, "Output")

Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model)]
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help=f"{MODEL_HELP} Files of weights behind a model are checkpoints of it.",
        autocompletion=complete_model,
    ),
]
Batch = Annotated[
    int | None,
    _batch("N", "Number of samples. Default: all data, else 16 random ones, or 128 where only the shape matters."),
]
Input = Annotated[
    list[str] | None,
    _batch("SHAPE", "Shape of the input, samples first: 8,3,32,32. Once for each input of the model.", "--input"),
]
Data = Annotated[
    str | None,
    _batch(
        "NAME|FILE",
        "digits, mnist-5k, a .pt, .npz or .safetensors file with tensors x and y, or a .csv or .npy file.",
    ),
]
Weights = Annotated[Path | None, _batch("FILE", "Weights: .safetensors, or a torch.save of tensors only.")]
Smooth = Annotated[
    bool, _batch("", "Replace ReLU by soft-plus, max-pooling by average pooling, … (surefoot.smooth).", "--smooth")
]
Eval = Annotated[
    bool, _batch("", "In evaluation mode: no dropout, running statistics in batch normalisation.", "--eval")
]
Seed = Annotated[int, _batch("N", "Seed of random weights, random inputs and searches.")]
Device = Annotated[str | None, _batch("NAME", "Where to compute: cpu, cuda, cuda:1. Default: cpu.")]
Loss = Annotated[str, _batch("NAME", "The loss: cross-entropy, square, …")]
Samples = Annotated[int, _batch("N", "Number of samples, a random part of the data.")]


Steps = Annotated[int, _run("N", "Number of steps in all, those of a checkpoint included.")]

Converging = Annotated[
    str,
    _option(
        None, "NAME", "Whose convergence is proved: gauss-newton, damped, gradient, momentum, stochastic, newton."
    ),
]
RidgeWeight = Annotated[float, _option(None, "X", "Weight of the ridge ½‖u‖² that is added.", "--ridge")]

Kappa = Annotated[
    float, _option(None, "κ", "Weight of ½‖v‖² in the quadratic models; halving it lengthens steps.")
]
Search = Annotated[str | None, _option(None, "TEXT", "Only those that mention this text.", "--search", "-s")]
Json = Annotated[bool, _output("", "Print one JSON document; of several certificates one per line.", "--json")]
Report = Annotated[Path | None, _output("FILE.html", "Also write a page to look at.")]
WhatIf = Annotated[
    bool,
    _output("", "With --report: also other radii, soft-plus and layer normalisation, side by side.", "--what-if"),
]


@dataclass(frozen=True)
class Source:
    """Where the data and the weights of a model come from."""

    data: Data = None
    weights: Weights = None
    smooth: Smooth = False
    evaluation: Eval = False
    seed: Seed = 0
    device: Device = None


@dataclass(frozen=True)
class Request(Source):
    """The options of ``certify`` and ``compare``; other commands use it with defaults.

    ``numbers`` is not an option: it says whether a command needs numbers, and not only shapes.
    """

    batch: Batch = None
    inputs: Input = None
    domain: Annotated[
        Literal["product", "ball"] | None,
        _set(
            "product|ball",
            "Every layer in its ball, or all in one. Default: product around zero, ball around weights.",
        ),
    ] = None
    radius: Annotated[
        float | None, _set("R", "Radius of the balls. Default: 1 around zero, 0.1 around weights.")
    ] = None
    center: Annotated[
        Literal["zero", "weights"] | None,
        _set(
            "zero|weights",
            "Centre of the balls; zero needs no weights. Default: weights, if given or with --data.",
        ),
    ] = None
    around_weights: Annotated[bool, _set("", "The same as --center weights.", "--around-weights")] = False
    wrt: Annotated[
        Literal["params", "input"], _set("params|input", "What varies: the parameters or the input.")
    ] = "params"
    objective: Annotated[
        str | None, _set("NAME", "Certify a loss of the outputs on --data: cross-entropy, square, …")
    ] = None
    constants: Annotated[
        Literal["certified", "paper", "both"],
        _set("certified|paper|both", "Proved ones, the paper's as printed, or both."),
    ] = "certified"
    input_norm: Annotated[
        float | None,
        _set(
            "X",
            "Bound on the norm of the stacked batch. Default: that of the data; 1 where only the shape matters.",
        ),
    ] = None
    estimate: Annotated[
        bool, _set("", "Also search for lower bounds, so that the truth is between the two.", "--estimate")
    ] = False
    numbers: bool = False

    def __post_init__(self) -> None:
        if self.around_weights and self.center == "zero":
            raise UsageError("--around-weights and --center zero contradict each other")
        if self.batch is not None and self.batch < 1:
            raise UsageError(f"--batch is at least 1, got {self.batch}")
        if self.batch is not None and self.inputs:
            raise UsageError("--batch and --input both say how many samples there are: give one of them")
        if not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"--seed is a whole number of 64 bits, got {self.seed}")
        if self.input_norm is not None and not 0 <= self.input_norm < math.inf:
            raise UsageError(f"--input-norm is a finite number ≥ 0, got {self.input_norm}")
        if self.input_norm is not None and self.wrt == "input":
            raise UsageError(
                "--input-norm bounds an input that is fixed; with --wrt input give --radius and --center"
            )

    @property
    def is_centred(self) -> bool:
        """Whether the centre is the present point; by default if the user gives weights or data."""
        if self.center is not None or self.around_weights:
            return self.center != "zero"
        return self.domain == "ball" or self.wrt == "input" or bool(self.weights or self.data)

    @property
    def needs_numbers(self) -> bool:
        """Whether shapes alone are not enough."""
        return bool(
            self.weights or self.data or self.numbers or self.estimate or self.is_centred or self.wrt == "input"
        )

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of ``--input``."""
        return tuple(map(shape, self.inputs or ()))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of constants to compute."""
        return ("certified", "paper") if self.constants == "both" else (self.constants,)


@dataclass(frozen=True)
class Sweep:
    """The options of ``certify`` and ``compare`` for many models or checkpoints."""

    workers: Annotated[
        int, _output("N", "How many are certified at the same time, in processes of their own.")
    ] = 1
    log: Annotated[Path | None, _output("FILE.jsonl", "Write each as a line of JSON as it finishes.")] = None
    resume: Annotated[bool, _output("", "Keep what stands in --log, and certify only the rest.", "--resume")] = (
        False
    )

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"--workers is at least 1, got {self.workers}")
        if self.resume and self.log is None:
            raise UsageError("--resume goes on with the file of --log: name it")
        check_destination(self.log, "--log", (".jsonl",))


@dataclass(frozen=True)
class Start(Source):
    """The starting point of ``train`` and ``step``."""

    data: Data = "digits"
    model: Model = "mlp@activation=tanh"
    objective: Loss = "cross-entropy"
    single: Annotated[bool, _batch("", "Single precision; double by default.", "--single")] = False


@dataclass(frozen=True)
class Run:
    """The options of ``train``."""

    optimizer: Annotated[
        Literal["certified", "gauss-newton", "newton"],
        _run("NAME", "certified (descent without a learning rate, proved), gauss-newton or newton."),
    ] = "certified"
    damping: Annotated[
        Literal["adapted", "certified"],
        _run("NAME", "Of gauss-newton and newton: adapted (by the loss after a step) or certified (before it)."),
    ] = "adapted"
    steps: Steps = 100
    batch: Annotated[
        int | None, _run("N", "Samples per step. Default: all; with fewer, each step is proved for its own batch.")
    ] = None
    test: Annotated[float, _run("PART", "Part of the data that is kept for testing.")] = 0.25
    save: Annotated[Path | None, _run("FILE", "Write the weights: .safetensors or .pt.")] = None
    checkpoint: Annotated[
        Path | None, _run("FILE.pt", "Resume from this file if it exists; keep it up to date.")
    ] = None
    every: Annotated[int, _run("N", "Steps between two checkpoints.")] = 25
    log: Annotated[Path | None, _run("FILE.jsonl", "Write every step as a line of JSON while training.")] = None

    def __post_init__(self) -> None:
        if (
            self.steps < 0
            or self.every < 1
            or not 0 <= self.test < 1
            or (self.batch is not None and self.batch < 1)
        ):
            raise UsageError("--steps is at least 0, --every and --batch at least 1, and --test between 0 and 1")


def shape(text: str) -> tuple[int, ...]:
    """``8,3,32,32`` as numbers.

    >>> shape("8,3,32,32"), shape("8x64")
    ((8, 3, 32, 32), (8, 64))
    """
    try:
        sides = tuple(int(side) for side in text.replace("x", ",").replace("×", ",").split(","))
    except ValueError:
        sides = ()
    if not sides or min(sides) < 1:
        raise typer.BadParameter(f"a shape reads 8,3,32,32 (samples first); got '{text}'")
    return sides
