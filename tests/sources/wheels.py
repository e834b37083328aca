"""Files out of the real wheels, each known by its hash.

A vLLM wheel has 310 MB, of which the patches look at eight files. Those are read out of the wheel
by byte range, straight from where uv says the wheel is; where ranges are not to be had, the wheel
is downloaded whole, once. Either way a file counts only with the hash written down here, which was
taken from wheels with the hashes that stand beside it. What was read is kept in the directory that
DSV4_SOURCES_CACHE names, and is then used without a network.

    python -m tests.sources.wheels        fetch all of it, and say how much that was
"""

import contextlib
import functools
import hashlib
import io
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

CACHE = Path(os.environ.get("DSV4_SOURCES_CACHE", "/var/cache/dsv4-sources"))

MODELS = "vllm/models/deepseek_v4"
O_PROJ = f"{MODELS}/nvidia/ops/o_proj.py"
MODEL = f"{MODELS}/nvidia/model.py"
DRAFT = f"{MODELS}/nvidia/dspark.py"
ATTENTION = f"{MODELS}/nvidia/flashinfer_sparse.py"
VISION_NVIDIA = f"{MODELS}/nvidia/vl_model.py"
VISION = f"{MODELS}/common/vl_model.py"
WINDOWS = "vllm/v1/attention/backends/mla/sparse_swa.py"
HELPERS = "vllm/v1/attention/ops/rocm_aiter_mla_sparse.py"
ARGUMENTS = "vllm/engine/arg_utils.py"
FRONTEND = {
    "0.28.0": "vllm/entrypoints/openai/cli_args.py",
    "0.29.0": "vllm/entrypoints/launchers/cli_args.py",
    "0.30.0": "vllm/entrypoints/launchers/cli_args.py",
    "0.33.0": "vllm/entrypoints/common/cli_args.py",
}
"""Where a release declares the flags of `vllm serve`, beside `ARGUMENTS`."""
CORE = "flashinfer/mla/_core.py"
KERNEL = "flashinfer/data/csrc/sparse_mla_sm120_prefill.cu"
HEADERS = "flashinfer/data/include/flashinfer/attention/sparse_mla_sm120"
SOFTMAX = f"{HEADERS}/common/online_softmax.cuh"
PREFILL = f"{HEADERS}/prefill_kernel.cuh"


@dataclass(frozen=True, eq=False)
class Wheel:
    """One wheel on the package registry, and the files wanted of it."""

    name: str
    version: str
    sha256: str
    files: Mapping[str, str]
    """SHA-256 by path."""

    @property
    def kept(self) -> Path:
        """Where its files are kept."""
        return CACHE / f"{self.name}-{self.version}"


FLASHINFER_0_6_18_FILES = {
    CORE: "a270d84f420133c1a9653e5e109508160cd5dc873ff6a36e5099afdebdfae937",
    KERNEL: "f7cb21078f1f6d997a3f96f1513eaa8b923ca57b4d17156952ec476e56d60cad",
    SOFTMAX: "4b7110122e9576d72f4f40ab9b999e4f95f33738d69cf21f8f8a5448c382c459",
    PREFILL: "5f005980cff1606fc1a239faeb93d1d697710c92014d549e4425e9db04f675e0",
}

FLASHINFER_0_6_18 = Wheel(
    "flashinfer-python",
    "0.6.18",
    "d5d26edb48f8def0bf28b2c94415aef7f0754e2cd9e3cb3d6e7081262d068aad",
    FLASHINFER_0_6_18_FILES,
)
FLASHINFER_0_6_18_POST1 = Wheel(
    "flashinfer-python",
    "0.6.18.post1",
    "adb6d2952b47131138e108bd2999b1fe18b71f1a4c0b2684f168753db9563991",
    FLASHINFER_0_6_18_FILES,
)
FLASHINFER_0_7_2 = Wheel(
    "flashinfer-python",
    "0.7.2.post1",
    "bfdc18b9e1e4d8d0730fe4343dc0e284cd0c160086de80f99888bc4867922d49",
    {CORE: "c3cf8c9635d6c00d625dd69e7dab0a5c578ec1a1766e1b4adf73d0946b7ba83b"},
)

