"""OfflineBuffer: each data format gives the correct rows, and a run trains without environment steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rl_lab
from rl_lab.buffers.offline import OfflineBuffer, episode_returns
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.config.compose import compose_config
from rl_lab.errors import CheckpointError, ConfigError, LabError
from rl_lab.records import ActionSpec, ArraySpec, BatchSpec, Spec
from rl_lab.utils.checkpoint.manager import CheckpointManager
from rl_lab.utils.files import read_json
from tests.buffers.buffer_helpers import seeded

SPEC = Spec("toy", {"vector": ArraySpec((2,), "float32")}, ActionSpec("discrete", (), choices=(3,)))
IMAGE = ArraySpec((3, 2, 2), "uint8")
TWO = Spec("two", {"vector": ArraySpec((2,), "float32"), "image": IMAGE}, SPEC.action)
ARM = Spec(
    "arm", {"vector": ArraySpec((2,), "float32")}, ActionSpec("continuous", (1,), low=(-2.0,), high=(2.0,))
)
LATENT = {"latent": ArraySpec((3,), "bfloat16")}


def episode(steps: int, value: float = 0, last: bool = True, **changes: Any) -> dict[str, np.ndarray]:
    """Step k: observation value + k, action k % 3, reward 1 + k, terminated at the end."""
    count = value + np.arange(steps + last, dtype=np.float64)
    return {
        "observations": np.stack([count, -count], axis=1),
        "actions": np.arange(steps) % 3,
        "rewards": 1.0 + np.arange(steps),
        "dones": np.arange(steps) == steps - 1,
        **changes,
    }


def store(path: Path, content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {key: value for key, value in content.items() if value is not None}
    if path.suffix == ".npz":
        np.savez_compressed(path, **content)
    else:
        torch.save({key: torch.as_tensor(value) for key, value in content.items()}, path)
    return path


def offline(path: Path, spec: Spec = SPEC, **options: Any) -> OfflineBuffer:
    return OfflineBuffer(
        {**spec.row_columns(), **LATENT}, path=path, spec=spec, mutable=["latent"], **options
    )


# ---------------------------------------------------------------- episode files


@pytest.mark.parametrize("storage", ["host", "disk"])
def test_episode_files_as_rows(tmp_path: Path, storage: str) -> None:
    store(tmp_path / "b.pt", episode(2, value=10))
    store(tmp_path / "a.npz", episode(3))
    (tmp_path / "README.txt").write_text("not an episode")
    buffer = offline(tmp_path, storage=storage)
    rows = buffer.read(0, 7)
    assert rows.obs["vector"][0, :, 0].tolist() == [0, 1, 2, 3, 10, 11, 12]
    assert rows.action[0].tolist() == [0, 1, 2, 0, 0, 1, 0]
    assert rows.reward[0].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert rows.terminated[0].tolist() == [False, False, False, True, False, False, True]
    assert rows.is_first[0].tolist() == [True, False, False, False, True, False, False]
    assert not rows.truncated.any() and not rows["latent"].any()
    assert (buffer.size, buffer.total_rows, buffer.num_streams) == (7, 7, 1)
    expected = f"{tmp_path}: 2 episodes, 5 steps, return mean 4.5, min 3, max 6; 0.00 MB"
    assert buffer.describe().startswith(expected)


def test_ends_and_missing_last_observation(tmp_path: Path) -> None:
    store(tmp_path / "0.npz", episode(2, last=False, dones=np.zeros(2)))  # without an end: truncated
    store(tmp_path / "1.npz", episode(2, dones=None, truncated=[False, True]))
    store(tmp_path / "2.npz", episode(2, terminated=[0, 0]))  # done, but not terminated: truncated
    store(tmp_path / "3.npz", episode(2, dones=None, terminated=[0, 1], actions=np.eye(3)[[2, 1]]))
    buffer = offline(tmp_path)
    rows = buffer.read(0, 12)
    assert rows.truncated[0].nonzero().flatten().tolist() == [2, 5, 8]
    assert rows.terminated[0].nonzero().flatten().tolist() == [11]
    assert rows.obs["vector"][0, :3, 0].tolist() == [0, 1, 1]  # the last observation is repeated
    assert rows.action[0, 9:].tolist() == [2, 1, 0]  # from one-hot
    assert "in 1 episodes the last observation is missing" in buffer.describe()


def test_episode_files_of_iris(tmp_path: Path) -> None:
    """Episode(observations, actions, rewards, ends): K observations, int64 ends, and a mask that is not read."""
    content = episode(3, last=False, dones=None)
    tensors = {key: torch.as_tensor(value) for key, value in content.items() if value is not None}
    tensors |= {"ends": torch.tensor([0, 0, 1]), "mask_padding": torch.ones(3, dtype=torch.bool)}
    torch.save(tensors, tmp_path / "0.pt")
    store(tmp_path / "1.npz", episode(2, dones=None, ends=[0, 0]))
    rows = offline(tmp_path).read(0, 7)
    assert rows.terminated[0].nonzero().flatten().tolist() == [3]
    assert rows.truncated[0].nonzero().flatten().tolist() == [6]  # no end: truncated
    assert rows.reward[0].tolist() == [0, 1, 2, 3, 0, 1, 2]
    store(tmp_path / "1.npz", episode(2, dones=None, done=[0, 0]))
    with pytest.raises(ConfigError, match=r"and 'ends' are missing; the keys are \['actions', 'done', 'obs"):
        offline(tmp_path)


@pytest.mark.parametrize("suffix", [".npz", ".pt"])
def test_named_observations(tmp_path: Path, suffix: str) -> None:
    image = np.arange(48, dtype=np.uint8).reshape(4, 3, 2, 2)
    content = episode(3)
    content |= {"observations/vector": content.pop("observations"), "observations/image": image}
    file = store(tmp_path / f"one{suffix}", content)
    rows = offline(file, TWO).read(0, 4)
    assert torch.equal(rows.obs["image"][0], torch.from_numpy(image))
    if suffix == ".pt":  # a nested dict of tensors
        nested = {"vector": content.pop("observations/vector"), "image": content.pop("observations/image")}
        tensors = {key: torch.as_tensor(value) for key, value in content.items()}
        torch.save({**tensors, "observations": {k: torch.as_tensor(v) for k, v in nested.items()}}, file)
        assert torch.equal(offline(file, TWO).read(0, 4).obs["image"], rows.obs["image"])


def test_sampling_matches_replay(tmp_path: Path) -> None:
    for number in range(4):
        store(tmp_path / f"{number}.npz", episode(9, value=100 * number))
    buffer = offline(tmp_path)
    twin = ReplayBuffer(buffer.columns, capacity=40, num_streams=1, mutable=["latent"])
    every = buffer.read(0, 40)
    twin.add({name: value.float() if name == "latent" else value for name, value in every.items()})
    for spec in (
        BatchSpec(size=16, length=4, context=1, sampler="online"),
        BatchSpec(size=16, length=10, boundary="within"),
        BatchSpec(size=16, length=6, boundary="pad"),
    ):
        out = buffer.make_batch(spec)
        ours = buffer.sample(spec, generator=seeded(1), out=out)
        theirs = twin.sample(spec, generator=seeded(1))
        assert ours is out and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert buffer.shortage(BatchSpec(size=1, length=11, boundary="within")).endswith(
        "rows that a sequence needs"
    )
    with pytest.raises(ConfigError, match="too few for sequences of 41 rows"):
        buffer.ready(BatchSpec(size=1, length=41))


def test_rows_are_read_only(tmp_path: Path) -> None:
    buffer = offline(store(tmp_path / "e.npz", episode(9)))
    spec = BatchSpec(size=2, length=3)
    batch = buffer.sample(spec, generator=seeded())
    with pytest.raises(LabError, match="read-only"):
        buffer.add({name: value[:, 0] for name, value in batch.items()})
    with pytest.raises(ConfigError, match="'reward' cannot be changed"):
        buffer.write_back(batch.index, {"reward": torch.zeros(2, 3)}, offset=0)
    buffer.write_back(batch.index, {"latent": torch.ones(2, 3, 3)}, offset=0)
    assert buffer.sample(spec, generator=seeded())["latent"].eq(1).all()


def test_checkpoint_holds_only_written_columns(tmp_path: Path) -> None:
    data, saved = tmp_path / "data", tmp_path / "saved"
    store(data / "e.npz", episode(9))
    buffer = offline(data, chunk_rows=4)
    buffer.add_column("code", ArraySpec((), "int64"))
    buffer.write(2, {"code": torch.full((1, 3), 7), "latent": torch.ones(1, 3, 3)})
    entry = buffer.checkpoint(saved)
    files = [torch.load(saved / name, weights_only=True)["columns"] for name in entry["files"]]
    assert len(files) == 3 and all(set(columns) == {"latent", "code"} for columns in files)
    assert entry["meta"]["source"] == {"path": str(data), "fingerprint": buffer.source.fingerprint}

    again = offline(data, chunk_rows=4)
    again.restore(saved, entry)
    assert all(torch.equal(again.read(0, 10)[name], value) for name, value in buffer.read(0, 10).items())
    within = BatchSpec(size=4, length=10, boundary="within")
    assert again.ready(within) and again.checkpoint(saved)["files"] == entry["files"]

    store(data / "f.npz", episode(4))
    with pytest.raises(CheckpointError, match="is not the data that this run was trained on"):
        offline(data).restore(saved, entry)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": None}, r"'rewards' must be \(steps,\) with at least one step, not none"),
        ({"rewards": np.zeros((4, 1))}, r"not shape \(4, 1\)"),
        ({"rewards": np.array([0, np.nan, 0, 0])}, "'rewards' .* must be finite and numeric"),
        ({"actions": None}, "key 'actions' is missing"),
        ({"actions": np.zeros(5, dtype=int)}, r"'actions' has shape \(5,\), but there are 4 rewards"),
        ({"actions": np.full(4, 3)}, r"integers from 0, below \(3,\)"),
        ({"dones": None}, "keys 'dones', 'terminated', 'truncated' and 'ends' are missing"),
        ({"dones": [0, 1, 0, 1]}, "ends at step 1 of 4: split it there"),
        (
            {"observations": np.zeros((5, 3))},
            r"'vector' has shape \(5, 3\), but .* need \(5, 2\) or \(4, 2\)",
        ),
        ({"observations": np.full((5, 2), np.inf)}, "observation 'vector' has values that are not finite"),
        ({"observations": None}, "key 'observations' is missing"),
        ({"observations": np.zeros((5, 2), dtype=complex)}, "complex128\) must be numeric"),
    ],
)
@pytest.mark.parametrize("suffix", [".npz", ".pt"])
def test_invalid_episode_errors(tmp_path: Path, suffix: str, changes: dict[str, Any], message: str) -> None:
    file = store(tmp_path / f"wrong{suffix}", episode(4, **changes))
    with pytest.raises(ConfigError, match=message) as caught:
        offline(tmp_path)
    assert str(file) in str(caught.value)


def test_continuous_actions_must_be_scaled(tmp_path: Path) -> None:
    file = store(tmp_path / "e.npz", episode(4, actions=np.full((4, 1), 2.0)))
    with pytest.raises(ConfigError, match=r"must be in \[-1, 1\].*low \[-2.0\] and high \[2.0\]"):
        offline(file, ARM)
    store(file, episode(4, actions=np.full((4, 1), -0.5)))
    assert offline(file, ARM).read(0, 5).action[0, :, 0].tolist() == [-0.5] * 4 + [0]


def test_damaged_and_pickled_files_are_refused(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "sprung",))

    objects = np.array([Trap()] * 4, dtype=object)
    np.savez(tmp_path / "code.npz", **episode(4, actions=objects))
    torch.save({"rewards": torch.zeros(4), "actions": Trap()}, tmp_path / "code.pt")
    for name in ("cut.npz", "cut.pt", "flip.npz", "flip.pt"):
        content = bytearray(store(tmp_path / name, episode(50)).read_bytes())
        if name.startswith("cut"):
            del content[len(content) // 2 :]
        else:  # a bit of the observations, which come first
            content[content.index(np.float64(-7).tobytes()) if name == "flip.pt" else 150] ^= 1
        (tmp_path / name).write_bytes(content)
    for name in ("code.npz", "code.pt", "cut.npz", "cut.pt", "flip.npz", "flip.pt"):
        with pytest.raises(ConfigError, match=name):
            offline(tmp_path / name)
    np.savez(tmp_path / "unread.npz", **episode(4), infos=objects)
    assert offline(tmp_path / "unread.npz").size == 5
    assert not (tmp_path / "sprung").exists()


def test_invalid_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        offline(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match="neither a run folder nor a data set"):
        offline(tmp_path)
    with pytest.raises(ConfigError, match="neither a run folder nor a data set"):
        offline(tmp_path / "notes.txt")


def test_returns_of_complete_episodes() -> None:
    first = np.array([[0, 0, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 0, 0]], dtype=bool)
    ended = np.array([[0, 1, 0, 0, 1, 0, 0], [0, 1, 0, 0, 0, 0, 1]], dtype=bool)
    reward = np.array([[9, 9, 0, 1, 2, 0, 9], [0, 4, 0, 1, 1, 1, 1]], dtype=np.float32)
    assert episode_returns(reward, first, ended).tolist() == [3, 4, 4]
    assert len(episode_returns(reward[:, :2], np.zeros((2, 2), bool), ended[:, :2])) == 0


# ---------------------------------------------------------------- runs

QUIET = ["logging.progress=off", "logging.tensorboard=false", "debug=tiny"]


def train(experiment: str, folder: Path, *words: str) -> Any:
    return rl_lab.train(experiment, [*QUIET, f"run_dir={folder}", *words], say=lambda text: None)


def with_data(path: Path, *phases: str) -> list[str]:
    return [
        "+buffer@buffers.offline=offline",
        f"buffers.offline.path={path}",
        f"training.phases=[{', '.join(phases)}]",
    ]


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of random actions in two environments."""
    folder = tmp_path_factory.mktemp("collected") / "run"
    train("random_cartpole", folder)
    return folder


