"""Flags and keys of other programs are answered with the words to type."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from rl_lab.cli import main
from rl_lab.config.compose import compose_config, known_choices
from rl_lab.config.short_names import FLAGS, KEYS, words_for
from rl_lab.errors import ConfigError

ANSWERS = {
    "train --steps 100": "Write training.total_timesteps=100.",
    "train --env Acrobot-v1 --total-timesteps=9": (
        "Write environment=gym environment.task=Acrobot-v1 training.total_timesteps=9."
    ),
    "train --env": "Write environment=gym environment.task=NAME.",
    "train debug=tiny --seed environment.workers=2": "Write experiment.seed=….",
    "train --gpu": "Write experiment.device=cuda.",
    "train --multrun": "Did you mean '--multirun'?",
    "train --no-such-flag --steps 3": "Known: --cfg,",
    "resume RUN --steps 5": "Write training.total_timesteps=5.",
    "eval --run outputs/x": "The run needs no flag: rl-lab eval RUN.",
    "eval --num-episodes 3": "Did you mean '--episodes'?",
    "eval --best": "Use --checkpoint best.",
    "play --nonsense": "Known: ",
}


@pytest.mark.parametrize("line", ANSWERS)
def test_wrong_flags(line: str, capsys):
    assert main(line.split()) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: unrecognized arguments: --") and ANSWERS[line] in message
    assert message.count("\n") == 1


WORDS = {
    "lr=1e-3": "lr=1e-3: use algorithm.learning_rate=1e-3",
    "env=CartPole-v1": "Use environment=gym environment.task=CartPole-v1",
    "seed=3": "use experiment.seed=3",
    "num_envs=3": "num_envs=3: use environment.num_envs=3",
    "Acrobot-v1": "'Acrobot-v1' cannot be read as key=value. Use environment=gym environment.task=Acrobot-v1",
    "cartpole": "Use environment=cartpole",
    "dreamer_catch": r"Use +experiment=dreamer_catch",
    "dreamer_cach": r"Did you mean +experiment=dreamer_catch?",
    "what": "'what' cannot be read as key=value. Settings are key=value, such as training.total_timesteps=1000",
}


@pytest.mark.parametrize("word", WORDS)
def test_wrong_words(word: str):
    with pytest.raises(ConfigError) as error:
        compose_config([word])
    assert WORDS[word] in str(error.value)


def test_what_messages_tell_to_type_exists():
    config = compose_config([])
    groups = {"+experiment", "size"}
    missing = [
        key
        for key in set(KEYS.values()) - groups
        if OmegaConf.select(config, key, default="absent") == "absent"
    ]
    assert missing == []
    changes = [words for words in FLAGS.values() if not words.startswith(("rl-lab", "--"))]
    assert compose_config(list(dict.fromkeys(changes))) is not None
    assert words_for("--env", "cartpole", known_choices("environment")) == "environment=cartpole"
    assert words_for("--nonsense", "3", []) is None