VLLM_0_28 = Wheel(
    "vllm",
    "0.28.0",
    "817b8181f7f61b4a62dc1d5d9ab39f2bfb60a6cb86c29879a78a147b85756787",
    {
        ARGUMENTS: "75636c2a7903738f0e8954394fcedfced318d30a41598a8aca533be2ea2c38c4",
        FRONTEND["0.28.0"]: "5b6c1c61bc9d25c703086b92a3e0040d21cc054305d9a0fbe69767dfd26af646",
        O_PROJ: "ffb28e7cc44124bb2878e596617b70ec2659c7b26a2048a06facc343fa4d24e1",
        MODEL: "c01be6d313f494eb38982c8f56c314267bbf67310e7f13ca53b596b31aef4e44",
        DRAFT: "d67554bcede4f033c1663d55f3121cc9e0c24351606ee76dc4db685525762d1d",
        ATTENTION: "ce18442c029c7d4d290ef338e9757786d486ff22d1facb37a42ba19429aa1b51",
        WINDOWS: "4a85df0a4207e2223b8e243eb418e216f1c0e562a9abc906c481547a1bf31f56",
        HELPERS: "d5247f2e57b7131b9a2771da25fff85acfe53575d5cf67815779ea6dd12dfe46",
    },
)
VLLM_0_29 = Wheel(
    "vllm",
    "0.29.0",
    "e6b0dfc2b6fd307315e9b34b73cd2bfe7b6b08958eda721828e61732bba426b0",
    {
        ARGUMENTS: "950cb3b650c081d6d36d43d73e3ecd669b44eabd4fe8395b92e399c7a89b8011",
        FRONTEND["0.29.0"]: "7f4388428da9a2b2922153816b8f48f3ed1bca4be1a436c6a6f6e6820291c14c",
        O_PROJ: "ffb28e7cc44124bb2878e596617b70ec2659c7b26a2048a06facc343fa4d24e1",
        MODEL: "a1c37754fcc5f0ceafc9e090717f42f1befbcead70678d3db1fc4d23ea2c07f7",
        DRAFT: "f8ff6ceb688cfec6a6798d2f3de466dabbd904c6fc5a205e1c004e3968daed35",
        ATTENTION: "6c55bde6145d5cf3cac1a2b0d30deb4faa78d8ea2b6bad8ca3f92078ffe7a133",
        WINDOWS: "ffe7682bebc793bdb386503d888ec83f19f31c108b5da8878e8a69d8cf191e6c",
        HELPERS: "86aba225a6493537d97b8835e2372836ae3c87e8452fe024cff85303d9611b39",
    },
)
VLLM_0_30 = Wheel(
    "vllm",
    "0.30.0",
    "eb3e11bab695d085098579a6eda2d602419adec3826ebfbcce9a3ffa543eb62e",
    {
        ARGUMENTS: "ead004ca266419cd25f54a7aefc0e20e1eb046f363b7f5cc977e14f52ee44bb1",
        FRONTEND["0.30.0"]: "859704a8c7d0e0769a7b92c5bdc269bbfc391cb39487c3fb579064a683bd3e34",
        O_PROJ: "542dcb9ca265a6e788b7f061a2e33a2e74ab6f704b089d23ba4034317409406a",
        MODEL: "21f615c26d95c77cb65b8b7b40bee01a9674a4a5c35e3727ca693f72a1237829",
        DRAFT: "f8ff6ceb688cfec6a6798d2f3de466dabbd904c6fc5a205e1c004e3968daed35",
        ATTENTION: "b113ad8626b96b76cdded9447aae1126cabfb39bb0bfe87ac5dcdd082ceee629",
        VISION_NVIDIA: "e009b02cf58c234be398e3342ad197db1006e622e0803d35c467c2650dacea41",
        VISION: "ca731be657a26216dd2a82436b413b522330d8517aba82232f6e20da196a1bfb",
        WINDOWS: "a47853ad8a3fe40f24704592581ea323a18041b84610df010a5534da634e311e",
        HELPERS: "feec664be5045fd1ba13b8f6ef83b52c96910ddc78baca0431bcf610c9e8f5cc",
    },
)
VLLM_0_33 = Wheel(
    "vllm",
    "0.33.0",
    "e9e404f52c8494b69bd83fe99fe7ecfa9f6b89fbd156d2a9639c24ea41d6d606",
    {
        ARGUMENTS: "f97af20917395ae717976f6022a78dd996a63c564a31db98567dd979cf0e2aa8",
        FRONTEND["0.33.0"]: "4e9843cfc6c3c24338ff0510f8e3fbaec2c5390451eb27060d14f4f16c72924c",
        O_PROJ: "f2893ee6458eef50a371aae835b03fe1296f60f604236ab56235235637836e91",
        MODEL: "7f27d2167dc225d2f7d773cb5256e4a1736fdee14c09d2c204f5ecdbabd60c7f",
        DRAFT: "6bd2a61ff89f5bbe56f6e4084e20fc4234fdbc5f6ef9b77c3a2ea4d13e006e5e",
        ATTENTION: "f9add43cb828118e141db6b925d7f756524226cd91ede0ab6fe26b1b1c78b1de",
        VISION_NVIDIA: "e009b02cf58c234be398e3342ad197db1006e622e0803d35c467c2650dacea41",
        VISION: "80e9dbdd75cabc38722ce8e6f55a9b82176272f5508c21dbe82772925d0cd75b",
        WINDOWS: "56594499e686d287e4fbfd2586591f91cfbee9ad62976040e166d022373a3167",
        HELPERS: "efa28d9acb9a9cf0904454478f2fc39c7e1674c479462563691ba7453937fee1",
    },
)

