"""The options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli.names import complete_model

_MODEL_PANEL = "Model and batch"
_DOMAIN_PANEL = "What is certified"
_OUTPUT_PANEL = "Output"

MODEL_HELP = (
    "A name of the zoo (surefoot models lists them; options behind @, as in mlp@sizes=64,32,10@activation=tanh), "
    "package.module:callable, or a .pt2 file of torch.export."
)


class DomainKind(StrEnum):
    """The sets."""

    product = "product"
    ball = "ball"


class Center(StrEnum):
    """What the sets are around."""

    zero = "zero"
    weights = "weights"


class Wrt(StrEnum):
    """What varies."""

    params = "params"
    input = "input"


class Constants(StrEnum):
    """Whose constants."""

    certified = "certified"
    paper = "paper"
    both = "both"


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


Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model)]
Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help=MODEL_HELP, autocompletion=complete_model)]
OptionalModel = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model)]
Batch = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        rich_help_panel=_MODEL_PANEL,
        help="Number of samples. Default: all data, else 16 random samples, or 128 where only the shape matters.",
    ),
]
Input = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SHAPE",
        rich_help_panel=_MODEL_PANEL,
        help="Shape of the input, samples first: 8,3,32,32. Once for each input of the model.",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        rich_help_panel=_MODEL_PANEL,
        help="digits, mnist-5k, or a .pt, .npz or .safetensors file with tensors x and y.",
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        rich_help_panel=_MODEL_PANEL,
        help="Weights: .safetensors, or a torch.save of tensors only.",
    ),
]
Smooth = Annotated[
    bool,
    typer.Option(
        "--smooth",
        metavar="",
        rich_help_panel=_MODEL_PANEL,
        help="Replace ReLU by soft-plus, max-pooling by average pooling, and so on (surefoot.smooth).",
    ),
]
Eval = Annotated[
    bool,
    typer.Option(
        "--eval",
        metavar="",
        rich_help_panel=_MODEL_PANEL,
        help="In evaluation mode: no dropout, running statistics in batch normalisation.",
    ),
]
Seed = Annotated[
    int,
    typer.Option(metavar="N", rich_help_panel=_MODEL_PANEL, help="Of random weights, random inputs and searches."),
]
Domain = Annotated[
    DomainKind | None,
    typer.Option(
        metavar="product|ball",
        rich_help_panel=_DOMAIN_PANEL,
        help="Every layer in a ball of its own, or all in one. Default: product around zero, ball around weights.",
    ),
]
Radius = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        rich_help_panel=_DOMAIN_PANEL,
        help="Of the balls. Default: 1 around zero, 0.1 around weights.",
    ),
]
CenterOption = Annotated[
    Center | None,
    typer.Option(
        metavar="zero|weights",
        rich_help_panel=_DOMAIN_PANEL,
        help="Of the balls; zero needs no weights. Default: weights, where --weights or --data are given.",
    ),
]
AroundWeights = Annotated[
    bool,
    typer.Option(
        "--around-weights", metavar="", rich_help_panel=_DOMAIN_PANEL, help="The same as --center weights."
    ),
]
WrtOption = Annotated[
    Wrt,
    typer.Option(
        metavar="params|input", rich_help_panel=_DOMAIN_PANEL, help="What varies: the parameters or the input."
    ),
]
Objective = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel=_DOMAIN_PANEL,
        help="Certify a loss of the outputs on --data: cross-entropy, square, …",
    ),
]
InputNorm = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        rich_help_panel=_DOMAIN_PANEL,
        help="Bound on the norm of the stacked batch. Default: that of the data; 1 where only the shape matters.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", metavar="", rich_help_panel=_OUTPUT_PANEL, help="Print one JSON document.")
]
Report = Annotated[
    Path | None,
    typer.Option(metavar="FILE.html", rich_help_panel=_OUTPUT_PANEL, help="Also write a page to look at."),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", metavar="", rich_help_panel=_OUTPUT_PANEL, help="No notes and no progress."),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", metavar="", rich_help_panel=_OUTPUT_PANEL, help="Show the traceback of an error."),
]