@pytest.fixture(scope="module")
def cartpole(collected: Path) -> Spec:
    return Spec.from_dict(read_json(collected / "config" / "spec.json"))


def test_replay_of_another_run(collected: Path, cartpole: Spec) -> None:
    entry = CheckpointManager.load_file(collected).manifest["buffers"]["replay"]
    rows = entry["meta"]["cursor"]
    twin = ReplayBuffer(cartpole.row_columns(), capacity=100_000, num_streams=2)
    twin.restore(collected / "checkpoints" / "replay" / "replay", entry)
    for path in (collected, collected / "checkpoints", collected / "checkpoints" / "last.pt"):
        buffer = offline(path, cartpole)
        assert (buffer.num_streams, buffer.total_rows) == (2, rows)
        ours, theirs = buffer.read(0, rows), twin.read(0, rows)
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())
        assert not ours["latent"].any() and "latent begin as zeros" in buffer.describe()


def test_full_ring_of_another_run(collected: Path, tmp_path: Path, cartpole: Spec) -> None:
    train("random_cartpole", tmp_path / "small", "buffers.replay.capacity=60")
    small, whole = offline(tmp_path / "small", cartpole), offline(collected, cartpole)
    assert small.total_rows == 30
    rows, same = small.read(0, 30), whole.read(whole.total_rows - 30, 30)
    assert all(torch.equal(rows[name], value) for name, value in same.items())


