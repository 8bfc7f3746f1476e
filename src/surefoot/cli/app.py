"""The commands together."""

from __future__ import annotations

from typing import Annotated

import typer

from surefoot import __version__
from surefoot.cli.catalogue import models, rules
from surefoot.cli.certify import certify
from surefoot.cli.compare import compare
from surefoot.cli.cost import cost
from surefoot.cli.doctor import doctor
from surefoot.cli.step import step
from surefoot.cli.train import train

app = typer.Typer(
    name="surefoot",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 certified, 1 not certified (∞), 2 usage, 3 unsupported operation, 70 unexpected error, "
    "130 interrupted. Results are on standard output, everything else on standard error.",
)


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
    """Learning rates with a proof: smoothness certificates and exact steps for PyTorch models.

    Begin with: surefoot certify mlp, surefoot train, surefoot compare vgg16 vgg16-smooth vgg16-batchnorm.
    """


for _command in (certify, compare, train, step, cost, rules, models, doctor):
    app.command()(_command)
