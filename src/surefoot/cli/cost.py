"""``surefoot cost``: what the steps cost, from shapes alone."""

from __future__ import annotations

from surefoot.cli import options as o
from surefoot.cli import output
from surefoot.cli.frame import Outcome, guarded


@guarded
def cost(
    model: o.Model,
    batch: o.Batch = None,
    inputs: o.Input = None,
    smooth: o.Smooth = False,
    evaluation: o.Eval = False,
    json: o.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> Outcome:
    """Count what a gradient, a Gauss-Newton and a Newton step cost, layer by layer; nothing is computed.

    Examples:

      surefoot cost vgg16 --batch 128

      surefoot cost mypackage.models:make_model --input 8,3,32,32
    """
    with output.working("importing torch"):
        import surefoot as sf
        from surefoot.cli.request import Request, case, refusals_are_usage

    with output.working(f"counting {model}"):
        request = Request(batch=batch, inputs=inputs, smooth=smooth, evaluation=evaluation)
        subject = case(model, request)
        with refusals_are_usage(subject):
            found = sf.cost(subject.model, subject.x)
    if json:
        output.document({"model": model, "input": subject.shapes, "cost": found.to_dict()})
    else:
        output.result(f"{model}, input {subject.shapes}\n")
        output.result(str(found))
    return Outcome.CERTIFIED
