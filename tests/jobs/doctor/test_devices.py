"""GPUs, torch and flash-attn: what is told of each combination, with stand-ins for what this machine lacks."""

from __future__ import annotations

import subprocess

import pytest

from dflop.jobs.doctor import devices
from dflop.jobs.doctor.findings import FAIL, OK, SKIP, WARN

SMI = "NVIDIA H100 80GB HBM3, 81559, 550.54.15\nNVIDIA H100 80GB HBM3, 81559, 550.54.15\n"
UNDEFINED = "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE"


@pytest.fixture
def run(monkeypatch):
    """Answers by what a command holds; everything is installed unless said otherwise."""
    answers: dict[str, tuple[int, str, str]] = {}
    monkeypatch.setattr(devices.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object())

    def answer(command):
        for part, (code, out, err) in answers.items():
            if part in " ".join(command):
                return subprocess.CompletedProcess(command, code, out, err)
        raise AssertionError(command)

    monkeypatch.setattr(devices, "_run", answer)
    return answers


def examined(*arguments, **options) -> dict[str, tuple[str, str, str]]:
    return {f.name: (f.status, f.detail, f.advice) for f in devices.machine(*arguments, **options)}


def test_a_gpu_that_torch_sees(run):
    run["nvidia-smi"] = (0, SMI, "")
    run["import torch"] = (0, "2.13.0+cu128 12.8 True 2 True\n", "")
    run["flash_attn"] = (0, "2.8.3\n", "")
    found = examined(True)
    assert found["GPUs"][:2] == (OK, "2: NVIDIA H100 80GB HBM3 (79.6 GiB), driver 550.54.15")
    assert found["torch"][:2] == (OK, "2.13.0+cu128, built for CUDA 12.8, sees 2 GPUs")
    assert found["flash-attn"][:2] == (OK, "2.8.3")


def test_a_cpu_torch_beside_a_gpu(run):
    run["nvidia-smi"] = (0, SMI, "")
    run["import torch"] = (0, "2.13.0+cpu - False 0 True\n", "")
    run["flash_attn"] = (0, "2.8.3\n", "")
    assert examined(False)["torch"][0] == WARN
    status, detail, advice = examined(True)["torch"]
    assert (status, detail) == (FAIL, "2.13.0+cpu, built for CPUs, sees 0 of 2 GPUs")
    assert "built for CUDA" in advice


def test_no_gpu_is_a_fault_only_where_one_is_wanted(run, monkeypatch):
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    run["import torch"] = (0, "2.13.0+cpu - False 0 True\n", "")
    run["flash_attn"] = (0, "2.8.3\n", "")
    assert examined(False)["GPUs"][0] == SKIP
    assert examined(False)["torch"][:2] == (OK, "2.13.0+cpu, built for CPUs")
    assert examined(True)["GPUs"][0] == FAIL


def test_a_flash_attn_of_another_torch_says_what_to_build_for(run):
    run["nvidia-smi"] = (9, "", "no devices")
    run["import torch"] = (0, "2.13.0+cu128 12.8 True 1 True\n", "")
    run["flash_attn"] = (1, "", f"Traceback\n  File x\n{UNDEFINED}\n")
    status, detail, advice = examined(False)["flash-attn"]
    assert (status, detail) == (WARN, UNDEFINED)
    assert "torch 2.13.0+cu128, CUDA 12.8, CXX11 ABI TRUE" in advice
    assert examined(False, attention="flash")["flash-attn"][0] == FAIL


def test_without_flash_attn_other_kernels_are_used(run, monkeypatch):
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    found = examined(False)
    assert found["torch"][0] == found["flash-attn"][0] == SKIP
    assert examined(False, attention="flash")["flash-attn"][0] == FAIL


def test_a_broken_torch_is_told_in_its_own_words(run):
    run["nvidia-smi"] = (9, "", "")
    run["import torch"] = (1, "", "OSError: libcudart.so.12: cannot open shared object file\n")
    run["flash_attn"] = (1, "", "")
    status, detail, _ = examined(False)["torch"]
    assert (status, detail) == (FAIL, "OSError: libcudart.so.12: cannot open shared object file")
    assert examined(False)["flash-attn"][1] == "it ended without a word"


def test_this_machine_tells_its_torch():
    finding = devices.torch_finding(0, False)
    assert finding.status == OK
    assert "built for" in finding.detail
