from __future__ import annotations

import argparse
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import rl_lab
from rl_lab.tools import doctor
from rl_lab.tools import doctor as packages
from rl_lab.tools.doctor import Declared
from rl_lab.utils.install import DISTRIBUTION, install_line

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
        extras={"atari": [Requirement("no-such-package>=1")], "all": [Requirement(f"{DISTRIBUTION}[atari]")]}
    )
    for finding, extra in zip(doctor.check_extras(needs), ("atari", "all")):
        assert finding.level == "missing" and finding.text.startswith(install_line(extra) + "   (")
        assert "no-such-package" in finding.text


def install_namesake(folder: Path, author: str, files: tuple[str, ...] = ("rl_lab/__init__.py",)) -> None:
    """What pip leaves of a distribution `rl-lab` in a folder of packages."""
    info = folder / "rl_lab-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: rl_lab\nVersion: 0.1.0\nAuthor: {author}\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in (*files, f"{info.name}/METADATA")))
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


def namesakes_in(folder: Path) -> list[doctor.Finding]:
    return [finding for finding in doctor.check_code() if f" in {folder} is " in finding.text]


def test_another_project_under_our_former_name_is_bad(monkeypatch, tmp_path: Path) -> None:
    install_namesake(tmp_path, "Somebody Else")
    monkeypatch.syspath_prepend(tmp_path)
    cure = f"pip uninstall -y rl-lab && {install_line()}"
    (finding,) = namesakes_in(tmp_path)
    assert finding.level == "bad" and finding.name == "other rl-lab"
    assert "can be imported instead of RL Lab" in finding.text and finding.text.endswith(f": {cure}")
    monkeypatch.setattr(packages, "PACKAGE", tmp_path / "rl_lab")  # both in one folder of packages
    monkeypatch.setattr(doctor, "install_line", lambda again: f"pip install again={again}")
    monkeypatch.delattr(rl_lab, "__version__")
    (finding,) = namesakes_in(tmp_path)
    assert finding.level == "bad" and "is written over RL Lab" in finding.text
    assert finding.text.endswith("pip uninstall -y rl-lab && pip install again=True")


def test_this_project_under_its_former_name_is_a_warning(monkeypatch, tmp_path: Path) -> None:
    install_namesake(tmp_path, packages.AUTHORS, ("__editable__.rl_lab-0.1.0.pth",))
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = namesakes_in(tmp_path)
    assert finding.level == "warn" and finding.name == "former rl-lab"
    assert finding.text.endswith(f"now rl-lab-wm: pip uninstall -y rl-lab && {install_line()}")


def test_what_is_no_rl_lab_is_left_alone(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert namesakes_in(tmp_path) == []
    install_namesake(tmp_path / "a", "Somebody Else", ("another_module.py",))
    monkeypatch.syspath_prepend(tmp_path / "a")
    assert namesakes_in(tmp_path / "a") == []
    # A source tree in which an older build left its metadata; pip does not uninstall that.
    install_namesake(tmp_path / "b", packages.AUTHORS)
    monkeypatch.syspath_prepend(tmp_path / "b")
    assert len(namesakes_in(tmp_path / "b")) == 1
    monkeypatch.setattr(packages, "checkout", lambda: tmp_path / "b")
    assert namesakes_in(tmp_path / "b") == []


def test_without_metadata_the_line_that_installs_is_told(monkeypatch) -> None:
    (finding,) = doctor.check_core(Declared())
    assert finding.level == "warn" and finding.text.endswith(f": {install_line()}")


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
    assert "1 thing to put right before rl-lab works" in capsys.readouterr().out


def test_extras_of_other_packages_are_looked_into() -> None:
    found = [package.name for package in packages.find(Requirement("imageio[ffmpeg]"))]
    assert found[0] == "imageio"
    if packages.version_of("imageio") is not None:
        assert "imageio-ffmpeg" in found


def test_extras_of_the_project_are_written_out() -> None:
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
