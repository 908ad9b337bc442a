"""The Triton kernels give the torch form's numbers: in Triton's interpreter on the CPU, and on a GPU where there is one."""

import os
import subprocess
import sys

import pytest
import torch

from ragen_agent import kernels, logprob
from ragen_agent.logprob import token_logprob
from tests.test_logprob import CURVES, problem


def readings(reader, device="cpu", dtype=torch.float32):
    """Both readings by `reader` of some tiles, for every curve, gradient and kind of token: [(name, tensor)]."""
    found = []
    for name in ("scaled", "all"):
        curve = CURVES[name]
        make = torch.Generator().manual_seed(1)
        raw = (torch.randn(6, 150, generator=make) * 4).to(device, dtype)
        raw[0, 3:90] = raw[1] = -torch.inf  # some and all of a row's logits have no probability
        token = torch.tensor([0, 1, 149, 70, -5, 200], device=device)  # the last two lie in other tiles
        by_logprob, by_entropy = torch.randn(2, 6, generator=make).to(device)
        tally = logprob.Tally.blank(6, by_logprob)
        for columns in (slice(0, 40), slice(40, 150)):
            reader.fold(raw[:, columns].clone(), token - columns.start, curve, tally)
        found += [(f"{name} {field}", value) for field, value in zip(tally._fields, tally, strict=True)]
        tail = tally.mass.clamp_min(1e-30).log()
        for tilt in (None, by_entropy):
            entropy = tail + tally.spread / tally.mass.clamp_min(1e-30)
            slope = reader.slope(raw.clone(), token, curve, tally.top + tail, entropy, by_logprob, tilt)
            found.append((f"{name} slope {tilt is not None}", slope.float()))
    return found


def compare(device="cpu", dtype=torch.float32, atol=1e-5):
    """The kernels' readings are torch's."""
    for (name, mine), (_, theirs) in zip(readings(kernels, device, dtype), readings(logprob.Torch, device, dtype), strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=1e-6, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


def whole(device="cpu"):
    """`token_logprob` through the kernels, in value and gradient, and a logit that is not a number."""
    kernels.usable = lambda raw: True  # the interpreter reads CPU tensors
    for curve in (CURVES["tempered"], CURVES["all"]):
        hidden, weight, bias, token = (leaf.detach().to(device) for leaf in problem(dtype=torch.float32))
        leaves = [leaf.requires_grad_() for leaf in (hidden, weight, bias)]
        got = token_logprob(hidden, weight, token, curve, bias, (4, 8))
        want = token_logprob(*(leaf.double() for leaf in leaves[:2]), token, curve, bias.double(), (100, 100))
        mine, theirs = ((*pair, *torch.autograd.grad((pair[0] - 0.3 * pair[1].cos()).sum(), leaves)) for pair in (got, want))
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b.float(), atol=1e-5, rtol=0)
    lost = token_logprob(torch.full((1, 1), torch.nan), torch.ones(3, 1), torch.tensor([0]))
    assert lost[0].isnan().all() and lost[1].isnan().all()


def test_in_tritons_interpreter_the_kernels_are_the_torch_form():
    pytest.importorskip("triton")
    code = "from tests import test_kernels as t; t.kernels.BLOCK = 64; t.compare(); t.whole()"  # several blocks a row
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_on_a_gpu_the_kernels_are_the_torch_form(dtype, atol):
    pytest.importorskip("triton")
    assert kernels.usable(torch.zeros(1, device="cuda"))
    compare("cuda", dtype, atol)


def test_tensors_on_the_cpu_and_float64_are_left_to_torch():
    assert not kernels.usable(torch.zeros(1)) and not kernels.usable(torch.zeros(1, dtype=torch.float64))


def test_importing_the_kernels_imports_no_triton():
    code = "import sys, torch; was = 'triton' in sys.modules; import ragen_agent.kernels; print(was or 'triton' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "True"
