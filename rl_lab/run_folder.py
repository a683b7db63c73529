"""RunFolder: the files of one run, and how to find a run.

outputs/2026-11-15/14-30-05/
├── config.yaml  config/    resolved config; overrides, spec.json
├── checkpoints/            step_*.pt + manifests, last.pt, best.pt, replay/
├── metrics.jsonl  tensorboard/
├── media/                  episodes/{train,test,imagination}  reconstructions  recordings
├── report/                 written by `rl-lab report`
├── scripts/                play.sh  resume.sh  eval.py: run the verbs on this run
└── code.txt                commit and uncommitted diff of the code that ran
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_lab.errors import DISTRIBUTION, ConfigError, LabError, one_line
from rl_lab.records import REFUSED, Spec
from rl_lab.utils.files import LOCK_NAME, absolute, read_json, write_json_atomic
from rl_lab.utils.untrusted import (
    LARGEST_YAML,
    check_links,
    check_yaml,
    control_characters,
    read_bytes,
    strings,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

LONGEST_ERROR = 20_000  # characters of one error in error.txt
MEDIA = ("episodes/train", "episodes/test", "episodes/imagination", "reconstructions", "recordings")
# Entries that `create` writes before config.yaml.
BEFORE_CONFIG = {
    LOCK_NAME,
    "checkpoints",
    "tensorboard",
    "config",
    "scripts",
    "media",
    "code.txt",
    "config.yaml.part",
}


SIGNATURE = "signature.json"  # see config/trust.py
WEIGHTS = "agent.safetensors"  # of an exported agent, which is a run folder without checkpoints

# Any Python can start it: the one that trained the run, if it is still there, evaluates.
EVAL_SCRIPT = '''#!/usr/bin/env python3
"""Evaluate this run: python scripts/eval.py [--episodes N …]"""

import os
import sys

python = PYTHON
python = python if os.path.exists(python) else sys.executable
run = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
os.execv(python, [python, "-m", "rl_lab", "eval", run, *sys.argv[1:]])
'''


class RunFolder:
    """Paths and small files of a run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser().resolve()
        self._output: RunFolder | None = None
        self.borrowed = False  # found by an address: files are written elsewhere
        self.trusted = False  # whether its config was made here, or the user trusts it; set by `load_config`
        self._written: list[Path] = []  # files that `create` wrote
        self._made: list[Path] = []  # folders that this process created, parents first

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def spec_file(self) -> Path:
        return self.path / "config" / "spec.json"

    @property
    def form_file(self) -> Path:
        return self.path / "config" / "native.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """The weights of an exported agent."""
        return self.path / WEIGHTS

    @property
    def exported(self) -> bool:
        """Whether this is an agent of `rl-lab export`: weights, but no checkpoints."""
        return self.weights.is_file() and not self.checkpoints.is_dir()

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def media(self) -> Path:
        return self.path / "media"

    @property
    def report(self) -> Path:
        return self.path / "report"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def output(self, say: Callable[[str], None] | None = None) -> RunFolder:
        """Return where `eval`, `report` and `play` write: this folder, or another one if it is read-only or borrowed.

        The other one is ./<name>-output, or a new folder for temporary files; `say` is told (None: stderr).
        """
        if self._output is None:
            self._output = self
            if self.borrowed:
                self._output = RunFolder(_other_folder(f"{self.path.name}-output", self.path))
            elif not _can_write(self.path):
                self._output = RunFolder(_other_folder(f"{self.path.name}-output", self.path))
                (say or _to_stderr)(f"{self.path} is read-only: files are written to {self._output.path}")
        return self._output

    def exists(self) -> bool:
        return self.config_file.is_file()

    def check_free(self) -> None:
        """Raise ConfigError if `run_dir` contains other files: a run needs a new or an empty folder."""
        try:
            names = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
        except OSError as error:  # a file, or a folder that cannot be read
            raise ConfigError(f"run_dir={self.path} is not a readable folder: {error.strerror}") from error
        unfinished = LOCK_NAME in names and names <= BEFORE_CONFIG  # a start that was killed
        if names and not unfinished:
            raise ConfigError(
                f"run_dir={self.path} is not empty and is not a run folder (it has no config.yaml): "
                "choose a new or an empty folder"
            )

    def make(self, exist_ok: bool = True) -> None:
        """Create the run folder, and remember which folders are new."""
        self._make(self.path, exist_ok)

    def _make(self, folder: Path, exist_ok: bool = True) -> None:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=exist_ok)
        self._made += reversed(missing)

    def _write(self, file: Path, text: str) -> None:
        self._written.append(file)  # also if the disk is full
        file.write_text(text, encoding="utf-8")

    def create(
        self, config: DictConfig, spec: Spec, overrides: list[str], form: Mapping[str, Any] | None = None
    ) -> None:
        """Create the folders, and write the config and the files that never change."""
        for folder in (self.checkpoints, self.tensorboard, self.path / "config", self.path / "scripts"):
            self._make(folder)
        for name in MEDIA:
            self._make(self.media / name)
        self._written.append(self.spec_file)
        write_json_atomic(self.spec_file, spec.to_dict())
        if form is not None:
            write_json_atomic(self.form_file, form)
            self._written.append(self.form_file)
        self._write(self.path / "config" / "overrides.txt", "\n".join(overrides) + "\n")
        self._write(self.path / "code.txt", code_state())
        self._write_scripts()
        self.save_config(config)  # last: a folder with a config.yaml counts as a run
        self._written.append(self.config_file)

    def save_config(self, config: DictConfig, *, signed: bool = True) -> None:
        """Write config.yaml; an existing one is replaced in one step, or not at all.

        signed: the user composed or trusts this config, so its parts may be built without being asked again
        """
        from omegaconf import OmegaConf

        from rl_lab.config.trust import sign

        text = OmegaConf.to_yaml(config, resolve=True).encode()
        if signed:
            sign(self.path / "config", text)
        temporary = self.path / "config.yaml.part"
        self._written += [temporary, self.path / "config" / SIGNATURE]
        temporary.write_bytes(text)
        temporary.replace(self.config_file)

    def sign(self) -> None:
        """Sign the existing config.yaml, if it is not signed: the run counts as made here."""
        from rl_lab.config.trust import is_signed, sign

        with contextlib.suppress(OSError):
            text = read_bytes(self.config_file, LARGEST_YAML)
            if not is_signed(self.path / "config", text):
                sign(self.path / "config", text)

    def load_config(self, *, trust: bool = False, environment: bool = True) -> DictConfig:
        """Return the saved config. Unless the run was made here, it may name registered parts only.

        trust:       allow any part; its code is run when the part is built
        environment: False: an environment that is not registered is an error only when it is to be built
        """
        from omegaconf import DictConfig, OmegaConf

        from rl_lab.config.checks import check_complete, check_values
        from rl_lab.config.compose import check_targets
        from rl_lab.config.saved import current_targets
        from rl_lab.config.trust import (
            UntrustedError,
            check_environment,
            check_parts,
            check_saved,
            is_signed,
        )

        if not self.exists():
            raise LabError(f"{self.path} has no config.yaml: pass the folder of a run")
        try:
            text = read_bytes(self.config_file, LARGEST_YAML)
            check_yaml(text.decode())
            config = OmegaConf.create(text.decode())
            plain: Any = current_targets(OmegaConf.to_container(config))
        except Exception as error:  # YAML, OmegaConf, the file system and the decoder raise different errors
            raise ConfigError(f"{self.config_file} is damaged: {one_line(error)}") from error
        if not isinstance(config, DictConfig) or not config:
            raise ConfigError(f"{self.config_file} is damaged: it has no config")
        self.trusted = trust or is_signed(self.path / "config", text)
        try:
            check_saved(plain)
            config = OmegaConf.create(plain)
            check_targets(config)
            if not self.trusted:
                check_parts(plain)
                try:
                    check_environment(plain)
                except UntrustedError as error:
                    if environment:
                        raise
                    config.environment[REFUSED] = f"{self.config_file}: {error}"
            check_values(plain)
            check_complete(plain)
        except UntrustedError as error:
            raise UntrustedError(f"{self.config_file}: {error}") from None
        except ConfigError as error:
            raise ConfigError(f"{self.config_file} is damaged: {error}") from error
        OmegaConf.set_struct(config, True)
        return config

    def check_links(self, *, replay: bool = True, trust: bool = False) -> None:
        """Raise LinkError if a link leads out of the run folder, unless the user trusts it.

        replay: whether the replay files are used, too
        """
        if not trust:
            check_links(self.path, skip=() if replay else ("checkpoints/replay", "buffers"))

    def load_spec(self) -> Spec:
        try:
            data = read_json(self.spec_file)
            for path, text in strings(data):
                if control_characters(text):
                    raise ValueError(f"{path} has control characters")
            return Spec.from_dict(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{self.spec_file} is damaged: {one_line(error)}") from error

    def write_error(self, title: str, error: BaseException | str) -> Path:
        """Append an error with its traceback to error.txt. A string is the traceback of another process."""
        file = self.path / "error.txt"
        text = error if isinstance(error, str) else "".join(traceback.format_exception(error))
        if len(text) > LONGEST_ERROR:
            text = f"{text[: LONGEST_ERROR // 2]}\n[…]\n{text[-LONGEST_ERROR // 2 :]}"
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        with open(file, "a", encoding="utf-8", errors="replace") as stream:
            stream.write(f"--- {stamp} {title}\n{text.rstrip()}\n\n")
        self._written.append(file)
        return file

    def discard_if_unused(self) -> bool:
        """Delete the files of a run that failed before its first checkpoint or metrics line; return whether.

        Only files written by this process are deleted, and then empty folders that it created: all other
        files stay.
        """
        used = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        if used or (self.metrics.exists() and self.metrics.stat().st_size):
            return False
        logs: list[Path] = []
        if self.tensorboard.is_dir() and not self.tensorboard.is_symlink():
            logs = [path for path in self.tensorboard.iterdir() if not path.is_symlink() and path.is_file()]
        for file in (*self._written, *logs, self.metrics, self.path / LOCK_NAME):
            with contextlib.suppress(OSError):
                file.unlink()
        for folder in sorted(self._made, key=lambda path: len(path.parts), reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()  # fails if the folder is not empty
        return True

    def _write_scripts(self) -> None:
        python = sys.executable
        scripts = {
            "resume.sh": f'#!/usr/bin/env bash\nexec "{python}" -m rl_lab resume "$(dirname "$0")/.." "$@"\n',
            "play.sh": f'#!/usr/bin/env bash\nexec "{python}" -m rl_lab.tools.play.shell "$(dirname "$0")/.." "$@"\n',
            "eval.py": EVAL_SCRIPT.replace("PYTHON", repr(python)),
        }
        for name, text in scripts.items():
            file = self.path / "scripts" / name
            self._write(file, text)
            file.chmod(0o755)


def _can_write(folder: Path) -> bool:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _other_folder(name: str, instead_of: Path) -> Path:
    with contextlib.suppress(OSError):  # the current folder was deleted
        if _can_write(Path.cwd()):
            return Path.cwd() / name
    try:
        return Path(tempfile.mkdtemp(prefix=f"{name}-"))
    except OSError as error:
        raise LabError(
            f"{instead_of} is read-only, and so are the current folder and that of temporary files ({error}): change "
            "to a folder that can be written, or set TMPDIR"
        ) from error


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def output_root(configured: str | None) -> Path:
    """Return the parent folder of all runs: as configured, a persistent one on Kaggle or Colab, else ./outputs."""
    if configured:
        return Path(configured).expanduser()
    from rl_lab.hosted import persistent_folder

    kept = persistent_folder()
    return Path("outputs") if kept is None else kept / "rl-lab" / "outputs"


def new_run_folder(root: Path, now: datetime | None = None) -> RunFolder:
    """Create outputs/YYYY-MM-DD/HH-MM-SS; a number is appended if two runs start in the same second."""
    now = now or datetime.now()
    day = root / now.strftime("%Y-%m-%d")
    for number in range(1000):
        folder = RunFolder(day / (now.strftime("%H-%M-%S") + (f"-{number}" if number else "")))
        try:
            folder.make(exist_ok=False)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"output_root: cannot create the run folder {folder.path}: {error}") from error
        return folder
    raise ConfigError(f"{day} has no free run folder: wait a second, or set run_dir")


def find_run(name: str | Path | None, root: Path) -> RunFolder:
    """Find a run by its folder, a file inside it or its address; None: the newest run under `root`.

    An address is hf://owner/name, an agent on a hub, or example://name, an agent of this package.
    """
    if name is not None and "://" in str(name):
        from rl_lab.hub import folder_of

        found = RunFolder(folder_of(str(name)))
        found.borrowed = True
        return found
    if name is not None:
        path = absolute(name)  # the parents of a relative path end at the current folder
        # A mistyped folder in a run is not the run. Checkpoints may be absent: the first one is still to be written,
        # or only the manifest beside the file is there.
        known = path.parent if path.suffix == ".pt" else path
        known = known.parent if known.name == "checkpoints" else known
        if not known.exists():
            raise LabError(
                f"{path} is not a run: it does not exist (rl-lab train prints the folder of a run)"
            )
        for candidate in (path, *path.parents):
            if (candidate / "config.yaml").is_file():
                return RunFolder(candidate)
        raise LabError(f"{path} is not a run: pass a folder with config.yaml (rl-lab train prints it)")
    runs = sorted(root.glob("*/*/config.yaml"), key=lambda file: file.stat().st_mtime)
    if not runs:
        raise LabError(f"{root.resolve()} has no run: train one first with rl-lab train")
    return RunFolder(runs[-1].parent)


def code_state() -> str:
    """Return commit and uncommitted diff of the git checkout of rl_lab, or the installed version."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        result = subprocess.run(command, capture_output=True, timeout=10)
        # A file of the checkout may have another encoding.
        return result.stdout.decode("utf-8", "replace").strip() if result.returncode == 0 else ""

    try:
        # An installed rl_lab may be inside a repository of the user, whose diff must not be recorded.
        ours = git("ls-files", "--error-unmatch", "__init__.py")
        commit = git("rev-parse", "HEAD") if ours else ""
        diff = git("diff", "HEAD") if ours else ""
    except (OSError, subprocess.TimeoutExpired):
        commit = diff = ""
    if commit:
        return f"commit {commit}\n\n{diff}\n"
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{DISTRIBUTION} {version(DISTRIBUTION)} (installed, no git checkout)\n"
    except PackageNotFoundError:
        return f"{DISTRIBUTION} (no git checkout)\n"


def describe_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Return the paths whose values differ between two plain configs: path -> (old, new)."""
    differences: dict[str, tuple[Any, Any]] = {}
    for key in {*old, *new}:
        path = f"{prefix}{key}"
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            differences |= describe_differences(before, after, path + ".")
        elif before != after:
            differences[path] = (before, after)
    return differences