RELEASES: Mapping[str, tuple[Wheel, Wheel]] = {
    "0.28.0": (VLLM_0_28, FLASHINFER_0_6_18),
    "0.29.0": (VLLM_0_29, FLASHINFER_0_6_18),
    "0.30.0": (VLLM_0_30, FLASHINFER_0_6_18_POST1),
    "0.33.0": (VLLM_0_33, FLASHINFER_0_7_2),
}
"""vLLM with the FlashInfer that its route installs; 0.28.0's own pin cannot draft (its table has no
kernel 192 wide), which is why that route has a newer one."""


def text(release: str, path: str) -> str:
    """Return one file of a release."""
    wheel = next(wheel for wheel in RELEASES[release] if path in wheel.files)
    return (fetched(wheel) / path).read_text()


def site(release: str, root: Path) -> Path:
    """Lay out a release's files as an environment's site-packages has them."""
    for wheel in RELEASES[release]:
        kept = fetched(wheel)
        for path in wheel.files:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(kept / path, root / path)
    return root


@functools.cache
def fetched(wheel: Wheel) -> Path:
    """Return the directory with a wheel's files, all there and all right."""
    wrong = [path for path, sha256 in wheel.files.items() if not _right(wheel.kept / path, sha256)]
    if wrong:
        url = _url(wheel)
        with _open(url, wheel) as handle, zipfile.ZipFile(handle) as archive:
            for path in wrong:
                data = archive.read(path)
                found = hashlib.sha256(data).hexdigest()
                if found != wheel.files[path]:
                    raise ValueError(
                        f"{wheel.name} {wheel.version}: {path} has sha256 {found}, wanted"
                        f" {wheel.files[path]}"
                    )
                _keep(wheel.kept / path, data)
    return wheel.kept


