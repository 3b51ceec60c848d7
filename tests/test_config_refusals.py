"""Sentences of sbatch and reasons of squeue lead to the key that decides the limit."""

import pytest

from dflop.config.slurm_refusals import KEYS, keys_of_refusal, refusal

POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("Invalid account or account/partition combination specified", "account"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "time"),
        ("Requested node configuration is not available", "shape"),
        ("Invalid qos specification", "qos"),
        ("Invalid generic resource (gres) specification", "gres"),
        ("Invalid feature specification", "constraint"),
        ("Memory specification can not be satisfied", "memory"),
        ("fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.", "memory option"),
        ("Requested reservation is invalid", "reservation"),
        ("Access denied to requested reservation", "reservation"),
        ("invalid partition specified: nowhere", "partition"),
        ("User's group not permitted to use this partition", "partition"),
        ("Node count specification invalid", "nodes"),
        ("Invalid job array specification", "jobs"),
        ("Job dependency problem", "dependency"),
        (f"QOSMaxSubmitJobPerUserLimit\n{POLICY}", "jobs"),
        (f"AssocGrpSubmitJobsLimit\n{POLICY}", "jobs"),
        (f"QOSMaxWallDurationPerJobLimit\n{POLICY}", "time"),
        (f"AssocMaxWallDurationPerJobLimit\n{POLICY}", "time"),
        (f"QOSMaxGRESPerJob\n{POLICY}", "fewer"),
        (f"QOSMaxNodePerUserLimit\n{POLICY}", "fewer"),
        (f"AssocMaxCpuPerJobLimit\n{POLICY}", "fewer"),
        (f"AssocGrpGRES\n{POLICY}", "fewer"),
        (POLICY, "any limit"),
    ],
)
def test_each_refusal_has_its_key(said, key):
    assert keys_of_refusal(f"sbatch: error: {said}") == KEYS[key]


def test_what_passes_by_itself_is_not_for_ever_and_other_words_mean_nothing():
    passing = ("AssocMaxJobsLimit", "QOSMaxJobsPerUserLimit", "AssocGrpCpuLimit", "QOSMaxGRESPerUser", "PartitionDown")
    assert [found is not None and found.is_for_ever for found in map(refusal, passing)] == [False] * len(passing)
    assert [refusal(reason) for reason in ("Priority", "Resources", "Dependency", "BeginTime", "Reservation")] == [
        None
    ] * 5
    assert keys_of_refusal("it is Tuesday") == "the cluster section"
