"""Play without anybody looking: an episode as a video."""

from __future__ import annotations

from pathlib import Path

from rl_lab.tools.play.session import PlaySession


def write_video(session: PlaySession, *, steps: int) -> list[Path]:
    """Record from now to the episode's end, at most `steps` steps; the files, the film first."""
    session.keeping.start(session.moment, session.frame(), fps=session.fps, label=session.mode)
    for _ in range(steps):
        if session.moment.done or not session.advance():
            break
    return session.keeping.stop()
