"""Stands in for rl_lab.tools.suite.one_run: the same files and exit statuses, without torch.

Each of 10 log lines takes DELAY seconds; after the fifth it waits while the file HOLD exists, at most 30 s. The task `bad` fails, `dies` is killed at half of its first try.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

DELAY = float(os.environ.get("STUB_DELAY", "0.02"))
HOLD = Path(os.environ.get("STUB_HOLD", "nothing to wait for"))
order = json.loads(Path(sys.argv[1]).read_text())
run_dir, facts_file = Path(order["run_dir"]), Path(order["facts"])
stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
facts = json.loads(facts_file.read_text()) if facts_file.exists() else {}
facts |= {"command": "stub", "commit": order["commit"], "machine": {"gpu": None}, "finished": False}
facts["tries"] = facts.get("tries", 0) + 1
facts_file.write_text(json.dumps(facts))
if order["task"] == "bad":
    sys.exit("error: environment.task is bad")
run_dir.mkdir(parents=True, exist_ok=True)
(run_dir / "config.yaml").write_text(f"environment: {{task: {order['task']}}}\n")
metrics = run_dir / "metrics.jsonl"
done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
frames = order["in_frames"]["training.total_timesteps"]
for line in range(done + 1, 11):
    if stopping or os.getppid() != order["parent"]:
        sys.exit(75)
    time.sleep(DELAY)
    row = {"step": line, "frames": frames * line // 10, "updates": line, "time": time.time()}
    row |= {"collect/return_mean": float(line), "collect/episodes": line, "time/updates_per_second": 5.0}
    if line % 5 == 0:
        row |= {"eval/return_mean": 10.0 * line + order["seed"], "eval/return_std": 1.0}
    with metrics.open("a") as file:
        file.write(json.dumps(row) + "\n")
    if order["task"] == "dies" and line == 5 and facts["tries"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + 30
    while line == 5 and HOLD.exists() and time.monotonic() < end:
        time.sleep(0.01)
facts["finished"] = True
facts_file.write_text(json.dumps(facts))
