from pathlib import Path

import pytest

from dflop import resources
from dflop.errors import DflopError


def test_a_wheel_serves_its_own_copy_even_beside_a_foreign_folder(tmp_path: Path) -> None:
    package = tmp_path / "dflop"
    (package / "_resources" / "configs").mkdir(parents=True)
    (tmp_path / "configs").mkdir()
    assert resources.path("configs", package=package) == package / "_resources" / "configs"


def test_an_incomplete_installation_is_named(tmp_path: Path) -> None:
    (tmp_path / "dflop").mkdir()
    with pytest.raises(DflopError, match="lacks its `sql` folder"):
        resources.path("sql", package=tmp_path / "dflop")
