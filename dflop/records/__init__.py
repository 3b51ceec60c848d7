"""The values that travel round the loop, one frozen dataclass per noun.

Every value is also a table in the store (same name in snake_case, same field names), a JSON object and a line in
ARCHITECTURE.md. Fields are limited to int, float, str, bool, nested records and tuples of these, so that one generic
mapping serves Parquet, DuckDB and JSON alike. Units are in the names: `_s` seconds, `_bytes`, `_tokens`, `_px`,
`_frac` ratios in 0..1, `num_` counts.
"""

from dflop.records.corrections import (
    ALL_TOKENS,
    Correction,
    Decision,
    Factors,
    ModuleFactors,
    NodeFactor,
    RankFactor,
)
from dflop.records.costs import (
    ONE_RANK,
    TRAINS_ALL,
    TRAINS_NONE,
    TRAINS_PROJECTOR,
    ClusterSpec,
    CostTable,
    CostTerms,
    LayerKind,
    LinkCost,
    LinkMeasurement,
    Measurement,
    ModuleSpec,
    ParallelSpec,
    RunMode,
)
from dflop.records.mapping import from_dict, parse_json, to_dict
from dflop.records.observations import (
    BUSY_RATIO,
    ExpertLoad,
    JobRecord,
    MicrobatchSpan,
    RankMemory,
    RankSpan,
    RunEvent,
    RunInput,
    RunRecord,
    StepFlops,
    StepObservation,
)
from dflop.records.plans import ModulePlan, ModuleWork, Plan, PlanProgram, StepPlan, grids_of
from dflop.records.samples import LLM, MediaItem, ModuleLoad, ProfileRecord, QuarantinedSample, SampleShape

__all__ = [
    "ALL_TOKENS",
    "BUSY_RATIO",
    "LLM",
    "ONE_RANK",
    "TRAINS_ALL",
    "TRAINS_NONE",
    "TRAINS_PROJECTOR",
    "ClusterSpec",
    "Correction",
    "CostTable",
    "CostTerms",
    "Decision",
    "ExpertLoad",
    "Factors",
    "JobRecord",
    "LayerKind",
    "LinkCost",
    "LinkMeasurement",
    "Measurement",
    "MediaItem",
    "MicrobatchSpan",
    "ModuleFactors",
    "ModuleLoad",
    "ModulePlan",
    "ModuleSpec",
    "ModuleWork",
    "NodeFactor",
    "ParallelSpec",
    "Plan",
    "PlanProgram",
    "ProfileRecord",
    "QuarantinedSample",
    "RankFactor",
    "RankMemory",
    "RankSpan",
    "RunEvent",
    "RunInput",
    "RunMode",
    "RunRecord",
    "SampleShape",
    "StepFlops",
    "StepObservation",
    "StepPlan",
    "from_dict",
    "grids_of",
    "parse_json",
    "to_dict",
]
