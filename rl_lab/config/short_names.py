"""Short names and flags of other programs (`--steps 100`, `lr=1e-3`, `Acrobot-v1`), answered with the words to type."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from rl_lab.errors import closest

# Name as other programs have it, with underscores -> our key.
KEYS = {
    **dict.fromkeys(
        ("steps", "num_steps", "n_steps", "max_steps", "total_steps"), "training.total_timesteps"
    ),
    **dict.fromkeys(("timesteps", "total_timesteps", "num_timesteps"), "training.total_timesteps"),
    **dict.fromkeys(("seed", "random_seed"), "experiment.seed"),
    **dict.fromkeys(("task", "task_id"), "environment.task"),
    **dict.fromkeys(("device", "accelerator"), "experiment.device"),
    **dict.fromkeys(("lr", "learning_rate"), "algorithm.learning_rate"),
    **dict.fromkeys(("batch_size", "batch"), "algorithm.batch_size"),
    **dict.fromkeys(("batch_length", "seq_len", "sequence_length"), "algorithm.batch_length"),
    "train_ratio": "algorithm.train_ratio",
    **dict.fromkeys(("num_envs", "n_envs", "envs", "parallel_envs"), "environment.num_envs"),
    **dict.fromkeys(("workers", "num_workers", "n_workers"), "environment.workers"),
    **dict.fromkeys(("name", "run_name", "exp_name", "experiment_name"), "experiment.name"),
    **dict.fromkeys(("output", "out", "out_dir", "output_dir", "logdir", "log_dir", "run_dir"), "run_dir"),
    **dict.fromkeys(("eval_every", "eval_freq", "eval_interval"), "training.evaluate.every_env_steps"),
    **dict.fromkeys(("eval_episodes", "n_eval_episodes"), "training.evaluate.episodes"),
    **dict.fromkeys(("log_every", "log_freq", "log_interval"), "training.log.every_env_steps"),
    **dict.fromkeys(("save_every", "save_freq", "save_interval"), "training.checkpoint.every_env_steps"),
    **dict.fromkeys(("checkpoint", "weights", "load", "pretrained"), "load.path"),
    **dict.fromkeys(("precision", "dtype"), "training.precision"),
    "threads": "training.threads",
    **dict.fromkeys(("size", "model_size"), "size"),
    **dict.fromkeys(("experiment", "config", "preset", "algo", "algorithm", "agent"), "+experiment"),
    **dict.fromkeys(("wandb_project",), "wandb.project"),
    **dict.fromkeys(("patience",), "training.stop_when.patience"),
}
# Flags without a value -> words.
FLAGS = {
    "cuda": "experiment.device=cuda",
    "gpu": "experiment.device=cuda",
    "cpu": "experiment.device=cpu",
    "wandb": "wandb.mode=online",
    "track": "wandb.mode=online",
    "tensorboard": "logging.tensorboard=true",
    "quiet": "logging.progress=off",
    "video": "training.evaluate.video=true",
    "bf16": "training.precision=bfloat16",
    "fp16": "training.precision=bfloat16",
    "amp": "training.precision=bfloat16",
    "tiny": "debug=tiny",
    "resume": "rl-lab resume RUN, another verb",
    "seeds": "--multirun experiment.seed=0,1,2",
}
ENVIRONMENT = ("env", "env_id", "env_name", "environment", "game")
OURS = ("environment", "experiment", "algorithm", "run_dir", "size", "load")  # keys and groups of the config
SHORT = frozenset([*KEYS, *ENVIRONMENT]) - frozenset(OURS)  # as key=value
# Verbs that take a run as their first word: flags that mean it.
RUN_FLAGS = ("run", "run_dir", "run_path", "path", "model", "model_path", "load", "logdir", "folder")
# Flags of other programs -> options that these verbs have.
OPTIONS = {
    "best": "--checkpoint best",
    "last": "--checkpoint last",
    "weights": "--checkpoint",
    "ckpt": "--checkpoint",
    "gpu": "--device cuda",
    "cuda": "--device cuda",
    "cpu": "--device cpu",
    "render": "--video",
    "record": "--video",
    "stochastic": "--sample",
    "browser": "--web",
    "dream": "-w",
    "live": "--serve",
    "format": "--json",
}


def words_for(name: str, value: str | None, environments: Sequence[str]) -> str | None:
    """Return the words of `rl-lab train` for a short name or flag, without its dashes; None: it means nothing here.

    value: "" is shown as …; environments: names of the config group `environment`
    """
    key = name.strip("-").replace("-", "_").lower()
    if key in ENVIRONMENT:
        return environment_words(value, environments) if value else "environment=gym environment.task=NAME"
    if key in KEYS and not (key in FLAGS and not value):
        return f"{KEYS[key]}={value or '…'}"
    return FLAGS.get(key)


def long_form(name: str, value: str, environments: Sequence[str]) -> str:
    """Return what to type instead of a short key such as env=Acrobot-v1."""
    if name in ENVIRONMENT:
        return f"the key is 'environment'.{task_hint(value, environments)}"
    return f"use {words_for(name, value, environments)}"


def environment_words(name: str, environments: Sequence[str]) -> str | None:
    """Return the words that choose an environment by the name of its config or of its task."""
    from rl_lab.environments.task_names import task_words

    return f"environment={name}" if name in environments else task_words(name) or None


def task_hint(name: str, known: Sequence[str]) -> str:
    """Return what to type for a name that was given as environment=NAME or env=NAME."""
    import gymnasium

    from rl_lab.environments.suites.gym import nearest

    words = environment_words(name, known)
    if words:
        return f" Use {words}"
    task = nearest(name, list(gymnasium.registry))
    if not task or difflib.get_close_matches(name, known, cutoff=0.75):
        return closest(name, known)
    return f"{task} Use environment=gym environment.task=TASK"


def word_hint(word: str, experiments: Sequence[str], environments: Sequence[str]) -> str:
    """Return what to type for a word without `=`: the name of an experiment, an environment or a task."""
    if word in experiments:
        return f" Use +experiment={word}"
    words = environment_words(word, environments)
    if words:
        return f" Use {words}"
    near = difflib.get_close_matches(word, [*experiments, *environments], n=1, cutoff=0.75)
    found = f" Did you mean +experiment={near[0]}?" if near and near[0] in experiments else ""
    found = found or (f" Did you mean environment={near[0]}?" if near else "")
    return f"{found} Settings are key=value, such as training.total_timesteps=1000"


def wrong_flags(
    verb: str, flags: Sequence[str], words: Sequence[str], options: Iterable[str], environments: Sequence[str]
) -> str:
    """Return what to type instead of the flags that a verb does not have, or "" if nothing is known of one of them.

    words: of the command line, with the values of the flags; options: that the verb has
    """
    known = sorted(set(options))
    keys: list[str] = []  # words of rl-lab train
    hints: list[str] = []
    for flag in flags:
        name, _, value = flag.partition("=")
        key = name.strip("-").replace("-", "_").lower()
        near = _near(name, known)
        meant = words_for(key, value or _value_of(name, words), environments)
        if verb in ("train", "resume") and meant and not near:
            keys.append(meant)
        elif OPTIONS.get(key, "").partition(" ")[0] in known:
            hints.append(f" Use {OPTIONS[key]}")
        elif near:
            hints.append(f" Did you mean '{near}'?")
        elif key in RUN_FLAGS and verb != "train":
            hints.append(f" The run needs no flag: rl-lab {verb} RUN")
        else:
            return ""
    return f" Write {' '.join(keys)}" * bool(keys) + "".join(dict.fromkeys(hints))


def _near(flag: str, options: Sequence[str]) -> str:
    """Return the closest option; the dashes do not count."""
    by_name = {option.strip("-"): option for option in options if option.startswith("--")}
    near = difflib.get_close_matches(flag.strip("-"), list(by_name), n=1, cutoff=0.7)
    return by_name[near[0]] if near else ""


def _value_of(flag: str, words: Sequence[str]) -> str | None:
    """Return the word after a flag, if it looks like its value."""
    for word, after in pairwise(words):
        if word == flag and not after.startswith("-") and not re.match(r"\+{0,2}[\w./@]+=", after):
            return after
    return None
