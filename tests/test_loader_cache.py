"""A cache that is damaged, read-only, missing, full, or another user's costs a rebuild and no more."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import warnings
from pathlib import Path

import pytest
from processes import compilations, counting_compiler, factor_of, in_child, python, write_scale

import jit_loader

root_only = pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount, or to give a folder away")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FOLDFUSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compiler(tmp_path, monkeypatch) -> Path:
    script = counting_compiler(tmp_path / "compiler")
    monkeypatch.setenv("CXX", str(script))
    return script


def load_with_warnings(source) -> tuple[float, list[str]]:
    """The kernel's factor, loaded twice, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = factor_of(source)
        assert factor_of(source, defines={"FACTOR": 5}) == 5
    return first, [str(warning.message) for warning in caught]


# ---- damage


def the_build(cache: Path) -> Path:
    (folder,) = cache.glob("builds/*/*")
    return folder


def truncate_library(folder: Path) -> None:
    library = folder / "kernels.so"
    library.write_bytes(library.read_bytes()[:-100])


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "kernels.so").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "kernels.so").write_bytes(content)


def take_library_of_another(folder: Path) -> None:
    shutil.copy(another_build(folder) / "kernels.so", folder / "kernels.so")


def take_all_of_another(folder: Path) -> None:
    other = another_build(folder)
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


def another_build(folder: Path) -> Path:
    """A build of the same source with another factor, in another cache."""
    elsewhere = folder.parents[2] / "elsewhere"
    source = folder.parents[2].parent / "scale.cu"
    in_child(_with_another_factor, source, env={"FOLDFUSE_CACHE": str(elsewhere)})
    return the_build(elsewhere)


def _with_another_factor(source):
    return factor_of(source, defines={"FACTOR": 99})


def change_manifest(folder: Path, **changes) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


DAMAGE = {
    "library truncated": truncate_library,
    "a bit of the library flipped": flip_a_bit,
    "library emptied": lambda folder: (folder / "kernels.so").write_bytes(b""),
    "library missing": lambda folder: (folder / "kernels.so").unlink(),
    "library of another build": take_library_of_another,
    "all of another build": take_all_of_another,
    "manifest truncated": lambda folder: os.truncate(folder / "manifest.json", 100),
    "manifest emptied": lambda folder: (folder / "manifest.json").write_text(""),
    "manifest of another kind": lambda folder: (folder / "manifest.json").write_text("[1, 2]"),
    "manifest without headers": lambda folder: change_manifest(folder, read=None),
    "log missing": lambda folder: (folder / "log.txt").unlink(),
    "folder emptied": lambda folder: [file.unlink() for file in folder.iterdir()],
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_build_is_made_anew(tmp_path, cache, compiler, damage):
    source = write_scale(tmp_path)
    assert in_child(factor_of, source) == 3
    DAMAGE[damage](the_build(cache))
    before = compilations(compiler)
    assert in_child(factor_of, source) == 3
    assert compilations(compiler) == before + 1
    assert in_child(factor_of, source) == 3
    assert compilations(compiler) == before + 1
    assert len(list(cache.glob("builds/*/*"))) == 1 and not list(cache.glob("staging/*"))


# ---- folders


def test_a_missing_cache_is_made(tmp_path, compiler, monkeypatch):
    deep = tmp_path / "not" / "there" / "yet"
    monkeypatch.setenv("FOLDFUSE_CACHE", str(deep))
    source = write_scale(tmp_path)
    assert in_child(load_with_warnings, source) == (3, [])
    shutil.rmtree(deep)  # and goes while it is used
    assert in_child(load_with_warnings, source) == (3, [])
    assert compilations(compiler) == 4


def test_spaces_and_letters_of_other_languages(tmp_path, compiler, monkeypatch):
    folder = tmp_path / "Ünï cödé & 折り畳み"
    folder.mkdir()
    monkeypatch.setenv("FOLDFUSE_CACHE", str(folder / "the cache"))
    source = write_scale(folder)
    assert in_child(load_with_warnings, source) == (3, [])
    assert in_child(load_with_warnings, source) == (3, [])
    assert compilations(compiler) == 2
    kernels = jit_loader.load(source).build("cuda")
    assert len(kernels.resources) == 1
    source.write_text(source.read_text().replace("FACTOR *", "FACTORY *"))
    with pytest.raises(jit_loader.KernelCompileError) as raised:
        factor_of(source)
    assert raised.value.file == str(source) and raised.value.line == 21


def test_without_home(tmp_path, compiler):
    """The home folder is then that of the user's entry in the system."""
    env = {"HOME": None, "XDG_CACHE_HOME": None, "FOLDFUSE_CACHE": None}
    home = Path(in_child(_home_of_entry, env={"HOME": None}))
    assert in_child(_cache_folder, env=env) == str(home / ".cache" / "foldfuse")
    env["XDG_CACHE_HOME"] = str(tmp_path / "xdg")
    assert in_child(factor_of, write_scale(tmp_path), env=env) == 3
    assert list((tmp_path / "xdg" / "foldfuse" / "builds").iterdir())


def _home_of_entry() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_dir


def _cache_folder() -> str:
    return str(jit_loader.cache_folder())


def expect_temporary(source: Path, env: dict | None = None) -> str:
    """Loads work, with one warning that says where, and are forgotten."""
    factor, messages = in_child(load_with_warnings, source, env=env)
    assert factor == 3
    (message,) = messages
    assert "FOLDFUSE_CACHE" in message
    return message


def test_a_file_in_place_of_the_cache(tmp_path, cache, compiler):
    cache.write_text("in the way")
    assert "exists" in expect_temporary(write_scale(tmp_path))
    assert cache.read_text() == "in the way"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 200 kB, mounted at the cache's place."""
    place = tmp_path / "cache"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k,mode=700", "foldfuse-test", place], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"can't mount: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@root_only
@pytest.mark.parametrize("free", [0, 4, 16, 40])
def test_a_full_disk(tmp_path, small_disk, cache, compiler, free):
    """It fills up before, while and after the compiler writes, as `free` kB are left."""
    (small_disk / "filler").write_bytes(bytes((200 - free) * 1024))
    message = expect_temporary(write_scale(tmp_path))
    assert "No space left" in message or "Invalid" in message
    (small_disk / "filler").unlink()
    before = compilations(compiler)
    assert in_child(load_with_warnings, tmp_path / "scale.cu") == (3, [])
    assert compilations(compiler) == before + 2


@root_only
def test_a_read_only_cache_is_still_read(tmp_path, small_disk, cache, compiler):
    source = write_scale(tmp_path)
    assert in_child(factor_of, source) == 3
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert in_child(factor_of, source) == 3
    assert compilations(compiler) == 1
    assert "Read-only" in expect_temporary(source)  # which builds a second one
    assert compilations(compiler) == 2


@root_only
def test_a_cache_of_another_user_is_not_trusted(tmp_path, cache, compiler):
    """It is neither written nor read: whoever owns it could have put anything there."""
    source = write_scale(tmp_path)
    cache.mkdir()
    os.chown(cache, 1234, 1234)
    assert "user 1234" in expect_temporary(source)
    assert list(cache.iterdir()) == []


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_cache_without_permission(tmp_path, cache, compiler):
    cache.mkdir(mode=0o500)
    assert "denied" in expect_temporary(write_scale(tmp_path))
    assert list(cache.iterdir()) == []


def test_the_temporary_cache_is_removed(tmp_path, cache, monkeypatch):
    cache.write_text("in the way")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary), "FOLDFUSE_CACHE": str(cache)}
    script = (
        "import sys; sys.path.insert(0, 'tests'); import processes, pathlib;"
        "print(processes.factor_of(pathlib.Path(sys.argv[1])))"
    )
    done = python("-c", script, str(write_scale(tmp_path)), env=env)
    assert done.stdout == "3.0\n", done.stderr
    assert list(temporary.iterdir()) == []


