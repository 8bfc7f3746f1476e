r"""The LaTeX of docstrings as HTML: Greek letters, signs, fractions, ``<sub>`` and ``<sup>``.

It covers what docstrings of rules use, not LaTeX; a command it does not know is shown by its name. Every character
is escaped, so a docstring can put nothing into a page but text.
"""

from __future__ import annotations

import re
import unicodedata

from markupsafe import Markup, escape

_NAMES = """
| ‖  ell ℓ  ge ≥  geq ≥  le ≤  leq ≤  ne ≠  lambda λ  Lambda Λ  mu μ  kappa κ  sigma σ  rho ρ
omega ω  Omega Ω  eta η  xi ξ  epsilon ε  varepsilon ε  delta δ  Delta Δ  beta β  alpha α  gamma γ
pi π  Pi Π  Sigma Σ  Phi Φ  Psi Ψ  Gamma Γ  Theta Θ  nu ν  zeta ζ  chi χ  psi ψ  phi φ  varphi φ
theta θ  tau τ  partial ∂  nabla ∇  sum ∑  prod ∏  int ∫  infty ∞  times ×  cdot ·  otimes ⊗
oplus ⊕  circ ∘  langle ⟨  rangle ⟩  lfloor ⌊  rfloor ⌋  lceil ⌈  rceil ⌉  in ∈  to →  mapsto ↦
approx ≈  succeq ⪰  preceq ⪯  top ᵀ  ldots …  cdots ⋯  dots …  pm ±  odot ⊙  subset ⊂  cup ∪
cap ∩  prime ′  star ⋆  ast ∗  equiv ≡  propto ∝  forall ∀  exists ∃  setminus ∖  vert |  Vert ‖
lVert ‖  rVert ‖  mid |  perp ⊥  sim ∼  ll ≪  gg ≫  leftarrow ←  rightarrow →  Rightarrow ⇒
"""
_SPACES = {"quad": " ", "qquad": " ", ",": "\u2009", ";": " ", ":": " ", " ": " ", "!": ""}
_SIGNS = dict(zip(_NAMES.split()[::2], _NAMES.split()[1::2], strict=True)) | _SPACES | {c: c for c in "{}_%&#$"}
_ACCENTS = {"hat": "\u0302", "dot": "\u0307", "ddot": "\u0308", "bar": "\u0304", "tilde": "\u0303"}
_UPRIGHT = ("mathrm", "text", "operatorname", "mathbf", "mathcal", "mathbb", "mathsf", "textbf")
_IGNORED = ("left", "right", "bigl", "bigr", "big", "Big", "bigotimes", "displaystyle", "limits", "nolimits")
_OPENING = ("⟨", "⌊", "⌈", "∂", "∇", "∑", "∏")
_FACTOR = re.compile(
    r"√*(?:\d+|.[\u0302-\u0308]?)(?:<sub>[^<]*</sub>)?(?:<sup>[^<]*</sup>)?|√*[‖|⟨(][^‖|()]*[‖|⟩)](?:<su.>[^<]*</su.>)*"
)
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\s+|.", re.DOTALL)


def maths(source: str) -> Markup:
    r"""A formula as HTML.

    >>> print(maths(r"\|D^2g\| \le \frac12\kappa M^{-1/2}"))
    <span class="maths">‖D<sup>2</sup>g‖ ≤ 1/2 κM<sup>−1/2</sup></span>
    """
    return Markup('<span class="maths">{}</span>').format(_Reader(source).sequence())


class _Reader:
    """Reads tokens from left to right."""

    def __init__(self, source: str) -> None:
        self.tokens = _TOKEN.findall(source)
        self.place = 0

    def peek(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self) -> str:
        self.place += 1
        return self.tokens[self.place - 1] if self.place <= len(self.tokens) else ""

    def sequence(self, end: str = "") -> Markup:
        """Everything up to a closing token."""
        out = Markup("")
        while self.place < len(self.tokens):
            if end and self.peek() == end:
                self.take()
                break
            out += self.item()
        return Markup(re.sub(r" {2,}", " ", out).strip())

    def argument(self) -> Markup:
        """A group in braces, or the next token."""
        while self.peek().isspace():
            self.take()
        if self.peek() == "{":
            self.take()
            return self.sequence("}")
        return self.item()

    def item(self) -> Markup:
        token = self.take()
        if token in ("^", "_"):
            return self._script("sup" if token == "^" else "sub")
        if token == "{":
            return self.sequence("}")
        if token == "~":
            return Markup(" ")
        if token.isspace():
            return Markup("" if self._ends_a_name() else " ")
        if token == "-":
            return Markup("−")
        if token == "&":
            return Markup(" if ")
        if token == "\\\\":
            return Markup(";")
        return self._command(token[1:]) if token.startswith("\\") else escape(token)

    def _ends_a_name(self) -> bool:
        """Whether a space only ends the name of a sign, as in ``\\lambda x``: what follows belongs to it."""
        before, after = self.tokens[self.place - 2] if self.place >= 2 else "", self.peek()
        sign = _SIGNS.get(before[1:], "") if before.startswith("\\") else ""
        factor = after.isalnum() or _SIGNS.get(after[1:], "").isalpha() or after[1:] in _ACCENTS
        return sign in _OPENING or (sign.isalpha() and factor)

    def _script(self, tag: str) -> Markup:
        content = self.argument()
        if tag == "sup" and content == "ᵀ":
            return content
        return Markup("<{0}>{1}</{0}>").format(Markup(tag), content)

    def _command(self, name: str) -> Markup:
        if name in _SIGNS:
            return escape(_SIGNS[name])
        if name in _ACCENTS:
            return Markup(unicodedata.normalize("NFC", self.argument() + _ACCENTS[name]))
        if name in _UPRIGHT:
            return self.argument()
        if name in _IGNORED:
            return Markup("")
        if name in ("frac", "tfrac", "dfrac"):
            return self._fraction()
        if name == "sqrt":
            return Markup("√") + _grouped(self.argument())
        if name in ("begin", "end"):
            self.argument()
            return Markup("{" if name == "begin" else "}")
        return self._operator(name)

    def _operator(self, name: str) -> Markup:
        """A function such as ``log``, set off from the factors around it."""
        before = self.tokens[self.place - 2] if self.place >= 2 else " "
        thin = "\u2009"
        left = thin if before.isalnum() or before in ")}" else ""
        right = thin if re.match(r"[^\W_]|\\[A-Za-z]", self.peek()) else ""
        return escape(left + name + right)

    def _fraction(self) -> Markup:
        above, below = self.argument(), self.argument()
        following = self.peek()
        gap = "·" if following in ("(", "[") else " " if following.isalnum() or following.startswith("\\") else ""
        return _grouped(above) + "/" + _grouped(below) + gap


def _grouped(content: Markup) -> Markup:
    """In brackets where it is more than one factor."""
    return content if not content or _FACTOR.fullmatch(content) else Markup("(") + content + ")"


__all__ = ["maths"]
