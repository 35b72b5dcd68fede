import math

import pytest
import torch

from mrl.algorithm.numeric import safe_exp


def test_safe_exp_is_exp_and_then_its_tangent():
    x = torch.tensor([-100.0, -1.0, 0.0, 19.9, 20.0])
    torch.testing.assert_close(safe_exp(x), x.exp())
    assert safe_exp(torch.tensor(25.0)).item() == pytest.approx(6 * math.exp(20), rel=1e-5)
    far = torch.tensor([300.0], requires_grad=True)
    safe_exp(far).backward()
    assert far.grad.item() == pytest.approx(math.exp(20), rel=1e-5)
