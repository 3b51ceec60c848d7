"""The section of a run's page on the check of its model."""

from dataclasses import replace

from dflop.models.generic.exactness import Exactness, KeptCheck, MediumCheck
from dflop.report.model_check import check_section, module_table
from dflop.report.run_page import run_page
from dflop.report.summary import RunSummary

TEXT = MediumCheck("text", (("llm.layers.0.mlp", 3e-7), ("llm.layers.0.self_attn", 2e-7)))
IMAGE = MediumCheck("image", (("vision.layers.0.mlp", 4e-6), ("llm.layers.0.self_attn", 3e-6)))
VIDEO = MediumCheck("video", (), "no encoder is known for video")
CHECK = KeptCheck("torch 2", "abc", 86_400.0, Exactness((TEXT, IMAGE, VIDEO), 9), (("video", "it samples frames"),))


def test_a_check_states_verdict_versions_date_and_what_is_refused() -> None:
    section = check_section(CHECK, "not shown", "torch 2")
    assert section.text == ""
    assert section.facts == (
        ("stages", "exact"),
        ("compared with", "torch 2"),
        ("checked", "1970-01-02 00:00 UTC, by dflop abc"),
        ("video refused", "it samples frames"),
    )
    media, modules = section.tables
    assert [row[:3] for row in media.rows] == [
        ("text", "exact", "3.0e-07"), ("image", "exact", "4.0e-06"), ("video", "not checked", ""),
    ]  # fmt: skip
    assert media.rows[2][-1] == VIDEO.problem
    assert modules == module_table(CHECK.exactness.checks)


def test_modules_have_an_error_per_checked_medium_worst_first() -> None:
    table = module_table((TEXT, IMAGE, VIDEO))
    assert table.header == ("module", "text", "image")
    assert table.rows == (
        ("vision.layers.0.mlp", "", "4.0e-06"),
        ("llm.layers.0.self_attn", "2.0e-07", "3.0e-06"),
        ("llm.layers.0.mlp", "3.0e-07", ""),
    )


def test_other_versions_and_stages_that_differ_are_stated() -> None:
    differs = replace(CHECK, exactness=Exactness((replace(TEXT, errors=(("llm.layers.0.mlp", 0.2),)),), 9))
    facts = dict(check_section(differs, "", "torch 3").facts)
    assert facts["stages"] == "not exact"
    assert facts["compared with"] == "torch 2; the run has torch 3, for which it was not checked"


def test_without_a_check_the_section_says_how_to_make_one() -> None:
    section = check_section(None, "dflop model check FOLDER", "torch 2")
    assert (section.text, section.facts, section.tables) == ("dflop model check FOLDER", (), ())


def test_the_page_of_a_run_has_the_check_of_its_model(run: RunSummary) -> None:
    sections = run_page(replace(run, model_check=(CHECK, ""))).sections
    assert check_section(CHECK, "", run.run.software) in sections
