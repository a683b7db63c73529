"""On a GPU: NCCL's exchanges inside the CUDA graph of an update, with one rank."""

from __future__ import annotations

import socket

import pytest

from rl_lab.utils import ranks
from tests.gpu.gpu_case import assert_same_losses, built, losses

pytestmark = pytest.mark.gpu

CASES = {
    "dreamer": ([], "update"),
    "tdmpc2": (["experiment=tdmpc2_pendulum"], "update"),
    "delta_iris": (["experiment=delta_iris_catch", "buffers.replay.folder=FOLDER"], "update_tokenizer"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_captured_update_of_one_rank_is_the_plain_one(name: str, monkeypatch: pytest.MonkeyPatch):
    words, hook = CASES[name]
    words = [*words, "training.precision=float32", "training.capture=true"]
    plain = losses(built(*words, hook=hook), hook)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    for key, value in {**variables, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    with ranks.join("cuda"):
        run = built(*words, hook=hook)
        joined = losses(run, hook)
        assert run.orchestrator.runners[hook].capture.captured
        run.orchestrator.runners[hook].capture.reset()  # the graph holds NCCL's communicator
    assert_same_losses(plain, joined)
