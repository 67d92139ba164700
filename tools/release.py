"""Release one package: bump its version, head its changelog, build its wheel and source archive, and try them outside the workspace.

    ./dev release NAME VERSION [--dry-run]        # for example: ./dev release twinkle-mesh 0.1.1

Everything happens in a clone of the checkout. Only when all checks have passed are pyproject.toml, CHANGELOG.md and uv.lock
taken over and the archives put into dist/. With --dry-run nothing is taken over. Committing, tagging (the tag is NAME-vVERSION)
and uploading stay with the person; the commands are printed.

Refused are: a tree that is not clean, a tag that exists, a version that does not grow, a changelog without an "Unreleased"
section or with an empty one, and a version that a sibling's range of this package does not admit.
"""

from __future__ import annotations

import argparse
import datetime
import email
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from isolated import CommandFailed, Environment, build
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version
from relock import RelockError, relock
from workspace import ROOT, Distribution, find_uv, read_distributions

UNRELEASED = re.compile(r"^## \[?Unreleased\]?[^\n]*\n", re.MULTILINE | re.IGNORECASE)


class ReleaseError(RuntimeError):
    """The package cannot be released as asked; the message says why and what to do."""


def tag_name(name: str, version: str) -> str:
    """The tag of a release: each package has its own."""
    return f"{name}-v{version}"


def git(root: Path, *arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=120, check=False)
    if result.returncode != 0:
        raise ReleaseError(f"git {' '.join(arguments)} failed: {result.stderr.strip()}")
    return result.stdout.strip()


def check_request(root: Path, name: str, version: str) -> Distribution:
    """The package, if it can become this version from this checkout. Raises ReleaseError."""
    distributions = read_distributions(root)
    if name not in distributions:
        raise ReleaseError(f"there is no package {name}; there are {', '.join(distributions)}")
    package = distributions[name]
    try:
        wanted = Version(version)
    except InvalidVersion:
        raise ReleaseError(f"{version!r} is not a version as 0.1.1") from None
    if str(wanted) != version:
        raise ReleaseError(f"write the version as {wanted}")
    if wanted <= Version(package.version):
        raise ReleaseError(f"{name} is at {package.version}; {version} does not grow")
    dirty = git(root, "status", "--porcelain")
    if dirty:
        raise ReleaseError(f"the tree is not clean: commit or stash first\n{dirty}")
    if git(root, "tag", "--list", tag_name(name, version)):
        raise ReleaseError(f"the tag {tag_name(name, version)} exists")
    for sibling in distributions.values():
        for line in ranges_of(sibling, name):
            if not Requirement(line).specifier.contains(wanted, prereleases=True):
                raise ReleaseError(f"{sibling.name} asks for {line}, which does not admit {version}: widen its range and release it as well")
    return package


def ranges_of(distribution: Distribution, name: str) -> list[str]:
    """The requirements by which a package, extras included, asks for the package `name`."""
    extras = distribution.project.get("optional-dependencies", {}).values()
    lines = [line for group in (distribution.project.get("dependencies", []), *extras) for line in group]
    return [line for line in lines if Requirement(line).name == name]


