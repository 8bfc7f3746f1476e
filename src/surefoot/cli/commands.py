"""The commands, their arguments and their help. Nothing imports torch: the work is in modules of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from surefoot import __version__
from surefoot.cli import output
from surefoot.cli.frame import Outcome, UsageError, check_destination, guarded

app = typer.Typer(
    name="surefoot",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 proved, 1 not proved (∞), 2 usage, 3 unsupported operation, 70 unexpected error, "
    "130 interrupted. Results are on standard output, everything else on standard error.",
)


def _option(panel: str, metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, help=text)


_batch, _set = partial(_option, "Model and batch"), partial(_option, "What is certified")
_run, _output = partial(_option, "Run"), partial(_option, "Output")

MODEL_HELP = (
    "zoo:name or just name (options behind @, as in mlp@sizes=64,32,10@activation=tanh), file.py:function or "
    "package.module:function."
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help=MODEL_HELP)]
Json = Annotated[bool, _output("", "Print one JSON document.", "--json")]
Report = Annotated[Path | None, _output("FILE.html", "Also write a page to look at.")]
Steps = Annotated[int, _run("N", "Number of steps.")]
Samples = Annotated[int | None, _run("N", "Samples per step. Default: all.")]
Loss = Annotated[str, _run("NAME", "The loss: cross-entropy, square, …")]


@dataclass(frozen=True)
class Source:
    """Where the data and the weights of a model come from."""

    data: Annotated[
        str | None, _batch("NAME|FILE", "digits, mnist-5k, or a .pt, .npz, .safetensors, .csv or .npy file.")
    ] = None
    weights: Annotated[Path | None, _batch("FILE", "Weights: .safetensors, or a torch.save of tensors.")] = None
    smooth: Annotated[bool, _batch("", "Replace ReLU by soft-plus and so on (surefoot.smooth).", "--smooth")] = (
        False
    )
    evaluation: Annotated[bool, _batch("", "In evaluation mode: no dropout, running statistics.", "--eval")] = (
        False
    )
    seed: Annotated[int, _batch("N", "Seed of random weights, random inputs and searches.")] = 0

    def __post_init__(self) -> None:
        if not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"--seed is a whole number of 64 bits, got {self.seed}")


@dataclass(frozen=True)
class Question(Source):
    """The options of ``certify`` and ``compare``."""

    batch: Annotated[int | None, _batch("N", "Samples. Default: all data, else 16, or 128 for shapes.")] = None
    input: Annotated[str | None, _batch("SHAPE", "Shape of the input, samples first: 8,3,32,32.")] = None
    domain: Annotated[
        Literal["product", "ball"] | None,
        _set("product|ball", "Every layer in its ball (default around zero), or all in one."),
    ] = None
    radius: Annotated[float | None, _set("R", "Of the balls. Default: 1 around zero, 0.1 around weights.")] = None
    center: Annotated[
        Literal["zero", "weights"] | None, _set("zero|weights", "Default: weights, if given or with --data.")
    ] = None
    wrt: Annotated[Literal["params", "input"], _set("params|input", "What varies.")] = "params"
    objective: Annotated[str | None, _set("NAME", "A loss of the outputs on --data: cross-entropy, …")] = None
    constants: Annotated[
        Literal["certified", "paper"], _set("certified|paper", "Proved ones, or the paper's as printed.")
    ] = "certified"
    input_norm: Annotated[
        float | None, _set("X", "Bound on the norm of the batch. Default: its own; 1 for shapes alone.")
    ] = None
    estimate: Annotated[bool, _set("", "Also search for lower bounds.", "--estimate")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch is not None and self.batch < 1:
            raise UsageError(f"--batch is at least 1, got {self.batch}")
        if self.batch is not None and self.input:
            raise UsageError("--batch and --input both say how many samples there are: give one of them")
        if self.input_norm is not None and not 0 <= self.input_norm < float("inf"):
            raise UsageError(f"--input-norm is a finite number ≥ 0, got {self.input_norm}")
        if self.input_norm is not None and self.wrt == "input":
            raise UsageError("--input-norm is for a fixed input; with --wrt input give --radius and --center")

    @property
    def is_centred(self) -> bool:
        """Whether the centre is the present point; by default if the user gives weights or data."""
        if self.center is not None:
            return self.center == "weights"
        return self.domain == "ball" or self.wrt == "input" or bool(self.weights or self.data)

    @property
    def needs_numbers(self) -> bool:
        """Whether shapes alone are not enough."""
        return bool(self.weights or self.data or self.estimate or self.is_centred)


def _work(name: str) -> Any:
    """The module that does the work of a command; it imports torch."""
    with output.working("loading"):
        return import_module(f"surefoot.cli.{name}")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"surefoot {__version__}")
        raise typer.Exit


@app.callback()
def surefoot(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", metavar="", is_eager=True, callback=_show_version, help="Show the version."
        ),
    ] = False,
) -> None:
    """Learning rates with a proof: smoothness certificates and proved steps for PyTorch models.

    Begin with: surefoot certify mlp, surefoot train, surefoot compare vgg16 vgg16-smooth vgg16-batchnorm.
    """


@app.command()
@guarded
def certify(model: Model, question: Question, json: Json = False, report: Report = None) -> Outcome:
    """Bound a model, its slope and its curvature over a set of weights, and say which step sizes are safe.

    Exit code 0 if the smoothness is finite and proved, 1 if it is infinite or not proved.

    Examples:

      surefoot certify vgg16-smooth --batch 128 --radius 1

      surefoot certify mlp --data digits --objective cross-entropy --radius 0.03 --estimate

      surefoot certify models.py:make_model --input 8,3,32,32 --json
    """
    check_destination(report, "--report", ".html")
    return _work("certifying").certify(model, question, json, report)


@app.command()
@guarded
def compare(models: Models, question: Question, json: Json = False, report: Report = None) -> Outcome:
    """Certify several models and put the constants side by side; without weights, shapes alone are compared.

    Ratios are to the first model whose constant is finite. Exit code 0 if at least one model is certified.

    Examples:

      surefoot compare vgg16 vgg16-smooth vgg16-batchnorm

      surefoot compare vgg16-smooth vgg16-batchnorm@batch_norm=100 --report page.html
    """
    check_destination(report, "--report", ".html")
    return _work("certifying").compare(models, question, json, report)


@app.command()
@guarded
def train(
    source: Source,
    model: Model = "mlp@activation=tanh",
    objective: Loss = "cross-entropy",
    optimizer: Annotated[
        Literal["certified", "gauss-newton", "newton"], _run("NAME", "certified (every step is proved), …")
    ] = "certified",
    steps: Steps = 100,
    batch: Samples = None,
    test: Annotated[float, _run("PART", "Part of the data that is left out for testing.")] = 0.25,
    save: Annotated[Path | None, _output("FILE", "Write the weights: .safetensors or .pt.")] = None,
    json: Json = False,
    report: Report = None,
) -> Outcome:
    """Train a model without a learning rate: steps are proved to descend before they are taken.

    Exit code 1 if nothing was proved: the smoothness is infinite, or the optimizer only measures.

    Examples:

      surefoot train

      surefoot train mlp@activation=tanh --data mnist-5k --batch 500 --steps 200

      surefoot train mymodels.py:net --data mine.npz --save net.safetensors --report run.html
    """
    if steps < 0 or not 0 <= test < 1 or (batch is not None and batch < 1):
        raise UsageError("--steps is at least 0, --batch at least 1, and --test between 0 and 1")
    check_destination(save, "--save", ".safetensors", ".pt", ".pth")
    check_destination(report, "--report", ".html")
    running = _work("running")
    run = running.Run(model, source, objective, optimizer, steps, batch, test)
    return running.train(run, save, json, report)


@app.command()
@guarded
def converge(
    source: Source,
    model: Model = "mlp@activation=tanh",
    objective: Loss = "square",
    batch: Annotated[int, _run("N", "Number of samples, a random part of the data.")] = 20,
    steps: Steps = 30,
    method: Annotated[str, _run("NAME", "The method whose convergence is proved: gauss-newton, gradient, …")] = (
        "gauss-newton"
    ),
    ridge: Annotated[float, _run("X", "Weight of the ridge ½‖u‖² that is added.", "--ridge")] = 0.0,
    json: Json = False,
    report: Report = None,
) -> Outcome:
    """Take steps until convergence from there is proved, and say to what, how near and how fast.

    Exit code 0 if it is proved, 1 if not: then it says what is missing, and by which factor.

    Examples:

      surefoot converge mlp --data digits

      surefoot converge mlp@activation=tanh --method gradient --report proof.html
    """
    if batch < 1 or steps < 0 or not ridge >= 0:
        raise UsageError("--batch is at least 1, --steps and --ridge are not negative")
    check_destination(report, "--report", ".html")
    running = _work("running")
    run = running.Run(model, source, objective, "", steps, batch, 0.0)
    return running.converge(run, method, ridge, json, report)


@app.command()
@guarded
def rules(
    search: Annotated[str | None, _output("TEXT", "Only those that mention this text.", "--search", "-s")] = None,
    json: Json = False,
) -> Outcome:
    """List the operations that certificates know, and what is claimed of each.

    Example:

      surefoot rules --search pool
    """
    return _work("catalogue").list_rules(search, json)


@app.command()
@guarded
def doctor(json: Json = False) -> Outcome:
    """Say what is installed and what is missing, and check that a small certificate is right.

    Example:

      surefoot doctor
    """
    return _work("catalogue").check_health(json)