def test_mismatch_errors(collected: Path, cartpole: Spec) -> None:
    with pytest.raises(ConfigError, match=r"'obs/vector' is float32 .* use data of the same environment"):
        offline(collected, SPEC)
    fewer = Spec("fewer", cartpole.observations, ActionSpec("discrete", (), choices=(1,)))
    with pytest.raises(ConfigError, match=r"actions from 0 to 1, but fewer has \(1,\) choices"):
        offline(collected, fewer)
    with pytest.raises(ConfigError, match=r"has no buffer 'reply'\. Did you mean 'replay'"):
        offline(collected, cartpole, buffer="reply")


def test_damaged_replay_error(collected: Path, tmp_path: Path, cartpole: Spec) -> None:
    run = tmp_path / "damaged"
    shutil.copytree(collected, run, symlinks=True)
    for file in (run / "checkpoints" / "replay").rglob("*.pt"):
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="DAMAGED"), pytest.raises(CheckpointError, match="can be resumed"):
        offline(run, cartpole)


LEARN = (
    "{name: learn, type: offline, buffer: offline, duration_updates: 3, workflow_hooks: [update_world_model]}"
)


def test_train_offline_only(collected: Path, tmp_path: Path) -> None:
    run = train("dreamer_cartpole", tmp_path / "run", *with_data(collected, LEARN))
    assert (run.counters["env_steps"], run.counters["updates"]) == (0, 3)
    manifest = CheckpointManager.load_file(run.path).manifest["buffers"]
    assert manifest["replay"]["meta"]["cursor"] == 0
    assert list(manifest["offline"]["meta"]["columns"]) == ["deter", "stoch"]
    with pytest.raises(LabError, match=r"buffer 'offline' was read from .*; use that path"):
        train(
            "dreamer_cartpole",
            tmp_path / "next",
            *with_data(run.path, LEARN),
            "buffers.offline.buffer=offline",
        )


