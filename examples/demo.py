"""What surefoot can do, on models of the zoo: ``make demo``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import surefoot as sf


def main() -> None:
    """A small network with numbers, then VGG-16 at full size without."""
    torch.manual_seed(0)
    options = {"sizes": (16, 32, 32, 10)}
    title("The paper's study of VGG: each block within 1, ‖x‖ = 1, 128 images, nothing allocated")
    show_study()

    title("A small convolutional network around its weights: lower bounds found, upper bounds proved")
    show_bracket()

    title("A residual network as a chain: states are what is still needed, here (x_{t-1}; x_t)")
    show_chain("residual")

    title("The automatic-differentiation oracle against torch.autograd, in double precision")
    for name in ("mlp", "residual", "highway-gated", "autoencoder-convolutional", "resnet18", "vit", "gpt"):
        check_oracle(name)

    title("What a step costs: a perceptron")
    print(sf.cost(sf.zoo.build("mlp", **options), sf.zoo.example_input("mlp", batch=64, **options)))

    title("What a step costs: VGG-16, 128 images of 224×224, on the meta device")
    with torch.device("meta"):
        vgg, images = sf.zoo.build("vgg16"), sf.zoo.example_input("vgg16", batch=128)
    print(sf.cost(vgg, images))

    title("Multiplications of the forward pass, predicted and counted by PyTorch")
    for name in ("vgg16-batchnorm", "resnet18", "resnet50", "autoencoder-convolutional", "vit", "gpt"):
        compare_counts(name)


def title(text: str) -> None:
    print(f"\n{text}\n{'─' * len(text)}")


def small(name: str) -> tuple[nn.Module, Tensor]:
    """A small version of a model, and a batch."""
    options = sf.zoo.small_options(name)
    return sf.zoo.build(name, **options).double(), sf.zoo.example_input(name, 4, dtype=torch.float64, **options)


def show_study() -> None:
    """Algorithm 4 as printed next to the certified calculus, on VGG and its variations."""
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
    print("* rests on a constant of the paper that is not an upper bound: see docs/application.md")


def show_bracket() -> None:
    layers = (nn.Conv2d(1, 4, 3), nn.Softplus(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 10))
    model, x = nn.Sequential(*layers).double(), torch.randn(8, 1, 8, 8, dtype=torch.float64)
    domain = sf.Ball(0.05)
    certificate = sf.certify(model, x, domain=domain)
    print(certificate)
    print(certificate.bracket(sf.estimate(model, x, domain=domain)))


def show_chain(name: str) -> None:
    print(sf.Chain(*small(name)))


def check_oracle(name: str) -> None:
    """Pull back a slope, push forward a direction, and compare with the plain model."""
    model, x = small(name)
    oracle = sf.Chain(model, x).autodiff()
    slope = torch.randn_like(oracle.value)
    gradient = oracle.pullback(slope)

    paths, parameters = zip(*model.named_parameters(), strict=True)
    plain = torch.autograd.grad(model(x), parameters, slope)
    scale = max(float(g.abs().max()) for g in plain)
    error = max(float((gradient[p] - g).abs().max()) for p, g in zip(paths, plain, strict=True)) / scale

    direction = {path: torch.randn_like(parameter) for path, parameter in model.named_parameters()}
    forward = float((slope * oracle.pushforward(direction)).sum())
    backward = float(sum((gradient[path] * direction[path]).sum() for path in paths))
    adjoint = abs(forward - backward) / abs(backward)
    print(f"{name:<28} gradient differs by {error:.0e}   ⟨μ, J v⟩ and ⟨Jᵀμ, v⟩ by {adjoint:.0e}")


def compare_counts(name: str) -> None:
    with torch.device("meta"):
        found = sf.cost(sf.zoo.build(name), sf.zoo.example_input(name))
    verdict = "equal" if found.products == found.counted.forward else "NOT EQUAL"
    print(f"{name:<28} {found.products:>16,} {found.counted.forward:>16,}   {verdict}")


if __name__ == "__main__":
    main()
