from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from rl_lab.utils.metrics import MetricMeter


def test_means_equal_loop():
    generator = torch.Generator().manual_seed(0)
    meter, plain = MetricMeter(), {}
    for i in range(50):
        row = {
            "loss": torch.randn((), generator=generator),
            "norm": torch.rand((), generator=generator),
            "lr": 0.1 * i,
        }
        if i % 3 == 0:
            row = {"value": torch.rand((), generator=generator), "norm": torch.rand((), generator=generator)}
        meter.add(row)
        for key, value in row.items():
            plain.setdefault(key, []).append(float(value))
    drained = meter.drain()
    assert set(drained) == set(plain)
    for key, values in plain.items():
        assert drained[key] == pytest.approx(np.mean(values), rel=1e-6)
    assert meter.drain() == {}


def test_kinds_of_values():
    meter = MetricMeter()
    for _ in range(2):
        meter.add(
            {
                "half": torch.tensor(1.5, dtype=torch.bfloat16),
                "int": torch.tensor([3]),
                "flag": torch.tensor(True),
                "graph": torch.ones((), requires_grad=True) * 2,
                "number": np.float64(4.0),
                "python": 5,
            }
        )
    assert meter.drain() == {"half": 1.5, "int": 3.0, "flag": 1.0, "graph": 2.0, "number": 4.0, "python": 5.0}


def test_values_are_read_when_added():
    """A captured graph writes its metrics to the same addresses each time."""
    meter, static = MetricMeter(), torch.zeros(())
    for value in (1.0, 2.0, 6.0):
        static.fill_(value)
        meter.add({"loss": static})
    assert meter.drain() == {"loss": 3.0}


def test_mixed_tensor_and_number():
    meter = MetricMeter()
    meter.add({"x": torch.tensor(1.0)})
    meter.add({"x": 3.0})
    assert meter.drain() == {"x": 2.0}


def test_long_sums_are_accurate():
    meter, value = MetricMeter(), torch.tensor(0.1)
    for _ in range(20_000):
        meter.add({"x": value})
    assert meter.drain()["x"] == pytest.approx(value.item(), rel=1e-12)


def test_adding_does_not_synchronize(monkeypatch):
    meter = MetricMeter()

    def refuse(*args, **kwargs):
        raise AssertionError("the host read a tensor")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "numpy", "__float__", "__bool__"):
            patch.setattr(torch.Tensor, name, refuse)
        for _ in range(3):
            meter.add({"a": torch.ones(()), "b": torch.zeros(())})
    assert meter.drain() == {"a": 1.0, "b": 0.0}


def test_vectors_raise():
    with pytest.raises(ValueError, match=r"'x' has shape \(2,\)"):
        MetricMeter().add({"x": torch.ones(2)})


def test_nonfinite_values_are_kept():
    meter = MetricMeter()
    meter.add({"x": torch.tensor(1.0)})
    meter.add({"x": torch.tensor(float("nan"))})
    assert np.isnan(meter.drain()["x"])


@pytest.mark.gpu
def test_no_sync_on_gpu():
    meter = MetricMeter()
    values = {"a": torch.ones((), device="cuda"), "b": torch.full((), 2.0, device="cuda")}
    meter.add(values)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            meter.add(values)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert meter.drain() == {"a": 1.0, "b": 2.0}


def test_meter_state_continues_the_sums():
    whole, first, second = MetricMeter(), MetricMeter(), MetricMeter()
    calls = [{"loss": torch.tensor(0.1 * i), "lr": 0.3 * i} for i in range(1, 8)]
    for number, call in enumerate(calls):
        whole.add(call)
        if number < 4:
            first.add(call)
    first.add({"other": torch.tensor(2.0)})
    whole.add({"other": torch.tensor(2.0)})
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert second.get_state() == first.get_state()
    for call in calls[4:]:
        second.add(call)
    assert second.drain() == whole.drain()  # bit for bit; "other" had no call after the restore
    assert second.drain() == {} and second.get_state() == {"floats": {}, "groups": []}
