"""The commands, their arguments and their help.

Nothing here imports torch. The work of a command is in a module of its own, which :func:`_module` imports when the
command is run, so that help, completion and mistakes in the options are answered at once.
"""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from surefoot import __version__
from surefoot.cli import options as o
from surefoot.cli import output
from surefoot.cli.guard import Outcome, UsageError, check_destination, guarded

app = typer.Typer(
    name="surefoot",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 certified, 1 not certified (∞), 2 usage, 3 unsupported operation, 70 unexpected error, "
    "130 interrupted. Results are on standard output, everything else on standard error.",
)


def _module(name: str) -> Any:
    """The module that does the work of a command; it imports torch."""
    with output.working("loading"):
        return import_module(f"surefoot.cli.{name}")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"surefoot {__version__}")
        raise typer.Exit


def _configured(context: typer.Context, path: Path | None) -> None:
    """Read defaults of options from a file."""
    if path is None or context.resilient_parsing:
        return
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise typer.BadParameter(f"{path} is not a TOML file that can be read: {error}") from error
    commands: Any = getattr(context.command, "commands", {})
    defaults: dict[str, dict[str, Any]] = {}
    for name, table in tables.items():
        if name not in commands or not isinstance(table, dict):
            raise typer.BadParameter(f"{path}: [{name}] is none of the commands {', '.join(commands)}")
        names = {parameter.name for parameter in commands[name].params}
        defaults[name] = {option.replace("-", "_"): value for option, value in table.items()}
        if unknown := sorted(defaults[name].keys() - names):
            raise typer.BadParameter(f"{path}: {name} has no option '{unknown[0]}': surefoot {name} --help")
    context.default_map = defaults


@app.callback()
def surefoot(
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            callback=_configured,
            help="Defaults of options, a table for each command, such as train with steps = 200 and batch = 500.",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", metavar="", is_eager=True, callback=_show_version, help="Show the version."
        ),
    ] = False,
) -> None:
    """Learning rates with a proof: smoothness certificates and exact steps for PyTorch models.

    Begin with: surefoot certify mlp, surefoot train, surefoot compare vgg16 vgg16-smooth vgg16-batchnorm.
    """


@app.command()
@guarded
def certify(
    models: o.Models,
    request: o.Request,
    sweep: o.Sweep,
    json: o.Json = False,
    report: o.Report = None,
    what_if: o.WhatIf = False,
) -> Outcome:
    """Bound a model, its slope and its curvature over a set of parameters, and say which step sizes are safe.

    Several models or checkpoints give one row each, as it finishes; one that fails does not lose the others.

    Exit code 0 if the smoothness is finite and proved, 1 if it is infinite or not proved, of one of several too.

    Examples:

      surefoot certify vgg16-smooth --batch 128 --radius 1

      surefoot certify mlp --data digits --objective cross-entropy --radius 0.03 --estimate

      surefoot certify mypackage.models:make_model --input 8,3,32,32 --json

      surefoot certify mlp runs/*.safetensors --data digits --workers 4 --log rows.jsonl --resume
    """
    check_destination(report, "--report", (".html",))
    if what_if and report is None:
        raise UsageError("--what-if fills a part of the report: say where to write it, with --report FILE.html")
    return _module("certifying").certify_each(models, request, sweep, json, report, what_if)


@app.command()
@guarded
def compare(
    models: o.Models, request: o.Request, sweep: o.Sweep, json: o.Json = False, report: o.Report = None
) -> Outcome:
    """Certify several models, variants or checkpoints of one, and put the constants side by side.

    Ratios are to the first model whose constant is finite. Exit code 0 if at least one model is certified.

    Examples:

      surefoot compare vgg16 vgg16-smooth vgg16-batchnorm

      surefoot compare vgg16-smooth vgg16-batchnorm@batch_norm=100 --constants both

      surefoot compare mlp@activation=tanh mlp --data digits --objective cross-entropy

      surefoot compare mlp runs/*.safetensors --data digits --workers 4 --log rows.jsonl --resume
    """
    check_destination(report, "--report", (".html",))
    return _module("certifying").certify_all(models, request, sweep, json, report)


