"""The profiler on a real device: CUDA timings in bf16 fit a cost table."""

from __future__ import annotations

from dflop.cost.fit import fit_cost_tables
from dflop.profile.hardware import hardware_name, software_name
from dflop.profile.probe import ProbeSettings
from dflop.profile.run import profile_model
from tests.train import synthetic


def test_every_module_gets_a_cost_table(cuda):
    family = synthetic.family()
    settings = ProbeSettings("gpu", hardware_name("cuda"), software_name(), "bfloat16", num_repeats=3)
    measurements = list(
        profile_model(
            family,
            synthetic.make_shapes(60, seed=0),
            token_config=family.token_ids(synthetic.TOKEN_IDS),
            vocab_size=synthetic.VOCAB_SIZE,
            settings=settings,
            depths=(1, 2),
            num_probes=12,
            max_samples=12,
            budget_s=30,
            device=cuda,
            progress=print,
        )
    )
    tables = fit_cost_tables(measurements, family.specs())
    assert {t.module for t in tables} == {"vision", "audio", "llm"}
    assert all(m.forward_s > 0 and m.backward_s > 0 for m in measurements)
