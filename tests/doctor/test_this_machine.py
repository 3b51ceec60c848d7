"""GPUs, torch and flash-attn: what is told of each combination, with stand-ins for what this machine lacks."""

import subprocess

import pytest

from dflop.doctor import this_machine
from dflop.doctor.finding import FAIL, OK, SKIP, WARN

SMI = "NVIDIA H100 80GB HBM3, 81559, 550.54.15\nNVIDIA H100 80GB HBM3, 81559, 550.54.15\n"
UNDEFINED = "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE"


SEES, BLIND = "2.13.0+cu128 12.8 True 2 True\n", "2.13.0+cpu - False 0 True\n"


@pytest.fixture
def machine(monkeypatch):
    """Findings where nvidia-smi and Python answer so, or are not there."""

    def examined(smi, torch, flash, *, flash3=None, wants_gpu=False, attention="auto"):
        def answer(command):
            line = " ".join(command)
            flashes = flash3 if "flash_attn_interface" in line else flash
            found = smi if "nvidia-smi" in line else flashes if "flash_attn" in line else torch
            return subprocess.CompletedProcess(command, *found)

        monkeypatch.setattr(this_machine, "_run", answer)
        monkeypatch.setattr(this_machine.shutil, "which", lambda name: smi and f"/usr/bin/{name}")
        there = {"torch": torch, "flash_attn": flash, "flash_attn_interface": flash3}
        monkeypatch.setattr(this_machine.importlib.util, "find_spec", there.__getitem__)
        return {f.name: f for f in this_machine.machine(wants_gpu, attention=attention)}

    return examined


FLASH = (0, "2.8.3\n", "")
GPUS = (0, SMI, "")


def test_a_gpu_that_torch_sees(machine):
    found = machine(GPUS, (0, SEES, ""), FLASH, wants_gpu=True)
    assert {f.status for f in found.values()} == {OK}
    assert found["GPUs"].detail == "2: NVIDIA H100 80GB HBM3 (79.6 GiB), driver 550.54.15"
    assert found["torch"].detail == "2.13.0+cu128, built for CUDA 12.8, sees 2 GPUs"
    assert found["flash-attn"].detail == "2.8.3"


def test_no_gpu_and_a_cpu_torch_beside_one_are_faults_only_where_gpus_are_wanted(machine):
    assert machine(GPUS, (0, BLIND, ""), FLASH)["torch"].status == WARN
    finding = machine(GPUS, (0, BLIND, ""), FLASH, wants_gpu=True)["torch"]
    assert (finding.status, finding.detail) == (FAIL, "2.13.0+cpu, built for CPUs, sees 0 of 2 GPUs")
    assert "built for CUDA" in finding.advice
    found = machine(None, (0, BLIND, ""), FLASH)
    assert found["GPUs"].status == SKIP
    assert (found["torch"].status, found["torch"].detail) == (OK, "2.13.0+cpu, built for CPUs")
    assert machine(None, (0, BLIND, ""), FLASH, wants_gpu=True)["GPUs"].status == FAIL


def test_a_flash_attn_of_another_torch_says_what_to_build_for(machine):
    broken = (1, "", f"Traceback\n  File x\n{UNDEFINED}\n")
    finding = machine((9, "", "no devices"), (0, SEES, ""), broken)["flash-attn"]
    assert (finding.status, finding.detail) == (WARN, UNDEFINED)
    assert "torch 2.13.0+cu128, CUDA 12.8, CXX11 ABI TRUE" in finding.advice
    assert machine(GPUS, (0, SEES, ""), broken, attention="flash")["flash-attn"].status == FAIL
    assert machine(GPUS, (0, SEES, ""), (1, "", ""))["flash-attn"].detail == "it ended without a message"


def test_flash_attention_3_is_looked_for_where_it_is_or_is_asked_for(machine):
    there, broken = (0, "can be imported\n", ""), (1, "", UNDEFINED)
    assert "FlashAttention-3" not in machine(GPUS, (0, SEES, ""), FLASH)
    assert machine(GPUS, (0, SEES, ""), FLASH, flash3=there)["FlashAttention-3"].status == OK
    assert machine(GPUS, (0, SEES, ""), FLASH, flash3=broken)["FlashAttention-3"].status == WARN
    missing = machine(GPUS, (0, SEES, ""), FLASH, attention="flash3")["FlashAttention-3"]
    assert (missing.status, missing.detail) == (FAIL, "not installed")