@app.command()
@guarded
def train(start: o.Start, run: o.Run, json: o.Json = False, report: o.Report = None) -> Outcome:
    """Train a model without a learning rate: every step is proved to descend before it is taken.

    Gauss-Newton and Newton steps are proved with --damping certified; else they are judged by the loss after them.
    Exit code 1 if nothing was proved, as there or where the smoothness is infinite, or if a promise was not kept.

    Examples:

      surefoot train

      surefoot train mlp@activation=tanh --data mnist-5k --batch 500 --steps 200

      surefoot train mymodels:net --data mine.npz --save net.safetensors

      surefoot train --optimizer gauss-newton --damping certified --steps 10 --checkpoint run.pt --report run.html
    """
    check_destination(run.save, "--save", (".safetensors", ".pt", ".pth"))
    check_destination(run.checkpoint, "--checkpoint", (".pt", ".pth"))
    check_destination(run.log, "--log", (".jsonl",))
    check_destination(report, "--report", (".html",))
    return _module("training").train_model(start, run, json, report)


@app.command()
@guarded
def step(start: o.Start, batch: o.Samples = 64, kappa: o.Kappa = 1.0, json: o.Json = False) -> Outcome:
    """Take one gradient, Gauss-Newton and Newton step, and say what each gains, what it costs and which to use.

    The cost is in gradients: as counted for this step, at worst (surefoot cost), and in measured time.

    The gradient has the step size that is proved to descend the most; without a proof it is 1/κ.

    Examples:

      surefoot step

      surefoot step mlp --data mnist-5k --batch 128 --kappa 0.1
    """
    if batch < 1 or not kappa > 0:
        raise UsageError("--batch is at least 1 and --kappa is positive")
    return _module("stepping").take_steps(start, batch, kappa, json)


@app.command()
@guarded
def converge(
    model: o.Model = "mlp@activation=tanh",
    data: o.Data = "digits",
    objective: o.Loss = "square",
    batch: o.Samples = 20,
    steps: o.Steps = 30,
    method: o.Converging = "gauss-newton",
    ridge: o.RidgeWeight = 0.0,
    seed: o.Seed = 0,
    device: o.Device = None,
    json: o.Json = False,
    report: o.Report = None,
) -> Outcome:
    """Take steps until convergence from there is proved, and say to what, how near and how fast.

    Exit code 0 if it is proved, 1 if not: then it says what is missing, and by which factor.

    Examples:

      surefoot converge mlp --data digits

      surefoot converge mlp@activation=tanh --method momentum --report proof.html
    """
    if batch < 1 or steps < 0 or not ridge >= 0:
        raise UsageError("--batch is at least 1, --steps and --ridge are not negative")
    check_destination(report, "--report", (".html",))
    start = o.Start(model=model, data=data, objective=objective, seed=seed, device=device)
    return _module("stepping").prove(start, batch, steps, method, ridge, json, report)


@app.command()
@guarded
def cost(
    model: o.Model,
    batch: o.Batch = None,
    inputs: o.Input = None,
    smooth: o.Smooth = False,
    evaluation: o.Eval = False,
    json: o.Json = False,
) -> Outcome:
    """Count what a gradient, a Gauss-Newton and a Newton step cost, layer by layer; nothing is computed.

    Examples:

      surefoot cost vgg16 --batch 128

      surefoot cost mypackage.models:make_model --input 8,3,32,32
    """
    request = o.Request(batch=batch, inputs=inputs, smooth=smooth, evaluation=evaluation)
    return _module("stepping").count_cost(model, request, json)


@app.command()
@guarded
def rules(search: o.Search = None, json: o.Json = False) -> Outcome:
    """List the operations that certificates know, and what is claimed of each.

    Examples:

      surefoot rules

      surefoot rules --search pool
    """
    return _module("catalogue").list_rules(search, json)


@app.command()
@guarded
def models(search: o.Search = None, json: o.Json = False) -> Outcome:
    """List the models of the zoo.

    Options of a model stand behind its name: mlp@sizes=64,32,10@activation=tanh.

    Example:

      surefoot models --search vgg
    """
    return _module("catalogue").list_models(search, json)


@app.command()
@guarded
def doctor(json: o.Json = False) -> Outcome:
    """Say what is installed and what is missing, and check that a small certificate is right.

    Example:

      surefoot doctor
    """
    return _module("catalogue").check_health(json)
