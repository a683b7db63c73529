"""Kaggle and Colab: outputs go where files are kept, the replay fits, a T4 computes in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl_lab import hosted
from rl_lab.errors import ConfigError
from rl_lab.run_folder import output_root
from rl_lab.utils.device import resolve_precision


def test_outputs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kaggle, drive = tmp_path / "kaggle", tmp_path / "MyDrive"
    monkeypatch.setattr(hosted, "KAGGLE_ROOT", kaggle)
    monkeypatch.setattr(hosted, "COLAB_DRIVE", drive)
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    drive.mkdir()
    assert hosted.place() is None and output_root(None) == Path("outputs")
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab_2026")
    assert hosted.place() == "colab" and output_root(None) == drive / "rl-lab" / "outputs"
    drive.rmdir()  # not mounted
    assert hosted.persistent_folder() is None and output_root(None) == Path("outputs")
    kaggle.mkdir()
    assert hosted.place() == "kaggle" and output_root(None) == kaggle / "rl-lab" / "outputs"
    assert output_root(str(tmp_path)) == tmp_path


def test_replay_fits_the_budget():
    # A row of Bounce at 16×16: 3·256 bytes of image, 8 of the action, 4 of the reward, three flags.
    row = 3 * 256 + 8 + 4 + 3
    words = ["environment.num_envs=4"]
    small = hosted.settings("dreamer_bounce", words, replay_gigabytes=row * 1000 / 1e9)
    assert small == [*words, "buffers.replay.capacity=1000"]
    assert hosted.settings("dreamer_bounce", words, replay_gigabytes=50) == words
    assert hosted.settings("dreamer_bounce") == []
    # Episodes in files
    assert hosted.settings("delta_iris_catch", replay_gigabytes=2) == ["buffers.replay.max_bytes=2000000000"]
    with pytest.raises(ConfigError, match=r"^replay_gigabytes must be above 0"):
        hosted.settings("dreamer_bounce", replay_gigabytes=0)


def test_a_t4_computes_in_float32(monkeypatch: pytest.MonkeyPatch):
    """torch says that a T4 supports bfloat16, because it can emulate it."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert resolve_precision("auto", "cuda") == torch.float32
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert resolve_precision("auto", "cuda") == torch.bfloat16
