from dflop.doctor import installed
from dflop.doctor.finding import FAIL, OK, SKIP, WARN

NEEDED = ["duckdb>=1.5,<3", "numpy>=2.0,<2.6", 'prefect>=3.8; extra == "flows"', 'fastapi<0.151; extra == "flows"',
          'torch>=2.11; extra == "train"', 'pyarrow>=20; extra == "plan"', 'pyarrow>=20; extra == "flows"',
          'oldpython; python_version < "3.0"']  # fmt: skip


def examined(**versions: str) -> dict[str, tuple[str, str]]:
    return {f.name: (f.status, f.detail) for f in installed.packages(NEEDED, versions.get)}


def test_what_is_there_and_in_range_is_ok():
    found = examined(duckdb="1.5.6", numpy="2.4.6", prefect="3.8.8", fastapi="0.150.0")
    assert found["required"] == (OK, "2 packages, all in range")
    assert found["flows"] == (OK, "prefect 3.8.8, fastapi 0.150.0")
    assert found["train"] == (SKIP, "not installed")
    assert "demo" not in found  # this dflop's metadata has no such extra
    found = examined(duckdb="1.5.6", numpy="2.4.6", pyarrow="24.0.0")
    assert (found["plan"], found["flows"]) == ((OK, "pyarrow 24.0.0"), (SKIP, "not installed"))


def test_what_is_missing_or_out_of_range_is_named():
    found = examined(numpy="1.26.4", prefect="3.8.8", fastapi="0.160.0", torch="2.13.0+cpu")
    assert found["required"] == (FAIL, "duckdb is missing; numpy is 1.26.4, not <2.6,>=2.0")
    assert found["flows"] == (WARN, "fastapi is 0.160.0, not <0.151")
    assert found["train"] == (OK, "torch 2.13.0+cpu")


def test_versions_that_tests_did_not_see_are_named(tmp_path):
    (tmp_path / "constraints.txt").write_text("# exact\nnumpy==2.4.6\ntorch==2.13.0\nruamel.yaml==0.19.1 ; x\n")
    constraints = installed.read_constraints(tmp_path / "constraints.txt")
    assert constraints == {"numpy": "2.4.6", "torch": "2.13.0", "ruamel.yaml": "0.19.1"}
    same = installed.as_tested(constraints, {"numpy": "2.4.6", "torch": "2.13.0+cpu"}.get)
    assert (same.status, same.detail) == (OK, "2 packages match constraints.txt")
    other = installed.as_tested(constraints, {"numpy": "2.4.5", "torch": "2.13.0"}.get)
    assert (other.status, other.detail) == (WARN, "numpy 2.4.5 (tested: 2.4.6)")
    assert installed.read_constraints(tmp_path / "none.txt") == {}


def test_a_checkout_that_is_not_installed_is_a_warning(monkeypatch):
    monkeypatch.setattr(installed, "installed_version", lambda _: None)
    found = {f.name: f.status for f in installed.python_and_dflop()}
    assert found == {"Python": OK, "dflop": WARN}
