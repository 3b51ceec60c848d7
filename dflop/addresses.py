"""Addresses where a path is expected, `s3://bucket/rows.jsonl`, and names of the hub, `Qwen/Qwen2.5-VL-7B-Instruct`.

dflop reads files only. An address is recognized before it becomes a path, which would drop one of two slashes, and the
error shows it as it was written, with the command that fetches it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

_SCHEMES = ("s3", "gs", "hf", "http", "https", "oss", "ftp", "azure", "az", "abfs", "abfss", "hdfs")
_ADDRESS = re.compile(rf"({'|'.join(_SCHEMES)}):/+(.*)", re.IGNORECASE | re.DOTALL)
_HUB_SITE = re.compile(r"(?:www\.)?(?:huggingface\.co|hf\.co)/(.+)")
_HUB_PAGE = re.compile(r"(?:/(?:tree|resolve|blob|raw)/(?P<revision>[^/?]+))?(?:/(?P<inner>[^?]*))?(?:\?.*)?")
_NAME = r"[A-Za-z0-9][\w.-]*"
_HUB_ID = re.compile(rf"{_NAME}/{_NAME}")
_OF_FILES = (".yaml", ".yml", ".json", ".jsonl", ".csv", ".parquet", ".tar", ".gz", ".zst", ".txt")


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A model or dataset of the Hugging Face hub, or something in it."""

    id: str
    is_dataset: bool
    revision: str = ""
    inner: str = ""
    """Path inside it; empty: all of it."""

    @property
    def folder(self) -> str:
        """Name of the folder that it is fetched into."""
        return self.id.rpartition("/")[2]

    @property
    def command(self) -> str:
        """What fetches it into that folder."""
        parts = ["hf download", self.id, *([self.inner] if re.search(r"\.\w+$", self.inner) else [])]
        parts += ["--repo-type dataset"] * self.is_dataset
        parts += [f"--revision {self.revision}"] if self.revision else []
        return " ".join([*parts, f"--local-dir {self.folder}"])


def address_of(path: PurePath | str) -> str:
    """The address that a text or a path made of one is; empty: it is a path."""
    match = _ADDRESS.fullmatch(str(path))
    return f"{match[1]}://{match[2]}" if match else ""


def hub_repo(path: PurePath | str, *, is_dataset: bool) -> HubRepo | None:
    """What of the hub an address or a name like `owner/name` means; None: nothing, or it may as well be a file.

    Args:
        path: As it was given, or a path made of that.
        is_dataset: Where a name alone does not say.
    """
    scheme, _, rest = (address := address_of(path)).partition("://")
    if not address:
        text = str(path)
        return HubRepo(text, is_dataset) if _HUB_ID.fullmatch(text) and not text.lower().endswith(_OF_FILES) else None
    if scheme.lower() in ("http", "https"):
        site = _HUB_SITE.fullmatch(rest)
        rest = site[1] if site else ""
    elif scheme.lower() != "hf":
        return None
    of_datasets = rest.startswith("datasets/")
    name, marked, after = rest.removeprefix("datasets/").removeprefix("models/").partition("@")
    revision, _, inner = after.partition("/")
    found = re.match(rf"({_NAME}(?:/{_NAME})?)(.*)", name, re.DOTALL)
    page = _HUB_PAGE.fullmatch(found[2]) if found else None
    if found is None or page is None:
        return None
    inner = inner if marked else page["inner"] or ""
    return HubRepo(found[1], of_datasets, revision or page["revision"] or "", inner.strip("/"))


def address_problem(path: PurePath | str) -> str:
    """Why an address cannot be read, with the command that fetches it; empty: it is a path."""
    if not (address := address_of(path)):
        return ""
    return f"`{address}` is an address, and dflop reads and writes files; to fetch it: {_command(address)}"


def _command(address: str) -> str:
    scheme, is_folder = address.partition("://")[0].lower(), not re.search(r"\.\w+$", address)
    if (repo := hub_repo(address, is_dataset=False)) is not None:
        return repo.command
    name = address.rstrip("/").rpartition("/")[2]
    if scheme == "s3":
        return f"aws s3 cp{' --recursive' * is_folder} {address} {name if is_folder else '.'}"
    if scheme == "gs":
        return f"gcloud storage cp{' --recursive' * is_folder} {address} ."
    return f"curl -LO {address}" if scheme in ("http", "https", "ftp") else "with your storage's own client"
