import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.records import LLM
from dflop.simulate.order import Action, actions, in_flight, links, num_stages_after, returned, stage_links
from tests.builders import make_plan

SIZES = st.integers(0, 12)


def test_textbook_case():
    text = " ".join(f"{phase}{k}" for phase, k in actions(4, 2))
    assert text == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert actions(2, 0) == (Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1))


@given(SIZES, SIZES)
def test_every_microbatch_once_in_order_and_few_in_flight(num_microbatches, num_stages_after):
    order = actions(num_microbatches, num_stages_after)
    for phase in ("F", "B"):
        assert [a.microbatch for a in order if a.phase == phase] == list(range(num_microbatches))
    held = peak = 0
    for action in order:
        held += 1 if action.phase == "F" else -1
        assert held >= 0
        peak = max(peak, held)
    assert peak == min(num_microbatches, num_stages_after + 1) == in_flight(num_microbatches, num_stages_after)


def test_in_flight_of_many_stages_and_of_none():
    assert in_flight(4, [[4, 3, 0, -1], [1, 0, -1, -1]]).tolist() == [[4, 4, 1, 0], [2, 1, 0, 0]]


@given(SIZES, SIZES)
def test_what_has_returned_is_what_stands_in_front(num_microbatches, num_stages_after):
    order = actions(num_microbatches, num_stages_after)
    for k, last in returned(order).items():
        done = [b for phase, b in order[: order.index(Action("F", k))] if phase == "B"]
        assert last == max(done, default=-1)


def test_links_of_two_encoders_and_the_llm():
    assert links([2, 1, 3]) == ((0, 1), (3, 4), (4, 5), (1, 3), (2, 3))
    assert links([1]) == ()


@pytest.mark.parametrize("llm_pp", [1, 3])
def test_stages_of_a_plan(llm_pp):
    plan = make_plan({"vision": 1, LLM: 1}, llm_pp=llm_pp, encoder_pp=2)
    found = stage_links(plan)
    assert (("vision", 1), (LLM, 0)) in found
    assert len(found) == 1 + llm_pp
    # Every link leads one stage nearer to the loss.
    assert all(num_stages_after(plan, *a) == num_stages_after(plan, *b) + 1 for a, b in found)