def test_resumed_run_matches_uninterrupted_run(collected: Path, tmp_path: Path) -> None:
    half = LEARN.replace("learn", "half")
    train("dreamer_cartpole", tmp_path / "whole", *with_data(collected, half, LEARN))
    words = with_data(collected, half, LEARN)
    with pytest.MonkeyPatch.context() as patch:
        from rl_lab.orchestration.orchestrator import Orchestrator

        plain = Orchestrator.run_action

        def stop_after_three(self: Orchestrator, action: str, phase: Any) -> None:
            plain(self, action, phase)
            self.interrupted = self.scheduler.totals["updates"] == 3

        patch.setattr(Orchestrator, "run_action", stop_after_three)
        assert train("dreamer_cartpole", tmp_path / "parts", *words).interrupted
    train("dreamer_cartpole", tmp_path / "parts", *words)
    states = [CheckpointManager.load_file(tmp_path / name) for name in ("whole", "parts")]
    whole, parts = (loaded.state["components"] for loaded in states)
    assert all(torch.equal(value, parts[part][key]) for part in whole for key, value in whole[part].items())
    latents = [
        {facts["crc32"] for facts in loaded.manifest["buffers"]["offline"]["files"].values()}
        for loaded in states
    ]
    assert latents[0] == latents[1]


