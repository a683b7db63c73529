"""`rl-lab check`: what an agent will see of an environment, and what would go wrong."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import rl_lab
from rl_lab.cli import main
from rl_lab.errors import LabError
from rl_lab.tools.check_env import check_env


class Arm(gymnasium.Env):
    """A camera and joints; `fault` spoils one thing."""

    def __init__(self, fault: str = "", render_mode: str | None = None) -> None:
        self.fault = fault
        self.render_mode = render_mode
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (32, 32, 3), np.uint8),
                "joints": spaces.Box(-1, 1, (4,), np.float32),
            }
        )
        self.action_space = spaces.Box(-2, 2, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=None if self.fault == "unseeded" else seed)
        self.elapsed = 0
        return self.look(), {}

    def step(self, action):
        self.elapsed += 1
        reward = float("nan") if self.fault == "nan" else -float(np.abs(action).sum())
        return self.look(), reward, False, self.fault != "endless" and self.elapsed >= 20, {}

    def look(self):
        joints = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        joints = {"shape": joints[:3], "bounds": joints + 5}.get(self.fault, joints)
        return {"camera": self.np_random.integers(0, 256, (32, 32, 3), dtype=np.uint8), "joints": joints}

    def render(self):
        return np.zeros((40, 40, 3), np.uint8)


class Switch(gymnasium.Env):
    """A vector and discrete actions."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.ones(3, np.float32), float(action), True, False, {}


def states(checked) -> dict[str, str]:
    return {finding.name: finding.state for finding in checked.findings}


def test_a_good_environment_is_described_and_gets_a_command():
    checked = check_env(Arm, steps=60)
    assert checked.ok and set(states(checked).values()) == {"ok"}
    assert [row[0] for row in checked.seen] == ["camera", "joints"]
    assert checked.seen[0][2] == "image, 3 channels of 32×32"
    assert checked.command == (
        "rl-lab train +experiment=dreamer_gym_vision environment.task=tests.tools.test_check_env:Arm"
    )
    assert "3 ended, after 20 steps" in str(checked)
    assert "what the agent will see" in str(checked) and repr(checked) == str(checked)
    assert check_env(Arm, steps=5, size=None).command.endswith(" environment.size=null")


@pytest.mark.parametrize(
    ("fault", "name", "state", "words"),
    [
        ("nan", "step", "bad", "reward is nan at step 1"),
        ("shape", "step", "bad", "observation 'joints' has shape (3,), not (4,)"),
        ("bounds", "spaces", "warn", "outside of its bounds"),
        ("unseeded", "determinism", "warn", "use self.np_random only"),
        ("endless", "episodes", "warn", "set environment.time_limit"),
    ],
)
def test_each_fault_is_named(fault, name, state, words):
    checked = check_env("tests.tools.test_check_env:Arm", steps=60, fault=fault)
    finding = next(finding for finding in checked.findings if finding.name == name)
    assert finding.state == state and words in finding.text
    assert checked.ok == (state != "bad")
    assert not checked.ok or f"+environment.fault={fault}" in checked.command


def test_presets_by_observation_and_action():
    discrete = check_env(Switch, steps=20).presets
    assert [words.split()[0] for words, _ in discrete] == ["dreamer_gym", "tdmpc2_gym"]
    assert "tdmpc_categorical_policy" in discrete[1][0]
    continuous = check_env("Pendulum-v1", steps=20).presets
    assert [words for words, _ in continuous] == ["dreamer_gym", "tdmpc2_gym"]


def test_the_verb_and_its_exit_status(capsys):
    assert main(["check", "tests.tools.test_check_env:Switch", "--steps", "20"]) == 0
    assert "train: rl-lab train +experiment=dreamer_gym" in capsys.readouterr().out
    assert main(["check", "tests.tools.test_check_env:Arm", "fault=nan", "--steps", "20"]) == 1
    assert "not ready" in capsys.readouterr().out
    assert main(["check", "tests.tools.test_check_env:Arn"]) == 1
    assert "Did you mean 'Arm'" in capsys.readouterr().err


def test_an_instance_is_refused_with_what_to_pass():
    with pytest.raises(LabError, match=r"pass a class, a function that creates one"):
        rl_lab.check_env(Switch())
    with pytest.raises(LabError, match=r"pass a class"):
        rl_lab.make_env(Switch())
