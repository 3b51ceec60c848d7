"""The Prefect server that flows would use: none configured, reachable, of a fitting version, and open to us."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dflop.doctor.finding import FAIL, OK, SKIP, WARN, Finding
from dflop.doctor.installed import installed_version
from dflop.errors import DflopError

AREA = "Prefect"


def flow_server(ask: Callable[[], tuple[str, str]]) -> Iterator[Finding]:
    """Findings about Prefect; `ask` gives address and version of the server (empty: a temporary one), or raises."""
    version = installed_version("prefect")
    if version is None:
        yield Finding(AREA, "package", SKIP, "not installed", "for dflop run: pip install 'dflop[flows]'")
        return
    yield Finding(AREA, "package", OK, version)
    try:
        url, theirs = ask()
    except DflopError as error:
        yield Finding(AREA, "server", FAIL, error.what, error.hint)
    except Exception as error:  # settings of any kind of wrong end in errors of pydantic, TOML or Prefect's own
        advice = "see prefect config view, and PREFECT_... variables"
        yield Finding(AREA, "settings", FAIL, " ".join(str(error).split())[:300], advice)
    else:
        yield _server(url, theirs, version)


def _server(url: str, theirs: str, version: str) -> Finding:
    if not url:
        return Finding(AREA, "server", OK, "none configured: dflop run starts a temporary one")
    if _minor(theirs) < _minor(version):
        advice = "a client newer than its server may be refused: upgrade the server"
        return Finding(AREA, "server", WARN, f"{url}, Prefect {theirs}; the client is {version}", advice)
    return Finding(AREA, "server", OK, f"{url}, Prefect {theirs}")


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
