"""Tuned configs: shipped, the user's over them; nearest larger; refused again; stale; corrupt; written."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
import threading

import pytest
import torch

import plant
import tilery
from plant import TILES, Tile
from tilery.base import settings
from tilery.base.errors import BadTunedFile, NotWritten
from tilery.base.spec import Bucket, TensorSpec
from tilery.core import tuned, tuned_files
from tilery.hardware import device
from tilery.ops import softmax

M, N = 4096, 256
SLUG = device.slug(torch.device("cpu"))
ONE, TWO = Tile(1), Tile(2)


@pytest.fixture(autouse=True)
def _tiles(monkeypatch):
    """softmax has a kernel more, whose configs are tuned here."""
    plant.add(monkeypatch, softmax, TILES, plant.Tiles())
    yield
    tuned.reload()


def specs(m=M):
    return (TensorSpec.contiguous((m, N), torch.float32, "cpu"),)


BUCKET = softmax.bucket(softmax.call(specs()))


def entry(config, m=M, ms=1.0, exact=BUCKET.exact, kernel=TILES, **more):
    blank = {
        "interval": [0.9, 1.1],
        "error": 1e-7,
        "bit_identical": True,
        "registers": None,
        "spills": None,
        "roof": 0.5,
    }
    stamp = {"versions": {}, "device": "CPU", "when": "2026-01-01T00:00:00Z", "rank": 0, "origin": "", "case": None}
    return {"kernel": kernel, "exact": exact, "scaled": {"m": m}, "config": config, "ms": ms, **blank, **stamp, **more}


@pytest.fixture
def store(tmp_path):
    """Writes the user's file for this CPU."""

    def write(text):
        path = tmp_path / "softmax" / f"{SLUG}.json"
        path.parent.mkdir(exist_ok=True)
        document = {"schema": 1, "op": "softmax", "device": SLUG, "entries": text}
        data = text if isinstance(text, str | bytes) else json.dumps(document, indent=1)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        tuned.reload()
        return path

    with settings.override(config_dir=tmp_path):
        yield write
    tuned.reload()


HEAD = f'{{"schema": 1, "op": "softmax", "device": "{SLUG}", "entries": ['


def plan(m=M):
    return softmax.plan(specs(m))


def test_tuned_beats_default_and_explicit_beats_tuned(store):
    store([entry(dataclasses.asdict(ONE))])
    assert (plan().kernel, plan().config, plan().source) == (TILES, ONE, "tuned")
    chosen = softmax.plan(specs(), TILES, TWO)
    assert (chosen.config, chosen.source) == (TWO, "explicit")


def test_the_nearest_larger_bucket_is_taken(store):
    store([entry(dataclasses.asdict(ONE), m=M), entry(dataclasses.asdict(TWO), m=2 * M)])
    assert plan(1).config == plan(M).config == ONE
    assert plan(M + 1).config == plan(2 * M).config == TWO
    assert plan(2 * M + 1).source == "default"


def test_another_exact_part_does_not_carry_over(store):
    store([entry(dataclasses.asdict(ONE), exact="n=17,fp32")])
    assert plan().source == "default"


def test_the_fastest_in_the_bucket_wins_unless_it_refuses(store, monkeypatch):
    store([entry(dataclasses.asdict(ONE), ms=2.0), entry(dataclasses.asdict(TWO), ms=1.0)])
    assert plan().config == TWO
    plant.refusing(monkeypatch, softmax, TILES, lambda config: "strides" if config == TWO else None)
    assert plan().config == ONE


