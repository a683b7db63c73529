"""Pack the published Push-T demonstrations as episode files, a third of the size of the zarr folder.

python scripts/dev/pack_pusht.py pusht_cchi_v7_replay.zarr FOLDER [pixels | keypoints]

They are read by buffers.demonstrations.path=FOLDER buffers.demonstrations.observations=null.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from rl_lab.buffers.formats.zarr_layout import ZarrEpisodes
from rl_lab.environments import probe_spec

SOURCES = {
    "pixels": {"image": "img", "agent_pos": "state[0:2]"},
    "keypoints": {"vector": ["keypoint", "state[0:2]"]},
}


def main(source: Path, target: Path, task: str = "pixels") -> None:
    spec = probe_spec(f"pusht/{task}")
    episodes = ZarrEpisodes(source, spec, SOURCES[task])
    target.mkdir(parents=True, exist_ok=True)
    for number, (_, rows) in enumerate(episodes.pieces(spec.row_columns())):
        names = list(spec.observations)
        observations = {
            "observations" if len(names) == 1 else f"observations/{name}": rows[f"obs/{name}"][0]
            for name in names
        }
        np.savez_compressed(
            target / f"{number:03d}.npz",
            **observations,
            actions=rows["action"][0, :-1],
            rewards=rows["reward"][0, 1:],
            truncated=rows["truncated"][0, 1:],
        )
    size = sum(file.stat().st_size for file in target.glob("*.npz"))
    print(f"{target}: {number + 1} episodes, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
