"""Write ``application.md``: the paper's application section reproduced, and what the paper gets wrong.

``python docs/application.py`` rewrites the page; a test fails if that would change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefoot import paper

PAGE = Path(__file__).resolve().parent / "application.md"

# What is printed, what holds instead, and where the code deals with it (paths below src/surefoot).
ERRATA: tuple[tuple[str, str, str], ...] = (
    (
        "Lemma smooth_elt_wise, item 1: stacking functions of separate arguments is ‖ℓ‖₂-Lipschitz",
        "max ℓᵢ: the Jacobian is block diagonal. The application uses the maximum",
        "`paper/chains.py` (both), `operations/scalar_functions.py`",
    ),
    (
        "convolution: the intercept has lᵘ = √m⌈k/s⌉ (main text) or √m (appendix)",
        "√(m·positions): it is copied to every position of every sample. **Not a bound as printed**",
        "flagged by `paper/layers.py`; `operations/convolution.py`",
    ),
    (
        "batch-normalisation: bound δm, ℓ = 2ε^(-1/2), L = 2m^(-1/2)ε^(-1), in the appendix δ times that",
        "valid but loose where δm counts every entry: √(δm), ε^(-1/2), 0.8587·m^(-1/2)ε^(-1) hold; for images m "
        "counts positions too",
        "`paper/layers.py` (as printed), `operations/normalisation.py`",
    ),
    (
        "smooth VGG: ℓ changes by at most 10⁻⁴",
        "only if ‖a(0)‖ is left out of Algorithm 4, which makes the numbers no bounds",
        "`keep_value_at_zero` in `paper/algorithm.py`, flagged; the table above",
    ),
    (
        "Algorithm 4, L_{t,j} uses ℓ of a_{t,j}",
        "valid but loose: the lemma behind it has the restricted ℓ̃",
        "`corrected` in `paper/algorithm.py`",
    ),
    (
        "eq. (smooth_refined_dyn), ℓˣ(R_x, R_u) = … L^{xx}R_u + L^{ux}R_x",
        "the radii are swapped. **Not a bound as printed**",
        "`as_printed` in `paper/chains.py`, flagged where it is too small",
    ),
    (
        "Algorithm 4, m_{t,0} = ℓˣm + ℓᵘR + ‖b(0,0)‖",
        "valid but loose: it counts the bilinear term twice, L m R + lˣm + lᵘR + ‖b(0,0)‖ holds",
        "`corrected` in `paper/algorithm.py`",
    ),
    (
        "convex clustering: ℓ ≤ n(n-1)/2",
        "fails for n = 2, where ℓ = √2; n√((n-1)/2) holds for all n. **Not a bound as printed** for n = 2",
        "flagged by `paper/losses.py`",
    ),
    (
        "spectral clustering: Σ σᵢ² over i > n - k",
        "Tr((I - P)ZᵀZ) leaves the n - k smallest: i > k",
        "a value, not a constant: `clustering/objective.py`",
    ),
    (
        "the Newton step is feasible for κ < 1/(L_{h∘f} + L_r)",
        "for κ > L_{h∘f} + L_r",
        "a condition on κ, not a constant: `optim/second_order.py`",
    ),
    (
        "Lemma bilin_smooth_elt_wise: the proof lacks squares on L",
        "the statement, a maximum, is right",
        "proved in `paper/chains.py`",
    ),
    (
        "supervised objectives: only the smoothness of each hᵢ is needed",
        "the mean of n losses has L = max Lᵢ/n and ℓ = max ℓᵢ/√n",
        "`objectives/loss.py`",
    ),
    (
        "logistic loss ℓ ≤ 2, L ≤ 2; soft-max ℓ = 2, L = 4",
        "√2 and 1/2; 1/2 and √2/(3√3)",
        "`objectives/classes.py`, `paper/layers.py` (as printed), `operations/softmax.py`",
    ),
    (
        "residual networks: (a(ω₁), ω₂) is bounded by 1 + m_a",
        "√(m_a² + sup‖ω₂‖²): ω₂ is the previous state. **Not a bound as printed** for bounded a",
        "flagged by `paper/layers.py`",
    ),
    (
        "pooling: ℓ = 1",
        "average 1/k for disjoint k×k patches; maximum √(patches over one entry). **Not a bound as printed** for "
        "overlapping maxima",
        "flagged by `paper/operations.py`, which counts the patches; `operations/pooling.py`",
    ),
    (
        "Lemma inv_der: ∇(g⁻¹) = ∇g[·, g⁻¹, g⁻¹]",
        "the sign is missing; norms do not see it",
        "`paper/layers.py` (implicit functions) uses norms only",
    ),
    (
        "ℓ_t = ℓˣℓ_{t-1} + ℓᵘ",
        "parameters of different layers are orthogonal: √((ℓˣℓ_{t-1})² + (ℓᵘ)²), or one number per block",
        "`calculus/forward.py`, `calculus/assemble.py`",
    ),
    (
        "convergence of projected gradient descent in O(·) iterations",
        "min‖g_k‖² ≤ 2L(F₀ - F*)/N with step 1/L",
        "a rate, not a constant: `guarantees.py`, `optim/projected.py`, `optim/stochastic.py`",
    ),
)

# Where, what is printed and what holds, and why.
FURTHER: tuple[tuple[str, str, str], ...] = (
    (
        "Logistic loss with several marked classes",
        "ℓ ≤ 2 is printed for every y ∈ {0,1}^q; with r ≥ 4 marked classes and one unmarked it fails, ℓ = √(r+1).",
        "∇h = p - y with p in the simplex; ‖p - y‖² is convex in p, so its supremum is at a corner e_j, where it "
        "is r + 1 for an unmarked j and r - 1 for a marked one.",
    ),
    (
        "Third derivative of soft-plus",
        "-sinh/(2(1 + cosh²)) is printed; -sinh/(2(1 + cosh)²) holds.",
        "f'' = (2 + 2cosh)⁻¹, so f''' = -2sinh/(2 + 2cosh)². The printed one reaches √2/8 ≈ 0.18 and would "
        "contradict L ≤ 1/10 for the sigmoid.",
    ),
    (
        "Matrix product as a tensor",
        "e_{(q mod n)+1} is printed; e_{((q-1) mod n)+1} holds.",
        "q = i + n(j-1) has q mod n = i mod n, so the printed index is i + 1, or 1 for i = n.",
    ),
    (
        "Extraction matrices",
        "E = e_i ⊗ 1_Kᵀ with EᵀE = I and EEᵀ a projector is printed; neither holds.",
        "EᵀE = (e_iᵀe_i) 1_K1_Kᵀ = 1_K1_Kᵀ and EEᵀ = K e_ie_iᵀ; meant is the band with columns e_i, …, e_{i+K-1}.",
    ),
    (
        "Smoothness in the state",
        "L^{xx} is displayed as sup‖∇²_{uu}φ‖; sup‖∇²_{xx}φ‖ is meant.",
        "L^{xx} is defined one display before as the Lipschitz constant of ∇_xφ in x.",
    ),
    (
        "Names of the two networks",
        "'with and without batch-normalization respectively' names VGG-smooth and VGG-batch in the reverse order.",
        "VGG-smooth was defined before, without it.",
    ),
    (
        "Why batch-normalisation helps at ε = 10²",
        "The bound δm is given as the reason; it is not: the gain is ℓ = 2ε^(-1/2) = 1/5 < 1 at thirteen layers.",
        "The minimum in line m_{t,j} is the bound at no layer (table above), so leaving the bound out changes "
        "nothing; only if δ counts channels and ‖a(0)‖ is kept is it reached, at two layers. At ε = 10⁻², where "
        "both constants grow, it is reached at ten or more.",
    ),
    (
        "Convex clustering, proof",
        "'finite only if ‖z‖ > n(n-1)/2' is printed; ≤ is what the argument gives.",
        "At z = 0 the supremum of -‖Dy‖ is 0, finite; sup_y zᵀy - c‖y‖ is infinite exactly for ‖z‖ > c.",
    ),
    (
        "Lemma invcomp",
        "Both second summands need a minus sign.",
        "They come from differentiating an inverse (ERRATA 16); in dimension one (f/g)' = f'/g - f g'/g².",
    ),
    (
        "Lemma nonlin_comp_bounds and Corollary smooth_state",
        "m_j = m_{a_j}(m_{t-1}) and the results m_τ, ℓ_τ, L_τ are printed in the lemma; m_{j-1} and the index k "
        "are meant. The corollary has t for j, and k for τ.",
        "The recursions run over j and end at the number of functions.",
    ),
    (
        "Algorithm 4, line L_t",
        "(L_bR + l_b)² is printed without the superscript x of l_b.",
        "It multiplies ℓ_{t-1}², so it is (ℓˣ_{t,0})², as in Lemma smooth_gen.",
    ),
    (
        "Batch-normalisation, proof",
        "‖∇²ḡ‖ ≤ δ max‖∇²g‖ is printed; the factor δ is not needed, so the main text's L is valid.",
        "The tensor is block diagonal: Σᵢ Tᵢ[uᵢ,vᵢ,wᵢ] ≤ max‖Tᵢ‖ Σ‖uᵢ‖‖vᵢ‖‖wᵢ‖ ≤ max‖Tᵢ‖ ‖u‖‖v‖‖w‖.",
    ),
    (
        "Residual networks, B̄",
        "B̄_{t,j} is defined for j up to the dimension of x_{t-1}; up to that of b_t is meant, and the zero block "
        "goes below B_{t,j}, not beside it.",
        "The tensor has one slice B_{t,j} per coordinate of b_t, with one row per coordinate of the state.",
    ),
    (
        "Lemma on convolutions, proof",
        "Σ_{i=1}^d is printed; the sum runs over the n coordinates of z.",
        "Σ_j‖z_{S_j}‖² counts each coordinate i ≤ n once per patch that contains it.",
    ),
    (
        "Proof of Prop. lin_quad",
        "½∇²ψ_t[v,v,λ] is expanded with ∇²ψ_{t-1} on the right; ½∇²ψ_{t-1} is meant.",
        "It is half of eq. (hess_decomp); the result, eq. (newton_decomp), is right.",
    ),
)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def verdict(result: paper.Result) -> str:
    """Whether a number is an upper bound, or which errata say that it is not."""
    if not result.flags:
        return "yes"
    return "no: " + ", ".join(flag.partition(":")[0] for flag in result.flags)


def networks() -> list[str]:
    """The four networks in three readings."""
    both = paper.Reading(), paper.Reading(linear_part="proved", normalised_over="images")
    built = {
        "VGG": [paper.vgg(reading=reading) for reading in both],
        "smooth VGG": [paper.smooth_vgg(reading=reading) for reading in both],
        "batch-normalised, ε = 10⁻²": [paper.batch_norm_vgg(1e-2, reading=reading) for reading in both],
        "batch-normalised, ε = 10²": [paper.batch_norm_vgg(1e2, reading=reading) for reading in both],
    }
    rows = []
    for name, (as_printed, as_holds) in built.items():
        runs = (
            paper.algorithm_4(as_printed, 1.0, 1.0, keep_value_at_zero=False).result,
            paper.algorithm_4(as_printed, 1.0, 1.0).result,
            paper.algorithm_4(as_holds, 1.0, 1.0, corrected=True).result,
        )
        cells = [f"{run.lipschitz.format(4)}, {run.smoothness.format(4)}" for run in runs]
        rows.append([name, *(f"{cell} ({verdict(run)})" for cell, run in zip(cells, runs, strict=True))])
    head = ("ℓ, L (upper bounds?)", "‖a(0)‖ left out", "Algorithm 4 as printed", "ERRATA 2, 5 and 7 applied")
    return table(head, rows)


def claims(study: paper.Application) -> list[str]:
    """What the paper claims, and what comes out."""
    rows = [
        (
            "ℓ of VGG on ‖u_t‖ ≤ 1, ‖x‖ = 1, batch 128 (no number is printed)",
            f"{study.vgg.lipschitz.format(4)}",
            f"as printed; an upper bound? {verdict(study.vgg)}",
        ),
        (
            "ℓ of VGG and of smooth VGG differ by at most 10⁻⁴, relatively",
            f"{study.relative_difference:g} if ‖a(0)‖ is left out",
            f"only so: Algorithm 4 as printed gives a factor of **{study.factor:.1f}** (ERRATA 4)",
        ),
    ]
    for epsilon, sign in ((1e-2, "≤"), (1e2, "≥")):
        entries = [entry for entry in study.batch_norm if entry.epsilon == epsilon]
        main = [entry for entry in entries if entry.reading.name == "every entry, main text"]
        for index, (symbol, name) in enumerate((("ℓ", "lipschitz"), ("L", "smoothness"))):
            pairs = [(getattr(entry.smooth, name), getattr(entry.normalised, name)) for entry in main]
            shown = "; ".join(f"{plain.format(2)} {sign} {normalised.format(2)}" for plain, normalised in pairs)
            holds = sum(entry.increases[index] is (sign == "≤") for entry in entries)
            claim = f"ε = {epsilon:g}: {symbol} of smooth VGG {sign} {symbol} with batch-normalisation"
            rows.append(
                (claim, f"{shown} (‖a(0)‖ left out; kept)", f"holds in {holds} of {len(entries)} readings")
            )
    return table(("the paper", "computed", "verdict"), rows)


def readings(study: paper.Application) -> list[str]:
    """ℓ of VGG in every reading that matters."""
    rows = [(name, result.lipschitz.format(4), verdict(result)) for name, result in study.readings]
    return table(("reading", "ℓ of VGG", "upper bound?"), rows)


def normalisations(study: paper.Application) -> list[str]:
    """The comparison with batch-normalisation in every reading of its constants."""
    found = {(entry.epsilon, entry.reading, entry.keep_value_at_zero): entry for entry in study.batch_norm}
    rows = []
    for epsilon, reading in dict.fromkeys((entry.epsilon, entry.reading) for entry in study.batch_norm):
        pair = [found[epsilon, reading, keep] for keep in (False, True)]
        cells = [f"{entry.normalised.lipschitz}, {entry.normalised.smoothness}" for entry in pair]
        rows.append((f"{epsilon:g}", reading.name, *cells, "; ".join(str(entry.active_bounds) for entry in pair)))
    head = ("ε", "normalised over; L from", "ℓ, L, ‖a(0)‖ left out", "ℓ, L, ‖a(0)‖ kept", "layers at the bound δm")
    return table(head, rows)


TEXT = """\
# The paper's application, reproduced