def test_stale_entries_are_used_and_said(store):
    store([entry(dataclasses.asdict(ONE), versions={"numba": "0.1.0"})])
    assert plan().source.startswith("tuned (stale: numba 0.1.0, now ")
    store([entry(dataclasses.asdict(ONE), versions={"tilery": "0.0.1", "warp_drive": "580"})])
    assert plan().source == f"tuned (stale: tilery 0.0.1, now {tilery.__version__})"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 1,\n "entries": [\n  nonsense]}', r"\.json:3: Expecting value; mend it or move it away"),
        ('{"schema": 1, "schema": 1}', r"\.json:1: the field 'schema' stands twice; mend it"),
        ("[]", r'\.json:1: expected {"schema": 1.*, got list'),
        ('{"schema": 1, "op": "softmax", "device": "x", "notes": 1}', r"lacks \['entries'\], has unknown \['notes'\]"),
        ('{"schema": 1, "op": "softmax", "device": "x", "entries": 1}', r"\.json:1: entries must be list, got 1"),
        (
            '{"schema": 1, "op": "softmax", "device": "nvidia_h100", "entries": []}',
            rf"expected the entries of softmax on {SLUG}, got those of softmax on nvidia_h100; .*configs import",
        ),
        (HEAD.replace("softmax", "matmul") + "]}", r"\.json:1: expected .* got those of matmul on"),
        (b"\xff\xfe", r"\.json:1: .*can't decode"),
        ('{"schema": 99, "entries": []}', r'\.json:1: expected {"schema": 1.*, got schema 99'),
        (
            HEAD + '\n{"kernel": "numba"},\n{"config": {}}]}',
            r"\.json:2: entry lacks \['bit_identical'",
        ),
    ],
)
def test_a_corrupt_file_is_an_error_with_its_line_and_stays(store, text, message):
    path = store(text)
    with pytest.raises(BadTunedFile, match=message):
        plan()
    assert path.read_bytes() == (text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scaled": 5}, "scaled must be dict, got 5"),
        ({"scaled": {"m": "64"}}, "scaled m must be a whole number, got '64'"),
        ({"ms": None}, "ms must be a number, got None"),
        ({"interval": 5}, "interval must be list, got 5"),
        ({"interval": [1.0]}, r"interval must be \[low, high\], got \[1.0\]"),
        ({"bit_identical": 1}, "bit_identical must be true or false, got 1"),
        ({"registers": True}, "registers must be a whole number or null, got True"),
        ({"kernel": "warp_drive"}, "softmax has no kernel 'warp_drive', it has "),
        ({"versions": None}, "versions must be dict, got None"),
        ({"config": "fast"}, "config must be dict, got 'fast'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(store, wrong, message):
    store([entry({}) | wrong])
    with pytest.raises(BadTunedFile, match=rf"\.json:\d+: {message}"):
        plan()


def test_the_line_is_that_of_the_bad_entry(store):
    good = json.dumps(entry(dataclasses.asdict(ONE)))
    store(HEAD + "\n" + good + ",\n\n" + '{"kernel": 1}\n]}')
    with pytest.raises(BadTunedFile, match=r"\.json:4: entry lacks"):
        plan()


def test_an_unknown_config_field_is_named(store):
    store([entry({"warp_drive": 9})])
    with pytest.raises(BadTunedFile, match=r"\.json:\d+: numba\.tiles has no config .*warp_drive"):
        plan()


@pytest.mark.parametrize("wrong", ["big", 1.5, True, None])
def test_a_config_value_of_the_wrong_kind_is_named(store, wrong):
    store([entry({"tile": wrong})])
    with pytest.raises(BadTunedFile, match=r"\.json:\d+: numba\.tiles has no config .*tile must be int, got "):
        plan()


@pytest.mark.parametrize("old", [{"block": 2}, {"tile": 2, "kind": "simple"}, {"block": 2, "kind": "simple"}])
def test_fields_and_values_of_an_older_tilery_are_read_under_their_names_of_now(store, old):
    store([entry(old)])
    assert (plan().config, plan().source) == (TWO, "tuned")
    assert tuned.present_fields(Tile, old)["tile"] == 2


@pytest.mark.parametrize(
    ("fields", "now"),
    [
        ({"tile": 3, "kind": "other"}, {"tile": 3, "kind": "other"}),  # a value that has no older spelling
        ({"kind": 5}, {"kind": 5}),  # of another kind: whoever makes the config says so
        ({}, {}),
    ],
)
def test_what_has_no_older_name_stays(fields, now):
    assert tuned.present_fields(Tile, fields) == now
    assert tuned.present_fields(plant.NoChoice, fields) == fields, "a config need not have older names"


def test_an_unknown_field_of_an_older_file_is_named_as_it_stands(store):
    store([entry({"block": 2, "warps": 4})])
    with pytest.raises(BadTunedFile, match=r"has no config {'block': 2, 'warps': 4}: .*'warps'"):
        plan()


def test_rank_goes_before_time(store):
    store([entry(dataclasses.asdict(ONE), ms=1.0, rank=1), entry(dataclasses.asdict(TWO), ms=1.001, rank=0)])
    assert plan().config == TWO


def test_an_entry_beyond_the_kernels_limits_is_refused_by_name_and_the_next_is_taken(store, capsys):
    good, bad = dataclasses.asdict(ONE), {"tile": 9}
    path = store([entry(bad), entry(good, rank=1)])
    with settings.override(explain=True):
        made = plan()
    assert (made.config, made.source) == (ONE, "tuned")
    said = capsys.readouterr().err
    assert f"{TILES} as tuned in " in said and f"{path}:" in said and "refused: tile of 9 is more than 8" in said
    store([entry(bad)])
    assert plan().source == "default" and "tile of 9 is more than 8" in plan().refusals.values()


def test_nearest_wants_every_scaled_value_no_smaller():
    entries = [tuned.Entry(**entry({}, m=8) | {"scaled": {"m": 8, "s": 4}})]
    assert tuned.nearest(entries, Bucket(BUCKET.exact, {"m": 8, "s": 4})) == entries
    assert tuned.nearest(entries, Bucket(BUCKET.exact, {"m": 8, "s": 5})) == []


# Written


def made(config, **more):
    return tuned.Entry(**entry(config, **more))


def held(path):
    return [(e["kernel"], e["scaled"]["m"], e["ms"]) for e in json.loads(path.read_text())["entries"]]


def test_what_is_written_is_used_at_once_and_others_are_kept(tmp_path):
    with settings.override(config_dir=tmp_path):
        assert plan().source == "default"
        path = tuned.write(softmax, SLUG, [made(ONE), made(dataclasses.asdict(TWO), ms=2.0, rank=1)])
        assert path == tmp_path / "softmax" / f"{SLUG}.json" and (plan().config, plan().source) == (ONE, "tuned")
        tuned.write(softmax, SLUG, [made(TWO, m=2 * M, ms=7.0)])
        assert held(path) == [(TILES, M, 1.0), (TILES, M, 2.0), (TILES, 2 * M, 7.0)]
        tuned.write(softmax, SLUG, [made(TWO, ms=3.0)])  # the whole bucket is replaced, its runner-up too
        assert held(path) == [(TILES, M, 3.0), (TILES, 2 * M, 7.0)] and plan().config == TWO
        assert tuned.read(path, softmax)[1].line == 3
    tuned.reload()


def test_the_same_entries_give_the_same_file_in_any_order(tmp_path):
    entries = [made(ONE, m=m, ms=float(m), rank=rank) for m in (1, 2) for rank in (0, 1)]
    one, two = (tuned.write(softmax, SLUG, es, tmp_path / n) for n, es in (("a", entries), ("b", entries[::-1])))
    assert one.read_bytes() == two.read_bytes() and one.read_text().count("\n") == 6


def test_a_corrupt_file_is_not_written_over(store):
    path = store("{")
    with pytest.raises(BadTunedFile, match=r"\.json:1: "):
        tuned.write(softmax, SLUG, [made(ONE)])
    assert path.read_text() == "{"


def test_an_entry_that_could_not_be_read_is_not_written(tmp_path):
    with pytest.raises(BadTunedFile, match="roof must be a number, got None"):
        tuned.write(softmax, SLUG, [made(ONE, roof=None)], tmp_path)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_is_said_and_the_old_file_stays_whole(tmp_path, monkeypatch, step):
    path = tuned.write(softmax, SLUG, [made(ONE)], tmp_path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, full)
    with pytest.raises(
        NotWritten, match=rf"{SLUG}\.json cannot be written: No space left on device; what it held is as"
    ):
        tuned.write(softmax, SLUG, [made(TWO)], tmp_path)
    assert path.read_bytes() == before and not list(tmp_path.rglob("*.tmp"))


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotWritten, match=r"cannot be written: .*name another place"):
        tuned.write(softmax, SLUG, [made(ONE)], tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(NotWritten, match="Permission denied"):
        tuned.write(softmax, SLUG, [made(ONE)], tmp_path)


def test_a_lock_that_is_not_given_back_is_said(tmp_path, monkeypatch):
    path = tuned.write(softmax, SLUG, [made(ONE)], tmp_path)
    monkeypatch.setattr(tuned_files, "_WAIT_S", 0.05)
    script = (
        "import sys, filelock; held = filelock.FileLock(sys.argv[1]); held.acquire(); print(1, flush=True); input()"
    )
    lock = str(path.with_name(f".{path.name}.lock"))
    with subprocess.Popen([sys.executable, "-c", script, lock], stdin=-1, stdout=-1) as other:
        other.stdout.readline()
        with pytest.raises(NotWritten, match="another process holds its lock"):
            tuned.write(softmax, SLUG, [made(TWO)], tmp_path)
        other.communicate(b"\n")
    tuned.write(softmax, SLUG, [made(TWO)], tmp_path)


def test_two_writers_of_one_file_both_survive(tmp_path):
    def writes(first):
        for m in range(first, 100, 2):
            tuned.write(softmax, SLUG, [made(ONE, m=m)], tmp_path)

    threads = [threading.Thread(target=writes, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    path = tmp_path / "softmax" / f"{SLUG}.json"
    assert [m for _, m, _ in held(path)] == list(range(100)) and not list(tmp_path.rglob("*.tmp"))


def test_candidates_are_kept_by_origin_and_bucket(tmp_path):
    with settings.override(config_dir=tmp_path):
        assert tuned.candidates(softmax, SLUG) == []
        tuned.write_candidates(softmax, SLUG, [made(ONE, origin="H100")])
        tuned.write_candidates(softmax, SLUG, [made(ONE, origin="H20"), made(TWO, origin="H100")])
        found = tuned.candidates(softmax, SLUG)
        assert plan().source == "default"  # a candidate is not an entry
    fields = [(dataclasses.asdict(TWO), "H100"), (dataclasses.asdict(ONE), "H20")]
    assert found == [(BUCKET.exact, {"m": M}, TILES, config, origin) for config, origin in fields]


def test_the_stamp_says_what_is_here_and_is_not_stale():
    stamp = tuned.versions("numba", torch.device("cpu"))
    assert set(stamp) == {"tilery", "torch", "numba"} and stamp["tilery"] == tilery.__version__
    assert tuned.source(made({}, versions=stamp)) == "tuned"
    assert tuned.stale(made({}, versions=stamp | {"torch": "1.0"})) == [f"torch 1.0, now {torch.__version__}"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n", "535.54.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\n", "580.82.07"),
        ("something else\n", None),
    ],
)
def test_the_driver_is_read_from_what_its_module_says(text, version):
    assert tuned._driver_in(text) == version
