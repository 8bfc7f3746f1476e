"""The main job in two minutes: ``make demo``."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import surefoot as sf
from surefoot.report import write_report

REPORT = Path("surefoot-demo.html")
TRAINED, TARGET = 1347, 0.05


def main() -> None:
    """The paper's study, a certificate on real digits with its bracket, proved training, a report."""
    title("The paper's study of VGG: each block within 1, ‖x‖ = 1, 128 images, nothing allocated")
    certificates = study()

    title("A small convolutional network on 64 handwritten digits, parameters within 0.02 of the present ones")
    model, x, y = network_and_digits()
    objective, domain = sf.CrossEntropy(y), sf.Ball(0.02)
    certificate = sf.certify(model, x, objective, domain=domain)
    print(certificate)
    print()
    print(certificate.bracket(sf.estimate(model, x, objective, domain=domain)))

    title("Training without a learning rate: a rectifier network with max-pooling on 1,347 digits")
    train()

    title("And a theorem about the future: Gauss-Newton on 100 digits, even or odd, until convergence is proved")
    prove()

    write_report(REPORT, [("CNN on digits", certificate), *certificates], title="surefoot demo")
    title("A report to open in a browser")
    print(REPORT.resolve())


def title(text: str) -> None:
    print(f"\n{text}\n{'─' * len(text)}")


def study() -> list[tuple[str, sf.Certificate]]:
    """Algorithm 4 as printed next to the certified calculus, on VGG and its variations."""
    found = []
    print(f"{'':<18}{'as printed: ℓ':>16}{'L':>14}   {'certified: ℓ':>16}{'L':>14}")
    for name in ("vgg16", "vgg16-smooth", "vgg16-batchnorm"):
        with torch.device("meta"):
            model, images = sf.zoo.build(name), sf.zoo.example_input(name, batch=128)
        printed, proved = (
            sf.certify(model, images, domain=sf.ProductBall(1.0), input_norm=1.0, constants=constants)
            for constants in ("paper", "certified")
        )
        unsound = "*" if printed.flags else " "
        print(
            f"{name:<18}{printed.lipschitz:>15}{unsound}{printed.smoothness:>14}"
            f"   {proved.lipschitz:>16}{proved.smoothness:>14}"
        )
        found.append((name, proved))
    print("* rests on a constant of the paper that is not an upper bound: see docs/application.md")
    return found


def network_and_digits() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    images, classes = load_digits(return_X_y=True)
    x, y = torch.tensor(images[:64], dtype=torch.float64).reshape(-1, 1, 8, 8) / 16, torch.tensor(classes[:64])
    layers = (nn.Conv2d(1, 8, 3), nn.Softplus(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(72, 10))
    return nn.Sequential(*layers).double(), x, y


def train() -> None:
    """Every step is taken only after its value, with all round-off, is proved to be lower."""
    torch.manual_seed(0)
    images, classes = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float64).reshape(-1, 1, 8, 8) / 16, torch.tensor(classes)
    conv = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    model = nn.Sequential(
        *conv, nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)
    ).double()
    optimizer = sf.CertifiedDescent(model, sf.CrossEntropy())
    start = time.perf_counter()
    loss = optimizer.step(x[:TRAINED], y[:TRAINED])
    while loss > TARGET:
        record, step = optimizer.history[-1], len(optimizer.history) - 1
        if step % 4 == 0:
            print(
                f"step {step:>2}   loss {record.loss:.5f}   lower by at least "
                f"{record.proved_decrease:.10f}   {time.perf_counter() - start:4.1f} s"
            )
        loss = optimizer.step(x[:TRAINED], y[:TRAINED])
    with torch.no_grad():
        right = (model(x[TRAINED:]).argmax(dim=1) == y[TRAINED:]).double().mean()
    spent = time.perf_counter() - start
    print(f"\nloss {loss:.4f} after {spent:.1f} s; {float(right):.1%} of 450 other digits are right")
    print(optimizer.guarantee)


def prove() -> None:
    """Steps until a theorem applies: an exact solution exists nearby, and the method converges to one."""
    torch.manual_seed(0)
    images, classes = load_digits(return_X_y=True)
    x, y = torch.tensor(images[:100], dtype=torch.float64) / 16, torch.tensor(classes[:100] % 2).double()[:, None]
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)).double()
    optimizer, verdict = sf.GaussNewton(model, sf.Square(), damping=1e-2), None
    while verdict is None or not verdict.proved:
        loss = optimizer.step(x, y)
        verdict = sf.convergence(model, x, sf.Square(y), method="gauss_newton")
        missing = "proved" if verdict.proved else f"a factor {verdict.missing:.3g} is missing"
        print(f"step {len(optimizer.history)}   loss before it {loss:.2e}   after it: {missing}")
    print(f"\n{verdict}")
    steps = verdict.iterations(1e-20)
    print(f"{steps} further steps bring the loss below 1e-20: that is proved, not tried.")


if __name__ == "__main__":
    main()