Section 5 of the paper computes constants of VGG-16, of a smooth variation (soft-plus, average pooling) and of
that one with batch-normalisation, for batches of 128 images and every layer's parameters in the unit ball. This
page has its claims, the numbers that come out, and what is wrong with them. It is written by
`python docs/application.py`; numbers are rounded up. The same numbers come from the PyTorch models on the `meta`
device, without allocating them:

```python
import surefoot as sf, torch

with torch.device("meta"):
    model, x = sf.zoo.vgg16(), torch.empty(128, 3, 224, 224)
print(sf.certify(model, x, domain=sf.ProductBall(1.0), input_norm=1.0, constants="paper"))
```

## Claims

{claims}

Readings: six of batch-normalisation, each with ‖a(0)‖ left out of Algorithm 4 and kept. The networks behind the
claims, in three columns: without ‖a(0)‖, where the claim about smooth VGG holds and the numbers are no bounds; the
algorithm as printed; and with constants that hold (‖a(0)‖ kept, m of batch-normalisation counting positions):

{networks}

## Readings that matter

The paper prints some constants twice and leaves some choices open. *As printed* is: Algorithm 4 to the letter;
lᵘ = √m⌈k/s⌉ for convolutions, as in the main text; the soft-max of the last layer part of the network, the
logistic loss not; ‖x‖ = 1 for the stacked batch; batch-normalisation after activation and pooling, with channels ×
positions as δ, the batch as m, and L as in the main text.

