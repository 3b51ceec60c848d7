"""The table of faults: small changes to the product that a person could make, each of which a test must notice.

One TOML file per part of the product. Every fault changes what a user can notice and was chosen from reading the
product alone, before any test was looked at: else the sample would say nothing.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault."""

    id: str
    file: str
    """Below `dflop/`."""
    old: str
    """Occurs once in the file."""
    new: str
    breaks: str
    """In a few words."""
    tests: tuple[str, ...]
    """Paths to try one after the other, the cheapest first."""

    def apply(self, tree: Path) -> bool:
        """Put the fault into a tree; False where its text is not there exactly once."""
        path = tree / "dflop" / self.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text.count(self.old) != 1:
            return False
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        return True

    def is_compiled(self, tree: Path) -> bool:
        """Whether its file holds kernels, which other files' kernels on disk may have taken in."""
        text = (tree / "dflop" / self.file).read_text(encoding="utf-8")
        return "@kernel" in text or "@inlined" in text


def read_table() -> dict[str, Mutant]:
    """All faults by id."""
    found: dict[str, Mutant] = {}
    for file in sorted(Path(__file__).parent.glob("*.toml")):
        for entry in tomllib.loads(file.read_text(encoding="utf-8"))["mutant"]:
            mutant = Mutant(**{**entry, "tests": tuple(entry["tests"])})
            assert mutant.id not in found, f"two mutants are named {mutant.id}"
            assert mutant.old != mutant.new, f"{mutant.id} changes nothing"
            found[mutant.id] = mutant
    return found
