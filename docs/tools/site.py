"""Builds the site: `make docs`, or `python docs/tools/site.py`. mkdocs.yml names its pages.

The pages are staged in build/docs first: the guides of docs/, README.md as the first page, CONTRIBUTING.md,
CHANGELOG.md and a page of the API reference for each public module. Files of the repository that a page links to come
along under source/, so that a link that leads nowhere is an error of the build, and no repository's address is needed.
"""

import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]
STAGE = ROOT / "build" / "docs"
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)")


def main() -> int:
    """Stage and build; 1 where the build says that something is wrong."""
    stage()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    # the theme says at each build that Zensical, which reads the same mkdocs.yml, will follow it
    status = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=False).returncode
    print("look at it with: python -m http.server --directory site" if status == 0 else "the site was not built")
    return min(status, 1)


def stage() -> None:
    """Write build/docs."""
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", STAGE, ignore=shutil.ignore_patterns("tools"))
    pages = {path: path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages |= {ROOT / source: uri for source, uri in ROOT_PAGES.items()}
    for source, uri in pages.items():
        text = source.read_text(encoding="utf-8")
        (STAGE / uri).write_text(_relinked(text, source, uri), encoding="utf-8")
        for path in _linked(text, source):
            _bring(path)
    (STAGE / "adr" / "index.md").write_text(_decisions(), encoding="utf-8")
    octavo = griffe.load("octavo", search_paths=[ROOT])
    for uri in re.findall(r"api/[\w.]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")):
        target = STAGE / uri
        target.parent.mkdir(exist_ok=True)
        target.write_text(_api_page(octavo, target.stem), encoding="utf-8")


def _relinked(text: str, source: Path, page_uri: str) -> str:
    """A page's text, its links to files of the repository as the site has these."""

    def link(match: re.Match[str]) -> str:
        path = (source.parent / match[2]).resolve()
        return match[1] + posixpath.relpath(_uri(path), posixpath.dirname(page_uri) or ".")

    text = re.sub(r"^( *```\w+) no-run$", r"\1", text, flags=re.MULTILINE)  # a word to the tests
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in _FENCE.split(text))


def _linked(text: str, source: Path) -> set[Path]:
    """Files that a page links to."""
    prose = "".join(part for part in _FENCE.split(text) if not part.startswith("```"))
    return {(source.parent / match[2]).resolve() for match in _LINK.finditer(prose)}


def _uri(path: Path) -> str:
    """Where the site has a file of the repository; text that browsers would save and not show is called .txt."""
    docs = ROOT / "docs"
    if path.is_relative_to(docs):
        return f"{path.relative_to(docs).as_posix()}{'/index.md' if path.is_dir() else ''}"
    uri = path.relative_to(ROOT).as_posix()
    if uri in ROOT_PAGES:
        return ROOT_PAGES[uri]
    if path.is_dir():
        return f"source/{uri}/index.md"
    return f"source/{uri}.txt" if path.suffix in (".md", ".py", ".toml") else f"source/{uri}"


def _bring(path: Path) -> None:
    """Copy a file of the repository to the site, or a list of a folder's files."""
    target = STAGE / _uri(path)
    if path.is_relative_to(ROOT / "docs") or path.name in ROOT_PAGES or not path.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        shutil.copyfile(path, target)
        return
    names = sorted(entry.name + "/" * entry.is_dir() for entry in path.iterdir() if entry.name[0] not in "_.")
    head = f"# {path.relative_to(ROOT)}/\n\n"
    target.write_text(head + "".join(f"- `{name}`\n" for name in names), encoding="utf-8")


def _decisions() -> str:
    """The first page of the decisions."""
    rows = []
    for path in sorted((ROOT / "docs" / "adr").glob("*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        rows.append(f"- [{title}]({path.name})\n")
    return "# Decisions\n\nWhy is it built so?\n\n" + "".join(rows)


def _api_page(octavo: griffe.Object | griffe.Alias, module: str) -> str:
    """A page of the reference: a module's docstring, and each public name that has one."""
    found = octavo if module == "octavo" else octavo[module.removeprefix("octavo.")]
    names = found.exports or [name for name, member in found.members.items() if not member.is_alias]
    blocks = "".join(f"\n::: {module}.{name}\n" for name in map(str, names) if _is_documented(found, name))
    return f"# {module}\n\n::: {module}\n    options:\n      members: false\n      show_root_heading: false\n{blocks}"


def _is_documented(module: griffe.Object | griffe.Alias, name: str) -> bool:
    try:
        member = module[name]
        member = member.final_target if member.is_alias else member
    except (KeyError, griffe.AliasResolutionError):
        return False
    return member.has_docstring and not member.is_module


if __name__ == "__main__":
    sys.exit(main())
