"""The model card of an exported agent: README.md with what hubs read, its scores, and how to use it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_lab.utils.untrusted import printable

if TYPE_CHECKING:
    from rl_lab.agent import Agent

TAGS = ("reinforcement-learning", "world-model", "rl-lab")


def write_card(
    folder: Path,
    agent: Agent,
    *,
    scores: dict[str, Any] | None,
    dtype: str,
    parameters: int,
    license: str | None = None,
) -> Path:
    """Write README.md; return it."""
    from rl_lab import __version__
    from rl_lab.errors import DISTRIBUTION

    workflow = type(agent.workflow).__name__.removesuffix("Workflow")
    task = printable(agent.spec.name).replace("\n", " ")
    experiment = printable(str(agent.config.experiment.name)).replace("\n", " ")
    amount = f"{agent.step:,} decisions of the agent"
    if agent.updates and not agent.step:
        amount = f"{agent.updates:,} updates on stored data"
    lines = [*_front_matter(task, workflow, scores, license), f"# {workflow} on {task}", ""]
    lines += [
        f"An agent of RL Lab (`{DISTRIBUTION}` {__version__}): experiment `{experiment}`, "
        f"{parameters:,} parameters in {dtype}, weights after {amount}.",
        "",
    ]
    if (folder / "dream.gif").is_file():
        lines += ["![environment, dream and their difference](dream.gif)", ""]
        lines += [
            "The environment, the world model's open-loop prediction from the same actions, their difference.",
            "",
        ]
    lines += _score_lines(scores)
    lines += _use_lines(folder)
    lines += ["## Files", "", "| File | What it holds |", "| --- | --- |"]
    lines += [f"| `{name}` | {what} |" for name, what in FILES.items() if (folder / name).exists()]
    lines += ["", "The config may only name parts of RL Lab, unless you add `--trust` (SECURITY.md).", ""]
    file = folder / "README.md"
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


FILES = {
    "agent.safetensors": "the weights of all parts; numbers only, no code",
    "config.yaml": "the resolved config",
    "config": "shapes and spaces of the environment",
    "scores.json": "every episode of the scores",
    "media/episodes/test": "recorded episodes, from which a dream can start without the environment",
    "agent.onnx": "the acting policy with its memory; inputs and outputs are described in its metadata",
}


def _front_matter(task: str, workflow: str, scores: dict[str, Any] | None, license: str | None) -> list[str]:
    import yaml

    facts: dict[str, Any] = {
        "library_name": "rl-lab",
        "pipeline_tag": "reinforcement-learning",
        "tags": [*TAGS, task],
    }
    if license:
        facts["license"] = license
    if scores:
        value = f"{scores['return_mean']:.2f} +/- {scores['return_std']:.2f}"
        result = {
            "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
            "dataset": {"name": task, "type": task},
            "metrics": [{"type": "mean_reward", "value": value, "name": "mean_reward", "verified": False}],
        }
        facts["model-index"] = [{"name": workflow, "results": [result]}]
    return ["---", yaml.safe_dump(facts, sort_keys=False, allow_unicode=True).strip(), "---", ""]


def _score_lines(scores: dict[str, Any] | None) -> list[str]:
    if not scores:
        return []
    how = "sampled actions" if scores["sample"] else "the most likely action"
    rows = {
        "return, mean ± std": f"{scores['return_mean']:.2f} ± {scores['return_std']:.2f}",
        "median": f"{scores['return_median']:.2f}",
        "least, greatest": f"{min(scores['returns']):.2f}, {max(scores['returns']):.2f}",
        "length of an episode, mean": f"{scores['length_mean']:.1f}",
    }
    if "normalised" in scores:
        found = scores["normalised"]
        rows[f"{found['name']}, mean"] = f"{found['mean']:.3f}"
    lines = [f"## Scores: {scores['episodes']} new episodes, {how}, seed {scores['seed']}", ""]
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())]
    return [*lines, ""]


def _use_lines(folder: Path) -> list[str]:
    from rl_lab.errors import DISTRIBUTION

    lines = ["## Use", "", "```python", "import rl_lab", ""]
    lines += [
        'agent = rl_lab.load_agent("hf://OWNER/NAME")  # or the path of this folder',
        "action = agent.act(obs)",
    ]
    lines += ["```", "", "```bash", f"pip install '{DISTRIBUTION}[hub,play]'"]
    lines += ["rl-lab play hf://OWNER/NAME -w --web   # play in its world model, in a browser"]
    lines += ["rl-lab eval hf://OWNER/NAME            # new episodes; needs the environment", "```", ""]
    return lines


def name_address(folder: Path, address: str) -> None:
    """Write the address of the repository into the card's examples."""
    file = folder / "README.md"
    if file.is_file():
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace("hf://OWNER/NAME", address), encoding="utf-8")
