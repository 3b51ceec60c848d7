"""Models and datasets that are named by their name on the Hugging Face hub: fetched where a person asks for that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dflop.addresses import address_of, hub_repo
from dflop.errors import ConfigError
from dflop.models.unsupported import refuse_adapter
from dflop.run.messages import Say

_TEXTS = ("*.json", "*.jinja", "*.model", "*.txt")
"""Files of a model that a plan is made from. Weights are what training starts from."""
_MAX_NAMED = 5


def local(path: Path, say: Say, *, is_dataset: bool, downloads: bool, with_weights: bool = False) -> Path:
    """A path that is there as it is; a name or an address on the hub as the folder that it is fetched into.

    Args:
        path: As a person gave it.
        say: Receives lines on what is downloaded.
        is_dataset: What a name alone means.
        downloads: Whether to fetch it, into a folder of its name here.
        with_weights: Of a model: whether to fetch more than its settings and tokenizer.

    Raises:
        ConfigError: it is on the hub and not to be fetched, cannot be, or is of the other kind.
    """
    repo = hub_repo(path, is_dataset=is_dataset)
    is_named = address_of(path) or not path.parent.is_dir()  # else a path whose last part is mistyped
    if repo is None or not is_named or path.exists():
        return path
    given = address_of(path) or str(path)
    kind, wanted = ("dataset" if of else "model" for of in (repo.is_dataset, is_dataset))
    if kind != wanted:
        raise ConfigError(f"`{given}` is a {kind}, and a {wanted} is expected")
    if not downloads:
        nearby = "" if is_dataset else "".join(f"; {line}" for line in _near(Path()))
        hint = f"to fetch a {kind} of that name from the Hugging Face hub: {repo.command}; or add --download{nearby}"
        raise ConfigError(f"`{given}` is no file or folder here", hint=hint)
    from huggingface_hub import snapshot_download

    say(f"downloading {kind} {repo.id} from the Hugging Face hub into {repo.folder}")
    some = (f"{repo.inner}*",) if repo.inner else None if is_dataset or with_weights else _TEXTS
    try:
        snapshot_download(
            repo.id, repo_type=kind, revision=repo.revision or None, local_dir=repo.folder,
            allow_patterns=list(some) if some else None,
        )  # fmt: skip
    except Exception as error:  # of the network, of the hub, of the disk: its library has a class for each
        what = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"cannot download `{repo.id}`: {what}", hint=f"with a network: {repo.command}") from error
    return Path(repo.folder) / repo.inner


def model_config(path: Path) -> Path:
    """The `config.json` or YAML file that a model's path means.

    Raises:
        ConfigError: there is none, or an adapter's alone; the hint names folders that have one.
    """
    if path.is_dir():
        refuse_adapter(path)
        if (found := path / "config.json").exists():
            return found
        raise ConfigError(f"`{path}` has no config.json", hint="; ".join(_near(path)) or "name a model's folder")
    if not path.exists():
        nearby = "; ".join(_near(path.parent if path.parent.is_dir() else Path()))
        raise ConfigError(f"`{path}` does not exist", hint=nearby or f"the working directory is {Path.cwd()}")
    return path


def _near(folder: Path) -> Iterator[str]:
    """Folders in one that are models'."""
    found = sorted(str(p.parent) for depth in ("*", "*/*") for p in folder.glob(f"{depth}/config.json"))
    if found:
        more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
        yield f"folders with a config.json: {', '.join(found[:_MAX_NAMED])}{more}"