def test_train_on_offline_and_replay_mix(collected: Path, tmp_path: Path) -> None:
    mixed = (
        "{name: mixed, buffer: {replay: 0.5, offline: 0.5}, workflow_hooks: [collect, "
        "{update: {updates_per_env_step: 0.1}}]}"
    )
    words = [*with_data(collected, mixed), "training.total_timesteps=60"]
    run = train("dreamer_cartpole", tmp_path / "run", *words)
    assert run.counters["env_steps"] >= 60 and run.counters["updates"] >= 3
    wrong = mixed.replace("replay: 0.5, offline: 0.5", "offline: 0.5, replay: 0.5")
    with pytest.raises(LabError, match="would collect into 'offline', which is read-only"):
        train("dreamer_cartpole", tmp_path / "wrong", *with_data(collected, wrong))


def test_config_needs_path() -> None:
    first, comment, *_ = (CONFIG_FOLDER / "buffer" / "offline.yaml").read_text().splitlines()
    assert first == "# @package buffers.offline" and comment.startswith("# ")
    config = compose_config(["+buffer@buffers.offline=offline"])
    assert set(config.buffers) == {"replay", "offline"}
    with pytest.raises(ConfigError, match=r"buffers\.offline\.path must be set"):
        rl_lab.train("random_cartpole", ["+buffer@buffers.offline=offline"])
