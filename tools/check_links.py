#!/usr/bin/env python3
"""Checks what the documents refer to.

In every Markdown file, each relative link leads to a file that exists, and each #anchor to a
heading. Each path in `backticks` exists, if its first folder is one of the repository's
(docs/worklog.md is a record: its old paths stay). The map in docs/design.md names every folder.
"""

import functools
import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = "docs/worklog.md"
MAP = "docs/design.md"

FENCE = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.M)
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.*<>-]+(/[\w.*<>-]+)*/?")


def is_ours(part):
    """Whether a file or folder of this name is no build's, no cache and not git's."""
    return part == ".ci" or not re.match(r"\.|build|__pycache__$|.*\.egg-info$", part)


def all_files():
    """Every file of the repository, as a path from its root."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if is_ours(name)]
        for name in names:
            yield pathlib.Path(folder, name).relative_to(ROOT).as_posix()


@functools.cache
def anchors_of(path):
    """The anchors of a file's headings, as GitHub makes them."""
    headings = HEADING.findall(FENCE.sub("", path.read_text()))
    plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in plain}


def link_faults(path, text):
    for target in LINK.findall(text):
        name, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (path.parent / name).resolve() if name else path
        if not file.exists():
            yield f"the link {target} leads nowhere"
        elif anchor and anchor not in anchors_of(file):
            yield f"the link {target}: no such heading"


def path_faults(path, text, folders):
    for code in CODE.findall(text):
        if "/" not in code or not PATH.fullmatch(code) or code.split("/")[0] not in folders:
            continue
        pattern = re.sub(r"<[^>]*>|NN", "*", code).rstrip("/")
        if not any(True for _ in ROOT.glob(pattern)):
            yield f"the path {code} does not exist"


def map_faults(files, text):
    folders = {parent.as_posix() for name in files for parent in pathlib.Path(name).parents}
    for folder in sorted(folders - {"."}):
        if not re.search(rf"(?<![\w/]){re.escape(folder)}(/|\b)", text):
            yield f"the map does not name the folder {folder}/"


def main():
    files = sorted(all_files())
    folders = {name.split("/")[0] for name in files if "/" in name}
    faults = []
    for name in files:
        if not name.endswith(".md"):
            continue
        path = ROOT / name
        text = path.read_text()
        found = list(link_faults(path, FENCE.sub("", text)))
        if name != RECORD:
            found += path_faults(path, FENCE.sub("", text), folders)
        if name == MAP:
            found += map_faults(files, text)
        faults += [f"{name}: {fault}" for fault in found]
    print("\n".join(faults), end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