def bump(package: Distribution, root: Path, version: str, day: datetime.date) -> None:
    """Write the version into pyproject.toml and its heading into the changelog. Raises ReleaseError."""
    before, folder = package.version, package.folder
    changelog = folder / "CHANGELOG.md"
    text = changelog.read_text()
    heading = UNRELEASED.search(text)
    if heading is None:
        raise ReleaseError(f"{changelog.relative_to(root)} has no '## Unreleased' section: say what is new")
    notes = re.split(r"^## ", text[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    if not notes.strip():
        raise ReleaseError(f"the '## Unreleased' section of {changelog.relative_to(root)} is empty: say what is new")
    changelog.write_text(f"{text[: heading.start()]}## {version} ({day.isoformat()})\n{text[heading.end() :]}")
    pyproject = folder / "pyproject.toml"
    line = f'\nversion = "{before}"\n'
    if pyproject.read_text().count(line) != 1:
        raise ReleaseError(f"{pyproject.relative_to(root)} has no single line {line.strip()}")
    pyproject.write_text(pyproject.read_text().replace(line, f'\nversion = "{version}"\n'))


def check_archives(package: Distribution, folder: Path) -> list[Path]:
    """The wheel and the source archive in `folder`, if they say what they should. Raises ReleaseError."""
    stem = f"{package.name.replace('-', '_')}-{package.version}"
    archives = [*folder.glob(f"{stem}-*.whl"), *folder.glob(f"{stem}.tar.gz")]
    if len(archives) != 2:
        raise ReleaseError(f"expected a wheel and a source archive of {stem}, found {[path.name for path in archives]}")
    with zipfile.ZipFile(archives[0]) as wheel:
        names = wheel.namelist()
        metadata = email.message_from_bytes(wheel.read(next(name for name in names if name.endswith(".dist-info/METADATA"))))
    if (metadata["Name"], metadata["Version"]) != (package.name, package.version):
        raise ReleaseError(f"the wheel says {metadata['Name']} {metadata['Version']}, not {package.name} {package.version}")
    for required in (f"{package.module}/__init__.py", f"{package.module}/py.typed"):
        if required not in names:
            raise ReleaseError(f"the wheel lacks {required}")
    return archives


def try_outside(package: Distribution, siblings: list[Distribution], folder: Path) -> None:
    """Install the wheel with what it declares into a new environment, import it and compare its version. Raises ReleaseError."""
    wheels = folder / "wheels"
    wheels.mkdir()
    for distribution in [package, *siblings]:
        build(distribution, wheels)
    environment = Environment(folder / "environment", wheels, bytecode=folder / "bytecode")
    environment.install(f"{package.name}=={package.version}")
    environment.check()
    printed = environment.execute(
        f"import importlib.metadata, {package.module} as module\nassert module.__all__\nprint(importlib.metadata.version({package.name!r}))\n"
    )
    if printed.strip() != package.version:
        raise ReleaseError(f"the installed {package.name} says version {printed.strip()}, not {package.version}")


def release(root: Path, name: str, version: str, *, dry_run: bool, day: datetime.date) -> list[Path]:
    """Do all of it for the checkout at `root`. The archives, in its dist/ (dry run: nothing). Raises ReleaseError, CommandFailed."""
    check_request(root, name, version)
    uv = find_uv()
    if uv is None:
        raise ReleaseError("uv was not found: run ./dev release, which installs it")
    (root / ".tools").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="release-", dir=root / ".tools") as temporary:
        clone = Path(temporary) / "clone"
        git(root, "clone", "--quiet", "--no-hardlinks", ".", str(clone))
        distributions = read_distributions(clone)
        bump(distributions[name], clone, version, day)
        package = read_distributions(clone)[name]
        relock(clone, uv, ["--offline"])
        archives = Path(temporary) / "archives"
        archives.mkdir()
        build(package, archives)
        built = check_archives(package, archives)
        needed = [other for other in distributions.values() if other.name != name and depends_on(package, other.name, distributions)]
        try_outside(package, needed, Path(temporary))
        if dry_run:
            return []
        for file in git(clone, "diff", "--name-only").splitlines():
            shutil.copyfile(clone / file, root / file)
        (root / "dist").mkdir(exist_ok=True)
        return [Path(shutil.copy(archive, root / "dist")) for archive in built]


def depends_on(package: Distribution, name: str, distributions: dict[str, Distribution]) -> bool:
    """Whether the package needs `name`, directly or through a sibling."""
    names = {Requirement(line).name for line in package.project.get("dependencies", [])} & set(distributions)
    return name in names or any(depends_on(distributions[sibling], name, distributions) for sibling in names)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./dev release", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("version")
    parser.add_argument("--dry-run", action="store_true", help="check and build everything, and change nothing")
    options = parser.parse_args(arguments)
    try:
        archives = release(ROOT, options.name, options.version, dry_run=options.dry_run, day=datetime.datetime.now(datetime.UTC).date())
    except (ReleaseError, RelockError, CommandFailed) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    tag = tag_name(options.name, options.version)
    if options.dry_run:
        print(f"{options.name} {options.version} can be released, with the tag {tag}; nothing was changed")
        return 0
    print(f"{options.name} {options.version} is in {' and '.join(str(path.relative_to(ROOT)) for path in archives)}. To publish it:")
    print(f'  git commit -am "{options.name} {options.version}" && git tag -a {tag} -m "{options.name} {options.version}" && git push --follow-tags')
    print(f"  uv publish {' '.join(str(path.relative_to(ROOT)) for path in archives)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
