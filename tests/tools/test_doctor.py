from __future__ import annotations

import argparse
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import rl_lab
from rl_lab.errors import DISTRIBUTION, install_line
from rl_lab.tools import doctor
from rl_lab.tools import doctor as packages
from rl_lab.tools.doctor import Declared

ROOT = Path(rl_lab.__file__).resolve().parents[1]


def run_doctor(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return doctor.main(parser.parse_args(arguments))


def versions(**known: str) -> Callable[[str], str | None]:
    return {"packaging": "26.0", **{name.replace("_", "-"): text for name, text in known.items()}}.get


def test_every_extra_is_listed(capsys, tmp_path: Path) -> None:
    begin = time.process_time()  # not wall time: other tests may run in parallel
    code = run_doctor("--output-root", str(tmp_path / "runs"))
    assert time.process_time() - begin < 5
    printed = capsys.readouterr().out
    assert code == 0, printed
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = printed.partition("\nExtras\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[1] for line in listed] == list(extras)
    for text in (
        "Python",
        "torch",
        "cuda",
        "memory",
        "disk",
        "MUJOCO_GL",
        "EGL",
        "ffmpeg",
        str(tmp_path / "runs"),
    ):
        assert text in printed, text


def test_missing_extra_shows_install_command() -> None:
    needs = Declared(
        extras={"atari": [Requirement("no-such-package>=1")], "all": [Requirement(f"{DISTRIBUTION}[atari]")]}
    )
    for finding, extra in zip(doctor.check_extras(needs), ("atari", "all")):
        assert finding.level == "missing" and finding.text.startswith(install_line(extra) + "   (")
        assert "no-such-package" in finding.text


def write_former_install(folder: Path, author: str, files: tuple[str, ...] = ("rl_lab/__init__.py",)) -> None:
    """Write the files that pip leaves for a distribution `rl-lab`."""
    info = folder / "rl_lab-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: rl_lab\nVersion: 0.1.0\nAuthor: {author}\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in (*files, f"{info.name}/METADATA")))
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


def former_installs_in(folder: Path) -> list[doctor.Finding]:
    return [finding for finding in doctor.check_code() if f" in {folder} is " in finding.text]


def test_other_project_install_is_bad(monkeypatch, tmp_path: Path) -> None:
    write_former_install(tmp_path, "Somebody Else")
    monkeypatch.syspath_prepend(tmp_path)
    fix = f"pip uninstall -y rl-lab && {install_line()}"
    (finding,) = former_installs_in(tmp_path)
    assert finding.level == "bad" and finding.name == "other rl-lab"
    assert "can be imported instead of RL Lab" in finding.text and finding.text.endswith(f": {fix}")
    monkeypatch.setattr(packages, "PACKAGE", tmp_path / "rl_lab")  # both in the same site-packages
    monkeypatch.setattr(doctor, "install_line", lambda again: f"pip install again={again}")
    monkeypatch.delattr(rl_lab, "__version__")
    (finding,) = former_installs_in(tmp_path)
    assert finding.level == "bad" and "overwrote RL Lab" in finding.text
    assert finding.text.endswith("pip uninstall -y rl-lab && pip install again=True")


def test_own_former_install_is_warning(monkeypatch, tmp_path: Path) -> None:
    write_former_install(tmp_path, packages.AUTHORS, ("__editable__.rl_lab-0.1.0.pth",))
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = former_installs_in(tmp_path)
    assert finding.level == "warn" and finding.name == "former rl-lab"
    assert finding.text.endswith(f"now rl-lab-wm: pip uninstall -y rl-lab && {install_line()}")


def test_unrelated_packages_are_ignored(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert former_installs_in(tmp_path) == []
    write_former_install(tmp_path / "a", "Somebody Else", ("another_module.py",))
    monkeypatch.syspath_prepend(tmp_path / "a")
    assert former_installs_in(tmp_path / "a") == []
    # A source tree in which an older build left its metadata; pip does not uninstall that.
    write_former_install(tmp_path / "b", packages.AUTHORS)
    monkeypatch.syspath_prepend(tmp_path / "b")
    assert len(former_installs_in(tmp_path / "b")) == 1
    monkeypatch.setattr(packages, "checkout", lambda: tmp_path / "b")
    assert former_installs_in(tmp_path / "b") == []


def test_missing_metadata_shows_install_command(monkeypatch) -> None:
    (finding,) = doctor.check_core(Declared())
    assert finding.level == "warn" and finding.text.endswith(f": {install_line()}")


def test_missing_and_old_core_packages(monkeypatch, capsys) -> None:
    needs = Declared(
        core=[Requirement("no-such-package>=1"), Requirement("numpy>=999"), Requirement("numpy")]
    )
    missing, old, fine = doctor.check_core(needs)
    assert missing.level == "bad" and "pip install 'no-such-package>=1'" in missing.text
    assert old.level == "warn" and ">=999" in old.text
    assert fine.level == "ok"
    monkeypatch.setattr(doctor, "declared", lambda: needs)
    assert run_doctor() == 1
    assert "1 problem to fix before rl-lab works" in capsys.readouterr().out


def test_extras_of_requirements() -> None:
    found = [package.name for package in packages.find(Requirement("imageio[ffmpeg]"))]
    assert found[0] == "imageio"
    if packages.version_of("imageio") is not None:
        assert "imageio-ffmpeg" in found


def test_own_extras_are_expanded() -> None:
    needs = packages.declared()
    names = {requirement.name for requirement in needs.of_extra("demo")}
    assert {"gymnasium", "imageio"} <= names and not {"rl-lab", DISTRIBUTION} & names


@pytest.mark.parametrize(
    ("known", "about"),
    [
        ({"dm_control": "1.0.50", "mujoco": "4.0.0"}, "mujoco==3.17.0"),
        ({"omegaconf": "2.4.0"}, "omegaconf>=2.3,<2.4"),
        ({"torch": "2.10.0"}, "torch>=2.11,<2.14"),
        ({"torch": "2.14.0+cu130"}, "torch>=2.11,<2.14"),
        ({"pygame": "2.6.1", "pygame_ce": "2.5.8"}, "pip uninstall"),
    ],
)
def test_incompatible_versions(known: dict[str, str], about: str) -> None:
    (finding,) = doctor.check_pairs(versions(**known))
    assert finding.level == "warn" and about in finding.text


def test_compatible_versions() -> None:
    good = versions(dm_control="1.0.50", mujoco="3.17.0", omegaconf="2.3.1", torch="2.13.0+cpu")
    assert [finding.level for finding in doctor.check_pairs(good)] == ["ok"]
    assert [finding.level for finding in doctor.check_pairs(versions(mujoco="4.0.0"))] == ["ok"]


def test_rendering_advice(monkeypatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: None)
    found = {finding.name: finding for finding in doctor.check_rendering()}
    assert found["MUJOCO_GL"].level == "warn" and "no OSMesa library" in found["MUJOCO_GL"].text
    assert "apt-get install libegl1" in found["EGL"].text


@pytest.mark.parametrize(
    ("libraries", "gpu", "text"),
    [
        ({"EGL", "OSMesa"}, False, "egl is chosen (in software"),
        ({"EGL"}, True, "egl is chosen (on the GPU)"),
        ({"OSMesa"}, True, "osmesa is chosen (in software"),
        (set(), False, "observe=proprio only; apt-get install libegl1"),
    ],
)
def test_chosen_renderer_is_reported(libraries, gpu, text, monkeypatch) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setattr(doctor, "_has_nvidia", lambda: gpu)
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: name if name in libraries else None)
    (found,) = [finding for finding in doctor.check_rendering() if finding.name == "MUJOCO_GL"]
    assert text in found.text and found.level == ("ok" if libraries else "missing")
