"""Many models or checkpoints: workers, a line of JSON for each as it finishes, going on where a run stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from surefoot.certificate import Certificate
from surefoot.cli import output
from surefoot.cli.cases import Case
from surefoot.cli.guard import UsageError
from surefoot.cli.options import Request
from surefoot.errors import SurefootError

_WEIGHTS = (".safetensors", ".pt", ".pth")


@dataclass(frozen=True)
class Job:
    """A model, perhaps with the weights of a file."""

    model: str
    request: Request

    @property
    def name(self) -> str:
        """The model, or the file of its weights."""
        weights = self.request.weights
        return self.model if weights is None else f"{self.model} {weights}"

    @property
    def key(self) -> str:
        """The same for the same question: model, options, and the weights as they are in the file now."""
        weights = self.request.weights
        held = weights.read_bytes() if weights is not None and weights.is_file() else b""
        return hashlib.sha256(f"{self.model}{self.request}".encode() + held).hexdigest()[:16]


@dataclass(frozen=True)
class Certified:
    """The certificates of a job, and what they are about."""

    name: str
    described: str
    shapes: str
    input_norm: float | None
    certificates: Mapping[str, Certificate]


def jobs_of(arguments: Sequence[str], request: Request) -> list[Job]:
    """A file of weights is a checkpoint of the model that stands before it.

    Raises:
        UsageError: if none does, or ``--weights`` says something else.
    """
    jobs: list[Job] = []
    model = ""
    for argument in arguments:
        if not argument.endswith(_WEIGHTS):
            model = argument
            jobs.append(Job(model, request))
            continue
        if not model or request.weights is not None:
            raise UsageError(
                f"'{argument}' holds weights: name the model before it, as in compare mlp runs/*.safetensors, and "
                "leave --weights out"
            )
        if jobs[-1].request.weights is None and jobs[-1].model == model:
            jobs.pop()
        jobs.append(Job(model, replace(request, weights=Path(argument))))
    return jobs


Work = Callable[[Job], Certified]


def finished(jobs: Sequence[Job], work: Work, workers: int) -> Iterator[tuple[Job, Certified | SurefootError]]:
    """Each job with its result, as it finishes; what fails does not lose the others."""
    if workers <= 1:
        for job in jobs:
            try:
                yield job, work(job)
            except SurefootError as error:
                yield job, error
        return
    with ProcessPoolExecutor(min(workers, len(jobs)) or 1, mp_context=get_context("spawn")) as pool:
        waiting: dict[Future[Certified | str], Job] = {pool.submit(_kept, work, job): job for job in jobs}
        for future in as_completed(waiting):
            try:
                found = future.result()
                yield waiting[future], SurefootError(found) if isinstance(found, str) else found
            except BrokenProcessPool:
                what = "a worker was ended from outside, perhaps for want of memory: use fewer --workers, --resume"
                yield waiting[future], SurefootError(what)


def _kept(work: Work, job: Job) -> Certified | str:
    """In a worker: what went wrong as a sentence, which can be sent whatever was raised."""
    output.quiet(True)
    try:
        return work(job)
    except SurefootError as error:
        return str(error)
    except Exception as error:
        return f"an unexpected error, {type(error).__name__}: {error}"


class Lines:
    """A file with one line of JSON for each job.

    Args:
        path: the file, or ``None`` for none.
        resume: whether what stands in it is kept, and not computed again; failures are.
    """

    def __init__(self, path: Path | None, resume: bool) -> None:
        self.path, self.known = path, dict[str, dict[str, Any]]()
        if path is None:
            if resume:
                raise UsageError("--resume goes on with the file of --log: name it")
            return
        if resume and path.is_file():
            for text in path.read_text(encoding="utf-8").splitlines():
                try:
                    line = json.loads(text)
                except json.JSONDecodeError:  # the run ended while it was written
                    continue
                if isinstance(line, dict) and "certificates" in line:
                    self.known[line.get("key", "")] = line
        written = "".join(f"{output.encoded(line)}\n" for line in self.known.values())
        path.write_text(written, encoding="utf-8")

    def earlier(self, job: Job) -> Certified | None:
        """What was found before."""
        line = self.known.get(job.key)
        if line is None:
            return None
        read = {kind: Certificate.from_dict(each) for kind, each in line["certificates"].items()}
        return Certified(line["name"], line["described"], line["shapes"], line["input_norm"], read)

    def add(self, job: Job, found: Certified | SurefootError) -> None:
        """Write a line, at once."""
        if self.path is None:
            return
        line: dict[str, Any] = {"key": job.key, "name": job.name}
        if isinstance(found, Certified):
            line |= {"described": found.described, "shapes": found.shapes, "input_norm": found.input_norm}
            line["certificates"] = {kind: each.to_dict() for kind, each in found.certificates.items()}
        else:
            line["failed"] = str(found)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{output.encoded(line)}\n")


def certified(name: str, subject: Case, certificates: Mapping[str, Certificate]) -> Certified:
    """Without the model, so that it can be sent."""
    described = subject.described.replace(subject.name, name, 1)
    return Certified(name, described, subject.shapes, subject.input_norm, certificates)
