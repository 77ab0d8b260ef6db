"""Tuned configs: shipped, the user's over them; nearest larger; refused again; stale; corrupt."""

import dataclasses
import json

import pytest
import torch

import tilery
from tilery import device, settings, tuned
from tilery.errors import BadTunedFile
from tilery.ops import matmul
from tilery.spec import Bucket, TensorSpec

K, N, M = 256, 8192, 4096
B = TensorSpec.contiguous((K, N), torch.float32, "cpu")


def specs(m=M):
    return TensorSpec.contiguous((m, K), torch.float32, "cpu"), B


BUCKET = matmul.bucket(*specs())


def entry(config, m=M, ms=1.0, exact=BUCKET.exact, kernel="numba", **more):
    blank = {
        "interval": [0.9, 1.1],
        "error": 1e-7,
        "bit_identical": True,
        "registers": None,
        "spills": None,
        "roof": 0.5,
    }
    stamp = {"versions": {}, "device": "CPU", "when": "2026-01-01T00:00:00Z"}
    return {"kernel": kernel, "exact": exact, "scaled": {"m": m}, "config": config, "ms": ms, **blank, **stamp, **more}


@pytest.fixture
def store(tmp_path):
    """Writes the user's file for this CPU."""

    def write(text):
        path = tmp_path / "matmul" / f"{device.slug(torch.device('cpu'))}.json"
        path.parent.mkdir(exist_ok=True)
        document = {"schema": 1, "op": "matmul", "device": "CPU", "entries": text}
        data = text if isinstance(text, str | bytes) else json.dumps(document, indent=1)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        tuned.reload()
        return path

    with settings.override(config_dir=tmp_path):
        yield write
    tuned.reload()


def configs():
    found = matmul.kernel("numba").configs(*specs())
    return [c for c in found if c != matmul.kernel("numba").default(*specs())]


def plan(m=M):
    return matmul.plan(specs(m))


def test_tuned_beats_default_and_explicit_beats_tuned(store):
    first, *_ = configs()
    store([entry(dataclasses.asdict(first))])
    assert (plan().config, plan().source) == (first, "tuned")
    explicit = matmul.kernel("numba").default(*specs())
    chosen = matmul.plan(specs(), "numba", explicit)
    assert (chosen.config, chosen.source) == (explicit, "explicit")


def test_the_nearest_larger_bucket_is_taken(store):
    one, two = configs()[:2]
    store([entry(dataclasses.asdict(one), m=M), entry(dataclasses.asdict(two), m=2 * M)])
    assert plan(1).config == plan(M).config == one
    assert plan(M + 1).config == plan(2 * M).config == two
    assert plan(2 * M + 1).source == "default"


def test_another_exact_part_does_not_carry_over(store):
    store([entry(dataclasses.asdict(configs()[0]), exact=f"n=17,k={K},fp32,nn")])
    assert plan().source == "default"


def test_the_fastest_in_the_bucket_wins_unless_it_refuses(store, monkeypatch):
    slow, fast = configs()[:2]
    store([entry(dataclasses.asdict(slow), ms=2.0), entry(dataclasses.asdict(fast), ms=1.0)])
    assert plan().config == fast
    monkeypatch.setattr(
        matmul.kernel("numba"), "refusal", lambda a, b, config=None: "strides" if config == fast else None
    )
    assert plan().config == slow


def test_stale_entries_are_used_and_said(store):
    store([entry(dataclasses.asdict(configs()[0]), versions={"numba": "0.1.0"})])
    assert plan().source.startswith("tuned (stale: numba 0.1.0, now ")
    store([entry(dataclasses.asdict(configs()[0]), versions={"tilery": "0.0.1", "driver": "580"})])
    assert plan().source == f"tuned (stale: tilery 0.0.1, now {tilery.__version__})"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 1,\n "entries": [\n  nonsense]}', r"\.json:3: Expecting value; mend it or move it away"),
        (b"\xff\xfe", r"\.json:1: .*can't decode"),
        ('{"schema": 99, "entries": []}', r'\.json:1: expected {"schema": 1'),
        (
            '{"schema": 1, "entries": [\n{"kernel": "numba"},\n{"config": {}}]}',
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
        ({"scaled": {"m": "64"}}, "scaled m must be a number, got '64'"),
        ({"ms": None}, "ms must be a number, got None"),
        ({"versions": None}, "versions must be dict, got None"),
        ({"config": "fast"}, "config must be dict, got 'fast'"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(store, wrong, message):
    store([entry({}) | wrong])
    with pytest.raises(BadTunedFile, match=rf"\.json:\d+: {message}"):
        plan()


def test_the_line_is_that_of_the_bad_entry(store):
    good = json.dumps(entry(dataclasses.asdict(configs()[0])))
    store('{"schema": 1, "entries": [\n' + good + ",\n\n" + '{"kernel": 1}\n]}')
    with pytest.raises(BadTunedFile, match=r"\.json:4: entry lacks"):
        plan()


def test_an_unknown_config_field_is_named(store):
    store([entry({"warp_drive": 9})])
    with pytest.raises(BadTunedFile, match=r"\.json:\d+: numba has no config .*warp_drive"):
        plan()


def test_nearest_wants_every_scaled_value_no_smaller():
    entries = [tuned.Entry(**entry({}, m=8) | {"scaled": {"m": 8, "s": 4}})]
    assert tuned.nearest(entries, Bucket(BUCKET.exact, {"m": 8, "s": 4})) == entries
    assert tuned.nearest(entries, Bucket(BUCKET.exact, {"m": 8, "s": 5})) == []