def _right(path: Path, sha256: str) -> bool:
    """Tell whether a kept file is what it should be."""
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def _keep(path: Path, data: bytes) -> None:
    """Write one file into the cache, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as handle:
        handle.write(data)
    Path(handle.name).replace(path)


def _url(wheel: Wheel) -> str:
    """Ask uv where the wheel for the target is; it reads metadata only.

    pip would say so too, but downloads what it reports.
    """
    answer = subprocess.run(
        [
            *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-deps", "--no-header"),
            *("--format=pylock.toml", "--only-binary=:all:", "--python-version=3.12"),
            *("--python-platform=aarch64-manylinux_2_28", "-"),
        ],
        input=f"{wheel.name}=={wheel.version}\n",
        check=True,
        capture_output=True,
        text=True,
    )
    (found,) = tomllib.loads(answer.stdout)["packages"][0]["wheels"]
    if found["hashes"]["sha256"] != wheel.sha256:
        raise ValueError(
            f"{wheel.name} {wheel.version}: the registry's wheel has sha256"
            f" {found['hashes']['sha256']}, wanted {wheel.sha256}"
        )
    return str(found["url"])


@contextlib.contextmanager
def _open(url: str, wheel: Wheel) -> Iterator[IO[bytes]]:
    """Open a wheel by byte ranges, or whole where the server gives none."""
    try:
        ranges = Ranges(url)
    except ValueError:
        with _downloaded(url, wheel) as whole:
            yield whole
    else:
        yield io.BufferedReader(ranges, 1 << 20)


@contextlib.contextmanager
def _downloaded(url: str, wheel: Wheel) -> Iterator[IO[bytes]]:
    """Fetch the whole wheel into a file that has no name."""
    CACHE.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.TemporaryFile(dir=CACHE) as handle:
        with urllib.request.urlopen(url, context=_context(url)) as answer:
            while chunk := answer.read(1 << 20):
                digest.update(chunk)
                handle.write(chunk)
        if digest.hexdigest() != wheel.sha256:
            raise ValueError(
                f"{wheel.name} {wheel.version}: what was downloaded has sha256"
                f" {digest.hexdigest()}, wanted {wheel.sha256}"
            )
        yield handle


class Ranges(io.RawIOBase):
    """A file on a server, read where it is asked for."""

    read_bytes = 0

    def __init__(self, url: str) -> None:
        self.url, self.place = url, 0
        request = urllib.request.Request(url, headers={"Range": "bytes=0-0"})
        with urllib.request.urlopen(request, context=_context(url)) as answer:
            if getattr(answer, "status", None) != 206:
                raise ValueError("the server gives no ranges")
            self.size = int(answer.headers["Content-Range"].rpartition("/")[2])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.place = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}[whence]
        )
        return self.place

    def readinto(self, buffer: Any) -> int:
        end = min(self.size, self.place + len(buffer))
        if end <= self.place:
            return 0
        wanted = f"bytes={self.place}-{end - 1}"
        request = urllib.request.Request(self.url, headers={"Range": wanted})
        with urllib.request.urlopen(request, context=_context(self.url)) as answer:
            data = answer.read()
        buffer[: len(data)] = data
        self.place += len(data)
        Ranges.read_bytes += len(data)
        return len(data)


def _context(url: str) -> ssl.SSLContext | None:
    """Trust the certificates that pip is told to trust."""
    if not url.startswith("https:"):
        return None
    return ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))


def fetch_all() -> list[Path]:
    """Fetch every file of every wheel, several at a time: most of it is waiting."""
    every = dict.fromkeys(wheel for pair in RELEASES.values() for wheel in pair)
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(fetched, every))


if __name__ == "__main__":
    sys.stdout.write("".join(f"{one}\n" for one in fetch_all()))
    sys.stdout.write(f"{Ranges.read_bytes / 1e6:.1f} MB read\n")
