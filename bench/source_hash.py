"""One hash over the library's sources: tells which results are older than the code."""

import hashlib
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent


def source_hash():
    """sha256 over the names and contents of all files under include/ and src/, in order."""
    digest = hashlib.sha256()
    files = [p for top in ("include", "src") for p in (ROOT / top).rglob("*") if p.is_file()]
    for path in sorted(files, key=lambda p: p.relative_to(ROOT).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
