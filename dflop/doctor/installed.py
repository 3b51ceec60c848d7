"""Python, dflop and the packages it needs: there, in range, and the versions that its tests ran with."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

import dflop
from dflop.doctor.finding import FAIL, OK, SKIP, WARN, Finding
from dflop.run.lifecycle import code_revision

AREA = "packages"
EXTRAS = {
    "plan": "every command but dflop sampler",
    "flows": "dflop run and Prefect flows",
    "train": "profiling and training",
    "demo": "the demo's media",
    "flash": "flash-attn's kernels",
    "tensorboard": "train.report_to: [tensorboard]",
    "wandb": "train.report_to: [wandb]",
    "mlflow": "train.report_to: [mlflow]",
}
"""Extras people install, and what for; `dev` is for those who work on dflop."""
_MAX_SHOWN = 6

VersionOf = Callable[[str], str | None]


def installed_version(package: str) -> str | None:
    """Version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def python_and_dflop() -> Iterator[Finding]:
    """The interpreter, and which dflop runs."""
    needed = importlib.metadata.metadata("dflop")["Requires-Python"] if installed_version("dflop") else None
    version = platform.python_version()
    if Version(version) in SpecifierSet(needed or ">=3"):
        yield Finding(AREA, "Python", OK, version)
    else:
        yield Finding(AREA, "Python", FAIL, f"{version}, dflop needs {needed}", "create a new environment with it")
    folder = Path(dflop.__file__).resolve().parent
    found = f"{dflop.__version__}, {code_revision()}, in {folder}"
    if installed_version("dflop"):
        yield Finding(AREA, "dflop", OK, found)
        yield from packages(importlib.metadata.requires("dflop") or [])
    else:  # a checkout on PYTHONPATH
        yield Finding(AREA, "dflop", WARN, f"{found}, not installed: what it needs is unknown", "pip install -e .")


def packages(requirements: Sequence[str], version_of: VersionOf = installed_version) -> Iterator[Finding]:
    """A finding for what dflop cannot do without, by its metadata's requirements, and one per extra."""
    parsed = [Requirement(text) for text in requirements]
    needed = [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]
    wrong = _wrong(needed, version_of)
    if wrong:
        yield Finding(AREA, "required", FAIL, "; ".join(wrong), "pip install --upgrade dflop, in this environment")
    else:
        yield Finding(AREA, "required", OK, f"{len(needed)} packages, all in range")
    known = {r.name for r in needed}
    for extra, purpose in EXTRAS.items():
        of_extra = [r for r in parsed if r.name not in known and r.marker and r.marker.evaluate({"extra": extra})]
        known |= {r.name for r in of_extra}  # `flows` and `train` bring `plan` along
        if of_extra:
            yield _extra(extra, purpose, of_extra, version_of)


def as_tested(constraints: Mapping[str, str], version_of: VersionOf = installed_version) -> Finding:
    """Whether what is installed is what the tests ran with: exact versions by package."""
    found = {name: version for name in constraints if (version := version_of(name)) is not None}
    compared = ((name, version, constraints[name]) for name, version in found.items())
    other = [f"{name} {version} (tested: {tested})" for name, version, tested in compared if not _same(version, tested)]
    if not other:
        return Finding(AREA, "tested versions", OK, f"{len(found)} packages match constraints.txt")
    shown = ", ".join(other[:_MAX_SHOWN]) + (f" and {len(other) - _MAX_SHOWN} more" if len(other) > _MAX_SHOWN else "")
    advice = "these versions are untested; for the tested ones: pip install -c constraints.txt"
    return Finding(AREA, "tested versions", WARN, shown, advice)


def read_constraints(path: Path) -> dict[str, str]:
    """Exact versions by package; none where there is no such file."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", text, re.MULTILINE))


def _extra(extra: str, purpose: str, wanted: Sequence[Requirement], version_of: VersionOf) -> Finding:
    install = f"for {purpose}: pip install 'dflop[{extra}]'"
    found = {r.name: version_of(r.name) for r in wanted}
    if not any(found.values()):
        return Finding(AREA, extra, SKIP, "not installed", install)
    wrong = _wrong(wanted, version_of)
    if wrong:
        return Finding(AREA, extra, WARN, "; ".join(wrong), install)
    return Finding(AREA, extra, OK, ", ".join(f"{name} {version}" for name, version in found.items()))


def _wrong(wanted: Sequence[Requirement], version_of: VersionOf) -> list[str]:
    found = [(r, version_of(r.name)) for r in wanted]
    return [
        f"{r.name} is {version}, not {r.specifier}" if version else f"{r.name} is missing"
        for r, version in found
        if version is None or not r.specifier.contains(version, prereleases=True)
    ]


def _same(version: str, tested: str) -> bool:
    """Local parts (`2.13.0+cpu`) are builds of one version."""
    try:
        return Version(version).public == Version(tested).public
    except InvalidVersion:
        return version == tested
