from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rl_lab.tools.suite.claims import Claims


def other_machine(folder: Path, age: float = 0.0) -> Claims:
    """Return the claims of a process on another machine that has taken `a`, `age` seconds ago."""
    claims = Claims(folder)
    claims.owner = {"machine": "elsewhere", "host": "elsewhere", "pid": 1}
    assert claims.take("a")
    file = folder / "a.claim"
    stamp = file.stat().st_mtime - age
    os.utime(file, (stamp, stamp))
    return claims


def test_one_run_has_one_owner(tmp_path: Path):
    other = other_machine(tmp_path)
    mine = Claims(tmp_path)
    assert not mine.take("a") and mine.take("b")
    assert mine.others(["a", "b", "c"]) == {"a": "process 1 on elsewhere"}
    other.release("a")
    assert mine.take("a")
    mine.close()
    assert list(tmp_path.glob("*.claim")) == []


def test_claim_without_heartbeat_is_free(tmp_path: Path):
    other = other_machine(tmp_path, age=130.0)
    mine = Claims(tmp_path)
    assert mine.others(["a"]) == {}
    other.refresh()
    assert mine.others(["a"]) == {"a": "process 1 on elsewhere"} and not mine.take("a")
    stamp = (tmp_path / "a.claim").stat().st_mtime - 130.0
    os.utime(tmp_path / "a.claim", (stamp, stamp))
    assert mine.take("a")


def test_claim_of_a_dead_process_of_this_machine_is_free(tmp_path: Path):
    code = f"from rl_lab.tools.suite.claims import Claims; from pathlib import Path; Claims(Path({str(tmp_path)!r})).take('a')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "a.claim").exists()
    assert Claims(tmp_path).take("a")


def test_claim_of_a_process_that_nobody_waited_for_is_free(tmp_path: Path):
    """A killed process stays in the process table until its parent reads its status."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "pass"], stdin=subprocess.DEVNULL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    mine = Claims(tmp_path)
    (tmp_path / "a.claim").write_text(json.dumps({**mine.owner, "pid": process.pid}))
    assert mine.take("a")
    process.wait()


def test_half_written_claim_counts_as_held_until_it_is_old(tmp_path: Path):
    mine = Claims(tmp_path)
    file = tmp_path / "a.claim"
    file.write_text('{"machine": "else')
    assert not mine.take("a")
    stamp = file.stat().st_mtime - 200
    os.utime(file, (stamp, stamp))
    assert mine.take("a")
