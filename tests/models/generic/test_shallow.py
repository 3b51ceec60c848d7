import pytest

from dflop.models.generic.classes import build, config_of, find_decoder
from dflop.models.generic.family import shallow_config, turn_of
from dflop.models.generic.specs import module_specs
from dflop.models.generic.structure import read_structure
from tests.models.generic.small import Small


@pytest.mark.parametrize(
    ("kinds", "turn"),
    [("aa", (0, 1)), ("dddf" * 3, (0, 4)), ("xeeee", (1, 1)), ("xdfdfd", (1, 2)), ("abc", (0, 3))],
)
def test_layers_alternate_in_turns_behind_a_leading_run(kinds, turn):
    assert turn_of(kinds) == turn


@pytest.mark.parametrize(("kind", "depth"), [("qwen3_5", 2), ("glm4v_moe", 2), ("qwen3_vl_moe", 1)])
def test_a_cut_model_has_the_layers_that_were_asked_for(kind, depth):
    family = Small(kind).family
    whole = read_structure(config_of(family.hf_config))
    cut = config_of(shallow_config(family.hf_config, whole, {"vision": 1, "llm": depth}))
    model = build(cut, attention="eager")
    decoder = find_decoder(model)[1]
    (vision,) = read_structure(cut).encoders
    assert (vision.num_layers or 1, len(decoder.layers)) == (1, depth)
    first = 1 if kind == "glm4v_moe" else 0  # the dense one in front is passed over
    kept = find_decoder(build(config_of(family.hf_config), attention="eager"))[1].layers[first : first + depth]
    shapes = [[(name, p.shape) for name, p in layer.named_parameters()] for layer in kept]
    assert [[(name, p.shape) for name, p in layer.named_parameters()] for layer in decoder.layers] == shapes


@pytest.mark.parametrize(("kind", "choices"), [("qwen3_5", (1,)), ("glm4v_moe", (1, 2))])
def test_only_what_the_engine_cuts_is_planned_with_tensor_parallelism(kind, choices):
    *_, llm = module_specs(read_structure(config_of(Small(kind).family.hf_config)))
    assert llm.tp_choices == choices
