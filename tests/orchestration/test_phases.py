"""Phases are checked before a run starts."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from rl_lab.errors import ConfigError
from rl_lab.orchestration.phases import HookInfo, parse_phases

HOOKS = {
    "update": HookInfo("update", replayed_steps=1024),
    "update_world_model": HookInfo("update", replayed_steps=256),
    "encode": HookInfo("transform"),
    "evolve": HookInfo("evolve"),
}


def parse(text: str):
    return parse_phases(yaml.safe_load(text), HOOKS, ["replay", "demos"])


def test_short_and_long_hook_forms():
    (phase,) = parse("""
        - name: joint
          buffer: {replay: 0.5, demos: 0.5}
          duration_steps: 1.0e+3
          workflow_hooks:
            - collect
            - update: {replayed_steps_per_env_step: 512}
            - update_world_model: {repeat: 3}
            - evaluate: {every_env_steps: 100, episodes: 5}
          set: {algorithm.entropy: 1.0e-3}
          freeze: [encoder]
    """)
    assert phase.duration_steps == 1000
    assert dict(phase.buffer) == {"replay": 0.5, "demos": 0.5}
    assert [use.kind for use in phase.hooks] == ["collect", "update", "update", "evaluate"]
    assert phase.hooks[1].updates_per_env_step == 0.5
    assert phase.hooks[2].repeat == 3
    assert phase.hooks[3].every == {"env_steps": 100}
    assert phase.hooks[3].options == {"episodes": 5}
    assert phase.set == {"algorithm.entropy": 1e-3}
    assert phase.freeze == ("encoder",)


def test_temperature_of_collect():
    (phase,) = parse("[{name: a, workflow_hooks: [{collect: {temperature: 0.5}}]}]")
    assert phase.hooks[0].options == {"temperature": 0.5}
    for value in ("0", "-1", "true", "hot"):
        with pytest.raises(ConfigError, match=r"hook 'collect': temperature must be a number above 0"):
            parse(f"[{{name: a, workflow_hooks: [{{collect: {{temperature: {value}}}}}]}}]")


def test_groups_are_expanded():
    phases = parse("""
        - {name: start, duration_steps: 5, workflow_hooks: [collect]}
        - repeat: 2
          phases:
            - {name: a, duration_steps: 5, workflow_hooks: [collect]}
            - repeat: 2
              phases:
                - {name: b, type: offline, duration_updates: 1, workflow_hooks: [update]}
    """)
    assert [(phase.name, phase.iteration) for phase in phases] == [
        ("start", 0), ("a", 0), ("b", 0), ("b", 1), ("a", 1), ("b", 0), ("b", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "empty"),
        ("[{name: x, workflow_hooks: [colect], duration_steps: 1}]", "Did you mean 'collect'"),
        ("[{name: x, workflow_hooks: [update_worldmodel], duration_steps: 1}]", "update_world_model"),
        ("[{name: x, buffer: repay, workflow_hooks: [collect], duration_steps: 1}]", "Did you mean 'replay'"),
        ("[{name: x, duration_step: 1, workflow_hooks: [collect]}]", "duration_steps"),
        ("[{name: x, duration_steps: -1, workflow_hooks: [collect]}]", "at least 0"),
        (
            "[{name: x, duration_steps: 0, workflow_hooks: [collect]}]",
            "training.phases has only phases with a duration of 0",
        ),
        ("[{name: x, duration_steps: 1.5, workflow_hooks: [collect]}]", "must be an integer"),
        ("[{name: x, type: onlin, duration_steps: 1, workflow_hooks: [collect]}]", "'online'"),
        ("[{name: x, type: offline, duration_updates: 1, workflow_hooks: [collect]}]", "cannot collect"),
        ("[{name: x, type: offline, workflow_hooks: [update]}]", "never end"),
        ("[{name: x, type: eval_only, workflow_hooks: [update]}]", "eval_only"),
        ("[{name: x, duration_steps: 1}]", "no workflow_hooks"),
        ("[{name: x, duration_steps: 1, workflow_hooks: [{update: {ratio: 2}}]}]", "unknown key 'ratio'"),
        (
            "[{name: x, duration_steps: 1, workflow_hooks: [{update: {repeat: 2, updates_per_env_step: 1}}]}]",
            "set only one of them",
        ),
        (
            "[{name: x, duration_steps: 1, workflow_hooks: [{update: {updates_per_env_step: -1}}]}]",
            "positive",
        ),
        (
            "[{name: x, duration_steps: 1, workflow_hooks: [{evolve: {replayed_steps_per_env_step: 1}}]}]",
            "no batch",
        ),
        ("[{repeat: 0, phases: []}]", "repeat"),
        ("[{name: x, buffer: {replay: 0}, duration_steps: 1, workflow_hooks: [collect]}]", "share"),
        ("[collect]", "must be a mapping"),
    ],
)
def test_invalid_phases_are_refused(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_scheduler_does_not_import_torch():
    code = "import sys; import rl_lab.orchestration.phase_scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
