"""Many models or checkpoints: workers, a line of JSON for each as it finishes, going on where a run stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from surefoot.certificate import Certificate
from surefoot.cli import output
from surefoot.cli.cases import Case
from surefoot.cli.guard import UsageError, append_line, writing
from surefoot.cli.options import Request
from surefoot.errors import SurefootError
from surefoot.report.page import written

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

    @cached_property
    def key(self) -> str:
        """A hash of the model, the options and the present contents of the files they name."""
        files = (Path(part) for part in (self.model, self.request.data, self.request.weights) if part is not None)
        contents = b"".join(file.read_bytes() for file in files if file.is_file())
        return hashlib.sha256(f"{self.model}{self.request}".encode() + contents).hexdigest()[:16]


@dataclass(frozen=True)
class Certified:
    """The certificates of a job, with its model and input in words."""

    name: str
    described: str
    shapes: str
    input_norm: float | None
    certificates: Mapping[str, Certificate]


def jobs_of(arguments: Sequence[str], request: Request) -> list[Job]:
    """One job per model, or one per file of weights that follows it."""
    jobs: list[Job] = []
    model = ""
    for argument in arguments:
        if not argument.endswith(_WEIGHTS):
            model = argument
            jobs.append(Job(model, request))
            continue
        if not model or request.weights is not None:
            raise UsageError(
                f"'{argument}' holds weights: name the model before it, as in mlp runs/*.safetensors, and "
                "leave --weights out"
            )
        if jobs[-1].request.weights is None and jobs[-1].model == model:
            jobs.pop()
        jobs.append(Job(model, replace(request, weights=Path(argument))))
    return jobs


Work = Callable[[Job], Certified]


def finished(jobs: Sequence[Job], work: Work, workers: int) -> Iterator[tuple[Job, Certified | SurefootError]]:
    """Each job with its result, as it finishes; a failure does not lose the others.

    A worker that is killed from outside stops the workers beside it too. Their jobs are done again, each in a
    process of its own, so that only the job at fault is lost. An interrupted run waits for no worker.
    """
    if workers <= 1:
        yield from ((job, _kept(work, job)) for job in jobs)
        return
    stopped = list[Job]()
    for job, result in _in_pool(jobs, work, workers):
        if result is None:
            stopped.append(job)
        else:
            yield job, result
    for one in stopped:
        for job, result in _in_pool([one], work, 1):
            what = "its worker was ended from outside, perhaps for want of memory: use fewer --workers, --resume"
            yield job, SurefootError(what) if result is None else result


def _in_pool(
    jobs: Sequence[Job], work: Work, workers: int
) -> Iterator[tuple[Job, Certified | SurefootError | None]]:
    """Each job with its result, or ``None`` if its worker was killed from outside."""
    with ProcessPoolExecutor(min(workers, len(jobs)) or 1, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(_in_worker, work, job): job for job in jobs}
        try:
            for future in as_completed(waiting):
                try:
                    yield waiting[future], future.result()
                except BrokenProcessPool:
                    yield waiting[future], None
        except BaseException:
            for child in active_children():
                child.terminate()
            raise


def _in_worker(work: Work, job: Job) -> Certified | SurefootError:
    """The result of a job, in a worker; an error becomes a plain sentence, which can always be sent."""
    output.quiet(True)
    result = _kept(work, job)
    return SurefootError(str(result)) if isinstance(result, SurefootError) else result


def _kept(work: Work, job: Job) -> Certified | SurefootError:
    try:
        return work(job)
    except SurefootError as error:
        return error
    except Exception as error:
        return SurefootError(f"an unexpected error, {type(error).__name__}: {error}")


class Lines:
    """A file with one line of JSON for each job; ``resume`` keeps its lines, except for failures."""

    def __init__(self, path: Path | None, resume: bool) -> None:
        self.path, self.kept = path, dict[str, dict[str, Any]]()
        if path is None:
            return
        if resume and path.is_file():
            for text in path.read_text(encoding="utf-8").splitlines():
                try:
                    line = json.loads(text)
                except json.JSONDecodeError:  # the run ended while it was written
                    continue
                if isinstance(line, dict) and "certificates" in line:
                    self.kept[line.get("key", "")] = line
        text = "".join(f"{output.encoded(line)}\n" for line in self.kept.values())
        if path.is_file() or not path.exists():  # no pipe, no device
            with writing(path, "--log"):
                written(path, text)

    def earlier(self, job: Job) -> Certified | None:
        """The result of an earlier run, if there is one."""
        line = self.kept.get(job.key)
        if line is None:
            return None
        read = {kind: Certificate.from_dict(each) for kind, each in line["certificates"].items()}
        return Certified(line["name"], line["described"], line["shapes"], line["input_norm"], read)

    def add(self, job: Job, result: Certified | SurefootError) -> None:
        """Write the line of a job, at once."""
        if self.path is not None:
            append_line(self.path, "--log", output.encoded(self.line(job, result)))

    def line(self, job: Job, result: Certified | SurefootError) -> dict[str, Any]:
        """The line of a job."""
        line: dict[str, Any] = {"key": job.key, "name": job.name}
        if isinstance(result, Certified):
            line |= {"described": result.described, "shapes": result.shapes, "input_norm": result.input_norm}
            line["certificates"] = {kind: each.to_dict() for kind, each in result.certificates.items()}
        else:
            line["failed"] = str(result)
        return line


def certified(name: str, subject: Case, certificates: Mapping[str, Certificate]) -> Certified:
    """The result of a case without its model, so that it can be sent between processes."""
    described = subject.described.replace(subject.name, name, 1)
    return Certified(name, described, subject.shapes, subject.input_norm, certificates)
