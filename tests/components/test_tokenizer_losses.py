"""Losses of tokenizers: SSIM, changed pixels, a discriminator, a critic on codes, files of perceptual weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from rl_lab.components.nn.losses import (
    SSIM,
    ChangeWeighted,
    HingeGAN,
    Perceptual,
    frames_before,
    weighted_losses,
)
from rl_lab.components.nn.return_critic import ReturnCritic
from rl_lab.errors import ConfigError


def test_ssim_by_a_loop():
    torch.manual_seed(0)
    first, second = torch.rand(2, 1, 5, 6), torch.rand(2, 1, 5, 6)
    side, deviation = 5, 1.5
    line = [math.exp(-0.5 * ((n - 2) / deviation) ** 2) for n in range(side)]
    weights = [[a * b / sum(line) ** 2 for b in line] for a in line]
    wanted = []
    for x, y in zip(first[:, 0].double(), second[:, 0].double()):
        found = []
        for column in range(2):
            sums = dict.fromkeys(("x", "y", "xx", "yy", "xy"), 0.0)
            for i in range(side):
                for j in range(side):
                    w, a, b = weights[i][j], float(x[i, column + j]), float(y[i, column + j])
                    for key, value in (("x", a), ("y", b), ("xx", a * a), ("yy", b * b), ("xy", a * b)):
                        sums[key] += w * value
            vx, vy = sums["xx"] - sums["x"] ** 2, sums["yy"] - sums["y"] ** 2
            cov = sums["xy"] - sums["x"] * sums["y"]
            light = (2 * sums["x"] * sums["y"] + 1e-4) / (sums["x"] ** 2 + sums["y"] ** 2 + 1e-4)
            found.append(light * (2 * cov + 9e-4) / (vx + vy + 9e-4))
        wanted.append(1 - sum(found) / len(found))
    torch.testing.assert_close(SSIM()(first, second), torch.tensor(wanted).float(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(SSIM()(first, first), torch.zeros(2), atol=1e-5, rtol=0)


def test_changed_pixels_count_more():
    previous = torch.zeros(2, 1, 1, 4)
    target, prediction = torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1, 4)
    target[0, ..., 0] = 1.0  # one changed pixel, which is missed, and a wrong pixel elsewhere
    prediction[0, ..., 1] = 1.0
    prediction[1, ..., 1] = 1.0
    loss = ChangeWeighted(factor=3.0)(prediction, target, previous)
    torch.testing.assert_close(loss, torch.tensor([(4.0 + 1.0) / 7.0, 0.25]))
    named = weighted_losses({"change": ChangeWeighted(weight=2.0)}, prediction, target, None, previous)
    assert float(named["change"]) > 0.5


def test_frame_before_each_row():
    frames = torch.arange(8.0).view(2, 4, 1)
    assert frames_before(frames, None)[0, :, 0].tolist() == [1, 0, 1, 2]
    mask = torch.tensor([[True, True, False, False], [False, False, True, True]])
    before = frames_before(frames, mask)[..., 0]
    assert before[0, :2].tolist() == [1, 0] and before[1, 2:].tolist() == [7, 6]
    alone = torch.tensor([[False, True, False, False]])
    assert float(frames_before(frames[:1], alone)[0, 1, 0]) == 1.0  # itself


def test_discriminator_and_tokenizer_train_in_one_loss():
    torch.manual_seed(0)
    gan = HingeGAN(channels=4)
    prediction, target = torch.rand(2, 3, 16, 16, requires_grad=True), torch.rand(2, 3, 16, 16)
    gan(prediction, target).sum().backward()
    net = gan.discriminator
    assert prediction.grad is not None
    deceive = -net(prediction * 2 - 1).mean((-3, -2, -1)).sum()
    torch.testing.assert_close(prediction.grad, torch.autograd.grad(deceive, prediction)[0])
    real, made = net(target * 2 - 1), net(prediction.detach() * 2 - 1)
    hinge = (F.relu(1 - real) + F.relu(1 + made)).mean((-3, -2, -1)).sum()
    for parameter, gradient in zip(net.parameters(), torch.autograd.grad(hinge, list(net.parameters()))):
        torch.testing.assert_close(parameter.grad, gradient)
    assert gan(torch.rand(2, 1, 16, 16), torch.rand(2, 1, 16, 16)).shape == (2,)  # gray images


def test_returns_that_the_critic_predicts():
    critic = ReturnCritic(3, horizon=2, discount=0.5)
    reward = torch.tensor([[9.0, 1.0, 2.0, 4.0], [9.0, 1.0, 2.0, 4.0], [9.0, 1.0, 2.0, 0.0]])
    terminated = torch.zeros(3, 4, dtype=torch.bool)
    terminated[1, 1] = True  # nothing follows
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[2, 3] = False
    target, known = critic.targets(reward, terminated, mask)
    assert target.tolist() == [[2.0, 4.0], [1.0, 0.0], [2.0, 2.0]]
    assert known.tolist() == [[True, True], [True, True], [True, False]]
    codes = torch.randn(3, 4, 3, requires_grad=True)
    critic.loss(codes, reward, terminated, mask).backward()
    assert codes.grad is not None and codes.grad[0, 0].any() and not codes.grad[:, 2:].any()


def test_perceptual_weights_of_torchvision(tmp_path: Path):
    from rl_lab.components.nn.losses import STAGES

    tensors, inputs, place = {}, 3, 0
    torch.manual_seed(0)
    for layers, multiple in STAGES:
        for _ in range(layers):
            tensors[f"features.{place}.weight"] = torch.randn(multiple, inputs, 3, 3)
            tensors[f"features.{place}.bias"] = torch.randn(multiple)
            inputs, place = multiple, place + 2
        place += 1  # pooling
    tensors["classifier.0.weight"] = torch.zeros(2, 2)
    torch.save(tensors, tmp_path / "vgg16.pth")
    torch.save(
        {f"lin{n}.model.1.weight": torch.rand(1, m, 1, 1) for n, (_, m) in enumerate(STAGES)},
        tmp_path / "vgg.pth",
    )
    plain = Perceptual(path=str(tmp_path / "vgg16.pth"))
    assert torch.equal(plain.get_buffer("weight12"), tensors["features.28.weight"])
    weighted = Perceptual(path=str(tmp_path / "vgg16.pth"), linear=str(tmp_path / "vgg.pth"))
    one, two = torch.rand(2, 3, 16, 16), torch.rand(2, 3, 16, 16)
    assert not torch.allclose(plain(one, two), weighted(one, two))
    (tmp_path / "broken.pth").write_text("no tensors")
    with pytest.raises(ConfigError, match=r"broken\.pth could not be read"):
        Perceptual(path=str(tmp_path / "broken.pth"))
    with pytest.warns(UserWarning, match="random weights, which is not LPIPS"):
        Perceptual(width=2)
