"""An address where a path is expected is shown as it was written, with the command that fetches it."""

from pathlib import Path

import pytest

from dflop.addresses import address_of, address_problem, hub_repo

COMMANDS = {
    "s3://bucket/rows.jsonl": "aws s3 cp s3://bucket/rows.jsonl .",
    "s3://bucket/folder": "aws s3 cp --recursive s3://bucket/folder folder",
    "gs://bucket/a/rows.parquet": "gcloud storage cp gs://bucket/a/rows.parquet .",
    "https://example.org/rows.jsonl": "curl -LO https://example.org/rows.jsonl",
    "oss://bucket/rows": "with your storage's own client",
    "hf://datasets/me/set": "hf download me/set --repo-type dataset --local-dir set",
    "hf://datasets/me/set@v2/data/a.parquet": (
        "hf download me/set data/a.parquet --repo-type dataset --revision v2 --local-dir set"
    ),
    "hf://me/model-7B": "hf download me/model-7B --local-dir model-7B",
    "https://huggingface.co/me/model-7B/tree/main": "hf download me/model-7B --revision main --local-dir model-7B",
    "https://huggingface.co/datasets/me/set/resolve/main/a.jsonl?download=true": (
        "hf download me/set a.jsonl --repo-type dataset --revision main --local-dir set"
    ),
}


@pytest.mark.parametrize(("address", "command"), COMMANDS.items())
def test_an_address_is_named_with_the_command_that_fetches_it(address, command):
    for given in (address, Path(address)):
        assert address_of(given) == address
        assert address_problem(given) == (
            f"`{address}` is an address, and dflop reads and writes files; to fetch it: {command}"
        )


@pytest.mark.parametrize("path", ["rows.jsonl", "/data/a:b/c", "C:/data", "a/b/c.json", "memory:/x", ""])
def test_a_path_is_none(path):
    assert (address_of(Path(path)), address_problem(path)) == ("", "")


def test_a_name_may_be_of_the_hub_unless_it_looks_like_a_file():
    found = hub_repo("Qwen/Qwen2.5-VL-7B-Instruct", is_dataset=False)
    assert found is not None
    assert (found.folder, found.is_dataset) == ("Qwen2.5-VL-7B-Instruct", False)
    assert hub_repo("me/set", is_dataset=True).command == "hf download me/set --repo-type dataset --local-dir set"
    for name in ("configs/demo.yaml", "data/rows.jsonl", "model", "a/b/c", "../x", "s3://me/set"):
        assert hub_repo(name, is_dataset=False) is None
