"""A fault that no longer has its place in the code would be skipped in silence."""

from tests.mutants.__main__ import ROOT
from tests.mutants.table import read_table


def test_every_fault_has_its_place_and_its_tests():
    faults = read_table().values()
    found = {m.id: (ROOT / "dflop" / m.file).read_text(encoding="utf-8").count(m.old) for m in faults}
    assert {name: count for name, count in found.items() if count != 1} == {}
    assert [path for m in faults for path in m.tests if not (ROOT / path).exists()] == []
