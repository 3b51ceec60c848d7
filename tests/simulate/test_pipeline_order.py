from hypothesis import given
from hypothesis import strategies as st

from dflop.simulate.pipeline_order import Action, one_f_one_b

SIZES = st.integers(0, 12)


def test_textbook_case():
    text = " ".join(f"{phase}{k}" for phase, k in one_f_one_b(4, 2))
    assert text == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert one_f_one_b(2, 0) == (Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1))


@given(SIZES, SIZES)
def test_every_microbatch_once_in_order_and_few_in_flight(num_microbatches, num_stages_after):
    actions = one_f_one_b(num_microbatches, num_stages_after)
    for phase in ("F", "B"):
        assert [a.microbatch for a in actions if a.phase == phase] == list(range(num_microbatches))
    in_flight = peak = 0
    for action in actions:
        in_flight += 1 if action.phase == "F" else -1
        assert in_flight >= 0
        peak = max(peak, in_flight)
    assert peak == min(num_microbatches, num_stages_after + 1)
