from __future__ import annotations

import argparse
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import rl_lab
from rl_lab.tools import doctor, packages
from rl_lab.tools.packages import Declared

ROOT = Path(rl_lab.__file__).resolve().parents[1]


def run_doctor(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return doctor.main(parser.parse_args(arguments))


def versions(**known: str) -> Callable[[str], str | None]:
    return {"packaging": "26.0", **{name.replace("_", "-"): text for name, text in known.items()}}.get


def test_names_every_extra_quickly(capsys, tmp_path: Path) -> None:
    begin = time.process_time()  # not the wall: other tests may run beside this one
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


def test_missing_extra_gives_the_line_that_installs_it() -> None:
    needs = Declared(
        extras={"atari": [Requirement("no-such-package>=1")], "all": [Requirement("rl-lab[atari]")]}
    )
    for finding, extra in zip(doctor.check_extras(needs), ("atari", "all")):
        assert finding.level == "missing" and f"pip install -e '.[{extra}]'" in finding.text
        assert "no-such-package" in finding.text


def test_install_line_without_a_checkout(monkeypatch) -> None:
    monkeypatch.setattr(packages, "checkout", lambda: None)
    assert packages.install_line("atari") == "pip install 'rl-lab[atari]'"


def test_core_package_that_is_missing_is_bad_and_an_old_one_a_warning(monkeypatch, capsys) -> None:
    needs = Declared(
        core=[Requirement("no-such-package>=1"), Requirement("numpy>=999"), Requirement("numpy")]
    )
    missing, old, fine = doctor.check_core(needs)
    assert missing.level == "bad" and "pip install 'no-such-package>=1'" in missing.text
    assert old.level == "warn" and ">=999" in old.text
    assert fine.level == "ok"
    monkeypatch.setattr(doctor, "declared", lambda: needs)
    assert run_doctor() == 1
    assert "cannot do without" in capsys.readouterr().out


def test_extras_of_other_packages_are_looked_into() -> None:
    found = [package.name for package in packages.find(Requirement("imageio[ffmpeg]"))]
    assert found[0] == "imageio"
    if packages.version_of("imageio") is not None:
        assert "imageio-ffmpeg" in found


def test_extras_of_the_project_are_written_out() -> None:
    needs = packages.declared()
    names = {requirement.name for requirement in needs.of_extra("demo")}
    assert {"gymnasium", "imageio"} <= names and "rl-lab" not in names


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
def test_known_bad_versions_are_warned_about(known: dict[str, str], about: str) -> None:
    (finding,) = doctor.check_pairs(versions(**known))
    assert finding.level == "warn" and about in finding.text


def test_good_versions_are_not() -> None:
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
def test_the_renderer_that_will_be_taken_is_told(libraries, gpu, text, monkeypatch) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setattr(doctor, "_has_nvidia", lambda: gpu)
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: name if name in libraries else None)
    (found,) = [finding for finding in doctor.check_rendering() if finding.name == "MUJOCO_GL"]
    assert text in found.text and found.level == ("ok" if libraries else "missing")