# ---- cleaning up


def builds_of(cache: Path) -> set[str]:
    return {str(folder) for folder in cache.glob("builds/*/*")}


def test_clean_drops_what_was_not_used_for_longest(tmp_path, cache, compiler):
    source = write_scale(tmp_path)
    names = {}
    for age, factor in ((40, 1), (30, 2), (20, 3), (10, 4)):
        before = builds_of(cache)
        factor_of(source, defines={"FACTOR": factor})
        (names[factor],) = builds_of(cache) - before
        os.utime(names[factor], (time.time() - age * 86400,) * 2)
    size = sum(file.stat().st_size for file in Path(names[4]).iterdir())
    assert jit_loader.clean() == 0 and builds_of(cache) == set(names.values())
    assert in_child(_use_first, source) == 1  # the oldest is used
    assert abs(jit_loader.clean(max_bytes=2 * size + size // 2) - 2 * size) < size // 2
    assert builds_of(cache) == {names[1], names[4]}
    jit_loader.clean(max_age_days=5)
    assert builds_of(cache) == {names[1]}
    assert jit_loader.clean(max_bytes=0) > 0
    assert builds_of(cache) == set() and not list(cache.glob("builds/*"))
    count = compilations(compiler)
    assert factor_of(source, defines={"FACTOR": 4}) == 4  # what is loaded goes on to work
    assert compilations(compiler) == count


def _use_first(source):
    return factor_of(source, defines={"FACTOR": 1})


def test_the_cache_does_not_grow_without_bound(tmp_path, cache, compiler):
    """Each process that builds cleans up after its first build."""
    source = write_scale(tmp_path)
    for factor in range(4):
        assert in_child(_with_small_limit, source, factor) == factor
    assert len(builds_of(cache)) == 2


def _with_small_limit(source, factor):
    jit_loader.clean.__defaults__ = (50_000, None)
    return factor_of(source, defines={"FACTOR": factor})
