"""The README's first command passes here, and fails when something is wrong."""

import re

import kernel_code
import kernel_speed
import pytest
import quickstart
import torch

from quack_core import arch as arches
from quack_core.jit import cache
from quack_core.testing import cubin
from quack_core.testing.compare import EPS32
from quack_norm.ops.rmsnorm.spec import RMSNormFwdSpec

SPEC = RMSNormFwdSpec(4096, "bfloat16", "bfloat16")
NARROW = RMSNormFwdSpec(64, "bfloat16", "bfloat16", align=2)


@pytest.fixture
def one_kernel(monkeypatch):
    monkeypatch.setattr(kernel_code, "SPECS", [SPEC])


def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernel_code, "restart", lambda arch: None)


def test_results_are_right(device, capsys):
    assert quickstart.check(device)
    table = capsys.readouterr().out.splitlines()[4:]
    shares = [float(cell) for row in table for cell in re.findall(r"\d\.\d\d", row)]
    assert len(shares) == 3 * 4 + 5
    assert max(shares) <= 1
    assert min(shares) == 0.0  # h is x itself


@pytest.mark.parametrize("name", ["out", "h", "dx", "dweight", "dresidual"])
def test_a_wrong_result_is_found(monkeypatch, capsys, name):
    """One element of one result, off by 2 %."""
    right = quickstart.results

    def results(norm, leaves, dtype=None):
        found = right(norm, leaves, dtype)
        if norm is quickstart.quack and name in found:
            tensor = found[name] = found[name].clone()
            tensor.view(-1)[tensor.abs().argmax()] *= 1.02
        return found

    monkeypatch.setattr(quickstart, "results", results)
    assert not quickstart.check("cpu")
    output = capsys.readouterr().out
    assert len(re.findall(rf"WRONG: {name} \(\w+\): 1 of", output)) == (
        4 if name != "dresidual" else 1
    )


def test_without_gpu_kernels_are_inspected(monkeypatch, capsys, one_kernel):
    without_gpu(monkeypatch)
    assert quickstart.main() == 0
    rows = re.findall(
        rf"{SPEC.name} +(sm_\d+a)((?: +[\d/]+)+)$", capsys.readouterr().out, re.MULTILINE
    )
    assert [target for target, _ in rows] == ["sm_90a", "sm_100a", "sm_120a"]
    for _, cells in rows:
        threads, cluster, registers, spilled, *widths = cells.split()
        assert int(threads) % 32 == 0 and int(cluster) == 1 and 16 <= int(registers) <= 255
        assert (spilled, widths) == ("0", ["128", "128"])


def test_a_wrong_result_is_the_exit_status(monkeypatch):
    without_gpu(monkeypatch)
    monkeypatch.setattr(quickstart, "check", lambda device: False)
    monkeypatch.setattr(kernel_code, "inspect", lambda: True)
    assert quickstart.main() == 1


def test_narrow_accesses_are_found(monkeypatch, capsys):
    monkeypatch.setattr(kernel_code, "SPECS", [NARROW])
    assert not kernel_code.inspect()
    assert capsys.readouterr().out.count("WRONG\n") == 3


def test_a_missing_disassembler_is_said(monkeypatch, capsys, one_kernel):
    monkeypatch.setattr(cubin, "nvdisasm", lambda: None)
    assert kernel_code.inspect()
    output = capsys.readouterr().out
    assert len(re.findall(r" 0 +\? +\?$", output, re.MULTILINE)) == 3
    assert "want of nvdisasm" in output


def test_new_processes_find_the_kernel(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path))
    cache.clear_memory()
    assert kernel_code.load_seconds(arches.get("sm90")) > 0
    [stored] = tmp_path.glob("kernels/*.so")
    before = stored.stat()
    kernel_code.restart(arches.get("sm90"))
    assert list(tmp_path.glob("kernels/*.so")) == [stored]
    after = stored.stat()  # whoever compiles again puts another file in its place
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    output = capsys.readouterr().out
    assert f"kept in {tmp_path / 'kernels'}\n" in output
    assert re.search(r"\d\.\d{3} s in one new process, \d\.\d{3} s in another\n$", output)


def test_what_is_timed_is_the_same(device):
    """Both norms, with operands like those that `measure` hands them."""
    x, dout = torch.randn(2, 6, 64, device=device)
    weight = torch.rand(64, device=device, requires_grad=True)
    args = x.requires_grad_(), weight, dout
    ours, theirs = (
        kernel_speed.both(norm, *args) for norm in (kernel_speed.ours, kernel_speed.theirs)
    )
    for found, wanted in zip((ours[0], *ours[1]), (theirs[0], *theirs[1]), strict=True):
        # A handful of roundings on each side, of numbers no larger than the largest.
        assert (found - wanted).abs().max() <= 16 * EPS32 * wanted.abs().max()
    assert not kernel_speed.forward(kernel_speed.ours, *args).requires_grad


def test_speed(cuda, capsys):
    kernel_speed.measure()
    rows = [line.split()[-4:] for line in capsys.readouterr().out.splitlines()[-2:]]
    for row in rows:
        ours, theirs, copy, share = (float(cell.rstrip("%")) for cell in row)
        assert min(ours, theirs, copy) > 10  # 268 MB and more
        assert abs(share - 100 * copy / ours) <= 1  # what is printed is rounded
        assert share < 130  # else it did not move its bytes
