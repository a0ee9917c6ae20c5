"""What is published: an sdist, and the wheel that is built from it, in an environment that has only torch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import torch

import joinables

ROOT = Path(joinables.__file__).parent.parent
BESIDE_PACKAGES = {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "setup.py"}
LOOK = """
import importlib.metadata, json, join, joinables, joinables.explain, joinables.trainer
from joinables import Join

about = importlib.metadata.metadata("joinables")
print(json.dumps({
    "same Join": Join is join.Join,
    "files": [join.__file__, joinables.__file__],
    "versions": [joinables.__version__, about["Version"]],
    "classifiers": about.get_all("Classifier"),
    "extras": about.get_all("Provides-Extra"),
    "addresses": dict(each.split(", ") for each in about.get_all("Project-URL")),
    "description": about.get_payload(),
    "explained": joinables.explain.explain("J441"),
}))
"""


def run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_sdist_and_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, since a build writes into it
    leftovers = shutil.ignore_patterns(".*", "*-out", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=leftovers)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, source)
    ((sdist,), (wheel,)) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")

    ours = {
        path.relative_to(source).as_posix()
        for package in ("join", "joinables")
        for path in (source / package).rglob("*")
        if path.is_file()
    }
    assert {"join/py.typed", "joinables/py.typed"} <= ours
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert {name for name in packed if ".egg-info/" not in name} == ours | BESIDE_PACKAGES
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    assert {name for name in packed if ".dist-info/" not in name} == ours

    clean = tmp_path / "clean"
    venv.EnvBuilder(symlinks=True).create(clean)
    (site,) = clean.glob("lib/python*/site-packages")
    python = clean / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (site / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))  # what is editable there stays unknown
    seen = json.loads(run(python, "-I", "-W", "error", "-c", LOOK))
    assert seen["same Join"]
    assert seen["files"] == [str(site / package / "__init__.py") for package in ("join", "joinables")]
    assert seen["versions"] == [joinables.__version__] * 2
    minors = [name.rpartition("3.")[2] for name in seen["classifiers"] if "Python :: 3." in name]
    assert minors == ["10", "11", "12", "13"]
    assert not {"test", "docs", "dev"} & set(seen["extras"])
    assert seen["explained"].startswith("J441")
    links = re.findall(r"\]\(([^)]*)\)", seen["description"])
    assert len(links) > 20 and all(link.startswith(("https://", "#")) for link in links)
    assert {link.split("/blob/")[0] for link in links if "/blob/" in link} == {seen["addresses"]["Source"]}
