"""`rl_lab.train(env=…)`: classes, factories and names; also of a program that has no import path for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rl_lab
from rl_lab.environments.suites.gym import name_task
from rl_lab.errors import ConfigError, LabError
from rl_lab.run_folder import RunFolder
from rl_lab.training import override_words
from tests.tools.test_check_env import Switch

TINY = ["debug=tiny", "training.total_timesteps=40", "logging.tensorboard=false", "environment.num_envs=2"]


def test_the_task_of_an_environment():
    assert name_task("CartPole-v1") == "CartPole-v1"
    assert name_task(Switch) == "tests.tools.test_check_env:Switch"
    assert name_task(lambda: Switch()) == "python:lambda"
    with pytest.raises(ConfigError, match="env is a int, and a run needs several environments"):
        name_task(3)


def test_overrides_are_words_a_string_or_a_dict():
    assert override_words("debug=tiny 'a=b c'") == ["debug=tiny", "a=b c"]
    given = {"a": None, "b": True, "c": [1, "x"], "d": {"e": 2.5}, "environment.task": Switch}
    assert override_words(given) == [
        "a=null",
        "b=true",
        "c=[1,x]",
        "d={e:2.5}",
        "environment.task=tests.tools.test_check_env:Switch",
    ]
    with pytest.raises(ConfigError, match="a is a set"):
        override_words({"a": {1}})


def test_debug_is_the_word_of_that_name(tmp_path):
    words = ["debug=tiny", "logging.tensorboard=false", f"run_dir={tmp_path / 'run'}"]
    run = rl_lab.train("dreamer_cartpole", words, debug="tiny", say=lambda text: None)  # said twice: no harm
    config = RunFolder(run.path).load_config()
    assert config.training.total_timesteps == 100 and config.environment.time_limit == 20
    for wrong in ("tony", True, ""):
        with pytest.raises(ConfigError, match=rf"^debug is '{wrong}'\..* Known: tiny\.$"):
            rl_lab.train("dreamer_cartpole", debug=wrong)


@pytest.mark.parametrize("env", [Switch, lambda: Switch()])
def test_train_with_an_environment(env, tmp_path):
    run = rl_lab.train(overrides=[*TINY, f"run_dir={tmp_path / 'run'}"], env=env, say=lambda text: None)
    config = RunFolder(run.path).load_config()
    assert config.experiment.name in ("dreamer_Switch", "dreamer_lambda")
    assert run.counters["env_steps"] >= 40
    agent = rl_lab.load_agent(run.path)
    assert int(agent.act([0.0, 0.0, 0.0])) in (0, 1)


def test_another_environment_is_in_the_name_of_the_run(tmp_path):
    words = [*TINY, "environment.task=Acrobot-v1", f"run_dir={tmp_path / 'run'}"]
    run = rl_lab.train("dreamer_cartpole", ["environment=gym", *words], say=lambda text: None)
    assert RunFolder(run.path).load_config().experiment.name == "dreamer_cartpole_Acrobot-v1"


NOTEBOOK = """
import sys
import gymnasium, numpy as np, rl_lab

class Bell(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), {}
    def step(self, action):
        self.t += 1
        return self.np_random.uniform(-1, 1, 3).astype(np.float32), float(action), False, self.t > 9, {}

words = ["debug=tiny", "training.total_timesteps=40", "logging.tensorboard=false", "environment.workers=2"]
if sys.argv[1] == "train":
    rl_lab.train(overrides=[*words, f"run_dir={sys.argv[2]}"], env=Bell)
else:
    rl_lab.resume(sys.argv[2], "training.total_timesteps=60", env=Bell)
    print("mean", rl_lab.evaluate(sys.argv[2], episodes=2)["return_mean"])
"""


def test_a_class_without_an_import_path_in_worker_processes_and_after_a_resume(tmp_path):
    """A cell of a notebook: the class is in `__main__`."""
    run = tmp_path / "run"

    def program(action: str) -> str:
        command = [sys.executable, "-c", NOTEBOOK, action, str(run)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    program("train")
    assert RunFolder(run).load_config().environment.task == "python:Bell"
    with pytest.raises(LabError, match=r"pass it again, as in rl_lab.resume\(run, env=Bell\)"):
        rl_lab.resume(run, "training.total_timesteps=60", say=lambda text: None)
    with pytest.raises(LabError, match="was trained in python:Bell"):
        rl_lab.resume(run, env="CartPole-v1", say=lambda text: None)
    assert "mean" in program("resume")


def test_errors_of_python_functions_have_no_cause_to_show(monkeypatch):
    monkeypatch.delenv("RL_LAB_DEBUG", raising=False)
    with pytest.raises(LabError, match="Did you mean 'dreamer_cartpole'") as found:
        rl_lab.train("dreamer_cartpol")
    assert found.value.__cause__ is None and found.value.__suppress_context__
    monkeypatch.setenv("RL_LAB_DEBUG", "1")
    with pytest.raises(LabError) as found:
        rl_lab.train("dreamer_cartpol")
    assert found.value.__cause__ is not None
    assert "".join(found.value._render_traceback_()).startswith("Traceback")
    monkeypatch.delenv("RL_LAB_DEBUG")
    assert found.value._render_traceback_() == [f"ConfigError: {found.value}"], "what a notebook shows"


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("environment=Acrobot-v1", "environment=gym environment.task=Acrobot-v1"),
        ("env=gym", "the key is 'environment'. Use environment=gym"),
        ("env=CartPole-v1", "Use environment=gym environment.task=CartPole-v1"),
        ("environment=pong", "environment=atari100k environment.task=pong"),
        ("environment=Acrobat", "Did you mean 'Acrobot-v1'"),
        ("environment=cartpol", "Did you mean 'cartpole'"),
        ("task=CartPole-v1", "use environment.task=CartPole-v1"),
        ("seed=1", "use experiment.seed=1"),
    ],
)
def test_short_words_are_answered_with_the_words_to_type(word, answer):
    with pytest.raises(ConfigError) as found:
        rl_lab.train(overrides=[word])
    assert answer in str(found.value)
