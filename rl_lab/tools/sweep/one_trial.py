"""The process of one trial: python -m rl_lab.tools.sweep.one_trial JOB.json.

Exit status 0: finished, STOPPED: a signal asked for a stop and the run is saved.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rl_lab.errors import LabError
from rl_lab.tools.suite.one_run import wait_for_lock
from rl_lab.utils.files import read_json
from rl_lab.utils.stopping import STOPPED


def main(arguments: list[str]) -> int:
    from rl_lab.config.compose import compose_config
    from rl_lab.launch.pack import stop_with_parent
    from rl_lab.training import train_config

    job = read_json(Path(arguments[0]))
    stop_with_parent(int(job["parent"]))
    words = list(job["overrides"])
    config = compose_config(words, config_dirs=job["config_dirs"])
    result = wait_for_lock(lambda: train_config(config, words))
    return STOPPED if result.interrupted else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LabError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except Exception as error:
        import traceback

        from rl_lab.errors import unexpected

        traceback.print_exc()
        print(f"error: {unexpected(error)}", file=sys.stderr, flush=True)
        sys.exit(1)
