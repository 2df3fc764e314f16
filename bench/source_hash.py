"""Hashes over sources: tell which results are older than the code that they measured."""

import hashlib
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Lines of the rungs' headers that bench/tables.py writes from the results. They are not part of
# what was measured.
MEASURED = re.compile(rb"^ \* Measured\b.*\n", re.MULTILINE)


def hash_of(files, read):
    """sha256 over the names and contents of files, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda p: p.relative_to(ROOT).as_posix()):
        content = read(path)
        digest.update(f"{path.relative_to(ROOT).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def source_hash():
    """Of all files under include/ and src/ but src/cuda/: the library as it runs on a CPU."""
    files = [p for top in ("include", "src") for p in (ROOT / top).rglob("*") if p.is_file()]
    cuda = ROOT / "src" / "cuda"
    return hash_of((p for p in files if cuda not in p.parents), pathlib.Path.read_bytes)


def cuda_hash():
    """Of the library's kernels and of what plans and launches them."""
    files = [p for top in ("kernels", "src/cuda") for p in (ROOT / top).rglob("*.[ch]*")]
    return hash_of((p for p in files if p.is_file()), pathlib.Path.read_bytes)


def ladder_hash():
    """Of the ladder's kernels and of what they include, without what was measured."""
    patterns = ("ladder/*.cu", "ladder/*.h", "kernels/common/*")
    files = [p for pattern in patterns for p in ROOT.glob(pattern) if p.is_file()]
    return hash_of(files, lambda path: MEASURED.sub(b"", path.read_bytes()))