{readings}

Batch-normalisation. The comparison comes out as claimed whether δ and m count every entry (δ channels × positions,
m the batch), channels (δ channels, m the batch) or images (δ channels, m batch × positions), and with either
printed L. The last column has, out of 13 layers, those where the bound δm is the smaller one, ‖a(0)‖ left out;
kept:

{normalisations}

## Errata

`ERRATA n` in a flag of a certificate is row n. Printed constants that are valid but loose stay as they are in
`surefoot.paper`; those that are no upper bounds are computed too, and flagged wherever they are shown. The default
constants, `certified`, repeat none of this.

{errata}

## Further mistakes

Found while implementing the paper. Only the first makes a printed constant too small.

{further}

The paper restricts pooling to patches that do not overlap. For overlapping ones ℓ = 1 still holds for averages
whose divisor is the same everywhere. It fails where the divisor is smaller at the border
(`count_include_pad=False`), or where there are more patches than entries; such poolings are flagged.
"""


def render() -> str:
    """The page."""
    study = paper.application()
    errata = [(str(k), *row) for k, row in enumerate(ERRATA, start=1)]
    further = enumerate(FURTHER, start=1)
    parts = {
        "claims": claims(study),
        "networks": networks(),
        "readings": readings(study),
        "normalisations": normalisations(study),
        "errata": table(("n", "the paper", "what holds", "in the code"), errata),
        "further": [f"{k}. **{where}.** {what} *Proof:* {why}" for k, (where, what, why) in further],
    }
    return TEXT.format(**{name: "\n".join(lines) for name, lines in parts.items()})


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
